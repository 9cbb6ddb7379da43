"""Which device computed something else: decided from checksums, alike in every process."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax._specs import names_in
from zerojax._table import few
from zerojax._types import Device

MOST_NAMED = 4  # leaves and devices that a message names before it counts the rest
DETERMINISTIC = "xla_gpu_exclude_nondeterministic_ops"
NOT_DETERMINISTIC = (
    "Three runs gave three results, so the program is not deterministic. On GPUs scatters and some "
    "attention kernels sum in any order. The program that checks is compiled with "
    f"{DETERMINISTIC}=True. If your compiler_options= turn that off, or a kernel of yours sums so, "
    "nothing can be compared. A callback that returns another number each time does the same."
)


class ReplayError(RuntimeError):
    """A step ran twice, and its results differ. Every process raises it, with the same message.

    `devices` are those that computed something else; if the fault had spread before anything could
    be seen, they are all that it reached. `leaves` are the paths of the results that differ.
    """

    def __init__(self, message: str, devices: Iterable[Device], leaves: Iterable[str]) -> None:
        super().__init__(message)
        self.devices, self.leaves = tuple(devices), tuple(leaves)


class Checksums(NamedTuple):
    """What is kept of one run, alike in all processes.

    A row for each device of the mesh has checksums of what it sent, in the order of the program's
    collectives, and of its part of each result. `results` has their paths and shardings.
    """

    rows: np.ndarray
    results: Sequence[tuple[str, PartitionSpec]]


def spec_of(value: jax.Array) -> PartitionSpec:
    place = value.sharding
    return place.spec if isinstance(place, NamedSharding) else PartitionSpec()


def unlike_copies(run: Checksums, mesh: Mesh) -> tuple[np.ndarray, list[str]]:
    """Returns which devices hold another copy than most others do (all, if there is no most), and
    the results of which they do."""
    odd, leaves = np.zeros(mesh.size, bool), []
    numbers = np.arange(mesh.size).reshape(mesh.devices.shape)
    held = run.rows.T[-len(run.results) :]
    for (path, spec), checksums in zip(run.results, held, strict=True):
        names = names_in(spec)
        over = [at for at, axis in enumerate(mesh.axis_names) if axis in names]
        ways = math.prod(mesh.devices.shape[at] for at in over)
        # A row for each part of the result: the devices that hold it.
        holders = np.moveaxis(numbers, over, range(len(over))).reshape(ways, -1)
        unlike = (checksums[holders] != checksums[holders[:, :1]]).any(axis=1)
        for devices in holders[unlike]:
            (usual, count), (_, others), *_ = Counter(checksums[devices].tolist()).most_common()
            odd[devices] |= (checksums[devices] != usual) | (count == others)
        leaves += [path] * bool(unlike.any())
    return odd, leaves


def error(
    runs: Sequence[Checksums], labels: Sequence[str], hosts: Mapping[int, str], mesh: Mesh
) -> ReplayError:
    """Returns what all processes raise, from three runs.

    `labels` name the collectives. `hosts` has, for each process, its host and the numbers of its
    devices there.
    """
    first, second, third = (run.rows for run in runs)
    is_first, is_second = np.array_equal(first, third), np.array_equal(second, third)
    differ = (second if is_first else first) != third
    sent, held = np.split(differ, [len(labels)], axis=1)
    leaves = [path for (path, _), k in zip(runs[2].results, held.any(axis=0), strict=True) if k]
    vote = " A third run gives another result again."
    if np.array_equal(first, second):
        odd, leaves = unlike_copies(runs[1], mesh)
        whose, vote = "its copy" if odd.sum() == 1 else "their copies", ""
        where = f"in {whose} of {few(leaves, MOST_NAMED)}, in both runs"
    # Up to the first collective that differs, all devices have received the same in both runs, so
    # these computed something else. If they have sent the same throughout, it is the update.
    elif sent.any():
        at = int(sent.any(axis=0).argmax())
        odd, where = sent[:, at], f"first in what it sends to the {labels[at]}"
    else:
        odd, where = held.any(axis=1), f"first in what the step leaves of {few(leaves, MOST_NAMED)}"
    if vote and (is_first or is_second):
        vote = f" A third run gives what the {'first' if is_first else 'second'} gave."
    elif vote and odd.sum() > mesh.size // 2:
        vote = f" {NOT_DETERMINISTIC}"
    names = []
    for device in mesh.devices.ravel()[odd]:
        host, numbers = json.loads(hosts[device.process_index])
        here = f"{device.device_kind} {numbers[str(device.id)]}"
        names.append(f"device {device.id} (process {device.process_index} on {host}, {here})")
    verb, many = ("differs", "it") if len(names) == 1 else ("differ", "them")
    remedy = f": save it, and go on without {many}" if len(names) < mesh.size else ""
    if len(names) == mesh.size > 1:
        names = [f"all {mesh.size} devices"]
    return ReplayError(
        f"a step ran twice on the same state and batch, and {few(names, MOST_NAMED)} {verb} "
        f"{where}.{vote} The state before the step is as it was{remedy}.",
        mesh.devices.ravel()[odd],
        leaves,
    )
