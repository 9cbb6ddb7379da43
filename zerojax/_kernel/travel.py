"""How a parameter travels: its weight to the devices, its gradient back to the shards.

Every byte that the engine moves between devices moves here. How it moves is data: a `Cut` has a
route for the weight and one for its gradient, and a route has mesh axes and a codec.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec
from jax.tree_util import register_dataclass
from jax.typing import DTypeLike

from zerojax import _compat
from zerojax._specs import Entry, names_in
from zerojax._types import PyTree, is_float

Parts = tuple[Array, ...]  # an array as a codec wrote it


class Codec(Protocol):
    """A format for an array on the wire: one or several arrays of its rank, sharded alike.

    Codecs are static arguments, so they are hashable.
    """

    def encode(self, array: Array) -> Parts: ...

    def decode(self, parts: Parts) -> Array: ...

    @property
    def sums(self) -> "CodedSum | None":
        """None if a reduce-scatter can add encoded arrays, each of one part."""
        ...


# Reduce-scatters several arrays over axes, each as its own codec writes it; returns decoded shards.
CodedSum = Callable[[Sequence[Array], Sequence["Cut"], Sequence[Codec], Sequence[str]], list[Array]]


@dataclasses.dataclass(frozen=True)
class Exact:
    """Sends floats in `dtype` (None: their own), everything else unchanged."""

    sums = None
    dtype: DTypeLike | None = None

    def encode(self, array: Array) -> Parts:
        is_real = jnp.issubdtype(array.dtype, jnp.floating)
        return (array.astype(self.dtype) if is_real and self.dtype is not None else array,)

    def decode(self, parts: Parts) -> Array:
        (array,) = parts
        return array


EXACT = Exact()
Hop = tuple[tuple[str, ...], bool]  # axes, and whether the array crosses them quantized


@dataclasses.dataclass(frozen=True)
class Route:
    """The mesh axes that an array crosses, in two hops, encoded all the way.

    `far` is the hop that a weight can make early and keep, and a gradient late: often the network
    between nodes. At plain stage 3 there is none, and all axes are `near`. A weight is all-gathered
    over `far` and then over `near`; its gradient is reduce-scattered over `near`, then over `far`,
    and summed over `replicas`. The spec of the sharded array has `near` major and `far` minor, so
    gathering over `far` first leaves each device a contiguous block for `near`. The sharded
    dimension has `padding` elements more than the parameter. The gather drops them, and the
    reduction adds them again. A gradient is quantized only over the axes in `coded`: inside a node,
    an exact reduce-scatter hides by itself, and leaves only a fraction to encode. (Quantizing all
    the way costs 20 ms of compute, 7.5B on 8 nodes of 8 H100s with int8, this way 2.)
    """

    near: tuple[str, ...] = ()
    far: tuple[str, ...] = ()
    replicas: tuple[str, ...] = ()
    codec: Codec = EXACT
    padding: int = 0
    coded: tuple[str, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes over which a gradient is scattered, in order."""
        return (*self.near, *self.far)

    @property
    def hops(self) -> tuple[Hop, ...]:
        """The axes of a gradient in runs that it crosses quantized or exact.

        The runs keep the order in which shards are laid out. In any other order, a device would end
        up with the part of another device.
        """
        runs = itertools.groupby(self.axes, lambda axis: axis in self.coded)
        return tuple((tuple(axes), is_coded) for is_coded, axes in runs)

    def coded_over(self, axes: tuple[str, ...]) -> "Route":
        """Returns the route of a gradient that is quantized only over these of its axes."""
        if self.codec.sums is None:
            return self
        return dataclasses.replace(self, coded=axes, codec=self.codec if axes else EXACT)


NOWHERE = Route()


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a parameter of `rank` dimensions is sharded, and how it travels: its weight along
    `gather` from shards to devices, its gradient back along `reduce`.

    `others` names, for each dimension, the user's own mesh axes that shard it (a `tensor` axis); it
    is empty if there are none. `asked` names those by which the loss wants the full weight sharded,
    if the shard is not. `path` is for messages and traces.
    """

    dim: int | None  # None: the parameter is replicated, and so is its all-reduced gradient
    rank: int
    dtype: DTypeLike  # on the wire, of weights and gradients
    gather: Route = NOWHERE
    reduce: Route = NOWHERE
    use_dtype: DTypeLike | None = None  # in the loss, if that is wider
    others: tuple[Entry, ...] = ()
    asked: tuple[Entry, ...] = ()
    path: str = "a parameter"

    @property
    def final_dtype(self) -> DTypeLike:
        return self.dtype if self.use_dtype is None else self.use_dtype

    @property
    def fixed(self) -> int:
        """The first of the dimensions that a view must not change; the others follow it.

        [Note: stacks of replicated layers] A replicated parameter has no sharded dimension, but a
        loop over a stack of them reduces each layer's gradient as soon as it exists. For that the
        loop must see layers, so the stack is treated as if its last dimension were sharded.
        """
        return self.rank - 1 if self.dim is None else self.dim

    def of_one_layer(self) -> "Cut":
        """Returns the sharding of one layer, in a loop over the first dimension."""
        return self.moved(range(1, self.rank))

    def moved(self, dims: Sequence[int | None]) -> "Cut":
        """Returns the sharding of a view whose dimension k is dimension `dims[k]` of this array
        (None: a new one)."""

        def along(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
            return tuple(None if d is None else entries[d] for d in dims) if entries else ()

        dim = None if self.dim is None else list(dims).index(self.dim)
        own = {"others": along(self.others), "asked": along(self.asked)}
        return dataclasses.replace(self, dim=dim, rank=len(dims), **own)

    def asked_for(self, spec: PartitionSpec) -> "Cut":
        """Returns the sharding with what a constraint of the loss asks for, if it names axes by
        which the shard is not sharded already."""
        entries = (*spec, *[None] * (self.rank - len(spec)))
        named = names_in(e for e in entries if e is not PartitionSpec.UNCONSTRAINED)
        return self if named <= names_in(self.others) else dataclasses.replace(self, asked=entries)


def named(cuts: Sequence[Cut]) -> contextlib.AbstractContextManager:
    """Names the operations in its block after parameters, for readers of a trace."""
    return jax.named_scope("+".join(cut.path for cut in cuts))


# A weight on its way, as its codec wrote it: after the far hop, or after both hops; () before any.
Transit = Parts


@functools.partial(
    register_dataclass, data_fields=["shard", "rest", "state", "update"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Held:
    """A parameter as one device has it: the shard whose gradient leaves, and the array at rest.

    The gradient of the parameter is the gradient of `shard`. If the array at rest is sharded alike,
    `rest` is None, and the weight is gathered from `shard`. Otherwise (below stage 3 the full
    weight rests; microbatches share a weight that was brought near) `shard` holds zeros, which
    nothing reads, and the weight comes from `rest`. At stage 0 the shard is as large as the weight.

    With a `state`, a loop changes the parameter in backward: see `Hook`. Then `rest` and `state`
    have gradients in place of `shard`: what they are after the loop.
    """

    shard: Array
    rest: Array | None = None
    state: tuple[Array, ...] | None = None
    update: PyTree = None  # what the hook knows of it; the kernel only passes it on

    @property
    def source(self) -> Array:
        """The array from which the full weight is obtained."""
        return self.shard if self.rest is None else self.rest

    def map(self, change: Callable[[Array], Array]) -> "Held":
        """Returns a view of the parameter, which nothing changes."""
        return jax.tree.map(change, Held(self.shard, self.rest))


# -- out: a weight crosses the far axes of its route, arrives over the near ones, and is decoded


def obtain(held: Held, cut: Cut) -> Array:
    """Returns the full weight, whose gradient is reduced to the shard."""
    if not is_float(held.shard):
        return full(arrive(held, cut), cut)
    return _obtained(_compat.fetched(held.source), held.shard, cut)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _obtained(source: Array, shard: Array, cut: Cut) -> Array:
    return full(arrive(Held(shard, rest=source), cut), cut)


def _obtained_fwd(source: Array, shard: Array, cut: Cut) -> tuple[Array, Array]:
    # Backward needs only the dtype of the shard. This array has it, and takes no memory.
    return _obtained(source, shard, cut), jnp.zeros(0, shard.dtype)


def _obtained_bwd(cut: Cut, like: Array, grad: Array) -> tuple[None, Array]:
    return None, summed([grad], [cut])[0].astype(like.dtype)


_obtained.defvjp(_obtained_fwd, _obtained_bwd)


def cross(held: Held, cut: Cut) -> Transit:
    """Returns a weight after the far hop of its route, or () if there is no such hop."""
    return _far_hop(_as_sent(held, cut), cut) if cut.gather.far else ()


def arrive(held: Held, cut: Cut, crossed: Transit = ()) -> Transit:
    """Returns a weight after both hops; `crossed` is the result of `cross`, if that has run."""
    return _gather(crossed or _far_hop(_as_sent(held, cut), cut), cut, cut.gather.near)


def full(arrived: Transit, cut: Cut) -> Array:
    """Returns the weight as the loss uses it: decoded, without padding, in its dtype and place."""
    weight = _open(arrived, cut).astype(cut.final_dtype)
    return lax.with_sharding_constraint(weight, PartitionSpec(*cut.asked)) if cut.asked else weight


def gathered(shard: Array, cut: Cut) -> Array:
    """Returns the full array of a shard, in the dtype of the shard; JAX cannot differentiate it."""
    return _open(_gather(_far_hop(_compat.fetched(shard), cut), cut, cut.gather.near), cut)


def _as_sent(held: Held, cut: Cut) -> Array:
    """Returns the device's part of a weight, in the dtype in which it travels."""
    source = _compat.fetched(held.source)
    return source.astype(cut.dtype) if is_float(source) else source


def _far_hop(shard: Array, cut: Cut) -> Transit:
    return _gather(cut.gather.codec.encode(shard), cut, cut.gather.far)


def _gather(parts: Transit, cut: Cut, axes: tuple[str, ...]) -> Transit:
    def gather(x: Array) -> Array:
        assert cut.dim is not None, "only a sharded array can be all-gathered"
        return lax.all_gather(x, axes, axis=cut.dim, tiled=True)

    with named([cut]):
        each = functools.partial(_each_part, gather, others=cut.others)
        return tuple(map(each, parts)) if axes else parts


def _open(parts: Transit, cut: Cut) -> Array:
    whole, dim, padding = cut.gather.codec.decode(parts), cut.dim, cut.gather.padding
    if dim is None or not padding:
        return whole
    return lax.slice_in_dim(whole, 0, whole.shape[dim] - padding, axis=dim)


# -- back: from the gradient of a full weight to the gradient of the shard


def summed(grads: Sequence[Array], cuts: Sequence[Cut]) -> list[Array]:
    """Returns the gradients of shards, in the dtypes of the wire, from those of full weights."""
    sent = [grad.astype(cut.dtype) for grad, cut in zip(grads, cuts, strict=True)]
    return reduced(sent, cuts, [cut.reduce for cut in cuts])


def reduced(grads: Sequence[Array], cuts: Sequence[Cut], routes: Sequence[Route]) -> list[Array]:
    """Sums gradients over the devices of their routes, hop by hop and then over replicas. Each
    device keeps its shard of a sum, or all of it if the parameter is replicated.

    A reduce-scatter cannot add the output of some codecs: such gradients travel in one message.
    """
    sums, together = list(grads), defaultdict[tuple[CodedSum, tuple[Hop, ...]], list[int]](list)
    for at, (grad, cut, route) in enumerate(zip(grads, cuts, routes, strict=True)):
        sums[at] = with_padding(grad, cut.dim, route.padding)
        if (sum_coded := route.codec.sums) is None:
            sums[at] = _sum(sums[at], cut, route)
        else:
            together[sum_coded, route.hops].append(at)
    for (sum_coded, hops), places in together.items():
        codecs = [routes[at].codec for at in places]
        own = [cuts[at] for at in places]
        parts = [sums[at] for at in places]
        for axes, is_coded in hops:
            if is_coded:
                parts = sum_coded(parts, own, codecs, axes)
            else:
                parts = [_scattered(x, cut, axes) for x, cut in zip(parts, own, strict=True)]
        for at, part in zip(places, parts, strict=True):
            sums[at] = _over_replicas(part, cuts[at], routes[at])
    return sums


def _sum(grad: Array, cut: Cut, route: Route) -> Array:
    (grad,) = route.codec.encode(grad)
    for axes in (route.near, route.far):
        grad = _scattered(grad, cut, axes)
    return route.codec.decode((_over_replicas(grad, cut, route),))


def _over_replicas(grad: Array, cut: Cut, route: Route) -> Array:
    """Sums a shard over the devices that update the same one."""
    if not route.replicas:
        return grad
    with named([cut]):
        return _each_part(lambda x: lax.psum(x, route.replicas), grad, cut.others)


def with_padding(array: Array, dim: int | None, padding: int) -> Array:
    """Returns `array` with zeros at the end of a dimension."""
    if dim is None or not padding:
        return array
    return jnp.pad(array, [(0, padding if d == dim else 0) for d in range(array.ndim)])


def gather_updated(shard: Array, old: Array | None, cut: Cut, stacked: bool) -> Array:
    """Returns a parameter as it rests, from its updated shard.

    A stack is written layer by layer into `old`, the donated parameter that it replaces. Gathered
    at once, or into new memory, it would need a second full copy.
    """
    if old is None or not stacked or cut.dim == 0:
        return gathered(shard, cut)

    def put(stack: Array, layer: tuple[Array, Array]) -> tuple[Array, None]:
        index, shard = layer
        full = gathered(shard, cut.of_one_layer())
        return lax.dynamic_update_index_in_dim(stack, full, index, 0), None

    return lax.scan(put, old, (jnp.arange(len(shard)), shard))[0]


def _scattered(grad: Array, cut: Cut, axes: tuple[str, ...]) -> Array:
    def scatter(x: Array) -> Array:
        assert cut.dim is not None, "only a sharded array can be reduce-scattered"
        return lax.psum_scatter(x, axes, scatter_dimension=cut.dim, tiled=True)

    with named([cut]):
        return _each_part(scatter, grad, cut.others) if axes else grad


def _each_part(
    collective: Callable[[Array], Array], array: Array, others: tuple[Entry, ...]
) -> Array:
    """Runs a collective over the ZeRO axes on each part of an array that other axes shard too.

    At collectives written by hand, XLA forgets how other axes shard their operands. It would put
    the parts together first, which is twice the bytes for a `tensor` axis of two.
    """
    names = names_in(others)
    if not names:
        return collective(array)
    spec = PartitionSpec(*others)
    return jax.shard_map(
        collective, in_specs=spec, out_specs=spec, axis_names=names, check_vma=False
    )(array)
