"""What XLA is told of the network's speed."""

from collections.abc import Mapping, MutableMapping

from zerojax._hlo.gpus import Gpu

# On data centers' GPUs from Hopper on, XLA's scheduler knows how long collectives take, but takes
# every network card for one of 50 GB/s, and starts as late as that allows. No option of a program
# says otherwise, only XLA_FLAGS, which XLA reads once in a process. Told 3, it starts collectives
# as soon as it can: a 7.5B step on 64 H100s takes 535 ms instead of 686 at 12.5 GB/s, and no longer
# at 50. Told 12.5, it takes 676: XLA thinks little of what runs between two collectives.
TAKEN_FOR = 50e9  # bytes/s
KNOWS_TIMES = (9, 10)  # compute capabilities
NAME = "xla_gpu_analytical_latency_estimator_options"
FLAG = f"--{NAME}=nic_speed_gbps=3"
REASON = "XLA takes network cards for 50 GB/s, and starts collectives too late for slower ones"


def is_told(environ: Mapping[str, str]) -> bool:
    return NAME in environ.get("XLA_FLAGS", "")


def tell(environ: MutableMapping[str, str]) -> None:
    """Tells XLA that cards are slow, before it compiles for the first time, unless it is told."""
    if not is_told(environ):
        environ["XLA_FLAGS"] = f"{environ.get('XLA_FLAGS', '')} {FLAG}".strip()


def is_misjudged(gpu: Gpu) -> bool:
    """Whether XLA takes the network of these GPUs for a faster one."""
    return gpu.rates.network < TAKEN_FOR and gpu.chip.capability[0] in KNOWS_TIMES


def advice(gpu: Gpu, environ: Mapping[str, str]) -> str:
    """Returns what to do about it, or nothing."""
    if not is_misjudged(gpu):
        return ""
    if is_told(environ):
        return f"Compiled with XLA_FLAGS={environ['XLA_FLAGS']}: set it on your hosts too."
    return f"{REASON}: set XLA_FLAGS={FLAG} before Python starts, here and on your hosts."
