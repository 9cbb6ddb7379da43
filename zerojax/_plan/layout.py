"""A plan as data, made from shapes and immutable: where every leaf of a state lives."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Self

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax._plan import mesh as _mesh
from zerojax._plan.placement import Axes, Groups, Placement, beyond
from zerojax._plan.precision import Precision
from zerojax._state.state import OPT_STATE, OTHER, PARAMS
from zerojax._types import TreeDef
from zerojax._wire.codecs import Exact, Quantized, Ways, way_of


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """One leaf: where it rests between steps, where its gradient goes, where it is updated.

    `shape` is the one that the user knows; placements say how it is padded where it is sharded. A
    step keeps a parameter at `near`, once it is there, to gather it from there again. Only
    parameters have gradients. While they are summed over microbatches they are at `grad`; after the
    last one they move to `update`. A parameter that is `frozen` has none, because the optimizer
    would not read it. `reason` says why the leaf is replicated; `memory`, where state was to rest
    in host memory, how a step brings the leaf from there, or why it stays on the device. `absent`
    are the axes that the leaf is annotated with and the mesh lacks.
    """

    path: str
    kind: str
    shape: tuple[int, ...]
    dtype: np.dtype
    rest: Placement
    near: Placement
    grad: Placement | None
    update: Placement
    stacked: bool
    reason: str | None
    frozen: bool = False
    memory: str | None = None
    # Not compared: a step that sets no rules for names has the plan of a state placed with some.
    absent: Axes = dataclasses.field(default=(), compare=False)

    @property
    def is_on_host(self) -> bool:
        """Whether the leaf rests in host memory."""
        return self.rest.memory is not None

    @property
    def spec(self) -> PartitionSpec:
        """The sharding of the leaf between steps."""
        return self.rest.spec

    @property
    def shard_spec(self) -> PartitionSpec:
        """The sharding of the leaf while the optimizer updates it."""
        return self.update.spec

    @property
    def dim(self) -> int | None:
        """The dimension that is sharded during the update."""
        return self.update.dim

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """The shape that the leaf has between steps."""
        return self.rest.padded(self.shape)

    @property
    def padded_place(self) -> Placement:
        """Where the leaf is padded: as it rests, or, where it rests whole, as it is updated."""
        return (self.rest if self.rest.padding else self.update).on_device

    def fitted(self, codec: Quantized, mesh: Mesh) -> Quantized | None:
        """Returns how its shards are written in blocks; None where they travel as they are."""
        is_matrix = len(self.shape) - self.stacked >= 2
        if self.update.dim is None or not is_matrix or not _is_float(self.dtype):
            return None
        place = self.update.on_device
        return codec.fitted(place.sharding(mesh).shard_shape(place.padded(self.shape))[-1])

    def codec(self, ways: Ways, mesh: Mesh) -> Quantized | Exact:
        """Returns the codec of what `Precision` says of a way: exact, where it fits no blocks."""
        way = way_of(self.path, ways)
        if isinstance(way, Quantized):
            return self.fitted(way, mesh) or Exact()
        return Exact(way)

    def sum_codec(self, ways: Ways, mesh: Mesh, axes: Axes) -> Quantized | Exact:
        """Returns the codec of gradients that are summed over the batch's axes."""
        codec = self.codec(ways, mesh)
        is_float_sum = isinstance(codec, Exact) and _is_float(self.dtype)
        if not is_float_sum or _mesh.sums_narrow(mesh, axes):
            return codec
        return Exact(jnp.promote_types(codec.dtype or self.dtype, jnp.float32))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def bytes_per_device(self, mesh: Mesh) -> int:
        return self._bytes_at(self.rest, mesh)

    def gradient_bytes_per_device(self, mesh: Mesh) -> int:
        return self._bytes_at(self.grad, mesh) if self.grad else 0

    def _bytes_at(self, place: Placement, mesh: Mesh) -> int:
        part = place.on_device.sharding(mesh).shard_shape(place.padded(self.shape))
        return math.prod(part) * self.dtype.itemsize


def _is_float(dtype: np.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def by_layer(leaf: LeafPlan) -> bool:
    """Whether a step can have one layer of a leaf at a time: a stack whose layers are whole."""
    return leaf.stacked and leaf.update.dim != 0


@dataclasses.dataclass(frozen=True, repr=False)
class Layout:
    """A plan as data: what the pictures, tables and digests of a plan read.

    The batch is split over `batch_axes`, and the loss is the mean over them. `groups` says over
    which of them each kind of array is sharded.
    """

    stage: int
    mesh: Mesh
    batch_axes: Axes
    groups: Groups
    leaves: tuple[LeafPlan, ...]
    # Not compared: a state's static fields are in it, and differ from call to call.
    treedef: TreeDef = dataclasses.field(compare=False)
    precision: Precision | None = None

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.stage, self.mesh, self.batch_axes, self.leaves, self.precision))

    def __hash__(self) -> int:
        return self._hash

    def __deepcopy__(self, memo: object) -> "Layout":
        return self  # immutable, and devices cannot be copied

    @property
    def size(self) -> int:
        """The number of devices that the batch is split over."""
        return _mesh.axes_size(self.mesh, self.batch_axes)

    @property
    def sharded(self) -> dict[str, bool]:
        """Whether each kind of array is sharded."""
        groups = self.groups
        kinds = {OPT_STATE: groups.opt_state, "grads": groups.grads, PARAMS: groups.params}
        return {kind: bool(axes) for kind, axes in kinds.items()}

    @property
    def is_grouped(self) -> bool:
        """Whether some kind of array is sharded, but not over all axes of the batch."""
        kinds = (self.groups.params, self.groups.grads, self.groups.opt_state)
        return any(axes and set(axes) != set(self.batch_axes) for axes in kinds)

    @functools.cached_property
    def offloads(self) -> bool:
        """Whether some leaf rests in host memory."""
        return any(leaf.is_on_host for leaf in self.leaves)

    @functools.cached_property
    def pads(self) -> bool:
        """Whether some leaf is padded, between steps or where it is updated."""
        return any(leaf.update.padding for leaf in self.leaves)

    @functools.cached_property
    def pads_params(self) -> bool:
        """Whether parameters, or a state's own copies of them, are padded between steps."""
        return any(leaf.rest.padding for leaf in self.leaves if leaf.kind != OPT_STATE)

    @functools.cached_property
    def positions(self) -> dict[str, dict[str, int]]:
        """The position of each leaf in a state, by its kind and its path within that kind."""
        found: dict[str, dict[str, int]] = {PARAMS: {}, OPT_STATE: {}, OTHER: {}}
        for i, leaf in enumerate(self.leaves):
            found[leaf.kind][leaf.path.partition("/")[2]] = i
        return found

    @property
    def params(self) -> list[LeafPlan]:
        return [leaf for leaf in self.leaves if leaf.kind == PARAMS]

    @functools.cached_property
    def absent(self) -> set[str]:
        """The axes that the model is annotated with and the mesh lacks: nothing is over them."""
        return {axis for leaf in self.leaves for axis in leaf.absent}

    @functools.cached_property
    def shardings(self) -> list[NamedSharding]:
        """The place of each leaf between steps, in the order of `jax.tree.leaves(state)`."""
        return [leaf.rest.sharding(self.mesh) for leaf in self.leaves]

    @functools.cached_property
    def shard_shardings(self) -> list[NamedSharding]:
        """The place of each leaf while the optimizer updates it."""
        return [leaf.update.sharding(self.mesh) for leaf in self.leaves]

    def bytes_per_device(self) -> dict[str, int]:
        """Returns the bytes in the memory of each device between steps, by kind of state."""
        return self._bytes_by_kind(on_host=False)

    def host_bytes_per_device(self) -> dict[str, int]:
        """Returns the bytes in host memory between steps, for each device, by kind of state."""
        return self._bytes_by_kind(on_host=True)

    def _bytes_by_kind(self, on_host: bool) -> dict[str, int]:
        totals = {PARAMS: 0, OPT_STATE: 0, OTHER: 0}
        for leaf in self.leaves:
            if leaf.is_on_host == on_host:
                totals[leaf.kind] += leaf.bytes_per_device(self.mesh)
        return totals

    def slow(self, axes: Axes) -> Axes:
        """Returns those of some axes that are slower than the fastest of the batch's, if there are
        several: links between nodes, on a mesh of levels."""
        return beyond(axes, self.batch_axes[-1:]) if len(self.batch_axes) > 1 else axes

    def regathering(self, regather: bool | str | Sequence[str]) -> Self:
        """Returns the plan of a step whose backward gathers parameters over these axes again.

        What was gathered over the others is kept.
        """
        over = self.groups.params
        if isinstance(regather, bool):
            return self
        kept = tuple(axis for axis in over if axis in regather)
        if unknown := beyond(tuple(regather), self.batch_axes):
            raise ValueError(
                f"regather={regather} names {unknown[0]!r}, and the batch is split over "
                f"{self.batch_axes}. Name the fast axis of a mesh of levels, such as 'gpu' of "
                "zerojax.mesh(node=2, gpu=4), or pass True or False."
            )
        if not over:
            return self
        if not kept or kept != over[: len(kept)]:
            raise ValueError(
                f"regather={regather} would gather parameters over {beyond(over, kept)} first, "
                f"which shard within {kept}: they are sharded over {over}, from the fastest axis "
                f"on. Name the first of these: regather={over[0]!r}."
            )
        leaves = [
            dataclasses.replace(leaf, near=leaf.near.over(kept)) if leaf.kind == PARAMS else leaf
            for leaf in self.leaves
        ]
        return dataclasses.replace(self, leaves=tuple(leaves))

    def kept_bytes(self) -> int:
        """Returns the bytes on each device of the parameters that a step keeps at `near`, where
        that is not where they rest, in their own dtypes."""
        kept = [leaf for leaf in self.params if leaf.near.axes != leaf.rest.axes]
        return sum(leaf._bytes_at(leaf.near, self.mesh) for leaf in kept)

    def gradient_bytes(self) -> int:
        """Returns the bytes on each device of the gradients, in the parameters' dtypes."""
        return sum(leaf.gradient_bytes_per_device(self.mesh) for leaf in self.leaves)
