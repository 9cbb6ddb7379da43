"""Removes a loss's sharding constraints over the axes that a step splits the batch over.

Models have such constraints, but code of one device cannot: nothing is left there to split over
these axes. A loss with constraints is therefore traced as code of all devices, and its jaxpr is
rewritten for one device: at any depth, the axes are dropped from every constraint and become manual
in every type.
"""

from collections.abc import Callable
from typing import TypeAlias

import jax
from jax.core import AbstractValue
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from zerojax import _compat
from zerojax._types import PyTree
from zerojax._wire.routes import names_in

AnyJaxpr: TypeAlias = Jaxpr | ClosedJaxpr


def outer_mesh() -> AbstractMesh:
    """Returns the mesh that is set, as code outside of `shard_map` would see it."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.update_axis_types(dict.fromkeys(mesh.manual_axes, AxisType.Auto))


def name_any(jaxpr: Jaxpr, axes: tuple[str, ...]) -> bool:
    """Whether a constraint in `jaxpr`, at any depth, is over one of the axes."""
    return any(
        is_constraint(eqn) and named_axes(eqn.params["sharding"].spec).intersection(axes)
        for eqn in _compat.every_eqn(jaxpr)
    )


def named_axes(spec: PartitionSpec) -> set[str]:
    return names_in(e for e in spec if e is not PartitionSpec.UNCONSTRAINED)


def is_constraint(eqn: JaxprEqn) -> bool:
    by_spec = isinstance(eqn.params.get("sharding"), NamedSharding)
    return eqn.primitive.name == "sharding_constraint" and by_spec


class Dropper:
    """Rewrites jaxprs of all devices, where `axes` are automatic, as jaxprs of one device.

    Each method returns its argument without the axes.
    """

    def __init__(self, axes: tuple[str, ...]) -> None:
        self.axes = dict.fromkeys(axes, AxisType.Manual)
        self.outer, self.here = outer_mesh(), jax.sharding.get_abstract_mesh()
        self.jaxprs: dict[AnyJaxpr, AnyJaxpr] = {}  # the rewritten by the original

    def jaxpr(self, jaxpr: AnyJaxpr) -> AnyJaxpr:
        """Rewrites a jaxpr; always to the same object, because JAX caches by identity."""
        if jaxpr not in self.jaxprs:
            inner = getattr(jaxpr, "jaxpr", jaxpr)
            rewritten = self._open(inner)
            self.jaxprs[jaxpr] = rewritten if inner is jaxpr else jaxpr.replace(jaxpr=rewritten)
        return self.jaxprs[jaxpr]

    def _open(self, jaxpr: Jaxpr) -> Jaxpr:
        names: dict[Var, Var | Literal] = {}

        def declared(var: Var) -> Var:
            if isinstance(var, DropVar):
                return var
            names[var] = new = _compat.fresh(var, self.aval(var.aval))
            return new

        def named(atom: Var | Literal) -> Var | Literal:
            return atom if isinstance(atom, Literal) else names[atom]

        constvars = list(map(declared, jaxpr.constvars))
        invars = list(map(declared, jaxpr.invars))
        eqns = []
        for eqn in jaxpr.eqns:
            operands = list(map(named, eqn.invars))
            if is_constraint(eqn) and self.says_nothing(eqn):
                names[eqn.outvars[0]] = operands[0]
                continue
            params = {name: self.param(name, value) for name, value in eqn.params.items()}
            outvars = list(map(declared, eqn.outvars))
            ctx = _compat.context_on(eqn, self.mesh)
            eqns.append(eqn.replace(invars=operands, outvars=outvars, params=params, ctx=ctx))
        outvars = list(map(named, jaxpr.outvars))
        return jaxpr.replace(constvars=constvars, invars=invars, outvars=outvars, eqns=eqns)

    def says_nothing(self, constraint: JaxprEqn) -> bool:
        """Whether no axis is left that a constraint could name."""
        mesh = self.mesh(constraint.params["sharding"].mesh.abstract_mesh)
        return not mesh.auto_axes and constraint.params["layout"] is None

    def mesh(self, mesh: AbstractMesh) -> AbstractMesh:
        if set(mesh.axis_names) == set(self.here.axis_names):  # the same mesh, whatever its types
            mesh = self.outer.update_axis_types(dict.fromkeys(mesh.manual_axes, AxisType.Manual))
        here = {axis: kind for axis, kind in self.axes.items() if axis in mesh.axis_names}
        return mesh.update_axis_types(here)

    def aval(self, aval: AbstractValue) -> AbstractValue:
        sharding = getattr(aval, "sharding", None)
        return aval if sharding is None else aval.update(sharding=self.sharding(sharding))

    def sharding(self, sharding: NamedSharding) -> NamedSharding:
        spec = PartitionSpec(*map(self.entry, sharding.spec))
        return NamedSharding(self.mesh(sharding.mesh.abstract_mesh), spec)

    def entry(self, entry: PyTree) -> PyTree:
        if entry is None or entry is PartitionSpec.UNCONSTRAINED:
            return entry
        names = entry if isinstance(entry, tuple) else (entry,)
        return tuple(name for name in names if name not in self.axes) or None

    def param(self, name: str, value: PyTree) -> PyTree:
        if name in _compat.THUNKS:
            return _compat.Thunk(value, self.traced_later)
        match value:
            case AbstractMesh():
                return self.mesh(value)
            case NamedSharding():
                return self.sharding(value)
            case tuple() if hasattr(value, "_fields"):
                return type(value)(*(self.param("", v) for v in value))
            case tuple() | list():
                return type(value)(self.param("", v) for v in value)
            case _ if hasattr(value, "eqns"):
                return self.jaxpr(value)
        return value

    def traced_later(self, trace: Callable[[], PyTree]) -> tuple:
        """Traces a derivative that a user defined, and rewrites its jaxpr, the first of a tuple."""
        with jax.sharding.use_abstract_mesh(self.outer):
            jaxpr, *others = trace()
        return (self.jaxpr(jaxpr), *others)
