"""How an array is written on the wire: as it is, or quantized, with a scale for each block.

[Note: quantized blocks]
A block is a run of elements along the last dimension. Its scale is its largest absolute value over
the largest code, so the codes use their whole range, no error exceeds half the distance between two
codes, and zeros stay zeros. Blocks never cross a shard: the codes and scales of a shard are shards
of those of the whole array, so an all-gather can move them in its place. A block with an infinity
or a NaN has no finite scale, and every element of it decodes to NaN: a step that skips such
gradients still sees them.

[Note: sums of quantized gradients]
A reduce-scatter cannot add codes on their way, because each block has its own scale. So every
device quantizes the part that each peer keeps, sends it there, and adds up what it receives in
float32. XLA does not combine all-to-alls, so we send the arrays of a layer as one message. One
all-to-all over nodes and their GPUs would send all bytes through each GPU's own network card, and
take longer than an exact reduce-scatter, whose rings share the cards of a node. So a node first
sums exactly, and only that sum, 1/8 of the bytes, crosses nodes (ZeRO++'s qgZ).
"""

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from zerojax._kernel.places import LeafPlan
from zerojax._kernel.travel import Codec, Exact, Parts
from zerojax._specs import Axes, names_in

LARGEST_CODES = {"int8": 127.0, "int4": 7.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
# The root mean square of the errors in normal numbers of size 1, in blocks of 256.
NOISE = {"int8": 7e-3, "int4": 0.13, "float8_e4m3fn": 0.027, "float8_e5m2": 0.053}
ENCODING = "as_codes"  # the scope of what encodes, in a compiled program
MESSAGES_SCOPE = "gradients_as_codes"  # the scope of the all-to-alls in a compiled program
LEAST_BLOCK = 32  # with smaller blocks, more than an eighth of the bytes would be scales


@dataclasses.dataclass(frozen=True)
class QuantizedWire:
    """Arrays sent in 4 or 8 bits, with a float32 scale for each block of elements.

    Arguments:
        dtype: what is sent: "int8", "int4" (gradients only), "float8_e4m3fn" or "float8_e5m2".
        block: how many neighbours along the last dimension share a scale, at most. Where this does
            not divide a leaf, the largest number from there down to 32 that does is taken.

    Example:
        >>> sums = zerojax.QuantizedWire("int8", block=128)
        >>> precision = zerojax.Precision(gather="int8", reduce=sums)
        >>> print(precision.gather)
        QuantizedWire(dtype='int8', block=256)
    """

    dtype: str = "int8"
    block: int = 256

    def __post_init__(self) -> None:
        if self.dtype not in [*LARGEST_CODES]:  # which may be of any type
            known = ", ".join(map(repr, LARGEST_CODES))
            raise ValueError(f"dtype={self.dtype!r} is not a quantized dtype. Use {known}.")
        is_odd = self.dtype == "int4" and self.block % 2
        if type(self.block) is not int or self.block < LEAST_BLOCK or is_odd:
            raise ValueError(
                f"block={self.block!r} must be an integer, {LEAST_BLOCK} or more, because each "
                "block is sent with a scale of 4 bytes. For int4 it must be even: a byte has two."
            )


class BlockCodec(QuantizedWire):
    """Writes arrays whose last dimension the block divides."""

    def encode(self, array: Array) -> Parts:
        with jax.named_scope(ENCODING):
            blocks = array.astype(jnp.float32).reshape(*array.shape[:-1], -1, self.block)
            # XLA's maximum may pass over a NaN.
            sizes = jnp.where(jnp.isfinite(blocks), jnp.abs(blocks), jnp.inf)
            largest, most = jnp.max(sizes, axis=-1, keepdims=True), LARGEST_CODES[self.dtype]
            # A block too small for any scale becomes zeros.
            least = most * float(jnp.finfo(jnp.float32).tiny)
            scale = jnp.where(largest < least, 1, largest / most)
            codes = blocks / scale
            if self.dtype.startswith("int"):
                codes = jnp.clip(jnp.round(codes), -most, most).astype(jnp.int8)
            else:
                codes = codes.astype(self.dtype)
            if self.dtype == "int4":
                low, high = jnp.split(codes, 2, axis=-1)
                codes = (low & 15) | (high << 4)
            return codes.reshape(*array.shape[:-1], -1), scale[..., 0]

    def decode(self, parts: Parts) -> Array:
        codes, scale = parts
        blocks = codes.reshape(*scale.shape, -1)
        if self.dtype == "int4":
            # Shifts keep the sign: the low half of each byte first, then the high one.
            blocks = jnp.concatenate([(blocks << 4) >> 4, blocks >> 4], axis=-1)
        values = blocks.astype(jnp.float32) * scale[..., None]
        return values.reshape(*scale.shape[:-1], -1)

    @staticmethod
    def sums(
        grads: Sequence[Array], cuts: Sequence[Any], codecs: Sequence[Codec], axes: Sequence[str]
    ) -> list[Array]:
        """Returns this device's part, along the dimension of its cut, of the sum of each gradient.

        They travel together, each as its own codec writes it.
        """
        dims = [cut.dim for cut in cuts]
        names = {name for cut in cuts for name in names_in(cut.others)}

        def run(sums: list[Array]) -> list[Array]:
            with jax.named_scope(MESSAGES_SCOPE):
                for axis in axes:
                    sums = _hop(sums, dims, codecs, axis)
            return sums

        if names:
            specs = [PartitionSpec(*cut.others) for cut in cuts]
            run = jax.shard_map(
                run, in_specs=(specs,), out_specs=specs, axis_names=names, check_vma=False
            )
        with jax.named_scope("+".join(cut.path for cut in cuts)):
            return [total.astype(x.dtype) for total, x in zip(run(list(grads)), grads, strict=True)]


def _hop(
    arrays: Sequence[Array], dims: Sequence[int], codecs: Sequence[Codec], axis: str
) -> list[Array]:
    """Returns this device's part, along its dimension, of the sum of each array over an axis."""
    size = lax.axis_size(axis)

    def split_up(array: Array, dim: int) -> Array:
        """Returns one part for each device, along a new first dimension."""
        shape = array.shape
        parts = array.reshape(*shape[:dim], size, shape[dim] // size, *shape[dim + 1 :])
        return jnp.moveaxis(parts, dim, 0)

    def from_bytes(rows: Array, like: Array) -> Array:
        width = like.dtype.itemsize
        shape = like.shape if width == 1 else (*like.shape, width)
        return lax.bitcast_convert_type(rows.reshape(shape), like.dtype)

    split = [split_up(array, dim) for array, dim in zip(arrays, dims, strict=True)]
    written = [codec.encode(parts) for codec, parts in zip(codecs, split, strict=True)]
    sent = [part for parts in written for part in parts]
    rows = [lax.bitcast_convert_type(part, jnp.int8).reshape(size, -1) for part in sent]
    message = jnp.concatenate(rows, axis=1)
    came = lax.all_to_all(message, axis, split_axis=0, concat_axis=0, tiled=True)
    ends = itertools.accumulate(row.shape[1] for row in rows)
    pieces = (came[:, end - row.shape[1] : end] for end, row in zip(ends, rows, strict=True))
    received = map(from_bytes, pieces, sent)
    read = [tuple(itertools.islice(received, len(parts))) for parts in written]
    return [jnp.sum(codec.decode(parts), axis=0) for codec, parts in zip(codecs, read, strict=True)]


# -- what `Precision` says of a direction, and what a leaf travels as

Way = DTypeLike | QuantizedWire | None  # how a parameter travels
Rules = tuple[tuple[str, Way], ...]  # path patterns, of which the first that matches counts
Ways = Way | Rules | Mapping[str, Way]


def rules_of(ways: Ways) -> Rules:
    """Returns path patterns, and how the parameters travel whose paths match."""
    return ways if isinstance(ways, tuple) else (("", ways),)  # type: ignore


def patterns_of(ways: Ways) -> list[str]:
    """Returns the path patterns that must each match a parameter."""
    return [pattern for pattern, _ in rules_of(ways) if pattern]


def ways_for(value: Any, field: str) -> Ways:
    """Returns one way, or a tuple of path patterns and ways, for a field of `Precision`."""
    if isinstance(value, tuple) and all(isinstance(x, tuple) and len(x) == 2 for x in value):
        value = dict(value)  # of another `Precision`
    if not isinstance(value, Mapping):
        return _way_for(value, field)
    if field != "gather":
        raise ValueError(
            f"Precision({field}={value!r}): only gather= can differ by path, because all gradients "
            f"of a layer leave a node in one message. Give one for all, such as {field}='int8'."
        )
    if odd := [pattern for pattern in value if not isinstance(pattern, str)]:
        raise ValueError(
            f"Precision({field}=) maps {odd[0]!r}. Map path patterns, such as "
            f"{field}={{'layers/mlp': 'int8'}}."
        )
    return tuple((pattern, _way_for(way, field)) for pattern, way in value.items())


def _way_for(value: Any, field: str) -> Way:
    if field == "gather" and "int4" in (value, getattr(value, "dtype", None)):
        raise ValueError(
            "Precision(gather='int4'): 15 levels are too few for weights, which each step reads "
            "anew. Use 'int8' or 'float8_e4m3fn'; gradients can be int4: reduce='int4'."
        )
    if value is None or isinstance(value, QuantizedWire):
        return value
    dtype = float_dtype(value)
    name = dtype.name if dtype is not None else value
    if isinstance(name, str) and name in LARGEST_CODES:
        return QuantizedWire(name)
    if dtype is None:
        raise ValueError(
            f"Precision({field}={value!r}) is neither a float dtype nor a quantized one. Use one "
            "such as 'bfloat16', or 'int8', 'float8_e4m3fn', 'float8_e5m2', "
            "zerojax.QuantizedWire('int8', block=128)."
        )
    if dtype.itemsize < 2:
        raise ValueError(
            f"Precision({field}={value!r}): numbers of {jnp.finfo(dtype).bits} bits need scales, "
            "and zerojax cannot quantize to this dtype. Use 'float8_e4m3fn', 'float8_e5m2' or "
            "'int8'."
        )
    return dtype


def float_dtype(value: Any) -> np.dtype | None:
    """Returns a float dtype, None for anything else."""
    try:
        dtype = jnp.dtype(value)
    except (TypeError, ValueError):
        return None
    return dtype if jnp.issubdtype(dtype, jnp.floating) else None


def way_of(path: str, ways: Ways) -> Way:
    """Returns the way of a parameter: the first one whose pattern its path has."""
    return next((way for pattern, way in rules_of(ways) if re.search(pattern, path)), None)


def block_codec(wire: QuantizedWire, length: int) -> BlockCodec | None:
    """Returns the codec for shards of this last dimension, None if no block divides it."""
    most = min(wire.block, length)
    sizes = (n for n in range(most, LEAST_BLOCK - 1, -1) if length % n == 0)
    size = next((n for n in sizes if n % 2 == 0 or wire.dtype != "int4"), None)
    return None if size is None else BlockCodec(wire.dtype, size)


def codec_of(leaf: LeafPlan, ways: Ways, mesh: Mesh) -> BlockCodec | Exact:
    """Returns the codec of a leaf's shards, an exact one for vectors and where no block divides."""
    way = way_of(leaf.path, ways)
    if not isinstance(way, QuantizedWire):
        return Exact(way)
    is_matrix = len(leaf.shape) - leaf.stacked >= 2
    if leaf.update.dim is None or not is_matrix or not jnp.issubdtype(leaf.dtype, jnp.floating):
        return Exact()
    place = leaf.update.on_device
    part = place.sharding(mesh).shard_shape(place.padded(leaf.shape))
    return block_codec(way, part[-1]) or Exact()


def sum_codec_of(leaf: LeafPlan, ways: Ways, mesh: Mesh, axes: Axes) -> BlockCodec | Exact:
    """Returns the codec of gradients that are summed over the batch's axes."""
    codec, is_float = codec_of(leaf, ways, mesh), jnp.issubdtype(leaf.dtype, jnp.floating)
    if isinstance(codec, BlockCodec) or not is_float or sums_narrow(mesh, axes):
        return codec
    return Exact(jnp.promote_types(codec.dtype or leaf.dtype, jnp.float32))


def sums_narrow(mesh: Mesh, axes: Axes) -> bool:
    """Whether XLA compiles sums over `axes` in bfloat16.

    On CPU devices, and beside axes over which XLA shards as it likes, it aborts the process
    ("Invalid binary instruction opcode copy"): it widens such a sum, and does not know the
    reduction that the partitioner wrote.
    """
    return mesh.devices.flat[0].platform != "cpu" or set(mesh.axis_names) <= set(axes)
