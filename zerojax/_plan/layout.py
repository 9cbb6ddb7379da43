"""A plan as immutable data, made from shapes: where every leaf of a state lives."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Self

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from zerojax._kernel.places import Groups, LeafPlan, by_layer
from zerojax._plan.expert import Experts
from zerojax._plan.precision import Precision
from zerojax._plan.sequence import Sequences
from zerojax._specs import Axes, Splits, axes_size, beyond, names_in
from zerojax._state.state import OPT_STATE, OTHER, PARAMS
from zerojax._types import Shape, TreeDef
from zerojax._update.update import InParts, Part, Update, on_no_mesh


@dataclasses.dataclass(frozen=True, repr=False)
class Layout:
    """The data of a plan, which its pictures, tables and digests read.

    The batch is split over `batch_axes`, and the loss is the mean over them. `sequence` says which
    of them splits not rows but sequences, and `experts` over which of them experts stay apart.
    `groups` says over which of them each kind of array is
    sharded.
    """

    stage: int
    mesh: Mesh
    batch_axes: Axes
    groups: Groups
    leaves: tuple[LeafPlan, ...]
    # Not compared, because a state's static fields are in it, which differ from call to call.
    _treedef: TreeDef = dataclasses.field(compare=False)
    precision: Precision | None = None
    # Not compared either, because it is a trace. None for a plan without an optimizer.
    _update: Update | None = dataclasses.field(default=None, compare=False)
    _given_mesh: Mesh | None = None  # on which arrays rest; its axes may be Explicit, not Auto
    sequence: Sequences | None = None
    experts: Experts | None = None

    @functools.cached_property
    def _hash(self) -> int:
        own = self.stage, self.mesh, self.batch_axes, self.leaves, self.precision
        return hash((*own, self.sequence, self.experts))

    def __hash__(self) -> int:
        return self._hash

    def __deepcopy__(self, memo: object) -> "Layout":
        return self  # immutable, and devices cannot be copied

    @property
    def size(self) -> int:
        """The number of devices that the batch is split over."""
        return axes_size(self.mesh, self.batch_axes)

    @property
    def _splits(self) -> Splits:
        """Which of the axes split the rows of a batch, and which one their sequences."""
        tokens = None if self.sequence is None else self.sequence.axis
        return Splits(self.mesh, beyond(self.batch_axes, (tokens,)), tokens)

    @property
    def _is_grouped(self) -> bool:
        """Whether some kind of array is sharded, but not over all axes of the batch."""
        kinds = vars(self.groups).values()
        return any(axes and set(axes) != set(self.batch_axes) for axes in kinds)

    @functools.cached_property
    def _offloads(self) -> bool:
        """Whether some leaf rests in host memory."""
        return any(leaf.is_on_host for leaf in self.leaves)

    @functools.cached_property
    def _host_parts(self) -> dict[str, Part]:
        """How a step updates leaves that rest in host memory, by their paths."""
        if not self._offloads or self._update is None:
            return {}
        inputs = enumerate(self.leaves, len(self.params))
        paths = {i: leaf.path for i, leaf in inputs if leaf.is_on_host}
        try:
            with on_no_mesh():
                parts = InParts(self._update, self._update.shapes, paths.keys(), self._stacks).parts
        # An update is a user's code, and may raise anything. The step raises it where it matters;
        # here it would only keep a plan from being printed.
        except Exception:
            return {}
        return {paths[i]: part for part in parts for i in part.inputs}

    @functools.cached_property
    def _stacks(self) -> set[int]:
        """The stacks among an update's inputs, which are gradients, then leaves of the state."""
        return {i for i, leaf in enumerate([*self.params, *self.leaves]) if by_layer(leaf)}

    @functools.cached_property
    def _pads(self) -> bool:
        """Whether some leaf is padded, between steps or where it is updated."""
        return any(leaf.update.padding for leaf in self.leaves)

    @functools.cached_property
    def _rest_padded(self) -> list[tuple[int, str, Shape]]:
        """The positions, paths and shapes of parameters, and of a state's own copies of them, that
        are padded between steps."""
        leaves = enumerate(self.leaves)
        return [(at, x.path, x.shape) for at, x in leaves if x.rest.padding and x.kind != OPT_STATE]

    @property
    def _pads_params(self) -> bool:
        return bool(self._rest_padded)

    @functools.cached_property
    def _positions(self) -> dict[str, dict[str, int]]:
        """The position of each leaf in a state, by its kind and its path within that kind.

        All leaves are also there by "" and their full paths.
        """
        by_kind: dict[str, dict[str, int]] = {PARAMS: {}, OPT_STATE: {}, OTHER: {}, "": {}}
        for i, leaf in enumerate(self.leaves):
            by_kind[""][leaf.path] = by_kind[leaf.kind][leaf.path.partition("/")[2]] = i
        return by_kind

    @property
    def params(self) -> list[LeafPlan]:
        """The leaves that are parameters."""
        return [leaf for leaf in self.leaves if leaf.kind == PARAMS]

    @functools.cached_property
    def _absent(self) -> set[str]:
        """The axes that the model is annotated with and the mesh lacks: they shard nothing."""
        return {axis for leaf in self.leaves for axis in leaf.absent}

    @functools.cached_property
    def _shardings(self) -> list[NamedSharding]:
        """The place of each leaf between steps, in the order of `jax.tree.leaves(state)`."""
        mesh = self._given_mesh or self.mesh
        places = [leaf.rest.sharding(mesh) for leaf in self.leaves]
        if not mesh.abstract_mesh.explicit_axes:
            return places
        return [_as_in_types(*pair) for pair in zip(places, self.leaves, strict=True)]

    @functools.cached_property
    def _explicit_mesh(self) -> AbstractMesh | None:
        """The user's mesh, if it has Explicit axes, for a loss that names them. The loss sees one
        part of the batch."""
        mesh = self._given_mesh and self._given_mesh.abstract_mesh
        if not mesh or not mesh.explicit_axes:
            return None
        sizes = [1 if axis in self.batch_axes else size for axis, size in mesh.shape.items()]
        return AbstractMesh((*sizes,), mesh.axis_names, axis_types=mesh.axis_types)

    def _seen_by_loss(self, leaf: LeafPlan) -> jax.ShapeDtypeStruct:
        """Returns the shape of a whole parameter, sharded over Explicit axes of the user's own."""
        sharding = None
        if mesh := self._explicit_mesh:
            own = {*mesh.explicit_axes} - {*self.batch_axes}
            sharding = NamedSharding(mesh, leaf.rest.within(own))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

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

    def _regathering(self, regather: bool | str | Sequence[str]) -> Self:
        """Returns the plan of a step whose backward gathers parameters over these axes again.

        The step keeps what forward gathered over the others.
        """
        over = self.groups.params
        if isinstance(regather, bool):
            return self
        kept = tuple(axis for axis in over if axis in regather)
        if unknown := beyond(tuple(regather), self.batch_axes):
            raise ValueError(
                f"regather={regather} names {unknown[0]!r}, and the batch is split over "
                f"{self.batch_axes}. Name the fast axis of a mesh of levels, such as 'gpu' of "
                "zerojax.mesh(node=2, gpu=-1), or pass True or False."
            )
        if not over:
            return self
        if not kept or kept != over[: len(kept)]:
            raise ValueError(
                f"regather={regather} would keep parameters gathered over {beyond(over, kept)}, "
                f"but they are sharded over {over}, the fastest axis first, and backward can "
                f"gather again only over the first of these. Pass Schedule(regather={over[0]!r})."
            )
        leaves = [
            dataclasses.replace(leaf, near=leaf.near.over(kept)) if leaf.kind == PARAMS else leaf
            for leaf in self.leaves
        ]
        return dataclasses.replace(self, leaves=tuple(leaves))

    def _kept_bytes(self) -> int:
        """Returns the bytes on each device of the parameters that a step keeps at `near`, in their
        own dtypes; those that rest there do not count."""
        kept = [leaf for leaf in self.params if leaf.near.axes != leaf.rest.axes]
        return sum(leaf.bytes_at(leaf.near, self.mesh) for leaf in kept)

    def _gradient_bytes(self) -> int:
        """Returns the bytes on each device of the gradients, in the parameters' dtypes."""
        return sum(one.bytes_at(one.grad, self.mesh) for one in self.leaves if one.grad)


def _as_in_types(place: NamedSharding, leaf: LeafPlan) -> NamedSharding:
    """Returns a place as JAX spells it for the result of a step, which would be compiled twice
    otherwise: with all dimensions, if the type of the array says everything."""
    if names_in(place.spec) & {*place.mesh.abstract_mesh.auto_axes}:
        return place
    missing = [None] * (len(leaf.shape) - len(place.spec))
    return place.update(spec=PartitionSpec(*place.spec, *missing))


def check_plan(plan: object, what: str) -> None:
    """Raises if the argument `what` is not a plan."""
    if not isinstance(plan, Layout):
        is_tree = not jax.tree_util.all_leaves([plan])
        got = f"a {type(plan).__name__}" if is_tree else repr(plan)
        raise TypeError(f"{what} takes a plan, got {got}. Make one: zerojax.plan(state, stage=3).")
