"""Steps that survive infinities: `skip_nonfinite=` skips an update, and a state's `dynamic_scale`
scales the loss so that gradients fit float16.

A run goes on after a bad batch, and trains in float16 at all. It costs 37 lines of code, and a step
that skips cannot update parameters inside backward.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax.training.dynamic_scale import DynamicScale

from zerojax._state import state as _state
from zerojax._types import PyTree, wide


def scale_of(state: PyTree) -> DynamicScale | None:
    """Returns the scale in the state's field `dynamic_scale`, as Flax's examples call it."""
    scale = _state.field(state, "dynamic_scale")
    return scale if isinstance(scale, DynamicScale) else None


def scaled(loss_fn: Callable[..., PyTree], scale: DynamicScale) -> Callable[..., PyTree]:
    """Returns the loss times the scale, in float32 at least, so that its gradients fit float16."""

    # The scale is an argument of a Partial and not closed over: it is a tracer of the step, and
    # the loss is traced once more for one device.
    def loss(loss_fn: Callable[..., PyTree], scale: jax.Array, *args: PyTree) -> PyTree:
        out = loss_fn(*args)
        return (out[0] * scale, *out[1:]) if isinstance(out, tuple) else out * scale

    return jax.tree_util.Partial(loss, loss_fn, scale.scale)


def unscaled(values: PyTree, scale: DynamicScale) -> PyTree:
    """Divides `values` by the scale, in float32 at least: the results fit no narrower dtype."""

    def divide(value: jax.Array) -> jax.Array:
        is_exact = not jnp.issubdtype(value.dtype, jnp.inexact)
        return value if is_exact else value.astype(wide(value.dtype)) / scale.scale

    return jax.tree.map(divide, values)


def guarded(finite: jax.Array, new: PyTree, old: PyTree, mutable: Sequence[str]) -> PyTree:
    """Returns `new`; if not finite, with parameters, optimizer state and `mutable` fields of `old`.

    Counters such as `step` are always those of `new`, so that they count every batch. The state
    gets its next loss scale, and its field `skipped`, where it has one, counts the skipped steps.
    """

    def choose(path: tuple, new_leaf: jax.Array, old_leaf: jax.Array) -> jax.Array:
        field = _state.path_name(path[:1])
        keeps = field in mutable or _state.kind_of(path) != _state.OTHER
        return jnp.where(finite, new_leaf, old_leaf) if keeps else new_leaf

    state = jax.tree_util.tree_map_with_path(choose, new, old)
    scale, total = scale_of(old), _state.field(state, "skipped")
    if scale is not None:
        # By Flax's own rule, which looks whether a gradient is finite.
        ruled = scale.value_and_grad(lambda x: x * jnp.where(finite, 1.0, jnp.nan))
        state = _state.replace(state, dynamic_scale=ruled(jnp.float32(1)).dynamic_scale)
    if total is not None and not jnp.ndim(total) and jnp.issubdtype(total.dtype, jnp.integer):
        state = _state.replace(state, skipped=total + (1 - finite.astype(jnp.int32)))
    return state
