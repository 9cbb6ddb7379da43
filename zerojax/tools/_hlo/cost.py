"""The modelled time of one GPU instruction: the larger of its arithmetic's and its memory's.

Arithmetic is FLOPs of matmuls, or of cuDNN's attention, over the FLOP/s that these reach, in float8
more and in float32 fewer; memory is bytes touched over the reachable bytes/s. A slice of a stacked
buffer costs the slice, an update in place costs the update.
"""

import functools
import math
import re
from collections import defaultdict
from typing import NamedTuple

from zerojax.tools._hlo.gpus import IN_FULL, Rates
from zerojax.tools._hlo.module import Instruction, Module, dtype_bytes

_FREE = re.compile(
    "parameter|constant|tuple|get-tuple-element|bitcast|after-all|iota|partition-id|replica-id|"
    "opt-barrier|.*-start|.*-done"
)
_MATMUL_CALL = re.compile("matmul|cublas")
_CUDNN_ATTENTION = "__cudnn$fmha"
_NOT_TF32 = re.compile(r'(?i)operand_precision"?[=:][{\[][^}\]]*highest|dot_f32_f32_f32')
_CONTRACTING = r'lhs_contracting_dim(?:s|ensions)"?[=:][{\[]([^}\]]*)[}\]]'
_SEE_THROUGH = ("bitcast", "copy", "convert")


class Matmul(NamedTuple):
    """A matmul of one run of a computation; `dtype` is that of its operands, or `IN_FULL`."""

    instruction: Instruction
    dtype: str
    flops: int


class CostModel:
    """The costs of one module's instructions on a GPU of these `rates`."""

    def __init__(self, module: Module, rates: Rates) -> None:
        self.module, self.rates = module, rates
        self.fusion_bytes = functools.cache(self._fusion_bytes)
        self.matmuls_of = functools.cache(self._matmuls_of)

    def seconds(self, computation: str, instruction: Instruction) -> float:
        most = self.rates.attention if _is_attention(instruction) else math.inf
        computed = sum(
            one.flops / min(most, self.rates.of_matmuls(one.dtype))
            for one in self.matmuls(computation, instruction)
        )
        return max(computed, self.touched(computation, instruction) / self.rates.memory)

    # -- arithmetic

    def matmuls(self, computation: str, instruction: Instruction) -> list[Matmul]:
        """Returns its matmuls, those in fusions and called computations included: float32 is
        rounded to TF32, or `IN_FULL`."""
        if instruction.fuses or instruction.opcode == "call":
            return [one for name in instruction.called for one in self.matmuls_of(name)]
        count = self._matmul_flops(computation, instruction)
        if not count:
            return []
        left = self.module.computations[computation][instruction.operands[0]]
        dtype = left.arrays[0].dtype
        in_full = dtype == "f32" and _NOT_TF32.search(instruction.attributes)
        return [Matmul(instruction, IN_FULL if in_full else dtype, count)]

    def _matmuls_of(self, name: str) -> list[Matmul]:
        instructions = self.module.computations[name].values()
        return [one for instruction in instructions for one in self.matmuls(name, instruction)]

    def _matmul_flops(self, computation: str, instruction: Instruction) -> int:
        opcode, attributes = instruction.opcode, instruction.attributes
        if opcode == "dot" or (opcode == "custom-call" and _MATMUL_CALL.search(attributes)):
            return self._dot_flops(computation, instruction)
        if opcode == "convolution" or "__cudnn$conv" in attributes:
            return self._convolution_flops(computation, instruction)
        return self._attention_flops(computation, instruction) if _is_attention(instruction) else 0

    def _dot_flops(self, computation: str, dot: Instruction) -> int:
        left = self.module.computations[computation][dot.operands[0]].arrays[0]
        numbers = re.findall(r"\d+", dot.attribute(_CONTRACTING) or "")
        dims = [int(number) for number in numbers] or [len(left.dims) - 1]
        return 2 * dot.arrays[0].size * math.prod(left.dims[d] for d in dims)

    def _convolution_flops(self, computation: str, convolution: Instruction) -> int:
        """Counts two FLOPs for each pair of an output element and a kernel element that meet.

        A convolution of backward takes forward's output as an operand or returns its kernel.
        """
        instructions = self.module.computations[computation]
        first, second = (instructions[o].arrays[0] for o in convolution.operands[:2])
        output, kernel = convolution.arrays[0], second
        if "convBackwardInput" in convolution.attributes:
            output = first
        elif "convBackwardFilter" in convolution.attributes:
            output, kernel = second, output
        labels = convolution.attribute(r"dim_labels=\w+_(\w+)->") or ""
        features = kernel.dims[labels.index("o")] if "o" in labels else 1
        return 2 * output.size * kernel.size // max(features, 1)

    def _attention_flops(self, computation: str, attention: Instruction) -> int:
        """Counts the FLOPs of its matmuls; of causal attention half, as its kernel skips blocks."""
        scores = attention.attribute(r'"intermediate_tensor_shape":.*?"dimensions": ?\[([^\]]*)\]')
        count = math.prod(int(d) for d in re.findall(r"\d+", scores or "0"))
        query = self.module.computations[computation][attention.operands[0]].arrays[0]
        matmuls = 5 if "Backward" in attention.attributes else 2  # backward makes the scores again
        causal = "CAUSAL" in (attention.attribute(r'"mask_type": ?"(\w+)"') or "")
        return matmuls * 2 * count * query.dims[-1] // (2 if causal else 1)

    # -- memory

    def touched(self, computation: str, instruction: Instruction) -> float:
        """Counts the bytes read and written."""
        opcode = instruction.opcode
        if instruction.fuses:
            reads, writes = self.fusion_bytes(instruction.called[0])
            return reads + writes
        if _FREE.fullmatch(opcode):
            return 0
        instructions = self.module.computations[computation]
        operands = [instructions[o].nbytes for o in instruction.operands]
        if opcode == "dynamic-slice":
            return 2 * instruction.nbytes
        if opcode == "dynamic-update-slice":
            return 2 * operands[1]
        return sum(operands) + instruction.nbytes

    def _fusion_bytes(self, name: str) -> tuple[float, float]:
        """Counts bytes (read, written) by a fused computation: the parts of buffers it needs."""
        instructions = self.module.computations[name]
        seen_through: dict[str, str] = {}  # a parameter under casts stays that parameter
        users: dict[str, list[tuple[int, Instruction]]] = defaultdict(list)
        for instruction in instructions.values():
            for at, operand in enumerate(instruction.operands):
                origin = seen_through.get(operand, operand)
                is_cast = instruction.opcode in _SEE_THROUGH
                if is_cast and instructions[origin].opcode == "parameter":
                    seen_through[instruction.name] = origin
                else:
                    users[origin].append((at, instruction))
        outputs = self.module.results(name)
        for output in (output for output in outputs if output.name in seen_through):
            users[seen_through[output.name]].append((0, output))
        parameters = [i for i in instructions.values() if i.opcode == "parameter"]
        reads = sum(_read(p, users[p.name]) for p in parameters)
        return reads, sum(_written_by(instructions, output) for output in outputs)


def _is_attention(instruction: Instruction) -> bool:
    return instruction.opcode == "custom-call" and _CUDNN_ATTENTION in instruction.attributes


def _written_by(instructions: dict[str, Instruction], output: Instruction) -> float:
    """Counts the update alone where the output, under casts, is updated in place."""
    inner = output
    while inner.opcode in _SEE_THROUGH and inner.operands:
        inner = instructions[inner.operands[0]]
        if inner.opcode not in ("dynamic-update-slice", "bitcast"):
            break
    if inner.opcode == "dynamic-update-slice":
        return instructions[inner.operands[1]].nbytes
    return output.nbytes


def _read(parameter: Instruction, users: list[tuple[int, Instruction]]) -> float:
    """Counts the bytes that users read of a fusion's parameter."""
    nbytes, total = parameter.nbytes, 0.0
    for at, user in users:
        if user.opcode in ("slice", "dynamic-slice", "gather") and at == 0:
            total += user.arrays[0].size * dtype_bytes(parameter.arrays[0].dtype)
        elif user.opcode == "dynamic-update-slice" and at == 0:
            continue
        elif user.opcode in ("dynamic-slice", "dynamic-update-slice") and nbytes <= 8:
            continue  # an index
        else:
            return nbytes
    return min(nbytes, total)
