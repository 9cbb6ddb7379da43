"""Steps that survive infinities: updates left out, and losses scaled for float16."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.training.dynamic_scale import DynamicScale
from jax.tree_util import DictKey, GetAttrKey

from zerojax._plan.precision import wide
from zerojax._state import state as _state


def scale_of(state: Any) -> DynamicScale | None:
    """The state's `dynamic_scale`, by the name that Flax's examples give it."""
    name = "dynamic_scale"
    found = state.get(name) if isinstance(state, dict) else getattr(state, name, None)
    return found if isinstance(found, DynamicScale) else None


def scaled(loss_fn: Callable[..., Any], scale: DynamicScale | None) -> Callable[..., Any]:
    """The loss times the scale, in float32 at least, so that its gradients fit float16."""
    if scale is None:
        return loss_fn

    def loss(loss_fn: Callable[..., Any], scale: jax.Array, *args: Any) -> Any:
        result = loss_fn(*args)
        if isinstance(result, tuple):
            return (result[0] * scale, *result[1:])
        return result * scale

    return jax.tree_util.Partial(loss, loss_fn, scale.scale)


def unscaled(values: Any, scale: DynamicScale | None) -> Any:
    """In float32 at least: what needed the scale does not fit a narrower dtype without it."""
    if scale is None:
        return values

    def divide(value: jax.Array) -> jax.Array:
        if not jnp.issubdtype(value.dtype, jnp.inexact):
            return value
        return value.astype(wide(value.dtype)) / scale.scale

    return jax.tree.map(divide, values)


def next_scale(scale: DynamicScale, finite: jax.Array) -> DynamicScale:
    """By Flax's own rule, which reads finiteness off a gradient: here, one that tells it."""
    told = scale.value_and_grad(lambda x: x * jnp.where(finite, 1.0, jnp.nan))
    return told(jnp.float32(1)).dynamic_scale


def counted(state: Any, skipped: jax.Array) -> Any:
    """Adds to the state's count of steps left out: a field `skipped`, where it has one."""
    name = "skipped"
    total = state.get(name) if isinstance(state, dict) else getattr(state, name, None)
    if total is None or jnp.ndim(total) or not jnp.issubdtype(total.dtype, jnp.integer):
        return state
    return _state.replace(state, skipped=total + skipped)


def held(finite: jax.Array, new: Any, old: Any, mutable: Sequence[str]) -> Any:
    """`new` where the step is finite, and else `old`: parameters, optimizer state, `mutable`.

    Counters such as `step` go on, so that they keep counting batches.
    """

    def choose(path: tuple, new_leaf: Any, old_leaf: Any) -> Any:
        match path[0]:
            case GetAttrKey(name) | DictKey(name) if name in mutable:
                keeps = True
            case _:
                keeps = _state.kind_of(path) != _state.OTHER
        return jnp.where(finite, new_leaf, old_leaf) if keeps else new_leaf

    return jax.tree_util.tree_map_with_path(choose, new, old)
