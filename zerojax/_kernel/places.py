"""Where a leaf of a state lives: the mesh axes that shard it, its padding, its memory.

A ZeRO stage is nothing but placements. `groups_of` says which axes shard parameters, gradients and
optimizer state, and `leaf_at` gives a leaf the placements that follow.

[Note: where parameters rest] Groups say how a step shards each kind. A parameter may be sharded
over fewer axes than its optimizer state. If it rested so, the update would end with an all-gather
over the other axes, with no compute left to hide it (72 of 599 ms, 7.5B parameters on 8 nodes of 8
H100s). So it rests where it is updated. The next forward brings each layer `near` while the layer
before it computes, and backward gathers it from there. With several microbatches, all gather from
there.
"""

import dataclasses
import itertools
import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from zerojax import _compat
from zerojax._kernel.travel import NOWHERE, Cut, Route
from zerojax._specs import Axes, Entry, entry_over, names_in, shard_dim


@dataclasses.dataclass(frozen=True)
class Groups:
    """The mesh axes that shard each kind of array; () replicates it."""

    params: Axes = ()
    grads: Axes = ()
    opt_state: Axes = ()

    @property
    def stage(self) -> int:
        """The ZeRO stage that shards the same kinds of arrays."""
        return sum(map(bool, (self.params, self.grads, self.opt_state)))


KINDS = tuple(field.name for field in dataclasses.fields(Groups))


def groups_of(stage: int, axes: Axes) -> Groups:
    """Returns the groups of a stage over `axes`. This table defines the stages.

    Stages 1 and 2 differ only where gradients are summed over microbatches, of which the kernel has
    one.
    """
    return {
        0: Groups(),
        1: Groups(opt_state=axes),
        2: Groups(opt_state=axes, grads=axes),
        3: Groups(opt_state=axes, grads=axes, params=axes),
    }[stage]


@dataclasses.dataclass(frozen=True)
class Placement:
    """A place for one array.

    `spec` names all mesh axes that shard it, including the user's own; `axes` are ZeRO's, which an
    all-gather spans. `memory` is a JAX memory kind, None for the device's own. `padding` counts
    the elements added to each dimension so that the devices divide it; () means none. Experts stay
    `apart` over an axis of the batch, which no gather and no sum of gradients spans.
    """

    spec: PartitionSpec
    axes: Axes = ()
    memory: str | None = None
    padding: tuple[int, ...] = ()
    apart: Axes = ()

    @property
    def dim(self) -> int | None:
        """The dimension that ZeRO shards."""
        return shard_dim(self.spec, self.axes) if self.axes else None

    @property
    def experts(self) -> int | None:
        """The dimension that counts experts, if they stay apart."""
        return shard_dim(self.spec, self.apart)

    @property
    def zeros(self) -> int:
        """The elements added to the dimension that ZeRO shards."""
        return 0 if self.dim is None or not self.padding else self.padding[self.dim]

    def over(self, axes: Axes) -> "Placement":
        """Returns the place of the same array, sharded only over those of its axes in `axes`.

        Its padding stays the same, so that shards nest; what rests whole has none.
        """
        here = tuple(axis for axis in self.axes if axis in axes)
        entry = entry_over(here) if here else None
        entries = [entry if dim == self.dim else old for dim, old in enumerate(self.spec)]
        while entries and entries[-1] is None:
            # `jax.jit` writes the specs of its results without a None at the end. An input with
            # another spelling would compile the step a second time.
            entries.pop()
        padding = (
            self.padding if here else [n * (d != self.dim) for d, n in enumerate(self.padding)]
        )
        padding, spec = tuple(padding) if any(padding) else (), PartitionSpec(*entries)
        return dataclasses.replace(self, spec=spec, axes=here, padding=padding)

    @property
    def local(self) -> PartitionSpec:
        """The spec for a `shard_map` over the batch's axes, without other axes."""
        return self.within((*self.axes, *self.apart))

    def within(self, axes: Collection[str]) -> PartitionSpec:
        """The spec for a `shard_map` over these axes, which may be the user's own."""

        def kept(entry: Entry) -> Entry:
            names = (entry,) if isinstance(entry, str) else entry or ()
            left = tuple(name for name in names if name in axes)
            return entry_over(left) if left else None

        return PartitionSpec(*map(kept, self.spec))

    def padded(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape that an array of this logical shape has here."""
        return tuple(map(sum, itertools.zip_longest(shape, self.padding, fillvalue=0)))

    def sharding(self, mesh: Mesh) -> NamedSharding:
        if self.memory is not None and _compat.is_compile_only(mesh.devices.flat[0]):
            # Such devices list no memories, and on their mesh JAX silently drops the kind.
            return NamedSharding(mesh.abstract_mesh, self.spec, memory_kind=self.memory)
        return NamedSharding(mesh, self.spec, memory_kind=self.memory)

    @property
    def on_device(self) -> "Placement":
        """The same place in the device's own memory."""
        return dataclasses.replace(self, memory=None)

    def others(self, rank: int) -> tuple[Entry, ...]:
        """Returns, for each dimension, the user's own axes that shard it; () if there are none."""
        zero = self.dim, self.experts
        entries = [None if dim in zero else entry for dim, entry in enumerate(self.spec)]
        return (*entries, *[None] * (rank - len(entries))) if names_in(entries) else ()


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """One leaf: where it rests between steps, where its gradient goes, where it is updated.

    `shape` is the user's; placements say how a sharded leaf is padded. A step keeps a parameter at
    `near`, once it is there, to gather it from there again. Only parameters have gradients. A step
    sums them over microbatches at `grad`, and after the last one moves them to `update`. A `frozen`
    parameter has none, because the optimizer would not read it. `reason` says why the leaf is
    replicated. `stays` says why the leaf stays on the device although its kind was to rest in host
    memory. `absent` are the axes in the leaf's annotation that the mesh lacks, and `taken` those
    over which ZeRO shards instead.
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
    stays: str | None = None
    # Not compared: a step without rules for names has the plan of a state placed with some.
    absent: Axes = dataclasses.field(default=(), compare=False)
    taken: Axes = dataclasses.field(default=(), compare=False)

    @property
    def is_on_host(self) -> bool:
        """Whether the leaf rests in host memory."""
        return self.rest.memory is not None

    @property
    def spec(self) -> PartitionSpec:
        """The sharding of the leaf between steps."""
        return self.rest.spec

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
        """Where the leaf is padded: at rest, or, if it rests whole, during the update."""
        return (self.rest if self.rest.padding else self.update).on_device

    def cut(self, gather: Route, reduce: Route = NOWHERE, dtype: DTypeLike | None = None) -> Cut:
        """Returns how a step shards and sends the leaf, in its own dtype or in another."""
        rank, dtype = len(self.shape), self.dtype if dtype is None else dtype
        others = self.update.others(rank)
        return Cut(self.update.dim, rank, dtype, gather, reduce, others=others, path=self.path)

    @property
    def experts(self) -> int | None:
        """The dimension that counts experts, if they stay apart."""
        return self.rest.experts

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def bytes_per_device(self, mesh: Mesh) -> int:
        return self.bytes_at(self.rest, mesh)

    def bytes_at(self, place: Placement, mesh: Mesh) -> int:
        part = place.on_device.sharding(mesh).shard_shape(place.padded(self.shape))
        return math.prod(part) * self.dtype.itemsize


def leaf_at(whole: Placement, groups: Groups, *, is_param: bool, **others: Any) -> LeafPlan:
    """Returns the plan of a leaf that can be sharded as `whole` says, by the groups of a stage.

    `others` are the fields of `LeafPlan` other than placements.
    """
    near = whole.over(groups.params if is_param else groups.opt_state)
    frozen = others.get("frozen", False)
    update = near if frozen else whole.over(groups.opt_state)
    # See the note above: a parameter rests where it is updated.
    rest = update if near.axes else near
    grad = whole.over(groups.grads) if is_param and not frozen else None
    return LeafPlan(rest=rest, near=near, grad=grad, update=update, **others)


def by_layer(leaf: LeafPlan) -> bool:
    """Whether a step can handle one layer of a leaf at a time: a stack whose layers are whole."""
    return leaf.stacked and leaf.update.dim != 0
