"""A leaf of a state as data: where it lives between steps and within them."""

import dataclasses
import math
from typing import Any

import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from zerojax._plan.placement import Axes, Groups, Placement
from zerojax._wire.routes import NOWHERE, Cut, Route


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

    def cut(self, gather: Route, reduce: Route = NOWHERE, dtype: DTypeLike | None = None) -> Cut:
        """Returns how a step cuts it up and sends it, in its own dtype or in another."""
        rank, dtype = len(self.shape), self.dtype if dtype is None else dtype
        others = self.update.others(rank)
        return Cut(self.update.dim, rank, dtype, gather, reduce, others=others, path=self.path)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def bytes_per_device(self, mesh: Mesh) -> int:
        return self.bytes_at(self.rest, mesh)

    def gradient_bytes_per_device(self, mesh: Mesh) -> int:
        return self.bytes_at(self.grad, mesh) if self.grad else 0

    def bytes_at(self, place: Placement, mesh: Mesh) -> int:
        part = place.on_device.sharding(mesh).shard_shape(place.padded(self.shape))
        return math.prod(part) * self.dtype.itemsize


def leaf_at(whole: Placement, groups: Groups, *, is_param: bool, **others: Any) -> LeafPlan:
    """Returns the plan of a leaf that can be sharded as `whole` says, by the groups of a stage.

    `others` are the fields of `LeafPlan` that are no placements.
    """
    near = whole.over(groups.params if is_param else groups.opt_state)
    frozen = others.get("frozen", False)
    update = near if frozen else whole.over(groups.opt_state)
    # See the note in `placement.py`: what is updated stays where it is.
    rest = update if near.axes else near
    grad = whole.over(groups.grads) if is_param and not frozen else None
    return LeafPlan(rest=rest, near=near, grad=grad, update=update, **others)


def by_layer(leaf: LeafPlan) -> bool:
    """Whether a step can have one layer of a leaf at a time: a stack whose layers are whole."""
    return leaf.stacked and leaf.update.dim != 0
