"""The devices of a plan, and the mesh axes that ZeRO shards over."""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from zerojax import _compat
from zerojax._declared import checked
from zerojax._run import processes as _processes
from zerojax._specs import Axes, as_names, beyond
from zerojax._types import Device

DEFAULT_AXIS = "data"


def _default_mesh() -> Mesh:
    """Returns a mesh of all devices on one axis, `data`, in an order that suits their links.

    The fastest links are within what JAX calls a slice: a host of GPUs (or several that NVLink
    joins), or a slice of TPUs. So the devices of a slice are neighbours on the axis. JAX's own
    `make_mesh` refuses more than one slice.
    """
    slices: dict[int, list[Device]] = {}
    for device in jax.devices():
        slices.setdefault(getattr(device, "slice_index", 0), []).append(device)
    names, types = (DEFAULT_AXIS,), (AxisType.Auto,)
    rings = [slices[index] for index in sorted(slices)]
    meshes = [jax.make_mesh((len(r),), names, axis_types=types, devices=r) for r in rings]
    return Mesh(np.concatenate([mesh.devices for mesh in meshes]), names, axis_types=types)


def current() -> Mesh | None:
    """Returns the mesh of `jax.set_mesh`, if there is one."""
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # inside of `jax.jit`, where JAX does not say
        return None
    return None if mesh.empty else mesh


@checked
def mesh(**sizes: int) -> Mesh:
    """Makes a mesh of several levels, such as `mesh(node=4, gpu=8)`, the innermost last.

    Devices of one host are neighbours along the last axis, which so has the fast links. One size
    may be -1: the number of devices decides it.

    Example:
        >>> mesh = zerojax.mesh(node=2, gpu=4)
        >>> print(dict(mesh.shape))
        {'node': 2, 'gpu': 4}
    """
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    such_as = f"zerojax.mesh(node=-1, gpu={jax.local_device_count()})"
    sizes = filled(sizes, len(devices), "devices", such_as)
    types = (AxisType.Auto,) * len(sizes)
    return Mesh(np.array(devices).reshape(*sizes.values()), tuple(sizes), axis_types=types)


def filled(sizes: Mapping[str, int], count: int, what: str, such_as: str) -> dict[str, int]:
    """Returns the sizes of the axes of a mesh, of which the number of devices may decide one."""
    others = -math.prod(sizes.values())  # the product of the other sizes, where one is -1
    if list(sizes.values()).count(-1) == 1 and others > 0 and count % others == 0:
        sizes = {name: count // others if n == -1 else n for name, n in sizes.items()}
    if not sizes or min(sizes.values()) < 1 or math.prod(sizes.values()) != count:
        product = " x ".join(map(str, sizes.values()))
        raise ValueError(
            f"a mesh of {product or 'no axes'} does not hold the {count} {what}. Pass sizes with "
            f"that product; one may be -1: {such_as}."
        )
    return dict(sizes)


def resolve(
    mesh: Mesh | None,
    axis: str | Sequence[str] | None,
    sequence: str | None = None,
    experts: str | None = None,
    pattern: str = "",
) -> tuple[Mesh, Axes]:
    """Returns the mesh and the ZeRO axes that `mesh=`, `axis=`, `sequence=` and the axis and
    pattern of `experts=` stand for."""
    _processes.warn_if_not_joined()
    mesh = (current() or _default_mesh()) if mesh is None else mesh
    _check_mesh(mesh)
    axes, names = as_names(axis), beyond(mesh.axis_names, (sequence, experts))
    more = tuple(filter(None, (sequence, experts)))
    options = (f"sequence={sequence!r}", sequence), (f"{experts!r} of experts=", experts)
    for option, name in options:
        if name and name not in mesh.axis_names:
            such_as = f"zerojax.mesh(data=-1, {name}=2), to a command --mesh data=-1,{name}=2"
            remedy = f"Name one of them, or pass a mesh that has it: mesh={such_as}."
            if name == experts and pattern in mesh.axis_names:
                remedy = f"The axis comes before the pattern: experts={{{pattern!r}: {name!r}}}."
            raise ValueError(
                f"{option} is no axis of the mesh, whose axes are {mesh.axis_names}. {remedy}"
            )
        if name in (axes or ()):
            raise ValueError(
                f"{option} and axis={axis!r} name the same axis. Leave it out of axis=: the batch "
                "is split over it, and ZeRO shards over it, all the same."
            )
    if experts and experts == sequence:
        raise ValueError(
            f"sequence={sequence!r} and experts= over {experts!r} name the same axis. Pass a mesh "
            "with an axis for each: mesh=zerojax.mesh(data=-1, sequence=2, expert=2), say."
        )
    if axis is None:
        is_alone = len(names) == 1 or {*mesh.axis_names} == {*more}
        axes = names if is_alone else (DEFAULT_AXIS,)
        if not set(axes) <= set(names):
            each = ", ".join(f"axis={name!r}" for name in names)
            raise ValueError(
                f"the mesh has the axes {names} and none is called {DEFAULT_AXIS!r}, the default: "
                f"pass {each} or {'both' if len(names) == 2 else 'several'}, axis={names}. To "
                f"shard parameters, gradients and optimizer state over {names[-1]!r} only (HSDP), "
                "pass groups=dict.fromkeys(('params', 'grads', 'opt_state'), "
                f"{names[-1]!r}) where you place the state."
            )
    fewest = min(len(names), 1)  # those of sequences and experts may be the only ones
    if axes is None or len({*axes}) < max(len(axes), fewest) or not {*axes} <= {*names}:
        raise ValueError(
            f"axis={axis!r} must name one axis of the mesh, or several different ones; its axes "
            f"are {names}. Pass one of them, or leave axis= out."
        )
    # The mesh, not the order in which a user names axes, says which links are fast.
    return mesh, tuple(name for name in mesh.axis_names if name in {*axes, *more})


def _check_mesh(mesh: object) -> None:
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
        what = "names some devices more than once" if twice else "has no devices"
        raise ValueError(
            f"the mesh {dict(mesh.shape)} {what}. Make it of different ones, for example "
            f"{call_for(jax.device_count())}."
        )
    if AxisType.Manual in mesh.axis_types:
        raise ValueError(
            f"the axes of the mesh are {mesh.axis_types}; Manual ones are of one device, inside of "
            "a jax.shard_map. Pass the mesh that you made, outside of the shard_map."
        )


def call_for(count: int, options: str = "", axis: str = DEFAULT_AXIS) -> str:
    """Returns, for a message, the call that makes a mesh of `count` devices."""
    auto = "axis_types=(jax.sharding.AxisType.Auto,)"
    return f"jax.make_mesh(({count},), ({axis!r},), {auto}{options})"


def unset() -> AbstractContextManager[object]:
    """Sets no mesh, so that arrays on a single device can be used."""
    return jax.set_mesh(Mesh(np.empty((), object), ()))


def check_runs(mesh: Mesh) -> None:
    """Raises for the devices of `zerojax.aot`, which can only be compiled for."""
    device = mesh.devices.flat[0]
    if _compat.is_compile_only(device):
        raise ValueError(
            f"this machine has no {device.device_kind}: one can only compile for the meshes of "
            "zerojax.aot. Use plan.abstract(), step.lower(...).compile(), zerojax.audit."
        )


def on_one_host(mesh: Mesh) -> int:
    """Counts the devices of the first one's host."""
    hosts = _hosts(mesh)
    return int(np.sum(hosts == hosts.flat[0]))


def hosts_along(mesh: Mesh, axes: Sequence[str]) -> list[int]:
    """Returns the hosts of the devices along some axes, from the first device on."""
    row = tuple(slice(None) if axis in axes else 0 for axis in mesh.axis_names)
    return _hosts(mesh)[row].ravel().tolist()


def _hosts(mesh: Mesh) -> np.ndarray:
    """Returns the host of each device, in the shape of the mesh."""
    devices = list(mesh.devices.flat)
    # Each process may run one of several GPUs, but JAX gives the GPUs of a host, or all that NVLink
    # joins, one slice index. The devices of `zerojax.aot` all have the same.
    has_slices = hasattr(devices[0], "slice_index") and not _compat.is_compile_only(devices[0])
    hosts = [device.slice_index if has_slices else device.process_index for device in devices]
    return np.reshape(hosts, mesh.devices.shape)
