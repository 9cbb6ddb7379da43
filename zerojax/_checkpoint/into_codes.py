"""Reads weights of files straight into codes: each device encodes the rows that it keeps."""

from collections.abc import Callable

import jax
import numpy as np

from zerojax._state.packed import Coding
from zerojax._state.state import Leaf
from zerojax._types import Shape

ReadRows = Callable[[tuple[slice, ...]], np.ndarray]


def as_weight(leaf: Leaf, coding: Coding, shape: Shape) -> Leaf:
    """Returns a leaf of codes as the weight that files have in its place."""
    sharding = getattr(leaf.value, "sharding", None)
    shape = (*shape[:-1], coding.length)
    return Leaf(leaf.path[:-1], jax.ShapeDtypeStruct(shape, coding.dtype, sharding=sharding))


def encoding(read: ReadRows, coding: Coding, shape: Shape) -> ReadRows:
    """Returns a function that reads rows of bytes, from one that reads a weight of this shape.

    The host has one layer of a stack at a time.
    """

    def rows(index: tuple[slice, ...]) -> np.ndarray:
        *before, last = index
        weight = read((*before, slice(None)))
        if not weight.size:  # a shard of padding only
            return np.zeros((*weight.shape[:-1], coding.row), np.uint8)[..., last]
        return np.asarray(coding.bytes_of(weight))[..., last]

    def by_layer(index: tuple[slice, ...]) -> np.ndarray:
        layers = range(*index[0].indices(shape[0]))
        return np.concatenate([rows((slice(n, n + 1), *index[1:])) for n in layers])

    return by_layer if len(shape) > 2 and shape[0] else rows
