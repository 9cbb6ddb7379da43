"""The buffers that are in a device's memory at the peak of a schedule, from the module's text.

A compiler for GPUs reports how many bytes a program needs, but not what for. This module walks
the schedule: a buffer lives from the instruction that makes it to the last one that reads it,
through the tuples, loops and updates in place that pass it on.
"""

import dataclasses
from collections.abc import Iterator

from zerojax.tools._hlo.module import Instruction, Module

_NO_BUFFER = {"constant", "partition-id", "replica-id", "after-all"}


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Memory that an instruction allocates for one of the arrays of its result."""

    computation: str
    name: str
    index: int
    nbytes: float


Buffers = list[frozenset[Buffer]]  # for each array of a value: the buffers it is stored in
Holder = tuple[str, str, int]  # computation, instruction, which of its arrays


def peak(module: Module) -> dict[Buffer, list[Holder]]:
    """Finds the temporary buffers alive at the peak, each with the values that were stored in it.

    Inputs and outputs do not count.
    """
    entry, walk = module.entry, _Walk(module)
    given = [[frozenset()] * len(p.arrays) for p in module.parameters]
    _, live = walk.run(entry, given, module.root(entry).name)
    holders: dict[Buffer, list[Holder]] = {buffer: [] for buffer in live}
    for (computation, name), buffers in walk.stored.items():
        for index, one in enumerate(buffers):
            for buffer in one & holders.keys():
                holders[buffer].append((computation, name, index))
    return holders


class _Walk:
    def __init__(self, module: Module) -> None:
        self.module = module
        self.stored: dict[tuple[str, str], Buffers] = {}

    def run(
        self, name: str, given: list[Buffers], escapes: str | None = None
    ) -> tuple[Buffers, list[Buffer]]:
        """Returns the buffers of a computation's result, and those alive at its peak.

        `given` are the buffers of its parameters, which do not count, and `escapes` the
        instruction whose value leaves the program.
        """
        instructions = self.module.computations[name]
        stored: dict[str, Buffers] = {}
        inner: dict[str, list[Buffer]] = {}
        for instruction in instructions.values():
            stored[instruction.name], inner[instruction.name] = self.made(
                name, instruction, stored, given
            )
            self.stored[name, instruction.name] = stored[instruction.name]
        root = self.module.root(name)
        outer = {b for buffers in given for one in buffers for b in one}
        # The program's results are stored in memory of their own, or in an argument's.
        outer |= {b for one in stored[escapes] for b in one} if escapes else set()
        return stored[root.name], self.fullest(name, stored, inner, outer)

    def fullest(
        self,
        name: str,
        stored: dict[str, Buffers],
        inner: dict[str, list[Buffer]],
        outer: set[Buffer],
    ) -> list[Buffer]:
        """Returns the buffers alive at the peak of a computation, without `outer`.

        `stored` has the buffers of each value, `inner` those alive at the peak inside of an
        instruction. The sum is kept up to date from instruction to instruction: adding it up each
        time would take quadratic time in long schedules.
        """
        order = list(self.module.computations[name].values())
        last: dict[Buffer, int] = {}
        for at, instruction in enumerate(order):
            for operand in (*instruction.operands, instruction.name):
                for one in stored.get(operand, []):
                    last |= dict.fromkeys(one, at)
        for one in stored[self.module.root(name).name]:
            last |= dict.fromkeys(one, len(order))
        ends: dict[int, list[Buffer]] = {}
        for buffer, at in last.items():
            ends.setdefault(at, []).append(buffer)
        live: dict[Buffer, None] = {}
        now = most = 0.0
        best: list[Buffer] = []
        for at, instruction in enumerate(order):
            for one in stored[instruction.name]:
                for buffer in one - outer:
                    if buffer not in live:
                        live[buffer] = None
                        now += buffer.nbytes
            inside = sum(buffer.nbytes for buffer in inner[instruction.name])
            if now + inside > most:
                most, best = now + inside, [*live, *inner[instruction.name]]
            for buffer in ends.get(at, []):
                if buffer in live:
                    del live[buffer]
                    now -= buffer.nbytes
        return best

    def made(
        self, name: str, instruction: Instruction, stored: dict[str, Buffers], given: list[Buffers]
    ) -> tuple[Buffers, list[Buffer]]:
        """Returns the buffers of an instruction's value, and those alive at the peak inside it."""
        opcode = instruction.opcode
        operands = [stored.get(o, []) for o in instruction.operands]
        passed_on = self.module.passed_on(name, instruction, operands, given)
        if passed_on is not None:
            return passed_on, []
        if opcode in _NO_BUFFER:
            return [frozenset()] * len(instruction.arrays), []
        if opcode == "while":
            result, most = self.run(instruction.body, [operands[0]])
            known = {b for one in operands[0] for b in one}
            inside = [b for b in most if b not in known]
            # A loop's result is stored where its initial value was.
            return operands[0] if len(operands[0]) == len(result) else result, inside
        if opcode == "call" and instruction.called:
            return self.run(instruction.called[0], operands)
        if opcode == "conditional":
            branches = zip(instruction.called, operands[1:], strict=True)
            runs = [self.run(branch, [argument]) for branch, argument in branches]
            return max(runs, key=lambda run: sum(buffer.nbytes for buffer in run[1]))
        if opcode.endswith("-start"):
            return self.started(name, instruction, operands), []
        return list(self.updated(name, instruction, operands)), []

    def started(self, name: str, instruction: Instruction, operands: list[Buffers]) -> Buffers:
        """Returns new buffers for the results; a start's type lists its operands before them."""
        new = self.new(name, instruction)
        given = [one for operand in operands for one in operand]
        if instruction.opcode == "copy-start":
            return [new[0], *given, *new[2:]]
        if len(new) <= len(given):
            return new
        if instruction.fuses:
            at = len(given)
            made = self.updated(name, instruction, operands, at)
            return [*given, *made, *new[at + len(self.in_place(instruction)) :]]
        return [*given, *new[len(given) :]]

    def updated(
        self, name: str, instruction: Instruction, operands: list[Buffers], first: int = 0
    ) -> Iterator[frozenset[Buffer]]:
        """Yields new buffers; an update in place has the buffer of what it updates."""
        new = self.new(name, instruction)[first:]
        for at, into in enumerate(self.in_place(instruction)):
            yield new[at] if into is None or not operands[into] else operands[into][0]

    def in_place(self, instruction: Instruction) -> list[int | None]:
        """Finds, for each array of the result, the operand that it updates in place."""
        if instruction.opcode == "dynamic-update-slice":
            return [0]
        if not instruction.fuses:
            return [None] * len(instruction.arrays)
        fused = instruction.called[0]
        inside = self.module.computations[fused]
        return [_updates(inside, output) for output in self.module.results(fused)]

    def new(self, name: str, instruction: Instruction) -> Buffers:
        return [
            frozenset([Buffer(name, instruction.name, i, array.device_bytes)])
            for i, array in enumerate(instruction.arrays)
        ]


def _updates(inside: dict[str, Instruction], output: Instruction) -> int | None:
    """Returns the number of the fusion's parameter that an output updates in place, if any."""
    while output.opcode in ("bitcast", "copy") and output.operands:
        output = inside[output.operands[0]]
    if output.opcode != "dynamic-update-slice":
        return None
    into = inside[output.operands[0]]
    while into.opcode == "bitcast":
        into = inside[into.operands[0]]
    return int(into.inside) if into.opcode == "parameter" else None
