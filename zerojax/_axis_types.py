"""Axes of a mesh that are Explicit, Auto or Manual, where zerojax traces code."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from zerojax._specs import Axes, axes_in
from zerojax._types import PyTree

T = TypeVar("T")
NO_MESH = AbstractMesh((), ())
Owners = tuple[Mesh, Axes]
NOBODY: Owners = Mesh(np.empty((), object), ()), ()
# The devices that own matrices: see `_update/matrices.py`. None: only the types of arrays count.
OWNERS = contextvars.ContextVar[Owners | None]("owners", default=NOBODY)

# [Note: explicit axes]
# A user's mesh may have Explicit axes, as `jax.make_mesh` makes them. Arrays on it then carry their
# sharding in their types, and JAX demands a rule of every operation for it. A state rests on the
# user's mesh, so that the user's own code may read it there. At the edge of a step, `computed_with`
# takes its arrays onto a mesh of Auto axes, and `typed_as` what comes out back. Neither moves data.


def computed_with(tree: PyTree) -> PyTree:
    """Returns a tree with arrays of Auto axes in place of those of Explicit ones, in `jax.jit`."""

    def one(value: PyTree) -> PyTree:
        sharding = explicit_sharding(value)
        if sharding is None:
            return value
        mesh = auto_mesh(sharding)
        with seen_as(mesh):
            return jax.sharding.reshard(value, NamedSharding(mesh, PartitionSpec()))

    return jax.tree.map(one, tree)


def auto_mesh(sharding: NamedSharding) -> AbstractMesh:
    """Returns the mesh of a sharding with Auto axes, for code inside `jax.jit`."""
    mesh = sharding.mesh.abstract_mesh
    return mesh.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Auto))


def typed_as(tree: PyTree, given: PyTree, spec: PartitionSpec | None = None) -> PyTree:
    """Returns a tree with the types of `given`, a tree of the same structure; sharded as `spec` if
    that is passed."""

    def one(value: PyTree, given: PyTree) -> PyTree:
        sharding = explicit_sharding(given)
        if sharding is None:
            return value
        return typed(value, sharding if spec is None else sharding.update(spec=spec))

    return jax.tree.map(one, tree, given)


def typed(value: PyTree, sharding: NamedSharding) -> PyTree:
    """Returns a traced array with the Explicit axes of its sharding in its type."""
    mesh = sharding.mesh.abstract_mesh
    if not mesh.explicit_axes or not isinstance(value, Tracer):
        return value
    entries = map(axes_in, sharding.spec)
    kept = [tuple(axis for axis in e if axis in mesh.explicit_axes) or None for e in entries]
    with seen_as(mesh):
        return jax.sharding.reshard(value, NamedSharding(mesh, PartitionSpec(*kept)))


def explicit_sharding(value: PyTree) -> NamedSharding | None:
    """Returns the sharding in the type of an array, if it names Explicit axes."""
    sharding = jax.typeof(value).sharding if isinstance(value, jax.Array) else None
    return sharding if sharding is not None and sharding.mesh.explicit_axes else None


def carried_mesh(tree: PyTree) -> Mesh | None:
    """Returns the mesh whose Explicit axes some array has in its type."""
    arrays = (leaf for leaf in jax.tree.leaves(tree) if explicit_sharding(leaf) is not None)
    return next((array.sharding.mesh for array in arrays if not isinstance(array, Tracer)), None)


def with_auto_axes(mesh: Mesh) -> Mesh:
    """Returns a mesh of the same devices whose axes are Auto, on which zerojax computes."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


@contextlib.contextmanager
def seen_as(mesh: AbstractMesh) -> Iterator[None]:
    """Sets `mesh` inside a `with`, instead of any mesh that a caller has set."""
    set_to = jax.sharding.use_abstract_mesh
    # First an empty mesh, because JAX refuses to replace a mesh by one with axes of other sizes.
    with set_to(NO_MESH), set_to(mesh):
        yield


@contextlib.contextmanager
def auto_axes() -> Iterator[None]:
    """Makes the axes of the current mesh Auto while zerojax traces.

    A caller may have set a mesh with `jax.set_mesh`. Its axes are Explicit by default, so JAX would
    infer or demand a sharding for every operation.
    """
    mesh = jax.sharding.get_abstract_mesh()
    autos = dict.fromkeys(mesh.explicit_axes, AxisType.Auto)
    with jax.sharding.use_abstract_mesh(mesh.update_axis_types(autos)):
        yield


def on_auto_axes(method: Callable[[T, Array], Array]) -> Callable[[T, Array], Array]:
    """Has a method compute on Auto axes, in `jax.jit`. Its result has the Explicit axes of its
    argument, but those of the last dimension only if they divide it."""

    @functools.wraps(method)
    def run(self: T, value: Array) -> Array:
        with auto_axes():
            result = method(self, computed_with(value))
        if (sharding := explicit_sharding(value)) is None:
            return result
        parts = value.shape[-1] // sharding.shard_shape(value.shape)[-1]
        *entries, last = sharding.spec
        spec = PartitionSpec(*entries, None if result.shape[-1] % parts else last)
        return typed(result, sharding.update(spec=spec))

    return run


@contextlib.contextmanager
def owned_by(owners: Owners | None) -> Iterator[None]:
    """Has the devices along these axes own matrices, in updates that are traced inside."""
    token = OWNERS.set(owners)
    try:
        yield
    finally:
        OWNERS.reset(token)
