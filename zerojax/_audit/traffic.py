"""Which parameters a collective is for: gradients and updated parameters by the output they end up
in, weights by the argument they come from."""

import collections
import dataclasses
import re
from typing import Any

from zerojax._hlo.lineage import Labels, Lineage
from zerojax._hlo.module import Instruction, Module
from zerojax._hlo.schedule import REDUCING, Collective
from zerojax._state import state as _state

LONGEST_NAME = 60


NOTEBOOK = re.compile(r".*[/\\]ipykernel_\d+[/\\]\d+\.py:")  # files that nobody can open


@dataclasses.dataclass(frozen=True)
class Part:
    """One array of a collective, and the parameters it belongs to where they are known."""

    array: str
    dtype: str
    elements: int
    nbytes: float
    paths: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Traffic:
    """One collective of the compiled program. Bytes are per device; times are seconds of one run.

    `between` is compute scheduled between start and done, `exposed` what the program waits.
    """

    name: str
    kind: str
    parts: tuple[Part, ...]
    wire_bytes: float  # of one run
    trips: int
    loops: tuple[str, ...]
    group: int
    on_host: int
    axes: tuple[str, ...] | None
    asynchronous: bool
    seconds: float
    between: float
    exposed: float
    scope: str
    source: str | None

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(sorted({part.dtype for part in self.parts}))

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(path for part in self.parts for path in part.paths))

    @property
    def total_bytes(self) -> float:
        return self.wire_bytes * self.trips

    @property
    def serves(self) -> str:
        """The parameters it moves where they are known, else where in the code it comes from."""
        if self.paths:
            named = ", ".join(_shortened(path) for path in self.paths[:2])
            return named + (f" and {len(self.paths) - 2} more" if len(self.paths) > 2 else "")
        return _shortened(NOTEBOOK.sub("cell line ", self.source or self.scope))


def _shortened(name: str) -> str:
    """Long names by their ends, which tell more than their beginnings."""
    return name if len(name) <= LONGEST_NAME else f"...{name[3 - LONGEST_NAME :]}"


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
