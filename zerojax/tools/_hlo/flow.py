"""Follows values through a module: which parameter they come from, which output they go into, which
memory they are stored in; and finds the sums that a value is made of."""

import collections
import itertools
import re
from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

from zerojax.tools._hlo.module import Instruction, Module

T = TypeVar("T")
ARGUMENT = "argument"
ARITHMETIC = ("reduce-scatter", "all-reduce")  # labels of what these make go through arithmetic
LABELLED = (*ARITHMETIC, "all-gather")
MOVED_ON = re.compile(  # their first operand
    "copy|convert|reshape|transpose|slice|dynamic-slice|copy-start|pad|bitcast-convert|reverse"
)
SPREADS = ("all-gather", "broadcast", "custom-call")  # what they move is there several times
SUMMANDS = {"add": 2, "concatenate": None, "dynamic-update-slice": 2}  # so many operands
NO_BUFFER = {"constant", "partition-id", "replica-id", "after-all"}
MOST_PASSES = 8  # over one loop body; its labels settle in fewer
ValueName = tuple[str, str, int]  # computation, instruction, which of its arrays


class Origin(NamedTuple):
    """An origin: an ARGUMENT of the program by its number, or an array that a collective makes."""

    kind: str
    name: str
    at: int


class Buffer(NamedTuple):
    """Memory that an instruction allocates for one of the arrays of its result."""

    computation: str
    name: str
    index: int
    nbytes: float


Labels = frozenset[Origin]
Buffers = frozenset[Buffer]


class Walk(Generic[T]):
    """A walk over instructions in the order in which they run, with a set for each array.

    `values` has the sets of each instruction. Subclasses say in `of` what an instruction makes of
    its operands' sets, where it does not only pass them on.
    """

    def __init__(self, module: Module) -> None:
        self.module = module
        self.values: dict[tuple[str, str], list[frozenset[T]]] = {}

    def run(self, name: str, arguments: list[list[frozenset[T]]]) -> list[frozenset[T]]:
        """Walks over a computation that gets these arguments; returns the sets of its result."""
        sets: dict[str, list[frozenset[T]]] = {}
        for instruction in self.module.computations[name].values():
            operands = [sets.get(operand, []) for operand in instruction.operands]
            new = self.module.passed_on(name, instruction, operands, arguments)
            new = self.of(name, instruction, operands) if new is None else new
            sets[instruction.name] = self.values[name, instruction.name] = new
        return sets[self.module.root(name).name]

    def of(
        self, name: str, instruction: Instruction, operands: list[list[frozenset[T]]]
    ) -> list[frozenset[T]]:
        raise NotImplementedError


# -- origins


class Lineage(Walk[Origin]):
    """The labels of a module's values, as far as they stay what they are.

    An argument keeps its label while it is only moved (sliced, cast, gathered), and in the scope
    `through`; so does what an all-gather makes. What a collective has reduced, a gradient, keeps
    its label through arithmetic between arrays of one size as well: so optimizers use it.
    """

    def __init__(self, module: Module, through: str) -> None:
        super().__init__(module)
        self.through = through
        arguments = [
            [frozenset([Origin(ARGUMENT, "", number)])] * len(parameter.arrays)
            for number, parameter in enumerate(module.parameters)
        ]
        self.outputs = self.run(module.entry, arguments)

    def of(self, name: str, instruction: Instruction, operands: list[list[Labels]]) -> list[Labels]:
        opcode, count = instruction.opcode, len(instruction.arrays)
        moved = [labels for operand in operands for labels in operand]
        if opcode == "while":
            return self.loop(instruction, operands[0])
        if calls := instruction.calls(operands):
            runs = [self.run(*call) for call in calls]
            labels = [frozenset().union(*sets) for sets in zip(*runs, strict=True)]
            # The type of a start lists its operands, results and contexts, in this order.
            labels = [*moved, *labels] if opcode.endswith("-start") else labels
        elif opcode == "all-gather-start":
            labels = moved * 2
        elif opcode.endswith("-start") and opcode != "copy-start":
            labels = []
        elif opcode == "dynamic-update-slice":
            labels = [frozenset().union(*operands[0], *operands[1])]
        elif MOVED_ON.fullmatch(opcode) or opcode in SPREADS:
            # XLA joins several all-gathers into one, with an operand for each.
            labels = moved if opcode == "all-gather" or not operands else operands[0]
            labels = labels if len(labels) == count else [frozenset().union(*labels)] * count
        else:
            labels = [self.computed(name, instruction, operands)] * count
        labels = (labels + [frozenset()] * count)[:count]
        if instruction.base in LABELLED and not opcode.endswith("-done"):
            first = count - len(instruction.operands)  # results come last
            for at in range(len(instruction.operands)):
                labels[first + at] |= {Origin(instruction.base, instruction.name, at)}
        return labels

    def computed(self, name: str, instruction: Instruction, operands: list[list[Labels]]) -> Labels:
        """Joins the labels of the operands that have the result's size; scalars have none."""
        is_through = self.through in instruction.op_name
        arrays = self.module.computations[name]
        size = instruction.arrays[0].size if instruction.arrays else 0
        pairs = zip(instruction.operands, operands, strict=True)
        sets = [pair for one, sets in pairs for pair in zip(arrays[one].arrays, sets, strict=False)]
        same_size = [labels for array, labels in sets if array.size == size > 1]

        def keeps(label: Origin) -> bool:
            return label.kind in ARITHMETIC or (is_through and label.kind == ARGUMENT)

        kept = frozenset(filter(keeps, frozenset().union(*same_size)))
        if instruction.opcode != "select":
            return kept
        return kept.union(
            itertools.filterfalse(keeps, frozenset().union(*operands[1], *operands[2]))
        )

    def loop(self, instruction: Instruction, labels: list[Labels]) -> list[Labels]:
        """Runs a body until its labels settle: an iteration may move them between the carried
        arrays, and each pass finds where the next iteration takes them."""
        for _ in range(MOST_PASSES):
            new = self.run(instruction.body, [labels])
            after = [old | now for old, now in zip(labels, new, strict=True)]
            if after == labels:
                break
            labels = after
        return labels


def summed_in(module: Module, values: Iterable[ValueName]) -> set[ValueName]:
    """Finds what ends up in one of `values` by being moved or added: backward, into fusions, and
    around loops, whose iterations add to what they carry."""
    passed: dict[tuple[str, int], list[list[ValueName]]] = collections.defaultdict(list)
    for name, instructions in module.computations.items():
        for instruction in instructions.values():
            # A loop passes its own value to its body, which carries it.
            names = [instruction.name] if instruction.opcode == "while" else instruction.operands
            for inside, arguments in instruction.calls([_arrays(module, name, x) for x in names]):
                for number, argument in enumerate(arguments):
                    passed[inside, number].append(argument)
    summed: set[ValueName] = set()
    left = list(values)
    while left:
        if (value := left.pop()) not in summed:
            summed.add(value)
            left += _summands(module, value, passed)
    return summed


def _arrays(module: Module, computation: str, name: str) -> list[ValueName]:
    count = len(module.computations[computation][name].arrays)
    return [(computation, name, at) for at in range(count)]


def _summands(
    module: Module, value: ValueName, passed: dict[tuple[str, int], list[list[ValueName]]]
) -> list[ValueName]:
    """Returns what a value was one step before: one that is moved, several that are added."""
    computation, name, at = value
    instruction = module.computations[computation][name]
    opcode = instruction.opcode
    if opcode == "parameter":
        return [argument[at] for argument in passed[computation, int(instruction.inside)]]
    operands = [_arrays(module, computation, one) for one in instruction.operands]
    passed_on = module.passed_on(computation, instruction, operands, [])
    if passed_on is not None:
        return passed_on[at : at + 1]
    if calls := instruction.calls(operands):
        if opcode.endswith("-start"):  # its type lists its operands before its results
            at -= sum(map(len, operands))
        before = operands[0][at : at + 1] if opcode == "while" else []
        return before + [(one, module.root(one).name, at) for one, _ in calls if at >= 0]
    count = 1 if MOVED_ON.fullmatch(opcode) else SUMMANDS.get(opcode, 0)
    return [one for operand in operands[:count] for one in operand[:1]]


# -- memory


def peak(module: Module) -> dict[Buffer, list[ValueName]]:
    """Finds the temporary buffers alive at the peak, each with the values that were stored in it.

    A compiler for GPUs reports how many bytes a program needs, but not what for. A buffer lives
    from the instruction that makes it to the last one that reads it, through the tuples, loops and
    updates in place that pass it on. Inputs and outputs do not count.
    """
    walk = _Storage(module)
    arguments = [[frozenset()] * len(parameter.arrays) for parameter in module.parameters]
    _, live = walk.fullest(module.entry, arguments)
    holders: dict[Buffer, list[ValueName]] = {buffer: [] for buffer in live}
    for (computation, name), buffers in walk.values.items():
        for index, one in enumerate(buffers):
            for buffer in one & holders.keys():
                holders[buffer].append((computation, name, index))
    return holders


class _Storage(Walk[Buffer]):
    """The buffers in which values are stored; `inside` has those alive at the peak of a call."""

    def __init__(self, module: Module) -> None:
        super().__init__(module)
        self.inside: dict[tuple[str, str], list[Buffer]] = {}

    def fullest(
        self, name: str, arguments: list[list[Buffers]]
    ) -> tuple[list[Buffers], list[Buffer]]:
        """Returns the buffers of a computation's result, and those alive at its peak.

        The arguments' do not count; nor do those of the program's results, which are stored in
        memory of their own, or in an argument's. The sum is kept up to date from instruction to
        instruction: adding it up each time would take quadratic time in long schedules.
        """
        result = self.run(name, arguments)
        outer = frozenset().union(*(one for buffers in arguments for one in buffers))
        outer = outer.union(*result) if name == self.module.entry else outer
        order = list(self.module.computations[name].values())
        last: dict[Buffer, int] = {}
        for at, instruction in enumerate(order):
            for operand in (*instruction.operands, instruction.name):
                for one in self.values.get((name, operand), []):
                    last |= dict.fromkeys(one, at)
        last |= dict.fromkeys([buffer for one in result for buffer in one], len(order))
        ends: dict[int, list[Buffer]] = {}
        for buffer, at in last.items():
            ends.setdefault(at, []).append(buffer)
        live: dict[Buffer, None] = {}
        now = most = 0.0
        best: list[Buffer] = []
        for at, instruction in enumerate(order):
            for buffer in frozenset().union(*self.values[name, instruction.name]) - outer:
                if buffer not in live:
                    live[buffer] = None
                    now += buffer.nbytes
            inside = self.inside.get((name, instruction.name), [])
            if (with_it := now + sum(buffer.nbytes for buffer in inside)) > most:
                most, best = with_it, [*live, *inside]
            for buffer in ends.get(at, []):
                if buffer in live:
                    del live[buffer]
                    now -= buffer.nbytes
        return result, best

    def of(
        self, name: str, instruction: Instruction, operands: list[list[Buffers]]
    ) -> list[Buffers]:
        opcode, calls = instruction.opcode, instruction.calls(operands)
        if opcode in NO_BUFFER:
            return [frozenset()] * len(instruction.arrays)
        if calls and not instruction.fuses:
            runs = [self.fullest(*call) for call in calls]
            result, inside = max(runs, key=lambda run: sum(buffer.nbytes for buffer in run[1]))
            self.inside[name, instruction.name] = inside
            # A loop's result is stored where its initial value was.
            stays = opcode == "while" and len(operands[0]) == len(result)
            return operands[0] if stays else result
        new = [
            frozenset([Buffer(name, instruction.name, index, array.device_bytes)])
            for index, array in enumerate(instruction.arrays)
        ]
        moved = [one for operand in operands for one in operand]
        if opcode == "copy-start":
            return [new[0], *moved, *new[2:]]
        starts = opcode.endswith("-start")
        if starts and len(new) <= len(moved):
            return new
        first = len(moved) if starts else 0  # its type lists its operands before its results
        new[:first] = moved[:first]
        for at, into in enumerate(self.in_place(instruction), start=first):
            if into is not None and operands[into]:
                new[at] = operands[into][0]
        return new

    def in_place(self, instruction: Instruction) -> list[int | None]:
        """Finds, for each array of the result, the operand that it updates in place."""
        if instruction.opcode == "dynamic-update-slice":
            return [0]
        if not instruction.fuses:
            return []
        fused, into = instruction.called[0], []
        inside = self.module.computations[fused]
        for output in self.module.results(fused):
            while output.opcode in ("bitcast", "copy") and output.operands:
                output = inside[output.operands[0]]
            updates = output.opcode == "dynamic-update-slice"
            updated = inside[output.operands[0]] if updates else output
            while updates and updated.opcode == "bitcast":
                updated = inside[updated.operands[0]]
            is_operand = updates and updated.opcode == "parameter"
            into.append(int(updated.inside) if is_operand else None)
        return into
