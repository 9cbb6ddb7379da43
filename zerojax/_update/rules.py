"""How layers pass through one equation of an update.

[Note: one layer at a time] An update is traced twice, with whole stacks of L layers and with stacks
of one layer. Where both traces have the same equations, each value of the first has a partner in
the second, and a label says how the two are related, whichever layer the second one is given:

- SAME: they are equal.
- a dimension: the second is one layer of the first, along it.
- MIXED: neither is known to hold. An equation without a rule here gives that.

So a result that is labelled 0 may be computed layer by layer. Numbers that a trace took from a
shape (the divisor of a mean over a stack) are literals that differ, and mix.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from zerojax._kernel.jaxprs import Atom, is_var, type_of

SAME, MIXED = "same", "mixed"
Label = int | str
Pair = tuple[Atom, Atom]  # a value of the trace of L layers, and its partner in that of one


def _named(names: str) -> frozenset[str]:
    return frozenset(names.split())


ELEMENTWISE = _named("""
abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clamp conj
convert_element_type copy copy_p cos cosh device_put digamma div eq erf erf_inv erfc exp exp2
expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg
nextafter not optimization_barrier or population_count pow real reduce_precision rem round rsqrt
select_n sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin sinh
sqrt square stop_gradient sub tan tanh xor
""")
REDUCTIONS = _named("""
argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor
""")
ALONG = _named("""
cumlogsumexp cummax cummin cumprod cumsum sort
""")


def label(atom: Atom, one: Atom, known: dict[Any, Label]) -> Label:
    """Returns the label of an operand."""
    if is_var(atom) and is_var(one):
        return known[atom]
    if is_var(atom) or is_var(one):
        return MIXED
    a, b = np.asarray(atom.val), np.asarray(one.val)
    same = (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())  # NaN is NaN
    return SAME if same else MIXED


def through(full: JaxprEqn, one: JaxprEqn, labels: Sequence[Label]) -> list[Label]:
    """Returns the labels of an equation's results, from those of its operands."""
    if MIXED in labels:
        return [MIXED] * len(full.outvars)
    if full.primitive.name == "optimization_barrier":
        found: list[Label] = list(labels)
    elif all(label == SAME for label in labels):
        found = [_made(full, one, k) for k in range(len(full.outvars))]
    else:
        found = [_moved(full, labels)] * len(full.outvars)
    pairs = zip(found, full.outvars, one.outvars, strict=True)
    return [found if agrees(found, v, w) else MIXED for found, v, w in pairs]


def agrees(label: Label, full: Atom, one: Atom) -> bool:
    """Whether the shapes of two partners are as their label has them."""
    a, b = type_of(full).shape, type_of(one).shape
    if isinstance(label, int):
        if not label < len(a) == len(b) or (a[label] <= b[label] != 1):
            return False
        return b == (*a[:label], b[label], *a[label + 1 :])
    return label == MIXED or a == b


def _made(full: JaxprEqn, one: JaxprEqn, k: int) -> Label:
    """Returns the label of a result whose operands are the same in both traces."""
    a, b = type_of(full.outvars[k]).shape, type_of(one.outvars[k]).shape
    name = full.primitive.name
    if a == b:
        return SAME if str(full.params) == str(one.params) else MIXED
    if len(a) != len(b) or name not in ("broadcast_in_dim", "iota"):
        return MIXED
    dim = next(d for d in range(len(a)) if a[d] != b[d])
    if name == "iota":
        return MIXED if dim == full.params["dimension"] else dim
    dims = full.params["broadcast_dimensions"]
    varies = dim in dims and type_of(full.invars[0]).shape[dims.index(dim)] != 1
    return MIXED if varies else dim


def _moved(full: JaxprEqn, labels: Sequence[Label]) -> Label:
    """Returns where the layers of an equation's operands are in its result."""
    name, params = full.primitive.name, full.params
    shapes = [type_of(v).shape for v in full.invars]
    if name == "dot_general":
        return _of_product(params["dimension_numbers"], shapes, labels)
    dims = {label for label in labels if isinstance(label, int)}
    dim = dims.pop()
    if dims:
        return MIXED
    if name in ELEMENTWISE:
        # What has no layers is a number, or is repeated along them.
        others = [shape for shape, n in zip(shapes, labels, strict=True) if n == SAME and shape]
        return dim if all(shape[dim] == 1 for shape in others) else MIXED
    if labels[0] == SAME or (any(label != SAME for label in labels[1:]) and name != "concatenate"):
        return MIXED
    return _of_one(name, params, shapes, dim, type_of(full.outvars[0]).shape)


def _of_one(
    name: str, params: dict[str, Any], shapes: list[tuple[int, ...]], dim: int, out: tuple[int, ...]
) -> Label:
    """Returns where the layers are after an operation on one array."""
    shape = shapes[0]
    if name in REDUCTIONS:
        return MIXED if dim in params["axes"] else dim - sum(a < dim for a in params["axes"])
    if name in ALONG:
        return MIXED if dim in (params.get("axis"), params.get("dimension")) else dim
    match name:
        case "broadcast_in_dim":
            return params["broadcast_dimensions"][dim]
        case "transpose":
            return params["permutation"].index(dim)
        case "squeeze":
            return MIXED if dim in params["dimensions"] else dim - _before(params, dim)
        case "expand_dims":
            return dim + sum(d <= dim for d in params["dimensions"])
        case "reshape":
            return _reshaped(shape, dim, out)
        case "slice":
            whole = (params["start_indices"][dim], params["limit_indices"][dim]) == (0, shape[dim])
            return dim if whole and (params["strides"] or (1,) * len(shape))[dim] == 1 else MIXED
        case "dynamic_slice":
            return dim if params["slice_sizes"][dim] == shape[dim] else MIXED
        case "rev":
            return MIXED if dim in params["dimensions"] else dim
        case "pad":
            return dim if tuple(params["padding_config"][dim]) == (0, 0, 0) else MIXED
        case "concatenate":
            return MIXED if dim == params["dimension"] else dim
    return MIXED


def _before(params: dict[str, Any], dim: int) -> int:
    return sum(d < dim for d in params["dimensions"])


def _reshaped(shape: Sequence[int], dim: int, out: Sequence[int]) -> Label:
    """Returns the dimension that has the same elements before it, and as many in it."""
    before = math.prod(shape[:dim])
    for d, size in enumerate(out):
        if math.prod(out[:d]) == before and size == shape[dim]:
            return d
    return MIXED


def _of_product(numbers: Any, shapes: list[tuple[int, ...]], labels: Sequence[Label]) -> Label:
    """Returns where the layers are in a product: a batch dimension, or a free one of one factor."""
    contracting, batch = numbers
    if isinstance(labels[0], int) and isinstance(labels[1], int):
        pairs = list(zip(*batch, strict=True))
        both = (labels[0], labels[1])
        return pairs.index(both) if both in pairs else MIXED
    side = 0 if isinstance(labels[0], int) else 1
    used = {*contracting[side], *batch[side]}
    free: list[Label] = [d for d in range(len(shapes[side])) if d not in used]
    if labels[side] not in free:
        return MIXED
    others = len(shapes[0]) - len(contracting[0]) - len(batch[0]) if side else 0
    return len(batch[0]) + others + free.index(labels[side])
