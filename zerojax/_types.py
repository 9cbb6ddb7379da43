"""The types that signatures speak of, where JAX has no name for them; and which values are keys."""

from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

PyTree: TypeAlias = Any  # arrays, or what stands for them, in nested containers
TreeDef: TypeAlias = Any  # a `jax.tree_util.PyTreeDef`, which type checkers take for a variable
Number: TypeAlias = Any  # or None where it is unknown
Shape = tuple[int, ...]


class Device(Protocol):
    """A `jax.Device`: type checkers take that name for a variable."""

    @property
    def id(self) -> int: ...
    @property
    def platform(self) -> str: ...
    @property
    def device_kind(self) -> str: ...
    @property
    def process_index(self) -> int: ...


def kinds_of(tree: PyTree) -> set[type]:
    """Returns the classes of a tree's leaves: few, where a step asks at each call."""
    return set(map(type, jax.tree.leaves(tree)))


def is_key(value: object) -> bool:
    """Whether a value is a PRNG key, or an array of them; old-style keys are integers."""
    return jax.dtypes.issubdtype(getattr(value, "dtype", None), jax.dtypes.prng_key)


def zero_gradient(value: Array | jax.ShapeDtypeStruct) -> Array | np.ndarray:
    """Returns zeros in a dtype that optimizers can add; a key gets JAX's own zero."""
    if is_key(value):
        return np.zeros(value.shape, jax.dtypes.float0)
    return jnp.zeros(value.shape, value.dtype)


def is_float(value: Any) -> bool:
    """Whether a value has a gradient: floats, or complex numbers."""
    return jax.dtypes.issubdtype(value.dtype, jnp.inexact)


def wide(dtype: DTypeLike) -> DTypeLike:
    """Returns the dtype for sums and means of `dtype`: itself, but float32 at least.

    For integers it is JAX's default float.
    """
    if not jnp.issubdtype(dtype, jnp.inexact):
        return jnp.result_type(float)
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)
