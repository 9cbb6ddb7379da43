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
import math
import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax

from zerojax._wire.routes import Cut

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
    padding = [(0, cut.wire.reduce.padding), *[(0, 0)] * (columns.ndim - 1)]
    return _exchanged(jnp.pad(columns, padding), axes, 0, rows.dim)


def of_all_devices(indices: Array, axes: tuple[str, ...]) -> Array:
    """Returns the indices of all devices, along a new first dimension."""
    return lax.all_gather(indices, axes)


def columns_dim(cut: Cut, shape: Sequence[int], counts: Sequence[int]) -> int | None:
    """Returns the dimension of a table in whose parts devices look up rows; None where it is better
    gathered. `counts`: how many rows a device reads, each time that it reads some."""
    routes = [route for route in (cut.wire.gather, cut.wire.reduce) if route.axes]
    devices = max((route.devices for route in routes), default=1)
    is_padded = cut.dim and (cut.wire.gather.padding or cut.wire.reduce.padding)
    if cut.dim is None or cut.others or is_padded or not cut.wire.reduce.axes or devices == 1:
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
