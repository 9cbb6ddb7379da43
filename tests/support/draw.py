"""Arrays that numpy draws: `jax.random` is compiled for each shape."""

import jax
import jax.numpy as jnp
import numpy as np


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), "float32")
