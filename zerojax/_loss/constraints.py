"""The mesh that a loss sees while it is traced, and its sharding constraints over that mesh.

[Note: the mesh that a loss sees]
A model may ask which mesh is set, and constrain arrays over its axes; Flax does so for every
annotated weight. No single answer suits all models, so a loss is traced where it can be:

1. As code of one device, which it is: the axes that the batch is split over are manual. There, a
   constraint over those is an error, because nothing is left to split.
2. As code of all devices, where all axes are automatic. The axes that annotations name and the mesh
   lacks are there too, with size 1: what is sharded over them is whole.
3. Without a mesh, where Flax constrains nothing, as in a step of its authors who set none. A
   constraint may fit no mesh: `nn.DenseGeneral` constrains a flattened kernel by the names of all
   its dimensions. What a state is annotated with, its plan has read.

The jaxpr of 2 and 3 is rewritten for one device: at any depth, axes that are no longer there are
dropped from every constraint, and those of the batch become manual in every type.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias, TypeVar

import jax
import numpy as np
from jax.core import AbstractValue
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from zerojax import _compat
from zerojax._kernel.travel import names_in
from zerojax._loss import mean as _mean
from zerojax._plan import mesh as _mesh
from zerojax._state.hints import axes_of_rules
from zerojax._types import PyTree

AnyJaxpr: TypeAlias = Jaxpr | ClosedJaxpr
T = TypeVar("T")
NO_MESH = AbstractMesh((), ())


def without_constraints(
    trace: Callable[[AbstractMesh], tuple[ClosedJaxpr, PyTree]],
    axes: tuple[str, ...],
    absent: Iterable[str],
) -> tuple[ClosedJaxpr, PyTree]:
    """Returns a loss traced as code of one device, without its constraints over `axes`.

    `absent` are axes that it may name and the mesh lacks. See the note above.
    """
    here = jax.sharding.get_abstract_mesh()
    outer = here.update_axis_types(dict.fromkeys(here.manual_axes, AxisType.Auto))

    def traced(mesh: AbstractMesh) -> tuple[ClosedJaxpr, PyTree]:
        closed, aux = trace(mesh)
        if mesh is here and _has_more(closed, here, axes):
            raise _ConstraintError(f"with_sharding_constraint over one of {axes}")
        return closed, aux

    (closed, aux), seen, failed = traced_where_it_can_be(
        traced, [here, with_absent(outer, absent), NO_MESH], axes
    )
    if seen is here:
        return closed, aux
    if not any(map(_is_of_mesh, failed)) and not _has_more(closed, here, axes):
        raise failed[0]  # for another reason than a constraint
    return Dropper(axes, outer, seen).jaxpr(closed), aux


class _ConstraintError(ValueError):
    """Stands for JAX's error of a constraint, where JAX lets one pass that cannot run."""


def traced_where_it_can_be(
    trace: Callable[[AbstractMesh], T], meshes: Sequence[AbstractMesh], axes: tuple[str, ...]
) -> tuple[T, AbstractMesh, list[Exception]]:
    """Returns `trace(mesh)` for the first mesh where it raises nothing, that mesh, and the errors.

    The code that is traced sees the mesh. The second is tried after any error that a constraint may
    lead to, the third where the error speaks of the mesh. Where all fail, raises the one to read.
    """
    failed: list[Exception] = []
    for mesh in meshes:
        try:
            with seeing(mesh, axes):
                return trace(mesh), mesh, failed
        except Exception as error:
            if not failed and not isinstance(error, TypeError | ValueError):
                raise
            failed.append(error)
            if len(failed) > 1 and not _is_of_mesh(error):
                break
    # Errors of a mesh that is not the user's say little, and that of no mesh nothing.
    errors = [error for error in failed if not _is_of_mesh(error)] or failed[:2][-1:]
    raise _explained(errors[0], meshes[0]) from errors[0].__cause__


def _is_of_mesh(error: Exception) -> bool:
    return re.search(r"\bmesh\b|sharding", str(error)) is not None


def _explained(error: Exception, mesh: AbstractMesh) -> Exception:
    """Returns the error of a constraint over an axis that the mesh lacks with a remedy."""
    unknown = re.search(r"Resource axis: (\S+) of (.*) is not found in mesh", str(error))
    if unknown is None:
        return error
    sizes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    return ValueError(
        f"the loss constrains an array to {unknown[2]}, and the mesh ({sizes}) has no axis "
        f"{unknown[1]!r}. Correct the name, or place the state on a mesh that has it, if only with "
        f"size 1: mesh=zerojax.mesh({sizes}, {unknown[1]}=1)."
    )


@contextlib.contextmanager
def seeing(mesh: AbstractMesh, axes: tuple[str, ...]) -> Iterator[None]:
    """Sets the mesh that a loss sees; `axes` are those that its batch is split over."""
    with _mesh.seen_as(mesh), _mean.over(axes):
        yield


def with_absent(mesh: AbstractMesh, absent: Iterable[str]) -> AbstractMesh:
    """Returns a mesh of Auto axes that has `absent` too, and those of the rules in force, with size
    1."""
    named = {*absent, *axes_of_rules()}
    added = dict.fromkeys(sorted(named - {*mesh.axis_names}), 1)
    sizes = {**mesh.shape, **added}
    types = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types) if added else mesh


def _has_more(closed: ClosedJaxpr, mesh: AbstractMesh, axes: tuple[str, ...]) -> bool:
    """Whether a constraint, at any depth, names one of the axes, or one that the mesh lacks."""
    constraints = filter(is_constraint, _compat.every_eqn(closed.jaxpr))
    named = set().union(*(named_axes(eqn.params["sharding"].spec) for eqn in constraints))
    return not named <= {*mesh.axis_names} - {*axes}


def named_axes(spec: PartitionSpec) -> set[str]:
    return names_in(e for e in spec if e is not PartitionSpec.UNCONSTRAINED)


def is_constraint(eqn: JaxprEqn) -> bool:
    by_spec = isinstance(eqn.params.get("sharding"), NamedSharding)
    return eqn.primitive.name == "sharding_constraint" and by_spec


class Dropper:
    """Rewrites jaxprs that were traced where `seen` was set as jaxprs of one device.

    There, `axes` of the mesh are manual. Each method returns its argument without them, and without
    axes that the mesh lacks.
    """

    def __init__(self, axes: tuple[str, ...], mesh: AbstractMesh, seen: AbstractMesh) -> None:
        self.axes, self.all, self.seen = axes, mesh, seen
        self.jaxprs: dict[AnyJaxpr, AnyJaxpr] = {}  # the rewritten by the original

    def jaxpr(self, jaxpr: AnyJaxpr) -> AnyJaxpr:
        """Rewrites a jaxpr; always to the same object, because JAX caches by identity."""
        if jaxpr not in self.jaxprs:
            inner, consts = _compat.opened(jaxpr)
            rewritten = self._open(inner)
            is_open = inner is jaxpr and not consts
            self.jaxprs[jaxpr] = rewritten if is_open else ClosedJaxpr(rewritten, consts)
        return self.jaxprs[jaxpr]

    def _open(self, jaxpr: Jaxpr) -> Jaxpr:
        names: dict[Var, Var | Literal] = {}

        def declared(var: Var) -> Var:
            if isinstance(var, DropVar):
                return var
            names[var] = new = _compat.fresh(var, self.aval(var.aval))
            return new

        def named(atom: Var | Literal) -> Var | Literal:
            return self.literal(atom) if isinstance(atom, Literal) else names[atom]

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

    def literal(self, literal: Literal) -> Literal:
        """Rewrites a constant. JAX's arrays for these keep the mesh that they were made under, and
        their copies do not."""
        value = literal.val
        value = value.copy() if isinstance(value, np.ndarray) else value
        return Literal(value, self.aval(literal.aval))

    def says_nothing(self, constraint: JaxprEqn) -> bool:
        """Whether no axis is left that a constraint could name."""
        mesh = self.mesh(constraint.params["sharding"].mesh.abstract_mesh)
        return not mesh.auto_axes and constraint.params["layout"] is None

    def mesh(self, mesh: AbstractMesh) -> AbstractMesh:
        """Returns the step's mesh, whatever the loss saw in its place."""
        manual = [axis for axis in mesh.manual_axes if axis in self.all.axis_names]
        return self.all.update_axis_types(dict.fromkeys([*manual, *self.axes], AxisType.Manual))

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
        free = {*self.all.axis_names} - {*self.axes}
        return tuple(name for name in names if name in free) or None

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
        with seeing(self.seen, self.axes):
            jaxpr, *others = trace()
        return (self.jaxpr(jaxpr), *others)
