"""Stochastic rounding, by bits that depend on the numbers themselves.

[Note: rounding moments]
A running mean with a decay of 0.999 moves by a thousandth of its distance, and neighbours in
bfloat16 are up to 1/128 apart: rounded to the nearest, it would stand still. So a number between
two neighbours becomes the upper one with the probability of its distance from the lower one, and
its mean over many steps is right.

The random bits are a hash of the number and of a salt, which is a scalar. No bits are drawn for an
array's shape: those of an element would change with the sharding, and with whether layers are
updated one at a time, and no rule of `rules.py` could let them pass.
"""

import jax.numpy as jnp
from jax import Array, lax

SIGN, INFINITE, LARGEST_FLOAT = 0x80000000, 0x7F800000, 0x7F7FFFFF  # the bits of float32


def salt(count: Array, place: int) -> Array:
    """Returns another number for each step and for each leaf."""
    return _hash(_hash(count.astype(jnp.uint32)) + jnp.uint32(place))


def rounded(value: Array, salt: Array) -> Array:
    """Rounds to one of the two neighbours in bfloat16; what it holds exactly stays as it is.

    Finite numbers stay finite. Infinities and NaN stay what they are.
    """
    bits = lax.bitcast_convert_type(value.astype(jnp.float32), jnp.uint32)
    size = bits & ~jnp.uint32(SIGN)
    # The bits that bfloat16 drops are the distance from the lower neighbour. Noise of as many bits
    # carries into those it keeps with just that probability.
    up = jnp.minimum(size + (_hash(bits ^ salt) >> 16), LARGEST_FLOAT)
    # A NaN may be told from an infinity by the dropped bits alone.
    other = jnp.where(size > INFINITE, size | 0x400000, size)
    bits = (bits & jnp.uint32(SIGN)) | jnp.where(size < INFINITE, up, other)
    return lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)


def noise(value: Array) -> Array:
    """Returns a number from 0 up to 1 for each element, which depends on its bits alone."""
    bits = lax.bitcast_convert_type(value.astype(jnp.float32), jnp.uint32)
    return (_hash(bits) >> 8).astype(jnp.float32) * 2.0**-24


def _hash(bits: Array) -> Array:
    """Returns bits each of which depends on all of the bits given (lowbias32)."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0x846CA68B)
    return bits ^ (bits >> 16)
