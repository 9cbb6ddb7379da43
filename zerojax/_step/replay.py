"""`replay_every=`: runs a step twice on the same state, and compares all bits of the results.

Gains an error, and the name of a device, where a run would go on with wrong weights. It leaves the
step's own program as it is. Costs a second program, two runs of it for each k-th step, and 270
lines of code with `blame.py`.
"""

import dataclasses
import functools
import json
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.sharding import Mesh, PartitionSpec

from zerojax import _axis_types, _compat
from zerojax._features.witness import of_bits
from zerojax._plan.plan import Plan
from zerojax._run import agreement as _agreement
from zerojax._step import blame as _blame
from zerojax._step.blame import Checked, Checksums
from zerojax._types import PyTree, kinds_of

SENT = "sent"  # in the metrics of a step that checks: checksums of what each device sends
CALL = "a replayed step"


@dataclasses.dataclass
class Replays:
    """Checks the first step, and each `every`-th one after it."""

    every: int
    step: Any  # that checks: it donates nothing, and sums up what devices send
    labels: Mapping[Plan, Sequence[str]]  # of the collectives, in the order of their checksums
    calls: int = 0

    def compiled(self, args: Sequence[PyTree]) -> "Replays":
        """Returns the same for a compiled step, with a count of its own."""
        return Replays(self.every, self.step.compile(*args), self.labels)

    def __call__(self, plan: Plan, *args: PyTree, **named: PyTree) -> None:
        """Runs the step on these arguments, twice; raises `ReplayError` where that differs."""
        if any(issubclass(kind, Tracer) for kind in kinds_of((args, named))):
            raise ValueError(
                "replay_every= compares the results of two runs, and inside another jax.jit there "
                "are none. Call the step outside of it, or leave replay_every= out."
            )
        self.calls += 1
        if (self.calls - 1) % self.every:
            return
        call = functools.partial(self.run, plan, *args, **named)
        (first, _), (second, results) = call(), call()
        own = _blame.summary(first, second, results, plan.mesh)
        if _blame.agree(_agreement.told(CALL, own, plan.mesh).values()):
            return
        third, _ = call()
        runs = map(dataclasses.astuple, (first, second, third))
        # What only the process of a device knows of it.
        numbers = {str(device.id): device.local_hardware_id for device in jax.local_devices()}
        own = json.dumps([socket.gethostname(), numbers, *runs])
        said = _agreement.told(CALL, own, plan.mesh)
        raise _blame.error(said, results, self.labels.get(plan, ()), plan.mesh)

    def run(self, plan: Plan, *args: PyTree, **named: PyTree) -> tuple[Checksums, list[Checked]]:
        """Returns what is left of one run: checksums, and of what they are."""
        new, metrics = self.step(*args, **named)
        metrics = dict(metrics)
        sent, results = _rows(metrics.pop(SENT)), (new, metrics)
        return Checksums(sent, held(results, plan.mesh)), _blame.named(results)


def held(results: PyTree, mesh: Mesh) -> _blame.Rows:
    """Returns the checksums of what each device of this process has of arrays, computed there."""
    leaves = jax.tree.leaves(results)
    on_host = [k for k, leaf in enumerate(leaves) if _compat.is_on_host(leaf)]
    others = [k for k in range(len(leaves)) if k not in {*on_host}]
    found: dict[str, dict[int, int]] = defaultdict(dict)
    # What rests on the host comes to the device one by one.
    for places in (others, *([k] for k in on_host)):
        some = [leaves[k] for k in places]
        specs = tuple(_blame.spec_of(leaf) for leaf in some)
        for device, row in _rows(_checksums(some, specs, mesh)).items():
            found[device].update(zip(places, row, strict=True))
    return {device: [row[k] for k in range(len(leaves))] for device, row in found.items()}


@functools.partial(jax.jit, static_argnums=(1, 2))
@_axis_types.auto_axes()
def _checksums(leaves: list[Array], specs: Sequence[PartitionSpec], mesh: Mesh) -> Array:
    def own(leaves: list[Array]) -> Array:
        return jnp.stack([of_bits(leaf) for leaf in leaves])[None]

    rows = PartitionSpec(mesh.axis_names)
    program = jax.shard_map(
        own, mesh=mesh, in_specs=(list(specs),), out_specs=rows, check_vma=False
    )
    return program([_compat.fetched(x) for x in _axis_types.computed_with(leaves)])


def _rows(checksums: Array) -> _blame.Rows:
    """Returns the row of each device of this process, by its number, which JSON has as text."""
    rows = ((str(s.device.id), np.asarray(s.data)[0]) for s in checksums.addressable_shards)
    return {device: row.tolist() for device, row in rows}
