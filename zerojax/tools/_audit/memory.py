"""Peak memory of a compiled step, by what it holds."""

import collections
import math
from collections.abc import Set

from jax.stages import Compiled

from zerojax._state import state as _state
from zerojax.tools._audit.measured import MemoryUse
from zerojax.tools._audit.reading import Reading
from zerojax.tools._hlo import liveness as _liveness
from zerojax.tools._hlo.lineage import Value, summed_in
from zerojax.tools._hlo.schedule import REDUCING, Collective


def measured(
    reading: Reading, compiled: Compiled | None, collectives: list[Collective]
) -> MemoryUse:
    """Counts arguments by kind from the module, temporary bytes from compiler and schedule."""
    module = reading.module
    arguments: collections.Counter[str] = collections.Counter()
    for parameter, kind in zip(module.parameters, reading.kinds, strict=True):
        arguments[kind] += int(parameter.device_bytes)
    on_host = sum(parameter.nbytes - parameter.device_bytes for parameter in module.parameters)
    kept = _temporary(reading, collectives)
    stats = compiled.memory_analysis() if compiled is not None else None
    temporary = stats.temp_size_in_bytes if stats else sum(kept.values())
    outputs = module.root(module.entry).device_bytes
    reused = [module.parameters[p] for p in module.aliases.values()]
    donated = sum(parameter.device_bytes for parameter in reused)
    host_donated = sum(parameter.nbytes - parameter.device_bytes for parameter in reused)
    # Where the compiler packs tighter than the schedule read here, activations are charged less.
    gathered = min(kept["gathered"], temporary)
    gradients = min(kept["gradients"], temporary - gathered, _most_gradients(reading, temporary))
    return MemoryUse(
        parameters=arguments[_state.PARAMS],
        optimizer=arguments[_state.OPT_STATE],
        other_state=arguments[_state.OTHER],
        batch=arguments["batch"],
        gathered=gathered,
        gradients=gradients,
        activations=temporary - gathered - gradients,
        outputs=int(outputs - donated),
        donated=int(donated),
        on_host=int(on_host),
        host_donated=int(host_donated),
        host_temporary=stats.host_temp_size_in_bytes if stats else 0,
    )


def _most_gradients(reading: Reading, temporary: int) -> int:
    """Returns the bytes of all gradients whole, before and after they are reduced. What depends on
    reduced statistics, as of a batch norm, is followed like a gradient, and may be far larger."""
    if reading.plan is None:
        return temporary
    each = (math.prod(leaf.shape) * max(leaf.dtype.itemsize, 4) for leaf in reading.plan.params)
    return 2 * sum(each)


def _temporary(reading: Reading, collectives: list[Collective]) -> collections.Counter[str]:
    """Counts the bytes of the buffers alive at the schedule's peak, by use."""
    reduced = {
        (c.computation, operand, 0)
        for c in collectives
        if c.kind in REDUCING
        for operand in c.instruction.operands
    }
    # Those of microbatches are summed before they are reduced: the sums, and what is added to them.
    reduced = summed_in(reading.module, reduced)
    kept: collections.Counter[str] = collections.Counter()
    for buffer, holders in _liveness.peak(reading.module).items():
        kept[_use(reading, holders, reduced)] += int(buffer.nbytes)
    return kept


def _use(reading: Reading, holders: list[_liveness.Holder], reduced: set[Value]) -> str:
    """Names a buffer after the values that are stored in it over its life."""

    def labelled(values: dict[tuple[str, str], list[frozenset]], wanted: Set | None = None) -> bool:
        sets = ((values.get((computation, name), []), at) for computation, name, at in holders)
        found = (labels[at] for labels, at in sets if at < len(labels))
        return any(labels and (wanted is None or labels & wanted) for labels in found)

    if not reduced.isdisjoint(holders) or labelled(reading.gradients.values):
        return "gradients"
    is_weight = labelled(reading.weights.values, reading.of_weights)  # a batch is copied, too
    return "gathered" if is_weight else "activations"
