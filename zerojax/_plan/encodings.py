"""How an optimizer's numbers rest in fewer bits: masters in 24, moments in 16 or 8.

Gains: AdamW with masters takes 5 bytes a parameter between steps, and a 16th for scales, not 14: 2
of the weight, 1 of its correction, 1 of each moment; with a bfloat16 gradient 7, not 16. Offloaded
state sends 3 bytes each way, not 12. Costs 150 lines here, 220 in `kept.py`, 80 in `roles.py`, 95
in `_checkpoint/matching.py`, and noise, which the notes bound.

[Note: random rounding]
A running mean with a decay of 0.999 moves by a thousandth of its distance, and neighbours in
bfloat16 are up to 1/128 apart: rounded to the nearest, it would stand still. So a number between
two neighbours becomes the upper one with the probability of its distance from the lower one, and
its mean over many steps is right.

The random bits are a hash of the number and of a salt, which is a scalar. We draw no bits for an
array's shape: those of an element would change with the sharding, and with updating layers one at a
time, and `_update/rules.py` could not prove such updates. Everything here is arithmetic on the bits
of float32 (but one product), so that no program rounds it in another way.

[Note: corrections]
A master is its bfloat16 weight, the nearest one, and a code of -127 to 127: how far it lies towards
the next weight, in steps of 258 float32 numbers. 127 of these are just half the way. So a master is
off by less than a 32,000th of its size, and by half of that where it was rounded to the nearest.

Where a weight's last bit is 1, its code counts the other way, so that codes are the same on both
sides of the middle between two weights. XLA may compute a new master twice, and round once in other
places. A weight from above the middle and a code from below still make a number close by.

[Note: codes]
Numbers of one block, a run along the last dimension, share a scale: the largest of them, rounded up
to 4 bits of mantissa. Codes count down from there in numbers of 4 bits, eight to an octave, so that
small numbers are as precise as large ones: neighbours are 1/15 to 1/8 apart. Of numbers with signs
there are 126 of each, over 15 octaves, and smaller ones become zero or the smallest at random. A
block without negative numbers says so by the sign of its scale, and has 254, over 31 octaves. There
no number becomes zero, because updates divide by second moments. Zeros stay zeros. A block with an
infinity or a NaN decodes to NaN.

The smallest code may stand for much smaller numbers. A first moment of 1e-20 beside one of 1 would
rest as 2e-10, or at random as 2e-5. float32 has no square of it, so its second moment is zero, and
the update would divide by `eps` alone. So the smallest code is that of zero where another moment of
the same parameter is zero: `settled`. Only zeros of blocks without signs count, because the others
may be random.

No code is -128. The type float8_e4m3b11fnuz has NaN there and all other patterns are finite
numbers, so XLA keeps what looks like it, and JAX takes it for something to differentiate by.

[Note: kernels]
`narrow_moments` computes new moments twice: for scales and, behind a barrier, for codes. So a leaf
has two kernels, and no moment is in memory in float32. Salts pass a barrier too: without the
positions of leaves in it, a kernel is the same for all leaves of one shape. XLA compiles it once.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from zerojax._types import PyTree

SIGN, INFINITE, FINITE = 0x80000000, 0x7F800000, 0x7F7FFFFF  # the bits of float32
STEP = 258  # the float32 numbers between two corrections
RECIPROCAL = 32514  # 2**23 / 258, rounded up
DROPPED = 20  # the bits of mantissa that codes do not have
SIGNED, UNSIGNED = 127, 254  # the largest codes
NEIGHBOURS, FEWEST = 64, 16  # the length of blocks at most, and of those that are worth a scale
AS_FLOAT = jnp.float8_e4m3b11fnuz

Salt = Array | None  # None: round to the nearest


def salt(count: Array, place: int) -> Array:
    """Returns a number that differs from step to step and from leaf to leaf."""
    first = _hash(count.astype(jnp.uint32))
    # See the note on kernels.
    return _hash(lax.add(*lax.optimization_barrier((first, np.uint32(place)))))


def _hash(bits: Array) -> Array:
    """Returns bits each of which depends on all bits of the argument (lowbias32)."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0x846CA68B)
    return bits ^ (bits >> 16)


def _bits(value: Array) -> Array:
    return lax.bitcast_convert_type(value.astype(jnp.float32), jnp.uint32)


def _bfloat16(bits: Array) -> Array:
    """Returns the bfloat16 numbers of their 16 bits."""
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)


def rounded(value: Array, salt: Array) -> Array:
    """Rounds to one of the two neighbours in bfloat16, as the note above says.

    Numbers that bfloat16 represents, infinities and NaN do not change. Finite numbers stay finite.
    """
    bits = _bits(value)
    size = bits & ~jnp.uint32(SIGN)
    # The bits that bfloat16 drops are the distance from the lower neighbour. As many random bits,
    # added to them, carry into the bits that it keeps with the probability of that distance.
    up = jnp.minimum(size + (_hash(bits ^ salt) >> 16), FINITE)
    # Without the dropped bits, a NaN may become an infinity.
    other = jnp.where(size > INFINITE, size | 0x400000, size)
    bits = (bits & jnp.uint32(SIGN)) | jnp.where(size < INFINITE, up, other)
    return _bfloat16(bits >> 16)


# -- masters


@jax.jit
def split(value: Array, salt: Salt = None) -> tuple[Array, Array]:
    """Returns the nearest bfloat16 numbers of masters, and their corrections."""
    bits = _bits(value)
    is_nan = (bits & ~jnp.uint32(SIGN)) > INFINITE
    high = jnp.where(is_nan, bits | 0x400000, bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    random = STEP // 2 if salt is None else ((_hash(bits ^ salt) >> 16) * STEP) >> 16
    # Positive, so that the division rounds down. Of 20 bits, this product is exactly that.
    off = bits - (high << 16) + 128 * STEP + random
    code = _signed((off * RECIPROCAL) >> 23) - 128
    code = _mirrored(high, jnp.clip(code, -SIGNED, SIGNED))
    return _bfloat16(high), code.astype(jnp.int8)


@jax.jit
def joined(weight: Array, correction: Array) -> Array:
    """Returns the masters in float32 of weights and their corrections."""
    bits = lax.bitcast_convert_type(weight, jnp.uint16).astype(jnp.uint32)
    high = bits & 0x7FFF
    off = _mirrored(high, correction.astype(jnp.int32)) * STEP
    # Another weight than the one that the correction was made for must not become a NaN.
    off = jnp.where(high < INFINITE >> 16, off, jnp.minimum(off, 0))
    size = jnp.maximum(_signed(high << 16) + off, 0).astype(jnp.uint32)
    return lax.bitcast_convert_type(((bits >> 15) << 31) | size, jnp.float32)


def _mirrored(high: Array, code: Array) -> Array:
    return jnp.where((high & 1) == 0, code, -code)


def _signed(bits: Array) -> Array:
    return bits.astype(jnp.int32)


# -- moments


def blocks_of(length: int) -> tuple[int, int]:
    """Returns how many blocks a dimension has, and how long they are; the last may be shorter."""
    count = -(-length // NEIGHBOURS)
    return count, -(-length // count)


def _in_blocks(value: Array) -> Array:
    count, size = blocks_of(value.shape[-1])
    widths = [(0, 0, 0)] * (value.ndim - 1) + [(0, count * size - value.shape[-1], 0)]
    # Even if there is none: layers of another length must have the same program.
    value = lax.pad(value, jnp.zeros((), value.dtype), widths)
    return lax.reshape(value, (*value.shape[:-1], count, size))


def _spread(value: Array, length: int) -> Array:
    """Returns a number of each block for all of its elements."""
    count, size = blocks_of(length)
    shape = *value.shape, size
    value = lax.broadcast_in_dim(value, shape, tuple(range(value.ndim)))
    value = lax.reshape(value, (*shape[:-2], count * size))
    return lax.slice_in_dim(value, 0, length, axis=-1)


def encoded(value: Array, salt: Salt = None) -> tuple[Array, Array]:
    """Returns codes of the array's shape, and the scales of their blocks."""
    scales = scales_of(value)
    return codes_of(value, scales, salt), scales


@jax.jit
def scales_of(value: Array) -> Array:
    """Returns the scales of an array's blocks."""
    bits = _bits(value)
    # The largest of a block's numbers without a sign, if any, and the largest one with it, or else.
    plus = jnp.max(_in_blocks(_signed(bits)), axis=-1)
    minus = jnp.max(_in_blocks(bits), axis=-1)
    largest = jnp.maximum(jnp.maximum(plus, 0).astype(jnp.uint32), minus & ~jnp.uint32(SIGN))
    top = (jnp.minimum(largest, FINITE) + ((1 << DROPPED) - 1)) >> DROPPED
    top = jnp.minimum(top, FINITE >> DROPPED)  # whose upper neighbour is an infinity
    top = jnp.where(largest < INFINITE, top, INFINITE >> DROPPED)
    is_plain = (minus <= jnp.uint32(SIGN)) & (top > 0)
    # A number of 11 bits is one of bfloat16's.
    return _bfloat16((is_plain.astype(jnp.uint32) << 15) | (top << (DROPPED - 16)))


@jax.jit
def codes_of(value: Array, scales: Array, salt: Salt = None) -> Array:
    """Returns codes of the array's shape, for the scales of its blocks."""
    bits = _bits(value)
    base, is_plain, _ = _levels(scales, value.shape[-1])
    size = bits & ~jnp.uint32(SIGN)
    random = jnp.full_like(bits, 1 << 31) if salt is None else _hash(bits ^ salt)
    near = jnp.minimum(size + (random >> (32 - DROPPED)), FINITE) >> DROPPED
    code = jnp.minimum(_signed(near) - base, jnp.where(is_plain, UNSIGNED, SIGNED))
    # Below the smallest code, what counts is the distance from zero.
    least = (base + 1) << DROPPED
    drawn = (random >> 8).astype(jnp.float32) * 2.0**-12  # both sides stay below infinity
    is_up = drawn * _float(least.astype(jnp.uint32)) < _float(size) * 2.0**12
    is_up = is_up | (is_plain & (size > 0))
    code = jnp.where(_signed(size) < least, is_up.astype(jnp.int32), code)
    signs = jnp.where(bits > jnp.uint32(SIGN), -code, code)
    return jnp.where(is_plain, code - SIGNED, signs).astype(jnp.int8)


def typed_codes(value: PyTree) -> tuple[PyTree, PyTree]:
    """Returns what `encoded` does, if the type of the array says how it is sharded.

    Where a shard ends within a block, the scales are whole along the last dimension. Of a shape,
    returns the shapes.
    """
    if isinstance(value, jax.ShapeDtypeStruct):
        scales = jax.ShapeDtypeStruct(scale_shape(value.shape), jnp.bfloat16)
        return value.update(dtype=jnp.int8), scales
    # XLA would compute codes of what it knows while it compiles: for over 35 s, of 2**26 zeros.
    value = lax.select(lax.optimization_barrier(np.True_), value, jnp.full_like(value, jnp.nan))
    sharding, length = jax.typeof(value).sharding, value.shape[-1]
    count, size = blocks_of(length)
    parts = length // sharding.shard_shape(value.shape)[-1]
    if parts == 1 or (count % parts == 0 and count * size == length):
        return encoded(value)
    whole = sharding.update(spec=PartitionSpec(*sharding.spec[:-1], None))
    codes, scales = encoded(jax.sharding.reshard(value, whole))
    return jax.sharding.reshard(codes, sharding), scales


@jax.jit
def settled(codes: Array, scales: Array, others: Sequence[tuple[Array, Array]]) -> Array:
    """Returns codes for the numbers of which `others` are the codes and scales of other moments."""
    length = codes.shape[-1]
    is_plain, signs = _spread(scales < 0, length), jnp.int8(SIGNED)
    is_least = jnp.where(is_plain, codes == 1 - signs, jnp.abs(codes) == 1)
    for other, scale in others:
        is_zero = (other == -signs) & _spread(scale < 0, length)
        codes = jnp.where(is_least & is_zero, jnp.where(is_plain, -signs, 0), codes)
    return codes


@jax.jit
def decoded(codes: Array, scales: Array) -> Array:
    """Returns the float32 numbers of codes and the scales of their blocks."""
    base, is_plain, top = _levels(scales, codes.shape[-1])
    number = codes.astype(jnp.int32) + jnp.where(is_plain, SIGNED, 0)
    size = jnp.abs(number)
    bits = jnp.where(size > 0, (base + size) << DROPPED, 0).astype(jnp.uint32)
    value = _float(bits | (number.astype(jnp.uint32) & jnp.uint32(SIGN)))
    return jnp.where(top >= INFINITE >> DROPPED, jnp.nan, value)


def _levels(scales: Array, length: int) -> tuple[Array, Array, Array]:
    """Returns, for each element of a block, the number before that of its smallest code, whether
    the block has no signs, and the number of its largest code."""
    bits = lax.bitcast_convert_type(_spread(scales, length), jnp.uint16).astype(jnp.int32)
    top, is_plain = (bits & 0x7FFF) >> (DROPPED - 16), bits > 0x7FFF
    return jnp.maximum(top - jnp.where(is_plain, UNSIGNED, SIGNED), 0), is_plain, top


def _float(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def as_float(value: Array) -> Array:
    """Returns codes, with the same bits, as a type that JAX differentiates by; others unchanged."""
    return lax.bitcast_convert_type(value, AS_FLOAT) if value.dtype == jnp.int8 else value


def as_stored(value: Array, dtype: DTypeLike) -> Array:
    """Returns what `as_float` made of an array of this dtype as that array."""
    return lax.bitcast_convert_type(value, dtype) if dtype == jnp.int8 else value


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return *shape[:-1], blocks_of(shape[-1])[0]


def is_worth_codes(shape: tuple[int, ...], layers: int) -> bool:
    """Whether an array is a matrix, or a stack of them, with rows long enough for scales."""
    return len(shape) - layers >= 2 and shape[-1] >= FEWEST and math.prod(shape) > 0
