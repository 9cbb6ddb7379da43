"""The spec of one leaf: the dimension that ZeRO shards, or the reason why it shards none.

A spec depends on the path, the shape and the mesh alone. A stage decides to which arrays it
applies, never what it is.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence

import numpy as np
from jax.sharding import PartitionSpec

from zerojax._collectives import Entry, names_in

DEFAULT_MIN_SHARD_SIZE = 128


@dataclasses.dataclass(frozen=True)
class Rule:
    """The rule by which a leaf is sharded over the ZeRO axes."""

    axes: tuple[str, ...]
    size: int
    axis_sizes: tuple[tuple[str, int], ...]
    overrides: tuple[tuple[str, PartitionSpec], ...] = ()
    min_shard_size: int = DEFAULT_MIN_SHARD_SIZE

    def __call__(
        self, path: str, shape: Sequence[int], base: PartitionSpec, layers: int
    ) -> tuple[PartitionSpec, str | None]:
        """Returns the spec of a leaf, and the reason where it stays replicated.

        `base` has the axes that the user sharded the leaf over already; they are kept. The first
        `layers` dimensions count layers. ZeRO never shards the first of them, and another only
        where nothing else divides: the full stack would be gathered for one layer.
        """
        for pattern, spec in self.overrides:
            if re.search(pattern, path):
                self.check_override(path, shape, spec)
                return spec, None if shard_dim(spec, self.axes) is not None else "overrides="
        if not shape:
            return base, "scalar"
        if np.prod(shape) < self.min_shard_size:
            return base, f"smaller than min_shard_size={self.min_shard_size}"
        taken = tuple(base) + (None,) * (len(shape) - len(base))
        dims = [*range(layers, len(shape)), *range(1, layers)]
        free = [d for d in dims if taken[d] is None]
        for dim in free:
            if shape[dim] and shape[dim] % self.size == 0:
                return _with_axes(taken, dim, self.axes), None
        return base, _indivisible(shape, free, self.size, layers > 0)

    def check_override(self, path: str, shape: Sequence[int], spec: PartitionSpec) -> None:
        """Raises for an override that a leaf of this shape cannot follow."""
        if len(spec) > len(shape):
            raise ValueError(
                f"overrides= puts {path} (shape {tuple(shape)}) on {spec}, which has more "
                "entries than the leaf has dimensions. Drop the extra ones."
            )
        sizes = dict(self.axis_sizes)
        self._check_entries(path, spec)
        for dim, entry in enumerate(spec):
            names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
            for name in names:
                if name not in sizes:
                    raise ValueError(
                        f"overrides= puts {path} on {spec}, but the mesh has no axis {name!r}; "
                        f"its axes are {tuple(sizes)}. Name one of those."
                    )
            total = int(np.prod([sizes[name] for name in names], dtype=int))
            if shape[dim] % total:
                raise ValueError(
                    f"overrides= puts {path} (shape {tuple(shape)}) on {spec}, but {total} does "
                    f"not divide dimension {dim} ({shape[dim]}). Pad it to "
                    f"{-(-shape[dim] // total) * total} or override another dimension."
                )

    def _check_entries(self, path: str, spec: PartitionSpec) -> None:
        """Raises for a spec that says less, or more, than which dimension ZeRO shards."""
        if PartitionSpec.UNCONSTRAINED in tuple(spec):
            raise ValueError(
                f"overrides= puts {path} on {spec}, and UNCONSTRAINED is no place. Put None for a "
                "dimension that is not sharded."
            )
        sharded = [entry for entry in spec if names_in([entry]) & set(self.axes)]
        over_all = [entry for entry in sharded if shard_dim(PartitionSpec(entry), self.axes) == 0]
        if len(sharded) > 1 or sharded != over_all:
            entry = self.axes[0] if len(self.axes) == 1 else self.axes
            raise ValueError(
                f"overrides= puts {path} on {spec}, and ZeRO shards one dimension, over all of "
                f"its axes {self.axes}. Put {entry!r} there, PartitionSpec(None) to replicate it, "
                "or give axis= the axes that you want."
            )


def shard_dim(spec: PartitionSpec, axes: Sequence[str]) -> int | None:
    """Returns the dimension that `spec` shards over the ZeRO axes."""
    for dim, entry in enumerate(spec):
        names = (entry,) if isinstance(entry, str) else tuple(entry or ())
        if names == tuple(axes):
            return dim
    return None


def only_axes(spec: PartitionSpec, axes: Sequence[str]) -> PartitionSpec:
    """Returns `spec` as `shard_map` over `axes` wants it: the other axes left out."""
    return PartitionSpec(*(e if shard_dim(PartitionSpec(e), axes) == 0 else None for e in spec))


def other_axes(spec: PartitionSpec, axes: Sequence[str], rank: int) -> tuple[Entry, ...]:
    """Returns, for each dimension, the axes but ZeRO's that it is sharded over; () for none."""
    entries = [None if shard_dim(PartitionSpec(e), axes) == 0 else e for e in spec]
    if not names_in(entries) or names_in(entries) & set(axes):
        return ()
    return (*entries, *[None] * (rank - len(entries)))


def normal(spec: PartitionSpec) -> PartitionSpec:
    """Returns `spec` without trailing Nones, as `jax.jit` writes the specs of its results.

    An input spelled otherwise would compile the step a second time.
    """
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def make_rule(
    axes: tuple[str, ...],
    axis_sizes: Mapping[str, int],
    overrides: Mapping[str, PartitionSpec] | None,
    min_shard_size: int,
) -> Rule:
    """Returns the rule that a plan's options describe, once they are checked."""
    if not isinstance(min_shard_size, int) or min_shard_size < 0:
        raise ValueError(
            f"min_shard_size must be a number of elements, got {min_shard_size!r}. Use 0 to shard "
            "whatever divides."
        )
    size = int(np.prod([axis_sizes[a] for a in axes], dtype=int))
    if not isinstance(overrides, Mapping | None):
        raise TypeError(
            f"overrides= must map path patterns to specs, got {overrides!r}. Pass a dict, for "
            "example {'embed': jax.sharding.PartitionSpec()}."
        )
    pairs = tuple((overrides or {}).items())
    for pattern, spec in pairs:
        if not isinstance(spec, PartitionSpec):
            raise TypeError(
                f"overrides= maps {pattern!r} to {spec!r}; map it to a "
                "jax.sharding.PartitionSpec, for example PartitionSpec('data', None)."
            )
    return Rule(axes, size, tuple(axis_sizes.items()), pairs, min_shard_size)


def _with_axes(taken: tuple[Entry, ...], dim: int, axes: tuple[str, ...]) -> PartitionSpec:
    entry = axes[0] if len(axes) == 1 else axes
    return PartitionSpec(*taken[:dim], entry, *taken[dim + 1 :])


def _indivisible(shape: Sequence[int], free: list[int], size: int, stacked: bool) -> str:
    if not free:
        only = "its only dimension counts layers" if stacked else "every dimension is taken"
        return f"{only}; nothing left to shard over {size} devices"
    dim = max(free, key=lambda d: shape[d])
    padded = -(-max(shape[dim], 1) // size) * size
    which = " after the layer dimension" if stacked else ""
    return (
        f"no dimension of {tuple(shape)}{which} divides by {size}; pad dimension {dim} to {padded}"
    )
