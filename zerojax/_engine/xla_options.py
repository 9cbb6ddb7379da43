"""The XLA options that a program needs, on GPU backends only, and only those XLA knows."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, SingleDeviceSharding

from zerojax import _compat

COMBINE_GATHERS = "xla_gpu_all_gather_combine_threshold_bytes"
COMBINE_SCATTERS = "xla_gpu_reduce_scatter_combine_threshold_bytes"  # of what comes out of them
MEMORY_SLOP = "xla_gpu_memory_limit_slop_factor"  # percent of the memory for its schedule
DOUBLE_BUFFER = "xla_gpu_enable_while_loop_double_buffering"
# Its kernel for small all-reduces does not compile over several hosts.
COLLECTIVE_KERNELS = "xla_gpu_experimental_use_collective_kernels"
# Unasked, XLA's scheduler hides communication under compute from Hopper on only.
HIDE_LATENCY, OLDER = "xla_gpu_enable_latency_hiding_scheduler", ("6.", "7.", "8.")


def options_for(jaxpr: Any, mesh: Mesh, ahead: bool) -> dict[str, Any]:
    """For a step on this mesh. Loops that gather a layer ahead want the layer's collectives
    combined into one, and gathered weights that pass from turn to turn without a copy; other
    programs are slower with either. `ahead`: whether the step's loops do so."""
    device = mesh.devices.flat[0]
    if device.platform not in ("gpu", "cuda"):
        return {}
    wanted: dict[str, Any] = {}
    # A loop over layers does both in backward; one that only gathers is the end of a step.
    turns = [turn for turn in turns_of(jaxpr) if turn.gathered and turn.scattered]
    if turns and ahead:
        wanted |= combined(turns, _compat.LARGEST_COLLECTIVE)
        wanted[DOUBLE_BUFFER] = True
    if mesh.size > 1 and is_older(device):
        wanted[HIDE_LATENCY] = True
    if spans_hosts(mesh):
        wanted[COLLECTIVE_KERNELS] = ""
    return {name: value for name, value in wanted.items() if is_known(name, value, device)}


def knows_wires(mesh: Mesh) -> bool:
    """Whether XLA's scheduler knows how long collectives take: from Hopper on, between hosts.

    Where it does, a layer's weights can wait for the gradients before them, which saves memory of
    a layer's size. Elsewhere it would leave one of the two nothing to hide behind: 3% of a 7.5B
    step on a host of 8 H100s, 5% on 64 A100s.
    """
    return spans_hosts(mesh) and not is_older(mesh.devices.flat[0])


def mixes_up_collectives(mesh: Mesh) -> bool:
    """Whether collectives after a loop may run in the midst of it: on (emulated) CPU devices.

    See the note in `fence.py`. GPUs have streams, which run in order.
    """
    return mesh.devices.flat[0].platform == "cpu"


def spans_hosts(mesh: Mesh) -> bool:
    return len({d.process_index for d in mesh.devices.flat}) > 1


def is_older(device: Any) -> bool:
    return str(getattr(device, "compute_capability", "")).startswith(OLDER)


@dataclasses.dataclass
class Turn:
    """Bytes that come out of what one turn of a loop gathers and reduce-scatters, and bytes that
    go into the latter."""

    gathered: int = 0
    scattered: int = 0
    reduced: int = 0


def combined(turns: Sequence[Turn], most: int) -> dict[str, Any]:
    """Thresholds just above one layer: two in one could not hide behind each other. Of a layer
    that is larger than `most`, as much in one as that."""
    gathered = max(turn.gathered for turn in turns)
    scattered = max(turn.scattered for turn in turns)
    reduced = max(turn.reduced for turn in turns)
    options = {
        COMBINE_GATHERS: min(_above(gathered), most),
        COMBINE_SCATTERS: min(_above(scattered), most * scattered // reduced),
    }
    if gathered > most:
        # XLA takes such a program for larger than it is, by about two layers' weights (84 GiB for
        # 54 with 10^12 parameters), and gives up overlap to save them: 24.1 s instead of 19.8.
        options[MEMORY_SLOP] = 150
    return options


def _above(nbytes: int) -> int:
    return nbytes + nbytes // 16


def turns_of(jaxpr: Any) -> list[Turn]:
    """One for each loop, inner loops apart."""
    loops: list[Turn] = []
    _count(jaxpr, Turn(), loops)
    return loops


def _count(jaxpr: Any, turn: Turn, loops: list[Turn]) -> None:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "all_gather":
            turn.gathered += _nbytes(eqn.outvars)
        elif name == "reduce_scatter":
            turn.scattered += _nbytes(eqn.outvars)
            turn.reduced += _nbytes(eqn.invars)
        inside = turn
        if name in ("scan", "while"):
            inside = Turn()
            loops.append(inside)
        for inner in _compat.inner_jaxprs(eqn):
            _count(inner, inside, loops)


def _nbytes(variables: Sequence[Any]) -> int:
    return sum(v.aval.size * v.aval.dtype.itemsize for v in variables)


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
