"""The mesh axes that shard an array, in the entries of its spec."""

# pyright: strict, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import dataclasses
import math
from collections.abc import Iterable, Sequence

from jax.sharding import Mesh, PartitionSpec

Axes = tuple[str, ...]
Entry = str | tuple[str, ...] | None  # of a PartitionSpec


def axes_in(entry: Entry) -> Axes:
    """Returns the mesh axes in an entry of a spec."""
    return (entry,) if isinstance(entry, str) else entry or ()


def names_in(entries: Iterable[Entry]) -> set[str]:
    """Returns the mesh axes in the entries of a spec."""
    return {name for entry in entries for name in axes_in(entry)}


def as_names(names: object) -> Axes | None:
    """Returns a name, or a sequence of them, as a tuple; None for anything else."""
    names = (names,) if isinstance(names, str) else names
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        return None
    return tuple(names)


def beyond(axes: Axes, inner: Sequence[str | None]) -> Axes:
    """Returns the axes that are not among `inner`, in order."""
    return tuple(axis for axis in axes if axis not in inner)


def slow(axes: Axes, batch_axes: Axes) -> Axes:
    """Returns the axes that are slower than the fastest of several batch axes: on a mesh of levels,
    the links between nodes."""
    return beyond(axes, batch_axes[-1:]) if len(batch_axes) > 1 else axes


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
class Splits:
    """The mesh axes that split a batch: its `rows`, and the `tokens` of each row."""

    mesh: Mesh
    rows: Axes
    tokens: str | None = None

    @property
    def ways(self) -> int:
        """The parts that rows are split into."""
        return axes_size(self.mesh, self.rows)

    @property
    def blocks(self) -> int:
        """The blocks that tokens are split into."""
        return 1 if self.tokens is None else self.mesh.shape[self.tokens]
