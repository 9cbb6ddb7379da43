"""Which equations of a loss are alike: they compute the same, in whatever scope and source line."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.typing import ArrayLike

from zerojax import _compat
from zerojax._kernel.jaxprs import Atom, Var, is_var


class Keys:
    """Numbers that are equal for equations that are alike.

    Operands may be literals or not, and the literals in a `jax.checkpoint` may differ.
    """

    def __init__(self) -> None:
        self.numbers: dict[Hashable, int] = {}
        self.jaxprs: dict[tuple[int, bool, bool], int] = {}
        self.alive: list[Any] = []  # what keys name by `id`, so that nothing else gets the same one
        self.in_rule = False

    def of(self, eqn: JaxprEqn) -> int:
        return self.number(self.key(eqn, opens(eqn)))

    def number(self, key: Hashable) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def key(self, eqn: JaxprEqn, loose: bool) -> Hashable:
        """Returns what an equation computes. If `loose`, literals in its jaxprs may differ."""
        if _compat.has_side_effects(eqn):
            return id(eqn)
        params = sorted(eqn.params.items())
        params = [(k, self.param(v, loose)) for k, v in params if k not in _compat.DERIVATIVES]
        operands = tuple(v.aval for v in eqn.invars)
        outs = tuple(v.aval for v in eqn.outvars)
        return eqn.primitive, tuple(params), self.rules(eqn), eqn.ctx, operands, outs

    def rules(self, eqn: JaxprEqn) -> Hashable:
        """Returns what the derivative computes that a user wrote for an equation."""
        if self.in_rule:  # a rule may call the function that it belongs to
            return ()
        self.in_rule = True
        try:
            rules = _compat.derivatives(eqn)
            return tuple(self.jaxpr(jaxpr, consts, False) for jaxpr, consts in rules)
        except Exception:  # a rule that cannot be traced makes its call like no other
            return id(eqn)
        finally:
            self.in_rule = False

    def param(self, value: object, loose: bool) -> Hashable:
        jaxpr, consts = _compat.opened(value)
        if isinstance(jaxpr, Jaxpr):
            return self.jaxpr(jaxpr, consts, loose)
        if isinstance(value, tuple | list):
            return type(value), tuple(self.param(each, loose) for each in value)
        try:
            hash(value)
        except TypeError:
            return id(value)
        return type(value), value

    def jaxpr(self, jaxpr: Jaxpr, consts: Sequence[ArrayLike], loose: bool) -> Hashable:
        self.alive += [jaxpr, *consts]
        known = id(jaxpr), loose, self.in_rule
        if known not in self.jaxprs:
            self.jaxprs[known] = self.number(self.code(jaxpr, loose))
        return self.jaxprs[known], tuple(map(id, consts))

    def code(self, jaxpr: Jaxpr, loose: bool) -> Hashable:
        numbers: dict[Var, int] = {}

        def names(atoms: Sequence[Atom], loose: bool = False) -> Hashable:
            return tuple(
                (v.aval, numbers.setdefault(v, len(numbers)))
                if is_var(v)
                else (v.aval if loose else same_as(v))
                for v in atoms
            )

        inputs = names((*jaxpr.constvars, *jaxpr.invars))
        eqns = [
            (self.key(e, loose and opens(e)), names(e.invars, loose), names(e.outvars))
            for e in jaxpr.eqns
        ]
        return inputs, tuple(eqns), names(jaxpr.outvars)


def opens(eqn: JaxprEqn) -> bool:
    """Whether literals in the jaxpr of an equation can become operands of it."""
    return eqn.primitive.name in _compat.REMAT


def same_as(literal: Atom) -> Hashable:
    """Returns what is equal for equal literals."""
    assert isinstance(literal, Literal)
    return literal.aval, np.asarray(literal.val).tobytes()


def one_for_all(eqns: Sequence[JaxprEqn], operand: Callable[[tuple[Atom, ...]], Var]) -> JaxprEqn:
    """Returns the first of alike equations, in a scope that names all of theirs.

    Where literals in what it opens differ, they become operands of it: `operand` returns the
    variable for those of all equations.
    """
    eqn = _compat.in_common_scope(eqns)
    if not opens(eqn):
        return eqn
    jaxprs = [_compat.inner_jaxpr(eqn)[0] for eqn in eqns]
    if all(jaxpr is jaxprs[0] for jaxpr in jaxprs):
        return eqn
    inner: dict[Var, Var] = {}  # operands, and their names in the jaxpr

    def inside(literals: tuple[Atom, ...]) -> Var:
        outer = operand(literals)
        return inner.setdefault(outer, _compat.fresh(outer))

    def joined(atoms: tuple[Atom, ...]) -> Atom:
        differ = not is_var(atoms[0]) and len({*map(same_as, atoms)}) > 1
        return inside(atoms) if differ else atoms[0]

    body = []
    for each in zip(*(jaxpr.eqns for jaxpr in jaxprs), strict=True):
        operands = zip(*(one.invars for one in each), strict=True)
        first = each[0].replace(invars=list(map(joined, operands)))
        body.append(one_for_all([first, *each[1:]], inside))
    eqn = _compat.with_inner_jaxpr(eqn, jaxprs[0].replace(eqns=body), list(inner.values()))
    return eqn.replace(invars=[*eqn.invars, *inner])
