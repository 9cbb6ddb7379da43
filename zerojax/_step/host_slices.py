"""Slices of host memory, and whether XLA finds them."""

import re

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, Mesh, PartitionSpec

from zerojax import _compat
from zerojax._features.xla_options import DOUBLE_BUFFER
from zerojax._kernel.arrays import sliced, written
from zerojax._kernel.places import Placement
from zerojax._types import Device
from zerojax._update.offload import PINNED
from zerojax._warn import warn

# [Note: slices of host memory]
# The GPU's engines copy a slice of a stack in host memory, beside its kernels, only where XLA sees
# that the index is linear in the counter of the loop. From an `arange`, a clamp, or a negative
# index that wraps around, the copy becomes a kernel, which occupies the GPU. The engines are given
# an address, `offset + stride * iteration`. XLA of JAX 0.10 takes the stride of a layer and no
# offset, even if the index is another one than the counter (the next layer's) or if it has doubled
# the body of the loop. Other layers would be copied, and nothing would say so.

_ADDRESS = re.compile(r'byte_offset":"(\d+)","byte_stride":"([1-9]\d*)"')
_LOOPED, _LOOP_WIDTH = 9, 1024  # of the loop that is looked at


@_compat.device_cache
def are_found(device: Device) -> bool:
    """Whether XLA finds the next layer's slice, and those of loops that it doubled.

    It compiles such a loop and reads the addresses. See the note above.
    """
    if not _compat.is_gpu(device):
        return True
    mesh = Mesh(np.array([device]), ("device",), axis_types=(AxisType.Auto,))
    here = Placement(PartitionSpec())
    there = Placement(PartitionSpec(), memory=PINNED)
    layer = (1, _LOOP_WIDTH, _LOOP_WIDTH)
    stack = jax.ShapeDtypeStruct((_LOOPED, *layer[1:]), "float32", sharding=there.sharding(mesh))
    total = jax.ShapeDtypeStruct(layer, "float32", sharding=here.sharding(mesh))
    options = {DOUBLE_BUFFER: True}
    program = jax.jit(_walk, donate_argnums=0, compiler_options=options).lower(stack, total)
    nbytes = 4 * _LOOP_WIDTH**2
    found = {(int(a), int(b)) for a, b in _ADDRESS.findall(program.compile().as_text() or "")}
    right = all(b == 2 * nbytes for _, b in found)
    if not right:
        warn(
            f"JAX {jax.__version__} does not find slices of host memory in loops that it doubles, "
            "nor other layers than that of the turn. Steps with state there run without the one, "
            "which copies gathered weights from layer to layer, and read parameters there by "
            "kernels. A newer JAX needs neither."
        )
    return right


def _walk(stack: Array, total: Array) -> tuple[Array, Array]:
    """Reads each layer a turn early, and writes it back."""

    def turn(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        stack, total, layer = carry
        stack = written(stack, _compat.stored(layer * 2), i)
        return stack, total + layer, _compat.fetched(sliced(stack, i + 1))

    first = _compat.fetched(sliced(stack, 0))
    return lax.fori_loop(0, _LOOPED - 1, turn, (stack, total, first))[:2]
