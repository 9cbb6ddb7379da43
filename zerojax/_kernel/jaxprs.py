"""Reads, inlines and compares jaxprs."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, Var
from jax.typing import ArrayLike

from zerojax import _compat

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Atom = Var | Literal


class HasOutputs(_compat.HasEffects, Protocol):
    """An equation, or something that stands for several."""

    @property
    def outvars(self) -> list[Var]: ...


S = TypeVar("S", bound=HasOutputs)
T = TypeVar("T")


def is_var(atom: Atom | None) -> "TypeIs[Var]":
    return atom is not None and not isinstance(atom, Literal)


def type_of(atom: Atom) -> ShapedArray:
    """Returns the type of an array. JAX's annotations say only that it has some type."""
    aval: Any = atom.aval
    return aval


def is_call(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in _compat.CALLS


class Inliner:
    """Expands calls, and remembers what became of their outputs and constants."""

    def __init__(self) -> None:
        self.aliases: dict[Var, Atom] = {}
        self.constants: dict[Var, ArrayLike] = {}

    def named(self, atom: Atom) -> Atom:
        """Returns the variable for which an output of an expanded call is another name."""
        while is_var(atom) and atom in self.aliases:
            atom = self.aliases[atom]
        return atom

    def resolved(self, eqn: JaxprEqn) -> JaxprEqn:
        return eqn.replace(invars=[self.named(v) for v in eqn.invars])

    def flat(
        self, eqns: Iterable[JaxprEqn], expands: Callable[[JaxprEqn], bool] = is_call
    ) -> Iterator[JaxprEqn]:
        """Yields the equations. Where `expands` holds of a call, its equations replace it, at any
        depth."""
        for eqn in map(self.resolved, eqns):
            if expands(eqn):
                yield from self.flat(self.expand(eqn), expands)
            else:
                yield eqn

    def flat_of(self, eqns: Iterable[JaxprEqn], variables: Iterable[Var]) -> list[JaxprEqn]:
        """Returns the equations. Those of a call replace it where it takes some of these variables,
        or what is computed from them."""
        touched = set(variables)

        def expands(eqn: JaxprEqn) -> bool:
            if touched.isdisjoint(reads(eqn)):
                return False
            touched.update(eqn.outvars)
            return is_call(eqn)

        return list(self.flat(eqns, expands))

    def expand(self, call: JaxprEqn) -> list[JaxprEqn]:
        """Returns the equations of a call, each variable under a name of its own."""
        jaxpr, consts = _compat.inner_jaxpr(call)
        names: dict[Var, Atom] = dict(zip(jaxpr.invars, call.invars, strict=True))

        def rename(var: Var) -> Atom:
            if isinstance(var, DropVar):
                return var
            if var not in names:
                names[var] = _compat.fresh(var)
            return names[var]

        for var, value in zip(jaxpr.constvars, consts, strict=True):
            names[var] = const = _compat.fresh(var)
            self.constants[const] = value
        for outer, inner in zip(call.outvars, jaxpr.outvars, strict=True):
            if isinstance(outer, DropVar):
                continue
            if is_var(inner) and inner not in names:
                names[inner] = outer
            else:  # an input, a literal, or a value returned twice
                self.aliases[outer] = rename(inner) if is_var(inner) else inner
        return [_compat.renamed(eqn, rename, call) for eqn in jaxpr.eqns]


def reads(eqn: JaxprEqn) -> list[Var]:
    """Returns the variables that an equation reads."""
    return [v for v in eqn.invars if is_var(v)]


def alive(
    steps: Sequence[S], outvars: Iterable[Atom], reads_of: Callable[[S], Iterable[Var]]
) -> list[S]:
    """Returns the steps that have effects, or whose results something reads."""
    live = {v for v in outvars if is_var(v)}
    kept = []
    # Backwards, so that the loop sees the readers of a result before the step that makes it.
    for step in reversed(steps):
        if live.intersection(step.outvars) or _compat.has_side_effects(step):
            live.update(reads_of(step))
            kept.append(step)
    return kept[::-1]


def unclosed(closed: ClosedJaxpr) -> tuple[Jaxpr, Sequence[ArrayLike]]:
    """Returns a jaxpr whose constants are its last inputs, and the constants."""
    jaxpr, consts = _compat.opened(closed)
    invars = [*jaxpr.invars, *jaxpr.constvars]
    return _compat.make_jaxpr(jaxpr.eqns, invars, jaxpr.outvars), consts


def inferred(
    jaxpr: Jaxpr, inputs: Sequence[T], unknown: T, rule: Callable[[JaxprEqn, list[T]], Sequence[T]]
) -> list[T]:
    """Returns a fact about each output, from one about each input. `rule` returns the facts about
    the outputs of an equation, from those about its operands. Literals and constants are
    `unknown`."""
    facts: dict[Var, T] = dict(zip(jaxpr.invars, inputs, strict=True))

    def fact(atom: Atom) -> T:
        return facts.get(atom, unknown) if is_var(atom) else unknown

    for eqn in jaxpr.eqns:
        facts.update(zip(eqn.outvars, rule(eqn, list(map(fact, eqn.invars))), strict=True))
    return list(map(fact, jaxpr.outvars))


class Code:
    """A jaxpr to compare, without the name scope that all of its equations share."""

    def __init__(self, jaxpr: Jaxpr, consts: Sequence[ArrayLike]) -> None:
        self.name, self.jaxpr = _compat.without_outer_scope(jaxpr)
        self.consts = consts
        self.structure = structure(self.jaxpr, consts)


def structure(jaxpr: Jaxpr, consts: Sequence[ArrayLike]) -> Hashable:
    """Returns a key that is equal for jaxprs that compute the same, from the same lines of source.

    Constants, and functions such as policies, count as equal only if they are one object. The key
    is valid as long as the jaxprs exist.
    """
    numbers: dict[Var, int] = {}

    def named(atom: Atom) -> Hashable:
        if not is_var(atom):
            return atom.aval, np.asarray(atom.val).tobytes()
        return numbers.setdefault(atom, len(numbers))

    def made(variables: Sequence[Var]) -> Hashable:
        return tuple((named(v), v.aval) for v in variables)

    def alike(eqn: JaxprEqn) -> Hashable:
        where = str(eqn.source_info.name_stack), eqn.source_info.traceback, eqn.ctx
        params = tuple((name, _alike(value)) for name, value in sorted(eqn.params.items()))
        return eqn.primitive, tuple(map(named, eqn.invars)), params, where, made(eqn.outvars)

    given = made([*jaxpr.constvars, *jaxpr.invars]), tuple(map(id, consts))
    return given, tuple(map(alike, jaxpr.eqns)), tuple(map(named, jaxpr.outvars))


def _alike(param: object) -> Hashable:
    jaxpr, consts = _compat.opened(param)
    if isinstance(jaxpr, Jaxpr):
        return structure(jaxpr, consts)
    if isinstance(param, tuple | list):
        return type(param), tuple(map(_alike, param))
    try:
        hash(param)
    except TypeError:
        return id(param)
    return type(param), param


def nbytes(variables: Iterable[Atom]) -> int:
    return sum(t.size * t.dtype.itemsize for t in map(type_of, variables))
