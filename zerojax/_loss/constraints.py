"""Sharding constraints over the axes that a step has cut the batch along, as models have them.

Code of one device cannot name such an axis: along it there is nothing left to lay out. So a loss
with constraints is traced as code of the whole mesh, and its jaxpr made one of a device: the axes
go from every constraint, and are manual in every type, at any depth.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from zerojax import _compat
from zerojax._collectives import names_in
from zerojax._jaxpr import is_var


def whole_mesh() -> AbstractMesh:
    """The mesh of the code that runs, as code outside of `shard_map` would see it."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.update_axis_types(dict.fromkeys(mesh.manual_axes, AxisType.Auto))


def name_any(jaxpr: Any, axes: tuple[str, ...]) -> bool:
    """Whether a constraint in `jaxpr`, at any depth, is over one of the axes."""
    return any(
        is_constraint(eqn) and named_axes(eqn.params["sharding"].spec).intersection(axes)
        for eqn in _compat.every_eqn(jaxpr)
    )


def named_axes(spec: PartitionSpec) -> set[str]:
    return names_in(e for e in spec if e is not PartitionSpec.UNCONSTRAINED)


def is_constraint(eqn: Any) -> bool:
    by_spec = isinstance(eqn.params.get("sharding"), NamedSharding)
    return eqn.primitive.name == "sharding_constraint" and by_spec


class Dropper:
    """Makes jaxprs traced on a whole mesh, where `axes` are automatic, ones of a single device."""

    def __init__(self, axes: tuple[str, ...]) -> None:
        self.axes = dict.fromkeys(axes, AxisType.Manual)
        self.whole, self.here = whole_mesh(), jax.sharding.get_abstract_mesh()
        self.jaxprs: dict[int, tuple[Any, Any]] = {}  # with what they are of, which lives as long

    def jaxpr(self, jaxpr: Any) -> Any:
        """`jaxpr`, open or closed; the same one for the same one, as JAX caches by identity."""
        if id(jaxpr) not in self.jaxprs:
            inner = getattr(jaxpr, "jaxpr", jaxpr)
            rewritten = self._open(inner)
            if inner is not jaxpr:
                rewritten = jaxpr.replace(jaxpr=rewritten)
            self.jaxprs[id(jaxpr)] = (rewritten, jaxpr)
        return self.jaxprs[id(jaxpr)][0]

    def _open(self, jaxpr: Any) -> Any:
        names: dict[Any, Any] = {}

        def named(var: Any) -> Any:
            if not is_var(var) or _compat.is_dropped(var):
                return var
            if var not in names:
                names[var] = _compat.fresh(var, self.aval(var.aval))
            return names[var]

        constvars, invars = map(named, jaxpr.constvars), map(named, jaxpr.invars)
        constvars, invars, eqns = list(constvars), list(invars), []
        for eqn in jaxpr.eqns:
            operands = [named(v) for v in eqn.invars]
            if is_constraint(eqn) and self.says_nothing(eqn):
                names[eqn.outvars[0]] = operands[0]
                continue
            params = {name: self.param(name, value) for name, value in eqn.params.items()}
            outvars = [named(v) for v in eqn.outvars]
            ctx = _compat.context_on(eqn, self.mesh(_compat.mesh_of(eqn)))
            eqns.append(eqn.replace(invars=operands, outvars=outvars, params=params, ctx=ctx))
        outvars = [named(v) for v in jaxpr.outvars]
        return jaxpr.replace(constvars=constvars, invars=invars, outvars=outvars, eqns=eqns)

    def says_nothing(self, constraint: Any) -> bool:
        """Whether no axis is left that it could be about."""
        mesh = self.mesh(constraint.params["sharding"].mesh.abstract_mesh)
        return not mesh.auto_axes and constraint.params["layout"] is None

    # -- what speaks of a mesh

    def mesh(self, mesh: AbstractMesh) -> AbstractMesh:
        if set(mesh.axis_names) == set(self.here.axis_names):  # of this mesh, whatever its types
            mesh = self.whole.update_axis_types(dict.fromkeys(mesh.manual_axes, AxisType.Manual))
        here = {axis: kind for axis, kind in self.axes.items() if axis in mesh.axis_names}
        return mesh.update_axis_types(here)

    def aval(self, aval: Any) -> Any:
        sharding = getattr(aval, "sharding", None)
        return aval if sharding is None else aval.update(sharding=self.sharding(sharding))

    def sharding(self, sharding: NamedSharding) -> NamedSharding:
        spec = PartitionSpec(*map(self.others, sharding.spec))
        return NamedSharding(self.mesh(sharding.mesh.abstract_mesh), spec)

    def others(self, entry: Any) -> Any:
        """An entry of a spec without the axes."""
        if entry is None or entry is PartitionSpec.UNCONSTRAINED:
            return entry
        names = entry if isinstance(entry, tuple) else (entry,)
        return tuple(name for name in names if name not in self.axes) or None

    def param(self, name: str, value: Any) -> Any:
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

    def traced_later(self, trace: Callable[[], Any]) -> Any:
        """The jaxpr of a derivative that a user defined, and what comes with it."""
        with jax.sharding.use_abstract_mesh(self.whole):
            jaxpr, *others = trace()
        return (self.jaxpr(jaxpr), *others)
