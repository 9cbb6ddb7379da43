"""Carries labels through a module: from parameters to values, from gradients to outputs; and finds
the sums that a value is made of.

Labels run forward through tuples, loops and fusions. A weight keeps its label while it is only
moved (sliced, cast, gathered). A gradient keeps its label through arithmetic between arrays of one
size as well, which is what optimizers do with it.
"""

from collections.abc import Callable, Iterable
from typing import Generic, Never, TypeVar

from zerojax.tools._hlo.module import Instruction, Module

L = TypeVar("L")  # a label: a parameter's number, say
Labels = frozenset[L]
NONE: frozenset[Never] = frozenset()
_MOVES = {
    "copy",
    "convert",
    "reshape",
    "transpose",
    "slice",
    "dynamic-slice",
    "copy-start",
    "pad",
    "bitcast-convert",
    "all-gather",
    "broadcast",
    "reverse",
    "custom-call",
}
# The operands that what these make is moved from, or is a sum of.
_SUMMANDS = dict.fromkeys(_MOVES - {"all-gather", "broadcast", "custom-call"}, 1)
_SUMMANDS |= {"add": 2, "concatenate": None, "dynamic-update-slice": 2}
Value = tuple[str, str, int]  # computation, instruction, which of its arrays
Callers = dict[str, list[tuple[str, Instruction]]]  # computation: where it is called
MOST_PASSES = 8  # over one loop body; its labels settle in fewer


class Lineage(Generic[L]):
    """The labels of a module's values.

    `inputs` labels the entry's parameters, `born` the results of instructions. `values` has a set
    of labels for each array of each instruction, `outputs` for each array that the module returns.
    Arithmetic keeps labels with `arithmetic`, or in the scope that `through` names.
    """

    def __init__(
        self,
        module: Module,
        inputs: list[Labels[L]],
        born: Callable[[Instruction], list[Labels[L]]] = lambda _: [],
        arithmetic: bool = False,
        through: str | None = None,
    ) -> None:
        self.module, self.born, self.arithmetic = module, born, arithmetic
        self.through = through
        self.values: dict[tuple[str, str], list[Labels[L]]] = {}
        given = [
            [labels] * len(p.arrays) for p, labels in zip(module.parameters, inputs, strict=True)
        ]
        self.outputs = self._run(module.entry, given)

    def _run(self, name: str, given: list[list[Labels[L]]]) -> list[Labels[L]]:
        instructions = self.module.computations[name]
        found: dict[str, list[Labels[L]]] = {}
        for instruction in instructions.values():
            operands = [found.get(o, []) for o in instruction.operands]
            labels = self.module.passed_on(name, instruction, operands, given)
            if labels is None:
                labels = self._labels(instructions, instruction, operands)
            labels = list(labels)
            for at, fresh in enumerate(reversed(self.born(instruction)), start=1):
                labels[-at] |= fresh  # results come last: a `-start` has its operands before them
            found[instruction.name] = labels
            self.values[name, instruction.name] = labels
        return found[self.module.root(name).name]

    def _labels(
        self,
        instructions: dict[str, Instruction],
        instruction: Instruction,
        operands: list[list[Labels[L]]],
    ) -> list[Labels[L]]:
        opcode, count = instruction.opcode, len(instruction.arrays)
        if opcode == "while":
            return self._loop(instruction, operands[0])
        if opcode in ("fusion", "call") and instruction.called:
            return self._run(instruction.called[0], operands)
        if opcode == "conditional":
            branches = zip(instruction.called, operands[1:], strict=True)
            runs = [self._run(name, [argument]) for name, argument in branches]
            return [_union(list(sets)) for sets in zip(*runs, strict=True)]
        if opcode.endswith("-start") and opcode != "copy-start":
            return self._started(instruction, operands)
        if opcode == "dynamic-update-slice":
            return [_union(operands[0] + operands[1])]
        if opcode in _MOVES:
            moved = operands[0] if operands else []
            if opcode == "all-gather":  # XLA joins several into one, with an operand for each
                moved = [labels for operand in operands for labels in operand]
            return moved if len(moved) == count else [_union(moved)] * count
        computes = self.arithmetic or self._is_through(instruction)
        if opcode == "select" and not computes:
            return [_union(operands[1] + operands[2])]
        if computes:
            return [self._same_size(instructions, instruction, operands)] * count
        return [NONE] * count

    def _is_through(self, instruction: Instruction) -> bool:
        return self.through is not None and self.through in instruction.op_name

    def _started(
        self, instruction: Instruction, operands: list[list[Labels[L]]]
    ) -> list[Labels[L]]:
        """Labels the operands, results and contexts that a start's type lists, in this order.

        Only gathers and fusions pass labels on to their results.
        """
        count = len(instruction.arrays)
        moved = [labels for operand in operands for labels in operand]
        if instruction.opcode == "all-gather-start":
            return (moved * 2)[:count]
        if instruction.fuses:
            made = self._run(instruction.called[0], operands)
            return ([*moved, *made] + [NONE] * count)[:count]
        return [NONE] * count

    def _same_size(
        self,
        instructions: dict[str, Instruction],
        instruction: Instruction,
        operands: list[list[Labels[L]]],
    ) -> Labels[L]:
        """Joins the labels of all operands that have the size of the result; scalars have none."""
        size = instruction.arrays[0].size if instruction.arrays else 0
        pairs = zip(instruction.operands, operands, strict=True)
        return _union(
            [
                labels
                for name, sets in pairs
                for array, labels in zip(instructions[name].arrays, sets, strict=False)
                if array.size == size > 1
            ]
        )

    def _loop(self, instruction: Instruction, start: list[Labels[L]]) -> list[Labels[L]]:
        """Runs a body until its labels settle: an iteration may move them between the carried
        arrays, and each pass finds where the next iteration takes them."""
        labels = start
        for _ in range(MOST_PASSES):
            found = self._run(instruction.body, [labels])
            after = [old | new for old, new in zip(labels, found, strict=True)]
            if after == labels:
                break
            labels = after
        return labels


def _union(sets: list[Labels[L]]) -> Labels[L]:
    return frozenset().union(*sets) if sets else NONE


def summed_in(module: Module, values: Iterable[Value]) -> set[Value]:
    """Finds what ends up in one of `values` by being moved or added: backward, into fusions, and
    around loops, whose iterations add to what they carry."""
    callers: Callers = {}
    for name, instructions in module.computations.items():
        for instruction in instructions.values():
            for called in instruction.called:
                callers.setdefault(called, []).append((name, instruction))
    found: set[Value] = set()
    left = list(values)
    while left:
        if (value := left.pop()) not in found:
            found.add(value)
            left += _summands(module, value, callers)
    return found


def _summands(module: Module, value: Value, callers: Callers) -> list[Value]:
    """Returns what a value was one step before: one that is moved, several that are added."""
    computation, name, at = value
    instructions = module.computations[computation]
    instruction = instructions[name]
    opcode, called = instruction.opcode, instruction.called
    if opcode == "parameter":
        number, calls = int(instruction.inside), callers.get(computation, [])
        return [(caller, _passed_in(call, computation, number), at) for caller, call in calls]
    operands = [
        [(computation, one, i) for i in range(len(instructions[one].arrays))]
        for one in instruction.operands
    ]
    passed_on = module.passed_on(computation, instruction, operands, [])
    if passed_on is not None:
        return passed_on[at : at + 1]
    if opcode == "while":
        return [operands[0][at], (instruction.body, module.root(instruction.body).name, at)]
    if instruction.fuses or opcode in ("call", "conditional"):
        if opcode.endswith("-start"):  # its type lists its operands before its results
            at -= sum(map(len, operands))
        return [(inside, module.root(inside).name, at) for inside in called if at >= 0]
    return [one for operand in operands[: _SUMMANDS.get(opcode, 0)] for one in operand[:1]]


def _passed_in(call: Instruction, computation: str, number: int) -> str:
    """Names what a computation's parameter is given: by a loop its own value, which it carries."""
    if call.opcode == "while":
        return call.name
    if call.opcode == "conditional":
        return call.operands[1 + call.called.index(computation)]
    return call.operands[number]
