"""Weights that rest as codes of 4 or 8 bits, with a scale for each block.

Gains: a frozen weight takes 4.25 or 8.25 bits at rest, on its way and on the host, not 16 or 32. It
costs a decoding after each gather, on each device, and the error of the codes.

[Note: one array of bytes]
A `Packed` is a node of a tree of parameters, whose one leaf is an array of uint8. Each row of the
weight, along its last dimension, is a row of bytes: first the codes, then a scale for each block in
two bytes of bfloat16. So plans, checkpoints and steps see one leaf of integers in place of one leaf
of floats: nothing casts it, no optimizer moves it, and one all-gather moves codes and scales. The
other dimensions are those of the weight. A loss sees the weight: `_passes/codes.py`.
"""

import dataclasses
import functools
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.tree_util import GetAttrKey, register_pytree_with_keys_class
from jax.typing import DTypeLike

from zerojax._axis_types import on_auto_axes
from zerojax._types import PyTree, Shape

# The levels of nf4: quantiles of a normal distribution, of which 0 and the ends are exact (QLoRA,
# arXiv 2305.14314).
NF4 = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453]
    + [-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0]
    + [0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224]
    + [0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0],
    np.float32,
)
TOP_LEVELS = {"nf4": 1.0, "int4": 7.0, "int8": 127.0}  # the level that the largest value gets
SCALE_BYTES = 2
MOST_RUN = 64  # the most neighbours that share a scale, unless a user says so
LEAST_RUN = 32  # a smaller block would spend more than half a bit a weight on its scale


@dataclasses.dataclass(frozen=True)
class Coding:
    """How the rows of a weight are written as bytes."""

    kind: str
    block: int
    length: int  # of a row
    dtype: np.dtype  # of the weight that a loss sees

    @property
    def row(self) -> int:
        """The bytes of a row."""
        return self.code_bytes + self.length // self.block * SCALE_BYTES

    @property
    def code_bytes(self) -> int:
        return self.length if self.kind == "int8" else self.length // 2

    @functools.partial(jax.jit, static_argnums=0)
    @on_auto_axes
    def bytes_of(self, weight: Array) -> Array:
        blocks = weight.astype(jnp.float32).reshape(*weight.shape[:-1], -1, self.block)
        sizes = jnp.max(jnp.abs(blocks), axis=-1) / TOP_LEVELS[self.kind]
        # Rounded up, so that no code exceeds the largest.
        bits = lax.bitcast_convert_type(sizes, jnp.uint32) + 0xFFFF
        scale = lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
        divisor = jnp.where(sizes > 0, scale.astype(jnp.float32), 1)
        values = blocks / divisor[..., None]
        if self.kind == "nf4":
            codes = jnp.searchsorted(jnp.asarray((NF4[1:] + NF4[:-1]) / 2), values)
        else:
            codes = jnp.round(values).astype(jnp.int8)
        codes = codes.astype(jnp.uint8).reshape(*weight.shape[:-1], -1)
        if self.kind != "int8":
            # The low halves of the bytes are the first half of a row.
            low, high = jnp.split(codes, 2, axis=-1)
            codes = (low & 15) | (high << 4)
        scales = lax.bitcast_convert_type(scale, jnp.uint8)
        return jnp.concatenate([codes, scales.reshape(*weight.shape[:-1], -1)], axis=-1)

    @functools.partial(jax.jit, static_argnums=0)
    @on_auto_axes
    def weight_of(self, rows: Array) -> Array:
        # Padding comes after the scales.
        codes, scales = jnp.split(rows[..., : self.row], [self.code_bytes], axis=-1)
        scales = scales.reshape(*rows.shape[:-1], -1, SCALE_BYTES)
        scale = lax.bitcast_convert_type(scales, jnp.bfloat16).astype(jnp.float32)
        if self.kind == "nf4":
            places = jnp.concatenate([codes & 15, codes >> 4], axis=-1)
            levels = jnp.asarray(NF4).at[places].get(mode="promise_in_bounds")
        else:
            signed = lax.bitcast_convert_type(codes, jnp.int8)
            if self.kind == "int4":  # shifts keep the sign
                signed = jnp.concatenate([(signed << 4) >> 4, signed >> 4], axis=-1)
            levels = signed.astype(jnp.float32)
        blocks = levels.reshape(*scale.shape, self.block) * scale[..., None]
        return blocks.reshape(*rows.shape[:-1], self.length).astype(self.dtype)


@register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class Packed:
    """A weight that rests as codes: the `rows` of bytes, and how they are written.

    Made by `zerojax.quantize`. A loss sees the weight itself; `zerojax.manual.dequantize` returns
    it elsewhere.
    """

    rows: PyTree
    coding: Coding

    def tree_flatten_with_keys(self) -> tuple[tuple, Coding]:
        return ((GetAttrKey(self.coding.kind), self.rows),), self.coding

    @classmethod
    def tree_unflatten(cls, coding: Coding, children: tuple) -> "Packed":
        return cls(children[0], coding)

    @property
    def shape(self) -> Shape:
        return (*self.rows.shape[:-1], self.coding.length)

    @property
    def dtype(self) -> np.dtype:
        return self.coding.dtype

    def astype(self, dtype: DTypeLike) -> "Packed":
        """Returns the same codes of a weight that a loss sees in another dtype."""
        return Packed(self.rows, dataclasses.replace(self.coding, dtype=jnp.dtype(dtype)))

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError(
            f"a weight {self.dtype}{list(self.shape)} is stored in {self.coding.kind}, and only "
            "the loss of a step sees the weight itself. To call the model yourself, pass it "
            "zerojax.manual.dequantize(params); for Flax nnx, make a second model: "
            "zerojax.nnx.merge(s, zerojax.manual.dequantize(s.params)), s being "
            "zerojax.nnx.state(model, optimizer)."
        )

    # What a model, numpy or JAX does first with a weight.
    __jax_array__ = __array__ = __getitem__ = __iter__ = __len__ = _refuse
    __add__ = __radd__ = __mul__ = __rmul__ = __matmul__ = __rmatmul__ = _refuse


def is_packed(node: object) -> bool:
    return isinstance(node, Packed)


def coding_for(kind: str, block: int, shape: Shape, dtype: DTypeLike) -> Coding | None:
    """Returns how a weight is written, None if no block divides its rows."""
    sizes = (n for n in range(min(block, shape[-1]), LEAST_RUN - 1, -1) if shape[-1] % n == 0)
    size = next((n for n in sizes if kind == "int8" or n % 2 == 0), None)
    return None if size is None else Coding(kind, size, shape[-1], jnp.dtype(dtype))


def weights_of(tree: PyTree) -> PyTree:
    """Returns a tree with weights in place of their codes."""
    return jax.tree.map(
        lambda x: x.coding.weight_of(x.rows) if is_packed(x) else x, tree, is_leaf=is_packed
    )


def codings_of(tree: PyTree) -> list[Coding | None]:
    """Returns, for each leaf of a tree, how it is written; None for all that are not codes."""
    nodes = jax.tree.leaves(tree, is_leaf=is_packed)
    each = ((node.coding if is_packed(node) else None, node) for node in nodes)
    # An optimizer's state has nodes of codes without a leaf, where it leaves them alone.
    return [coding for coding, node in each for _ in jax.tree.leaves(node)]
