"""Peak memory of a compiled step, split by what it holds."""

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

from zerojax._hlo import liveness as _liveness
from zerojax._hlo.lineage import NONE, Labels, Lineage
from zerojax._hlo.module import Instruction, Module
from zerojax._hlo.schedule import REDUCING, Collective
from zerojax._state import state as _state


@dataclasses.dataclass(frozen=True)
class MemoryUse:
    """Bytes per device. The state's are exact; of what is temporary, gathered weights and
    gradients are what lives at the schedule's fullest moment, and activations the rest."""

    parameters: int
    optimizer: int
    other_state: int
    batch: int
    gathered: int
    gradients: int
    activations: int
    outputs: int  # that reuse no argument's memory
    donated: int  # arguments whose memory outputs reuse

    @property
    def state(self) -> int:
        return self.parameters + self.optimizer + self.other_state

    @property
    def temporary(self) -> int:
        return self.gathered + self.gradients + self.activations

    @property
    def peak(self) -> int:
        return self.state + self.batch + self.temporary + self.outputs


def measured(
    module: Module,
    compiled: Any,
    kinds: list[str],
    weights: Lineage,
    gradients: Lineage,
    collectives: list[Collective],
) -> MemoryUse:
    """Arguments by kind from the module, what is temporary from the compiler and the schedule."""
    arguments: collections.Counter = collections.Counter()
    for parameter, kind in zip(module.parameters, kinds, strict=True):
        arguments[kind] += int(parameter.nbytes)
    reduced = {
        (c.computation, name)
        for c in collectives
        if c.kind in REDUCING
        for operand in c.instruction.operands
        for name in _copied_from(module.computations[c.computation], operand)
    }
    kept: collections.Counter = collections.Counter()
    for buffer, holders in _liveness.peak(module).items():
        kept[_use(holders, weights, gradients, reduced)] += int(buffer.nbytes)
    stats = compiled.memory_analysis() if compiled is not None else None
    outputs = module.root(module.entry).nbytes
    donated = sum(module.parameters[p].nbytes for p in module.aliases.values())
    temporary = stats.temp_size_in_bytes if stats else sum(kept.values())
    # Where the compiler packs tighter than the schedule read here, activations are charged less.
    gathered = min(kept["gathered"], temporary)
    grads = min(kept["gradients"], temporary - gathered)
    return MemoryUse(
        parameters=arguments[_state.PARAMS],
        optimizer=arguments[_state.OPT_STATE],
        other_state=arguments[_state.OTHER],
        batch=arguments["batch"],
        gathered=gathered,
        gradients=grads,
        activations=temporary - gathered - grads,
        outputs=int(outputs - donated),
        donated=int(donated),
    )


def _copied_from(instructions: dict[str, Instruction], name: str) -> Iterator[str]:
    """`name` and what it is a copy of: sums are laid out anew before they travel."""
    yield name
    while len(operands := instructions[name].operands) == 1 and (
        instructions[operands[0]].nbytes == instructions[name].nbytes
    ):
        name = operands[0]
        yield name


def _use(
    holders: list[_liveness.Holder],
    weights: Lineage,
    gradients: Lineage,
    reduced: set[tuple[str, str]],
) -> str:
    """What a buffer is, from what stands in it over its life."""
    for computation, name, index in holders:
        if (computation, name) in reduced or _label(gradients, computation, name, index):
            return "gradients"
    for computation, name, index in holders:
        if _label(weights, computation, name, index):
            return "gathered"
    return "activations"


def _label(lineage: Lineage, computation: str, name: str, index: int) -> Labels:
    labels = lineage.values.get((computation, name), [])
    return labels[index] if index < len(labels) else NONE
