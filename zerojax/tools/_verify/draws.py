"""Random numbers in a loss: with keys from which all are alike, it can be compared at all."""

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn
from jax.extend.random import define_prng_impl

from zerojax import _compat
from zerojax._kernel.jaxprs import type_of
from zerojax._types import Shape, is_key

DRAWS = {"random_bits", "random_gamma", "rng_bit_generator", "threefry2x32"}
TAG = "zerojax_alike"  # in the dtypes of these keys: key<zerojax_alike>


def _bits(key: jax.Array, width: int, shape: Shape) -> jax.Array:
    """Returns bits that make `jax.random.uniform` 0.25: dropout of up to 3 in 4 keeps all."""
    dtype = jnp.dtype(f"uint{width}")
    return jnp.full(shape, dtype.type(1 << (width - 2)))


ALIKE = define_prng_impl(
    key_shape=(2,),
    seed=lambda seed: jnp.full(2, seed, jnp.uint32),
    split=lambda key, shape: jnp.broadcast_to(key, (*shape, 2)),
    random_bits=_bits,
    fold_in=lambda key, _: key,
    name=TAG,
    tag=TAG,
)


def alike(key: jax.Array) -> jax.Array:
    """Returns a key for a key, typed or old-style, from which every draw is the same number."""
    words = jnp.zeros((*(key.shape if is_key(key) else key.shape[:-1]), 2), jnp.uint32)
    return jax.random.wrap_key_data(jax.device_put(words, key.sharding), impl=ALIKE)


def rejects(jaxpr: Jaxpr) -> bool:
    """Whether a loss draws until something holds, which never ends where all draws are alike."""
    loops = (eqn for eqn in _compat.every_eqn(jaxpr) if eqn.primitive.name == "while")
    inside = (inner for eqn in loops for part in _compat.inner_jaxprs(eqn) for inner in part.eqns)
    names = {eqn.primitive.name for eqn in _compat.every_eqn(jaxpr)}
    return "random_gamma" in names or any(map(_draws, inside))


def _draws(eqn: JaxprEqn) -> bool:
    inner = (e for part in _compat.inner_jaxprs(eqn) for e in _compat.every_eqn(part))
    return any(e.primitive.name in DRAWS for e in (eqn, *inner))


def has_keys_of_its_own(jaxpr: Jaxpr) -> bool:
    """Whether a loss traced with keys that are `alike` draws from others too."""
    draws = (eqn for eqn in _compat.every_eqn(jaxpr) if eqn.primitive.name in DRAWS)
    return any(TAG not in str(type_of(eqn.invars[0]).dtype) for eqn in draws)
