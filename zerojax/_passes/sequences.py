"""Splits the sequences of a loss over a mesh axis, whatever the model.

The loss is one of whole sequences, and so are its numbers. Here are the rules for operations that
mix tokens, and the pass: see `_passes/splitter.py` for what surrounds them.
"""

# pyright: strict, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import dataclasses
import math
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import JaxprEqn, Var
from jax.typing import ArrayLike, DTypeLike

from zerojax import _compat
from zerojax._jaxprs import nbytes, type_of
from zerojax._passes.blocks import SCATTERS, Axis, Blocks, parallel
from zerojax._passes.control import CONTROL
from zerojax._passes.loss import Loss
from zerojax._passes.splitter import (
    HALO,
    HEADS,
    KEYS,
    OTHERS,
    SUMS,
    TOKENS,
    Places,
    Rule,
    Sent,
    Splitter,
    Value,
)
from zerojax._table import human_bytes

# -- sums, and what is like one


def reduced(s: Splitter, eqn: JaxprEqn, operands: list[Value], places: Places) -> Any:
    name, axes = eqn.primitive.name, eqn.params.get("axes", ())
    (value, *_), (at, *_) = operands, places
    if at is None or at.dim not in axes or name not in FILLS:
        return None
    if name.startswith("arg") and not at.is_plain:
        return None
    array = s.array(value, at, eqn)
    array = s.axis.counting(array, at, value.shape, fill_of(name, array.dtype))
    with s.sending(SUMS, eqn, _bytes_of(eqn)):
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
    return [Value(type_of(eqn.outvars[0]).shape, out)]


FILLS = {
    "reduce_sum": 0,
    "reduce_prod": 1,
    "reduce_and": True,
    "reduce_or": False,
    "reduce_max": -np.inf,
    "reduce_min": np.inf,
    "argmax": -np.inf,
    "argmin": np.inf,
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


def accumulated(s: Splitter, eqn: JaxprEqn, operands: list[Value], places: Places) -> Any:
    """A cumulative sum: of a block, and what all blocks before it add up to."""
    (value,), (at,), name = operands, places, eqn.primitive.name
    if at is None or at.dim != eqn.params["axis"] or not at.is_plain or name not in FILLS:
        return None
    array = s.array(value, at, eqn)
    fill, reverse, dim = fill_of(name, array.dtype), eqn.params["reverse"], at.dim
    array = _compat.bind(eqn, [s.axis.counting(array, at, value.shape, fill)])[0]
    edge = 0 if reverse else array.shape[dim] - 1
    total = lax.slice_in_dim(array, edge, edge + 1, axis=dim)
    with s.sending(SUMS, eqn, s.axis.size * total.size * total.dtype.itemsize):
        totals = lax.all_gather(total, s.axis.name)
    devices = lax.broadcasted_iota(jnp.int32, totals.shape, 0)
    is_before = devices > s.axis.index if reverse else devices < s.axis.index
    totals = jnp.where(is_before, totals, jnp.asarray(fill, totals.dtype))
    join, reduce = JOINS[name]
    return [Value(value.shape, join(array, reduce(totals, axis=0).astype(array.dtype)), at)]


JOINS: dict[str, tuple[Any, Any]] = {
    "cumsum": (lax.add, jnp.sum),
    "cumprod": (lax.mul, jnp.prod),
    "cummax": (lax.max, jnp.max),
    "cummin": (lax.min, jnp.min),
}


# -- windows: slices, shifts and convolutions take a halo from the neighbours


def windowed(
    s: Splitter,
    eqn: JaxprEqn,
    value: Value,
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
    array, size = s.array(value, at, eqn), value.shape[at.dim]
    halo = sum(s.axis.reach(size, first, step, read))
    is_far = halo > 2 * s.axis.block(size)
    sent = value.nbytes // size * (size if is_far else halo)
    with s.sending(OTHERS if is_far else HALO, eqn, sent):
        return s.axis.window(array, at.dim, size, first, step, read, fill)


def sliced(s: Splitter, eqn: JaxprEqn, operands: list[Value], places: Places) -> Any:
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
    return [Value(shape, lax.slice(array, starts, limits, strides), at)]


def _tokens(s: Splitter, eqn: JaxprEqn, value: Value, at: Blocks, numbers: Array) -> Array:
    """Returns a few tokens, whole: each comes from the device that has it."""
    here = numbers - s.axis.index * s.axis.block(value.shape[at.dim])
    # A negative index would count from the end.
    here = jnp.where(here < 0, value.shape[at.dim], here)
    array = s.array(value, at, eqn)
    rows = jnp.take(array, here, axis=at.dim, mode="fill", fill_value=0)
    with s.sending(TOKENS, eqn, rows.size * rows.dtype.itemsize):
        return s.axis.summed(rows)


def _unless_few(s: Splitter, eqn: JaxprEqn, value: Value) -> Value:
    """Returns a value in blocks, or whole if it has fewer tokens than there are devices."""
    if value.at is None or value.at.length(value.shape) >= s.axis.size:
        return value
    return Value(value.shape, s.array(value, None, eqn, TOKENS))


def taken_apart(s: Splitter, eqn: JaxprEqn, operands: list[Value], places: Places) -> Any:
    (value,), (at,), first = operands, places, 0
    if at is None or at.dim != eqn.params["axis"] or not at.is_plain:
        return None
    parts: list[Value] = []
    for var in eqn.outvars:
        shape = type_of(var).shape
        array = windowed(s, eqn, value, at, shape[at.dim], first)
        parts.append(_unless_few(s, eqn, Value(shape, array, Blocks(at.dim))))
        first += shape[at.dim]
    return parts


def padded(s: Splitter, eqn: JaxprEqn, operands: list[Value], places: Places) -> Any:
    (value, fill), (at, _), config = operands, places, list(eqn.params["padding_config"])
    if at is None or config[at.dim] == (0, 0, 0) or not at.is_plain:
        return None
    dim, shape = at.dim, type_of(eqn.outvars[0]).shape
    low, _, interior = config[dim]
    if interior:  # between the elements of each block
        if low > interior or shape[dim] != value.shape[dim] * (interior + 1):
            return None
        if value.shape[dim] % s.axis.size:
            return None
        array = s.array(value, at, eqn)
        config[dim] = (low, interior - low, interior)
    else:
        array = windowed(s, eqn, value, at, shape[dim], -low, fill=fill.array)
        config[dim] = (0, 0, 0)
    return [Value(shape, lax.pad(array, fill.array, config), Blocks(dim))]


def joined(s: Splitter, eqn: JaxprEqn, operands: list[Value], places: Places) -> Any:
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
    return [Value(shape, result, at)]


def reversed_(s: Splitter, eqn: JaxprEqn, operands: list[Value], places: Places) -> Any:
    (value,), (at,), size = operands, places, s.axis.size
    if at is None or at.dim not in eqn.params["dimensions"]:
        return None
    if value.shape[at.dim] % size or not at.is_plain:
        return None
    array = _compat.bind(eqn, [s.array(value, at, eqn)])[0]
    with s.sending(HALO, eqn, value.nbytes // size):
        pairs = [(device, size - 1 - device) for device in range(size)]
        return [Value(value.shape, lax.ppermute(array, s.axis.name, pairs), at)]


def convolved(s: Splitter, eqn: JaxprEqn, operands: list[Value], places: Places) -> Any:
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
    out_array = _compat.bind(eqn, [array, s.array(kernel, None, eqn)])[0]
    return [_unless_few(s, eqn, Value(shape, out_array, Blocks(dim)))]


def pooled(s: Splitter, eqn: JaxprEqn, operands: list[Value], places: Places) -> Any:
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
    return [_unless_few(s, eqn, Value(shape, _compat.bind(eqn, [array])[0], Blocks(dim)))]


# -- elements by their place


def picked(s: Splitter, eqn: JaxprEqn, operands: list[Value], places: Places) -> Any:
    """Elements of tokens whose places are whole: each comes from the device that has it."""
    (value, index), (at, other) = operands, places
    numbers = eqn.params["dimension_numbers"]
    if at is None or other is not None or at.dim not in numbers.start_index_map:
        return None
    if eqn.params["slice_sizes"][at.dim] != 1 or not at.is_plain:
        return None
    array, length = s.array(value, at, eqn), value.shape[at.dim]
    indices, column = s.array(index, None, eqn), numbers.start_index_map.index(at.dim)
    is_column = lax.broadcasted_iota(jnp.int32, indices.shape, indices.ndim - 1) == column
    clipped = jnp.clip(indices, 0, length - 1)
    mode = eqn.params["mode"]
    is_clip = mode == lax.GatherScatterMode.CLIP
    here = clipped - (s.axis.index * s.axis.block(length)).astype(indices.dtype)
    outside = (indices < 0) | (indices >= length)
    missing = jnp.any(outside & is_column, -1)
    here = jnp.where(is_column & (is_clip | ~outside), here, jnp.where(is_column, -1, indices))
    params = {"mode": lax.GatherScatterMode.FILL_OR_DROP, "fill_value": 0}
    own = eqn.replace(params={**eqn.params, **params})
    with s.sending(TOKENS, eqn, _bytes_of(eqn)):
        out = s.axis.summed(_compat.bind(own, [array, here])[0])
    if mode == lax.GatherScatterMode.FILL_OR_DROP and jnp.issubdtype(out.dtype, jnp.floating):
        batch = [d for d in range(out.ndim) if d not in numbers.offset_dims]
        missing = lax.broadcast_in_dim(missing, out.shape, batch)
        fill = eqn.params["fill_value"]
        out = jnp.where(missing, jnp.asarray(jnp.nan if fill is None else fill, out.dtype), out)
    return [Value(type_of(eqn.outvars[0]).shape, out)]


def cut_out(s: Splitter, eqn: JaxprEqn, operands: list[Value], places: Places) -> Any:
    """A slice that begins at a computed place."""
    (value, *starts), (at, *_) = operands, places
    shape = type_of(eqn.outvars[0]).shape
    if at is None or value.shape[at.dim] == shape[at.dim] or not at.is_plain:
        return None
    indices, dim = [s.array(v, None, eqn) for v in starts], at.dim
    first = jnp.clip(indices[dim], 0, value.shape[dim] - shape[dim])
    rows = _tokens(s, eqn, value, at, first + jnp.arange(shape[dim], dtype=first.dtype))
    indices[dim] = jnp.zeros_like(indices[dim])
    return [Value(shape, lax.dynamic_slice(rows, indices, eqn.params["slice_sizes"]))]


def scattered(s: Splitter, eqn: JaxprEqn, operands: list[Value], places: Places) -> Any:
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
        return [Value(value.shape, _compat.bind(eqn, [array, here, more])[0], at)]
    if at is not None or eqn.primitive.name not in ("scatter_add", "scatter-add"):
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
    with s.sending(SUMS, eqn, _bytes_of(eqn)):
        return [Value(value.shape, whole + s.axis.summed(sums))]


# -- matmuls, attention among them


def multiplied(s: Splitter, eqn: JaxprEqn, operands: list[Value], places: Places) -> Any:
    """A matmul. Its batch dimensions and free ones stay as they are; over tokens, it sums.

    Where tokens meet tokens, as queries and keys do, the side whose tokens something sums over next
    is gathered; or both exchange tokens for heads, where that sends less.
    """
    contract, batch = eqn.params["dimension_numbers"]
    shape = type_of(eqn.outvars[0]).shape
    maps = parallel(eqn)
    for k, at in enumerate(places):
        if at and at.dim in batch[k]:
            result = at.moved(maps[k])
            assert result is not None
            outs = s.bound(eqn, operands, _both(result, maps), [result], HEADS)
            return [_at_home(s, eqn, outs[0])]
    summed = [at is not None and at.dim in contract[k] for k, at in enumerate(places)]
    k = 0 if summed[0] else 1
    if any(summed):
        at, other = places[k], places[1 - k]
        assert at is not None
        there = contract[1 - k][list(contract[k]).index(at.dim)]
        if other is not None and other.dim != there:  # the other's tokens are not summed over
            places = [None if here else at for here, at in zip(summed, places, strict=True)]
            result = other.moved(maps[1 - k])
            return s.bound(eqn, operands, places, [result], KEYS)
        both = [at, at]
        both[1 - k] = dataclasses.replace(at, dim=there, home=None)
        arrays = [
            s.axis.counting(s.array(v, place, eqn), place, v.shape, 0)
            for v, place in zip(operands, both, strict=True)
        ]
        # A weight that mixes tokens returns tokens, along a dimension of its own.
        mixed = [] if other else [d for d in maps[1 - k].values() if shape[d] >= s.axis.size]
        with s.sending(OTHERS if mixed else SUMS, eqn, _bytes_of(eqn)):
            out = s.axis.summed(_compat.bind(eqn, arrays)[0])
        at = Blocks(mixed[0]) if mixed else None
        return [Value(shape, s.axis.cut(out, at) if at else out, at)]
    if None in places:
        return None
    moved = [at and at.moved(dims) for at, dims in zip(places, maps, strict=True)]
    k = _summed_next(s, eqn, [at.dim for at in moved if at])
    if heads := _heads(s, operands, places, batch[0], moved, k):
        return s.bound(eqn, operands, _both(heads, maps), [heads], HEADS)
    kept: list[Blocks | None] = [at if i != k else None for i, at in enumerate(places)]
    return s.bound(eqn, operands, kept, [moved[1 - k]], KEYS)


def _both(result: Blocks, maps: Sequence[dict[int, int]]) -> list[Blocks | None]:
    return [result.back(dims) for dims in maps]


def _at_home(s: Splitter, eqn: JaxprEqn, value: Value) -> Value:
    """Returns a value in blocks of tokens, if it was in blocks of heads."""
    if value.at is None or value.at.home is None:
        return value
    home = value.at.home
    return Value(value.shape, s.array(value, home, eqn, HEADS), home)


def _heads(
    s: Splitter,
    operands: Sequence[Value],
    places: Places,
    batch: Sequence[int],
    moved: Places,
    keys: int,
) -> Blocks | None:
    """Returns blocks of heads for the result of queries and keys, if to exchange sends less.

    Keys and values, gathered, are 2 K on each device. Exchanged, Q, K, V and the result are
    2 (Q + K) / size.
    """
    even = [i for i, dim in enumerate(batch) if operands[0].shape[dim] % s.axis.size == 0]
    if not even or any(at is None or not at.is_plain for at in places):
        return None
    if sum(v.nbytes for v in operands) / s.axis.size >= operands[keys].nbytes:
        return None
    return Blocks(even[-1], home=moved[1 - keys])


def _summed_next(s: Splitter, eqn: JaxprEqn, dims: Sequence[int]) -> int:
    """Returns which of two dimensions of a result something sums over first."""
    steps = [_steps_to_sum(s, eqn.outvars[0], dim) for dim in dims]
    return min(range(len(dims)), key=lambda k: (steps[k], -k))


def _steps_to_sum(s: Splitter, var: Var, dim: int) -> float:
    """Counts the operations from a value to one that sums over a dimension of it."""
    ahead = deque([(0, var, dim, tuple(s.callers))])
    seen = set[tuple[Var, int]]()
    while ahead and len(seen) < 500:
        steps, var, dim, callers = ahead.popleft()
        jaxpr, caller = callers[-1]
        if (var, dim) in seen:
            continue
        seen.add((var, dim))
        if caller is not None and caller.primitive.name not in ("scan", "while"):
            outs = zip(jaxpr.outvars, caller.outvars, strict=False)
            ahead.extend((steps, o, dim, callers[:-1]) for v, o in outs if v is var)
        for eqn, k in s.readers(jaxpr).get(var, []):
            name, params = eqn.primitive.name, eqn.params
            axes = params.get("axes", ()) if name.startswith(("reduce_", "arg")) else ()
            if name == "dot_general":
                axes = params["dimension_numbers"][0][k]
            if dim in axes:
                return steps
            if name in CONTROL and name not in ("while", "cond"):
                inner, _ = _compat.inner_jaxpr(eqn)
                is_row = name == "scan" and k >= sum(_compat.scan_counts(params))
                below = inner.invars[k], dim - is_row
                ahead.append((steps, *below, (*callers, (inner, eqn))))
            elif (at := s.after(eqn, k, Blocks(dim))) is not None:
                ahead.extend((steps + 1, out, at.dim, callers) for out in eqn.outvars)
    return math.inf


def fused_attention(s: Splitter, eqn: JaxprEqn, operands: list[Value], places: Places) -> Any:
    """cuDNN's attention, forward or backward: on all tokens of this device's share of the heads."""
    tokens = _compat.sequence_dim(eqn)
    heads, size = 3 - tokens, s.axis.size
    shapes = [type_of(v).shape for v in (*eqn.invars, *eqn.outvars)]
    if any(shape[heads] % size for shape in shapes[:3]):
        return None

    def place(shape: tuple[int, ...]) -> Blocks | None:
        # Statistics of the softmax, and a bias, have heads first.
        if len(shape) == 3:
            return Blocks(1)
        is_bias = len(shape) == 4 and shape == shapes[3]
        dim = 1 if is_bias else heads
        return Blocks(dim) if len(shape) == 4 and shape[dim] > 1 else None

    count = len(eqn.invars)
    outs = s.bound(
        eqn, operands, [*map(place, shapes[:count])], [*map(place, shapes[count:])], HEADS
    )
    home = Blocks(tokens)
    return [
        Value(v.shape, s.array(v, home, eqn, HEADS), home) if v.at == Blocks(heads) else v
        for v in outs
    ]


# -- the pass


def _bytes_of(eqn: JaxprEqn) -> int:
    return nbytes(eqn.outvars)


def rule_of(name: str) -> Rule | None:
    return fused_attention if name.startswith(_compat.FUSED_ATTENTION) else RULES.get(name)


RULES: dict[str, Rule] = {
    **dict.fromkeys(FILLS, reduced),
    **dict.fromkeys(JOINS, accumulated),
    **dict.fromkeys(SCATTERS, scattered),
    **{name: pooled for name in FILLS if "window" in name},
    "slice": sliced,
    "split": taken_apart,
    "pad": padded,
    "concatenate": joined,
    "rev": reversed_,
    "conv_general_dilated": convolved,
    "gather": picked,
    "dynamic_slice": cut_out,
    "dot_general": multiplied,
}


def split_sequences(
    loss: Loss,
    axis: str,
    size: int,
    dims: Sequence[int | None],
    may_stay: Sequence[bool],
    most_gathered: float,
) -> Loss:
    """Returns a loss of which each device of a mesh axis computes its block of the tokens.

    `dims` says which dimension of each argument is in blocks. The results are whole, but leaves of
    the aux that `may_stay` in blocks: `out_dims` says along which dimension they are.
    """
    splitter = Splitter(Axis(axis, size), CONTROL, rule_of, most_gathered)
    params, out_dims = len(loss.params), list[int | None]()
    variables = loss.jaxpr.invars
    places: list[Blocks | None] = [None] * len(variables)
    for k, dim in enumerate(dims, params):
        places[k] = None if dim is None else Blocks(dim)
    shapes = [type_of(v).shape for v in variables]
    pairs = zip(variables, shapes, places, strict=True)
    types = [v.aval.update(shape=splitter.axis.local(shape, at)) for v, shape, at in pairs]

    def code(*arrays: Array) -> list[Array]:
        values = [Value(*each) for each in zip(shapes, arrays, places, strict=True)]
        outs = splitter.run(loss.jaxpr, (), values)
        splitter.check(splitter.regions[0])
        out_dims.clear()
        results: list[Array] = []
        for value, stays in zip(outs, (False, *may_stay), strict=True):
            at = splitter.natural(value)
            is_even = at and at.is_plain and value.shape[at.dim] % size == 0
            at = at if stays and is_even and at and at.dim else None
            out_dims.append(at and at.dim)
            results.append(splitter.array(value, at, loss.jaxpr.eqns[-1], "an output"))
        return results

    result = loss.retraced(code, *types)
    notes = _notes(axis, splitter.regions[0].sent)
    return dataclasses.replace(result, out_dims=tuple(out_dims[1:])).noting(*notes)


def _notes(axis: str, sent: Sequence[Sent]) -> list[str]:
    """Says what is sent for tokens, most first, and by which operations if they have no rule."""
    totals = Counter[str]()
    for each in sent:
        totals[f"all of an operand of {each.place}" if each.what == OTHERS else each.what] += (
            each.nbytes
        )
    return [
        f"{axis}: each device receives {human_bytes(nbytes)} of {what} in forward"
        for what, nbytes in totals.most_common()
    ]
