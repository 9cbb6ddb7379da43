"""Writes the equations of a call (`jax.jit`, ...) in place of the call."""

from collections.abc import Sequence
from typing import Any, TypeGuard

from jax.extend import core as jex_core

from zerojax import _compat

Var = jex_core.Var
Atom = jex_core.Var | jex_core.Literal


def is_var(atom: Atom | None) -> TypeGuard[Var]:
    return atom is not None and not isinstance(atom, jex_core.Literal)


class Inliner:
    """Expands calls; remembers what their outputs and constants have become."""

    def __init__(self) -> None:
        self.aliases: dict[Var, Atom] = {}
        self.constants: dict[Var, Any] = {}

    def named(self, atom: Atom) -> Atom:
        """The variable that an output of an expanded call is another name for."""
        while is_var(atom) and atom in self.aliases:
            atom = self.aliases[atom]
        return atom

    def resolved(self, eqn: jex_core.JaxprEqn) -> jex_core.JaxprEqn:
        return eqn.replace(invars=[self.named(v) for v in eqn.invars])

    def expand(self, call: jex_core.JaxprEqn) -> list[jex_core.JaxprEqn]:
        """The equations that `call` runs, each variable under a name of its own."""
        jaxpr, consts = _compat.inner_jaxpr(call)
        names: dict[Var, Atom] = dict(zip(jaxpr.invars, call.invars, strict=True))

        def rename(var: Var) -> Atom:
            if isinstance(var, jex_core.DropVar):
                return var
            if var not in names:
                names[var] = _compat.fresh(var)
            return names[var]

        for var, value in zip(jaxpr.constvars, consts, strict=True):
            self.constants[rename(var)] = value
        for outer, inner in zip(call.outvars, jaxpr.outvars, strict=True):
            if isinstance(outer, jex_core.DropVar):
                continue
            if is_var(inner) and inner not in names:
                names[inner] = outer
            else:  # an input, a literal, or a value returned twice
                self.aliases[outer] = rename(inner) if is_var(inner) else inner
        return [_compat.renamed(eqn, rename, call) for eqn in jaxpr.eqns]


def alive(steps: Sequence[Any], outvars: Sequence[Atom], reads_of: Any) -> list[Any]:
    """The steps whose results are read, or that have effects."""
    live = {v for v in outvars if is_var(v)}
    kept = []
    for step in reversed(steps):
        if live.intersection(step.outvars) or _compat.has_side_effects(step):
            live.update(reads_of(step))
            kept.append(step)
    return kept[::-1]
