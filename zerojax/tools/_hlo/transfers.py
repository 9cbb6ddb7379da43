"""Copies between the memory of a device and that of its host, as a schedule has them.

A copy of a whole array, or of a slice that XLA can address from the host, is made by the GPU's copy
engines, which has one for each direction. Another slice is read or written by a kernel.
"""

import dataclasses

from zerojax.tools._hlo.module import Instruction, Module

TO_DEVICE, TO_HOST, IN_HOST = "to the device", "to the host", "in host memory"
ADDRESSED = "dynamic_slice_config"  # what XLA writes on a slice that it can address itself


@dataclasses.dataclass
class Transfer:
    """A copy, with all the runs that the loops around it give it."""

    instruction: Instruction
    way: str
    nbytes: float  # of one run
    by_engine: bool
    trips: int = 1
    seconds: float = 0.0  # of one run
    waited: float = 0.0  # of one run

    @property
    def asynchronous(self) -> bool:
        return self.instruction.opcode.endswith("-start")

    @property
    def total_bytes(self) -> float:
        return self.nbytes * self.trips


def transfer_of(module: Module, computation: str, instruction: Instruction) -> Transfer | None:
    """Returns the copy that an instruction makes; None for one that makes none."""
    instructions = module.computations[computation]
    if instruction.base == "copy":
        way = _way(instructions[instruction.operands[0]], instruction)
        return Transfer(instruction, way, instruction.arrays[0].nbytes, True) if way else None
    if not instruction.fuses or instruction.opcode.endswith("-done"):
        return _of_slice(instructions, instruction, instruction)
    inside = module.computations[instruction.called[0]]
    found = [_of_slice(inside, one, instruction) for one in inside.values()]
    parts = [one for one in found if one is not None]
    if not parts:
        return None
    nbytes, by_engine = sum(one.nbytes for one in parts), all(one.by_engine for one in parts)
    return dataclasses.replace(parts[0], nbytes=nbytes, by_engine=by_engine)


def _of_slice(
    instructions: dict[str, Instruction], one: Instruction, whole: Instruction
) -> Transfer | None:
    """Returns the copy that a slice is, on its own or in the fusion `whole`."""
    by_engine = ADDRESSED in one.attributes
    if one.opcode in ("dynamic-slice", "slice"):
        way = _way(instructions[one.operands[0]], one)
        return Transfer(whole, way, one.nbytes, by_engine) if way else None
    if one.opcode == "dynamic-update-slice":
        piece = instructions[one.operands[1]]
        way = _way(piece, one)
        return Transfer(whole, way, piece.nbytes, by_engine) if way else None
    return None


def _way(source: Instruction, result: Instruction) -> str | None:
    """Returns the direction of a copy, None for one within the device."""
    before, after = source.arrays[0].on_host, result.arrays[0].on_host
    if before == after:
        return IN_HOST if before else None
    return TO_DEVICE if before else TO_HOST
