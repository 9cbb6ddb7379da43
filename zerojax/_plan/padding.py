"""Pads arrays that the devices do not divide, and drops the padding again.

[Note: padding]
At the border of a jitted function JAX refuses shardings that do not divide, so arrays rest there
with zeros at the end of the sharded dimension. Inside, a constraint may name such a sharding: XLA
then gives each device but the last ones ceil(n / N) elements, which is just what it has of the
padded array, and neither dropping the padding nor adding it moves anything. A step's loss and its
optimizer see the shapes that they would see on one device: Muon's scale and Adafactor's means
depend on them.
"""

import functools
from collections.abc import Mapping
from typing import TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from zerojax._plan import move as _move
from zerojax._plan.layout import Layout
from zerojax._state import carried as _carried
from zerojax._types import PyTree

T = TypeVar("T", Array, np.ndarray)
Shape = tuple[int, ...]


@overload
def padded(value: np.ndarray, shape: Shape) -> np.ndarray: ...
@overload
def padded(value: Array, shape: Shape) -> Array: ...
def padded(value, shape):
    """Returns `value` with zeros at its end, where it is not padded yet."""
    if np.shape(value) == shape:
        return value
    widths = [(0, want - have) for have, want in zip(value.shape, shape, strict=True)]
    return jnp.pad(value, widths) if isinstance(value, jax.Array) else np.pad(value, widths)


def unpadded(value: T, shape: Shape) -> T:
    """Returns the part of `value` that is not padding."""
    return value if value.shape == shape else value[tuple(map(slice, shape))]


@functools.partial(jax.jit, static_argnums=1)
def logical_leaves(values: Mapping[int, Array], plan: Layout) -> dict[int, Array]:
    """Drops the padding of the leaves at some positions in a state of `plan`."""
    constrain = jax.lax.with_sharding_constraint
    found: dict[int, Array] = {}
    for i, value in values.items():
        sharding = plan.shardings[i]
        found[i] = constrain(unpadded(constrain(value, sharding), plan.leaves[i].shape), sharding)
    return found


def on_host(state: PyTree, plan: Layout | None = None) -> PyTree:
    """Returns a state whose padded leaves are on the host, without their padding.

    The plan is the one that the state carries, where it has one.
    """
    plan = _carried.carried_plan(state) or plan
    if plan is None or not plan.pads:
        return state
    leaves, treedef = jax.tree.flatten(_carried.without_plan(state))
    pairs = zip(leaves, plan.leaves, strict=True)
    return treedef.unflatten(
        v if np.shape(v) == leaf.shape else unpadded(_move.to_host(v), leaf.shape)
        for v, leaf in pairs
    )
