"""The exact mean over the global batch without its padding, from code that sees one shard of it."""

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from zerojax import _compat
from zerojax._plan.precision import wide

# The names of the calls below, which accumulation looks for, and `inner.py`.
MEAN, COUNT, SUM = "zerojax_mean", "zerojax_count", "zerojax_sum"

# The axes of the loss that is being traced, which may see no mesh to read them from.
_axes: ContextVar[tuple[str, ...]] = ContextVar("axes", default=())


@contextlib.contextmanager
def over(axes: tuple[str, ...]) -> Iterator[None]:
    """Has means be over these axes, inside a `with`, where no mesh says over which."""
    token = _axes.set(axes)
    try:
        yield
    finally:
        _axes.reset(token)


def mean(values: ArrayLike, where: ArrayLike | None = None) -> jax.Array:
    """Returns the mean of `values` over the global batch; with a mask, over its true elements.

    Inside a zerojax step this is the number that one device would get from the global batch, even
    where shards have different numbers of true elements. With `accumulate=` it is exact too; there
    it must enter the loss and the aux linearly, and anything else is an error. A gradient of it
    that the loss takes itself is that of the device's own part, and an error until
    `jax.lax.pmean` has averaged it over the devices. Outside of a step
    it is `jnp.mean(values, where=where)`, and 0 where nothing is true. `zerojax.pad_batch` makes
    the mask for a batch that the devices do not divide.

    Example:
        >>> print(zerojax.mean(jnp.array([1.0, 2.0, 9.0]), where=jnp.array([True, True, False])))
        1.5
    """
    if values is None or isinstance(values, str | dict):
        raise TypeError(
            f"zerojax.mean takes an array, got a {type(values).__name__}. Pass one array, with a "
            "value for each example or token."
        )
    values = jnp.asarray(values)
    if not jnp.issubdtype(values.dtype, jnp.inexact):
        values = values.astype(wide(values.dtype))
    mask = jnp.ones((), bool) if where is None else jnp.asarray(where)
    if jnp.issubdtype(mask.dtype, jnp.inexact):
        raise TypeError(
            f"zerojax.mean(values, where=mask): the mask is of dtype {mask.dtype}, and where= "
            "takes no weights. Pass weights > 0, and weigh the values yourself."
        )
    axes = _compat.bound_axes() or _axes.get()

    def zerojax_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
        dtype = wide(values.dtype)
        total = jnp.sum(jnp.where(mask, values, 0), dtype=dtype)
        count = jnp.sum(mask, dtype=dtype)
        if axes:
            total, count = zerojax_sum(total, axes).reshape(()), zerojax_count(count, axes)
        # Under accumulation the count is a mean over microbatches, and may be below 1.
        any_true = count > 0
        mean = jnp.where(any_true, total / jnp.where(any_true, count, 1), 0)
        return mean.astype(values.dtype)

    return jax.jit(zerojax_mean)(values, jnp.broadcast_to(mask.astype(bool), values.shape))


@functools.partial(jax.jit, static_argnums=1)
def zerojax_sum(total: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns `total` over all devices, in one dimension more: by that, `inner.py` knows this call
    from its transpose, where a loss is differentiated that differentiates itself."""
    return lax.psum(total, axes)[None]


@functools.partial(jax.jit, static_argnums=1)
def zerojax_count(count: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns `count` over all devices, from a call whose name lets accumulation find it.

    Each microbatch must divide by the mean count of all microbatches, which the loss cannot know;
    `_step/accumulate.py` puts that in place of this call's result.
    """
    return lax.psum(count, axes)


def exact_share(ways: int) -> tuple[float, float]:
    """Splits `1 / ways` into a power of two and the factor that is left.

    A power of two is exact in narrow dtypes. It scales the loss, so that sums of gradients do not
    overflow. The other factor, which most dtypes round, scales the sums; it is 1 where `ways` is a
    power of two.
    """
    power = 1 << (ways - 1).bit_length()
    return 1 / power, power / ways
