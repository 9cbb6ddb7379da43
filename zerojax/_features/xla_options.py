"""The XLA options that a step needs on GPUs and TPUs, of those that the installed XLA knows.

Gains, modelled: 14.8 s in place of 22.2 for a step of 10^12 parameters, 369 ms in place of 1250 for
7.5B at stage 2 on 8 H100s, 61 in place of 75 for 124M on 8 RTX 5090s. Costs 115 lines of code.
"""

from collections import Counter
from collections.abc import Sequence

import jax
from jax.extend.core import Jaxpr, JaxprEqn
from jax.sharding import Mesh, SingleDeviceSharding

from zerojax import _compat
from zerojax._jaxprs import Eqn, nbytes
from zerojax._types import Device

COMBINE_GATHERS = "xla_gpu_all_gather_combine_threshold_bytes"
COMBINE_SCATTERS = "xla_gpu_reduce_scatter_combine_threshold_bytes"  # of their results
MEMORY_SLOP = "xla_gpu_memory_limit_slop_factor"  # percent of the memory for its schedule
IN_FLIGHT = "xla_gpu_experimental_parallel_collective_overlap_limit"
DOUBLE_BUFFER = "xla_gpu_enable_while_loop_double_buffering"
# Its kernel for small all-reduces does not compile over several hosts.
COLLECTIVE_KERNELS = "xla_gpu_experimental_use_collective_kernels"
# It makes one matmul of several small ones that read the same array, and cuts the result apart.
MERGE_MATMULS = "xla_gpu_dot_merger_threshold_mb"
# By itself, XLA's scheduler hides communication under compute only on GPUs whose speeds it knows:
# those of data centers from Hopper on. An RTX 5090 is as new as a B200, but of another capability:
# 61 ms instead of 75 for a step of 124M parameters on 8 of them.
HIDE_LATENCY = "xla_gpu_enable_latency_hiding_scheduler"
KNOWN_SPEEDS = (9, 10)  # the first numbers of compute capabilities
# It compiles each kernel in several ways and takes the fastest. Without a GPU none is, so that all
# are compiled twice: a third of the time for small kernels, and the program stays the same.
TIME_KERNELS = "xla_gpu_experimental_enable_fusion_autotuner"
# We leave xla_gpu_experimental_enable_tiling_propagation on. Without it, XLA's longest pass
# (priority-fusion) looks for tiles faster, and a 7.5B step compiles in three quarters of the time;
# but XLA then finds no kernel for matmuls beside transposed heads of 120 (1.5B, JAX 0.12).

# Where a loop over microbatches sums in float32 the bfloat16 gradients of a vector, such as a
# norm's scale, this pass of XLA:TPU fails: "RET_CHECK failure ... user->opcode() ==
# HloOpcode::kAdd" (JAX 0.12). It takes all-reduces out of loops, as which XLA writes such a small
# reduce-scatter. A step that gains by that reduces after the loop itself.
DISABLED_PASSES = "xla_disable_hlo_passes"
FAILING_PASS = "while-loop-all-reduce-code-motion"

# Bytes. Larger layers go out in pieces of whole matrices, so that the first gathers of backward
# need not wait for the last reduce-scatter: 14.8 s with 10^12 parameters, not 20.8 (JAX 0.10.2).
LARGEST_COLLECTIVE = 2**32 - 1
# Bytes of gradients that are reduced as one where layers are in no loop, or larger ones a layer: on
# 64 H100s, 40 to 110 MiB make no difference, and 220 already some.
BUCKET = 2**26

XlaOptions = dict[str, int | bool | str]
# Bytes by primitive: of the results of all-gathers, reduce-scatters and all-to-alls, and under
# REDUCED of the operands of reduce-scatters.
Traffic = Counter[str]
GATHERED, SCATTERED, EXCHANGED = "all_gather", "reduce_scatter", "all_to_all"
REDUCED = "operands of reduce_scatter"


def options_for(
    jaxpr: Jaxpr, mesh: Mesh, ahead: bool, updates: bool = False, microbatches: int = 1
) -> XlaOptions:
    """Returns the options for a step on this mesh.

    Its loops gather one layer `ahead`. Backward `updates` weights that rest whole. The outermost
    loop is over `microbatches`. Loops over layers run faster when XLA combines all collectives of a
    layer into one, and when gathered weights pass to the next iteration without a copy. Both make
    other programs slower.
    """
    device = mesh.devices.flat[0]
    if _compat.is_tpu(device) and microbatches > 1:
        return {DISABLED_PASSES: FAILING_PASS}
    if not _compat.is_nvidia_gpu(device):
        return {}
    wanted: XlaOptions = {}
    in_loops, in_layers, rest = traffic_of(jaxpr, microbatches)
    # A loop over layers does both in backward; one that only gathers is the end of a step.
    loops = [loop for loop in in_loops if loop[GATHERED] and (loop[SCATTERED] or loop[EXCHANGED])]
    if loops and ahead:
        wanted |= {DOUBLE_BUFFER: True, **in_flight(mesh), **combined(loops, LARGEST_COLLECTIVE)}
    elif not any(loop.total() for loop in in_loops) and (found := in_line(in_layers, rest)):
        wanted |= {**in_flight(mesh), **found}
    if updates and loops:
        # XLA counts such weights twice, though they are updated in place, and gives up overlap to
        # save the memory: 1250 ms and 64 GiB instead of 369 and 38, 7.5B at stage 2 on 8 H100s.
        wanted[MEMORY_SLOP] = 250
    if mesh.size > 1 and not knows_speeds(device):
        wanted[HIDE_LATENCY] = True
        if loops and ahead:
            # The scheduler would overrate the cuts, which end an iteration of backward, and start
            # the next gather late: 1484 ms instead of 1429, an 8B Llama on 64 A100s.
            wanted[MERGE_MATMULS] = 0
    wanted |= {COLLECTIVE_KERNELS: ""} if spans_hosts(mesh) else {}
    wanted |= {TIME_KERNELS: False} if _compat.is_compile_only(device) else {}
    return {name: value for name, value in wanted.items() if is_known(name, value, device)}


def in_flight(mesh: Mesh) -> XlaOptions:
    """Returns how many collectives may run beside one another, where one by one is not best.

    A layer's gather runs beside the reduce-scatter of the layer before it, and traffic inside nodes
    beside that between them. One by one, nothing hides the end of the second: 207 ms instead of
    179, 7.5B without remat on 64 H100s; 1467 instead of 1433 on A100s.
    """
    is_one = not spans_hosts(mesh) and knows_speeds(mesh.devices.flat[0])
    return {} if is_one else {IN_FLIGHT: 2}


def knows_wires(mesh: Mesh) -> bool:
    """Whether XLA's scheduler knows how long collectives between hosts take.

    If it does, the pieces of a large layer's gather can wait for those of the reduce-scatter before
    it, which saves memory of a layer's size.
    """
    return spans_hosts(mesh) and knows_speeds(mesh.devices.flat[0])


def spans_hosts(mesh: Mesh) -> bool:
    return len({d.process_index for d in mesh.devices.flat}) > 1


def knows_speeds(device: Device) -> bool:
    """Whether XLA's scheduler knows the speeds of a GPU. Steps are traced alike on CPU devices, but
    not on TPUs, which have no NCCL to put collectives in order for."""
    if _compat.is_tpu(device):
        return False
    major, _, _ = str(getattr(device, "compute_capability", "9.0")).partition(".")
    return major in map(str, KNOWN_SPEEDS)  # AMD's capabilities are other words


def combined(loops: Sequence[Traffic], most: int) -> XlaOptions:
    """Returns combine thresholds just above one layer's bytes, capped at `most`.

    Two layers are then never merged into one collective, which nothing could hide.
    """
    kinds = GATHERED, SCATTERED, REDUCED
    gathered, scattered, reduced = (max(loop[kind] for loop in loops) for kind in kinds)
    options: XlaOptions = {COMBINE_GATHERS: min(_above(gathered), most)}
    if reduced:
        options[COMBINE_SCATTERS] = min(_above(scattered), most * scattered // reduced)
    if (pieces := -(-max(gathered, reduced) // most)) > 1:
        # All pieces of a layer run together. XLA's scheduler takes each to last 2.5 times as long
        # as it does, so it would find no compute to hide the last ones: 22.2 s with 10^12
        # parameters instead of 14.8.
        options[IN_FLIGHT] = pieces
    if gathered > most:
        # XLA overestimates the memory of such a program by about two layers' weights (84 GiB, not
        # 54, with 10^12 parameters), and gives up overlap to save it: 24.1 s instead of 19.8.
        options[MEMORY_SLOP] = 150
    return options


def _above(nbytes: int) -> int:
    return nbytes + nbytes // 16


def in_line(layers: Sequence[Traffic], rest: Traffic) -> XlaOptions:
    """Returns combine thresholds for a program whose layers are in no loop.

    XLA would combine the gradients of as many layers as its estimate of the memory allows, and
    reduce them after the last: 38.3 ms and 2.7 GiB instead of 34.9 and 2.3, eight layers under
    `nn.remat` in a Python loop on 64 H100s.
    """
    options: XlaOptions = {}
    if gathered := max((layer[GATHERED] for layer in layers), default=0):
        options[COMBINE_GATHERS] = min(max(_above(gathered), BUCKET), LARGEST_COLLECTIVE)
    parts = layers or [rest]
    if reduced := max(part[REDUCED] for part in parts):
        most = min(max(_above(reduced), BUCKET), LARGEST_COLLECTIVE) if layers else BUCKET
        options[COMBINE_SCATTERS] = most * max(part[SCATTERED] for part in parts) // reduced
    return options


def traffic_of(jaxpr: Jaxpr, microbatches: int) -> tuple[list[Traffic], list[Traffic], Traffic]:
    """Returns the bytes that a program moves: an iteration of each loop, without the loops inside
    it; each layer outside of loops; and the rest.

    A loop over so many microbatches does not count as one.
    """
    loops, layers, rest = list[Traffic](), list[Traffic](), Traffic()

    def count(jaxpr: Jaxpr, part: Traffic) -> None:
        for eqn in jaxpr.eqns:
            name, inside = eqn.primitive.name, part
            if name in (GATHERED, SCATTERED, EXCHANGED):
                part[name] += nbytes(eqn.outvars)
                part[REDUCED] += nbytes(eqn.invars) if name == SCATTERED else 0
            elif name in ("scan", "while"):
                if part is not rest or not 1 < microbatches == Eqn(eqn).length:
                    loops.append(inside := Traffic())
            elif part is rest and name in _compat.CALLS and _is_layer(eqn):
                layers.append(inside := Traffic())
            for inner in _compat.inner_jaxprs(eqn):
                count(inner, inside)

    count(jaxpr, rest)
    return loops, layers, rest


def _is_layer(call: JaxprEqn) -> bool:
    """Whether a call is a layer's backward: alike layers of a Python loop share one program."""
    names = {eqn.primitive.name for part in _compat.inner_jaxprs(call) for eqn in part.eqns}
    return {GATHERED, SCATTERED} <= names


@_compat.device_cache
def is_known(name: str, value: int | bool | str, device: Device) -> bool:
    """Whether the installed XLA takes an option: names come and go with its versions."""
    scalar = jax.ShapeDtypeStruct((), "float32", sharding=SingleDeviceSharding(device))
    try:
        jax.jit(lambda x: x, compiler_options={name: value}).lower(scalar).compile()
    except jax.errors.JaxRuntimeError as error:
        if not _compat.said(error, _compat.NO_SUCH_OPTION):
            raise
        return False
    return True
