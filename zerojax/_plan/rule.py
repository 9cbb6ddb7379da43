"""The rule by which a plan shards leaves, and the groups that a user asks for."""

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence

import numpy as np
from jax.sharding import Mesh, PartitionSpec

from zerojax._kernel.places import KINDS, Groups, Placement, groups_of
from zerojax._plan.expert import Experts
from zerojax._specs import (
    Axes,
    Entry,
    as_names,
    axes_size,
    beyond,
    entry_over,
    names_in,
    padded,
    shard_dim,
)

DEFAULT_MIN_SHARD_SIZE = 128

# Never pad a leaf beyond this multiple of its size: such leaves are small, and padding would be
# most of what a step sends.
MOST_PADDED = 2


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


@dataclasses.dataclass(frozen=True)
class Rule:
    """The rule for sharding leaves over the ZeRO axes, from a plan's options."""

    mesh: Mesh
    axes: tuple[str, ...]
    overrides: Mapping[str, PartitionSpec]
    min_shard_size: int
    pad: bool
    experts: Experts | None = None

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
        experts = self.experts if self.experts and self.experts.matches(path) else None
        for pattern, spec in self.overrides.items():
            if re.search(pattern, path):
                self._check_override(path, shape, spec, experts)
                spec = PartitionSpec(*map(self._in_order, spec))
                return spec, None if shard_dim(spec, self.axes) is not None else "overrides="
        if experts:
            base = experts.base(path, shape, base, layers)
            experts.check(path, shape, base, self.mesh, self.pad)
            others = beyond(self.axes, (experts.axis,))
            if not others:
                return base, "ZeRO has no other axis"
            return dataclasses.replace(self, axes=others, experts=None)(path, shape, base, layers)
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

    def padding(self, shape: Sequence[int], spec: PartitionSpec) -> tuple[int, ...]:
        """Returns how many elements must be added to each dimension that the batch's axes shard."""
        axes = {*self.axes, self.experts and self.experts.axis}
        each = [(n, names_in([entry])) for n, entry in itertools.zip_longest(shape, spec)]
        counts = [-n % axes_size(self.mesh, [*names]) if names & axes else 0 for n, names in each]
        return tuple(counts) if any(counts) else ()

    def padded_shape(self, shape: Sequence[int], spec: PartitionSpec) -> tuple[int, ...]:
        return Placement(spec, padding=self.padding(shape, spec)).padded(shape)

    def _check_override(
        self, path: str, shape: Sequence[int], spec: PartitionSpec, experts: Experts | None
    ) -> None:
        """Raises for an override that a leaf of this shape cannot follow."""
        apart = experts and experts.axis
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
        axes = set(self.axes)
        sharded = [entry for entry in spec if names_in([entry]) & axes and entry != apart]
        if len(sharded) > 1 or any(names_in([entry]) - axes for entry in sharded):
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
            is_padded = self.pad and axes.union([apart]).issuperset(names)
            if shape[dim] % total and not is_padded:
                raise ValueError(
                    f"overrides= puts {leaf} on {spec}, but {total} does not divide dimension "
                    f"{dim} ({shape[dim]}). Resize it to {padded(shape[dim], total)} or override "
                    "another dimension."
                )
        if experts:
            experts.check(path, shape, spec, self.mesh, self.pad)

    def _in_order(self, entry: Entry) -> Entry:
        """Returns an entry of a spec with ZeRO's axes in the order of all leaves, as groups need
        it."""
        here = [axis for axis in self.axes if axis in names_in([entry])]
        return entry_over(here) if here else entry
