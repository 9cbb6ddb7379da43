"""Facts about GPUs: their memory, their speed, and what XLA must know to compile for them."""

import dataclasses
import math
import re

# What well-tuned programs reach of the data sheet's figures, measured on H100s: 600 of 989
# TFLOP/s in bf16 matmuls, 2.7 of 3.35 TB/s of memory, 350 of 450 GB/s over NVLink.
REACHED_FLOPS, REACHED_MEMORY, REACHED_LINK = 600 / 989, 2.7 / 3.352, 350 / 450
PCIE_3, PCIE_4, PCIE_5 = 16e9, 32e9, 64e9  # 16 lanes, in each direction
REACHED_HOST = 50 / 64
C2C = 450e9  # NVLink-C2C of a Grace CPU, by NVIDIA's data sheets 900 GB/s both ways together
# What a host's memory reads and writes together. NVIDIA's DGX machines have two CPUs of 8 channels:
# DDR4-3200 in the DGX A100; later DDR5 with two modules to a channel, which run at 4400 MT/s. 36
# Grace CPUs with 480 GB each have 14 TB/s in the data sheet of the GB200 NVL72; those with 120 GB
# have 512 GB/s each. NVIDIA's Grace benchmarking guide expects 80 to 95% of such figures in STREAM.
DDR4_HOST, DDR5_HOST, GRACE = 16 * 8 * 3.2e9, 16 * 8 * 4.4e9, 384e9
REACHED_HOST_MEMORY = 0.8

# The CUDA context, NCCL's buffers and fragmentation take the rest.
USABLE_MEMORY = 0.92

MOST_GPUS = 100_000
IN_RINGS = ("all-gather", "reduce-scatter", "all-reduce")  # NCCL's way to run them


@dataclasses.dataclass(frozen=True)
class Rates:
    """The speeds that a replayed program is charged: FLOP/s, and bytes/s for each device.

    A collective takes `latency` to start, and `link_hop` or `network_hop` for each time that its
    data goes on to the next GPU, in a host or between hosts. Rings over hundreds of GPUs take long
    for that: with NCCL about 1.5 and 6 microseconds. Data sheets do not say, so both are 0 here.
    Where the GPUs of a host copy all at once, its memory may allow each of them less than `host`:
    `host_memory` serves them all, in both directions.

    Example:
        >>> slow_network = zerojax.Rates(flops=600e12, memory=2.6e12, link=350e9, network=12e9)
        >>> print(slow_network.bandwidth(group=64, on_host=8) / 1e9)  # 8 network cards a host
        96.0
        >>> busy_host = dataclasses.replace(slow_network, host_memory=500e9)
        >>> print(busy_host.to_host(gpus=1) / 1e9, busy_host.to_host(gpus=8) / 1e9)
        50.0 31.25
    """

    flops: float
    memory: float
    link: float  # between the GPUs of a host
    network: float  # of one GPU's network card
    latency: float = 8e-6
    link_hop: float = 0.0
    network_hop: float = 0.0
    host: float = 50e9  # between a GPU and its host's memory, in each direction at once
    host_latency: float = 10e-6
    host_memory: float = math.inf  # of a host, reading and writing together, for all of its GPUs

    def to_host(self, gpus: int) -> float:
        """Returns the bytes/s between a GPU and its host, each way, where so many copy at once."""
        return min(self.host, self.host_memory / (2 * gpus))

    def bandwidth(self, group: int, on_host: int, kind: str = "all-gather") -> float:
        """Returns the bytes/s of a collective over `group` devices, `on_host` of them per host."""
        share = network_share(kind, group, on_host)
        return min(self.link, self.network / share) if share else self.link

    def seconds(self, kind: str, wire: float, group: int, on_host: int) -> float:
        """Returns the time of a collective in which each device sends `wire` bytes."""
        between, inside = hops(kind, group, on_host)
        waited = self.latency + inside * self.link_hop + between * self.network_hop
        return wire / self.bandwidth(group, on_host, kind) + waited


def network_share(kind: str, group: int, on_host: int) -> float:
    """Returns the share of the bytes a device sends that leaves its host.

    NCCL runs a collective in as many rings as a host has network cards, each of which leaves the
    host by another card: with 8 GPUs a host, one byte in 8. An all-to-all has no such rings.
    """
    if on_host >= group:
        return 0.0
    return 1 / on_host if kind in IN_RINGS else (group - on_host) / (group - 1)


def hops(kind: str, group: int, on_host: int) -> tuple[int, int]:
    """Returns how often data goes on to the next GPU, between hosts and inside one.

    A ring takes it past every GPU. An all-reduce may go up a tree of the hosts and down again, an
    all-to-all sends it straight to its end.
    """
    hosts = -(-group // on_host)
    if kind == "all-reduce":
        return 2 * (hosts - 1).bit_length(), 2 * (on_host - 1)
    if kind in IN_RINGS:
        return hosts - 1, group - hosts
    return int(hosts > 1), int(hosts == 1 < group)


@dataclasses.dataclass(frozen=True)
class Chip:
    """The part of a GPU's description that XLA alone reads."""

    capability: tuple[int, int]
    cores: int
    clock_ghz: float
    l2: int
    shared_per_core: int
    threads_per_core: int = 2048
    fpus_per_core: int = 128


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Data-sheet facts. Rates are bytes/s in one direction, FLOP/s dense in 16 bits."""

    name: str
    device_kind: str  # as a real one reports itself to JAX
    memory: int
    memory_rate: float
    flops: float
    link_rate: float
    network_rate: float
    chip: Chip
    host_rate: float = PCIE_4
    host_memory_rate: float = math.inf  # of a host with several GPUs, where one is typical
    own_memory_rate: float = math.inf  # a superchip's: its GPU's share of its CPU's memory
    given_rates: Rates | None = None  # replace those derived from the data sheet

    @property
    def half(self) -> str:
        """The dtype of 16 bits that it computes in; bfloat16 came with the A100's generation."""
        return "bfloat16" if self.chip.capability >= (8, 0) else "float16"

    @property
    def usable(self) -> int:
        return int(self.memory * USABLE_MEMORY)

    @property
    def rates(self) -> Rates:
        """The part of the data sheet's rates that programs reach."""
        return self.given_rates or Rates(
            self.flops * REACHED_FLOPS,
            self.memory_rate * REACHED_MEMORY,
            self.link_rate * REACHED_LINK,
            self.network_rate,
            host=min(self.host_rate * REACHED_HOST, self.own_memory_rate * REACHED_HOST_MEMORY / 2),
            host_memory=self.host_memory_rate * REACHED_HOST_MEMORY,
        )

    def target_config(self) -> str:
        """Returns the text proto from which XLA compiles without such a GPU at hand."""
        chip = self.chip
        major, minor = chip.capability
        minor_text = f" minor: {minor}" if minor else ""
        return f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {chip.shared_per_core}
  threads_per_core_limit: {chip.threads_per_core}
  core_count: {chip.cores}
  fpus_per_core: {chip.fpus_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(self.memory_rate)}
  l2_cache_size: {chip.l2}
  clock_rate_ghz: {chip.clock_ghz}
  device_memory_size: {self.memory}
  shared_memory_per_block_optin: {chip.shared_per_core - 1024}
  cuda_compute_capability {{ major: {major}{minor_text} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{self.device_kind}"
"""


MB = 2**20
_T4 = Chip((7, 5), 40, 1.59, 4 * MB, 65536, threads_per_core=1024, fpus_per_core=64)
_L4 = Chip((8, 9), 58, 2.04, 48 * MB, 102400, threads_per_core=1536)
_L40S = Chip((8, 9), 142, 2.52, 96 * MB, 102400, threads_per_core=1536)
_A100 = Chip((8, 0), 108, 1.41, 40 * MB, 167936, fpus_per_core=64)
_H100 = Chip((9, 0), 132, 1.98, 50 * MB, 233472)
_GH200 = Chip((9, 0), 132, 1.98, 60 * MB, 233472)
_B200 = Chip((10, 0), 148, 1.965, 126 * MB, 233472)
_GB200 = Chip((10, 0), 152, 2.062, 135_528_448, 233472)
_GB300 = Chip((10, 3), 152, 2.07, 135_528_448, 233472)
_KNOWN = (
    Gpu("T4", "Tesla T4", 15_843_721_216, 0.32e12, 65e12, 16e9, 12.5e9, _T4, PCIE_3),
    Gpu("L4", "NVIDIA L4", 23_659_151_360, 0.3e12, 121e12, 32e9, 12.5e9, _L4),
    Gpu("L40S", "NVIDIA L40S", 47_576_711_168, 0.864e12, 362e12, 32e9, 25e9, _L40S),
    Gpu(
        "A100-40GB",
        "NVIDIA A100-SXM4-40GB",
        42_298_834_944,
        1.555e12,
        312e12,
        3e11,
        25e9,
        _A100,
        PCIE_4,
        DDR4_HOST,
    ),
    Gpu(
        "A100-80GB",
        "NVIDIA A100-SXM4-80GB",
        85_094_825_984,
        2.039e12,
        312e12,
        3e11,
        25e9,
        _A100,
        PCIE_4,
        DDR4_HOST,
    ),
    Gpu(
        "H100",
        "NVIDIA H100 80GB HBM3",
        84_978_434_048,
        3.352e12,
        989e12,
        450e9,
        50e9,
        _H100,
        PCIE_5,
        DDR5_HOST,
    ),
    Gpu(
        "H200",
        "NVIDIA H200",
        150_110_011_392,
        4.8e12,
        989e12,
        450e9,
        50e9,
        _H100,
        PCIE_5,
        DDR5_HOST,
    ),
    Gpu(
        "B200",
        "NVIDIA B200",
        191_512_969_216,
        8.0e12,
        2250e12,
        900e9,
        50e9,
        _B200,
        PCIE_5,
        DDR5_HOST,
    ),
    # Superchips; the two GPUs of a GB share a CPU. Sizes are CUDA's own, as XLA's `gb200.txtpb` has
    # them; the GH200 that is known is the one with 96 GB of HBM3, and 480 GB at its CPU.
    Gpu(
        "GH200",
        "NVIDIA GH200 480GB",
        101_468_602_368,
        4.02e12,
        989e12,
        450e9,
        50e9,
        _GH200,
        C2C,
        own_memory_rate=GRACE,
    ),
    Gpu(
        "GB200",
        "NVIDIA GB200",
        197_897_748_480,
        8.0e12,
        2500e12,
        900e9,
        50e9,
        _GB200,
        C2C / 2,
        own_memory_rate=GRACE / 2,
    ),
    Gpu(
        "GB300",
        "NVIDIA GB300",
        297_021_079_552,
        8.0e12,
        2500e12,
        900e9,
        100e9,
        _GB300,
        C2C / 2,
        own_memory_rate=GRACE / 2,
    ),
)
GPUS = {gpu.name: gpu for gpu in _KNOWN}
ALIASES = {"A100": "A100-80GB", "H100-80GB": "H100", "H200-141GB": "H200"}


def named(name: str) -> Gpu:
    """Returns the GPU that a user names, in any case, or a JAX device reports itself to be."""
    known = {name.upper(): gpu for gpu in _KNOWN for name in (gpu.name, gpu.device_kind)}
    known |= {alias.upper(): GPUS[key] for alias, key in ALIASES.items()}
    if name.upper() not in known:
        raise ValueError(f"no facts about a GPU {name!r}. Name one of {', '.join(GPUS)}.")
    return known[name.upper()]


def of_device_kind(kind: str) -> Gpu | None:
    """Returns the GPU that a JAX device reports itself to be; None for an unknown one."""
    return next((gpu for gpu in GPUS.values() if gpu.device_kind == kind), None)


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
