"""Views of a stack that stays sharded."""

from collections.abc import Callable, Iterable

from jax import Array, lax
from jax.extend.core import JaxprEqn

from zerojax._engine.ir import Dims, Kind, Shard, View, unique
from zerojax._jaxpr import Atom, Var, is_var, type_of

# [Note: views]
# Frozen (`stop_gradient`), sliced, indexed or reshaped into groups, a stack is still a stack of
# the same layers. Such an equation is not run on the full stack, which would have to be gathered
# for it. It becomes a view of the shard, and the loop over the result gathers layer by layer. A
# view may change only the dimensions before `fixed`, the sharded one.

ViewRule = Callable[[JaxprEqn, int], list[View] | None]


def views(eqn: JaxprEqn, fixed: int) -> list[View] | None:
    """Returns each result of `eqn` as a view of its operand, or None where it is not one that
    leaves the dimensions from `fixed` on as they are."""
    rule = _RULES.get(eqn.primitive.name)
    return rule(eqn, fixed) if rule else None


def _stop_gradient(eqn: JaxprEqn, fixed: int) -> list[View]:
    return [View(lax.stop_gradient, _dims(eqn), stops=True)]


def _slice(eqn: JaxprEqn, fixed: int) -> list[View] | None:
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * len(starts)
    ends = type_of(eqn.invars[0]).shape
    parts = zip(starts, limits, ends, strides, strict=True)
    sliced = [d for d, (a, b, end, step) in enumerate(parts) if (a, b, step) != (0, end, 1)]
    if any(d >= fixed for d in sliced):
        return None

    def apply(x: Array) -> Array:  # a shard is smaller from `fixed` on
        return lax.slice(x, starts, (*limits[:fixed], *x.shape[fixed:]), strides)

    return [View(apply, _dims(eqn, *sliced))]


def _squeeze(eqn: JaxprEqn, fixed: int) -> list[View] | None:
    gone = eqn.params["dimensions"]
    if fixed in gone:
        return None
    return [View(lambda x: lax.squeeze(x, gone), tuple(d for d in _dims(eqn) if d not in gone))]


def _reshape(eqn: JaxprEqn, fixed: int) -> list[View] | None:
    old, new = type_of(eqn.invars[0]).shape, eqn.params["new_sizes"]
    moved = fixed + len(new) - len(old)
    if moved < 0 or new[moved:] != old[fixed:] or eqn.params["dimensions"] is not None:
        return None
    while fixed and moved and old[fixed - 1] == new[moved - 1]:
        fixed, moved = fixed - 1, moved - 1  # further dimensions that stay as they are
    kept = len(new) - moved

    def apply(x: Array) -> Array:
        return x.reshape(*new[:moved], *x.shape[x.ndim - kept :])

    return [View(apply, (*[None] * moved, *range(fixed, len(old))))]


def _rev(eqn: JaxprEqn, fixed: int) -> list[View] | None:
    reversed_dims = eqn.params["dimensions"]
    if max(reversed_dims, default=0) >= fixed:
        return None
    return [View(lambda x: lax.rev(x, reversed_dims), _dims(eqn))]


def _split(eqn: JaxprEqn, fixed: int) -> list[View] | None:
    sizes, dim = eqn.params["sizes"], eqn.params["axis"]

    def part(k: int) -> View:
        return View(lambda x: lax.split(x, sizes, dim)[k], _dims(eqn, dim))

    return [part(k) for k in range(len(sizes))] if dim < fixed else None


def _unstack(eqn: JaxprEqn, fixed: int) -> list[View] | None:
    dim = eqn.params["axis"]
    dims = tuple(d for d in _dims(eqn) if d != dim)

    def part(k: int) -> View:
        return View(lambda x: lax.index_in_dim(x, k, dim, keepdims=False), dims)

    return [part(k) for k in range(len(eqn.outvars))] if dim < fixed else None


def _dims(eqn: JaxprEqn, *changed: int) -> Dims:
    """Returns the operand's dimensions, None for those that are changed."""
    return tuple(None if d in changed else d for d in range(type_of(eqn.invars[0]).ndim))


_RULES: dict[str, ViewRule] = {
    "stop_gradient": _stop_gradient,
    "slice": _slice,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "rev": _rev,
    "split": _split,
    "unstack": _unstack,
}


class Readers:
    """The equations that read each variable (None: the caller), casts and constraints followed."""

    def __init__(self) -> None:
        self.readers: dict[Var, list[JaxprEqn | None]] = {}
        self.named: dict[Var, Var] = {}  # casts of shards are the shards

    def find(self, eqns: Iterable[JaxprEqn], outvars: Iterable[Atom]) -> None:
        for eqn in eqns:
            for var in unique(self.named.get(v, v) for v in eqn.invars if is_var(v)):
                if _passes_on(eqn):
                    self.named[eqn.outvars[0]] = var
                else:
                    self.readers.setdefault(var, []).append(eqn)
        for var in filter(is_var, outvars):
            self.readers.setdefault(self.named.get(var, var), []).append(None)

    def name(self, atom: Atom) -> Atom:
        return self.named.get(atom, atom) if is_var(atom) else atom

    def of(self, atom: Atom) -> list[JaxprEqn | None]:
        name = self.name(atom)
        return self.readers.get(name, []) if is_var(name) else []

    def viewed(self, eqn: JaxprEqn, kind: Kind) -> list[Shard] | None:
        """Returns the results as shards, where `eqn` makes views and shards are better.

        They are not where the operand is gathered for another reader anyway: one gather serves
        both.
        """
        if not isinstance(kind, Shard) or not (found := views(eqn, kind.cut.fixed)):
            return None
        scanned = self._is_scanned(eqn.outvars[0])
        if not scanned and self._is_gathered_too(eqn, kind, found[0].stops):
            return None
        return [Shard(kind.root, kind.cut.moved(view.dims), (*kind.views, view)) for view in found]

    def _is_gathered_too(self, eqn: JaxprEqn, kind: Shard, stops: bool) -> bool:
        """Whether the operand is also read as it is, or both frozen and not."""
        readers = self.of(eqn.invars[0])
        if stops and len(readers) > 1:
            return True
        return not all(reader and views(reader, kind.cut.fixed) for reader in readers)

    def _is_scanned(self, var: Var) -> bool:
        readers = self.of(var)
        return bool(readers) and all(r and r.primitive.name == "scan" for r in readers)


def is_cast(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "convert_element_type"


def _passes_on(eqn: JaxprEqn) -> bool:
    """Whether the result of `eqn` for a shard is that shard."""
    return is_cast(eqn) or eqn.primitive.name == "sharding_constraint"
