"""Which parameter a value of a module comes from, and which output a gradient ends up in.

Labels travel forward through the module, through tuples, loops and fusions. A weight keeps its
label while it is only moved (sliced, cast, gathered); a gradient keeps its own through arithmetic
between arrays of one size, which is what optimizers do with it.
"""

from collections.abc import Callable
from typing import Any

from zerojax._hlo.module import Instruction, Module, arrays_of, top_level_types

Labels = frozenset[Any]  # of anything that can be told apart
NONE: Labels = frozenset()
_MOVES = {
    "bitcast",
    "copy",
    "convert",
    "reshape",
    "transpose",
    "slice",
    "dynamic-slice",
    "copy-start",
    "opt-barrier",
    "optimization-barrier",
    "pad",
    "bitcast-convert",
    "all-gather",
    "broadcast",
    "reverse",
    "custom-call",
}
MOST_PASSES = 8  # of one loop, until its labels settle


class Lineage:
    """Runs labels through a module. `values` has, for each instruction, one set an array."""

    def __init__(
        self,
        module: Module,
        inputs: list[Labels],
        born: Callable[[Instruction], list[Labels]] = lambda _: [],
        arithmetic: bool = False,
    ) -> None:
        self.module, self.born, self.arithmetic = module, born, arithmetic
        self.values: dict[tuple[str, str], list[Labels]] = {}
        given = [
            [labels] * len(p.arrays) for p, labels in zip(module.parameters, inputs, strict=True)
        ]
        self.outputs = self._run(module.entry, given)

    def _run(self, name: str, given: list[list[Labels]]) -> list[Labels]:
        instructions = self.module.computations[name]
        found: dict[str, list[Labels]] = {}
        root: list[Labels] = []
        for instruction in instructions.values():
            operands = [found.get(o, []) for o in instruction.operands]
            labels = list(self._labels(instructions, instruction, operands, given))
            for at, fresh in enumerate(reversed(self.born(instruction)), start=1):
                labels[-at] |= fresh  # the last arrays: a `-start` has its operands before them
            found[instruction.name] = labels
            self.values[name, instruction.name] = labels
            if instruction.is_root:
                root = labels
        return root

    def _labels(
        self,
        instructions: dict[str, Instruction],
        instruction: Instruction,
        operands: list[list[Labels]],
        given: list[list[Labels]],
    ) -> list[Labels]:
        opcode, count = instruction.opcode, len(instruction.arrays)
        if opcode == "parameter":
            return given[int(instruction.inside)]
        if opcode == "tuple":
            return [labels for operand in operands for labels in operand]
        if opcode == "get-tuple-element":
            return self._member(instructions[instruction.operands[0]], instruction, operands[0])
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
        if opcode.endswith("-done"):
            start = instructions[instruction.operands[0]]
            before = sum(len(instructions[o].arrays) for o in start.operands)
            return operands[0][instruction.result_of(start, before)]
        if opcode == "dynamic-update-slice":
            return [_union(operands[0] + operands[1])]
        if opcode in _MOVES:
            moved = operands[0] if operands else []
            return moved if len(moved) == count else [_union(moved)] * count
        if self.arithmetic:
            return [self._same_size(instructions, instruction, operands)] * count
        return [NONE] * count

    def _started(self, instruction: Instruction, operands: list[list[Labels]]) -> list[Labels]:
        """(operands, results, contexts); only gathers and fusions hand labels on."""
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
        operands: list[list[Labels]],
    ) -> Labels:
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

    def _member(
        self, whole: Instruction, instruction: Instruction, labels: list[Labels]
    ) -> list[Labels]:
        index = int(instruction.attribute(r"index=(\d+)") or 0)
        counts = [len(arrays_of(member)) for member in top_level_types(whole.type)]
        start = sum(counts[:index])
        return labels[start : start + counts[index]]

    def _loop(self, instruction: Instruction, start: list[Labels]) -> list[Labels]:
        body = instruction.attribute(r"body=%?([\w.\-]+)") or ""
        labels = start
        for _ in range(MOST_PASSES):
            after = [old | new for old, new in zip(labels, self._run(body, [labels]), strict=True)]
            if after == labels:
                break
            labels = after
        return labels


def _union(sets: list[Labels]) -> Labels:
    return frozenset().union(*sets) if sets else NONE
