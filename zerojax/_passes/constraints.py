"""Drops from a traced loss the mesh axes that are not there when one device runs it.

A model may be written for axes that the step splits the batch over, or that its mesh lacks: see the
note in `_loss/trace.py`. At any depth, this drops them from every constraint, makes the axes of the
batch manual in every type and the others Auto, and writes constraints in place of what names an
Explicit axis.
"""

# pyright: strict, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportPrivateImportUsage=false

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.core import AbstractValue
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from zerojax import _axis_types, _compat
from zerojax._jaxprs import Atom, Eqn, is_var, mapped_params, params_of, with_params
from zerojax._passes.loss import Loss
from zerojax._passes.one_device import seeing
from zerojax._specs import axes_in, names_in
from zerojax._types import PyTree

AnyJaxpr: TypeAlias = Jaxpr | ClosedJaxpr
# Parameters of JAX's operations; the last is that of `jax.sharding.reshard`.
ASKING = {"sharding", "out_sharding", "dst_sharding"}


def named_axes(spec: PartitionSpec) -> set[str]:
    return names_in(e for e in spec if e is not PartitionSpec.UNCONSTRAINED)


def is_constraint(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "sharding_constraint" and hasattr(Eqn(eqn).sharding, "spec")


def asked_of(eqn: JaxprEqn) -> NamedSharding | None:
    """Returns the sharding over Explicit axes that an operation was asked for."""
    asked = (value for name, value in params_of(eqn) if name in ASKING)
    return None if is_constraint(eqn) else next(filter(None, asked), None)


def dropped(loss: Loss, axes: tuple[str, ...], mesh: AbstractMesh, seen: AbstractMesh) -> Loss:
    """Returns a loss that was traced under the mesh `seen` as one device of `mesh` runs it."""
    jaxpr = _Dropper(axes, mesh, seen).jaxpr(loss.jaxpr)
    assert isinstance(jaxpr, Jaxpr)
    return dataclasses.replace(loss, jaxpr=jaxpr)


class _Dropper:
    """Rewrites jaxprs that were traced under the mesh `seen` as jaxprs of one device.

    There, the `axes` of the mesh are manual. Each method returns its argument without them, and
    without axes that the mesh lacks.
    """

    def __init__(self, axes: tuple[str, ...], mesh: AbstractMesh, seen: AbstractMesh) -> None:
        self.axes, self.all, self.seen = axes, mesh, seen
        self.jaxprs: dict[AnyJaxpr, AnyJaxpr] = {}  # the rewritten by the original

    def jaxpr(self, jaxpr: AnyJaxpr) -> AnyJaxpr:
        """Rewrites a jaxpr; always to the same object, because JAX caches by identity."""
        if jaxpr in self.jaxprs:
            return self.jaxprs[jaxpr]
        inner, consts = _compat.opened(jaxpr)
        names: dict[Var, Atom] = {}

        def declared(var: Var) -> Var:
            if isinstance(var, DropVar):
                return var
            names[var] = new = _compat.fresh(var, self.aval(var.aval))
            return new

        def named(atom: Atom) -> Atom:
            if is_var(atom):
                return names[atom]
            # JAX's arrays for constants keep the mesh that they were made under, and their copies
            # do not.
            value = atom.val.copy() if isinstance(atom.val, np.ndarray) else atom.val
            return Literal(value, self.aval(atom.aval))

        constvars = list(map(declared, inner.constvars))
        invars = list(map(declared, inner.invars))
        eqns = []
        for eqn in inner.eqns:
            operands = list(map(named, eqn.invars))
            if is_constraint(eqn) and self.says_nothing(Eqn(eqn)):
                names[eqn.outvars[0]] = operands[0]
                continue
            asked = asked_of(eqn)
            if asked and eqn.primitive.name == "reshard":
                eqns += self.constraint(asked, operands[0], names, eqn.outvars[0])
                continue
            asking = ASKING & vars(Eqn(eqn)).keys() if asked else ()
            new = with_params(mapped_params(eqn, self.param), **dict.fromkeys(asking))
            outvars = list(map(declared, eqn.outvars))
            ctx = _compat.context_on(eqn, self.mesh)
            eqns.append(new.replace(invars=operands, outvars=outvars, ctx=ctx))
            if asked:
                eqns += self.constraint(asked, outvars[0], names, eqn.outvars[0])
        outvars = list(map(named, inner.outvars))
        new = inner.replace(constvars=constvars, invars=invars, outvars=outvars, eqns=eqns)
        self.jaxprs[jaxpr] = new if inner is jaxpr and not consts else ClosedJaxpr(new, consts)
        return self.jaxprs[jaxpr]

    def constraint(
        self, asked: NamedSharding, value: Atom, names: dict[Var, Atom], result: Var
    ) -> list[JaxprEqn]:
        """Names a value `result`, constrained to a sharding of Auto axes if any are left."""
        sharding = self.sharding(asked)
        names[result] = value
        if not sharding.mesh.auto_axes or isinstance(value, DropVar):
            return []
        with _axis_types.seen_as(sharding.mesh.abstract_mesh):
            constrain = functools.partial(jax.lax.with_sharding_constraint, shardings=sharding.spec)
            (eqn,) = jax.make_jaxpr(constrain)(value.aval).eqns
        names[result] = new = _compat.fresh(result, value.aval)
        return [eqn.replace(invars=[value], outvars=[new])]

    def says_nothing(self, asks: Eqn) -> bool:
        """Whether no axis is left that a constraint could name."""
        return asks.layout is None and not self.mesh(asks.sharding.mesh.abstract_mesh).auto_axes

    def mesh(self, mesh: AbstractMesh) -> AbstractMesh:
        """Returns the step's mesh, whatever the loss saw in its place."""
        manual = [axis for axis in mesh.manual_axes if axis in self.all.axis_names]
        return self.all.update_axis_types(dict.fromkeys([*manual, *self.axes], AxisType.Manual))

    def aval(self, aval: AbstractValue) -> AbstractValue:
        sharding = getattr(aval, "sharding", None)
        return aval if sharding is None else aval.update(sharding=self.sharding(sharding))

    def sharding(self, sharding: NamedSharding) -> NamedSharding:
        free = {*self.all.axis_names} - {*self.axes}

        def kept(entry: PyTree) -> PyTree:
            if entry is None or entry is PartitionSpec.UNCONSTRAINED:
                return entry
            return tuple(name for name in axes_in(entry) if name in free) or None

        mesh = self.mesh(sharding.mesh.abstract_mesh)
        return NamedSharding(mesh, PartitionSpec(*map(kept, sharding.spec)))

    def param(self, name: str, value: PyTree) -> PyTree:
        if name in _compat.THUNKS:
            return _compat.Thunk(value, self.traced_later)
        match value:
            case AbstractMesh():
                return self.mesh(value)
            case NamedSharding():
                return self.sharding(value)
            case tuple() | list():
                values = [self.param("", v) for v in value]
                return type(value)(*values) if hasattr(value, "_fields") else type(value)(values)
            case _:
                return self.jaxpr(value) if hasattr(value, "eqns") else value

    def traced_later(self, trace: Callable[[], PyTree]) -> tuple[Any, ...]:
        """Traces a derivative that a user defined, and rewrites its jaxpr, the first of a tuple."""
        with seeing(self.seen, self.axes):
            jaxpr, *others = trace()
        return (self.jaxpr(jaxpr), *others)
