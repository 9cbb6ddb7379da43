"""Rules for operations that mix tokens: sums, windows, and elements by their place.

A rule returns the results of an equation; None where it does not apply.
"""

# pyright: strict, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import JaxprEqn
from jax.typing import ArrayLike, DTypeLike

from zerojax import _compat
from zerojax._jaxprs import nbytes, type_of
from zerojax._passes.block_runner import (
    HALO,
    OTHERS,
    SINGLE,
    TOTALS,
    BlockRunner,
    Layouts,
    Ruled,
    TokenRule,
    Tracked,
)
from zerojax._passes.blocks import Axis, Blocks
from zerojax._passes.parallel import SCATTERS, parallel

# -- sums, and what is like one


def reduced(s: BlockRunner, eqn: JaxprEqn, operands: list[Tracked], places: Layouts) -> Ruled:
    name, axes = eqn.primitive.name, eqn.params["axes"]
    (value, *_), (at, *_) = operands, places
    if at is None or at.dim not in axes:
        return None
    if name.startswith("arg") and not at.is_plain:
        return None
    array = s.array(value, at, eqn)
    array = s.axis.counting(array, at, value.shape, fill_of(name, array.dtype))
    with s.sending(TOTALS, eqn, nbytes(eqn.outvars)):
        match name:
            case "reduce_max" | "reduce_min":
                out = s.axis.largest(array, axes, 1 if name == "reduce_max" else -1)
            case "argmax" | "argmin":
                out = _place_of_largest(s.axis, eqn, array, at, value.shape)
            case "reduce_sum":
                out = s.axis.summed(_compat.bind(eqn, [array])[0])
            case _:  # a product, or a logical one
                parts = lax.all_gather(_compat.bind(eqn, [array])[0], s.axis.name)
                out = _compat.bind(eqn.replace(params={**eqn.params, "axes": (0,)}), [parts])[0]
    return [Tracked(type_of(eqn.outvars[0]).shape, out)]


FILLS = {
    "reduce_sum": 0,
    "reduce_prod": 1,
    "reduce_and": True,
    "reduce_or": False,
    "reduce_max": -np.inf,
    "reduce_min": np.inf,
    "argmax": -np.inf,
    "argmin": np.inf,
    "cumlogsumexp": None,
    "cumsum": 0,
    "cumprod": 1,
    "cummax": -np.inf,
    "cummin": np.inf,
    "reduce_window_sum": 0,
    "reduce_window_max": -np.inf,
    "reduce_window_min": np.inf,
}


def fill_of(name: str, dtype: DTypeLike) -> ArrayLike:
    """Returns the number that changes nothing in a reduction."""
    fill = FILLS[name]
    if fill is None:  # the logarithm of a sum of nothing has no derivative
        return float(jnp.finfo(dtype).min) / 4
    if name == "reduce_and" and not jnp.issubdtype(dtype, jnp.bool_):
        return np.array(-1).astype(dtype)
    if not isinstance(fill, float) or jnp.issubdtype(dtype, jnp.inexact):
        return fill
    if jnp.issubdtype(dtype, jnp.bool_):
        return fill > 0
    return jnp.iinfo(dtype).max if fill > 0 else jnp.iinfo(dtype).min


def _place_of_largest(
    axis: Axis, eqn: JaxprEqn, array: Array, at: Blocks, shape: tuple[int, ...]
) -> Array:
    """Returns the first place of the largest, or the smallest, along the tokens."""
    index = _compat.bind(eqn, [array])[0]
    best = jnp.take_along_axis(array, jnp.expand_dims(index, at.dim), at.dim).squeeze(at.dim)
    index = index + (axis.index * axis.block(at.length(shape))).astype(index.dtype)
    all_best, all_index = (lax.all_gather(x, axis.name) for x in (best, index))
    first = eqn.replace(params={**eqn.params, "axes": (0,)})
    device = _compat.bind(first, [all_best])[0]
    return jnp.take_along_axis(all_index, device[None], 0)[0]


def accumulated(s: BlockRunner, eqn: JaxprEqn, operands: list[Tracked], places: Layouts) -> Ruled:
    """A cumulative sum: of a block, and what all blocks before it add up to."""
    (value,), (at,), name = operands, places, eqn.primitive.name
    if at is None or at.dim != eqn.params["axis"] or not at.is_plain:
        return None
    array = s.array(value, at, eqn)
    fill, reverse, dim = fill_of(name, array.dtype), eqn.params["reverse"], at.dim
    array = _compat.bind(eqn, [s.axis.counting(array, at, value.shape, fill)])[0]
    edge = 0 if reverse else array.shape[dim] - 1
    total = lax.slice_in_dim(array, edge, edge + 1, axis=dim)
    with s.sending(TOTALS, eqn, s.axis.size * total.size * total.dtype.itemsize):
        totals = lax.all_gather(total, s.axis.name)
    devices = lax.broadcasted_iota(jnp.int32, totals.shape, 0)
    is_before = devices > s.axis.index if reverse else devices < s.axis.index
    totals = jnp.where(is_before, totals, jnp.asarray(fill, totals.dtype))
    join, reduce = JOINS[name]
    return [Tracked(value.shape, join(array, reduce(totals, axis=0).astype(array.dtype)), at)]


JOINS: dict[str, tuple[Callable[..., Array], Callable[..., Array]]] = {
    "cumlogsumexp": (jnp.logaddexp, jax.nn.logsumexp),
    "cumsum": (lax.add, jnp.sum),
    "cumprod": (lax.mul, jnp.prod),
    "cummax": (lax.max, jnp.max),
    "cummin": (lax.min, jnp.min),
}


# -- windows: slices, shifts and convolutions take a halo from the neighbours


def windowed(
    s: BlockRunner,
    eqn: JaxprEqn,
    value: Tracked,
    at: Blocks,
    length: int,
    first: int,
    stride: int = 1,
    width: int = 1,
    fill: ArrayLike | None = None,
) -> Array:
    """Returns what this device reads for its block of a result of so much length, of which element
    i reads `width` elements from `first + i * stride` on."""
    step, read = s.axis.block(length) * stride, (s.axis.block(length) - 1) * stride + width
    return _at_starts(s, eqn, value, at, [first + i * step for i in range(s.axis.size)], read, fill)


def _at_starts(
    s: BlockRunner,
    eqn: JaxprEqn,
    value: Tracked,
    at: Blocks,
    starts: Sequence[int],
    width: int,
    fill: ArrayLike | None,
) -> Array:
    array, size = s.array(value, at, eqn), value.shape[at.dim]
    halo = sum(s.axis.reach(size, starts, width))
    is_far = halo > 2 * s.axis.block(size)
    sent = value.nbytes // size * (size if is_far else halo)
    with s.sending(OTHERS if is_far else HALO, eqn, sent):
        return s.axis.window(array, at.dim, size, starts, width, fill)


def sliced(s: BlockRunner, eqn: JaxprEqn, operands: list[Tracked], places: Layouts) -> Ruled:
    (value,), (at,), params = operands, places, eqn.params
    shape = type_of(eqn.outvars[0]).shape
    if at is None or value.shape[at.dim] == shape[at.dim] or not at.is_plain:
        return None
    dim, rank = at.dim, len(shape)
    starts, limits = list(params["start_indices"]), list(params["limit_indices"])
    strides = list(params["strides"] or [1] * rank)
    start, stride = starts[dim], strides[dim]
    if shape[dim] < s.axis.size:
        array = _tokens(s, eqn, value, at, start + stride * jnp.arange(shape[dim]))
        strides[dim], at = 1, None
    else:
        array, at = windowed(s, eqn, value, at, shape[dim], start, stride), Blocks(dim)
    starts[dim], limits[dim] = 0, array.shape[dim]
    return [Tracked(shape, lax.slice(array, starts, limits, strides), at)]


def _tokens(s: BlockRunner, eqn: JaxprEqn, value: Tracked, at: Blocks, numbers: Array) -> Array:
    """Returns a few tokens, whole: each comes from the device that has it."""
    here = numbers - s.axis.index * s.axis.block(value.shape[at.dim])
    # A negative index would count from the end.
    here = jnp.where(here < 0, value.shape[at.dim], here)
    array = s.array(value, at, eqn)
    rows = jnp.take(array, here, axis=at.dim, mode="fill", fill_value=0)
    is_many = rows.shape[at.dim] >= s.axis.size
    with s.sending(OTHERS if is_many else SINGLE, eqn, rows.size * rows.dtype.itemsize):
        return s.axis.summed(rows)


def _unless_few(s: BlockRunner, eqn: JaxprEqn, value: Tracked) -> Tracked:
    """Returns a value in blocks, or whole if it has fewer tokens than there are devices."""
    if value.at is None or value.at.length(value.shape) >= s.axis.size:
        return value
    return Tracked(value.shape, s.array(value, None, eqn, SINGLE))


def taken_apart(s: BlockRunner, eqn: JaxprEqn, operands: list[Tracked], places: Layouts) -> Ruled:
    (value,), (at,), first = operands, places, 0
    if at is None or at.dim != eqn.params["axis"] or not at.is_plain:
        return None
    parts: list[Tracked] = []
    for var in eqn.outvars:
        shape = type_of(var).shape
        array = windowed(s, eqn, value, at, shape[at.dim], first)
        parts.append(_unless_few(s, eqn, Tracked(shape, array, Blocks(at.dim))))
        first += shape[at.dim]
    return parts


def padded(s: BlockRunner, eqn: JaxprEqn, operands: list[Tracked], places: Layouts) -> Ruled:
    (value, fill), (at, _), config = operands, places, list(eqn.params["padding_config"])
    if at is None or config[at.dim] == (0, 0, 0) or not at.is_plain:
        return None
    blank = s.array(fill, None, eqn)
    dim, shape = at.dim, type_of(eqn.outvars[0]).shape
    (low, _, interior), size = config[dim], s.axis.size
    every, block = interior + 1, s.axis.block(shape[dim])
    # The first element that is in a device's block of the result, and its place there.
    starts = [-((low - i * block) // every) for i in range(size)]
    places = [low + start * every - i * block for i, start in enumerate(starts)]
    array = _at_starts(s, eqn, value, at, starts, -(-block // every), blank)
    config[dim] = (interior, block, interior) if interior else (0, 0, 0)
    array = lax.pad(array, blank, config)
    if interior:
        start = interior - s.axis.own(places)
        array = lax.dynamic_slice_in_dim(array, start, block, dim)
    return [Tracked(shape, s.axis.harmless(array, Blocks(dim), shape), Blocks(dim))]


def joined(s: BlockRunner, eqn: JaxprEqn, operands: list[Tracked], places: Layouts) -> Ruled:
    dim, shape = eqn.params["dimension"], type_of(eqn.outvars[0]).shape
    if all(at is None or at.dim != dim for at in places):
        return None
    at, offset, result = Blocks(dim), 0, None
    block = s.axis.block(shape[dim])
    for value, place in zip(operands, places, strict=True):
        length = value.shape[dim]
        if place is not None and place == at:
            part = windowed(s, eqn, value, place, shape[dim], -offset)
        else:
            part = s.array(value, None, eqn)
            widths = [(0, 0)] * len(shape)
            widths[dim] = (offset, shape[dim] - offset - length)
            part = s.axis.cut(jnp.pad(part, widths), at)
        if result is None:
            result = part
        else:
            number = s.axis.index * block + lax.broadcasted_iota(jnp.int32, part.shape, dim)
            result = jnp.where(number >= offset, part, result)
        offset += length
    return [Tracked(shape, result, at)]


def reversed_(s: BlockRunner, eqn: JaxprEqn, operands: list[Tracked], places: Layouts) -> Ruled:
    (value,), (at,), size = operands, places, s.axis.size
    if at is None or at.dim not in eqn.params["dimensions"]:
        return None
    if value.shape[at.dim] % size or not at.is_plain:
        return None
    array = _compat.bind(eqn, [s.array(value, at, eqn)])[0]
    with s.sending(HALO, eqn, value.nbytes // size):
        pairs = [(device, size - 1 - device) for device in range(size)]
        return [Tracked(value.shape, lax.ppermute(array, s.axis.name, pairs), at)]


def convolved(s: BlockRunner, eqn: JaxprEqn, operands: list[Tracked], places: Layouts) -> Ruled:
    (value, kernel), (at, other), params = operands, places, dict(eqn.params)
    lhs, rhs, out = params["dimension_numbers"]
    if at is None or other is not None or at.dim not in lhs[2:] or not at.is_plain:
        return None
    i = lhs[2:].index(at.dim)
    if params["lhs_dilation"][i] != 1:
        return None
    dim, shape = out[2 + i], type_of(eqn.outvars[0]).shape
    width = params["rhs_dilation"][i] * (kernel.shape[rhs[2 + i]] - 1) + 1
    low, stride = params["padding"][i][0], params["window_strides"][i]
    array = windowed(s, eqn, value, at, shape[dim], -low, stride, width, fill=0)
    padding = [(0, 0) if k == i else pair for k, pair in enumerate(params["padding"])]
    eqn = eqn.replace(params={**params, "padding": tuple(padding)})
    array = _compat.bind(eqn, [array, s.array(kernel, None, eqn)])[0]
    array = s.axis.harmless(array, Blocks(dim), shape)
    return [_unless_few(s, eqn, Tracked(shape, array, Blocks(dim)))]


def pooled(s: BlockRunner, eqn: JaxprEqn, operands: list[Tracked], places: Layouts) -> Ruled:
    (value,), (at,), params = operands, places, dict(eqn.params)
    if at is None or params["base_dilation"][at.dim] != 1 or not at.is_plain:
        return None
    dim, shape = at.dim, type_of(eqn.outvars[0]).shape
    width = params["window_dilation"][dim] * (params["window_dimensions"][dim] - 1) + 1
    low, stride = params["padding"][dim][0], params["window_strides"][dim]
    fill = fill_of(eqn.primitive.name, type_of(eqn.invars[0]).dtype)
    array = windowed(s, eqn, value, at, shape[dim], -low, stride, width, fill)
    padding = [(0, 0) if d == dim else pair for d, pair in enumerate(params["padding"])]
    eqn = eqn.replace(params={**params, "padding": tuple(padding)})
    array = s.axis.harmless(_compat.bind(eqn, [array])[0], Blocks(dim), shape)
    return [_unless_few(s, eqn, Tracked(shape, array, Blocks(dim)))]


# -- elements by their place


def picked(s: BlockRunner, eqn: JaxprEqn, operands: list[Tracked], places: Layouts) -> Ruled:
    """Elements of tokens whose places are whole: each comes from the device that has it."""
    (value, index), (at, other) = operands, places
    numbers = eqn.params["dimension_numbers"]
    if at is None or at.dim not in numbers.start_index_map:
        return None
    column = numbers.start_index_map.index(at.dim)
    if other is not None:
        return _own_element(s, eqn, operands, at, other, column)
    if eqn.params["slice_sizes"][at.dim] != 1 or not at.is_plain:
        return None
    array, length = s.array(value, at, eqn), value.shape[at.dim]
    indices = s.array(index, None, eqn)
    sizes = eqn.params["slice_sizes"]
    limits = np.array([value.shape[d] - sizes[d] for d in numbers.start_index_map], indices.dtype)
    fills = eqn.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    indices = indices if fills else jnp.clip(indices, 0, limits)  # as XLA does
    missing = jnp.any((indices < 0) | (indices > limits), -1)
    # A device has none of the elements of others, nor of those that are missing.
    first = (s.axis.index * s.axis.block(length)).astype(indices.dtype)
    here = jnp.where(missing[..., None], -1, indices.at[..., column].add(-first))
    params = {"mode": lax.GatherScatterMode.FILL_OR_DROP, "fill_value": 0}
    own = eqn.replace(params={**eqn.params, **params})
    shape = type_of(eqn.outvars[0]).shape
    many = [d for d in parallel(eqn)[1].values() if shape[d] >= s.axis.size]
    with s.sending(OTHERS if many else SINGLE, eqn, nbytes(eqn.outvars)):
        out = s.axis.summed(_compat.bind(own, [array, here])[0])
    if fills:
        batch = [d for d in range(out.ndim) if d not in numbers.offset_dims]
        missing = lax.broadcast_in_dim(missing, out.shape, batch)
        out = jnp.where(missing, _missing(eqn.params["fill_value"], out.dtype), out)
    return [_cut(s, Tracked(shape, out), many)]


def _cut(s: BlockRunner, value: Tracked, dims: Sequence[int]) -> Tracked:
    """Returns a whole value in blocks along the longest of these dimensions, if there is one."""
    if not dims:
        return value
    at = Blocks(max(dims, key=lambda d: value.shape[d]))
    return Tracked(value.shape, s.axis.cut(value.array, at), at)


def _missing(fill: ArrayLike | None, dtype: DTypeLike) -> ArrayLike:
    """Returns what JAX has for an element that is not there."""
    if fill is not None or jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(jnp.nan if fill is None else fill, dtype)
    if jnp.issubdtype(dtype, jnp.bool_):
        return True
    is_signed = jnp.issubdtype(dtype, jnp.signedinteger)
    return jnp.iinfo(dtype).min if is_signed else jnp.iinfo(dtype).max


def _own_element(
    s: BlockRunner, eqn: JaxprEqn, operands: list[Tracked], at: Blocks, other: Blocks, column: int
) -> Ruled:
    """Elements of tokens that a loss looks up by counting them, `x[jnp.arange(n), labels]`."""
    value, index = operands
    numbers = s.constant(index, column)
    row = other.dim
    if numbers is None or numbers.shape[row] != value.shape[at.dim]:
        return None
    places = np.arange(numbers.shape[row]).reshape(-1, *[1] * (numbers.ndim - row - 1))
    if at != dataclasses.replace(other, dim=at.dim) or (numbers != places).any():
        return None
    indices = s.array(index, other, eqn)
    is_column = lax.broadcasted_iota(jnp.int32, indices.shape, indices.ndim - 1) == column
    here = lax.broadcasted_iota(indices.dtype, indices.shape, row)
    out = _compat.bind(eqn, [s.array(value, at, eqn), jnp.where(is_column, here, indices)])[0]
    shape = type_of(eqn.outvars[0]).shape
    result = other.moved(parallel(eqn)[1])
    assert result is not None
    return [Tracked(shape, out, result)]


def torn(s: BlockRunner, eqn: JaxprEqn, operands: list[Tracked], places: Layouts) -> Ruled:
    """Tokens in chunks that end within a device's block: each chunk is split."""
    (value,), (at,), shape = operands, places, type_of(eqn.outvars[0]).shape
    if at is None or s.after(eqn, 0, at) is not None:
        return None
    first, done = math.prod(value.shape[: at.dim]), 1
    for dim, length in enumerate(shape):
        inside = first <= done and done * length <= first * at.length(value.shape)
        if inside and length >= s.axis.size and length % s.axis.size == 0:
            whole = s.array(value, None, eqn).reshape(shape)
            return [Tracked(shape, s.axis.cut(whole, Blocks(dim)), Blocks(dim))]
        done *= length
    return None


def cut_out(s: BlockRunner, eqn: JaxprEqn, operands: list[Tracked], places: Layouts) -> Ruled:
    """A slice that begins at a computed place."""
    (value, *starts), (at, *_) = operands, places
    shape = type_of(eqn.outvars[0]).shape
    if at is None or value.shape[at.dim] == shape[at.dim] or not at.is_plain:
        return None
    indices, dim = [s.array(v, None, eqn) for v in starts], at.dim
    first = jnp.clip(indices[dim], 0, value.shape[dim] - shape[dim])
    rows = _tokens(s, eqn, value, at, first + jnp.arange(shape[dim], dtype=first.dtype))
    indices[dim] = jnp.zeros_like(indices[dim])
    out = Tracked(shape, lax.dynamic_slice(rows, indices, eqn.params["slice_sizes"]))
    return [_cut(s, out, [dim] if shape[dim] >= s.axis.size else [])]


def scattered(s: BlockRunner, eqn: JaxprEqn, operands: list[Tracked], places: Layouts) -> Ruled:
    """Tokens added to what is whole, or single elements put into blocks of tokens."""
    value, index, updates = operands
    at, numbers = places[0], eqn.params["dimension_numbers"]
    if at is not None and places[1:] == [None, None] and at.is_plain:
        if at.dim not in numbers.scatter_dims_to_operand_dims:
            return None
        if at.dim not in numbers.inserted_window_dims or "FILL" not in str(eqn.params["mode"]):
            return None
        array, indices = s.array(value, at, eqn), s.array(index, None, eqn)
        column = numbers.scatter_dims_to_operand_dims.index(at.dim)
        is_column = lax.broadcasted_iota(jnp.int32, indices.shape, indices.ndim - 1) == column
        first = (s.axis.index * s.axis.block(value.shape[at.dim])).astype(indices.dtype)
        here = jnp.where(is_column, indices - first, indices)
        more = s.array(updates, None, eqn)
        return [Tracked(value.shape, _compat.bind(eqn, [array, here, more])[0], at)]
    if at is not None or eqn.primitive.name != "scatter-add":
        return None
    rows = [d for d in range(len(updates.shape)) if d not in numbers.update_window_dims]
    if (place := places[1]) is None:
        if (moved := places[2]) is None or moved.dim not in rows:
            return None
        place = dataclasses.replace(moved, dim=rows.index(moved.dim), home=None)
    if place.dim in numbers.scatter_indices_batching_dims:
        return None
    moved = dataclasses.replace(place, dim=rows[place.dim], home=None)
    more = s.array(updates, moved, eqn)
    more = s.axis.counting(more, moved, updates.shape, 0)
    whole = s.array(value, None, eqn)
    indices = s.array(index, place, eqn)
    sums = _compat.bind(eqn, [jnp.zeros_like(whole), indices, more])[0]
    with s.sending(TOTALS, eqn, nbytes(eqn.outvars)):
        return [Tracked(value.shape, whole + s.axis.summed(sums))]


MIXING: dict[str, TokenRule] = {
    **{name: pooled if "window" in name else reduced for name in FILLS.keys() - JOINS.keys()},
    **dict.fromkeys(JOINS, accumulated),
    **dict.fromkeys(SCATTERS, scattered),
    "reshape": torn,
    "slice": sliced,
    "split": taken_apart,
    "pad": padded,
    "concatenate": joined,
    "rev": reversed_,
    "conv_general_dilated": convolved,
    "gather": picked,
    "dynamic_slice": cut_out,
}
