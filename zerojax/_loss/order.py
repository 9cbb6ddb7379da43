"""Which goes first: a microbatch through all layers, or all microbatches through a layer."""

from collections.abc import Callable

from jax.extend.core import Jaxpr, JaxprEqn

from zerojax import _compat
from zerojax._jaxpr import matmul_flops, nbytes
from zerojax._loss.layered import NoLayersError
from zerojax._plan import mesh as _mesh
from zerojax._plan.plan import Plan
from zerojax._state.state import PARAMS
from zerojax._wire.routes import names_in
from zerojax.tools._hlo import known as _known
from zerojax.tools._hlo.gpus import Rates

MICROBATCHES = "microbatches"
LAYERS = "layers"
AUTO = "auto"
ORDERS = (MICROBATCHES, LAYERS, AUTO)

# [Note: which order is faster]
# Microbatches in turn hide what each of them gathers and reduces beside its own compute. In layers
# this is sent once and hides well, but adding up whole gradients costs 3% of compute, and what each
# layer keeps for backward is kept of all microbatches. 7.5B on 64 H100s with 8 microbatches, JAX
# 0.12, modelled: a microbatch's matmuls take 388 ms. At 25 GB/s between nodes its collectives take
# 216 ms, and a step 4170 ms in turn, 4205 in layers; at 12.5 GB/s they take 432 ms, a step 4356 and
# 4212. Parameters from host memory hide less, as a microbatch begins and ends with some: on 8 H100s
# at 50 GB/s, 149 ms of copies make 4677 ms in turn, 4543 in layers.
SENDS_HIDDEN, COPIES_HIDDEN = 0.6, 0.25  # of the time of matmuls: what hides beside them
MOST_KEPT = 1 / 2  # of the memory that the state leaves, by what waits for backward

_KINDS = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "psum": "all-reduce",
}


def faster(plan: Plan, count: int, traced: Callable[[str], Jaxpr]) -> str:
    """Returns the order in which `count` microbatches are faster, by the GPU's data sheet.

    `traced` returns a step's jaxpr in an order. In turn, where the layers are not to be had, or
    where what all microbatches keep for backward would take too much memory.
    """
    gpu = _known.of_device_kind(plan.mesh.devices.flat[0].device_kind)
    if count == 1 or gpu is None:
        return MICROBATCHES
    rounds = list(_rounds(traced(MICROBATCHES), count))
    others = plan.mesh.size // plan.size  # devices that share the work of one: a `tensor` axis
    compute = sum(map(matmul_flops, rounds)) / others / gpu.rates.flops
    sent = sum(_sent(each, plan, gpu.rates) for each in rounds) / others
    # Forward and backward fetch them.
    fetched = 2 * plan.host_bytes_per_device()[PARAMS]
    copied = fetched / gpu.rates.to_host(_mesh.on_one_host(plan.mesh))
    if sent <= SENDS_HIDDEN * compute and copied <= COPIES_HIDDEN * compute:
        return MICROBATCHES
    free = gpu.usable - sum(plan.bytes_per_device().values()) - plan.gradient_bytes()
    if count * sum(map(kept_bytes, rounds)) / others > MOST_KEPT * free:
        return MICROBATCHES
    try:
        traced(LAYERS)
    except NoLayersError:
        return MICROBATCHES
    return LAYERS


def _rounds(jaxpr: Jaxpr, count: int) -> list[Jaxpr]:
    """Returns what runs once for each microbatch: the bodies of such scans, on one device."""
    for eqn in jaxpr.eqns:
        inner = _compat.inner_jaxprs(eqn)
        if eqn.primitive.name == "shard_map":
            scans = [e for e in inner[0].eqns if e.primitive.name == "scan"]
            scans = [e for e in scans if e.params["length"] == count]
            return [body for e in scans for body in _compat.inner_jaxprs(e)]
        if found := [body for each in inner for body in _rounds(each, count)]:
            return found
    return []


def _sent(jaxpr: Jaxpr, plan: Plan, rates: Rates) -> float:
    """Returns the seconds for which collectives use their links."""
    inside = sum(
        _sent(inner, plan, rates) * _trips(eqn)
        for eqn in jaxpr.eqns
        for inner in _compat.inner_jaxprs(eqn)
    )
    return inside + sum(_seconds(eqn, plan, rates) for eqn in jaxpr.eqns)


def _seconds(eqn: JaxprEqn, plan: Plan, rates: Rates) -> float:
    if (kind := _KINDS.get(eqn.primitive.name)) is None:
        return 0.0
    named = names_in([eqn.params["axes" if kind == "all-reduce" else "axis_name"]])
    hosts = _mesh.hosts_along(plan.mesh, [axis for axis in plan.mesh.axis_names if axis in named])
    group = len(hosts)
    full = max(nbytes(eqn.invars), nbytes(eqn.outvars)) * (1 + (kind == "all-reduce"))
    bandwidth = rates.bandwidth(group, hosts.count(hosts[0]), kind)
    return full * (group - 1) / group / bandwidth


def kept_bytes(jaxpr: Jaxpr) -> int:
    """Returns the bytes on the device of what loops stack up, such as what backward needs."""
    total = 0
    for eqn in jaxpr.eqns:
        total += sum(map(kept_bytes, _compat.inner_jaxprs(eqn))) * _trips(eqn)
        if eqn.primitive.name == "scan":
            _, num_carry = _compat.scan_counts(eqn.params)
            total += nbytes(v for v in eqn.outvars[num_carry:] if not _compat.rests_on_host(v))
    return total


def _trips(eqn: JaxprEqn) -> int:
    return eqn.params["length"] if eqn.primitive.name == "scan" else 1
