"""Codes: what they are, how far off what comes out is, and what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from tests.support import draw
from zerojax import QuantizedWire
from zerojax._wire.codecs import NOISE, BlockCodec, block_codec

ROWS, COLUMNS = 32, 1024
NORMAL = draw.normal(0, ROWS, COLUMNS)
CODECS = [
    *map(BlockCodec, ("int8", "int4", "float8_e4m3fn", "float8_e5m2")),
    BlockCodec("int4", block=64),
]
each_codec = pytest.mark.parametrize("codec", CODECS, ids=str)


@functools.partial(jax.jit, static_argnums=0)
def there_and_back(codec, array):
    return codec.decode(codec.encode(array))


@each_codec
def test_codes_are_small_and_near_what_they_stand_for(codec):
    codes, scales = jax.eval_shape(codec.encode, NORMAL)
    assert codes.dtype.itemsize == 1 and scales.dtype == jnp.float32
    each = 2 if codec.dtype == "int4" else 1
    assert codes.shape == (ROWS, COLUMNS // each)
    assert scales.shape == (ROWS, COLUMNS // codec.block)
    error = there_and_back(codec, NORMAL) - NORMAL
    noise = float(jnp.sqrt(jnp.mean(error**2)))
    smaller = 0.85 if codec.block == 64 else 1  # smaller blocks have smaller scales
    assert noise == pytest.approx(NOISE[codec.dtype] * smaller, rel=0.15)


@each_codec
def test_zeros_stay_zeros_and_the_largest_stays_the_largest(codec):
    array = jnp.zeros((2, 512)).at[0, 3].set(-7.25).at[0, 4].set(1e-3)
    back = there_and_back(codec, array)
    assert float(back[0, 3]) == pytest.approx(-7.25, rel=1e-6)
    assert jnp.count_nonzero(back[1]) == 0
    assert jnp.count_nonzero(back[0, 5:]) == 0


@each_codec
def test_tiny_blocks_are_near_or_zero(codec):
    sizes = 10.0 ** -jnp.array([30, 34, 36, 38])[:, None, None]
    back = there_and_back(codec, NORMAL * sizes)
    assert jnp.all(jnp.abs(back - NORMAL * sizes) <= 6 * sizes)


@each_codec
def test_what_is_not_finite_is_not_hidden(codec):
    for bad in (jnp.inf, -jnp.inf, jnp.nan):
        back = there_and_back(codec, NORMAL.at[1, 300].set(bad))
        first = 300 // codec.block * codec.block
        assert not jnp.isfinite(back[1, first : first + codec.block]).any()
        assert jnp.isfinite(back).sum() == back.size - codec.block


@pytest.mark.parametrize(
    ("length", "block", "fitted"),
    [
        (1600, 256, 200),
        (100, 256, 100),
        (50257, 256, None),
        (31, 256, None),
        (96, 64, 48),
        (96, 10**15, 96),
    ],
)
def test_blocks_are_the_largest_that_divide(length, block, fitted):
    codec = block_codec(QuantizedWire("int8", block=block), length)
    assert (codec and codec.block) == fitted


def test_int4_packs_two_codes_in_a_byte():
    array = jnp.concatenate([jnp.arange(-7.0, 8.0), jnp.zeros(17)])[None]
    codes, scales = BlockCodec("int4", block=32).encode(array)
    assert codes.shape == (1, 16) and float(scales[0, 0]) == 1
    np.testing.assert_array_equal(there_and_back(BlockCodec("int4", block=32), array), array)


def test_dtypes_and_names_of_codes_say_the_same():
    precision = zerojax.Precision(gather="int8", reduce=jnp.float8_e4m3fn)
    assert precision == zerojax.Precision(
        gather=QuantizedWire(), reduce=QuantizedWire("float8_e4m3fn")
    )
    by_path = zerojax.Precision(gather={"mlp/up": None, "mlp": "int8", "^embed": jnp.bfloat16})
    assert dict(by_path.gather) == {"mlp/up": None, "mlp": QuantizedWire(), "^embed": jnp.bfloat16}
    assert by_path != precision and hash(by_path) == hash(dataclasses.replace(by_path))
    ways = '{"mlp/up": None, "mlp": "int8", "^embed": "bfloat16"}'
    assert repr(by_path) == f"Precision(gather={ways})"
    assert eval(repr(by_path), vars(zerojax)) == by_path


BLOCKS = [
    ({"dtype": "int3"}, r"dtype='int3' is not a quantized dtype\. Use 'int8', 'int4'"),
    ({"block": 16}, r"block=16 must be an integer, 32 or more"),
    ({"dtype": "int4", "block": 33}, r"For int4 it must be even: a byte has two"),
]
PRECISION = [
    ({"gather": "int4"}, r"gather='int4'\): 15 levels are too few"),
    ({"gather": {"embed": QuantizedWire("int4")}}, r"gather='int4'\): 15 levels are too few"),
    (
        {"reduce": "float8_e4m3"},
        r"'float8_e4m3'\): numbers of 8 bits need scales.*Use 'float8_e4m3fn",
    ),
    ({"reduce": "int7"}, r"Precision\(reduce='int7'\) is neither a float"),
    (
        {"reduce": {"embed": "int8"}},
        r"\(reduce=\{'embed': 'int8'\}\): only gather=.*Give one for all",
    ),
    (
        {"gather": {"embed": {"up": "int8"}}},
        r"\(gather=\{'up': 'int8'\}\) is neither a float dtype",
    ),
    ({"gather": (("mlp", "nonsense"),)}, r"gather='nonsense'\) is neither a float dtype"),
    ({"gather": (("mlp", "int8", 3),)}, r"gather=\(\('mlp', 'int8', 3\),\)\) is neither a float"),
    ({"reduce": (("mlp", "int8"),)}, r"\(reduce=\{'mlp': 'int8'\}\): only gather="),
    ({"gather": {3: "int8"}}, r"maps 3. Map path patterns, such as"),
    ({"gather": 8}, r"Precision\(gather=8\) is neither a float dtype nor"),
]


@pytest.mark.parametrize(("options", "says"), BLOCKS + PRECISION)
def test_what_is_refused(options, says):
    make = zerojax.Precision if options.keys() & {"gather", "reduce"} else QuantizedWire
    with pytest.raises(ValueError, match=says):
        make(**options)
