"""The devices of a plan, and the mesh axes that ZeRO shards over."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from zerojax import _compat
from zerojax._kernel.places import axes_size
from zerojax._run import processes as _processes
from zerojax._types import Device

DEFAULT_AXIS = "data"


def _default_mesh() -> Mesh:
    """Returns a mesh of all devices on one axis, `data`, in an order that suits their links.

    The fastest links are within a slice: a host of GPUs (or several that NVLink joins), or a slice
    of TPUs. So the devices of a slice are neighbours on the axis. JAX's own `make_mesh` refuses
    more than one slice.
    """
    slices: dict[int, list[Device]] = {}
    for device in jax.devices():
        slices.setdefault(getattr(device, "slice_index", 0), []).append(device)
    names, types = (DEFAULT_AXIS,), (AxisType.Auto,)
    rings = [slices[index] for index in sorted(slices)]
    meshes = [jax.make_mesh((len(r),), names, axis_types=types, devices=r) for r in rings]
    return Mesh(np.concatenate([mesh.devices for mesh in meshes]), names, axis_types=types)


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
    if list(sizes.values()).count(-1) == 1 and asked < 0 and len(devices) % -asked == 0:
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
    """Returns the mesh and the ZeRO axes that `mesh=` and `axis=` stand for."""
    _processes.warn_if_not_joined()
    mesh = _default_mesh() if mesh is None else mesh
    _check_devices(mesh)
    axes = _axes(mesh, axis)
    _check_auto(mesh)
    # The mesh says which links are fast, and not the order in which axes are named.
    return mesh, tuple(name for name in mesh.axis_names if name in axes)


def _check_devices(mesh: object) -> None:
    """Raises for what is not a mesh, such as a list of devices; and for one that has no devices,
    or has some twice."""
    if not isinstance(mesh, Mesh):
        count, options = mesh if isinstance(mesh, int) else jax.device_count(), ""
        if isinstance(mesh, list | tuple | np.ndarray):
            count, options = np.size(mesh), ", devices=devices"
        raise TypeError(
            f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}. Make one with "
            f"{call_for(count, options)}."
        )
    count = mesh.devices.size
    twice = count - len(set(mesh.devices.flat))
    if twice or not count:
        what = f"names {twice} of its {count} devices again" if twice else "has no devices"
        raise ValueError(
            f"the mesh {dict(mesh.shape)} {what}. Make it of different ones, for example "
            f"{call_for(jax.device_count())}."
        )


def call_for(count: int, options: str = "", axis: str = DEFAULT_AXIS) -> str:
    """Returns, for a message, the call that makes a mesh of `count` devices."""
    auto = "axis_types=(jax.sharding.AxisType.Auto,)"
    return f"jax.make_mesh(({count},), ({axis!r},), {auto}{options})"


def _axes(mesh: Mesh, axis: str | Sequence[str] | None) -> tuple[str, ...]:
    names = tuple(mesh.axis_names)
    if axis is None and len(names) > 1 and DEFAULT_AXIS not in names:
        each = ", ".join(f"axis={name!r}" for name in names)
        raise ValueError(
            f"the mesh has the axes {names} and none is called {DEFAULT_AXIS!r}, the default: pass "
            f"{each} or {'both' if len(names) == 2 else 'several'}, axis={names}. "
            f"Parameters, gradients and optimizer state sharded over {names[-1]!r} only (HSDP) "
            f"are, in the call that places the state, "
            f"groups=dict.fromkeys(('params', 'grads', 'opt_state'), {names[-1]!r})."
        )
    if axis is None:
        axis = names[0] if len(names) == 1 else DEFAULT_AXIS
    axes = (axis,) if isinstance(axis, str) else axis
    are_names = isinstance(axes, Sequence) and all(isinstance(name, str) for name in axes)
    if not are_names or not axes or len(set(axes)) < len(axes):
        raise ValueError(
            f"axis={axis!r} must name one mesh axis or several different ones; the mesh has "
            f"{names}. Pass one of them, or leave axis= out."
        )
    if unknown := [name for name in axes if name not in names]:
        raise ValueError(
            f"mesh has no axis {unknown[0]!r}; its axes are {names}. Pass axis=... with one of "
            "them, or with several."
        )
    return tuple(axes)


def _check_auto(mesh: Mesh) -> None:
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    if wrong := {name: kind for name, kind in types if kind != AxisType.Auto}:
        autos = ", ".join(["jax.sharding.AxisType.Auto"] * len(mesh.axis_names))
        raise ValueError(
            f"mesh axes {list(wrong)} are {next(iter(wrong.values()))}, and zerojax needs Auto "
            "axes (jax.make_mesh makes Explicit ones by default). Pass "
            f"jax.make_mesh(..., axis_types=({autos},))."
        )


@contextlib.contextmanager
def seen_as(mesh: AbstractMesh) -> Iterator[None]:
    """Sets `mesh` inside a `with`, in place of any mesh that a caller has set."""
    set_to = jax.sharding.use_abstract_mesh
    # An empty mesh first: JAX allows no change from one mesh to another with axes of other sizes.
    with set_to(AbstractMesh((), ())), set_to(mesh):
        yield


def unset() -> AbstractContextManager[object]:
    """Sets no mesh, so that arrays on a single device can be used."""
    return jax.set_mesh(Mesh(np.empty((), object), ()))


@contextlib.contextmanager
def auto_axes() -> Iterator[None]:
    """Makes the axes of the current mesh Auto while zerojax traces.

    A caller may have set a mesh with `jax.set_mesh`. Its axes are Explicit by default, and JAX then
    infers or demands a sharding for every operation.
    """
    mesh = jax.sharding.get_abstract_mesh()
    autos = dict.fromkeys(mesh.explicit_axes, AxisType.Auto)
    with jax.sharding.use_abstract_mesh(mesh.update_axis_types(autos)):
        yield


def check_runs(mesh: Mesh) -> None:
    """Raises for devices that are not there, for which code can only be compiled."""
    device = mesh.devices.flat[0]
    if _compat.is_compile_only(device):
        raise ValueError(
            f"this machine has no {device.device_kind}: one can only compile for the meshes of "
            "zerojax.aot. Use plan.abstract(), step.lower(...).compile(), zerojax.audit."
        )


def on_one_host(mesh: Mesh) -> int:
    """Counts the devices of the first one's host."""
    hosts = _hosts(mesh).ravel().tolist()
    return hosts.count(hosts[0])


def hosts_along(mesh: Mesh, axes: Sequence[str]) -> list[int]:
    """Returns the hosts of the devices along some axes, from the first device on."""
    places = [mesh.axis_names.index(axis) for axis in axes]
    rows = np.moveaxis(_hosts(mesh), places, range(-len(places), 0))
    return rows.reshape(-1, axes_size(mesh, axes))[0].tolist()


def _hosts(mesh: Mesh) -> np.ndarray:
    """Returns the host of each device, in the shape of the mesh."""
    devices = list(mesh.devices.flat)
    # A process may run one GPU of several. What JAX calls a slice is a host of them, or what NVLink
    # joins; devices that are not there are all of one.
    listed = hasattr(devices[0], "slice_index") and not _compat.is_compile_only(devices[0])
    hosts = [device.slice_index if listed else device.process_index for device in devices]
    return np.reshape(hosts, mesh.devices.shape)
