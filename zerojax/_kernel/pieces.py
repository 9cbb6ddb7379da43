# pyright: strict
"""The pieces of a split jaxpr: shards and views of them, scopes and loops."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from jax import Array, lax
from jax.extend.core import Effect, JaxprEqn
from jax.typing import ArrayLike

from zerojax import _compat
from zerojax._jaxprs import Atom, Eqn, Var, common_path, is_var, reads, type_of, unique
from zerojax._kernel.travel import Cut, Held

Dims = tuple[int | None, ...]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, eq=False)  # compared by identity, like its function
class View:
    """A view of a stack that leaves its layers unchanged.

    `apply` maps a shard to a shard, and a full array to a full array. Dimension k of the result is
    dimension `dims[k]` of the operand (None: a new one).
    """

    apply: Callable[[Array], Array]
    dims: Dims
    stops: bool = False  # whether it stops the gradient


# The kinds of variables other than shards; None: a value of the main part.
WEIGHT = "weight"  # computed from weights and constants only
CONST = "const"  # computed from constants only

_RESHAPES = ("transpose", "reshape", "squeeze")


@dataclasses.dataclass(frozen=True)
class Shard:
    """A variable that stays sharded: the input that it comes from, the views taken of the input,
    and the sharding of the result."""

    root: Var
    cut: Cut
    views: tuple[View, ...] = ()

    def of(self, held: Held) -> Held:
        """Returns the value of this variable, from that of its root."""
        return held.map(self.view) if self.views else held

    def view(self, array: Array) -> Array:
        for one in self.views:
            array = one.apply(array)
        return array

    @property
    def is_frozen(self) -> bool:
        return any(view.stops for view in self.views)


Kind = Shard | str | None
InputKind = Cut | str | None  # of an input


@dataclasses.dataclass(frozen=True)
class Nested:
    """An equation with a split jaxpr inside."""

    split: "Split"
    operands: list[Shard | Atom]
    outvars: list[Var]

    @property
    def effects(self) -> frozenset[Effect]:
        return frozenset[Effect]().union(*(op.effects for op in self.split.main))


@dataclasses.dataclass(frozen=True)
class Scope(Nested):
    """A `jax.checkpoint` of the user's. Equal scopes, such as layers in a Python loop, share a
    split.

    A scope gathers its own weights, and gathers them again in backward. In the body of a loop its
    prefix is empty, because the loop gathers first.
    """

    policy: Callable[..., bool] | None
    prevent_cse: bool
    name: str = ""  # the name scope of all its equations


@dataclasses.dataclass(frozen=True)
class Loop(Nested):
    """A scan over stacked weights."""

    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    unroll: int | bool
    name: str = ""  # its name scope


Op = JaxprEqn | Scope | Loop  # of a main part


@dataclasses.dataclass(frozen=True)
class Split:
    """A jaxpr as prefix and main part. `kinds` has the kind of each input."""

    invars: list[Var]
    kinds: list[Kind]
    constants: dict[Var, ArrayLike]
    gathers: dict[Var, Shard]
    prefix: list[JaxprEqn]
    frontier: list[Var]
    main: list[Op]
    outvars: list[Atom]

    def renamed(self, paths: Mapping[Var, str]) -> "Split":
        """Returns the split with other paths for the parameters among its inputs."""

        def named(shard: Shard) -> Shard:
            path = paths.get(shard.root, shard.cut.path)
            return dataclasses.replace(shard, cut=dataclasses.replace(shard.cut, path=path))

        def with_names(op: Op) -> Op:
            if not isinstance(op, Nested):
                return op
            operands = [named(v) if isinstance(v, Shard) else v for v in op.operands]
            return dataclasses.replace(op, operands=operands)

        gathers = {var: named(shard) for var, shard in self.gathers.items()}
        return dataclasses.replace(self, gathers=gathers, main=[*map(with_names, self.main)])

    @property
    def loop_roots(self) -> list[Var]:
        """The inputs that loops and scopes of the main part need as shards."""
        return unique(s.root for s in shards_read(self.main))

    @property
    def read_last(self) -> list[Var]:
        """The gathered matrix that the main part reads last (a head), and vectors after it.

        Backward needs them first. There are none if a loop or scope that gathers for itself comes
        later, or a call, which reads all weights of a layer.
        """
        gathered = {var: var for var in self.gathers}
        for eqn in self.prefix:
            # Other results computed from a weight may be larger, and would be kept too.
            source = eqn.invars[0] if eqn.primitive.name in _RESHAPES else None
            if is_var(source) and source in gathered:
                gathered[eqn.outvars[0]] = gathered[source]
        found: list[Var] = []
        for op in reversed(self.main):
            weights = [gathered[v] for v in reads_of(op) if v in gathered]
            is_call = isinstance(op, JaxprEqn) and op.primitive.name in _compat.CALLS
            if gathers(op) or (is_call and weights) or any(type_of(v).ndim > 1 for v in found):
                break
            found += weights
        return [var for var in self.gathers if var in found]

    @property
    def ends_again(self) -> bool:
        """Whether backward runs the end of the main part again: a loss in chunks, in a scan or in
        scopes that gather nothing. It then needs no result of forward's end."""
        for op in reversed(self.main):
            if isinstance(op, Nested) or op.primitive.name == "scan":
                return not gathers(op)
        return False


def gathers(op: Op) -> bool:
    """Whether an op gathers weights for itself."""
    return isinstance(op, Loop) or any(shards_read([op]))


def split_of(scopes: Sequence[Scope]) -> Split:
    """Returns the split of equal scopes, with paths that hold for all of them: `params/*/w` if each
    scope has parameters of its own."""
    split = scopes[0].split
    paths: dict[Var, str] = {}
    for var, *operands in zip(split.invars, *(scope.operands for scope in scopes), strict=True):
        found = unique(operand.cut.path for operand in operands if isinstance(operand, Shard))
        if found:
            paths[var] = common_path(found)
    return split.renamed(paths)


def reads_of(op: Op) -> list[Var]:
    """Returns the variables that an op reads as values, not as shards."""
    if isinstance(op, Nested):
        return [v for v in op.operands if not isinstance(v, Shard) and is_var(v)]
    return reads(op)


def dtypes_of(split: Split) -> dict[Var, set[np.dtype]]:
    """Returns the dtypes in which each shard travels, here and inside loops and scopes."""
    found: dict[Var, set[np.dtype]] = {}
    for shard in split.gathers.values():
        found.setdefault(shard.root, set()).add(np.dtype(shard.cut.dtype))
    for op in (op for op in split.main if isinstance(op, Nested)):
        inside = dtypes_of(op.split)
        for var, operand in zip(op.split.invars, op.operands, strict=True):
            if isinstance(operand, Shard) and var in inside:
                found.setdefault(operand.root, set()).update(inside[var])
    return found


def shards_read(ops: Iterable[Op]) -> Iterable[Shard]:
    for op in ops:
        if isinstance(op, Nested):
            yield from (v for v in op.operands if isinstance(v, Shard))


# [Note: views]
# A stack that is frozen (`stop_gradient`), sliced, indexed or reshaped into groups is still a stack
# of the same layers. To run such an equation on the full stack, the engine would have to gather it.
# So the equation becomes a view of the shard, and the loop over the result gathers layer by layer.
# A view may change only the dimensions before `fixed`, the sharded one.


def views(eqn: JaxprEqn, fixed: int) -> list[View] | None:
    """Returns each result of `eqn` as a view of its operand, or None if `eqn` changes dimensions
    from `fixed` on."""
    params = Eqn(eqn)
    dim, changed = params.axis, params.dimensions
    match eqn.primitive.name:
        case "stop_gradient":
            return [View(lax.stop_gradient, _dims(eqn), stops=True)]
        case "slice":
            return _slice(eqn, fixed)
        case "reshape":
            return _reshape(eqn, fixed)
        case "squeeze" if fixed not in changed:
            dims = tuple(d for d in _dims(eqn) if d not in changed)
            return [View(lambda x: lax.squeeze(x, changed), dims)]
        case "rev" if max(changed, default=0) < fixed:
            return [View(lambda x: lax.rev(x, changed), _dims(eqn))]
        case "split" if dim < fixed:
            sizes = [type_of(v).shape[dim] for v in eqn.outvars]
            parts = functools.partial(lax.split, sizes=sizes, axis=dim)
            each = range(len(sizes))
            return [View(lambda x, k=k: parts(x)[k], _dims(eqn, dim)) for k in each]
        case "unstack" if dim < fixed:
            part = functools.partial(lax.index_in_dim, axis=dim, keepdims=False)
            dims = tuple(d for d in _dims(eqn) if d != dim)
            return [View(functools.partial(part, index=k), dims) for k in range(len(eqn.outvars))]
        case _:
            return None


def _slice(eqn: JaxprEqn, fixed: int) -> list[View] | None:
    params, new = Eqn(eqn), type_of(eqn.outvars[0]).shape
    sliced = [d for d, n in enumerate(type_of(eqn.invars[0]).shape) if n != new[d]]
    if any(d >= fixed for d in sliced):
        return None

    def apply(x: Array) -> Array:  # a shard is smaller from `fixed` on
        limits = (*params.limit_indices[:fixed], *x.shape[fixed:])
        return lax.slice(x, params.start_indices, limits, params.strides or None)

    return [View(apply, _dims(eqn, *sliced))]


def _reshape(eqn: JaxprEqn, fixed: int) -> list[View] | None:
    old, new = type_of(eqn.invars[0]).shape, type_of(eqn.outvars[0]).shape
    moved = fixed + len(new) - len(old)
    if moved < 0 or new[moved:] != old[fixed:] or Eqn(eqn).dimensions:
        return None
    while fixed and moved and old[fixed - 1] == new[moved - 1]:
        fixed, moved = fixed - 1, moved - 1  # further dimensions that stay as they are
    kept = len(new) - moved

    def apply(x: Array) -> Array:
        return lax.reshape(x, (*new[:moved], *x.shape[x.ndim - kept :]))

    return [View(apply, (*[None] * moved, *range(fixed, len(old))))]


def _dims(eqn: JaxprEqn, *changed: int) -> Dims:
    """Returns the operand's dimensions, with None for the changed ones."""
    return tuple(None if d in changed else d for d in range(type_of(eqn.invars[0]).ndim))


class Readers:
    """The equations that read each variable (None: the caller), also through casts and
    constraints."""

    def __init__(self) -> None:
        self.readers: dict[Var, list[JaxprEqn | None]] = {}
        self.named: dict[Var, Var] = {}  # casts of shards are the shards

    def find(self, eqns: Iterable[JaxprEqn], outvars: Iterable[Atom]) -> None:
        for eqn in eqns:
            for var in unique(self.named.get(v, v) for v in eqn.invars if is_var(v)):
                if is_cast(eqn) or eqn.primitive.name == "sharding_constraint":
                    self.named[eqn.outvars[0]] = var
                else:
                    self.readers.setdefault(var, []).append(eqn)
        for var in filter(is_var, outvars):
            self.readers.setdefault(self.named.get(var, var), []).append(None)

    def of(self, atom: Atom) -> list[JaxprEqn | None]:
        return self.readers.get(self.named.get(atom, atom), []) if is_var(atom) else []

    def viewed(self, eqn: JaxprEqn, kind: Kind) -> list[Shard] | None:
        """Returns the results as shards, if `eqn` makes views and shards are better.

        They are not if another reader gathers the operand anyway: one gather serves both.
        """
        if not isinstance(kind, Shard) or not (found := views(eqn, kind.cut.fixed)):
            return None
        readers = self.of(eqn.outvars[0])
        is_scanned = readers and all(r and r.primitive.name == "scan" for r in readers)
        if not is_scanned and self._is_gathered_too(eqn, kind, found[0].stops):
            return None
        return [Shard(kind.root, kind.cut.moved(view.dims), (*kind.views, view)) for view in found]

    def _is_gathered_too(self, eqn: JaxprEqn, kind: Shard, stops: bool) -> bool:
        """Whether other equations read the operand without a view, or both frozen and trained."""
        readers = self.of(eqn.invars[0])
        if stops and len(readers) > 1:
            return True
        return not all(reader and views(reader, kind.cut.fixed) for reader in readers)


def is_cast(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "convert_element_type"
