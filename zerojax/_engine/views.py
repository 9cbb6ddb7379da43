"""What may be done to a stack of layers while it is still cut: each layer stays as it is.

Frozen (`stop_gradient`), sliced, indexed or reshaped into groups, a stack is held as shards as
before, and the loop over it gathers layer by layer. Done to the whole stack, it would be
gathered whole first.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jax import lax

Array = Any


Dims = tuple[int | None, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class View:
    """`apply` takes a shard to a shard, and what is whole to what is whole.

    Dimension k of the result is dimension `dims[k]` of the operand (None: it is made anew).
    """

    apply: Callable[[Array], Array]
    dims: Dims
    stops: bool = False  # whether no gradient passes


def views(eqn: Any, dim: int) -> list[View] | None:
    """For each result of `eqn`, how it comes from an operand cut along `dim`; None if it does
    not come from the shards alone."""
    rule = _RULES.get(eqn.primitive.name)
    return rule(eqn, dim) if rule else None


def _stop_gradient(eqn: Any, dim: int) -> list[View]:
    return [View(lax.stop_gradient, _dims(eqn), stops=True)]


def _slice(eqn: Any, dim: int) -> list[View] | None:
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * len(starts)
    ends = eqn.invars[0].aval.shape
    parts = zip(starts, limits, ends, strides, strict=True)
    cut = [d for d, (start, limit, end, n) in enumerate(parts) if (start, limit, n) != (0, end, 1)]
    if any(d >= dim for d in cut):
        return None
    apply = lambda x: lax.slice(x, starts, (*limits[:dim], *x.shape[dim:]), strides)  # noqa: E731
    return [View(apply, _dims(eqn, *cut))]


def _squeeze(eqn: Any, dim: int) -> list[View] | None:
    gone = eqn.params["dimensions"]
    if dim in gone:
        return None
    return [View(lambda x: lax.squeeze(x, gone), tuple(d for d in _dims(eqn) if d not in gone))]


def _reshape(eqn: Any, dim: int) -> list[View] | None:
    old, new = eqn.invars[0].aval.shape, eqn.params["new_sizes"]
    moved = dim + len(new) - len(old)
    if moved < 0 or new[moved:] != old[dim:] or eqn.params["dimensions"] is not None:
        return None
    while dim and moved and old[dim - 1] == new[moved - 1]:
        dim, moved = dim - 1, moved - 1  # further dimensions that stay as they are
    kept = len(new) - moved
    apply = lambda x: x.reshape(*new[:moved], *x.shape[x.ndim - kept :])  # noqa: E731
    return [View(apply, (*[None] * moved, *range(dim, len(old))))]


def _rev(eqn: Any, dim: int) -> list[View] | None:
    turned = eqn.params["dimensions"]
    if max(turned, default=0) >= dim:
        return None
    return [View(lambda x: lax.rev(x, turned), _dims(eqn))]


def _split(eqn: Any, dim: int) -> list[View] | None:
    sizes, axis = eqn.params["sizes"], eqn.params["axis"]
    part = lambda k: lambda x: lax.split(x, sizes, axis)[k]  # noqa: E731
    return [View(part(k), _dims(eqn, axis)) for k in range(len(sizes))] if axis < dim else None


def _unstack(eqn: Any, dim: int) -> list[View] | None:
    axis = eqn.params["axis"]
    one = lambda k: lambda x: lax.index_in_dim(x, k, axis, keepdims=False)  # noqa: E731
    dims = tuple(d for d in _dims(eqn) if d != axis)
    return [View(one(k), dims) for k in range(len(eqn.outvars))] if axis < dim else None


def _dims(eqn: Any, *changed: int) -> Dims:
    """The operand's dimensions, None for those that are changed."""
    return tuple(None if d in changed else d for d in range(eqn.invars[0].aval.ndim))


_RULES: dict[str, Callable[[Any, int], list[View] | None]] = {
    "stop_gradient": _stop_gradient, "slice": _slice, "squeeze": _squeeze, "reshape": _reshape,
    "rev": _rev, "split": _split, "unstack": _unstack,
}  # fmt: skip
