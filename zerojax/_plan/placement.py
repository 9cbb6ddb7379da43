"""The place of an array: the mesh axes that shard it, its padding, its memory.

A ZeRO stage is nothing but placements: `groups_of` says over which axes parameters, gradients and
optimizer state are sharded, and the planner gives each leaf the placements that follow.

[Note: where parameters rest] Groups say how each kind is sharded in a step. If a parameter rested
like that, over fewer axes than its optimizer state, the update would end with an all-gather over
the others, with no compute left to hide it (72 of 599 ms, 7.5B parameters on 8 nodes of 8 H100s).
So it rests where it is updated. The next forward brings each layer `near` while the layer before it
computes, and backward gathers it from there; of several microbatches, all do.
"""

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax import _compat
from zerojax._plan import dimension as _dimension
from zerojax._wire.routes import Entry, names_in

Axes = tuple[str, ...]


def beyond(axes: Axes, inner: Axes) -> Axes:
    """Returns the axes that are not among `inner`, in order."""
    return tuple(axis for axis in axes if axis not in inner)


def slow(axes: Axes, batch_axes: Axes) -> Axes:
    """Returns those of some axes that are slower than the fastest of the batch's, if there are
    several: links between nodes, on a mesh of levels."""
    return beyond(axes, batch_axes[-1:]) if len(batch_axes) > 1 else axes


@dataclasses.dataclass(frozen=True)
class Groups:
    """The mesh axes over which each kind of array is sharded; () where it is replicated."""

    params: Axes = ()
    grads: Axes = ()
    opt_state: Axes = ()

    @property
    def stage(self) -> int:
        """The ZeRO stage that shards the same kinds of arrays."""
        return sum(map(bool, (self.params, self.grads, self.opt_state)))


KINDS = tuple(field.name for field in dataclasses.fields(Groups))


def groups_of(stage: int, axes: Axes) -> Groups:
    """Returns the groups of a stage over `axes`: this table is all that a stage is."""
    return {
        0: Groups(),
        1: Groups(opt_state=axes),
        2: Groups(opt_state=axes, grads=axes),
        3: Groups(opt_state=axes, grads=axes, params=axes),
    }[stage]


def chosen_groups(stage: int, axes: Axes, given: Mapping[str, str | Sequence[str]]) -> Groups:
    """Returns the groups that a user asks for, with the stage's where nothing is given.

    Their axes are in the order in which they shard a dimension: those of the parameters first, so
    that each device's part contains its shards of what is sharded further.
    """
    row = groups_of(stage, axes)
    if not isinstance(given, Mapping):
        raise TypeError(f"groups={given!r} is not a mapping. Pass for example {{'params': 'gpu'}}.")
    over = dataclasses.asdict(row)
    for kind, names in given.items():
        if kind not in KINDS:
            raise ValueError(f"groups= has the key {kind!r}. Name one of {', '.join(KINDS)}.")
        over[kind] = _names(kind, names)
        if unknown := beyond(over[kind], axes):
            raise ValueError(
                f"groups= shards {kind} over {over[kind]}, but the batch is split over {axes}, "
                f"with no axis {unknown[0]!r}. Name one of those, or pass a mesh that has it, "
                "mesh=zerojax.mesh(node=2, gpu=4); where you give axis=, name it there too."
            )
    for inner, outer in itertools.pairwise(KINDS):
        if missing := beyond(over[inner], over[outer]):
            by_stage = inner not in given
            raise ValueError(
                f"{f'stage {stage}' if by_stage else 'groups='} shards {inner} over {over[inner]} "
                f"and groups= {outer} over {over[outer]}. What shards {inner} must shard {outer} "
                f"too: {outer} needs {_listed(missing)} as well"
                + (f", or groups= {inner} over fewer axes." if by_stage else ".")
            )
    fastest_first, order = axes[::-1], ()  # what is gathered within a node is contiguous
    for kind in KINDS:
        order += tuple(a for a in fastest_first if a in over[kind] and a not in order)
    return Groups(**{kind: tuple(a for a in order if a in names) for kind, names in over.items()})


def _names(kind: str, given: str | Sequence[str]) -> Axes:
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"groups= shards {kind} over {given!r}. Name an axis of the mesh, or several: "
            "('gpu', 'node'); () replicates."
        )
    return tuple(names)


def _listed(names: Axes) -> str:
    return " and ".join(map(repr, names))


@dataclasses.dataclass(frozen=True)
class Placement:
    """A place for one array.

    `spec` names all mesh axes that shard it, the user's own among them; `axes` are ZeRO's, which an
    all-gather spans. `memory` is a JAX memory kind, None for the device's own. `padding` is how
    many elements were added to the sharded dimension so that the devices divide it.
    """

    spec: PartitionSpec
    axes: Axes = ()
    memory: str | None = None
    padding: int = 0

    @property
    def dim(self) -> int | None:
        """The dimension that ZeRO shards."""
        return _dimension.shard_dim(self.spec, self.axes) if self.axes else None

    def over(self, axes: Axes) -> "Placement":
        """Returns the place of the same array, sharded over those of its axes that are in `axes`.

        Its padding is the same, so that shards nest.
        """
        here = tuple(axis for axis in self.axes if axis in axes)
        entry = _dimension.entry_over(here) if here else None
        entries = [entry if dim == self.dim else old for dim, old in enumerate(self.spec)]
        while entries and entries[-1] is None:
            # `jax.jit` writes the specs of its results without them, and an input that is spelled
            # otherwise would compile the step a second time.
            entries.pop()
        padding = self.padding if here else 0
        return Placement(PartitionSpec(*entries), here, self.memory, padding)

    @property
    def local(self) -> PartitionSpec:
        """The spec for a `shard_map` over ZeRO's axes: the others are left out."""
        return self.within(self.axes)

    def within(self, axes: Collection[str]) -> PartitionSpec:
        """The spec for a `shard_map` over these axes, which may be the user's own."""

        def kept(entry: Entry) -> Entry:
            names = (entry,) if isinstance(entry, str) else entry or ()
            left = tuple(name for name in names if name in axes)
            return _dimension.entry_over(left) if left else None

        return PartitionSpec(*map(kept, self.spec))

    def padded(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape that an array of this logical shape has here."""
        return tuple(n + self.padding * (d == self.dim) for d, n in enumerate(shape))

    def sharding(self, mesh: Mesh) -> NamedSharding:
        if self.memory is not None and _compat.is_compile_only(mesh.devices.flat[0]):
            # Such devices list no memories, and on their mesh JAX drops the kind without a word.
            return NamedSharding(mesh.abstract_mesh, self.spec, memory_kind=self.memory)
        return NamedSharding(mesh, self.spec, memory_kind=self.memory)

    @property
    def on_device(self) -> "Placement":
        """The same place in the device's own memory."""
        return dataclasses.replace(self, memory=None)

    def others(self, rank: int) -> tuple[Entry, ...]:
        """Returns, for each dimension, the user's own axes that it is sharded over; () for none."""
        entries = [None if dim == self.dim else entry for dim, entry in enumerate(self.spec)]
        return (*entries, *[None] * (rank - len(entries))) if names_in(entries) else ()
