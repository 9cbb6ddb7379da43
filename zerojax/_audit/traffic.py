"""The collectives of a compiled program, and the parameters that each is for.

Weights are known by the argument they come from, gradients and updated parameters by the output
they end up in.
"""

import collections
import dataclasses
import re
from collections.abc import Iterator

from zerojax._hlo.lineage import Lineage
from zerojax._hlo.module import Instruction, Module
from zerojax._hlo.schedule import REDUCING, Collective
from zerojax._state import state as _state
from zerojax._text import shortened

LONGEST_NAME = 60
NOTEBOOK = re.compile(r".*[/\\]ipykernel_\d+[/\\]\d+\.py:")  # files that nobody can open
Made = tuple[str, int]  # an array that a collective makes: its name, and which of its results


@dataclasses.dataclass(frozen=True)
class Part:
    """One array of a collective, and the parameters it belongs to, where they are known."""

    array: str
    dtype: str
    elements: int
    nbytes: float
    paths: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Traffic:
    """A collective of the compiled program. Bytes are per device, times are seconds of one run.

    `between` is the compute scheduled between its start and done, `exposed` the time that the
    program waits for it.
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
        return tuple(dict.fromkeys(path for _, path in self.by_path()))

    def by_path(self) -> Iterator[tuple[Part, str]]:
        """Yields each array with each parameter that it belongs to."""
        return ((part, path) for part in self.parts for path in part.paths)

    @property
    def total_bytes(self) -> float:
        return self.wire_bytes * self.trips

    @property
    def serves(self) -> str:
        """The parameters it moves, where they are known; else its place in the user's code."""
        if self.paths:
            named = ", ".join(shortened(self.paths[:2], LONGEST_NAME))
            return named + (f" and {len(self.paths) - 2} more" if len(self.paths) > 2 else "")
        place = NOTEBOOK.sub("cell line ", self.source or self.scope)
        return shortened([place], LONGEST_NAME)[0]


def reduced_arrays(instruction: Instruction) -> list[frozenset[Made]]:
    """Labels each array that a reduce-scatter or all-reduce makes."""
    if instruction.base not in REDUCING or instruction.opcode.endswith("-done"):
        return []
    return _numbered(instruction)


def gathered_arrays(instruction: Instruction) -> list[frozenset[Made]]:
    """Labels each array that a gather makes: stages 1 and 2 gather the updated parameters."""
    is_gather = instruction.opcode in ("all-gather", "all-gather-start")
    return _numbered(instruction) if is_gather else []


def _numbered(instruction: Instruction) -> list[frozenset[Made]]:
    return [frozenset([(instruction.name, i)]) for i in range(len(instruction.operands))]


def served_leaves(
    module: Module, made: Lineage[Made], paths: list[str], kinds: list[str]
) -> dict[Made, tuple[str, ...]]:
    """Returns, for each array that a collective makes, the leaves of the state that it updates.

    These are parameters where there are any: the same gradient updates their moments.
    """
    found: dict[Made, dict[int, None]] = collections.defaultdict(dict)
    for output, labels in enumerate(made.outputs):
        if output in module.aliases:
            for label in labels:
                found[label][module.aliases[output]] = None

    def named(numbers: dict[int, None]) -> tuple[str, ...]:
        parameters = [n for n in numbers if kinds[n] == _state.PARAMS]
        return tuple(paths[n] for n in parameters or numbers)

    return {label: named(numbers) for label, numbers in found.items()}


def parts(
    collective: Collective,
    weights: Lineage[int],
    served: dict[Made, tuple[str, ...]],
    paths: list[str],
) -> tuple[Part, ...]:
    """Returns the arrays of a collective, each with the parameters it belongs to."""
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
