"""The modelled time of one GPU instruction: the largest of its arithmetic's, its memory's and a
launch's.

Arithmetic is the FLOPs of matmuls, or of cuDNN's attention, over the FLOP/s that they reach: more
in float8, fewer in float32. Memory is the bytes touched over the reachable bytes/s. A slice of a
stacked buffer costs the slice, an update in place costs the update.
"""

import functools
import math
import re
from collections import defaultdict
from typing import TypeAlias

from zerojax.tools._hlo.gpus import IN_FULL, Rates
from zerojax.tools._hlo.module import Instruction, Module, dtype_bytes

_FREE = re.compile(
    "parameter|constant|tuple|get-tuple-element|bitcast|after-all|iota|partition-id|replica-id|"
    "opt-barrier|.*-start|.*-done"
)
MATMUL_CALL = re.compile("matmul|cublas")
_CUDNN_ATTENTION = "__cudnn$fmha"
_NOT_TF32 = re.compile(r'(?i)operand_precision"?[=:][{\[][^}\]]*highest|dot_f32_f32_f32')
_CONTRACTING = r'lhs_contracting_dim(?:s|ensions)"?[=:][{\[]([^}\]]*)[}\]]'
_SEE_THROUGH = ("bitcast", "copy", "convert")

# A matmul of one run of a computation: its instruction, the dtype of its operands (`IN_FULL` for
# float32 that is not rounded to TF32), its FLOPs.
Matmul: TypeAlias = tuple[Instruction, str, int]


class CostModel:
    """The costs of one module's instructions on a GPU of these `rates`."""

    def __init__(self, module: Module, rates: Rates) -> None:
        self.module, self.rates = module, rates
        self.fusion_bytes = functools.cache(self._fusion_bytes)
        self.matmuls_of = functools.cache(self._matmuls_of)

    def seconds(self, instruction: Instruction) -> float:
        most = self.rates.attention if _is_attention(instruction) else math.inf
        matmuls = self.matmuls(instruction)
        computed = sum(n / min(most, self.rates.of_matmuls(dtype)) for _, dtype, n in matmuls)
        launched = self.rates.launch if _is_kernel(instruction) else 0.0
        return max(computed, self.touched(instruction) / self.rates.memory, launched)

    # -- arithmetic

    def matmuls(self, instruction: Instruction) -> list[Matmul]:
        """Returns its matmuls, those in fusions and called computations included.

        None for TPUs: their convolutions have batches as windows, whose FLOPs this does not count.
        """
        if self.module.is_of_tpu:
            return []
        if instruction.fuses or instruction.opcode == "call":
            return [one for name in instruction.called for one in self.matmuls_of(name)]
        opcode, attributes = instruction.opcode, instruction.attributes
        operands = instruction.operands
        if opcode == "dot" or (opcode == "custom-call" and MATMUL_CALL.search(attributes)):
            left = operands[0].arrays[0].dims
            numbers = re.findall(r"\d+", instruction.attribute(_CONTRACTING) or "")
            contracted = [left[int(number)] for number in numbers] or [left[-1]]
            flops = 2 * instruction.arrays[0].size * math.prod(contracted)
        elif opcode == "convolution" or "__cudnn$conv" in attributes:
            flops = _convolution_flops(instruction)
        elif _is_attention(instruction):
            flops = _attention_flops(instruction, operands[0].arrays[0].dims[-1])
        else:
            return []
        eight = [_unscaled(one) for one in operands[:2]]
        is_eight = all(dtype.startswith("f8") for dtype in eight)
        dtype = eight[0] if is_eight else operands[0].arrays[0].dtype
        in_full = dtype == "f32" and _NOT_TF32.search(attributes)
        return [(instruction, IN_FULL if in_full else dtype, flops)] if flops else []

    def _matmuls_of(self, name: str) -> list[Matmul]:
        instructions = self.module.computations[name].values()
        return [one for instruction in instructions for one in self.matmuls(instruction)]

    # -- memory

    def touched(self, instruction: Instruction) -> float:
        """Counts the bytes read and written."""
        opcode = instruction.opcode
        if instruction.fuses:
            return self.fusion_bytes(instruction.called[0])
        if not _is_kernel(instruction):
            return 0
        if opcode == "dynamic-slice":
            return 2 * instruction.nbytes
        operands = [one.nbytes for one in instruction.operands]
        if opcode == "dynamic-update-slice":
            return 2 * operands[1]
        return sum(operands) + instruction.nbytes

    def _fusion_bytes(self, name: str) -> float:
        """Counts the bytes that a fused computation reads and writes: only the parts of buffers
        that it needs."""
        seen_through: dict[Instruction, Instruction] = {}  # parameters under casts
        users: dict[Instruction, list[tuple[int, Instruction]]] = defaultdict(list)
        for instruction in self.module.computations[name].values():
            for at, operand in enumerate(instruction.operands):
                origin = seen_through.get(operand, operand)
                if instruction.opcode in _SEE_THROUGH and origin.opcode == "parameter":
                    seen_through[instruction] = origin
                else:
                    users[origin].append((at, instruction))
        outputs = self.module.results(name)
        for output in (output for output in outputs if output in seen_through):
            users[seen_through[output]].append((0, output))
        reads = sum(_read(one, of) for one, of in users.items() if one.opcode == "parameter")
        return reads + sum(map(_written_by, outputs))


def _unscaled(operand: Instruction) -> str:
    """Returns the dtype of an operand under casts and scales: XLA has cuBLAS apply those of float8,
    but without a GPU, it writes them before the matmul."""
    while operand.operands:
        factor, *scales = sorted(operand.operands, key=lambda one: one.opcode == "broadcast")
        by_scale = operand.opcode == "multiply" and scales[0].opcode == "broadcast"
        if not by_scale and operand.opcode not in _SEE_THROUGH:
            break
        operand = factor
    return operand.arrays[0].dtype


def _is_kernel(instruction: Instruction) -> bool:
    return instruction.fuses or not _FREE.fullmatch(instruction.opcode)


def _is_attention(instruction: Instruction) -> bool:
    return instruction.opcode == "custom-call" and _CUDNN_ATTENTION in instruction.attributes


def _convolution_flops(convolution: Instruction) -> int:
    """Counts two FLOPs for each pair of an output element and a kernel element that meet.

    A convolution of backward takes forward's output as an operand or returns its kernel.
    """
    first, second = (operand.arrays[0] for operand in convolution.operands[:2])
    output, kernel = convolution.arrays[0], second
    if "convBackwardInput" in convolution.attributes:
        output = first
    elif "convBackwardFilter" in convolution.attributes:
        output, kernel = second, output
    labels = convolution.attribute(r"dim_labels=\w+_(\w+)->") or ""
    features = kernel.dims[labels.index("o")] if "o" in labels else 1
    return 2 * output.size * kernel.size // max(features, 1)


def _attention_flops(attention: Instruction, head: int) -> int:
    """Counts the FLOPs of its matmuls; half of them for causal attention, whose kernel skips
    blocks."""
    scores = attention.attribute(r'"intermediate_tensor_shape":.*?"dimensions": ?\[([^\]]*)\]')
    count = math.prod(int(d) for d in re.findall(r"\d+", scores or "0"))
    matmuls = 5 if "Backward" in attention.attributes else 2  # backward makes the scores again
    causal = "CAUSAL" in (attention.attribute(r'"mask_type": ?"(\w+)"') or "")
    return matmuls * 2 * count * head // (2 if causal else 1)


def _written_by(output: Instruction) -> float:
    """Counts only the update where the output, under casts, is updated in place."""
    inner = output
    while inner.opcode in _SEE_THROUGH and inner.operands:
        inner = inner.operands[0]
        if inner.opcode not in ("dynamic-update-slice", "bitcast"):
            break
    is_update = inner.opcode == "dynamic-update-slice"
    return (inner.operands[1] if is_update else output).nbytes


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
