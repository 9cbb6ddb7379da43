"""Rules for operations that mix tokens: matmuls, sums, windows, and elements by their place.

A rule returns the results of an equation; None where it does not apply.
"""

# pyright: strict, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import dataclasses
import functools
import itertools
import math
from collections import deque
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import JaxprEqn, Var
from jax.typing import ArrayLike, DTypeLike

from zerojax import _compat
from zerojax._jaxprs import Eqn, nbytes, params_of, primitives, type_of, with_params
from zerojax._parallel import SCATTERS, parallel
from zerojax._passes.block_runner import (
    HALO,
    HEADS,
    KEYS,
    OTHERS,
    SINGLE,
    TOTALS,
    BlockRunner,
    Ruled,
    TokenRule,
    Tracked,
)
from zerojax._passes.blocks import Blocks, with_
from zerojax._passes.control import CONTROL, scoped
from zerojax._types import PyTree

# -- matmuls of tokens, and so attention


def multiplied(s: BlockRunner, eqn: JaxprEqn, operands: list[Tracked], _: Blocks) -> Ruled:
    """A matmul. Its batch dimensions and free ones stay as they are; over tokens, it sums.

    Where tokens meet tokens, as queries and keys do, the side whose tokens something sums over next
    is gathered; or both exchange tokens for heads, where that sends less.
    """
    contract, batch = Eqn(eqn).factors
    maps, places, size = parallel(eqn), list(map(s.natural, operands)), s.axis.size
    after = [at and at.moved(dims) for at, dims in zip(places, maps, strict=True)]
    shape = type_of(eqn.outvars[0]).shape
    for at, result, dims in zip(places, after, batch, strict=True):
        if at and result and at.dim in dims:
            both = [result.back(dims) for dims in maps]
            return [s.at_home(s.bound(eqn, operands, both, [result], HEADS)[0], eqn)]
    for k, at in enumerate(places):
        if at is None or at.dim not in contract[k]:
            continue
        other, there = places[1 - k], contract[1 - k][list(contract[k]).index(at.dim)]
        if other and other.dim != there:  # they meet none of the other's
            places[k], places[1 - k] = None, other if after[1 - k] else None
            return s.bound(eqn, operands, places, [after[1 - k]], KEYS)
        both = [at, at]
        both[1 - k] = dataclasses.replace(at, dim=there, home=None)
        arrays = [
            s.axis.counting(s.array(v, place, eqn), place, v.shape, 0)
            for v, place in zip(operands, both, strict=True)
        ]
        # A weight that mixes tokens returns tokens, along a dimension of its own.
        free = [d for old, d in maps[1 - k].items() if old not in batch[1 - k]]
        mixed = [] if other else [d for d in free if shape[d] >= size]
        with s.sending(OTHERS if mixed else TOTALS, eqn, nbytes(eqn.outvars)):
            out = s.axis.summed(_compat.bind(eqn, arrays)[0])
        return [s.cut(out, Blocks(mixed[0]) if mixed else None)]
    if None in places:
        return None
    steps = [_steps_to_sum(s, eqn.outvars[0], at.dim) for at in after if at]
    keys = min((0, 1), key=lambda k: (steps[k], -k))
    # Keys and values, gathered, are 2 K on each device. Exchanged for heads, Q, K, V and the result
    # are 2 (Q + K) / size.
    even = [i for i, dim in enumerate(batch[0]) if operands[0].shape[dim] % size == 0]
    is_cheap = sum(v.nbytes for v in operands) / size < operands[keys].nbytes
    if even and is_cheap and all(at and at.is_plain for at in places):
        heads = Blocks(even[-1], home=after[1 - keys])
        return s.bound(eqn, operands, [heads.back(dims) for dims in maps], [heads], HEADS)
    places[keys] = None
    return s.bound(eqn, operands, places, [after[1 - keys]], KEYS)


def _steps_to_sum(s: BlockRunner, var: Var, dim: int) -> float:
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
            name = eqn.primitive.name
            axes = Eqn(eqn).factors[0][k] if name == "dot_general" else Eqn(eqn).reduced
            if dim in (axes or ()):
                return steps
            if name in CONTROL and name not in ("while", "cond"):
                inner, _ = _compat.inner_jaxpr(eqn)
                is_row = name == "scan" and k in Eqn(eqn).parts(range(len(eqn.invars)))[2]
                below = inner.invars[k], dim - is_row
                ahead.append((steps, *below, (*callers, (inner, eqn))))
            elif (at := s.after(eqn, k, Blocks(dim))) is not None:
                ahead.extend((steps + 1, out, at.dim, callers) for out in eqn.outvars)
    return math.inf


# How the primitives of cuDNN's attention begin.
CUDNNS = (_compat.ATTENTION, _compat.ATTENTION.replace("fwd", "bwd"))


def fused_attention(s: BlockRunner, eqn: JaxprEqn, operands: list[Tracked], _: Blocks) -> Ruled:
    """cuDNN's attention, forward or backward: on all tokens of this device's share of the heads."""
    tokens = 1 + Eqn(eqn).layout
    heads, size = 3 - tokens, s.axis.size
    shapes = [type_of(v).shape for v in eqn.invars]
    # Over some of the heads, it would drop others.
    if any(shape[heads] % size for shape in shapes[:3]) or Eqn(eqn).dropout_rate:
        return None

    def place(k: int, shape: tuple[int, ...]) -> Blocks | None:
        # A bias, which comes after the keys and values, and statistics have heads first.
        if len(shape) == 3:
            return Blocks(1)
        at = Blocks(1) if k == BIAS else Blocks(heads, home=Blocks(tokens))
        return at if len(shape) == 4 and shape[at.dim] > 1 else None

    results = [type_of(v).shape for v in eqn.outvars]
    places = [place(*each) for each in enumerate(shapes)]
    return s.bound(eqn, operands, places, [place(*each) for each in enumerate(results)], HEADS)


BIAS = 3  # its place among the operands, and that of its gradient


# -- sums, and what is like one


def reduced(s: BlockRunner, eqn: JaxprEqn, operands: list[Tracked], at: Blocks) -> Ruled:
    (value,), name, axes = operands, eqn.primitive.name, Eqn(eqn).axes
    array = s.array(value, at, eqn)
    array = s.axis.counting(array, at, value.shape, neutral(name, array.dtype))
    is_best = name in ("reduce_max", "reduce_min") and jnp.issubdtype(array.dtype, jnp.floating)
    # XLA might compute it twice, with results that are not equal.
    array = lax.optimization_barrier(array) if is_best else array
    with s.sending(TOTALS, eqn, nbytes(eqn.outvars)):
        if name == "reduce_sum":
            out = s.axis.summed(_compat.bind(eqn, [array])[0])
            return [Tracked(out.shape, out)]
        part = _compat.bind(eqn, [lax.stop_gradient(array) if is_best else array])[0]
        parts = lax.all_gather(part, s.axis.name)
        out = _compat.bind(with_params(eqn, axes=(0,)), [parts])[0]
        out = s.axis.shared(array, axes, out) if is_best else out
    return [Tracked(out.shape, out)]


def neutral(name: str, dtype: DTypeLike) -> ArrayLike:
    """Returns the number that changes nothing in a reduction: that of no elements."""
    if name == "cumlogsumexp":  # the logarithm of a sum of nothing has no derivative
        return float(jnp.finfo(dtype).min) / 4
    reduce = getattr(lax, name.replace("window_", "").replace("cum", "reduce_"))
    with jax.ensure_compile_time_eval():
        return reduce(jnp.zeros(0, dtype), (0,))


def accumulated(s: BlockRunner, eqn: JaxprEqn, operands: list[Tracked], at: Blocks) -> Ruled:
    """A cumulative sum: of a block, and what all blocks before it add up to."""
    if not at.is_plain:
        return None
    (value,), name, reverse = operands, eqn.primitive.name, Eqn(eqn).reverse
    array = s.array(value, at, eqn)
    fill = neutral(name, array.dtype)
    array = _compat.bind(eqn, [s.axis.counting(array, at, value.shape, fill)])[0]
    total = lax.index_in_dim(array, 0 if reverse else -1, at.dim)
    with s.sending(TOTALS, eqn, s.axis.size * total.nbytes):
        totals = lax.all_gather(total, s.axis.name)
    devices = lax.broadcasted_iota(jnp.int32, totals.shape, 0)
    is_before = devices > s.axis.index if reverse else devices < s.axis.index
    totals = jnp.where(is_before, totals, jnp.asarray(fill, totals.dtype))
    of_devices = with_params(eqn, axis=0, reverse=False)
    out = JOINS[name](array, _compat.bind(of_devices, [totals])[0][-1])
    if name == "cumlogsumexp":
        out = jnp.where(out <= fill, -jnp.inf, out)
    return [Tracked(value.shape, out, at)]


JOINS: dict[str, Callable[..., Array]] = {
    "cumlogsumexp": jnp.logaddexp,
    "cumsum": lax.add,
    "cumprod": lax.mul,
    "cummax": lax.max,
    "cummin": lax.min,
}


# -- windows: slices, shifts and convolutions take a halo from the neighbours


def windowed(s: BlockRunner, eqn: JaxprEqn, operands: list[Tracked], at: Blocks) -> Ruled:
    """Element i of a result reads `width` elements, `dilation` apart, from `first + i * stride` on,
    of an operand with `every - 1` elements put between two of its own."""
    (value, *others), params, k = operands, Eqn(eqn), at.dim
    if not at.is_plain or any(map(s.natural, others)):
        return None
    size, shape, dim = s.axis.size, type_of(eqn.outvars[0]).shape, k
    first, stride, every, width, dilation = 0, 1, 1, 1, 1
    fill: ArrayLike = 0
    match eqn.primitive.name:
        case "slice":
            if shape[dim] < size:
                return rewritten(s, eqn, operands, at)
            first = params.start_indices[dim]
            stride = params.strides[dim] if params.strides else 1
        case "pad":
            low, _, interior = params.padding_config[dim]
            first, every, fill = -low, interior + 1, s.array(others[0], None, eqn)
        case "conv_general_dilated":
            lhs, rhs, out = params.dimension_numbers
            if dim not in lhs[2:]:
                return None
            k = lhs.index(dim) - 2
            dim, width = out[k + 2], others[0].shape[rhs[k + 2]]
            every, dilation = params.lhs_dilation[k], params.rhs_dilation[k]
        case name:
            fill = neutral(name, type_of(eqn.invars[0]).dtype)
            width = params.window_dimensions[k]
            every, dilation = params.base_dilation[k], params.window_dilation[k]
    if params.padding:
        first, stride = -params.padding[k][0], params.window_strides[k]
        if every > 1:
            return None
    block, length = s.axis.block(shape[dim]), value.shape[at.dim]
    starts = [-(-(first + i * block * stride) // every) for i in range(size)]
    read = -(-((block - 1) * stride + (width - 1) * dilation + 1) // every)
    halo = s.axis.reach(length, starts, read)
    if sum(halo) > 2 * s.axis.block(length):  # some of everyone's
        return None
    with s.sending(HALO, eqn, value.nbytes // length * sum(halo)):
        array = s.axis.window(s.array(value, at, eqn), at.dim, length, starts, read, fill)
    of_block = {"start_indices": 0, "limit_indices": read, "padding": (0, 0)}
    of_block["padding_config"] = (every - 1, block, every - 1) if every > 1 else (0, 0, 0)
    changed = params_of(eqn)
    changed = {name: with_(v, k, of_block[name]) for name, v in changed if name in of_block}
    arrays = [array, *(s.array(v, None, eqn) for v in others)]
    array = _compat.bind(with_params(eqn, **changed), arrays)[0]
    if every > 1:
        phases = [every - 1 + first + i * block - every * start for i, start in enumerate(starts)]
        array = lax.dynamic_slice_in_dim(array, s.axis.own(phases), block, dim)
    result = Tracked(shape, s.axis.harmless(array, Blocks(dim), shape), Blocks(dim))
    few = shape[dim] < size
    return [Tracked(shape, s.array(result, None, eqn, SINGLE)) if few else result]


def reversed_(s: BlockRunner, eqn: JaxprEqn, operands: list[Tracked], at: Blocks) -> Ruled:
    """What fills the last block is first then, and the rest moves up."""
    (value,), size, dim = operands, s.axis.size, at.dim
    if not at.is_plain:
        return None
    block = s.axis.block(value.shape[dim])
    fills = size * block - value.shape[dim]
    array = _compat.bind(eqn, [s.array(value, at, eqn)])[0]
    with s.sending(HALO, eqn, array.nbytes):
        array = lax.ppermute(array, s.axis.name, [(i, size - 1 - i) for i in range(size)])
        starts = [fills + i * block for i in range(size)]
        array = s.axis.window(array, dim, size * block, starts, block, 0)
    return [Tracked(value.shape, s.axis.harmless(array, at, value.shape), at)]


# -- what other operations do as well


def rewritten(s: BlockRunner, eqn: JaxprEqn, operands: list[Tracked], at: Blocks) -> Ruled:
    """Runs other operations of whole sequences in place of an equation."""
    code = functools.partial(REWRITTEN[eqn.primitive.name], eqn, at.dim)
    types = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in map(type_of, eqn.invars)]
    outer, s.instead = s.instead, s.instead or eqn
    with scoped(eqn):
        outs = s.run(*_compat.opened(jax.make_jaxpr(code)(*types)), operands)
    s.instead = outer
    return outs


def _few(eqn: JaxprEqn, dim: int, value: Array, *starts: Array) -> Array:
    """A slice of few tokens, or of tokens whose place is computed, as elements by their place."""
    shape, whole = type_of(eqn.outvars[0]).shape, value.shape[dim]
    if starts:
        numbers = jnp.clip(starts[dim], 0, whole - shape[dim]) + jnp.arange(shape[dim])
        starts = with_(starts, dim, jnp.zeros_like(starts[dim]))
        value = lax.dynamic_slice(value, starts, with_(shape, dim, whole))
    else:
        params = Eqn(eqn)
        first, limits = params.start_indices, params.limit_indices
        strides = params.strides or (1,) * len(shape)
        numbers = jnp.arange(first[dim], limits[dim], strides[dim])
        limits, strides = with_(limits, dim, whole), with_(strides, dim, 1)
        value = lax.slice(value, with_(first, dim, 0), limits, strides)
    return value.at[(slice(None),) * dim + (numbers,)].get(mode="clip")


def _slices(eqn: JaxprEqn, dim: int, value: Array) -> list[Array]:
    ends = [0, *itertools.accumulate(type_of(v).shape[dim] for v in eqn.outvars)]
    return [lax.slice_in_dim(value, *pair, axis=dim) for pair in itertools.pairwise(ends)]


def _joined(eqn: JaxprEqn, dim: int, *arrays: Array) -> Array:
    """Each operand, padded, from its first place on."""
    shape, offset = type_of(eqn.outvars[0]).shape, 0
    numbers = lax.broadcasted_iota(jnp.int32, shape, dim)
    result = jnp.zeros(shape, arrays[0].dtype)
    for array in arrays:
        around = offset, shape[dim] - offset - array.shape[dim], 0
        widths = with_(((0, 0, 0),) * len(shape), dim, around)
        padded = lax.pad(array, jnp.zeros((), array.dtype), widths)
        result = lax.select(numbers >= offset, padded, result)
        offset += array.shape[dim]
    return result


def _place_of_largest(eqn: JaxprEqn, dim: int, value: Array) -> Array:
    """The first one; of the smallest, for `argmin`."""
    axes, reduce = (dim,), getattr(lax, eqn.primitive.name.replace("arg", "reduce_"))
    value = lax.optimization_barrier(value)  # computed twice, it might differ
    numbers = lax.broadcasted_iota(type_of(eqn.outvars[0]).dtype, value.shape, dim)
    hits = (value == jnp.expand_dims(reduce(value, axes), axes)) | (value != value)
    return lax.reduce_min(jnp.where(hits, numbers, value.shape[dim]), axes)


REWRITTEN: dict[str, Callable[..., PyTree]] = {
    **dict.fromkeys(("argmax", "argmin"), _place_of_largest),
    **dict.fromkeys(("slice", "dynamic_slice"), _few),
    "concatenate": _joined,
    "split": _slices,
}


# -- elements by their place


def picked(s: BlockRunner, eqn: JaxprEqn, operands: list[Tracked], at: Blocks) -> Ruled:
    """Elements of tokens whose places are whole: each comes from the device that has it."""
    (value, index), params, other = operands, Eqn(eqn), s.natural(operands[1])
    if at.dim not in params.dimension_numbers.start_index_map:
        return None
    column = params.dimension_numbers.start_index_map.index(at.dim)
    length, shape = value.shape[at.dim], type_of(eqn.outvars[0]).shape
    if other is not None:
        # As in `x[jnp.arange(n), labels]`: those of tokens that a loss looks up by counting them.
        numbers, row = s.constant(index, column), other.dim
        if numbers is None or at != dataclasses.replace(other, dim=at.dim):
            return None
        counts = np.moveaxis(numbers, row, -1)
        if counts.shape[-1] != length or (counts != np.arange(length)).any():
            return None
        here = s.array(index, other, eqn)
        here = here.at[..., column].set(lax.broadcasted_iota(here.dtype, here.shape[:-1], row))
        out = _compat.bind(eqn, [s.array(value, at, eqn), here])[0]
        return [Tracked(shape, out, s.after(eqn, 1, other))]
    if params.slice_sizes[at.dim] != 1 or not at.is_plain:
        return None
    indices = s.array(index, None, eqn)
    if params.mode != lax.GatherScatterMode.FILL_OR_DROP:
        indices = indices.at[..., column].set(jnp.clip(indices[..., column], 0, length - 1))
    here, has = _here(s, indices, column, length)
    # The first device has what is nowhere.
    is_nowhere = (indices[..., column] < 0) | (indices[..., column] >= length)
    has = has | (is_nowhere & (s.axis.index == 0))
    batch = list(parallel(eqn)[1].values())
    many = [d for d in batch if shape[d] >= s.axis.size]
    out = _compat.bind(eqn, [s.array(value, at, eqn), here])[0]
    with s.sending(OTHERS if many else SINGLE, eqn, nbytes(eqn.outvars)):
        out = s.axis.summed(jnp.where(lax.broadcast_in_dim(has, shape, batch), out, 0))
    return [s.cut(out, Blocks(max(many, key=lambda d: shape[d])) if many else None)]


def _here(s: BlockRunner, indices: Array, column: int, length: int) -> tuple[Array, Array]:
    """Returns indices of tokens in this device's block, -1 for those it has not; which it has."""
    number, block = indices[..., column], s.axis.block(length)
    here = number - (s.axis.index * block).astype(number.dtype)
    has = (here >= 0) & (here < block) & (number < length)
    return indices.at[..., column].set(jnp.where(has, here, -1)), has


def torn(s: BlockRunner, eqn: JaxprEqn, operands: list[Tracked], at: Blocks) -> Ruled:
    """Tokens in chunks that end within a device's block: each chunk is split."""
    (value,), shape = operands, type_of(eqn.outvars[0]).shape
    first, done = math.prod(value.shape[: at.dim]), 1
    for dim, length in enumerate(shape):
        inside = first <= done and done * length <= first * at.length(value.shape)
        if inside and length >= s.axis.size and length % s.axis.size == 0:
            return [s.cut(s.array(value, None, eqn).reshape(shape), Blocks(dim))]
        done *= length
    return None


def scattered(s: BlockRunner, eqn: JaxprEqn, operands: list[Tracked], at: Blocks) -> Ruled:
    """Tokens added to what is whole, or single elements put into blocks of tokens."""
    value, index, updates = operands
    params, (of_value, place, moved) = Eqn(eqn), map(s.natural, operands)
    numbers = params.dimension_numbers
    if of_value:
        dims, is_whole = numbers.scatter_dims_to_operand_dims, place is None and moved is None
        drops = "FILL" in str(params.mode) and at.dim in numbers.inserted_window_dims
        if not (is_whole and drops and at.is_plain and at.dim in dims):
            return None
        here, _ = _here(s, s.array(index, None, eqn), dims.index(at.dim), value.shape[at.dim])
        arrays = [s.array(value, at, eqn), here, s.array(updates, None, eqn)]
        return [Tracked(value.shape, _compat.bind(eqn, arrays)[0], at)]
    rows = [d for d in range(len(updates.shape)) if d not in numbers.update_window_dims]
    if place is None and moved and moved.dim in rows:
        place = dataclasses.replace(moved, dim=rows.index(moved.dim), home=None)
    is_sum = eqn.primitive.name == "scatter-add"
    if not (is_sum and place) or place.dim in numbers.scatter_indices_batching_dims:
        return None
    moved = dataclasses.replace(place, dim=rows[place.dim], home=None)
    more = s.axis.counting(s.array(updates, moved, eqn), moved, updates.shape, 0)
    whole = s.array(value, None, eqn)
    sums = _compat.bind(eqn, [jnp.zeros_like(whole), s.array(index, place, eqn), more])[0]
    with s.sending(TOTALS, eqn, nbytes(eqn.outvars)):
        return [Tracked(value.shape, whole + s.axis.summed(sums))]


SUMMING = "reduce_sum reduce_prod reduce_and reduce_or reduce_max reduce_min"
WINDOWS = "slice pad conv_general_dilated reduce_window_sum reduce_window_max reduce_window_min"
MIXING: dict[str, TokenRule] = {
    **dict.fromkeys(REWRITTEN, rewritten),
    **dict.fromkeys(primitives(SUMMING), reduced),
    **dict.fromkeys(primitives(WINDOWS), windowed),
    **dict.fromkeys(JOINS, accumulated),
    **dict.fromkeys(SCATTERS, scattered),
    "rev": reversed_,
    "reshape": torn,
    "gather": picked,
}
