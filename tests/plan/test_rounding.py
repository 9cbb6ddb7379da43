"""Moments are rounded at random: to which neighbour, how often, and each element on its own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import zerojax

# Its moments are the gradients, so that what rests in bfloat16 is a gradient, rounded.
LAST = optax.GradientTransformation(
    lambda params: [jnp.zeros_like(p) for p in params], lambda grads, *_: (grads, grads)
)


@functools.partial(jax.jit, static_argnames="place")
def rounded(values, count=0, place=0):
    """The moment of the leaf number `place`, after the step number `count`."""
    tx = zerojax.manual.narrow_moments(LAST)
    leaves = [jnp.asarray(values)] * (place + 1)
    state = tx.init(leaves)._replace(count=jnp.int32(count))
    return tx.update(leaves, state)[1].inner[place]


def bits_of(x):
    return np.asarray(lax.bitcast_convert_type(x, jnp.uint16))


def neighbours(x):
    """The two numbers of bfloat16 between which a number lies, and its share of the way."""
    low = np.asarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    up = (low + np.uint32(0x10000)).view(np.float32).astype(np.float64)
    low = low.view(np.float32).astype(np.float64)
    return low, up, (np.asarray(x, np.float64) - low) / (up - low)


def numbers(count=2**18):
    """Of both signs, over many orders of magnitude."""
    random = np.random.default_rng(0)
    size = random.uniform(1, 2, count) * 2.0 ** random.integers(-60, 60, count)
    return (size * random.choice([-1, 1], count)).astype(np.float32)


@pytest.mark.parametrize("value", [1 + 2**-9, -(1 + 2**-20), 1e-12, 3.14159, -2.7e20])
def test_the_mean_over_steps_is_the_number(value):
    value = np.full(1, value, np.float32)
    steps = jnp.arange(2**16)
    got = jax.vmap(lambda count: rounded(value, count, 2))(steps)
    low, up, far = neighbours(value)
    mean = np.asarray(got, np.float64).mean()
    assert abs((mean - low) / (up - low) - far) < 4.5 * np.sqrt(far * (1 - far) / len(steps))


def test_leaves_and_steps_round_apart():
    """Up or down, of the same numbers: as coins of their own."""
    x = numbers()
    low, up, far = neighbours(x)
    spread = np.maximum(np.sqrt(far * (1 - far)), 1e-9)
    places = [(0, 0), (0, 1), (1, 0), (1, 1)]
    found = [np.asarray(rounded(x, *one), np.float64) for one in places]
    assert all(np.all((each == low) | (each == up)) for each in found)
    noise = [((each == up) - far) / spread for each in found]
    for i in range(4):
        for j in range(i):
            assert abs(np.mean(noise[i] * noise[j])) < 5 / np.sqrt(len(x))


def test_what_bfloat16_holds_stays():
    """All of it: zeros, numbers below the normal ones, infinities; and NaN remains NaN."""
    patterns = jnp.arange(2**16, dtype=jnp.uint16)
    wide = lax.bitcast_convert_type(patterns.astype(jnp.uint32) << 16, jnp.float32)
    is_nan = (np.asarray(patterns) & 0x7FFF) > 0x7F80
    for count in range(2):
        got = rounded(wide, count)
        np.testing.assert_array_equal(bits_of(got)[~is_nan], np.asarray(patterns)[~is_nan])
        assert np.isnan(np.asarray(got, np.float32)[is_nan]).all()


def test_what_is_not_finite_and_what_nearly_is_not():
    """Two NaNs that one low bit tells from infinities, the largest numbers, and infinities."""
    bits = [0x7F800001, 0xFF800001, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000]
    values = np.array(bits, np.uint32).view(np.float32)
    got = jax.vmap(lambda count: rounded(values, count))(jnp.arange(64))
    top = float(jnp.finfo(jnp.bfloat16).max)
    wanted = [np.nan, np.nan, top, -top, np.inf, -np.inf]
    np.testing.assert_array_equal(np.asarray(got, np.float64), np.tile(wanted, (64, 1)))


def test_each_element_is_on_its_own():
    """So that no sharding changes a bit of it, and no update of layers one at a time."""
    x = numbers(2**12).reshape(8, 16, 32)
    whole = bits_of(rounded(x, 3, 1))
    np.testing.assert_array_equal(bits_of(rounded(x[3:5, ::2], 3, 1)), whole[3:5, ::2])
