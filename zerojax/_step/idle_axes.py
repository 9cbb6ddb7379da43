"""Finds mesh axes that nothing is sharded over: their replicas would compute the same batch."""

import math
from collections.abc import Callable, Iterable

import jax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import NamedSharding, PartitionSpec

from zerojax._collectives import names_in
from zerojax._plan.plan import Plan
from zerojax._types import PyTree


def check_used(plan: Plan, args: PyTree, trace: Callable[[], ClosedJaxpr]) -> bool:
    """Raises for a mesh axis that no leaf of the state, no argument and no operation uses.

    `trace` makes the step's jaxpr, where the state and the arguments leave the question open.
    Returns whether it could look: inside of another `jax.jit`, nothing says where the batch is.
    """
    sizes = {
        name: n for name, n in plan.mesh.shape.items() if n > 1 and name not in plan.batch_axes
    }
    values = jax.tree.leaves(args)
    idle = sizes.keys() - _axes_in([leaf.spec for leaf in plan.leaves]) - _axes_of(values)
    if idle and any(isinstance(value, Tracer) for value in values):
        return False
    if not idle:
        return True
    closed = trace()
    idle -= _axes_of(closed.consts) | _axes_in([closed])
    if not idle:
        return True
    named = {name: sizes[name] for name in sizes if name in idle}
    count = math.prod(named.values())
    wanted = tuple(name for name in plan.mesh.axis_names if name in idle or name in plan.batch_axes)
    raise ValueError(
        f"nothing is sharded over the mesh axes {named}: no leaf of the state, no part of the "
        f"batch, and the loss does not name them. Each of {count} replicas would compute the same "
        f"batch. Shard over all, axis={wanted!r}, or pass a mesh without {tuple(named)}."
    )


def _axes_of(values: Iterable[PyTree]) -> set[str]:
    """Returns the mesh axes that arrays, or shapes with shardings, are sharded over."""
    return _axes_in([getattr(value, "sharding", None) for value in values])


def _axes_in(values: Iterable[object]) -> set[str]:
    """Returns the mesh axes named by shardings, specs, and equations at any depth."""
    found: set[str] = set()
    stack = list(values)
    while stack:
        value = stack.pop()
        value = value.jaxpr if isinstance(value, ClosedJaxpr) else value
        if isinstance(value, str):
            found.add(value)
        elif isinstance(value, NamedSharding):
            stack.append(value.spec)
        elif isinstance(value, PartitionSpec):
            found |= names_in(e for e in value if e is not PartitionSpec.UNCONSTRAINED)
        elif isinstance(value, tuple | list | set | frozenset):
            stack.extend(value)
        elif isinstance(value, Jaxpr):
            params = (item for eqn in value.eqns for item in eqn.params.items())
            stack.extend(param for key, param in params if key != "name")  # of a function
    return found
