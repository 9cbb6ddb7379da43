"""The parameters of a tree as files have them, which may be weights where codes rest."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np

from zerojax._state.packed import Coding, codings_of
from zerojax._state.state import Leaf, named_leaves, path_name
from zerojax._types import PyTree, Shape

Read = Callable[[tuple[slice, ...]], np.ndarray]


class Param(NamedTuple):
    """A leaf of parameters, and its shape in files. It is a weight there if it has a `coding`."""

    leaf: Leaf
    shape: Shape
    coding: Coding | None = None

    @property
    def value(self) -> PyTree:
        return self.leaf.value

    @property
    def dtype(self) -> np.dtype:
        """The dtype as stored: a numpy array's own, even one that JAX would narrow."""
        if self.coding is not None:
            return self.coding.dtype
        return self.value.dtype if hasattr(self.value, "dtype") else np.asarray(self.value).dtype

    @property
    def in_files(self) -> Leaf:
        if self.coding is None:
            return self.leaf
        sharding = getattr(self.value, "sharding", None)
        struct = jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=sharding)
        return Leaf(self.leaf.path[:-1], struct)

    def reading(self, read: Read) -> Read:
        """Returns a function that reads the leaf, from one that reads what files have.

        Each device encodes the rows that it keeps; the host has one layer of a stack at a time.
        """
        if self.coding is None:
            return read
        coding = self.coding

        def rows(index: tuple[slice, ...]) -> np.ndarray:
            *before, last = index
            weight = read((*before, slice(None)))
            if not weight.size:  # a shard of padding only
                return np.zeros((*weight.shape[:-1], coding.row), np.uint8)[..., last]
            return np.asarray(coding.bytes_of(weight))[..., last]

        def by_layer(index: tuple[slice, ...]) -> np.ndarray:
            layers = range(*index[0].indices(self.shape[0]))
            return np.concatenate([rows((slice(n, n + 1), *index[1:])) for n in layers])

        return by_layer if len(self.shape) > 2 and self.shape[0] else rows


def params_of(
    tree: PyTree, shapes: Mapping[str, Shape], is_weight: Callable[[str, str], bool]
) -> dict[str, Param]:
    """Returns the parameters by their names in files, of which `shapes` are those without padding.

    `is_weight(codes, weight)` says of what rests as codes whether files have the weight.
    """
    params = {}
    for leaf, coding in zip(named_leaves(tree), codings_of(tree), strict=True):
        name, shape = leaf.name, shapes.get(leaf.name, np.shape(leaf.value))
        if coding is not None and is_weight(name, weight := path_name(leaf.path[:-1])):
            params[weight] = Param(leaf, (*shape[:-1], coding.length), coding)
        else:
            params[name] = Param(leaf, shape)
    return params
