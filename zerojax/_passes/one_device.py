"""Traces code as that of one device, as a loss is."""

# pyright: strict, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import contextlib
from collections.abc import Callable, Generator
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from zerojax import _axis_types
from zerojax._passes import means as _means
from zerojax._types import PyTree

T = TypeVar("T")


def as_one_device(code: Callable[[], T], mesh: Mesh, axes: tuple[str, ...]) -> T:
    """Returns `code()`, called where JAX traces the code of one device, in a `shard_map` over
    `axes`."""
    results: list[T] = []

    def per_device() -> Array:
        results.append(code())
        return jnp.zeros(())

    specs: PyTree = {"in_specs": (), "out_specs": PartitionSpec(), "axis_names": {*axes}}
    with _axis_types.seen_as(mesh.abstract_mesh):
        jax.eval_shape(jax.shard_map(per_device, mesh=mesh, **specs, check_vma=False))
    return results[0]


def typed(values: PyTree, mesh: AbstractMesh) -> PyTree:
    """Returns shapes with the types of values computed on `mesh`: libraries compare the two."""

    def typed(v: Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        said = v.sharding if isinstance(v, jax.ShapeDtypeStruct) and mesh.explicit_axes else None
        sharding = NamedSharding(mesh, said.spec if said else PartitionSpec())
        weak = getattr(v, "weak_type", False)
        return jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=sharding, weak_type=weak)

    return jax.tree.map(typed, values)


@contextlib.contextmanager
def seeing(mesh: AbstractMesh, axes: tuple[str, ...]) -> Generator[None]:
    """Sets the mesh that a loss sees; `axes` are those that its batch is split over."""
    token = _means.AXES.set(axes)
    try:
        with _axis_types.seen_as(mesh):
            yield
    finally:
        _means.AXES.reset(token)
