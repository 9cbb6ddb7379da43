"""The two operations of ZeRO on one parameter: obtain the full weight, dispose of its gradient.

Other ways to move bytes (hierarchical groups, quantised wires) are variants of these two.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

Array = Any


@dataclasses.dataclass(frozen=True)
class Wire:
    """Over which mesh axes, in which dtype gradients travel (None: the weight's own), whether in
    a loop weights wait until the gradients before them have, and whether loops that prefetch are
    to be unrolled."""

    axes: tuple[str, ...]
    reduce_dtype: Any = None
    in_turn: bool = False
    unrolled: bool = False


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a parameter is held: along which dimension, and as which dtype it is wanted.

    `others` names, for each dimension, mesh axes of the user's own that it lies along (a `tensor`
    axis); it is empty where there are none.
    """

    dim: int
    dtype: Any  # as it travels
    use_dtype: Any = None  # as it is used, where that is wider
    keeps_all: bool = False  # of the gradient (stage 0)
    others: tuple[Any, ...] = ()

    @property
    def final_dtype(self) -> Any:
        return self.use_dtype or self.dtype

    def of_one_layer(self) -> "Cut":
        """Of what a loop over the first dimension sees."""
        return dataclasses.replace(self, dim=self.dim - 1, others=self.others[1:])

    def moved(self, dims: Sequence[int | None]) -> "Cut":
        """Of an array whose dimension k is dimension `dims[k]` of this one (None: made anew)."""
        others = tuple(None if d is None else self.others[d] for d in dims) if self.others else ()
        return dataclasses.replace(self, dim=list(dims).index(self.dim), others=others)


def obtain(held: tuple[Array, ...], cut: Cut, wire: Wire) -> Array:
    """The full weight. Its gradient leaves through the shard, which is the last of `held`.

    Stage 3 holds `(shard,)`; below it is `(full, shard)`, where the shard only routes (at stage 0
    it is as large as `full`).
    """
    *full, shard = held
    if not jax.dtypes.issubdtype(shard.dtype, jax.numpy.inexact):
        return full[0] if full else gather(shard, cut.dim, wire.axes, cut.others)
    if full:
        return _route(full[0].astype(cut.dtype).astype(cut.final_dtype), shard, cut, wire)
    return _all_gather(shard, cut, wire)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _all_gather(shard: Array, cut: Cut, wire: Wire) -> Array:
    full = gather(shard.astype(cut.dtype), cut.dim, wire.axes, cut.others)
    return full.astype(cut.final_dtype)


def _all_gather_fwd(shard: Array, cut: Cut, wire: Wire) -> tuple[Array, Array]:
    return _all_gather(shard, cut, wire), _like(shard)


def _all_gather_bwd(cut: Cut, wire: Wire, like: Array, grad: Array) -> tuple[Array]:
    return (dispose(grad, like.dtype, cut, wire),)


_all_gather.defvjp(_all_gather_fwd, _all_gather_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _route(full: Array, shard: Array, cut: Cut, wire: Wire) -> Array:
    del shard, cut, wire
    return full


def _route_fwd(full: Array, shard: Array, cut: Cut, wire: Wire) -> tuple[Array, Array]:
    return full, _like(shard)


def _route_bwd(cut: Cut, wire: Wire, like: Array, grad: Array) -> tuple[None, Array]:
    return None, dispose(grad, like.dtype, cut, wire)


_route.defvjp(_route_fwd, _route_bwd)


def dispose(grad: Array, dtype: Any, cut: Cut, wire: Wire) -> Array:
    """The gradient of a shard, in the shard's dtype, from that of the full weight."""
    grad = grad.astype(cut.dtype)
    if cut.keeps_all:
        return reduce(grad, wire, cut.others).astype(dtype)
    return scatter(grad, cut.dim, wire, cut.others).astype(dtype)


def gather(shard: Array, dim: int, axes: tuple[str, ...], others: tuple[Any, ...] = ()) -> Array:
    """The whole array, from this device's part of it."""
    collect = lambda x: lax.all_gather(x, axes, axis=dim, tiled=True)  # noqa: E731
    return _each_part(collect, shard, others)


def scatter(grad: Array, dim: int, wire: Wire, others: tuple[Any, ...] = ()) -> Array:
    """Sums a gradient over the devices and keeps this device's part."""
    keep = lambda x: lax.psum_scatter(x, wire.axes, scatter_dimension=dim, tiled=True)  # noqa: E731
    return _each_part(keep, _on_wire(grad, wire), others)


def reduce(grad: Array, wire: Wire, others: tuple[Any, ...] = ()) -> Array:
    """Sums a gradient over the devices; everyone keeps all of it."""
    return _each_part(lambda x: lax.psum(x, wire.axes), _on_wire(grad, wire), others)


def _each_part(collective: Callable, array: Array, others: tuple[Any, ...]) -> Array:
    """A collective over the ZeRO axes, on each part of what lies along other axes too.

    XLA forgets at collectives written by hand how it cuts their operands along other axes, and
    would put the parts together first: twice the bytes for a `tensor` axis of two.
    """
    names = names_in(others)
    if not names:
        return collective(array)
    spec = PartitionSpec(*others)
    return jax.shard_map(
        collective, in_specs=spec, out_specs=spec, axis_names=names, check_vma=False
    )(array)


def _on_wire(grad: Array, wire: Wire) -> Array:
    is_real = jax.numpy.issubdtype(grad.dtype, jax.numpy.floating)
    return grad.astype(wire.reduce_dtype) if is_real and wire.reduce_dtype else grad


def gather_rested(
    shard: Array,
    old: Array | None,
    dim: int | None,
    stacked: bool,
    axes: tuple[str, ...],
    others: tuple[Any, ...] = (),
) -> Array:
    """A parameter that rests whole (stages 1 and 2), from its updated shard.

    A stack goes layer by layer into `old`, the donated parameter that it replaces: gathered
    at once, or into new memory, it would need a second full copy.
    """
    assert dim is not None, "only what is cut can be gathered"
    if old is None or not stacked or dim == 0:
        return gather(shard, dim, axes, others)

    def put(stack: Array, layer: tuple[Array, Array]) -> tuple[Array, None]:
        index, shard = layer
        full = gather(shard, dim - 1, axes, others[1:])
        return lax.dynamic_update_index_in_dim(stack, full, index, 0), None

    return lax.scan(put, old, (jax.numpy.arange(len(shard)), shard))[0]


def _like(array: Array) -> Array:
    """An empty array that remembers a dtype; residuals must be arrays."""
    return jax.numpy.zeros((0,), array.dtype)


def names_in(entries: Iterable[Any]) -> set[str]:
    """The mesh axes that entries of a spec name."""
    return {name for e in entries for name in ((e,) if isinstance(e, str) else e or ())}
