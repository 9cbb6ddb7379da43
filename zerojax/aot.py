"""Meshes of GPUs and TPUs that this machine lacks: XLA compiles for them; nothing runs on them.

mesh = zerojax.aot.mesh("64xH100")
plan = zerojax.plan(make_state, stage=3, mesh=mesh)
batch = zerojax.aot.batch(jax.ShapeDtypeStruct((256, 1024), "int32"), plan)
compiled = step.lower(plan.abstract(), batch).compile()
"""

import functools
import importlib.metadata
import importlib.util
import math
import os
import pathlib
import shutil
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from zerojax import _compat
from zerojax._declared import checked
from zerojax._loss import batch as _batch
from zerojax._plan import mesh as _mesh
from zerojax._plan.plan import Plan
from zerojax._state import refusals as _refusals, state as _state
from zerojax._types import Device, PyTree, is_key
from zerojax.tools._hlo import gpus as _gpus

PER_HOST = 8
# The slices that Google Cloud rents, by XLA's names for the chips. A chip is one device.
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_DEEP = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16")
TPUS = {"v5e": _FLAT, "v6e": _FLAT, "v5p": _DEEP}
ONE_HOST = 8  # flat slices of as many chips are one host; all others have 4 chips a host
# Without these, libtpu asks Google Cloud which machine this is, and refuses a second process.
TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@checked
def mesh(
    gpus: str,
    shape: Sequence[int] | None = None,
    axis_names: str | Sequence[str] = _mesh.DEFAULT_AXIS,
    *,
    per_host: int = PER_HOST,
) -> Mesh:
    """Makes a mesh to compile for, of GPUs such as "64xH100" or a slice of TPUs such as "v5e:2x4";
    pass it wherever a mesh goes.

    Arguments:
        gpus: how many of which GPU: T4, L4, L40S, A10G, RTX4090, RTX5090, V100-16GB, V100-32GB,
            A100-40GB, A100-80GB, H20, H100, H200, B200, B300, or the superchips GH200, GB200 and
            GB300. `docs/gpus.md` says what is known of each. Or TPUs v5e, v5p or v6e and the shape
            of their slice: `docs/limits.md`.
        shape, axis_names: as in `jax.make_mesh`; by default one axis, `data`, over all of them.
        per_host: the number of GPUs on a host; fewer GPUs than that are on one host. The hosts of
            TPUs follow from their slice.

    Example:
        >>> mesh = zerojax.aot.mesh("64xH100", shape=(8, 8), axis_names=("replica", "data"))
        >>> print(dict(mesh.shape), mesh.devices.flat[0].device_kind)  # doctest: +ELLIPSIS
        {'replica': 8, 'data': 8} NVIDIA H100...
    """
    in_slice = isinstance(gpus, str) and bool(_gpus.TPU.search(gpus))
    if in_slice:
        count = math.prod(_chips(gpus))
        if per_host != PER_HOST:
            raise ValueError(f"the hosts of {gpus} follow from its shape. Leave per_host= out.")
    else:
        count, gpu = _gpus.parse_count(gpus)
        if not isinstance(per_host, int) or per_host < 1 or count % min(count, per_host):
            raise ValueError(
                f"{count} GPUs do not fill hosts of {per_host!r}. Pass a multiple, or per_host=."
            )
        local = min(count, per_host)
    names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
    sizes = (count,) if shape is None else tuple(np.atleast_1d(shape).tolist())
    if int(np.prod(sizes)) != count or len(sizes) != len(names):
        raise ValueError(
            f"a mesh of shape {sizes} with axes {names} does not hold {count} "
            f"{'TPUs' if in_slice else 'GPUs'}. Pass shape= with that product, and as many "
            "axis_names=."
        )
    types = (AxisType.Auto,) * len(names)
    if in_slice:  # JAX orders them by their links, as on a machine that has them
        return jax.make_mesh(sizes, names, axis_types=types, devices=_tpus(gpus))
    devices = np.array(_devices(gpu.name, count // local, local)).reshape(sizes)
    return Mesh(devices, names, axis_types=types)


@checked
def batch(shapes: PyTree, plan: Plan, *, batch_specs: PyTree = None) -> PyTree:
    """Makes `jax.ShapeDtypeStruct`s of a global batch, sharded along their first dimension.

    They are sharded as `zerojax.shard_batch` has them; random keys and scalars are replicated.
    `batch_specs` are as in `zerojax.train_step`.

    Example:
        >>> plan = zerojax.plan({"params": {"w": jnp.ones((64, 16))}}, stage=3)
        >>> tokens = zerojax.aot.batch(jax.ShapeDtypeStruct((32, 128), jnp.int32), plan)
        >>> print(tokens.shape, tokens.sharding.spec)
        (32, 128) P('data',)
    """
    _refusals.check_values(shapes, "batch", or_shapes=True)

    def placed(leaf: PyTree, role: _batch.Role) -> jax.ShapeDtypeStruct:
        leaf = _state.shape_dtype(leaf)
        spec = PartitionSpec() if is_key(leaf) else _batch.placed_spec(leaf, role, plan._splits)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(plan.mesh, spec))

    leaves, treedef = jax.tree.flatten(shapes)
    roles = _batch.roles((shapes,), batch_specs, plan._splits)
    return treedef.unflatten(map(placed, leaves, roles))


def _chips(name: str) -> tuple[int, ...]:
    """Returns the shape of a slice of TPUs, such as (2, 4) of "v5e:2x4"."""
    kind, _, shape = name.partition(":")
    if shape not in TPUS.get(kind, ()):
        known = "; ".join(f"{kind} of {', '.join(shapes)}" for kind, shapes in TPUS.items())
        raise ValueError(
            f"no facts about a slice of TPUs {name!r}. Write for example 'v5e:2x4'; known: {known}."
        )
    return tuple(map(int, shape.split("x")))


@functools.cache
def _tpus(name: str) -> list[Device]:
    if not _is_installed("libtpu"):
        raise ModuleNotFoundError(
            "compiling for TPUs needs a package that is missing here (libtpu). Run: "
            "pip install 'jax[tpu]'"
        )
    jax.devices()  # where there are TPUs, they must not see the variables
    for variable, value in TPU_ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    chips = _chips(name)
    one_host = len(chips) == 2 and math.prod(chips) <= ONE_HOST
    hosts = {"chips_per_host_bounds": (*chips, 1)} if one_host else {}
    return topologies.get_topology_desc(name, platform="tpu", **hosts).devices


@functools.cache
def _devices(name: str, hosts: int, local: int) -> list[Device]:
    _check_packages()
    gpu = _gpus.GPUS[name]
    if gpu.capability < _gpus.CUDA_13 and _cuda() == "cuda13":  # XLA may end the process
        raise ModuleNotFoundError(
            f"CUDA 13 does not compile for a {name}; CUDA 12 does. Make an environment without "
            f"jax-cuda13-plugin, and run there: pip install zerojax jax=={jax.__version__} && "
            f"{_install_command('cuda12')}"
        )
    # The plugin refuses machines without a driver, unless it finds this when it is first loaded.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    jax.devices()  # backends must exist before a topology is asked for
    _compat.assume_cudnn()
    try:
        topology = topologies.get_topology_desc(
            name,
            platform="cuda",
            # One partition, which is as far as NVLink reaches, for each host. XLA's scheduler has
            # no model of wires between hosts of a partition: it assumes 5 ms for a collective.
            topology=f"{hosts}x1x{local}",
            target_config=gpu.target_config(),
        )
    except NotImplementedError as error:
        raise RuntimeError(
            "this process used JAX before, which gave up its CUDA plugin because this machine has "
            "no driver. Set JAX_PLATFORMS=cpu or JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 before JAX "
            "is imported: in a notebook in the first cell, os.environ['JAX_PLATFORMS'] = 'cpu'."
        ) from error
    return list(topology.devices)


def _check_packages() -> None:
    """Raises if a package is missing, without which the compiler would end the process."""
    cuda = _cuda()
    packages = {
        f"jax-{cuda}-plugin": _is_installed(f"jax_{cuda}_plugin"),
        f"jax-{cuda}-pjrt": _is_installed(f"jax_plugins.xla_{cuda}"),
        "nvidia-cuda-nvcc": _find_tool("bin/ptxas") or shutil.which("ptxas"),
        "nvidia-nvvm": _find_tool("nvvm/libdevice/libdevice.10.bc"),
    }
    if missing := [package for package, at in packages.items() if not at]:
        raise ModuleNotFoundError(
            f"compiling for GPUs needs packages that are missing here ({', '.join(missing)}). Run: "
            f"{_install_command(cuda)}"
        )
    version = importlib.metadata.version(f"jax-{cuda}-plugin")
    if version != jax.__version__:
        raise ModuleNotFoundError(
            f"jax-{cuda}-plugin {version} does not match jax {jax.__version__}. Run: "
            f"{_install_command(cuda)}"
        )


def _install_command(cuda: str = "cuda13") -> str:
    """Returns the command that installs the compiler for GPUs: 0.7 GB, without CUDA libraries.

    It keeps the installed JAX, and fetches the compiler that matches it.
    """
    tools = "nvidia-cuda-nvcc" if cuda == "cuda13" else f"nvidia-cuda-nvcc-{cuda.replace('da', '')}"
    return f"pip install 'jax[{cuda}-local]' {tools}"


def _cuda() -> str:
    return "cuda12" if _is_installed("jax_cuda12_plugin") else "cuda13"


def _is_installed(module: str) -> bool:
    parent, _, _ = module.rpartition(".")
    # `find_spec` raises for a module whose parent is missing.
    return (not parent or _is_installed(parent)) and importlib.util.find_spec(module) is not None


def _find_tool(relative: str) -> pathlib.Path | None:
    """Looks for a tool in NVIDIA's wheels."""
    spec = importlib.util.find_spec("nvidia")
    roots = (spec and spec.submodule_search_locations) or []
    return next((path for root in roots for path in pathlib.Path(root).glob(f"*/{relative}")), None)
