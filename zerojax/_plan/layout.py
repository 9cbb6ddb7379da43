"""Where every leaf of a state lives, as data: made from shapes, immutable, read by everything."""

import dataclasses
import functools
import math
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax._plan import mesh as _mesh, spec as _spec
from zerojax._plan.precision import Precision
from zerojax._state.state import OPT_STATE, OTHER, PARAMS


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """One leaf: `spec` is where it lives between steps, `shard_spec` where it is cut.

    The optimizer does not read the gradient of one that is `frozen`, so there is none.
    """

    path: str
    kind: str
    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec
    shard_spec: PartitionSpec
    dim: int | None
    stacked: bool
    reason: str | None
    frozen: bool = False

    def others(self, axes: tuple[str, ...]) -> tuple:
        """For each dimension, the axes of the user's own that it lies along; () where none."""
        return _spec.other_axes(self.shard_spec, axes, len(self.shape))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def bytes_per_device(self, mesh: Mesh) -> int:
        shard = NamedSharding(mesh, self.spec).shard_shape(self.shape)
        return math.prod(shard) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, repr=False)
class Layout:
    """A plan as data: what the pictures, tables and digests of a plan read."""

    stage: int
    mesh: Mesh
    axes: tuple[str, ...]
    leaves: tuple[LeafPlan, ...]
    treedef: Any = dataclasses.field(compare=False)  # static fields differ from call to call
    precision: Precision | None = None

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.stage, self.mesh, self.axes, self.leaves, self.precision))

    def __hash__(self) -> int:
        return self._hash

    def __deepcopy__(self, memo: Any) -> "Layout":
        return self  # immutable, and devices cannot be copied

    @property
    def size(self) -> int:
        """Over how many devices ZeRO shards."""
        return _mesh.axes_size(self.mesh, self.axes)

    @property
    def sharded(self) -> dict[str, bool]:
        """What the stage shards: this table is all that a stage is."""
        stage = self.stage if self.size > 1 else 0
        return {OPT_STATE: stage >= 1, "grads": stage >= 2, PARAMS: stage >= 3}

    @property
    def params(self) -> list[LeafPlan]:
        return [leaf for leaf in self.leaves if leaf.kind == PARAMS]

    @functools.cached_property
    def shardings(self) -> list[NamedSharding]:
        """Where each leaf lives between steps, in the order of `jax.tree.leaves(state)`."""
        return [NamedSharding(self.mesh, leaf.spec) for leaf in self.leaves]

    @functools.cached_property
    def shard_shardings(self) -> list[NamedSharding]:
        """Where each leaf lives while the optimizer updates it."""
        return [NamedSharding(self.mesh, leaf.shard_spec) for leaf in self.leaves]

    def bytes_per_device(self) -> dict[str, int]:
        """Bytes on each device between steps, by kind of state."""
        totals = {PARAMS: 0, OPT_STATE: 0, OTHER: 0}
        for leaf in self.leaves:
            totals[leaf.kind] += leaf.bytes_per_device(self.mesh)
        return totals
