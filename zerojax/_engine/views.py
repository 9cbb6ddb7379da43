"""What may be done to a stack of layers while it is still cut: each layer stays as it is.

Frozen (`stop_gradient`), sliced, indexed or reshaped into groups, a stack is held as shards as
before, and the loop over it gathers layer by layer. Done to the whole stack, it would be
gathered whole first.
"""

from collections.abc import Callable, Iterable
from typing import Any

from jax import lax
from jax.extend import core as jex_core

from zerojax._engine.ir import Atom, Dims, Kind, Shard, Var, View, unique
from zerojax._jaxpr import is_var

Array = Any


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
    "stop_gradient": _stop_gradient,
    "slice": _slice,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "rev": _rev,
    "split": _split,
    "unstack": _unstack,
}


class Readers:
    """Which equations read each variable (None: the caller), casts and constraints followed."""

    def __init__(self) -> None:
        self.readers: dict[Var, list[jex_core.JaxprEqn | None]] = {}
        self.named: dict[Var, Var] = {}  # casts of shards are the shards

    def find(self, eqns: Iterable[jex_core.JaxprEqn], outvars: Iterable[Atom]) -> None:
        for eqn in eqns:
            for var in unique(self.named.get(v, v) for v in eqn.invars if is_var(v)):
                if _passes_on(eqn):
                    self.named[eqn.outvars[0]] = var
                else:
                    self.readers.setdefault(var, []).append(eqn)
        for var in filter(is_var, outvars):
            self.readers.setdefault(self.named.get(var, var), []).append(None)

    def of(self, atom: Atom) -> list[jex_core.JaxprEqn | None]:
        return self.readers.get(self.named.get(atom, atom), []) if is_var(atom) else []

    def viewed(self, eqn: jex_core.JaxprEqn, kind: Kind) -> list[Shard] | None:
        """The results as shards, where `eqn` leaves layers as they are and shards are better."""
        if not isinstance(kind, Shard) or not (found := views(eqn, kind.cut.dim)):
            return None
        if not self._is_scanned(eqn.outvars[0]) and self._is_gathered_too(
            eqn, kind, found[0].stops
        ):
            return None  # one gather, for this and for the others
        return [Shard(kind.root, kind.cut.moved(view.dims), (*kind.views, view)) for view in found]

    def _is_gathered_too(self, eqn: jex_core.JaxprEqn, kind: Shard, stops: bool) -> bool:
        """Whether what `eqn` makes a view of is read as it is, or both frozen and not, as well."""
        readers = self.of(eqn.invars[0])
        if stops and len(readers) > 1:
            return True
        return not all(reader and views(reader, kind.cut.dim) for reader in readers)

    def _is_scanned(self, var: Var) -> bool:
        readers = self.of(var)
        return bool(readers) and all(r and r.primitive.name == "scan" for r in readers)


def is_cast(eqn: jex_core.JaxprEqn) -> bool:
    return eqn.primitive.name == "convert_element_type"


def _passes_on(eqn: jex_core.JaxprEqn) -> bool:
    """Whether of a shard this makes a shard."""
    return is_cast(eqn) or eqn.primitive.name == "sharding_constraint"
