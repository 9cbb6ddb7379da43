"""Chooses the dimension along which a leaf is sharded, or says why it stays replicated.

The choice depends on the path, the shape and the mesh alone. A stage decides to which arrays it
applies, never what it is.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np
from jax.sharding import Mesh, PartitionSpec

from zerojax._wire.routes import Entry, names_in

DEFAULT_MIN_SHARD_SIZE = 128

# A leaf is not padded to more than this many times its size: it is small, and would be sent as so
# much more.
MOST_PADDED = 2


@dataclasses.dataclass(frozen=True)
class Rule:
    """The rule by which leaves are sharded over the ZeRO axes, made of a plan's options."""

    mesh: Mesh
    axes: tuple[str, ...]
    overrides: Mapping[str, PartitionSpec]
    min_shard_size: int
    pad: bool

    def __post_init__(self) -> None:
        if not isinstance(self.pad, bool):
            raise TypeError(f"pad={self.pad!r} must be True or False.")
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
        """The number of devices that a leaf is sharded over."""
        return axes_size(self.mesh, self.axes)

    def __call__(
        self, path: str, shape: Sequence[int], base: PartitionSpec, layers: int
    ) -> tuple[PartitionSpec, str | None]:
        """Returns the spec of a leaf, and the reason where it stays replicated.

        `base` has the axes that the user sharded the leaf over already; they are kept. The first
        `layers` dimensions count layers. Of those after them, the first that divides is sharded;
        where none does, the one of least padding. ZeRO never shards the first that counts layers,
        and another only where nothing else can be: the full stack would be gathered for one layer.
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
        """Says why a leaf stays replicated that has elements enough."""
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
                f"overrides= puts {path} on {spec}, and UNCONSTRAINED says nothing about "
                "placement. Put None for a dimension that is not sharded."
            )
        sharded = [entry for entry in spec if names_in([entry]) & set(self.axes)]
        if len(sharded) > 1 or any(names_in([entry]) - set(self.axes) for entry in sharded):
            raise ValueError(
                f"overrides= puts {path} on {spec}, and ZeRO shards one dimension, over its axes "
                f"{self.axes} or some of them. Put {put!r} there, or "
                "PartitionSpec(None) to replicate it."
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
        """Returns an entry of a spec, over ZeRO's axes in the order in which all leaves have them,
        which groups need."""
        here = [axis for axis in self.axes if axis in names_in([entry])]
        return entry_over(here) if here else entry


def axes_size(mesh: Mesh, axes: Sequence[str]) -> int:
    """Returns the number of devices that these axes shard over."""
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
