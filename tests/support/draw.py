"""Arrays that numpy draws, as `jax.random` compiles for each shape: tests of losses use them."""

import jax
import jax.numpy as jnp
import numpy as np


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), "float32")
