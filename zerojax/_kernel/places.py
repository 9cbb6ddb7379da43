"""Where a leaf of a state lives: the mesh axes that shard it, its padding, its memory.

A ZeRO stage is nothing but placements. `groups_of` says which axes shard parameters, gradients and
optimizer state, `Rule` chooses the dimension, and `leaf_at` gives a leaf the placements that
follow.

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
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from zerojax import _compat
from zerojax._kernel.travel import NOWHERE, Cut, Entry, Route, names_in

Axes = tuple[str, ...]


def beyond(axes: Axes, inner: Axes) -> Axes:
    """Returns the axes that are not among `inner`, in order."""
    return tuple(axis for axis in axes if axis not in inner)


def slow(axes: Axes, batch_axes: Axes) -> Axes:
    """Returns the axes that are slower than the fastest of several batch axes: on a mesh of levels,
    the links between nodes."""
    return beyond(axes, batch_axes[-1:]) if len(batch_axes) > 1 else axes


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


def chosen_groups(stage: int, axes: Axes, given: Mapping[str, str | Sequence[str]]) -> Groups:
    """Returns the groups that a user asks for, and the stage's for the other kinds.

    Their axes are in the order in which they shard a dimension. Those of the parameters come first,
    so that a device's part contains its shards of the kinds that are sharded further.
    """
    row = groups_of(stage, axes)
    if not isinstance(given, Mapping):
        raise TypeError(f"groups={given!r} is not a mapping. Pass for example {{'params': 'gpu'}}.")
    over = dataclasses.asdict(row)
    for kind, names in given.items():
        if kind not in KINDS:
            raise ValueError(f"groups= has the key {kind!r}. Name one of {', '.join(KINDS)}.")
        over[kind] = as_names(names)
        if over[kind] is None:
            raise TypeError(
                f"groups= shards {kind} over {names!r}. Name an axis of the mesh, or several: "
                "('gpu', 'node'); () replicates."
            )
        if unknown := beyond(over[kind], axes):
            raise ValueError(
                f"groups= shards {kind} over {over[kind]}, but the batch is split over {axes}, "
                f"with no axis {unknown[0]!r}. Name one of those, or pass a mesh that has it, "
                "mesh=zerojax.mesh(node=2, gpu=-1); if you pass axis=, name it there too."
            )
    for inner, outer in itertools.pairwise(KINDS):
        if missing := beyond(over[inner], over[outer]):
            by_stage = inner not in given
            raise ValueError(
                f"{f'stage {stage}' if by_stage else 'groups='} shards {inner} over {over[inner]}, "
                f"but {outer} only over {over[outer]}. Every axis that shards {inner} must also "
                f"shard {outer}: add {' and '.join(map(repr, missing))} to groups[{outer!r}]"
                + (f", or shard {inner} over fewer axes." if by_stage else ".")
            )
    fastest_first, order = axes[::-1], ()  # so that a node gathers contiguous blocks
    for kind in KINDS:
        order += tuple(a for a in fastest_first if a in over[kind] and a not in order)
    return Groups(**{kind: tuple(a for a in order if a in names) for kind, names in over.items()})


def as_names(names: object) -> Axes | None:
    """Returns a name, or a sequence of them, as a tuple; None for anything else."""
    names = (names,) if isinstance(names, str) else names
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        return None
    return tuple(names)


@dataclasses.dataclass(frozen=True)
class Placement:
    """A place for one array.

    `spec` names all mesh axes that shard it, including the user's own; `axes` are ZeRO's, which an
    all-gather spans. `memory` is a JAX memory kind, None for the device's own. `padding` counts
    the elements added to the sharded dimension so that the devices divide it.
    """

    spec: PartitionSpec
    axes: Axes = ()
    memory: str | None = None
    padding: int = 0

    @property
    def dim(self) -> int | None:
        """The dimension that ZeRO shards."""
        return shard_dim(self.spec, self.axes) if self.axes else None

    def over(self, axes: Axes) -> "Placement":
        """Returns the place of the same array, sharded only over those of its axes in `axes`.

        Its padding stays the same, so that shards nest.
        """
        here = tuple(axis for axis in self.axes if axis in axes)
        entry = entry_over(here) if here else None
        entries = [entry if dim == self.dim else old for dim, old in enumerate(self.spec)]
        while entries and entries[-1] is None:
            # `jax.jit` writes the specs of its results without a None at the end. An input with
            # another spelling would compile the step a second time.
            entries.pop()
        padding = self.padding if here else 0
        return Placement(PartitionSpec(*entries), here, self.memory, padding)

    @property
    def local(self) -> PartitionSpec:
        """The spec for a `shard_map` over ZeRO's axes, without other axes."""
        return self.within(self.axes)

    def within(self, axes: Collection[str]) -> PartitionSpec:
        """The spec for a `shard_map` over these axes, which may be the user's own."""

        def kept(entry: Entry) -> Entry:
            names = (entry,) if isinstance(entry, str) else entry or ()
            left = tuple(name for name in names if name in axes)
            return entry_over(left) if left else None

        return PartitionSpec(*map(kept, self.spec))

    def padded(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape that an array of this logical shape has here."""
        return tuple(n + self.padding * (d == self.dim) for d, n in enumerate(shape))

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
        entries = [None if dim == self.dim else entry for dim, entry in enumerate(self.spec)]
        return (*entries, *[None] * (rank - len(entries))) if names_in(entries) else ()


DEFAULT_MIN_SHARD_SIZE = 128

# Never pad a leaf beyond this multiple of its size: such leaves are small, and padding would be
# most of what a step sends.
MOST_PADDED = 2


@dataclasses.dataclass(frozen=True)
class Rule:
    """The rule for sharding leaves over the ZeRO axes, from a plan's options."""

    mesh: Mesh
    axes: tuple[str, ...]
    overrides: Mapping[str, PartitionSpec]
    min_shard_size: int
    pad: bool

    def __post_init__(self) -> None:
        if not isinstance(self.min_shard_size, int) or self.min_shard_size < 0:
            raise ValueError(
                f"min_shard_size must be a number of elements, got {self.min_shard_size!r}. Use 0 "
                "to shard leaves of any size."
            )
        if not isinstance(self.overrides, Mapping):
            raise TypeError(
                f"overrides= must map path patterns to specs, got {self.overrides!r}. Pass a dict, "
                "for example {'embed': jax.sharding.PartitionSpec()}."
            )
        for pattern, spec in self.overrides.items():
            if not isinstance(spec, PartitionSpec):
                raise TypeError(
                    f"overrides= maps {pattern!r} to {spec!r}; map it to a "
                    "jax.sharding.PartitionSpec, for example PartitionSpec('data', None)."
                )

    @property
    def size(self) -> int:
        """The number of devices over which leaves are sharded."""
        return axes_size(self.mesh, self.axes)

    def __call__(
        self, path: str, shape: Sequence[int], base: PartitionSpec, layers: int
    ) -> tuple[PartitionSpec, str | None]:
        """Returns the spec of a leaf, and a reason if it stays replicated.

        `base` has the axes over which the user sharded the leaf already; the rule keeps them. The
        first `layers` dimensions count layers. Of the dimensions after them, the rule shards the
        first that the devices divide, or else the one that needs least padding. It never shards the
        first that counts layers, and shards another of these only if nothing else is left: a step
        would gather the full stack for one layer.
        """
        for pattern, spec in self.overrides.items():
            if re.search(pattern, path):
                self._check_override(path, shape, spec)
                spec = PartitionSpec(*map(self._in_order, spec))
                return spec, None if shard_dim(spec, self.axes) is not None else "overrides="
        if not shape:
            return base, "scalar"
        if np.prod(shape) < self.min_shard_size:
            return base, f"smaller than min_shard_size={self.min_shard_size}"
        entries = [*base, *[None] * (len(shape) - len(base))]
        free = [d for d in range(layers, len(shape)) if entries[d] is None]
        inner = [d for d in range(1, layers) if entries[d] is None]
        dim = self._first_even(shape, free)
        dim = self._least_padded(shape, free) if dim is None else dim
        dim = self._first_even(shape, inner) if dim is None else dim
        if dim is None:
            return base, self._indivisible(shape, [*free, *inner], layers > 0)
        entries[dim] = entry_over(self.axes)
        return PartitionSpec(*entries), None

    def _first_even(self, shape: Sequence[int], dims: list[int]) -> int | None:
        even = (d for d in dims if shape[d] and shape[d] % self.size == 0)
        return next(even, None)

    def _least_padded(self, shape: Sequence[int], dims: list[int]) -> int | None:
        """Returns the dimension that grows least when it is padded, if that is worth it."""
        growth = {d: padded(shape[d], self.size) / shape[d] for d in dims if shape[d]}
        dim = min(growth, key=lambda d: growth[d], default=None)
        return dim if self.pad and dim is not None and growth[dim] <= MOST_PADDED else None

    def _indivisible(self, shape: Sequence[int], free: list[int], stacked: bool) -> str:
        """Says why a leaf with enough elements stays replicated."""
        if not free:
            only = "its only dimension counts layers" if stacked else "every dimension is taken"
            return f"{only}; nothing left to shard over {self.size} devices"
        after = " after the layer dimension" if stacked else ""
        if self.pad:
            return (
                f"padding any dimension of {tuple(shape)}{after} to a multiple of {self.size} "
                f"would make it more than {MOST_PADDED} times as large"
            )
        return f"no dimension of {tuple(shape)}{after} divides by {self.size}, and pad=False"

    def padding(self, shape: Sequence[int], spec: PartitionSpec) -> int:
        """Returns how many elements must be added to the dimension that ZeRO shards."""
        dim = shard_dim(spec, self.axes)
        if dim is None:
            return 0
        return -shape[dim] % axes_size(self.mesh, [*names_in([spec[dim]])])

    def padded_shape(self, shape: Sequence[int], spec: PartitionSpec) -> tuple[int, ...]:
        dim, padding = shard_dim(spec, self.axes), self.padding(shape, spec)
        return tuple(n + padding * (d == dim) for d, n in enumerate(shape))

    def _check_override(self, path: str, shape: Sequence[int], spec: PartitionSpec) -> None:
        """Raises for an override that a leaf of this shape cannot follow."""
        leaf, put = f"{path} (shape {tuple(shape)})", entry_over(self.axes)
        if len(spec) > len(shape):
            raise ValueError(
                f"overrides= puts {leaf} on {spec}, which has more entries than the leaf has "
                "dimensions. Drop the extra ones."
            )
        if PartitionSpec.UNCONSTRAINED in tuple(spec):
            raise ValueError(
                f"overrides= puts {path} on {spec}, but UNCONSTRAINED says nothing about "
                "placement. Put None for a dimension that you do not shard."
            )
        sharded = [entry for entry in spec if names_in([entry]) & set(self.axes)]
        if len(sharded) > 1 or any(names_in([entry]) - set(self.axes) for entry in sharded):
            raise ValueError(
                f"overrides= puts {path} on {spec}, but ZeRO shards only one dimension, over all "
                f"or some of its axes {self.axes}. Put {put!r} there, or pass PartitionSpec(None) "
                "to replicate the leaf."
            )
        for dim, entry in enumerate(spec):
            names = sorted(names_in([entry]))
            for name in names:
                if name not in self.mesh.shape:
                    raise ValueError(
                        f"overrides= puts {path} on {spec}, but the mesh has no axis {name!r}; "
                        f"its axes are {self.mesh.axis_names}. Name one of those."
                    )
            total = axes_size(self.mesh, names)
            is_padded = self.pad and set(names) <= set(self.axes)
            if shape[dim] % total and not is_padded:
                raise ValueError(
                    f"overrides= puts {leaf} on {spec}, but {total} does not divide dimension "
                    f"{dim} ({shape[dim]}). Resize it to {padded(shape[dim], total)} or override "
                    "another dimension."
                )

    def _in_order(self, entry: Entry) -> Entry:
        """Returns an entry of a spec with ZeRO's axes in the order of all leaves, as groups need
        it."""
        here = [axis for axis in self.axes if axis in names_in([entry])]
        return entry_over(here) if here else entry


def axes_size(mesh: Mesh, axes: Sequence[str]) -> int:
    """Returns the number of devices along these axes."""
    return math.prod(mesh.shape[name] for name in axes)


def entry_over(axes: Sequence[str]) -> Entry:
    """Returns the entry of a spec that shards a dimension over all of these axes."""
    return PartitionSpec(tuple(axes))[0]


def shard_dim(spec: PartitionSpec, axes: Sequence[str]) -> int | None:
    """Returns the dimension that `spec` shards over the ZeRO axes."""
    dims = (dim for dim, entry in enumerate(spec) if names_in([entry]) & set(axes))
    return next(dims, None)


def padded(length: int, size: int) -> int:
    """Returns the next length that `size` devices divide evenly."""
    return -(-length // size) * size


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
