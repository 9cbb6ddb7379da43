"""Arrays that the devices of a mesh axis have in blocks along one dimension, and what moves them.

A device has block s of `ceil(n / size)` elements of a dimension of length n. Where the axis does
not divide n, the last blocks end with elements that do not count, whatever they are.
"""

# pyright: strict, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from zerojax._types import Shape, wide

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Which dimension of a value is in blocks: `dim`, or the middle one of `(outer, -1, inner)`,
    which were joined to it. A value that was split over heads goes `home` to its tokens."""

    dim: int
    outer: int = 1
    inner: int = 1
    home: "Blocks | None" = dataclasses.field(default=None, compare=False)

    @property
    def is_plain(self) -> bool:
        return self.outer == self.inner == 1

    def length(self, shape: Shape) -> int:
        """Returns the length of the dimension that is in blocks."""
        return shape[self.dim] // (self.outer * self.inner)

    def moved(self, dims: Mapping[int, int]) -> "Blocks | None":
        """Returns where the blocks are if each dimension becomes another one."""
        if self.dim not in dims:
            return None
        home = self.home.moved(dims) if self.home else None
        return dataclasses.replace(self, dim=dims[self.dim], home=home)

    def reshaped(self, old: Shape, new: Shape, size: int) -> "Blocks | None":
        """Returns where the blocks of `size` devices are after a reshape; None if they are torn."""
        tokens, done = self.length(old), 1
        before = math.prod(old[: self.dim]) * self.outer
        after = math.prod(old[self.dim + 1 :]) * self.inner
        for dim, length in enumerate(new):
            left = math.prod(new[dim + 1 :])
            if min(done, length, left) > 0 and before % done == 0 == after % left:
                outer, inner = before // done, after // left
                if length > 1 and outer * tokens * inner == length:
                    return Blocks(dim, outer, 1 if tokens % size == 0 else inner)
            # All devices have as much of what is next to each other, before and after.
            outer, rest = divmod(before, done)
            if rest == 0 == tokens % size and length % outer == 0 == length // outer % size:
                return Blocks(dim, outer)
            done *= length
        return None

    def back(self, dims: Mapping[int, int]) -> "Blocks | None":
        return self.moved({new: old for old, new in dims.items()})


@dataclasses.dataclass(frozen=True)
class Axis:
    """The mesh axis over which blocks are, in code of one device."""

    name: str
    size: int

    @property
    def index(self) -> Array:
        return lax.axis_index(self.name)

    def block(self, length: int) -> int:
        return -(-length // self.size)

    def local(self, shape: Shape, at: Blocks | None) -> Shape:
        """Returns the shape of what one device has of a value."""
        if at is None:
            return shape
        block = self.block(at.length(shape))
        return with_(shape, at.dim, at.outer * block * at.inner)

    def cut(self, value: Array, at: Blocks) -> Array:
        """Returns this device's block of a whole value."""

        def cut(value: Array, dim: int) -> Array:
            block = self.block(value.shape[dim])
            value = lengthened(value, dim, block * self.size)
            return lax.dynamic_slice_in_dim(value, self.index * block, block, dim)

        return _opened(value, at, cut)

    def gathered(self, value: Array, at: Blocks, shape: Shape) -> Array:
        """Returns the whole value of these blocks."""

        def gather(value: Array, dim: int) -> Array:
            value = lax.all_gather(value, self.name, axis=dim, tiled=True)
            return lax.slice_in_dim(value, 0, at.length(shape), axis=dim)

        return _opened(value, at, gather)

    def exchanged(self, value: Array, at: Blocks, to: Blocks, shape: Shape) -> Array:
        """Returns the blocks along another dimension."""
        value = lengthened(value, to.dim, self.block(shape[to.dim]) * self.size)
        value = lax.all_to_all(value, self.name, to.dim, at.dim, tiled=True)
        return lax.slice_in_dim(value, 0, shape[at.dim], axis=at.dim)

    def counting(self, value: Array, at: Blocks, shape: Shape, fill: ArrayLike) -> Array:
        """Returns the blocks with `fill` in place of elements that do not count."""
        length = at.length(shape)
        if length % self.size == 0:
            return value

        def masked(value: Array, dim: int) -> Array:
            places = lax.broadcasted_iota(jnp.int32, value.shape, dim)
            counts = self.index * self.block(length) + places < length
            return jnp.where(counts, value, jnp.asarray(fill, value.dtype))

        return _opened(value, at, masked)

    def reach(self, length: int, starts: Sequence[int], width: int) -> tuple[int, int]:
        """Returns how many elements a device needs of its neighbours on both sides, at most, to
        have so many from its start on."""
        block = self.block(length)
        left = (s * block - max(start, 0) for s, start in enumerate(starts))
        right = (min(start + width, length) - (s + 1) * block for s, start in enumerate(starts))
        return max(*left, 0), max(*right, 0)

    def window(
        self,
        value: Array,
        dim: int,
        length: int,
        starts: Sequence[int],
        width: int,
        fill: ArrayLike,
    ) -> Array:
        """Returns so many elements, from each device's start on, of blocks along a dimension of so
        much length. Outside of it, they are `fill`."""
        block, (left, right) = self.block(length), self.reach(length, starts, width)
        parts: list[Array] = []
        for hop in range(left // -block, 1 - right // -block):
            first, end = max(0, -left - hop * block), min(block, right + (1 - hop) * block)
            part = lax.slice_in_dim(value, first, end, axis=dim)
            pairs = [(s + hop, s) for s in range(self.size) if 0 <= s + hop < self.size]
            parts.append(lax.ppermute(part, self.name, pairs) if hop else part)
        value = lax.concatenate(parts, dim)
        offsets = [start - s * block + left for s, start in enumerate(starts)]
        low, high = max(-min(offsets), 0), max(max(offsets) + width - value.shape[dim], 0)
        fill = jnp.asarray(fill, value.dtype)  # `dynamic_slice` would move its start
        value = lax.pad(value, fill, with_(((0, 0, 0),) * value.ndim, dim, (low, high, 0)))
        value = lax.dynamic_slice_in_dim(value, self.own(offsets) + low, width, dim)
        if min(starts) >= 0 and max(starts) + width <= length:
            return value
        places = lax.broadcasted_iota(jnp.int32, value.shape, dim) + self.own(starts)
        return jnp.where((places >= 0) & (places < length), value, fill)

    def harmless(self, value: Array, at: Blocks, shape: Shape) -> Array:
        """Returns the blocks with numbers that have derivatives in place of what does not count."""
        if not jnp.issubdtype(value.dtype, jnp.floating):
            return value
        numbers = jnp.linspace(0.25, 0.75, value.size, dtype=value.dtype).reshape(value.shape)
        return self.counting(value, at, shape, numbers)

    def own(self, numbers: Sequence[int]) -> Array:
        """Returns this device's number."""
        return jnp.asarray(numbers, jnp.int32)[self.index]

    def summed(self, value: Array) -> Array:
        """Returns the sum over the devices, added up in float32 at least; of booleans, any."""
        if value.dtype == bool:
            return lax.pmax(value.astype(jnp.int32), self.name).astype(bool)
        if not jnp.issubdtype(value.dtype, jnp.inexact):
            return lax.psum(value, self.name)
        return lax.psum(value.astype(wide(value.dtype)), self.name).astype(value.dtype)

    def shared(self, value: Array, axes: tuple[int, ...], best: Array) -> Array:
        """Returns the best of values, with a derivative which all that are equal share, as on one
        device."""
        hits = value == jnp.expand_dims(best, axes)
        count = self.summed(jnp.sum(hits, axes).astype(best.dtype))
        best_ones = jnp.where(hits & jnp.isfinite(value), value, 0)
        change = jnp.sum(best_ones - lax.stop_gradient(best_ones), axes)
        return best + self.summed(change) / count


def with_(values: Sequence[T], place: int, value: T) -> tuple[T, ...]:
    return (*values[:place], value, *values[place + 1 :])


def lengthened(value: Array, dim: int, length: int) -> Array:
    """Returns a value with its last element along `dim` repeated: that is as good a number as any
    other, where zeros may lead to NaNs in a derivative."""
    more = length - value.shape[dim]
    if not more:
        return value
    last = lax.slice_in_dim(value, value.shape[dim] - 1, value.shape[dim], axis=dim)
    return lax.concatenate([value, *[last] * more], dim)


def _opened(value: Array, at: Blocks, change: Callable[[Array, int], Array]) -> Array:
    """Returns what `change(value, dim)` makes of a value whose blocks have a dimension for
    themselves."""
    if at.is_plain:
        return change(value, at.dim)
    before, after = value.shape[: at.dim], value.shape[at.dim + 1 :]
    value = value.reshape(*before, at.outer, at.length(value.shape), at.inner, *after)
    return change(value, at.dim + 1).reshape(*before, -1, *after)
