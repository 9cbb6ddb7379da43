"""The two operations of ZeRO on one parameter: obtain the full weight, dispose of its gradient.

Every byte that the engine moves between devices moves here. How it moves is data: a `Wire` has a
route for weights and one for gradients, and a route has mesh axes and a codec.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec
from jax.tree_util import register_dataclass
from jax.typing import DTypeLike

Entry = str | tuple[str, ...] | None  # of a PartitionSpec


class Codec(Protocol):
    """A way to write an array on the wire: as one array or several of its rank, sharded alike.

    A weight may be written in any way. A gradient is summed as it is written, so its codec may only
    change the dtype. Codecs are static arguments, so they are hashable.
    """

    def encode(self, array: Array) -> tuple[Array, ...]: ...

    def decode(self, parts: tuple[Array, ...]) -> Array: ...


@dataclasses.dataclass(frozen=True)
class Exact:
    """Sends floats in `dtype` (None: their own), everything else as it is."""

    dtype: DTypeLike | None = None

    def encode(self, array: Array) -> tuple[Array, ...]:
        is_real = jnp.issubdtype(array.dtype, jnp.floating)
        return (array.astype(self.dtype) if is_real and self.dtype is not None else array,)

    def decode(self, parts: tuple[Array, ...]) -> Array:
        (array,) = parts
        return array


@dataclasses.dataclass(frozen=True)
class Route:
    """The mesh axes that an array crosses, and those that it crosses `then`, encoded all the way.

    A weight is all-gathered over both. In its spec `then` are the major axes: gathered first over
    the minor ones, each part is contiguous for the next hop; the other way round its rows would be
    permuted. A gradient is reduce-scattered over `axes` and summed over `then`, whose devices are
    replicas of each other.
    """

    axes: tuple[str, ...]
    codec: Codec = Exact()
    then: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Wire:
    """The routes of a parameter: of its weight to the devices, of its gradient back to shards."""

    gather: Route
    reduce: Route


def wire_over(axes: tuple[str, ...], reduce_dtype: DTypeLike | None = None) -> Wire:
    """Returns the wire that is exact but for the dtype that gradients are reduced in."""
    return Wire(Route(axes), Route(axes, Exact(reduce_dtype)))


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a parameter of `rank` dimensions is sharded, and the dtypes in which it is wanted.

    `others` names, for each dimension, mesh axes of the user's own that it is sharded over (a
    `tensor` axis); it is empty where there are none.
    """

    dim: int | None  # None: replicated, and so is its gradient, all-reduced
    rank: int
    dtype: DTypeLike  # on the wire
    use_dtype: DTypeLike | None = None  # as it is used, where that is wider
    others: tuple[Entry, ...] = ()

    @property
    def final_dtype(self) -> DTypeLike:
        return self.dtype if self.use_dtype is None else self.use_dtype

    @property
    def fixed(self) -> int:
        """The first dimension that a view must leave as it is, like all after it.

        [Note: stacks of replicated layers] A replicated parameter has no sharded dimension, but a
        loop over a stack of them reduces each layer's gradient as soon as it exists. For that the
        loop must see layers, so the stack is treated as if its last dimension were sharded.
        """
        return self.rank - 1 if self.dim is None else self.dim

    def of_one_layer(self) -> "Cut":
        """Returns what a loop over the first dimension sees of it."""
        return self.moved(range(1, self.rank))

    def moved(self, dims: Sequence[int | None]) -> "Cut":
        """Returns how a view is sharded whose dimension k is dimension `dims[k]` of this array
        (None: a new one)."""
        others = tuple(None if d is None else self.others[d] for d in dims) if self.others else ()
        dim = None if self.dim is None else list(dims).index(self.dim)
        return dataclasses.replace(self, dim=dim, rank=len(dims), others=others)


# The shard is the last leaf: `_engine/vary.py` differentiates by it.
@functools.partial(register_dataclass, data_fields=["full", "shard"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Held:
    """What a device has of a parameter: its shard, and the full weight where that is replicated.

    The gradient always leaves through the shard. Beside a full weight the shard has no other use;
    at stage 0 it is as large.
    """

    shard: Array
    full: Array | None = None

    def map(self, change: Callable[[Array], Array]) -> "Held":
        return Held(change(self.shard), None if self.full is None else change(self.full))


def obtain(held: Held, cut: Cut, wire: Wire) -> Array:
    """Returns the full weight, whose gradient is disposed of through the shard."""
    if not jax.dtypes.issubdtype(held.shard.dtype, jnp.inexact):
        route = Route(wire.gather.axes, then=wire.gather.then)
        return _gathered(held.shard, cut, route) if held.full is None else held.full
    if held.full is None:
        return _all_gather(held.shard, cut, wire)
    return _route(held.full.astype(cut.dtype).astype(cut.final_dtype), held.shard, cut, wire)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _all_gather(shard: Array, cut: Cut, wire: Wire) -> Array:
    return _gathered(shard.astype(cut.dtype), cut, wire.gather).astype(cut.final_dtype)


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


def _gathered(shard: Array, cut: Cut, route: Route) -> Array:
    return opened(near(far(shard, cut, route), cut, route), route)


def far(shard: Array, cut: Cut, route: Route) -> tuple[Array, ...]:
    """Encodes a shard and all-gathers it over the axes of the route."""
    encoded = route.codec.encode(shard)
    return tuple(_collected(part, cut, route.axes) for part in encoded)


def near(parts: tuple[Array, ...], cut: Cut, route: Route) -> tuple[Array, ...]:
    """All-gathers what came from far over the axes that are left."""
    return tuple(_collected(part, cut, route.then) for part in parts) if route.then else parts


def opened(parts: tuple[Array, ...], route: Route) -> Array:
    """Decodes what was gathered."""
    return route.codec.decode(parts)


def dispose(grad: Array, dtype: DTypeLike, cut: Cut, wire: Wire) -> Array:
    """Returns the gradient of a shard, in the shard's dtype, from that of the full weight."""
    return reduced(grad.astype(cut.dtype), cut, wire.reduce).astype(dtype)


def reduced(grad: Array, cut: Cut, route: Route) -> Array:
    """Sums a gradient over the devices. Each keeps its shard of it, or all if it is replicated.

    The codec must encode to one array, which the collective can sum.
    """
    (grad,) = route.codec.encode(grad)
    dim = cut.dim
    if dim is None:
        return _each_part(lambda x: lax.psum(x, (*route.axes, *route.then)), grad, cut.others)

    def scatter(x: Array) -> Array:
        return lax.psum_scatter(x, route.axes, scatter_dimension=dim, tiled=True)

    grad = _each_part(scatter, grad, cut.others)
    if route.then:
        grad = _each_part(lambda x: lax.psum(x, route.then), grad, cut.others)
    return route.codec.decode((grad,))


def gather_rested(shard: Array, old: Array | None, cut: Cut, stacked: bool, route: Route) -> Array:
    """Returns a parameter that rests replicated (stages 1 and 2), from its updated shard.

    A stack goes layer by layer into `old`, the donated parameter that it replaces: gathered
    at once, or into new memory, it would need a second full copy.
    """
    if old is None or not stacked or cut.dim == 0:
        return _gathered(shard, cut, route)

    def put(stack: Array, layer: tuple[Array, Array]) -> tuple[Array, None]:
        index, shard = layer
        full = _gathered(shard, cut.of_one_layer(), route)
        return lax.dynamic_update_index_in_dim(stack, full, index, 0), None

    return lax.scan(put, old, (jnp.arange(len(shard)), shard))[0]


def _collected(part: Array, cut: Cut, axes: tuple[str, ...]) -> Array:
    dim = cut.dim
    assert dim is not None, "only what is sharded can be gathered"

    def collect(x: Array) -> Array:
        return lax.all_gather(x, axes, axis=dim, tiled=True)

    return _each_part(collect, part, cut.others)


def _each_part(
    collective: Callable[[Array], Array], array: Array, others: tuple[Entry, ...]
) -> Array:
    """Runs a collective over the ZeRO axes on each part of what is sharded over other axes too.

    XLA forgets, at collectives written by hand, how their operands are sharded over other axes,
    and would put the parts together first: twice the bytes for a `tensor` axis of two.
    """
    names = names_in(others)
    if not names:
        return collective(array)
    spec = PartitionSpec(*others)
    return jax.shard_map(
        collective, in_specs=spec, out_specs=spec, axis_names=names, check_vma=False
    )(array)


def names_in(entries: Iterable[Entry]) -> set[str]:
    """Returns the mesh axes that entries of a spec name."""
    return {name for e in entries for name in ((e,) if isinstance(e, str) else e or ())}


def _like(array: Array) -> Array:
    """Returns an empty array that remembers a dtype; residuals must be arrays."""
    return jnp.zeros((0,), array.dtype)
