"""Which parameters a collective is for: gradients and updated parameters by the output they end up
in, weights by the argument they come from."""

import collections
from typing import Any

from zerojax._audit.report import Part
from zerojax._hlo.lineage import Labels, Lineage
from zerojax._hlo.module import Instruction, Module
from zerojax._hlo.schedule import REDUCING, Collective
from zerojax._state import state as _state


def reduced_arrays(instruction: Instruction) -> list[Labels]:
    """A label of its own for each array that a reduce-scatter or all-reduce makes."""
    if instruction.base not in REDUCING or instruction.opcode.endswith("-done"):
        return []
    return _numbered(instruction)


def gathered_arrays(instruction: Instruction) -> list[Labels]:
    """The same for gathers: what stages 1 and 2 gather after the update becomes the parameter."""
    is_gather = instruction.opcode in ("all-gather", "all-gather-start")
    return _numbered(instruction) if is_gather else []


def _numbered(instruction: Instruction) -> list[Labels]:
    return [frozenset([(instruction.name, i)]) for i in range(len(instruction.operands))]


def served_leaves(
    module: Module, gradients: Lineage, paths: list[str], kinds: list[str]
) -> dict[Any, tuple[str, ...]]:
    """For each labelled array of a collective, the leaves of the state that it updates.

    Parameters where there are any: moments are updated by the same gradient.
    """
    found: dict[Any, dict[int, None]] = collections.defaultdict(dict)
    for output, labels in enumerate(gradients.outputs):
        if output in module.aliases:
            for label in labels:
                found[label][module.aliases[output]] = None

    def named(numbers: dict[int, None]) -> tuple[str, ...]:
        parameters = [n for n in numbers if kinds[n] == _state.PARAMS]
        return tuple(paths[n] for n in parameters or numbers)

    return {label: named(numbers) for label, numbers in found.items()}


def parts(
    collective: Collective,
    weights: Lineage,
    served: dict[Any, tuple[str, ...]],
    paths: list[str],
) -> tuple[Part, ...]:
    """The arrays of a collective with what they belong to: gradients and updated parameters by
    where they go, weights by where they come from."""
    found, name = [], collective.instruction.name
    origins = [
        labels
        for operand in collective.instruction.operands
        for labels in weights.values.get((collective.computation, operand), [])
    ]
    for at, array in enumerate(collective.arrays):
        known = served.get((name, at))
        if known is None:
            numbers = sorted(origins[at]) if at < len(origins) else []
            known = tuple(paths[number] for number in numbers if paths[number])
        found.append(Part(str(array), array.dtype, array.size, array.nbytes, known))
    return tuple(found)
