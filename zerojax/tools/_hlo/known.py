"""The GPUs that are known by name. `docs/gpus.md` says where each number comes from."""

import dataclasses
import math
import re

from zerojax.tools._hlo.gpus import Chip, Gpu, Machine, Rates

MOST_GPUS = 100_000
LEAST_RATE = 1e3  # less is meant as GB/s
MB = 2**20
PCIE_3, PCIE_4, PCIE_5 = 16e9, 32e9, 64e9  # 16 lanes, in each direction
C2C = 450e9  # NVLink-C2C of a Grace CPU, by NVIDIA's data sheets 900 GB/s both ways together
GRACE = 384e9  # 36 Grace CPUs with 480 GB each have 14 TB/s in the data sheet of the GB200 NVL72


def _cards(gigabits: float, gpus: int) -> float:
    """Returns the bytes/s of each GPU where so many share so fast network cards."""
    return gigabits * 1e9 / 8 / gpus


def _ddr(channels: int, transfers: float) -> float:
    """Returns the bytes/s of a host's memory: a channel moves 8 bytes at a time."""
    return channels * 8 * transfers


# Machines with two CPUs each. With two modules to a channel DDR5 is slower than its name says.
_DGX_1 = Machine(150e9, _cards(400, 8), PCIE_3, _ddr(2 * 4, 2.133e9))
_DGX_2 = Machine(150e9, _cards(800, 16), PCIE_3, _ddr(2 * 6, 2.666e9))
_DGX_A100 = Machine(300e9, _cards(1600, 8), PCIE_4, _ddr(2 * 8, 3.2e9))
_DGX_H100 = Machine(450e9, _cards(3200, 8), PCIE_5, _ddr(2 * 8, 4.4e9))
_DGX_B200 = Machine(900e9, _cards(3200, 8), PCIE_5, _ddr(2 * 8, 4.4e9))
_DGX_B300 = Machine(900e9, _cards(6400, 8), PCIE_5, _ddr(2 * 8, 5.2e9))
# Eight GPUs in PCIe slots, without NVLink.
_SLOTS_3, _SLOTS_4, _SLOTS_5 = (
    Machine(pcie, _cards(100, 8), pcie) for pcie in (PCIE_3, PCIE_4, PCIE_5)
)
_G6E = Machine(PCIE_4, _cards(400, 8), PCIE_4)
# Superchips; the two GPUs of a GB share a CPU.
_GH200_NVL32 = Machine(450e9, _cards(400, 1), C2C, own_memory=GRACE)
_GB200_NVL72 = Machine(900e9, _cards(400, 1), C2C / 2, own_memory=GRACE / 2)
_GB300_NVL72 = Machine(900e9, _cards(800, 1), C2C / 2, own_memory=GRACE / 2)

_OF_A100 = 0.67  # of the data sheet's FLOP/s, fitted to published steps: docs/calibration.md

_V100 = Chip((7, 0), 80, 1.53, 6 * MB, 98304, fpus_per_core=64)
_T4 = Chip((7, 5), 40, 1.59, 4 * MB, 65536, threads_per_core=1024, fpus_per_core=64)
_A100 = Chip((8, 0), 108, 1.41, 40 * MB, 167936, fpus_per_core=64)
_A10G = Chip((8, 6), 80, 1.71, 6 * MB, 102400, threads_per_core=1536)
_L4 = Chip((8, 9), 58, 2.04, 48 * MB, 102400, threads_per_core=1536)
_L40S = Chip((8, 9), 142, 2.52, 96 * MB, 102400, threads_per_core=1536)
_RTX4090 = Chip((8, 9), 128, 2.52, 72 * MB, 102400, threads_per_core=1536)
_H20 = Chip((9, 0), 78, 1.98, 60 * MB, 233472)
_H100 = Chip((9, 0), 132, 1.98, 50 * MB, 233472)
_GH200 = Chip((9, 0), 132, 1.98, 60 * MB, 233472)
_B200 = Chip((10, 0), 148, 1.965, 126 * MB, 233472)
_GB200 = Chip((10, 0), 152, 2.062, 135_528_448, 233472)
_B300 = Chip((10, 3), 148, 1.965, 126 * MB, 233472)
_GB300 = Chip((10, 3), 152, 2.07, 135_528_448, 233472)
_RTX5090 = Chip((12, 0), 170, 2.407, 96 * MB, 102400, threads_per_core=1536)

_4090, _5090 = "NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 5090"
_A100_40, _A100_80 = "NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB"
_V100_16, _V100_32 = "Tesla V100-SXM2-16GB", "Tesla V100-SXM3-32GB"
_KNOWN = (
    Gpu("T4", "Tesla T4", 15_843_721_216, 0.32e12, 65e12, _T4, _SLOTS_3),
    Gpu("L4", "NVIDIA L4", 23_659_151_360, 0.3e12, 121e12, _L4, _SLOTS_4),
    Gpu("L40S", "NVIDIA L40S", 47_576_711_168, 0.864e12, 362e12, _L40S, _G6E),
    Gpu("A10G", "NVIDIA A10G", 22_587 * MB, 0.6e12, 70e12, _A10G, _SLOTS_4),
    Gpu("RTX4090", _4090, 25_250_627_584, 1.008e12, 165.2e12, _RTX4090, _SLOTS_4),
    Gpu("RTX5090", _5090, 33_680_457_728, 1.792e12, 209.5e12, _RTX5090, _SLOTS_5),
    Gpu("V100-16GB", _V100_16, 16_935_682_048, 0.9e12, 125e12, _V100, _DGX_1),
    Gpu("V100-32GB", _V100_32, 34_089_730_048, 0.9e12, 125e12, _V100, _DGX_2),
    Gpu("A100-40GB", _A100_40, 42_298_834_944, 1.555e12, 312e12, _A100, _DGX_A100, _OF_A100),
    Gpu("A100-80GB", _A100_80, 85_094_825_984, 2.039e12, 312e12, _A100, _DGX_A100, _OF_A100),
    Gpu("H20", "NVIDIA H20", 97_285 * MB, 4.0e12, 148e12, _H20, _DGX_H100),
    Gpu("H100", "NVIDIA H100 80GB HBM3", 84_978_434_048, 3.352e12, 989e12, _H100, _DGX_H100),
    Gpu("H200", "NVIDIA H200", 150_110_011_392, 4.8e12, 989e12, _H100, _DGX_H100),
    Gpu("B200", "NVIDIA B200", 191_512_969_216, 8.0e12, 2250e12, _B200, _DGX_B200),
    Gpu("B300", "NVIDIA B300 SXM6 AC", 274_113 * MB, 8.0e12, 2250e12, _B300, _DGX_B300),
    Gpu("GH200", "NVIDIA GH200 480GB", 101_468_602_368, 4.02e12, 989e12, _GH200, _GH200_NVL32),
    Gpu("GB200", "NVIDIA GB200", 197_897_748_480, 8.0e12, 2500e12, _GB200, _GB200_NVL72),
    Gpu("GB300", "NVIDIA GB300", 297_021_079_552, 8.0e12, 2500e12, _GB300, _GB300_NVL72),
)
GPUS = {gpu.name: gpu for gpu in _KNOWN}
ALIASES = {
    "V100": "V100-32GB",
    "A100": "A100-80GB",
    "H20-96GB": "H20",
    "H100-80GB": "H100",
    "H200-141GB": "H200",
    "RTX 4090": "RTX4090",
    "RTX 5090": "RTX5090",
    "Tesla V100-SXM2-32GB": "V100-32GB",  # of eight in a machine, as in AWS's p3dn
}


def named(name: str) -> Gpu:
    """Returns the GPU that a user names, in any case, or a JAX device reports itself to be."""
    known = {name.upper(): gpu for gpu in _KNOWN for name in (gpu.name, gpu.device_kind)}
    known |= {alias.upper(): GPUS[key] for alias, key in ALIASES.items()}
    if name.upper() not in known:
        raise ValueError(f"no facts about a GPU {name!r}. Name one of {', '.join(GPUS)}.")
    return known[name.upper()]


def rates_of(gpu: str, **others: float) -> Rates:
    """Returns the rates of a known GPU, with others in the place of some.

    A `host=` is what each GPU has, whatever the memory of its host allows, unless `host_memory=` is
    given as well.

    Example:
        >>> rates = zerojax.tools.rates_of("H100", network=12.5e9)  # bytes/s; all else as it is
        >>> print(rates.network / 1e9, int(rates.link / 1e9))
        12.5 350
    """
    for name in ("flops", "memory", "link", "network", "host"):
        if (rate := others.get(name, math.inf)) < LEAST_RATE:
            raise ValueError(
                f"rates_of({gpu!r}, {name}={rate:g}): rates are in bytes/s, or in FLOP/s. Pass "
                f"{name}={rate:g}e9 for {rate:g} GB/s."
            )
    free = {"host_memory": math.inf} if "host" in others else {}
    return dataclasses.replace(named(gpu).rates, **free | others)


def of_device_kind(kind: str) -> Gpu | None:
    """Returns the GPU that a JAX device reports itself to be; None for an unknown one."""
    kinds = {gpu.device_kind: gpu for gpu in _KNOWN}
    return kinds.get(kind) or GPUS.get(ALIASES.get(kind, ""))


def parse_count(text: str) -> tuple[int, Gpu]:
    """Parses '64xH100' into (64, the H100)."""
    found = isinstance(text, str) and re.fullmatch(r"\s*(\d{1,99})\s*[xX*]\s*([\w\-. ]+?)\s*", text)
    if not found or int(found[1]) == 0:
        raise ValueError(
            f"{text!r} does not say how many of which GPU. Write for example '64xH100'; known: "
            f"{', '.join(GPUS)}."
        )
    if int(found[1]) > MOST_GPUS:
        raise ValueError(
            f"{text!r} are more than {MOST_GPUS:,} GPUs, and no cluster has so many: JAX makes an "
            "object of each, and XLA numbers them all. Name fewer."
        )
    return int(found[1]), named(found[2])
