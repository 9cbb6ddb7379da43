"""The devices of a plan, and the mesh axes that ZeRO shards over."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from zerojax import _compat
from zerojax._types import Device

DEFAULT_AXIS = "data"


def default_mesh() -> Mesh:
    """Returns all devices on one axis, `data`, where the fastest links join neighbours.

    Those links join the devices of a slice: a host of GPUs (or what NVLink joins across hosts), or
    a slice of TPUs. JAX's own `make_mesh` refuses more than one slice.
    """
    slices: dict[int, list[Device]] = {}
    for device in jax.devices():
        slices.setdefault(getattr(device, "slice_index", 0), []).append(device)
    names, types = (DEFAULT_AXIS,), (AxisType.Auto,)
    rings = [
        jax.make_mesh((len(ring),), names, axis_types=types, devices=ring).devices
        for _, ring in sorted(slices.items())
    ]
    return Mesh(np.concatenate(rings), names, axis_types=types)


def mesh(**sizes: int) -> Mesh:
    """Makes a mesh of several levels, such as `mesh(node=4, gpu=8)`, the innermost last.

    Devices of one host are next to each other along the last axis, so that this is the one of the
    fast links. One size may be -1: what the devices leave.

    Example:
        >>> mesh = zerojax.mesh(node=2, gpu=4)
        >>> print(dict(mesh.shape))
        {'node': 2, 'gpu': 4}
    """
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    asked = math.prod(sizes.values())
    if list(sizes.values()).count(-1) == 1 and len(devices) % -asked == 0:
        sizes = {name: len(devices) // -asked if n == -1 else n for name, n in sizes.items()}
    if not sizes or min(sizes.values()) < 1 or math.prod(sizes.values()) != len(devices):
        product = " x ".join(map(str, sizes.values()))
        raise ValueError(
            f"a mesh of {product or 'no axes'} does not hold the {len(devices)} devices. Pass "
            "sizes with that product; one may be -1: zerojax.mesh(node=-1, "
            f"gpu={jax.local_device_count()})."
        )
    types = (AxisType.Auto,) * len(sizes)
    return Mesh(np.array(devices).reshape(*sizes.values()), tuple(sizes), axis_types=types)


def resolve(mesh: Mesh | None, axis: str | Sequence[str] | None) -> tuple[Mesh, tuple[str, ...]]:
    """Returns the mesh and the ZeRO axes that a caller meant, or raises and says what to pass."""
    mesh = default_mesh() if mesh is None else mesh
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}. Make one with "
            "jax.make_mesh((8,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))."
        )
    _check_devices(mesh)
    axes = _axes(mesh, axis)
    _check_auto(mesh)
    return mesh, axes


def _axes(mesh: Mesh, axis: str | Sequence[str] | None) -> tuple[str, ...]:
    if axis is None:
        axis = mesh.axis_names[0] if len(mesh.axis_names) == 1 else DEFAULT_AXIS
    axes = (axis,) if isinstance(axis, str) else axis
    are_names = isinstance(axes, Sequence) and all(isinstance(name, str) for name in axes)
    if not are_names or not axes or len(set(axes)) < len(axes):
        raise ValueError(
            f"axis={axis!r} must name one mesh axis or several different ones; the mesh has "
            f"{tuple(mesh.axis_names)}. Pass one of them, or leave axis= out."
        )
    for name in axes:
        if name not in mesh.axis_names:
            raise ValueError(
                f"mesh has no axis {name!r}; its axes are {tuple(mesh.axis_names)}. "
                "Pass axis=... with one of them, or with several."
            )
    return tuple(axes)


def _check_auto(mesh: Mesh) -> None:
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    wrong = [name for name in mesh.axis_names if types[name] != AxisType.Auto]
    if wrong:
        autos = ", ".join(["jax.sharding.AxisType.Auto"] * len(types))
        raise ValueError(
            f"mesh axes {wrong} are {types[wrong[0]]}, and zerojax needs Auto axes "
            "(jax.make_mesh makes Explicit ones by default). Pass "
            f"jax.make_mesh(..., axis_types=({autos},))."
        )


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


@contextlib.contextmanager
def seen_as(mesh: AbstractMesh) -> Iterator[None]:
    """Sets `mesh`, whatever mesh a caller has set."""
    set_to = jax.sharding.use_abstract_mesh
    # First none at all: from one mesh to another, JAX demands axes of equal sizes.
    with set_to(AbstractMesh((), ())), set_to(mesh):
        yield


def unset() -> AbstractContextManager[object]:
    """Sets no mesh, so that values of a single device can be computed with."""
    return jax.set_mesh(Mesh(np.empty((), object), ()))


@contextlib.contextmanager
def auto_axes() -> Iterator[None]:
    """Makes the axes of the mesh that is set Auto, for what zerojax traces.

    Those of a mesh that a caller has set, by `jax.set_mesh`, are Explicit by default, and would
    decide over every operation.
    """
    mesh = jax.sharding.get_abstract_mesh()
    autos = dict.fromkeys(mesh.explicit_axes, AxisType.Auto)
    with jax.sharding.use_abstract_mesh(mesh.update_axis_types(autos)):
        yield


def check_runs(mesh: Mesh) -> None:
    """Raises for devices that code can only be compiled for."""
    device = mesh.devices.flat[0]
    if _compat.is_compile_only(device):
        raise ValueError(
            f"this machine has no {device.device_kind}: one can only compile for the meshes of "
            "zerojax.aot. Use plan.abstract(), step.lower(...).compile(), zerojax.audit."
        )


def axes_size(mesh: Mesh, axes: Sequence[str]) -> int:
    """Returns the number of devices that these axes shard over."""
    return math.prod(mesh.shape[name] for name in axes)
