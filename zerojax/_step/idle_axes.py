"""Finds mesh axes that nothing is sharded over: their replicas would compute the same batch."""

import math
from collections.abc import Callable

import jax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import NamedSharding, PartitionSpec

from zerojax._loss.constraints import named_axes
from zerojax._plan.plan import Plan
from zerojax._types import PyTree


def check_used(plan: Plan, args: PyTree, trace: Callable[[], ClosedJaxpr]) -> bool:
    """Raises for a mesh axis that no leaf of the state, no argument and no operation uses.

    `trace` makes the step's jaxpr, where the state and the arguments leave the question open.
    Returns whether it could look: inside of another `jax.jit`, nothing says where the batch is.
    """
    sizes = {axis: n for axis, n in plan.mesh.shape.items() if n > 1}
    values = jax.tree.leaves(args)
    idle = sizes.keys() - {*plan.batch_axes}
    idle -= _axes_in([*(leaf.spec for leaf in plan.leaves), *values])
    if idle and any(isinstance(value, Tracer) for value in values):
        return False
    if idle:
        closed = trace()
        idle -= _axes_in([closed, *closed.consts])
    if not idle:
        return True
    named = {axis: n for axis, n in sizes.items() if axis in idle}
    count = math.prod(named.values())
    wanted = tuple(axis for axis in plan.mesh.axis_names if axis in idle.union(plan.batch_axes))
    raise ValueError(
        f"nothing is sharded over the mesh axes {named}: no leaf of the state, no part of the "
        f"batch, and the loss does not name them. Each of {count} replicas would compute the same "
        f"batch. Shard over all, axis={wanted!r}, or pass a mesh without {tuple(named)}."
    )


def _axes_in(value: object) -> set[str]:
    """Returns the mesh axes named by shardings, arrays' too, specs, and equations at any depth."""
    match value:
        case jax.Array() | jax.ShapeDtypeStruct():
            return _axes_in(getattr(value, "sharding", None))
        case str():
            return {value}
        case NamedSharding():
            return named_axes(value.spec)
        case PartitionSpec():
            return named_axes(value)
        case Jaxpr() | ClosedJaxpr():
            params = (item for eqn in value.eqns for item in eqn.params.items())
            return _axes_in([param for key, param in params if key != "name"])  # of a function
        case tuple() | list() | set() | frozenset():
            return set().union(*map(_axes_in, value))
    return set()
