"""The XLA options that a program needs, on GPU backends only, and only those XLA knows."""

import functools
from typing import Any

import jax
from jax.sharding import Mesh, SingleDeviceSharding

from zerojax import _compat

COMBINE = (
    "xla_gpu_all_gather_combine_threshold_bytes",
    "xla_gpu_reduce_scatter_combine_threshold_bytes",
)
DOUBLE_BUFFER = "xla_gpu_enable_while_loop_double_buffering"
# Its kernel for small all-reduces does not compile over several hosts.
COLLECTIVE_KERNELS = "xla_gpu_experimental_use_collective_kernels"


def options_for(jaxpr: Any, mesh: Mesh) -> dict[str, Any]:
    """For a step on this mesh. Loops that gather a layer ahead want the layer's collectives
    combined into one, and gathered weights that pass from turn to turn without a copy; other
    programs are slower with either."""
    device = mesh.devices.flat[0]
    if device.platform not in ("gpu", "cuda"):
        return {}
    wanted: dict[str, Any] = {}
    layer = max(gathered_in_loops(jaxpr), default=0)
    if layer:
        wanted |= dict.fromkeys(COMBINE, layer + layer // 8) | {DOUBLE_BUFFER: True}
    if len({d.process_index for d in mesh.devices.flat}) > 1:
        wanted[COLLECTIVE_KERNELS] = ""
    return {name: value for name, value in wanted.items() if is_known(name, value, device)}


def gathered_in_loops(jaxpr: Any) -> list[int]:
    """For each loop, the bytes that one turn of it gathers, inner loops apart."""
    loops: list[int] = []
    _gathered(jaxpr, loops)
    return loops


def _gathered(jaxpr: Any, loops: list[int]) -> int:
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "all_gather":
            total += sum(v.aval.size * v.aval.dtype.itemsize for v in eqn.outvars)
        inside = sum(_gathered(inner, loops) for inner in _compat.inner_jaxprs(eqn))
        if eqn.primitive.name in ("scan", "while"):
            loops.append(inside)
        else:
            total += inside
    return total


@functools.cache
def is_known(name: str, value: Any, device: Any) -> bool:
    """Whether the installed XLA takes an option: names come and go with its versions."""
    scalar = jax.ShapeDtypeStruct((), "float32", sharding=SingleDeviceSharding(device))
    try:
        jax.jit(lambda x: x, compiler_options={name: value}).lower(scalar).compile()
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return False
    return True
