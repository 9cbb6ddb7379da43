"""Stochastic rounding: which neighbour, how often, and that each element is on its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.update.test_rules import labelled
from zerojax._wire.rounding import rounded, salt

SALT = salt(jnp.int32(3), 1)


def bits_of(x):
    return np.asarray(lax.bitcast_convert_type(x, jnp.uint16))


def neighbours(x):
    """The two numbers of bfloat16 between which a number lies, and its share of the way."""
    low = np.asarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    up = (low + np.uint32(0x10000)).view(np.float32).astype(np.float64)
    low = low.view(np.float32).astype(np.float64)
    return low, up, (np.asarray(x, np.float64) - low) / (up - low)


def numbers(count=2**18, seed=0):
    """Of both signs, over many orders of magnitude."""
    random = np.random.default_rng(seed)
    size = random.uniform(1, 2, count) * 2.0 ** random.integers(-60, 60, count)
    return (size * random.choice([-1, 1], count)).astype(np.float32)


@pytest.mark.parametrize("place", [0, 1, 7])
def test_it_goes_up_as_often_as_the_number_is_far_up(place):
    """Over numbers: in each of 64 bins of how far up they lie, and in all."""
    x = numbers()
    low, up, far = neighbours(x)
    got = np.asarray(rounded(x, salt(jnp.int32(5), place)), np.float64)
    went_up = got == up
    assert np.all(went_up | (got == low))
    bins = (far * 64).astype(int)
    for i in range(64):
        mine = bins == i
        sigma = np.sqrt(np.mean(far[mine] * (1 - far[mine])) / mine.sum())
        assert abs(went_up[mine].mean() - far[mine].mean()) < 4.5 * sigma, i
    assert abs(np.mean(went_up - far)) < 4.5 * np.sqrt(np.mean(far * (1 - far)) / len(x))


@pytest.mark.parametrize("value", [1 + 2**-9, -(1 + 2**-20), 1e-12, 3.14159, -2.7e20])
def test_the_mean_over_steps_is_the_number(value):
    value = np.float32(value)
    steps = jnp.arange(2**16)
    got = jax.vmap(lambda count: rounded(value, salt(count, 2)))(steps)
    low, up, far = neighbours(value)
    mean = np.asarray(got, np.float64).mean()
    assert abs((mean - low) / (up - low) - far) < 4.5 * np.sqrt(far * (1 - far) / len(steps))


def test_leaves_and_steps_round_apart():
    """Up or down, of the same numbers: as coins of their own."""
    x = jnp.asarray(numbers())
    salts = [salt(jnp.int32(count), place) for count, place in ((0, 0), (0, 1), (1, 0), (1, 1))]
    far = neighbours(x)[2]
    ups = [np.asarray(rounded(x, s), np.float64) == neighbours(x)[1] for s in salts]
    spread = np.sqrt(far * (1 - far))
    noise = [(up - far) / np.maximum(spread, 1e-9) for up in ups]
    for i in range(4):
        for j in range(i):
            assert abs(np.mean(noise[i] * noise[j])) < 5 / np.sqrt(len(x))


def test_what_bfloat16_holds_stays():
    """All of it: zeros, numbers below the normal ones, infinities; and NaN remains NaN."""
    patterns = jnp.arange(2**16, dtype=jnp.uint16)
    wide = lax.bitcast_convert_type(patterns.astype(jnp.uint32) << 16, jnp.float32)
    is_nan = (np.asarray(patterns) & 0x7FFF) > 0x7F80
    for count in range(4):
        got = rounded(wide, salt(jnp.int32(count), 0))
        np.testing.assert_array_equal(bits_of(got)[~is_nan], np.asarray(patterns)[~is_nan])
        assert np.isnan(np.asarray(got, np.float32)[is_nan]).all()


def test_what_is_not_finite_and_what_nearly_is_not():
    largest = np.finfo(np.float32).max
    telling = np.array([0x7F800001, 0xFF800001], np.uint32).view(np.float32)  # NaNs by one low bit
    for count in range(64):
        salted = salt(jnp.int32(count), 0)
        assert np.isnan(np.asarray(rounded(jnp.asarray(telling), salted), np.float32)).all()
        got = np.asarray(rounded(jnp.array([largest, -largest, jnp.inf, -jnp.inf]), salted))
        top = float(jnp.finfo(jnp.bfloat16).max)
        np.testing.assert_array_equal(got.astype(np.float64), [top, -top, np.inf, -np.inf])


def test_a_running_mean_moves_where_the_nearest_stands_still():
    start, end, steps = 1.0, 2.0, 2000
    wanted = end + (start - end) * 0.999**steps

    def run(narrow):
        def step(mean, count):
            return narrow(0.999 * mean.astype(jnp.float32) + 0.001 * targets, count), None

        means = jnp.full(256, start, jnp.bfloat16)
        return np.asarray(lax.scan(step, means, jnp.arange(steps))[0], np.float64)

    targets = end + jnp.linspace(-1e-3, 1e-3, 256)  # no two the same
    assert np.all(run(lambda x, _: x.astype(jnp.bfloat16)) == start)
    got = run(lambda x, count: rounded(x, salt(count, 0)))
    assert abs(got.mean() - wanted) < 0.01 and got.std() < 0.1


def test_each_element_is_on_its_own():
    x = jnp.asarray(numbers(2**12)).reshape(8, 16, 32)
    whole = bits_of(rounded(x, SALT))
    np.testing.assert_array_equal(bits_of(rounded(x[3:5, ::2], SALT)), whole[3:5, ::2])
    layers = [bits_of(rounded(x[i : i + 1], SALT)) for i in range(8)]
    np.testing.assert_array_equal(np.concatenate(layers), whole)
    _, label = labelled(lambda x: rounded(x, SALT))
    assert label == 0


def test_64_bits_are_rounded_too():
    with jax.enable_x64(True):
        x = numbers(2**10).astype(np.float64)
        got = np.asarray(rounded(jnp.asarray(x), SALT), np.float64)
        low, up, _ = neighbours(x.astype(np.float32))
        assert np.all((got == low) | (got == up))
