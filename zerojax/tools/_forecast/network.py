"""What XLA is told of the network's speed."""

import re
from collections.abc import Mapping, MutableMapping

from zerojax._features.xla_options import KNOWN_SPEEDS
from zerojax.tools._hlo.gpus import Gpu

# On data centers' GPUs from Hopper on, XLA's scheduler knows how long collectives take, but takes
# every network card for one of 50 GB/s, and starts as late as that allows. No option of a program
# says otherwise, only XLA_FLAGS, which XLA reads once in a process. Told 3, it starts collectives
# as soon as it can: a 7.5B step on 64 H100s takes 535 ms instead of 686 at 12.5 GB/s, and no longer
# at 50. Told 12.5, it takes 676: XLA thinks little of what runs between two collectives. At 25 GB/s
# it is worth 1%, and groups whose gradients take two hops, a chain, lose by it: HSDP takes 583 ms
# instead of 541.
SLOW = 25  # GB/s
FLAG = "--xla_gpu_analytical_latency_estimator_options=nic_speed_gbps=3"
OPTION = FLAG.removeprefix("--").partition("=")[0]
WHY_SLOW = "XLA takes network cards for 50 GB/s, and starts collectives too late for slower ones"


def tell(environ: MutableMapping[str, str]) -> None:
    """Tells XLA that cards are slow, before it compiles for the first time, unless it is told
    something already."""
    flags = environ.get("XLA_FLAGS", "")
    if OPTION not in flags:
        environ["XLA_FLAGS"] = f"{flags} {FLAG}".strip()


def is_misjudged(gpu: Gpu) -> bool:
    """Whether XLA takes the network of these GPUs for a much faster one."""
    return gpu.rates.network < SLOW * 1e9 and gpu.capability[0] in KNOWN_SPEEDS


def advice(gpu: Gpu, environ: Mapping[str, str]) -> str:
    """Returns what to do about it, or nothing."""
    if not is_misjudged(gpu):
        return ""
    told = re.search(rf"--{OPTION}=\S*\bnic_speed_gbps=([\d.]+)", environ.get("XLA_FLAGS", ""))
    if told and float(told[1]) < SLOW:
        return f"Compiled with {told[0]} in XLA_FLAGS: set it on your hosts too."
    return f"{WHY_SLOW}: put {FLAG} into XLA_FLAGS before Python starts, here and on your hosts."
