"""Codecs: what they send, how far off what comes out is, and what they refuse."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from zerojax._wire.codecs import LARGEST, Blocks, Exact, codec_for, way_of

ROWS, COLUMNS = 32, 1024
NORMAL = jax.random.normal(jax.random.key(0), (ROWS, COLUMNS))
CODECS = [*map(Blocks, LARGEST), Blocks("int8", stochastic=True), Blocks("int4", block=64)]


def there_and_back(codec, array):
    return codec.decode(codec.encode(array))


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_codes_are_small_and_near_what_they_stand_for(codec):
    codes, scales = codec.encode(NORMAL)
    assert codes.dtype.itemsize == 1 and scales.dtype == jnp.float32
    each = 2 if codec.dtype == "int4" else 1
    assert codes.shape == (ROWS, COLUMNS // each)
    assert scales.shape == (ROWS, COLUMNS // codec.block)
    error = there_and_back(codec, NORMAL) - NORMAL
    noise = float(jnp.sqrt(jnp.mean(error**2)))
    expected = codec.noise * (0.85 if codec.block == 64 else 1)  # smaller blocks, smaller scales
    assert noise == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_zeros_stay_zeros_and_the_largest_stays_the_largest(codec):
    array = jnp.zeros((2, 512)).at[0, 3].set(-7.25).at[0, 4].set(1e-3)
    back = there_and_back(codec, array)
    assert float(back[0, 3]) == pytest.approx(-7.25, rel=1e-6)
    assert jnp.count_nonzero(back[1]) == 0
    assert jnp.count_nonzero(back[0, 5:]) == 0


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("size", [1e-30, 1e-34, 1e-36, 1e-38])
def test_tiny_blocks_are_near_or_zero(codec, size):
    back = jax.jit(lambda x: there_and_back(codec, x))(NORMAL * size)
    assert float(jnp.max(jnp.abs(back - NORMAL * size))) <= 6 * size


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("bad", [jnp.inf, -jnp.inf, jnp.nan])
def test_what_is_not_finite_is_not_hidden(codec, bad):
    back = there_and_back(codec, NORMAL.at[1, 300].set(bad))
    first = 300 // codec.block * codec.block
    assert not jnp.isfinite(back[1, first : first + codec.block]).any()
    assert jnp.isfinite(back).sum() == back.size - codec.block


def test_stochastic_rounding_is_right_on_average():
    """A third of a code's distance, in places that differ by their last bits."""
    tiny = 1 + jnp.arange(4096) * 2.0**-22
    array = jnp.stack([tiny / (3 * 127), jnp.zeros(4096)], axis=-1).reshape(-1, 256)
    array = array.at[:, 1].set(1.0)
    small = array[:, ::2].ravel()
    nearest = there_and_back(Blocks("int8"), array)[:, ::2].ravel()
    drawn = there_and_back(Blocks("int8", stochastic=True), array)[:, ::2].ravel()
    assert float(nearest.mean()) == 0
    assert float(drawn.mean()) == pytest.approx(float(small.mean()), rel=0.05)
    assert set(np.unique(np.round(drawn * 127))) == {0, 1}


@pytest.mark.parametrize(
    ("length", "block", "fitted"),
    [(4096, 256, 256), (1600, 256, 200), (100, 256, 100), (50257, 256, None), (31, 256, None),
     (384, 64, 64), (96, 64, 48), (259, 256, 37)],
)  # fmt: skip
def test_blocks_are_the_largest_that_divide(length, block, fitted):
    found = Blocks("int8", block=block).fitted(length)
    assert (found and found.block) == fitted


def test_int4_packs_two_codes_in_a_byte():
    array = jnp.arange(-7, 8, dtype=jnp.float32)
    array = jnp.concatenate([array, jnp.zeros(17)])[None]
    codes, scales = Blocks("int4", block=32).encode(array)
    assert codes.shape == (1, 16) and float(scales[0, 0]) == 1
    np.testing.assert_array_equal(there_and_back(Blocks("int4", block=32), array), array)


def test_exact_casts_floats_alone():
    assert Exact("bfloat16").encode(NORMAL)[0].dtype == jnp.bfloat16
    assert Exact("bfloat16").encode(jnp.arange(3))[0].dtype == jnp.int32
    assert Exact().encode(NORMAL)[0] is NORMAL


def test_what_precision_takes():
    assert codec_for("int8", "gather") == Blocks("int8") == codec_for(Blocks(), "reduce")
    assert codec_for(jnp.float8_e4m3fn, "gather") == Blocks("float8_e4m3fn")
    assert codec_for(jnp.bfloat16, "gather") == jnp.dtype("bfloat16")
    assert codec_for(None, "gather") is None


def test_the_first_pattern_that_matches_says_what_a_weight_travels_as():
    ways = zerojax.Precision(gather={"mlp/up": None, "mlp": "int8", "^embed": "bfloat16"}).gather
    found = {path: way_of(path, ways) for path in ("mlp/up", "mlp/down", "embed", "unembed")}
    assert found == {
        "mlp/up": None, "mlp/down": Blocks("int8"), "embed": jnp.dtype("bfloat16"), "unembed": None,
    }  # fmt: skip
    assert str(ways).startswith("{'mlp/up': None, 'mlp': Blocks(")
    precision = zerojax.Precision(gather={"mlp": "int8"})
    assert precision == zerojax.Precision(gather={"mlp": Blocks()}) != zerojax.Precision()
    assert hash(precision) == hash(dataclasses.replace(precision))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Blocks("int3"), r"Blocks\('int3'\): there are no such codes\. Use 'int8', 'int4'"),
        (lambda: Blocks(block=16), r"block=16 must be a number of elements, 32 or more"),
        (lambda: Blocks("int4", block=33), r"Of int4, two are a byte: an even number"),
        (lambda: Blocks("float8_e4m3fn", stochastic=True), r"only integer codes can be rounded so"),
        (lambda: zerojax.Precision(gather="int4"), r"gather='int4'\): 15 levels are too few"),
        (lambda: zerojax.Precision(gather=Blocks("int4")), r"gather='int4'\): 15 levels are too"),
        (
            lambda: zerojax.Precision(reduce="float8_e4m3"),
            r"reduce='float8_e4m3'\): numbers of 8 bits travel as codes.*Use 'float8_e4m3fn'",
        ),
        (lambda: zerojax.Precision(gather="float4_e2m1fn"), r"numbers of 4 bits travel as codes"),
        (lambda: zerojax.Precision(reduce="int7"), r"Precision\(reduce='int7'\): neither a float"),
        (
            lambda: zerojax.Precision(gather={"embed": "int4"}),
            r"gather='int4'\): 15 levels are too few",
        ),
        (
            lambda: zerojax.Precision(reduce={"embed": "int8"}),
            r"Precision\(reduce=\{'embed': 'int8'\}\): only gather= differs by path.*Give one way",
        ),
        (
            lambda: zerojax.Precision(gather={"embed": {"up": "int8"}}),
            r"Precision\(gather=\{'up': 'int8'\}\): neither a float dtype nor codes",
        ),
        (lambda: zerojax.Precision(gather={3: "int8"}), r"maps 3. Map path patterns, such as"),
        (lambda: zerojax.Precision(gather=8), r"Precision\(gather=8\): neither a float dtype nor"),
    ],
)
def test_what_it_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        make()
