"""The two operations of ZeRO on one parameter: obtain the full weight, dispose of its gradient.

Every byte that the engine moves between devices moves here. How it moves is data: a `Wire` has a
route for weights and one for gradients, and a route has mesh axes and a codec.
"""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec
from jax.tree_util import register_dataclass
from jax.typing import DTypeLike

from zerojax import _compat
from zerojax._wire import messages as _messages, rows as _rows
from zerojax._wire.codecs import Exact, Parts, Quantized
from zerojax._wire.routes import EXACT, Cut, Entry, Hop, Route, named, names_in
from zerojax._wire.rows import Rows


@functools.partial(register_dataclass, data_fields=["stacks", "given"], meta_fields=["apply"])
@dataclasses.dataclass(frozen=True)
class Updating:
    """How a loop over layers updates a parameter in backward, as soon as it has a layer's gradient.

    `apply(grad, layers, given)` returns the new `layers`, one of each of `stacks`: the parameter as
    it rests, then all else that is updated with it. What JAX takes for the gradients of `stacks` is
    the stacks after the update.
    """

    stacks: tuple[Array, ...]
    given: tuple[Array, ...]
    apply: Callable[[Array, list[Array], Sequence[Array]], list[Array]]


@functools.partial(register_dataclass, data_fields=["shard", "rest", "updating"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Held:
    """A parameter as one device has it: the shard that its gradient leaves through, and what rests.

    Where the two are sharded alike, `rest` is None and the shard is what rests. Otherwise (at
    stages below 3 the full weight rests; what microbatches share was brought near) the shard's
    value is never read; at stage 0 it is as large. Where backward is `updating` the parameter, it
    rests there.
    """

    shard: Array
    rest: Array | None = None
    updating: Updating | None = None

    @property
    def source(self) -> Array:
        """The array that the full weight is obtained from."""
        if self.updating is not None:
            return self.updating.stacks[0]
        return self.shard if self.rest is None else self.rest

    @property
    def as_read(self) -> "Held":
        """The parameter without what updates it."""
        return self if self.updating is None else Held(self.shard, rest=self.source)

    def read_from(self, held: "Held") -> "Held":
        """Returns the parameter as it is updated, read from another value of `as_read`."""
        if self.updating is None:
            return held
        stacks = (held.source, *self.updating.stacks[1:])
        return Held(held.shard, updating=dataclasses.replace(self.updating, stacks=stacks))

    def map(self, change: Callable[[Array], Array]) -> "Held":
        """Returns a view of the parameter, which nothing updates."""
        held = self.as_read
        return Held(change(held.shard), None if held.rest is None else change(held.rest))


def obtain(held: Held, cut: Cut) -> Array:
    """Returns the full weight, whose gradient is disposed of through the shard."""
    if not _is_inexact(held.shard):
        return opened(arrived(held, cut), cut)
    return _obtained(_compat.fetched(held.source), held.shard, cut)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _obtained(source: Array, shard: Array, cut: Cut) -> Array:
    return opened(arrived(Held(shard, rest=source), cut), cut)


def _obtained_fwd(source: Array, shard: Array, cut: Cut) -> tuple[Array, Array]:
    return _obtained(source, shard, cut), _like(shard)


def _obtained_bwd(cut: Cut, like: Array, grad: Array) -> tuple[None, Array]:
    return None, dispose(grad, like.dtype, cut)


_obtained.defvjp(_obtained_fwd, _obtained_bwd)


def looked_up(held: Held, indices: Array, cut: Cut, rows: Rows) -> Array:
    """Returns rows of a table that stays sharded, whose gradients are disposed of through the
    shard. They travel exactly, whatever the codec of the table."""
    with jax.named_scope(_rows.scope_of(cut.path)):
        source = _compat.fetched(held.source)
        if not _is_inexact(held.shard):
            return _read(source, _of_readers(indices, cut.wire.gather), cut, rows)
        return _looked_up(source, indices, held.shard, cut, rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _looked_up(source: Array, indices: Array, shard: Array, cut: Cut, rows: Rows) -> Array:
    return _read(source, _of_readers(indices, cut.wire.gather), cut, rows)


def _looked_up_fwd(
    source: Array, indices: Array, shard: Array, cut: Cut, rows: Rows
) -> tuple[Array, tuple[Array, Array]]:
    gather, reduce = cut.wire.gather, cut.wire.reduce
    asked = _of_readers(indices, gather)
    # Not in backward: on CPU devices, a collective that needs nothing of a loop may run in it.
    summed = asked if gather.axes == reduce.axes else _of_readers(indices, reduce)
    return _read(source, asked, cut, rows), (summed, _like(shard))


def _looked_up_bwd(
    cut: Cut, rows: Rows, saved: tuple[Array, Array], grad: Array
) -> tuple[None, None, Array]:
    indices, like = saved
    route, grad = cut.wire.reduce, grad.astype(cut.dtype)
    (encoded,) = _exact(route).encode(grad)
    # A dtype that is wider than the gradient's is for sums alone.
    narrow = min(grad, encoded, key=lambda x: x.dtype.itemsize)
    total = rows.summed(narrow, indices, route.axes).astype(encoded.dtype)
    total = _rows.from_columns(total, cut, rows, route.axes)
    return None, None, _over_replicas(total, cut, route).astype(like.dtype)


_looked_up.defvjp(_looked_up_fwd, _looked_up_bwd)


def _of_readers(indices: Array, route: Route) -> Array:
    """Returns the indices of all devices among which a route sends rows."""
    return _rows.of_all_devices(indices, route.axes) if route.axes else indices


def _read(source: Array, indices: Array, cut: Cut, rows: Rows) -> Array:
    """Returns this device's rows, where `indices` are those of all that read the same shards."""
    route = cut.wire.gather
    if not route.axes:
        found = rows.look_up(source, indices)
        return found.astype(cut.dtype).astype(cut.final_dtype) if _is_inexact(found) else found
    (shard,) = _exact(route).encode(_sent(Held(source), cut))
    columns = _rows.to_columns(shard, cut, rows, route.axes)
    found = rows.read(columns, indices, route.axes)
    return found.astype(cut.final_dtype) if _is_inexact(found) else found


def _exact(route: Route) -> Exact:
    return route.codec if isinstance(route.codec, Exact) else EXACT


def in_node(held: Held, cut: Cut) -> Parts:
    """Returns a weight after the far hop of its route, for `arrived`; nothing if it has none."""
    return far(_sent(held, cut), cut) if cut.wire.gather.far else ()


def arrived(held: Held, cut: Cut, parts: Parts = ()) -> Parts:
    """Returns a weight after both hops, as `opened` takes it. Where the far hop is done, `parts` is
    what `in_node` returned."""
    return near(parts or far(_sent(held, cut), cut), cut)


def _sent(held: Held, cut: Cut) -> Array:
    source = _compat.fetched(held.source)
    return source.astype(cut.dtype) if _is_inexact(source) else source


def gathered(shard: Array, cut: Cut) -> Array:
    """Returns the full array in the dtype of its shard: far, near, open."""
    return _joined(near(far(_compat.fetched(shard), cut), cut), cut)


def far(shard: Array, cut: Cut) -> Parts:
    """Encodes a shard, and all-gathers it over the far axes of its route."""
    route = cut.wire.gather
    return tuple(_collected(part, cut, route.far) for part in route.codec.encode(shard))


def near(parts: Parts, cut: Cut) -> Parts:
    """All-gathers what `far` returned over the near axes."""
    return tuple(_collected(part, cut, cut.wire.gather.near) for part in parts)


def opened(parts: Parts, cut: Cut) -> Array:
    """Returns the weight as it is used, from what `arrived` returned."""
    return _joined(parts, cut).astype(cut.final_dtype)


def _joined(parts: Parts, cut: Cut) -> Array:
    """Decodes what was gathered, and drops the padding."""
    route, dim = cut.wire.gather, cut.dim
    full = route.codec.decode(parts)
    if dim is None or not route.padding:
        return full
    return lax.slice_in_dim(full, 0, full.shape[dim] - route.padding, axis=dim)


def dispose(grad: Array, dtype: DTypeLike, cut: Cut) -> Array:
    """Returns the gradient of a shard, in `dtype`, from that of the full weight."""
    return summed([grad], [cut])[0].astype(dtype)


def summed(grads: Sequence[Array], cuts: Sequence[Cut]) -> list[Array]:
    """Disposes of several gradients, which stay as they travelled; codes travel together."""
    sent = [grad.astype(cut.dtype) for grad, cut in zip(grads, cuts, strict=True)]
    return reduced(sent, cuts, [cut.wire.reduce for cut in cuts])


def reduced(grads: Sequence[Array], cuts: Sequence[Cut], routes: Sequence[Route]) -> list[Array]:
    """Sums gradients over the devices of their routes, hop by hop and then over replicas. Each
    device keeps its shard of a sum, or all of it if the parameter is replicated."""
    found, alike = list(grads), defaultdict[tuple[Hop, ...], list[tuple[int, Cut, Quantized]]](list)
    for at, (grad, cut, route) in enumerate(zip(grads, cuts, routes, strict=True)):
        found[at] = with_padding(grad, cut.dim, route.padding)
        if isinstance(route.codec, Quantized):
            alike[route.hops].append((at, cut, route.codec))
        else:
            found[at] = _exact_sum(found[at], cut, route)
    for hops, members in alike.items():
        places, coded_cuts, codecs = zip(*members, strict=True)
        sums = [found[at] for at in places]
        for axes, is_coded in hops:
            if is_coded:
                sums = _sums_of_codes(sums, coded_cuts, codecs, axes)
            else:
                sums = [_scattered(x, cut, axes) for x, cut in zip(sums, coded_cuts, strict=True)]
        for at, total in zip(places, sums, strict=True):
            found[at] = _over_replicas(total, cuts[at], routes[at])
    return found


def _exact_sum(grad: Array, cut: Cut, route: Route) -> Array:
    """Sums what its codec encodes to one array, which the collectives can sum."""
    (grad,) = route.codec.encode(grad)
    for axes in (route.near, route.far):
        grad = _scattered(grad, cut, axes)
    return route.codec.decode((_over_replicas(grad, cut, route),))


def _over_replicas(grad: Array, cut: Cut, route: Route) -> Array:
    if not route.replicas:
        return grad
    with named([cut]):
        return _each_part(lambda x: lax.psum(x, route.replicas), grad, cut.others)


def _sums_of_codes(
    grads: list[Array], cuts: Sequence[Cut], codecs: Sequence[Quantized], axes: tuple[str, ...]
) -> list[Array]:
    dims = [cut.dim for cut in cuts if cut.dim is not None]
    names = names_in(entry for cut in cuts for entry in cut.others)
    run = functools.partial(_messages.summed, dims=dims, codecs=codecs, axes=axes)
    if names:
        specs = [PartitionSpec(*cut.others) for cut in cuts]
        run = jax.shard_map(
            run, in_specs=(specs,), out_specs=specs, axis_names=names, check_vma=False
        )
    with named(cuts):
        return [total.astype(x.dtype) for total, x in zip(run(grads), grads, strict=True)]


def with_padding(array: Array, dim: int | None, padding: int) -> Array:
    """Returns `array` with zeros at the end of a dimension."""
    if dim is None or not padding:
        return array
    return jnp.pad(array, [(0, padding if d == dim else 0) for d in range(array.ndim)])


def gather_updated(shard: Array, old: Array | None, cut: Cut, stacked: bool) -> Array:
    """Returns a parameter as it rests, from its updated shard.

    A stack goes layer by layer into `old`, the donated parameter that it replaces: gathered
    at once, or into new memory, it would need a second full copy.
    """
    if old is None or not stacked or cut.dim == 0:
        return gathered(shard, cut)

    def put(stack: Array, layer: tuple[Array, Array]) -> tuple[Array, None]:
        index, shard = layer
        full = gathered(shard, cut.of_one_layer())
        return lax.dynamic_update_index_in_dim(stack, full, index, 0), None

    return lax.scan(put, old, (jnp.arange(len(shard)), shard))[0]


def _collected(part: Array, cut: Cut, axes: tuple[str, ...]) -> Array:
    return _hop(lambda x, dim: lax.all_gather(x, axes, axis=dim, tiled=True), part, cut, axes)


def _scattered(grad: Array, cut: Cut, axes: tuple[str, ...]) -> Array:
    def scatter(x: Array, dim: int) -> Array:
        return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)

    return _hop(scatter, grad, cut, axes)


def _hop(
    collective: Callable[[Array, int], Array], array: Array, cut: Cut, axes: tuple[str, ...]
) -> Array:
    """Runs a collective along the sharded dimension, where there are axes to cross."""
    if not axes:
        return array
    dim = cut.dim
    assert dim is not None, "only what is sharded can be all-gathered or reduce-scattered"
    with named([cut]):
        return _each_part(lambda x: collective(x, dim), array, cut.others)


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


def _is_inexact(array: Array) -> bool:
    """Whether an array has a gradient: a float, or a complex number."""
    return jax.dtypes.issubdtype(array.dtype, jnp.inexact)


def _like(array: Array) -> Array:
    """Returns an empty array that remembers a dtype; residuals must be arrays."""
    return jnp.zeros((0,), array.dtype)
