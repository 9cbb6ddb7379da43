"""Ways to write an array on the wire: as it is, or as codes of few bits with a scale a block.

[Note: codes of few bits]
A block is a run of elements along the last dimension. Its scale is its largest absolute value over
the largest code, so codes use their whole range, an error is at most half a code's distance, and
zeros stay zeros. Quantized never cross a shard: the codes and scales of a shard are shards of the
codes and scales of the whole array, which is why a gather may move them in its place. A block with
an infinity or a NaN has no finite scale, and all of it comes out as NaN: nothing is hidden from a
step that skips such gradients.

[Note: sums of codes]
Codes cannot be added on their way, as a reduce-scatter adds: each block has a scale of its own. So
every device sends each peer the part that this peer keeps, as codes, and adds up what it gets in
float32. XLA joins no all-to-alls, so the arrays of a layer travel as one message. One all-to-all
over nodes and their GPUs would send all bytes through each GPU's own network card, and take longer
than an exact reduce-scatter, whose rings share the cards of a node. So what crosses nodes is the
sum over a node, 1/8 of the bytes (ZeRO++'s qgZ).
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from zerojax._kernel.travel import Parts, names_in
from zerojax._wire import rounding as _rounding

CODES = {"int8": 127.0, "int4": 7.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
NOISE = {"int8": 7e-3, "int4": 0.13, "float8_e4m3fn": 0.027, "float8_e5m2": 0.053}
ENCODING = "as_codes"  # of what encodes, in a compiled program
MESSAGES_SCOPE = "gradients_as_codes"  # of the all-to-alls in a compiled program
LEAST_BLOCK = 32  # with fewer elements a scale, scales are more than an eighth of what is sent


@dataclasses.dataclass(frozen=True)
class Quantized:
    """Codes of few bits, with a float32 scale for each block of elements.

    Arguments:
        dtype: of the codes: "int8", "int4" (gradients alone), "float8_e4m3fn", "float8_e5m2".
        block: at most so many neighbours along the last dimension share a scale. Where this does
            not divide a leaf, its largest divisor down to 32 that does is taken.
        stochastic: round to either neighbour, and on average to the number; integer codes only.

    Example:
        >>> sums = zerojax.Quantized("int8", block=128)
        >>> precision = zerojax.Precision(gather="int8", reduce=sums)
        >>> print(precision.gather)
        Quantized(dtype='int8', block=256, stochastic=False)
    """

    adds = False
    dtype: str = "int8"
    block: int = 256
    stochastic: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in CODES:
            known = ", ".join(map(repr, CODES))
            raise ValueError(f"Quantized({self.dtype!r}): there are no such codes. Use {known}.")
        is_odd = self.dtype == "int4" and self.block % 2
        if type(self.block) is not int or self.block < LEAST_BLOCK or is_odd:
            raise ValueError(
                f"block={self.block!r} must be a number of elements, {LEAST_BLOCK} or more: each "
                "block is sent with a scale of 4 bytes. Of int4, two are a byte: an even number."
            )
        if self.stochastic and not self.is_integer:
            raise ValueError(
                f"Quantized({self.dtype!r}, stochastic=True): only integers can be rounded so. Use "
                "'int8', or leave stochastic= out."
            )

    @property
    def is_integer(self) -> bool:
        return self.dtype.startswith("int")

    @property
    def noise(self) -> float:
        """The root mean square of errors in normal numbers of size 1, in blocks of 256."""
        return NOISE[self.dtype] * (2**0.5 if self.stochastic else 1)

    def fitted(self, length: int) -> "Quantized | None":
        """Returns the codec for arrays whose shards have this last dimension, None if no block
        divides it."""
        sizes = (n for n in range(self.block, LEAST_BLOCK - 1, -1) if length % n == 0)
        size = next((n for n in sizes if n % 2 == 0 or self.dtype != "int4"), None)
        return None if size is None else dataclasses.replace(self, block=size)

    def encode(self, array: Array) -> Parts:
        with jax.named_scope(ENCODING):
            return self._encoded(array)

    def _encoded(self, array: Array) -> Parts:
        blocks = array.astype(jnp.float32).reshape(*array.shape[:-1], -1, self.block)
        # XLA's maximum may pass over a NaN.
        sizes = jnp.where(jnp.isfinite(blocks), jnp.abs(blocks), jnp.inf)
        largest = jnp.max(sizes, axis=-1, keepdims=True)
        # What no scale is small enough for becomes zeros.
        least = CODES[self.dtype] * float(jnp.finfo(jnp.float32).tiny)
        scale = jnp.where(largest < least, 1, largest / CODES[self.dtype])
        codes = self._rounded(blocks / scale).reshape(*array.shape[:-1], -1)
        return codes, scale[..., 0]

    def sums(
        self,
        grads: Sequence[Array],
        cuts: Sequence[Any],
        codecs: Sequence["Quantized"],
        axes: tuple[str, ...],
    ) -> list[Array]:
        """Returns this device's part, along the dimension of its cut, of the sum of each gradient.

        They travel together, each as its own codec writes it.
        """
        dims = [cut.dim for cut in cuts]
        names = {name for cut in cuts for name in names_in(cut.others)}
        run = functools.partial(summed_messages, dims=dims, codecs=codecs, axes=axes)
        if names:
            specs = [PartitionSpec(*cut.others) for cut in cuts]
            run = jax.shard_map(
                run, in_specs=(specs,), out_specs=specs, axis_names=names, check_vma=False
            )
        with jax.named_scope("+".join(cut.path for cut in cuts)):
            return [total.astype(x.dtype) for total, x in zip(run(list(grads)), grads, strict=True)]

    def decode(self, parts: Parts) -> Array:
        codes, scale = parts
        blocks = codes.reshape(*scale.shape, -1)
        if self.dtype == "int4":
            # Shifts keep the sign: the low half of each byte first, then the high one.
            blocks = jnp.concatenate([(blocks << 4) >> 4, blocks >> 4], axis=-1)
        values = blocks.astype(jnp.float32) * scale[..., None]
        return values.reshape(*scale.shape[:-1], -1)

    def _rounded(self, blocks: Array) -> Array:
        if not self.is_integer:
            return blocks.astype(self.dtype)
        if self.stochastic:
            blocks = jnp.floor(blocks + _rounding.noise(blocks))
        largest = CODES[self.dtype]
        codes = jnp.clip(jnp.round(blocks), -largest, largest).astype(jnp.int8)
        if self.dtype == "int4":
            low, high = jnp.split(codes, 2, axis=-1)
            codes = (low & 15) | (high << 4)
        return codes


Way = DTypeLike | Quantized | None  # what a parameter travels as


@dataclasses.dataclass(frozen=True)
class ByPath:
    """Ways by path patterns, of which the first that a path matches counts."""

    rules: tuple[tuple[str, Way], ...]

    def __repr__(self) -> str:
        return repr(dict(self.rules))


Ways = Way | ByPath | Mapping[str, Way]  # what `Precision` says of one direction


def rules_of(ways: Ways) -> tuple[tuple[str, Way], ...]:
    """Returns path patterns, and what parameters travel as whose paths match."""
    if isinstance(ways, ByPath):
        return ways.rules
    return tuple(ways.items()) if isinstance(ways, Mapping) else (("", ways),)


def way_of(path: str, ways: Ways) -> Way:
    return next((way for pattern, way in rules_of(ways) if re.search(pattern, path)), None)


def each_of(ways: Ways) -> list[Way]:
    """Returns all that parameters may travel as."""
    return [way for _, way in rules_of(ways)]


def patterns_of(ways: Ways) -> list[str]:
    """Returns the path patterns that must match something."""
    return [pattern for pattern, _ in rules_of(ways) if pattern]


def ways_for(value: Any, field: str) -> Ways:
    """Returns what `Precision` was given for a direction: one way, or one for each path pattern."""
    if isinstance(value, ByPath):
        return value
    if not isinstance(value, Mapping):
        return codec_for(value, field)
    if field != "gather":
        raise ValueError(
            f"Precision({field}={value!r}): only gather= differs by path; all gradients of a layer "
            f"leave a node in one message. Give one way for all, such as {field}='int8'."
        )
    if odd := [pattern for pattern in value if not isinstance(pattern, str)]:
        raise ValueError(
            f"Precision({field}=) maps {odd[0]!r}. Map path patterns, such as "
            f"{field}={{'layers/mlp': 'int8'}}."
        )
    return ByPath(tuple((pattern, codec_for(way, field)) for pattern, way in value.items()))


def codec_for(value: Any, field: str) -> Way:
    """Returns what `Precision` was given for a way: a float dtype, or blocks of codes."""
    if field == "gather" and "int4" in (value, getattr(value, "dtype", None)):
        raise ValueError(
            "Precision(gather='int4'): 15 levels are too few for weights, which each step reads "
            "anew. Use 'int8' or 'float8_e4m3fn'; gradients can travel so, reduce='int4'."
        )
    if value is None or isinstance(value, Quantized):
        return value
    if isinstance(value, str) and value in CODES:
        return Quantized(value)
    dtype = float_dtype(value)
    if dtype is None:
        raise ValueError(
            f"Precision({field}={value!r}): neither a float dtype nor codes. Use one such as "
            "'bfloat16', or 'int8', 'float8_e4m3fn', 'float8_e5m2', "
            "zerojax.Quantized('int8', block=128)."
        )
    if dtype.name in CODES:
        return Quantized(dtype.name)
    if dtype.itemsize < 2:
        raise ValueError(
            f"Precision({field}={value!r}): numbers of {jnp.finfo(dtype).bits} bits travel as "
            "codes with scales, and there are none of this dtype. Use 'float8_e4m3fn', "
            "'float8_e5m2' or 'int8'."
        )
    return dtype


def float_dtype(value: Any) -> np.dtype | None:
    """Returns a float dtype as such; None for anything else."""
    try:
        dtype = jnp.dtype(value)
    except (TypeError, ValueError):
        return None
    return dtype if jnp.issubdtype(dtype, jnp.floating) else None


# -- messages: what all-to-alls send of several arrays


def summed_messages(
    arrays: Sequence[Array], dims: Sequence[int], codecs: Sequence[Quantized], axes: Sequence[str]
) -> list[Array]:
    """Returns this device's part, along its dimension, of the sum of each array over the axes."""
    sums = list(arrays)
    with jax.named_scope(MESSAGES_SCOPE):
        for axis in axes:
            sums = _hop(sums, dims, codecs, axis)
    return sums


def _hop(
    arrays: Sequence[Array], dims: Sequence[int], codecs: Sequence[Quantized], axis: str
) -> list[Array]:
    size = lax.axis_size(axis)
    split = [_split(array, dim, size) for array, dim in zip(arrays, dims, strict=True)]
    written = [codec.encode(parts) for codec, parts in zip(codecs, split, strict=True)]
    message = jnp.concatenate([_as_bytes(part) for parts in written for part in parts], axis=1)
    came = lax.all_to_all(message, axis, split_axis=0, concat_axis=0, tiled=True)
    read = _taken_apart(came, written)
    return [jnp.sum(codec.decode(p), axis=0) for codec, p in zip(codecs, read, strict=True)]


def _split(array: Array, dim: int, size: int) -> Array:
    """Returns an array as one part for each of so many devices, along a new first dimension."""
    shape = array.shape
    split = array.reshape(*shape[:dim], size, shape[dim] // size, *shape[dim + 1 :])
    return jnp.moveaxis(split, dim, 0)


def _as_bytes(part: Array) -> Array:
    """Returns what goes to each device as a row of bytes."""
    return lax.bitcast_convert_type(part, jnp.int8).reshape(len(part), -1)


def _taken_apart(message: Array, like: Sequence[Parts]) -> list[Parts]:
    """Returns the parts that a message was made of."""
    flat = [part for parts in like for part in parts]
    widths = [part.size // len(part) * part.dtype.itemsize for part in flat]
    ends = list(itertools.accumulate(widths))
    rows = (message[:, end - width : end] for width, end in zip(widths, ends, strict=True))
    arrays = iter([_from_bytes(row, part) for row, part in zip(rows, flat, strict=True)])
    return [tuple(itertools.islice(arrays, len(parts))) for parts in like]


def _from_bytes(rows: Array, like: Array) -> Array:
    size = like.dtype.itemsize
    shape = like.shape if size == 1 else (*like.shape, size)
    return lax.bitcast_convert_type(rows.reshape(shape), like.dtype)
