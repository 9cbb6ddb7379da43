"""Which devices, and along which of their axes ZeRO shards."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

DEFAULT_AXIS = "data"


def default_mesh() -> Mesh:
    """One axis, `data`, over all devices, neighbours on it joined by the fastest links.

    Those join the devices of a slice: to JAX a host of GPUs (or what NVLink joins across hosts),
    or a slice of TPUs. Its own `make_mesh` refuses more than one.
    """
    slices: dict[int, list[Any]] = {}
    for device in jax.devices():
        slices.setdefault(getattr(device, "slice_index", 0), []).append(device)
    rings = [_ring(slices[index]).devices for index in sorted(slices)]
    return Mesh(np.concatenate(rings), (DEFAULT_AXIS,), axis_types=(AxisType.Auto,))


def _ring(devices: Sequence[Any]) -> Mesh:
    names, types = (DEFAULT_AXIS,), (AxisType.Auto,)
    return jax.make_mesh((len(devices),), names, axis_types=types, devices=devices)


def resolve(mesh: Mesh | None, axis: str | Sequence[str] | None) -> tuple[Mesh, tuple[str, ...]]:
    """The mesh and the ZeRO axes that a caller meant, or an error that says what to pass."""
    mesh = default_mesh() if mesh is None else mesh
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}. Make one with "
            "jax.make_mesh((8,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))."
        )
    _check_devices(mesh)
    only_axis = mesh.axis_names[0] if len(mesh.axis_names) == 1 else DEFAULT_AXIS
    wanted = only_axis if axis is None else axis
    axes = (wanted,) if isinstance(wanted, str) else _names(wanted)
    if not axes or len(set(axes)) < len(axes):
        raise ValueError(
            f"axis={axis!r} must name one mesh axis or several different ones; the mesh has "
            f"{tuple(mesh.axis_names)}. Pass one of them, or leave axis= out."
        )
    for name in axes:
        if name not in mesh.axis_names:
            raise ValueError(
                f"mesh has no axis {name!r}; its axes are {tuple(mesh.axis_names)}. "
                f"Pass axis=... with one of them."
            )
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    wrong = [name for name in mesh.axis_names if types[name] != AxisType.Auto]
    if wrong:
        autos = ", ".join(["jax.sharding.AxisType.Auto"] * len(types))
        raise ValueError(
            f"mesh axes {wrong} are {types[wrong[0]]}, and zerojax needs Auto axes "
            "(jax.make_mesh makes Explicit ones by default). Pass "
            f"jax.make_mesh(..., axis_types=({autos},))."
        )
    return mesh, axes


def _check_devices(mesh: Mesh) -> None:
    count = mesh.devices.size
    twice = count - len(set(mesh.devices.flat))
    if twice or not count:
        what = f"names {twice} of its {count} devices again" if twice else "has no devices"
        raise ValueError(
            f"the mesh {dict(mesh.shape)} {what}. Make it of different ones, for example "
            f"jax.make_mesh(({jax.device_count()},), ('data',), "
            "axis_types=(jax.sharding.AxisType.Auto,))."
        )


def _names(axis: Any) -> tuple[str, ...]:
    """The axes in a sequence of names; () for what is none."""
    is_names = isinstance(axis, Sequence) and all(isinstance(name, str) for name in axis)
    return tuple(axis) if is_names else ()


@contextlib.contextmanager
def seen_as(mesh: AbstractMesh) -> Iterator[None]:
    """Sets `mesh`, whatever mesh a caller has set: by way of none, as JAX wants equal sizes."""
    set_to = jax.sharding.use_abstract_mesh
    with set_to(AbstractMesh((), ())), set_to(mesh):
        yield


def unset() -> Any:
    """No mesh set, so that values of a single device can be computed with."""
    return jax.set_mesh(Mesh(np.empty((), object), ()))


@contextlib.contextmanager
def auto_axes() -> Iterator[None]:
    """Around what zerojax traces: axes of a mesh that a caller has set, by `jax.set_mesh`, are
    Explicit by default, and these decide over every operation. Here they are Auto."""
    mesh = jax.sharding.get_abstract_mesh()
    autos = dict.fromkeys(mesh.explicit_axes, AxisType.Auto)
    with jax.sharding.use_abstract_mesh(mesh.update_axis_types(autos)):
        yield


def check_runs(mesh: Mesh) -> None:
    """Raises for devices that code can only be compiled for."""
    if type(getattr(mesh.devices.flat[0], "client", None)).__name__.startswith("CompileOnly"):
        raise ValueError(
            f"these {mesh.devices.flat[0].device_kind} are not there: one can only compile for the "
            "meshes of zerojax.aot. Use plan.abstract(), step.lower(...).compile(), zerojax.audit."
        )


def axes_size(mesh: Mesh, axes: Sequence[str]) -> int:
    """Over how many devices ZeRO shards."""
    return math.prod(mesh.shape[name] for name in axes)
