"""How a parameter travels: over which mesh axes, in how many hops, written how."""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import jax
from jax.typing import DTypeLike

from zerojax._wire.codecs import Codec, Exact, Quantized

EXACT = Exact()
Entry = str | tuple[str, ...] | None  # of a PartitionSpec
Hop = tuple[tuple[str, ...], bool]  # axes, and whether codes cross them


@dataclasses.dataclass(frozen=True)
class Route:
    """The mesh axes that an array crosses, in two hops, encoded all the way.

    `near` are the axes within a node, say, and `far` those between nodes. A weight is all-gathered
    over `far` and then over `near`; its gradient is reduce-scattered over `near`, then over `far`,
    and summed over `replicas`. In the spec of what is sharded `near` is major and `far` minor, so
    gathering over `far` first leaves each device a contiguous block for `near`. The sharded
    dimension has `padding` elements more than the parameter: they are dropped after the gather, and
    added before the reduction. A gradient travels as codes over the axes in `coded` alone: inside a
    node, a reduce-scatter hides as it is, and leaves a fraction to encode where it comes first.
    (Codes all the way cost 20 ms of compute, 7.5B on 8 nodes of 8 H100s with int8, this way 2.)
    """

    near: tuple[str, ...] = ()
    far: tuple[str, ...] = ()
    replicas: tuple[str, ...] = ()
    codec: Codec = EXACT
    padding: int = 0
    coded: tuple[str, ...] = ()
    devices: int = 1  # of near and far axes, where rows may travel: see the note in `rows.py`

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that a gradient is scattered over, in this order."""
        return (*self.near, *self.far)

    @property
    def hops(self) -> tuple[Hop, ...]:
        """The axes of a gradient in runs of those that codes cross and those that they do not.

        The runs stay in the order that shards are laid out in: after any other, a device would hold
        the part of another device.
        """
        runs = itertools.groupby(self.axes, lambda axis: axis in self.coded)
        return tuple((tuple(axes), is_coded) for is_coded, axes in runs)

    def coded_over(self, axes: tuple[str, ...]) -> "Route":
        """Returns the route of a gradient that goes as codes over these of its axes alone."""
        if not isinstance(self.codec, Quantized):
            return self
        return dataclasses.replace(self, coded=axes, codec=self.codec if axes else EXACT)


@dataclasses.dataclass(frozen=True)
class Wire:
    """The routes of a parameter: of its weight to the devices, of its gradient back to shards."""

    gather: Route = Route()
    reduce: Route = Route()


@dataclasses.dataclass(frozen=True)
class Cut:
    """The sharding of a parameter of `rank` dimensions, its dtypes, and how it is communicated.

    `others` names, for each dimension, mesh axes of the user's own that it is sharded over (a
    `tensor` axis); it is empty where there are none. `path` is for messages and traces.
    """

    dim: int | None  # None: replicated, and so is its gradient, all-reduced
    rank: int
    dtype: DTypeLike  # of what is sent
    wire: Wire = Wire()
    use_dtype: DTypeLike | None = None  # of the weight as it is used, where that is wider
    others: tuple[Entry, ...] = ()
    path: str = "a parameter"

    @property
    def final_dtype(self) -> DTypeLike:
        return self.dtype if self.use_dtype is None else self.use_dtype

    @property
    def fixed(self) -> int:
        """The first dimension that a view must leave as it is, like all after it.

        [Note: stacks of replicated layers] A replicated parameter has no sharded dimension, but a
        loop over a stack of them reduces each layer's gradient as soon as it exists. For that the
        loop must see layers, so the stack is treated as if its last dimension were sharded.
        """
        return self.rank - 1 if self.dim is None else self.dim

    def of_one_layer(self) -> "Cut":
        """Returns what a loop over the first dimension sees of it."""
        return self.moved(range(1, self.rank))

    def moved(self, dims: Sequence[int | None]) -> "Cut":
        """Returns the sharding of a view whose dimension k is dimension `dims[k]` of this array
        (None: a new one)."""
        others = tuple(None if d is None else self.others[d] for d in dims) if self.others else ()
        dim = None if self.dim is None else list(dims).index(self.dim)
        return dataclasses.replace(self, dim=dim, rank=len(dims), others=others)


def named(cuts: Sequence[Cut]) -> contextlib.AbstractContextManager:
    """Names what runs in its block after parameters, for those who read a trace of the program."""
    return jax.named_scope("+".join(cut.path for cut in cuts))


def names_in(entries: Iterable[Entry]) -> set[str]:
    """Returns the mesh axes that entries of a spec name."""
    return {name for e in entries for name in ((e,) if isinstance(e, str) else e or ())}
