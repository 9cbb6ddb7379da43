"""Slices of stacks of layers, read and written in place where a loop carries them.

Indices are those of layers, and never negative: a GPU's engines copy a slice of host memory only
where its index is linear in the counter of the loop, which a negative index that wraps around is
not.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from zerojax._types import PyTree

Index = int | Array  # of a layer


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
