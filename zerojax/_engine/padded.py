"""Padded weights in a loop: multiplied where they were gathered, by gradients written over them."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.tree_util import register_dataclass

from zerojax import _collectives
from zerojax._collectives import Held
from zerojax._wire.codecs import Exact, Parts
from zerojax._wire.routes import Cut, Wire

# [Note: padded weights in place]
# To drop a weight's padding, and to add it to the gradient, XLA copies both: with 4096 tokens per
# GPU that was 6% of a 7.5B step. A matrix product through cuBLAS (`xla_options.py` asks for it)
# reads its operand inside a larger array, and writes its result into one, if the padded dimension
# comes first and nothing stands between the two:
#
# - In a loop a weight is *closed*: gathered along its first dimension, and carried with its
#   padding. It is opened, that is sliced, where it is used: inside the `jax.checkpoint` that
#   reads it, because XLA would copy a slice on its way through the barrier around that.
# - Only loops over such layers do so, which keep nothing for backward. Where dots are kept (7.5B),
#   XLA's schedule exposed 58 ms of collectives instead of 6: 538 ms, and with copies 515.
# - The gradient is written over the weight, which nothing reads any more. What stays of the weight
#   is its padding, and that is zero, which is just what the gradient needs there.


def is_closed(cut: Cut) -> bool:
    """Whether a weight comes padded. What travels as codes is copied in any case."""
    gather, reduce = cut.wire.gather, cut.wire.reduce
    is_exact = isinstance(gather.codec, Exact) and isinstance(reduce.codec, Exact)
    return bool(gather.padding) and is_exact and cut.use_dtype is None


def keeps_nothing(policy: object) -> bool:
    """Whether a `jax.checkpoint` of this policy keeps nothing for backward but its inputs."""
    return policy is None or policy is jax.checkpoint_policies.nothing_saveable


@functools.partial(register_dataclass, data_fields=["array"], meta_fields=["cut"])
@dataclasses.dataclass(frozen=True)
class Closed:
    """A closed weight on its way into a `jax.checkpoint`."""

    array: Array
    cut: Cut

    def opened(self) -> Array:
        return opened(self.array, self.cut)


def obtain(held: Held, cut: Cut, parts: Parts = ()) -> Array:
    """Returns the full weight, closed if it is padded."""
    return _collectives.obtain(*_as_closed(held, cut, parts))


def arrived(held: Held, cut: Cut, parts: Parts = ()) -> Parts:
    """Returns a weight after both hops, closed if it is padded."""
    return _collectives.arrived(*_as_closed(held, cut, parts))


def _as_closed(held: Held, cut: Cut, parts: Parts) -> tuple[Held, Cut, Parts]:
    if not is_closed(cut):
        return held, cut, parts
    first = functools.partial(jnp.moveaxis, source=_dim(cut), destination=0)
    return held.map(first), _first(cut), tuple(map(first, parts))


def used(parts: Parts, cut: Cut) -> Array:
    """Returns what `obtain` returns, from what `arrived` returned."""
    return _collectives.opened(parts, _first(cut) if is_closed(cut) else cut)


def opened(full: Array, cut: Cut) -> Array:
    """Returns what `obtain` returned as the loss sees it. Its gradient is closed again."""
    if not is_closed(cut):
        return full
    return jnp.moveaxis(_rows(full, len(full) - cut.wire.gather.padding), 0, _dim(cut))


def summed(grads: Sequence[Array], cuts: Sequence[Cut]) -> list[Array]:
    """Returns the sums of the gradients of what `obtain` returned, as they travelled."""
    bare = [_first(cut) if is_closed(cut) else cut for cut in cuts]
    pairs = zip(_collectives.summed(grads, bare), cuts, strict=True)
    return [jnp.moveaxis(grad, 0, _dim(cut)) if is_closed(cut) else grad for grad, cut in pairs]


def _dim(cut: Cut) -> int:
    assert cut.dim is not None, "only what is sharded is padded"
    return cut.dim


def _first(cut: Cut) -> Cut:
    """Returns the sharding of a closed weight, to which padding is nothing special."""
    bare = (dataclasses.replace(route, padding=0) for route in (cut.wire.gather, cut.wire.reduce))
    others = (d for d in range(cut.rank) if d != cut.dim)
    return dataclasses.replace(cut, wire=Wire(*bare)).moved([_dim(cut), *others])


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _rows(full: Array, count: int) -> Array:
    return lax.slice_in_dim(full, 0, count)


def _rows_fwd(full: Array, count: int) -> tuple[Array, Array]:
    return _rows(full, count), full


def _rows_bwd(count: int, full: Array, grad: Array) -> tuple[Array]:
    grad = grad.astype(full.dtype)
    # A vector is no product of matrices: XLA would copy it here in any case, asynchronously. With
    # those copies, 17 ms more of a 519 ms step's collectives were exposed.
    if full.ndim == 1:
        return (jnp.pad(grad, (0, len(full) - count)),)
    return (lax.dynamic_update_slice_in_dim(full, grad, 0, axis=0),)


_rows.defvjp(_rows_fwd, _rows_bwd)
