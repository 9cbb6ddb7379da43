"""Orders backward's all-gathers after forward."""

import functools
import math
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from zerojax import _compat
from zerojax._types import is_key

# [Note: why backward waits]
# Backward gathers the same shards as forward. Left to itself, XLA takes the two for one
# computation, merges them, and keeps full weights in between. On GPUs an optimization barrier
# over the shards and the cotangents keeps them apart.
#
# XLA:CPU needs more. A barrier is no data dependence, and XLA:CPU may run a collective that needs
# nothing of a loop during that loop: collectives are held to the order in which they
# start, and a loop counts as started as soon as one iteration waits for another thread. All
# collectives have the same channel, so devices pair the wrong ones: a crash, NaN, or wrong
# numbers (JAX 0.12, several emulated devices; 0.10 expands barriers before it schedules).
# `tests/engine/test_fence.py` has the fault in plain JAX. There the shards are made to depend on
# what forward returned, in a way that XLA cannot see through.

T = TypeVar("T")
_MOST_BITS = 64  # of one number


def mark(outs: list[Array]) -> Array | None:
    """Returns a boolean that is there once all `outs` are. It is false, which XLA cannot know.

    None where no output has bits to count.
    """
    # Scalars, one after another: XLA:CPU compiles a loop of its own for each small array.
    counts = [lax.population_count(_bits(x)) for x in outs if _is_countable(x)]
    marks = [count > _MOST_BITS for count in counts]
    return functools.reduce(jnp.logical_or, marks) if marks else None


def wait(values: T, done: Array) -> T:
    """Returns `values` that depend on a mark."""

    def waiting(x: Array) -> Array:
        if is_key(x):
            return x
        here = _compat.fetched(x)
        here = lax.select(done, jnp.zeros_like(here), here)
        return _compat.stored(here) if _compat.is_on_host(x) else here

    return jax.tree.map(waiting, values)


@jax.custom_vjp
def in_turn(outs: list[Array], shards: list[Array]) -> tuple[list[Array], list[Array]]:
    """Returns floats as they are: what an op returned, and shards that a later one reads. Backward
    begins with the earlier op when it has the gradients of these shards."""
    return outs, shards


def _in_turn_fwd(outs: list[Array], shards: list[Array]) -> tuple[tuple, None]:
    return (outs, shards), None


def _in_turn_bwd(_: None, grads: tuple[list[Array], list[Array]]) -> tuple:
    d_outs, d_shards = grads
    done = mark(d_shards)
    return d_outs if done is None else wait(d_outs, done), d_shards


in_turn.defvjp(_in_turn_fwd, _in_turn_bwd)


def _bits(array: Array) -> Array:
    first = lax.slice(array, (0,) * array.ndim, (1,) * array.ndim).reshape(())
    if jnp.issubdtype(array.dtype, jnp.integer):
        return first
    width = array.dtype.itemsize * 8
    return lax.bitcast_convert_type(first, jnp.dtype(f"uint{width}"))


def _is_countable(array: Array) -> bool:
    has_bits = any(jnp.issubdtype(array.dtype, kind) for kind in (jnp.floating, jnp.integer))
    return has_bits and math.prod(array.shape) > 0
