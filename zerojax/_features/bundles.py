"""Parameters that travel as one array: a stack of all layers, and on CPUs small ones side by side.

XLA combines small collectives on GPUs, and does not on CPUs, where each costs a meeting of all
devices. Gains there, on 8 emulated devices, half the time of a step with 300 weights of 64 x 64,
and a quarter with 12 layers of 64. Costs 100 lines of code.
"""

import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from zerojax._kernel.pieces import common_path
from zerojax._kernel.places import LeafPlan, Placement, axes_size, entry_over
from zerojax._kernel.travel import Codec, Exact

LARGEST_PACKED = 2**18  # bytes of a parameter
MANY = 64  # parameters outside of loops: fewer travel one by one

Row = tuple[int, ...]  # the positions of parameters that are side by side
Codecs = tuple[Codec, Codec]  # in which a weight is gathered, and its gradient reduced


@dataclasses.dataclass(frozen=True)
class Bundle:
    """One array for several parameters. With `layers`, each has a row in a stack."""

    rows: list[Row]
    layers: bool
    leaves: list[LeafPlan]  # of the first row
    devices: int  # that a parameter is sharded over

    @property
    def is_packed(self) -> bool:
        return len(self.leaves) > 1

    def leaf(self, params: Sequence[LeafPlan]) -> LeafPlan:
        """Returns the plan of the array."""
        first = self.leaves[0]
        shape = (sum(math.prod(leaf.shape) for leaf in self.leaves),)
        lead = len(self.rows) if self.layers else None

        def over(place: Placement) -> Placement:
            packed = (entry_over(place.axes) if place.axes else None,)
            entries = packed if self.is_packed else place.spec
            return dataclasses.replace(place, spec=PartitionSpec(*[None] * self.layers, *entries))

        return dataclasses.replace(
            first,
            path=common_path([params[at].path for row in self.rows for at in row]),
            shape=(*[lead] * self.layers, *(shape if self.is_packed else first.shape)),
            stacked=self.layers,
            rest=over(first.rest),
            near=over(first.near),
            grad=first.grad and over(first.grad),
            update=over(first.update),
        )

    def joined(self, values: Sequence[Array], dtype: DTypeLike) -> Array:
        """Returns the array of this device, from the parameters'."""

        def one(row: Row) -> Array:
            parts = [values[at].astype(dtype) for at in row]
            return jnp.concatenate([x.reshape(-1) for x in parts]) if self.is_packed else parts[0]

        rows = list(map(one, self.rows))
        return jnp.stack(rows) if self.layers else rows[0]

    def parts(self, full: Array) -> list[Array]:
        """Returns the parameters of one row, from what all devices have of it."""
        if not self.is_packed:
            return [full]
        blocks = self.columns(full.reshape(self.devices, -1))
        places = [leaf.rest.dim or 0 for leaf in self.leaves]
        each = zip(blocks, places, self.leaves, strict=True)
        return [jnp.moveaxis(block, 0, dim).reshape(leaf.shape) for block, dim, leaf in each]

    def split(self, shard: Array) -> dict[int, Array]:
        """Returns this device's parts of the parameters, from its part of the array."""
        parts: dict[int, Array] = {}
        layers = pieces(shard, (1,) * len(self.rows), 0) if self.layers else [shard[None]]
        for row, layer in zip(self.rows, layers, strict=True):
            for at, part in zip(row, self.columns(layer), strict=True):
                parts[at] = part[0]
        return parts

    def columns(self, rows: Array) -> list[Array]:
        """Returns the parts of each parameter in rows."""
        if not self.is_packed:
            return [rows]
        shapes = [
            [n // self.devices if d == leaf.rest.dim else n for d, n in enumerate(leaf.shape)]
            for leaf in self.leaves
        ]
        each = zip(pieces(rows, tuple(map(math.prod, shapes)), 1), shapes, strict=True)
        return [x.reshape(len(rows), *shape) for x, shape in each]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def pieces(array: Array, sizes: Sequence[int], axis: int) -> list[Array]:
    """Returns pieces of an array, one after another along an axis.

    XLA compiles fusions that are alike once. One with a slice at a constant is like no other: 300
    slices of small weights take 11 s to compile on CPUs, and 2 s this way.
    """
    starts = [end - size for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
    starts = lax.optimization_barrier(list(map(jnp.int32, starts)))

    def piece(start: Array, size: int) -> Array:
        at = [start if d == axis else 0 for d in range(array.ndim)]
        shape = [size if d == axis else n for d, n in enumerate(array.shape)]
        return lax.dynamic_slice(array, at, shape, allow_negative_indices=False)

    return list(map(piece, starts, sizes))


def _pieces_fwd(array: Array, sizes: Sequence[int], axis: int) -> tuple[list[Array], None]:
    return pieces(array, sizes, axis), None


def _pieces_bwd(sizes: Sequence[int], axis: int, _: None, grads: list[Array]) -> tuple[Array]:
    return (jnp.concatenate(grads, axis),)


pieces.defvjp(_pieces_fwd, _pieces_bwd)


def bundled(
    rows: Iterable[Row],
    layers: bool,
    params: Sequence[LeafPlan],
    codecs: Sequence[Codecs],
    mesh: Mesh,
) -> list[Bundle]:
    """Returns bundles of parameters; each of `rows` has one parameter of each layer."""
    groups: dict[Hashable, list[Row]] = defaultdict(list)
    packs = mesh.devices.flat[0].platform == "cpu"
    for row in rows:
        at = row[0]
        groups[(packs and _packable(params[at], codecs[at])) or row].append(row)

    def bundle(columns: list[Row]) -> Bundle:
        leaves = [params[column[0]] for column in columns]
        devices = axes_size(mesh, leaves[0].rest.axes)
        return Bundle(list(zip(*columns, strict=True)), layers, leaves, devices)

    return list(map(bundle, groups.values()))


def _packable(leaf: LeafPlan, codecs: Codecs) -> Hashable | None:
    """Returns a key that parameters share which may be side by side; None for one that may not."""
    places = leaf.rest, leaf.near, leaf.grad, leaf.update
    is_plain = not (leaf.rest.padding or leaf.rest.others(len(leaf.shape)) or leaf.is_on_host)
    is_plain = is_plain and all(isinstance(one, Exact) for one in codecs)  # others need matrices
    if leaf.nbytes > LARGEST_PACKED or leaf.rest.axes != leaf.update.axes or not is_plain:
        return None
    return leaf.dtype, leaf.frozen, codecs, tuple(place and place.axes for place in places)
