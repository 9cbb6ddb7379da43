"""Weights that several microbatches read, whose gradients are summed in a wider dtype."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from zerojax._plan.precision import wide


class Shared(NamedTuple):
    """A weight that all microbatches read; `total` stands for the sum of its gradients.

    The gradients of narrow floats are summed in a wider one, as microbatches that run one after
    another are. Nothing computes with the value of `total`; its gradient is the sum.
    """

    value: Array
    total: Array


def shared(value: Array) -> Any:
    """Returns a weight as the microbatches read it."""
    is_narrow = jnp.issubdtype(value.dtype, jnp.floating) and wide(value.dtype) != value.dtype
    return Shared(value, _total(value, wide(value.dtype))) if is_narrow else value


def plain(value: Any) -> Any:
    return _picked(*value) if isinstance(value, Shared) else value


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _total(value: Array, dtype: DTypeLike) -> Array:
    """Returns what the gradient of `value` comes out through, in this dtype."""
    return jnp.zeros(value.shape, dtype)


def _total_fwd(value: Array, dtype: DTypeLike) -> tuple[Array, Array]:
    return jnp.zeros(value.shape, dtype), jnp.zeros((0,), value.dtype)


def _total_bwd(dtype: DTypeLike, like: Array, grad: Array) -> tuple[Array]:
    return (grad.astype(like.dtype),)


_total.defvjp(_total_fwd, _total_bwd)


@jax.custom_vjp
def _picked(value: Array, total: Array) -> Array:
    """Returns `value`, whose gradient goes to `total`."""
    return value


def _picked_fwd(value: Array, total: Array) -> tuple[Array, Array]:
    return value, jnp.zeros((0,), total.dtype)


def _picked_bwd(like: Array, grad: Array) -> tuple[None, Array]:
    return None, grad.astype(like.dtype)


_picked.defvjp(_picked_fwd, _picked_bwd)
