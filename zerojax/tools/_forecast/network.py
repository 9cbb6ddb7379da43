"""Tells XLA of a slow network."""

import re
from collections.abc import Mapping, MutableMapping

from zerojax._features.xla_options import KNOWN_SPEEDS
from zerojax.tools._hlo.gpus import Gpu

# On data-center GPUs from Hopper on, XLA's scheduler models how long collectives take. It assumes
# network cards of 50 GB/s, and starts collectives as late as these would allow. No option of a
# program changes that, only XLA_FLAGS, which XLA reads once in a process. If they say 3 GB/s, XLA
# starts collectives as soon as it can: a 7.5B step on 64 H100s takes 535 ms instead of 686 at 12.5
# GB/s, and no longer at 50. If they say 12.5, it takes 676, since XLA underestimates the compute
# between two collectives. At 25 GB/s the flag gains 1%, and groups lose by it whose gradients take
# two hops, one after the other: HSDP takes 583 ms instead of 541.
SLOW = 25  # GB/s
FLAG = "--xla_gpu_analytical_latency_estimator_options=nic_speed_gbps=3"
OPTION = FLAG.removeprefix("--").partition("=")[0]


def tell(environ: MutableMapping[str, str]) -> None:
    """Tells XLA that cards are slow, unless XLA_FLAGS say something already. XLA listens until it
    compiles for the first time."""
    flags = environ.get("XLA_FLAGS", "")
    if OPTION not in flags:
        environ["XLA_FLAGS"] = f"{flags} {FLAG}".strip()


def is_misjudged(gpu: Gpu) -> bool:
    """Whether XLA takes the network of these GPUs for a much faster one."""
    return gpu.rates.network < SLOW * 1e9 and gpu.capability[0] in KNOWN_SPEEDS


def advice(gpu: Gpu, environ: Mapping[str, str]) -> str:
    """Returns what to tell XLA of the network, or nothing."""
    if not is_misjudged(gpu):
        return ""
    told = re.search(rf"--{OPTION}=\S*\bnic_speed_gbps=([\d.]+)", environ.get("XLA_FLAGS", ""))
    if told and float(told[1]) < SLOW:
        return f"Compiled with {told[0]} in XLA_FLAGS: set it on your hosts too."
    return (
        "XLA assumes network cards of 50 GB/s, and starts collectives too late for slower ones: "
        f"put {FLAG} into XLA_FLAGS before Python starts, here and on your hosts."
    )
