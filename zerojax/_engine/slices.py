"""Layers of stacks, which a loop over layers reads and writes one at a time."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from zerojax import _compat
from zerojax._types import PyTree

Index = int | Array  # of a layer
Turn = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]  # of `lax.scan`


# Indices are those of layers, and never negative: a GPU's engines copy a slice of host memory only
# where its index is linear in the counter of the loop, which a negative index that wraps around is
# not. Where a loop carries a stack, it is written in place.


def sliced(stack: Array, i: Index) -> Array:
    """Returns layer `i` of a stack, as a stack of one."""
    start, sizes = (i, *[0] * (stack.ndim - 1)), (1, *stack.shape[1:])
    return lax.dynamic_slice(stack, start, sizes, allow_negative_indices=False)


def written(stack: Array, layer: Array, i: Index) -> Array:
    """Writes a stack of one, as layer `i`, into a stack."""
    start = (i, *[0] * (stack.ndim - 1))
    return lax.dynamic_update_slice(stack, layer, start, allow_negative_indices=False)


def layer_of(stacks: PyTree, i: Index) -> PyTree:
    """Returns layer `i` of all stacks in a tree."""
    return jax.tree.map(lambda stack: lax.squeeze(sliced(stack, i), (0,)), stacks)


def with_layer(stacks: PyTree, layer: PyTree, i: Index) -> PyTree:
    """Writes a layer into its stacks."""
    return jax.tree.map(lambda stack, one: written(stack, one[None], i), stacks, layer)


def empty_stacks(layer: PyTree, length: int) -> PyTree:
    """Returns stacks of zeros for so many layers."""
    return jax.tree.map(lambda x: jnp.zeros((length, *x.shape), x.dtype), layer)


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer of the stacks.

    [Note: two indices of a layer] A GPU's engines find a slice of host memory where its index is
    linear in a counter that the loop carries. With such an index into the device's own memory, XLA
    no longer runs the loop's collectives beside its compute (JAX 0.12: 615 ms for 546, 7.5B on 8
    H100s). There `i` comes from an `arange` that the loop scans.
    """

    i: Index
    counted: Index
    finds: Callable[[], bool] = lambda: True  # whether XLA finds a slice by the counter

    def of(self, stack: Array) -> Index:
        return self.counted if _compat.is_on_host(stack) and self.finds() else self.i


def fetched_layer(stacks: PyTree, at: Layer) -> PyTree:
    """Returns one layer of all stacks in a tree, on the devices."""
    return jax.tree.map(_compat.fetched, resting_layer_of(stacks, at))


def resting_layer_of(stacks: PyTree, at: Layer) -> PyTree:
    """Returns one layer of all stacks in a tree, in the memory where they are."""
    return jax.tree.map(lambda stack: lax.squeeze(sliced(stack, at.of(stack)), (0,)), stacks)


def by_scanned_index(step: Turn, xs: PyTree, length: int) -> tuple[Turn, PyTree]:
    """Returns a step for `lax.scan`, and what it scans, for layers in host memory that XLA would
    not find by the loop's counter: the index of each is scanned."""
    stacks, treedef = jax.tree.flatten(xs)
    there = {k: stack for k, stack in enumerate(stacks) if _compat.is_on_host(stack)}

    def found(carry: PyTree, scanned: tuple[Array, list]) -> tuple[PyTree, PyTree]:
        at, layers = scanned
        for k, stack in there.items():
            layers[k] = resting_layer_of(stack, Layer(at, at))
        return step(carry, treedef.unflatten(layers))

    here = [None if k in there else stack for k, stack in enumerate(stacks)]
    return found, (jnp.arange(length), here)


class Unchanged:
    """The stacks that a loop scans, none of which backward updates.

    An option may have backward update some of them: see `How.updates`. The loop carries the stacks
    of these, reads their layers from there, and writes each back; it asks in the order of the
    methods below.
    """

    def __init__(self, xs: Sequence[Any]) -> None:
        self.stacks: list[tuple[Array, ...]] = []

    def as_updated(self, xs: Sequence[Any], stacks: list) -> list[Any]:
        """Returns what the loop scans, its parameters as they are by now."""
        return list(xs)

    def read_first(self, read: Any, stacks: list) -> tuple[Any, list]:
        """Has what is read of the stacks be read before they are written."""
        return read, stacks

    def fetched(self, stacks: list, at: Layer) -> list:
        """Returns one layer of the stacks, on the devices."""
        return []

    def tied(self, layers: list, left: Any) -> tuple[list, Any]:
        """Has what `fetched` returned arrive with the gradients that are left to reduce."""
        return layers, left

    def updated(self, stacks: list, layers: list, grads: Sequence[Any], at: Layer) -> list:
        """Updates a layer, which was fetched, and writes it into the stacks."""
        return stacks

    def left(self, grads: Sequence[Any]) -> list[Any]:
        """Returns the gradients of a layer that are still to be stacked."""
        return list(grads)

    def gradients(self, grads: Sequence[Any], stacks: list) -> list[Any]:
        """Returns the gradients of what the loop scans."""
        return list(grads)
