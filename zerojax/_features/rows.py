"""Rows of a table that stays sharded: its columns come together, and look up every device's rows.

[Note: rows] To read T rows of a table, as an embedding does, a device needs these T rows and not
the table. So every device holds some columns of it, all rows of them, and looks up there what all
devices ask for: the indices, a few integers, go to all of them, and one all-to-all brings each
device its own rows. A table that rests by rows becomes columns by another all-to-all, which sends a
device's shard and no more. Gradients go the same ways back. A device adds up, for its columns,
those of all devices' rows; it does so in float32, because frequent tokens are many, and the sum is
rounded once, as it is sent.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import JaxprEqn

from zerojax import _compat
from zerojax._kernel.jaxprs import type_of
from zerojax._kernel.pieces import Attached, Shard
from zerojax._kernel.split import Splitter
from zerojax._kernel.travel import (
    EXACT,
    Cut,
    Exact,
    Held,
    Route,
    as_sent,
    is_float,
    over_replicas,
)

ROWS_SCOPE = "rows_of"  # of what moves rows, before the parameter, in a compiled program
# What is sent at most for rows, where a gather of the table would send 1. An all-to-all between
# hosts may take eight times as long as an all-gather of as many bytes; but rows so many that it
# matters come with seconds of compute.
MOST_SENT = 1 / 3


@dataclasses.dataclass(frozen=True, eq=False)  # compared by identity, like its function
class Rows:
    """The rows that a loss reads of a table of this shape, at any indices.

    `look_up(table, indices)` reads them, or those of a part of the table along its dimension `dim`:
    dimension `out` of the result.
    """

    look_up: Callable[[Array, Array], Array]
    shape: tuple[int, ...]
    dim: int
    out: int

    def read(self, columns: Array, indices: Array, axes: tuple[str, ...]) -> Array:
        """Returns this device's rows, from its columns and the indices of all devices."""
        return _exchanged(self._of_all(columns, indices), axes, 0, self.out + 1)[0]

    def summed(self, grad: Array, indices: Array, axes: tuple[str, ...]) -> Array:
        """Returns the gradient of this device's columns, wide, from that of its rows."""
        grads = _exchanged(grad[None], axes, self.out + 1, 0)
        parts = len(indices)
        shape = [n // parts if d == self.dim else n for d, n in enumerate(self.shape)]
        columns = jax.ShapeDtypeStruct(shape, jnp.promote_types(grad.dtype, jnp.float32))
        transposed = jax.linear_transpose(lambda x: self._of_all(x, indices), columns)
        (total,) = transposed(grads.astype(columns.dtype))
        return total

    def _of_all(self, columns: Array, indices: Array) -> Array:
        return jax.vmap(self.look_up, in_axes=(None, 0))(columns, indices)


def looked_up(held: Held, indices: Array, cut: Cut, rows: Rows) -> Array:
    """Returns rows of a table that stays sharded, whose gradients are disposed of through the
    shard. They travel exactly, whatever the codec of the table."""
    with jax.named_scope(scope_of(cut.path)):
        source = _compat.fetched(held.source)
        if not is_float(held.shard):
            return _read(source, _of_readers(indices, cut.gather), cut, rows)
        return _looked_up(source, indices, held.shard, cut, rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _looked_up(source: Array, indices: Array, shard: Array, cut: Cut, rows: Rows) -> Array:
    return _read(source, _of_readers(indices, cut.gather), cut, rows)


def _looked_up_fwd(
    source: Array, indices: Array, shard: Array, cut: Cut, rows: Rows
) -> tuple[Array, tuple[Array, Array]]:
    gather, reduce = cut.gather, cut.reduce
    asked = _of_readers(indices, gather)
    # Not in backward: on CPU devices, a collective that needs nothing of a loop may run in it.
    summed = asked if gather.axes == reduce.axes else _of_readers(indices, reduce)
    return _read(source, asked, cut, rows), (summed, jnp.zeros(0, shard.dtype))


def _looked_up_bwd(
    cut: Cut, rows: Rows, saved: tuple[Array, Array], grad: Array
) -> tuple[None, None, Array]:
    indices, like = saved
    route, grad = cut.reduce, grad.astype(cut.dtype)
    (encoded,) = _exact(route).encode(grad)
    # A dtype that is wider than the gradient's is for sums alone.
    narrow = min(grad, encoded, key=lambda x: x.dtype.itemsize)
    total = rows.summed(narrow, indices, route.axes).astype(encoded.dtype)
    total = from_columns(total, cut, rows, route.axes)
    return None, None, over_replicas(total, cut, route).astype(like.dtype)


_looked_up.defvjp(_looked_up_fwd, _looked_up_bwd)


def _of_readers(indices: Array, route: Route) -> Array:
    """Returns the indices of all devices among which a route sends rows."""
    return of_all_devices(indices, route.axes) if route.axes else indices


def _read(source: Array, indices: Array, cut: Cut, rows: Rows) -> Array:
    """Returns this device's rows, where `indices` are those of all that read the same shards."""
    route = cut.gather
    if not route.axes:
        own = rows.look_up(source, indices)
        return own.astype(cut.dtype).astype(cut.final_dtype) if is_float(own) else own
    (shard,) = _exact(route).encode(as_sent(Held(source), cut))
    columns = to_columns(shard, cut, rows, route.axes)
    own = rows.read(columns, indices, route.axes)
    return own.astype(cut.final_dtype) if is_float(own) else own


def _exact(route: Route) -> Exact:
    return route.codec if isinstance(route.codec, Exact) else EXACT


def to_columns(shard: Array, cut: Cut, rows: Rows, axes: tuple[str, ...]) -> Array:
    """Returns this device's columns of a table, from its shard."""
    if cut.dim == rows.dim:
        return shard
    columns = _exchanged(shard, axes, rows.dim, 0)
    return lax.slice_in_dim(columns, 0, rows.shape[0])  # less the padding


def from_columns(columns: Array, cut: Cut, rows: Rows, axes: tuple[str, ...]) -> Array:
    """Returns this device's shard of a table, padded as its gradient is, from its columns."""
    if cut.dim == rows.dim:
        return columns
    padding = [(0, cut.reduce.padding), *[(0, 0)] * (columns.ndim - 1)]
    return _exchanged(jnp.pad(columns, padding), axes, 0, rows.dim)


def of_all_devices(indices: Array, axes: tuple[str, ...]) -> Array:
    """Returns the indices of all devices, along a new first dimension."""
    return lax.all_gather(indices, axes)


def columns_dim(cut: Cut, shape: Sequence[int], counts: Sequence[int]) -> int | None:
    """Returns the dimension of a table in whose parts devices look up rows; None where it is better
    gathered. `counts`: how many rows a device reads, each time that it reads some."""
    routes = [route for route in (cut.gather, cut.reduce) if route.axes]
    devices = max((route.devices for route in routes), default=1)
    is_padded = cut.dim and (cut.gather.padding or cut.reduce.padding)
    if cut.dim is None or cut.others or is_padded or not cut.reduce.axes or devices == 1:
        return None
    dims = [cut.dim] if cut.dim else range(1, cut.rank)
    fitting = (d for d in dims if all(shape[d] % route.devices == 0 for route in routes))
    dim = next(fitting, None)
    rows = sum(counts) * math.prod(shape[1:])
    indices = 2 * sum(counts) * devices  # an index is as long as two elements of a weight
    columns = 0 if cut.dim else len(counts) * math.prod(shape) / devices
    return dim if rows + indices + columns <= MOST_SENT * math.prod(shape) else None


def scope_of(path: str) -> str:
    """Returns the scope of what moves rows of a parameter."""
    return f"{ROWS_SCOPE}({path})"


def parameter(scope: str) -> str | None:
    """Returns the parameter whose rows are moved in a scope."""
    found = re.search(rf"{ROWS_SCOPE}\(([^)]*)\)", scope)
    return found and found[1]


def _exchanged(array: Array, axes: tuple[str, ...], split: int, joined: int) -> Array:
    return lax.all_to_all(array, axes, split, joined, tiled=True)


def attach(eqn: JaxprEqn, splitter: Splitter) -> Attached | None:
    """Returns what reads rows of a table that stays sharded, where nothing else reads the table but
    equations like this one, and its rows may travel instead of it.

    Loops and remats gather: a loop would move a table's columns in each iteration.
    """
    kind = splitter.kind(eqn.invars[0]) if eqn.primitive.name == "gather" else None
    if not isinstance(kind, Shard) or splitter.pull or splitter.checkpointed:
        return None
    readers, shape = splitter.readers, type_of(eqn.invars[0]).shape
    table = readers.name(eqn.invars[0])
    alike = [one for one in readers.of(table) if one and readers.name(one.invars[0]) is table]
    counts = [count for count in map(_count_of_rows, alike) if count is not None]
    dim = columns_dim(kind.cut, shape, counts) if len(counts) == len(readers.of(table)) else None
    if dim is None:
        return None
    out = eqn.params["dimension_numbers"].offset_dims[dim - 1]
    rows = Rows(_look_up(eqn), shape, dim, out)
    indices = splitter.gathered_once(eqn.invars[1])

    def apply(held: list[Held], indices: list[Array]) -> list[Array]:
        return [looked_up(held[0], indices[0], kind.cut, rows)]

    return Attached([kind], [indices], list(eqn.outvars), apply, _compat.scope_of(eqn))


def _count_of_rows(eqn: JaxprEqn) -> int | None:
    """Returns how many rows an equation reads of its first operand, None if it reads others."""
    if eqn.primitive.name != "gather":
        return None
    table, indices = map(type_of, eqn.invars)
    numbers = eqn.params["dimension_numbers"]
    by_row = numbers.collapsed_slice_dims == numbers.start_index_map == (0,)
    is_whole = eqn.params["slice_sizes"] == (1, *table.shape[1:]) and table.ndim > 1
    return indices.size if by_row and is_whole and not numbers.operand_batching_dims else None


def _look_up(eqn: JaxprEqn) -> Callable[[Array, Array], Array]:
    """Returns an equation that reads rows as a function of the table, or of some of its columns."""

    def look_up(table: Array, indices: Array) -> Array:
        # What the user knows of the order of indices is not true of those of all devices.
        unordered = {"indices_are_sorted": False, "unique_indices": False}
        params = eqn.params | unordered | {"slice_sizes": (1, *table.shape[1:])}
        return _compat.bind(eqn.replace(params=params), [table, indices])[0]

    return look_up
