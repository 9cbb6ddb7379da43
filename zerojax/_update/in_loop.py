"""Layers of stacks, and parameters that are updated in the loop over layers that has their
gradients.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import Array, lax

from zerojax import _compat
from zerojax._collectives import Held
from zerojax._types import PyTree

T = TypeVar("T")
Index = int | Array  # of a layer
Turn = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]  # of `lax.scan`
Stacks = list[tuple[Array, ...]]  # of each parameter: it, and what is updated with it


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


class InLoop:
    """Those among the stacks that a loop scans, by their positions.

    The loop carries their stacks, reads the parameters from there, and writes each layer back.
    """

    def __init__(self, xs: Sequence[Any]) -> None:
        held = {k: x for k, x in enumerate(xs) if isinstance(x, Held)}
        self.updating = {k: x.updating for k, x in held.items() if x.updating is not None}

    @property
    def stacks(self) -> Stacks:
        return [updating.stacks for updating in self.updating.values()]

    def as_updated(self, xs: Sequence[Any], stacks: Stacks) -> list[Any]:
        """Returns what the loop scans, its parameters as they are by now."""
        found = list(xs)
        for k, (param, *_) in zip(self.updating, stacks, strict=True):
            found[k] = Held(found[k].shard, rest=param)
        return found

    def fetched(self, stacks: Stacks, at: Layer) -> list[list[Array]]:
        """Returns one layer of all stacks, on the devices."""
        return [[_compat.fetched(sliced(stack, at.of(stack))) for stack in one] for one in stacks]

    def read_first(self, read: T, stacks: Stacks) -> tuple[T, Stacks]:
        """Has what is read of parameters in host memory be read before they are written.

        XLA would copy their stacks there in each iteration.
        """
        if not any(_compat.is_on_host(param) for param, *_ in stacks):
            return read, stacks
        return lax.optimization_barrier((read, stacks))

    def tied(self, layers: list[list[Array]], left: T) -> tuple[list[list[Array]], T]:
        """Has what comes from host memory arrive with a weight's gradient, which nobody waits for.

        XLA would have all compute of an iteration wait for it. The last gradient here is the first
        that backward has, so that updating and writing back hide behind the others. (Where copies
        take longer than compute, half of them would better come with later ones, so that they meet
        those on the way back: 7.5B on 8 H100s, JAX 0.12, all with the first: 553 ms at 50 GB/s, 778
        at 25, 1369 at 12.5; each with the gradient of its own weight: 591, 719, 1053.)
        """
        if not any(_compat.is_on_host(stack) for one in self.stacks for stack in one):
            return layers, left
        grads, treedef = jax.tree.flatten(left)
        layers, grads[-1] = lax.optimization_barrier((layers, grads[-1]))
        return layers, treedef.unflatten(grads)

    def updated(
        self, stacks: Stacks, layers: list[list[Array]], grads: Sequence[Any], at: Layer
    ) -> Stacks:
        """Updates a layer, which was fetched, and writes it into the stacks."""
        found = []
        for (k, updating), one, old in zip(self.updating.items(), stacks, layers, strict=True):
            new = updating.apply(grads[k].shard, old, updating.given)
            found.append(tuple(_put(*pair, at) for pair in zip(one, new, strict=True)))
        return found

    def left(self, grads: Sequence[Any]) -> list[Any]:
        """Returns the gradients that are still to be stacked, None where one was used."""
        return [None if k in self.updating else grad for k, grad in enumerate(grads)]

    def gradients(self, grads: Sequence[Any], stacks: Stacks) -> list[Any]:
        """Returns the gradients of what the loop scans: the new stacks, for those it updated."""
        found, none = list(grads), cast(Array, None)
        for (k, updating), new in zip(self.updating.items(), stacks, strict=True):
            # JAX knows no gradient of what is only given.
            given = (none,) * len(updating.given)
            found[k] = Held(none, updating=dataclasses.replace(updating, stacks=new, given=given))
        return found


def _put(stack: Array, layer: Array, at: Layer) -> Array:
    layer = layer.astype(stack.dtype)
    stored = _compat.stored(layer) if _compat.is_on_host(stack) else layer
    return written(stack, stored, at.of(stack))
