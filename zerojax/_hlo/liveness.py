"""What lives in memory at the fullest moment of a schedule, read off the module's text.

Compilers for GPUs tell how many bytes a program needs, not what they are. This walks the schedule:
a buffer lives from the instruction that makes it to the last that reads it, through the tuples,
loops and updates in place that hand it on.
"""

import dataclasses
from collections.abc import Iterator

from zerojax._hlo.module import Instruction, Module, arrays_of, top_level_types

_HAND_ON = {"bitcast", "opt-barrier", "optimization-barrier"}
_NO_BUFFER = {"parameter", "constant", "partition-id", "replica-id", "after-all"}


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Memory that one instruction makes: which, and for which of its arrays."""

    computation: str
    name: str
    index: int
    nbytes: float


Buffers = list[frozenset[Buffer]]  # for each array of a value, what holds it
Holder = tuple[str, str, int]  # computation, instruction, which of its arrays


def peak(module: Module) -> dict[Buffer, list[Holder]]:
    """The temporary buffers that live at the fullest moment, with the values that stand in them.

    Inputs and outputs do not count.
    """
    entry, walk = module.entry, _Walk(module)
    given = [[frozenset()] * len(p.arrays) for p in module.parameters]
    _, live = walk.run(entry, given, module.root(entry).name)
    holders: dict[Buffer, list[Holder]] = {buffer: [] for buffer in live}
    for (computation, name), buffers in walk.held.items():
        for index, one in enumerate(buffers):
            for buffer in one & holders.keys():
                holders[buffer].append((computation, name, index))
    return holders


class _Walk:
    def __init__(self, module: Module) -> None:
        self.module = module
        self.held: dict[tuple[str, str], Buffers] = {}

    def run(
        self, name: str, given: list[Buffers], escapes: str | None = None
    ) -> tuple[Buffers, list[Buffer]]:
        """(what holds the result, what lives at the fullest moment besides `given`)."""
        instructions = self.module.computations[name]
        held: dict[str, Buffers] = {}
        inner: dict[str, list[Buffer]] = {}
        for instruction in instructions.values():
            held[instruction.name], inner[instruction.name] = self.made(
                name, instruction, held, given
            )
            self.held[name, instruction.name] = held[instruction.name]
        root = self.module.root(name)
        outer = {b for buffers in given for one in buffers for b in one}
        # What the program returns has memory of its own, or an argument's.
        outer |= {b for one in held[escapes] for b in one} if escapes else set()
        return held[root.name], self.fullest(name, held, inner, outer)

    def fullest(
        self,
        name: str,
        held: dict[str, Buffers],
        inner: dict[str, list[Buffer]],
        outer: set[Buffer],
    ) -> list[Buffer]:
        order = list(self.module.computations[name].values())
        last: dict[Buffer, int] = {}
        for at, instruction in enumerate(order):
            for operand in (*instruction.operands, instruction.name):
                for one in held.get(operand, []):
                    last |= dict.fromkeys(one, at)
        for one in held[self.module.root(name).name]:
            last |= dict.fromkeys(one, len(order))
        ends: dict[int, list[Buffer]] = {}
        for buffer, at in last.items():
            ends.setdefault(at, []).append(buffer)
        live: dict[Buffer, None] = {}
        now = most = 0.0
        best: list[Buffer] = []
        for at, instruction in enumerate(order):
            for one in held[instruction.name]:
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
        self, name: str, instruction: Instruction, held: dict[str, Buffers], given: list[Buffers]
    ) -> tuple[Buffers, list[Buffer]]:
        """(what holds an instruction's value, the fullest moment inside of it)."""
        opcode = instruction.opcode
        operands = [held.get(o, []) for o in instruction.operands]
        if opcode == "parameter":
            return given[int(instruction.inside)], []
        if opcode == "tuple":
            return [one for operand in operands for one in operand], []
        if opcode == "get-tuple-element":
            return self.member(name, instruction, operands[0]), []
        if opcode in _NO_BUFFER:
            return [frozenset()] * len(instruction.arrays), []
        if opcode in _HAND_ON:
            return operands[0], []
        if opcode == "while":
            body = instruction.attribute(r"body=%?([\w.\-]+)") or ""
            result, most = self.run(body, [operands[0]])
            known = {b for one in operands[0] for b in one}
            inside = [b for b in most if b not in known]
            # A loop's result takes the memory of what it started from.
            return operands[0] if len(operands[0]) == len(result) else result, inside
        if opcode == "call" and instruction.called:
            return self.run(instruction.called[0], operands)
        if opcode == "conditional":
            branches = zip(instruction.called, operands[1:], strict=True)
            runs = [self.run(branch, [argument]) for branch, argument in branches]
            return max(runs, key=lambda run: sum(buffer.nbytes for buffer in run[1]))
        if opcode.endswith("-start"):
            return self.started(name, instruction, operands), []
        if opcode.endswith("-done"):
            start = self.module.computations[name][instruction.operands[0]]
            before = [self.module.computations[name][o] for o in start.operands]
            place = instruction.result_of(start, sum(len(one.arrays) for one in before))
            return operands[0][place], []
        return list(self.updated(name, instruction, operands)), []

    def started(self, name: str, instruction: Instruction, operands: list[Buffers]) -> Buffers:
        """New buffers for results alone: operands stand beside them in the type."""
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
        """New buffers, but for updates in place, whose buffer is that of what they update."""
        new = self.new(name, instruction)[first:]
        for at, into in enumerate(self.in_place(instruction)):
            yield new[at] if into is None or not operands[into] else operands[into][0]

    def in_place(self, instruction: Instruction) -> list[int | None]:
        """For each array of the result: the operand whose memory it updates."""
        if instruction.opcode == "dynamic-update-slice":
            return [0]
        if not instruction.fuses:
            return [None] * len(instruction.arrays)
        inside = self.module.computations[instruction.called[0]]
        root = self.module.root(instruction.called[0])
        outputs = root.operands if root.opcode == "tuple" else [root.name]
        return [_updates(inside, inside[o]) for o in outputs]

    def new(self, name: str, instruction: Instruction) -> Buffers:
        return [
            frozenset([Buffer(name, instruction.name, i, array.nbytes)])
            for i, array in enumerate(instruction.arrays)
        ]

    def member(self, name: str, instruction: Instruction, operand: Buffers) -> Buffers:
        whole = self.module.computations[name][instruction.operands[0]]
        index = int(instruction.attribute(r"index=(\d+)") or 0)
        counts = [len(arrays_of(member)) for member in top_level_types(whole.type)]
        start = sum(counts[:index])
        return operand[start : start + counts[index]]


def _updates(inside: dict[str, Instruction], output: Instruction) -> int | None:
    while output.opcode in ("bitcast", "copy") and output.operands:
        output = inside[output.operands[0]]
    if output.opcode != "dynamic-update-slice":
        return None
    into = inside[output.operands[0]]
    while into.opcode == "bitcast":
        into = inside[into.operands[0]]
    return int(into.inside) if into.opcode == "parameter" else None
