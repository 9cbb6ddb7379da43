"""Rules for matmuls of tokens, and so for attention."""

# pyright: strict, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import dataclasses
import math
from collections import deque
from collections.abc import Sequence

from jax.extend.core import JaxprEqn, Var

from zerojax import _compat
from zerojax._jaxprs import nbytes, type_of
from zerojax._passes.block_runner import (
    HEADS,
    KEYS,
    OTHERS,
    TOTALS,
    BlockRunner,
    Layouts,
    Ruled,
    Tracked,
)
from zerojax._passes.blocks import Blocks
from zerojax._passes.control import CONTROL
from zerojax._passes.parallel import parallel


def multiplied(s: BlockRunner, eqn: JaxprEqn, operands: list[Tracked], _: Blocks) -> Ruled:
    """A matmul. Its batch dimensions and free ones stay as they are; over tokens, it sums.

    Where tokens meet tokens, as queries and keys do, the side whose tokens something sums over next
    is gathered; or both exchange tokens for heads, where that sends less.
    """
    contract, batch = eqn.params["dimension_numbers"]
    shape = type_of(eqn.outvars[0]).shape
    maps, places = parallel(eqn), list(map(s.natural, operands))
    for k, at in enumerate(places):
        if at and at.dim in batch[k]:
            result = at.moved(maps[k])
            assert result is not None
            outs = s.bound(eqn, operands, _both(result, maps), [result], HEADS)
            return [s.at_home(outs[0], eqn)]
    summed = [at is not None and at.dim in contract[k] for k, at in enumerate(places)]
    k = 0 if summed[0] else 1
    if any(summed):
        at, other = places[k], places[1 - k]
        assert at is not None
        there = contract[1 - k][list(contract[k]).index(at.dim)]
        if other is not None and other.dim != there:  # they meet none of the other's
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
        free = [d for old, d in maps[1 - k].items() if old not in batch[1 - k]]
        mixed = [] if other else [d for d in free if shape[d] >= s.axis.size]
        with s.sending(OTHERS if mixed else TOTALS, eqn, nbytes(eqn.outvars)):
            out = s.axis.summed(_compat.bind(eqn, arrays)[0])
        return [s.cut(out, Blocks(mixed[0]) if mixed else None)]
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


def _heads(
    s: BlockRunner,
    operands: Sequence[Tracked],
    places: Layouts,
    batch: Sequence[int],
    moved: Layouts,
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


def _summed_next(s: BlockRunner, eqn: JaxprEqn, dims: Sequence[int]) -> int:
    """Returns which of two dimensions of a result something sums over first."""
    steps = [_steps_to_sum(s, eqn.outvars[0], dim) for dim in dims]
    return min(range(len(dims)), key=lambda k: (steps[k], -k))


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


# How the primitives of cuDNN's attention begin.
CUDNNS = (_compat.ATTENTION, _compat.ATTENTION.replace("fwd", "bwd"))


def fused_attention(s: BlockRunner, eqn: JaxprEqn, operands: list[Tracked], _: Blocks) -> Ruled:
    """cuDNN's attention, forward or backward: on all tokens of this device's share of the heads."""
    tokens = _compat.sequence_dim(eqn)
    heads, size = 3 - tokens, s.axis.size
    shapes = [type_of(v).shape for v in eqn.invars]
    # Over some of the heads, it would drop others.
    if any(shape[heads] % size for shape in shapes[:3]) or eqn.params["dropout_rate"]:
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
