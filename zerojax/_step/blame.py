"""Which device computed something else: decided from checksums, alike in every process."""

import dataclasses
import json
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax import _compat
from zerojax._kernel.pieces import unique
from zerojax._kernel.travel import names_in
from zerojax._state import state as _state
from zerojax._types import Device, PyTree

MOST_NAMED = 4  # leaves and devices that a message names before it counts the rest
DIFFERS = "differs"
Rows = dict[str, list[int]]  # checksums, by the number of their device
DETERMINISTIC = "xla_gpu_exclude_nondeterministic_ops"
NOT_DETERMINISTIC = (
    "Three runs gave three results, so the program is not deterministic. On GPUs scatters and some "
    "attention kernels sum in any order. Steps with replay_every= are compiled with "
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


@dataclasses.dataclass
class Checksums:
    """What is kept of one run: checksums of what each device sent, in the order of the program's
    collectives, and of its part of each result."""

    sent: Rows
    held: Rows


class Checked(NamedTuple):
    path: str
    spec: PartitionSpec


def named(results: tuple[PyTree, PyTree]) -> list[Checked]:
    """Returns the path of each result, and how it is sharded."""
    new, metrics = map(_state.leaves_with_paths, results)
    paths = [leaf.name for leaf in new] + [f"metrics/{leaf.name}" for leaf in metrics]
    values = (leaf.value for leaf in (*new, *metrics))
    return [Checked(*pair) for pair in zip(paths, map(spec_of, values), strict=True)]


def spec_of(value: jax.Array) -> PartitionSpec:
    place = value.sharding
    return place.spec if isinstance(place, NamedSharding) else PartitionSpec()


# -- before anything is known to differ


def summary(first: Checksums, second: Checksums, results: Sequence[Checked], mesh: Mesh) -> str:
    """Returns what one process tells the others: that its two runs differ, or one checksum of each
    part of the results that it holds."""
    if first != second:
        return DIFFERS
    found: dict[str, int] = {}
    for at, result in enumerate(results):
        for part, held in _copies(second.held, at, result, mesh).items():
            checksum, *others = set(held.values())
            if others:
                return DIFFERS
            # Of all results that are sharded alike: a mesh of 400 devices holds many of each.
            key = f"{sorted(names_in(result.spec))} {part}"
            found[key] = zlib.crc32(f"{found.get(key)} {checksum}".encode())
    return json.dumps(found)


def agree(summaries: Iterable[str]) -> bool:
    """Whether no process has a difference, and those that hold the same part have the same."""
    seen: dict[str, int] = {}
    for text in summaries:
        if text == DIFFERS:
            return False
        for part, checksum in json.loads(text).items():
            if seen.setdefault(part, checksum) != checksum:
                return False
    return True


def _copies(
    held: Rows, at: int, result: Checked, mesh: Mesh
) -> dict[tuple[int, ...], dict[str, int]]:
    """Returns the checksums of one result, by the part of it that they are of."""
    over = sorted(mesh.axis_names.index(axis) for axis in names_in(result.spec))
    parts: dict[tuple[int, ...], dict[str, int]] = defaultdict(dict)
    places = _places(mesh)
    for device, row in held.items():
        parts[tuple(places[device][axis] for axis in over)][device] = row[at]
    return parts


@_compat.device_cache
def _places(mesh: Mesh) -> dict[str, tuple[int, ...]]:
    """Returns the place of each device in a mesh."""
    return {str(device.id): place for place, device in np.ndenumerate(mesh.devices)}


# -- once it is


def error(
    said: Mapping[int, str], results: Sequence[Checked], labels: Sequence[str], mesh: Mesh
) -> ReplayError:
    """Returns what all processes raise. `said` has, for each, its host, the numbers of
    its devices there, and its three runs."""
    told = {process: json.loads(text) for process, text in said.items()}

    def run(number: int) -> Checksums:
        parts = zip(*(own[2 + number] for own in told.values()), strict=True)
        return Checksums(*({k: row for rows in part for k, row in rows.items()} for part in parts))

    first, second, third = map(run, range(3))
    if first == second:
        where, devices, leaves = _unlike_copies(second, results, mesh)
        return _told(f"{where}, in both runs", "", devices, leaves, told, mesh)
    again = {0: first, 1: second}
    right = next((n for n, run in again.items() if run == third), None)
    wrong = second if right == 0 else first
    where, ids = _first_difference(wrong, third, labels)
    leaves = [r.path for k, r in enumerate(results) if _unlike(wrong.held, third.held, k)]
    if not where:
        where = f"in what the step leaves of {_few(leaves)}"
    if right is not None:
        vote = f" A third run gives what the {('first', 'second')[right]} gave."
    elif len(ids) > mesh.size // 2:
        vote = f" {NOT_DETERMINISTIC}"
    else:
        vote = " A third run gives another result again."
    devices = [device for device in mesh.devices.flat if str(device.id) in ids]
    return _told(f"first {where}", vote, devices, leaves, told, mesh)


def _first_difference(a: Checksums, b: Checksums, labels: Sequence[str]) -> tuple[str, set[str]]:
    """Returns where two runs part, and the devices that do so.

    Up to there all devices have received the same in both, so these computed something else. If
    they have sent the same throughout, it is the update that differs.
    """
    for at in range(min(map(len, a.sent.values()), default=0)):
        if ids := _unlike(a.sent, b.sent, at):
            return f"in what it sends to the {labels[at] if at < len(labels) else 'next sum'}", ids
    ids = {one for one in a.held if a.held[one] != b.held[one]}
    return "", ids


def _unlike(a: Rows, b: Rows, at: int) -> set[str]:
    return {device for device in a if a[device][at] != b[device][at]}


def _unlike_copies(
    run: Checksums, results: Sequence[Checked], mesh: Mesh
) -> tuple[str, list[Device], list[str]]:
    """Returns the devices that hold another copy than most others do; all, if there is no most."""
    odd, leaves = set[str](), []
    for at, result in enumerate(results):
        for held in _copies(run.held, at, result, mesh).values():
            (usual, count), *others = Counter(held.values()).most_common()
            if others:
                leaves.append(result.path)
                is_clear = count > others[0][1]
                odd |= {one for one, checksum in held.items() if checksum != usual or not is_clear}
    devices = [device for device in mesh.devices.flat if str(device.id) in odd]
    whose = "its copy" if len(devices) == 1 else "their copies"
    return f"in {whose} of {_few(unique(leaves))}", devices, unique(leaves)


def _told(
    where: str,
    vote: str,
    devices: Sequence[Device],
    leaves: Sequence[str],
    told: Mapping[int, Sequence],
    mesh: Mesh,
) -> ReplayError:
    names = []
    for device in devices:
        host, numbers, *_ = told[device.process_index]
        here = f"{device.device_kind} {numbers[str(device.id)]}"
        names.append(f"device {device.id} (process {device.process_index} on {host}, {here})")
    verb, many = ("differs", "it") if len(names) == 1 else ("differ", "them")
    if len(names) == mesh.size > 1:
        names = [f"all {mesh.size} devices"]
    remedy = (
        f"The state before the step is as it was: save it, and go on without {many}."
        if len(devices) < mesh.size
        else "The state before the step is as it was."
    )
    return ReplayError(
        f"a step ran twice on the same state and batch, and {_few(names)} {verb} {where}.{vote} "
        f"{remedy}",
        devices,
        leaves,
    )


def _few(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
