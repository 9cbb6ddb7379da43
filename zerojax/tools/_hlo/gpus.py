"""The known GPUs: the speeds that programs reach on them, and the facts that XLA compiles by.

`docs/gpus.md` has them as a table, for users.
"""

import dataclasses
import math
import re

from zerojax._declared import checked

# The shares of the data sheet's figures that well-tuned programs reach, measured on H100s: 600 of
# 989 TFLOP/s in bf16 matmuls, 2.7 of 3.35 TB/s of memory, 350 of 450 GB/s over NVLink. Published
# steps agree: docs/measured.md.
REACHED_FLOPS, REACHED_MEMORY, REACHED_LINK = 600 / 989, 2.7 / 3.352, 350 / 450
REACHED_HOST = 50 / 64
# NVIDIA's driver lets no GeForce read another's memory, and NCCL copies through the host's:
# all-reduces of four RTX 5090s ran at 35 of PCIe's 64 GB/s, of eight at 28 (NVIDIA/nccl#1639: two
# Xeons 8480+ with 16 modules, whose memory bounds eight to 31 here; 8 RTX 4090s were about as fast
# as 8 RTX 5090s). With a patched driver, four RTX 4090s reached 26 of 32
# (tinygrad/open-gpu-kernel-modules#36).
REACHED_THROUGH_HOST = 35 / 64
REACHED_FLOPS_A100 = 0.67  # fitted to published steps: docs/measured.md
# cuDNN's causal attention, forward and backward, as published for H100s: docs/measured.md.
REACHED_ATTENTION = 0.5
# NVIDIA's Grace benchmarking guide expects 80 to 95% of the data sheet's rate in STREAM.
REACHED_HOST_MEMORY = 0.8
# Empty kernels followed one another every 3.0 us on a GB200 (meta-pytorch/tritonbench#1017). The
# steps measured on an H200 cannot tell: this adds 0.4 to 0.7% to them.
LAUNCH = 3e-6

# The CUDA context, NCCL's buffers and fragmentation take the rest.
USABLE_MEMORY = 0.92

CUDA_13 = (7, 5)  # the lowest compute capability that its compiler knows
IN_FULL = "f32 highest"  # float32 operands that are not rounded to TF32
IN_RINGS = ("all-gather", "reduce-scatter", "all-reduce")  # NCCL runs these in rings

MOST_GPUS = 100_000
TPU = re.compile(r"(?i)tpu|\bv[2-9][a-z]?\b|xv[2-9][a-z]?\b|:")  # in a name of TPUs
LEAST_RATE = 1e3  # a user who passes less means GB/s
MB = 2**20
PCIE_3, PCIE_4, PCIE_5 = 16e9, 32e9, 64e9  # 16 lanes, in each direction
C2C = 450e9  # NVLink-C2C of a Grace CPU, by NVIDIA's data sheets 900 GB/s both ways together
# 36 Grace CPUs with 480 GB each have 14 TB/s in the data sheet of the GB200 NVL72.
GRACE_MEMORY = 384e9


@dataclasses.dataclass(frozen=True)
class Rates:
    """The speeds at which a program is replayed: FLOP/s, and bytes/s of each device.

    A collective takes `latency` to start. Each time its data goes on to the next GPU it takes
    `link_hop` more inside a host, or `network_hop` between hosts: with NCCL about 1.5 and 6
    microseconds, which add up in rings over hundreds of GPUs. Data sheets do not give them, so both
    default to 0. `host_memory` serves all GPUs of a host in both directions: where they copy at the
    same time, each may get less than `host`. The next kernel starts no earlier than `launch` after
    a kernel, however short that is.

    Example:
        >>> slow = zerojax.tools.Rates(flops=600e12, memory=2.6e12, link=350e9, network=12e9)
        >>> print(slow.bandwidth(group=64, on_host=8) / 1e9)  # 8 network cards a host
        96.0
        >>> busy_host = dataclasses.replace(slow, host_memory=500e9)
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
    through_host: bool = False  # GPUs of a host send through its memory, which serves them all
    attention: float = math.inf  # FLOP/s of cuDNN's attention; never more than `flops`
    flops8: float = 0.0  # of float8 matmuls; never less than `flops`
    tf32: float = math.inf  # of float32 matmuls by default; never more than `flops`
    fp32: float = math.inf  # of float32 matmuls with precision="highest", and of float64
    launch: float = LAUNCH

    def of_matmuls(self, dtype: str) -> float:
        """Returns the FLOP/s of matmuls with operands of an HLO dtype, such as f8e4m3fn, or
        `IN_FULL`."""
        if dtype.startswith("f8"):
            return max(self.flops, self.flops8)
        if dtype in (IN_FULL, "f64"):
            return min(self.flops, self.fp32)
        return min(self.flops, self.tf32) if dtype == "f32" else self.flops

    def to_host(self, gpus: int) -> float:
        """Returns the bytes/s between a GPU and its host, each way, where `gpus` copy at once."""
        return min(self.host, self.host_memory / (2 * gpus))

    def bandwidth(self, group: int, on_host: int, kind: str = "all-gather") -> float:
        """Returns the bytes/s of a collective over `group` devices, `on_host` of them per host."""
        share = network_share(kind, group, on_host)
        link = self.between(min(group, on_host))
        return min(link, self.network / share) if share else link

    def between(self, gpus: int) -> float:
        """Returns the bytes/s of the link between the GPUs of a host, where `gpus` use it."""
        return min(self.link, self.to_host(gpus)) if self.through_host else self.link

    def seconds(self, kind: str, wire: float, group: int, on_host: int) -> float:
        """Returns the time of a collective in which each device sends `wire` bytes."""
        between, inside = hops(kind, group, on_host)
        waited = self.latency + inside * self.link_hop + between * self.network_hop
        return wire / self.bandwidth(group, on_host, kind) + waited


def network_share(kind: str, group: int, on_host: int) -> float:
    """Returns the share of the bytes that a device sends which leave its host.

    NCCL runs a collective in as many rings as a host has network cards. Each ring leaves the host
    by a card of its own: with 8 GPUs a host, one byte in 8. An all-to-all has no such rings: NCCL's
    authors expect the speed of one card of it (NVIDIA/nccl-tests#267). A permute takes as long as
    its slowest device, which sends everything to another host.
    """
    if on_host >= group:
        return 0.0
    if kind == "collective-permute":
        return 1.0
    return 1 / on_host if kind in IN_RINGS else (group - on_host) / (group - 1)


def hops(kind: str, group: int, on_host: int) -> tuple[int, int]:
    """Returns how often data goes on to the next GPU: (between hosts, inside one).

    A ring passes every GPU. An all-reduce may go up and down a tree of the hosts; an all-to-all
    sends data straight to its destination.
    """
    hosts = -(-group // on_host)
    if kind == "all-reduce":
        return 2 * (hosts - 1).bit_length(), 2 * (on_host - 1)
    if kind in IN_RINGS:
        return hosts - 1, group - hosts
    return int(hosts > 1), int(hosts == 1 < group)


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU of a data sheet, and a GPU's share of a typical machine that has it.

    Rates are in bytes/s, those of links in one direction; FLOP/s are dense, in 16 bits with sums in
    fp32. Only XLA reads `cores`, `clock_ghz` and `l2`.
    """

    name: str
    device_kind: str  # as JAX reports a real one
    memory: int
    memory_rate: float
    flops: float
    capability: tuple[int, int]
    cores: int
    clock_ghz: float
    l2: int
    link: float  # between the GPUs of a host
    network: float  # a GPU's share of the host's network cards
    host: float  # between a GPU and its host's memory
    host_memory: float = math.inf  # of a host with several GPUs, reading and writing together
    own_memory: float = math.inf  # a superchip's: its GPU's share of its CPU's memory
    given_rates: Rates | None = None  # replace those derived from the data sheet

    @property
    def reached_flops(self) -> float:
        """The share of `flops` that matmuls reach."""
        return REACHED_FLOPS_A100 if self.capability == (8, 0) else REACHED_FLOPS

    @property
    def half(self) -> str:
        """The 16-bit dtype that it computes in; bfloat16 came with the A100's generation."""
        return "bfloat16" if self.capability >= (8, 0) else "float16"

    @property
    def flops8(self) -> float:
        """Dense FLOP/s in float8, which came with the L4's generation."""
        return 2 * self.flops if self.capability >= (8, 9) else 0.0

    @property
    def tf32(self) -> float:
        """Dense FLOP/s in float32 rounded to TF32, which came with the A100's generation."""
        return self.flops / 2 if self.capability >= (8, 0) else self.fp32

    @property
    def fp32(self) -> float:
        """FLOP/s in float32 without tensor cores: an addition and a multiplication a cycle."""
        return 2 * self.cores * PER_CORE[self.capability][2] * self.clock_ghz * 1e9

    @property
    def through_host(self) -> bool:
        """Whether GPUs of a host cannot read each other's memory."""
        return "GeForce" in self.device_kind

    @property
    def usable(self) -> int:
        return int(self.memory * USABLE_MEMORY)

    @property
    def rates(self) -> Rates:
        """The part of the data sheet's rates that programs reach."""
        return self.given_rates or Rates(
            self.flops * self.reached_flops,
            self.memory_rate * REACHED_MEMORY,
            self.link * (REACHED_THROUGH_HOST if self.through_host else REACHED_LINK),
            self.network,
            host=min(self.host * REACHED_HOST, self.own_memory * REACHED_HOST_MEMORY / 2),
            host_memory=self.host_memory * REACHED_HOST_MEMORY,
            through_host=self.through_host,
            attention=self.flops * REACHED_ATTENTION,
            flops8=self.flops8 * self.reached_flops,
            tf32=self.tf32 * self.reached_flops,
            fp32=self.fp32 * self.reached_flops,
        )

    def target_config(self) -> str:
        """Returns the text proto from which XLA compiles without such a GPU at hand."""
        major, minor = self.capability
        shared, threads, fpus = PER_CORE[self.capability]
        # From the A100 on, CUDA keeps 1 KiB of a block's shared memory to itself.
        return f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared}
  threads_per_core_limit: {threads}
  core_count: {self.cores}
  fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(self.memory_rate)}
  l2_cache_size: {self.l2}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory}
  shared_memory_per_block_optin: {shared - 1024 * (major >= 8)}
  cuda_compute_capability {{ major: {major}{f" minor: {minor}" if minor else ""} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{self.device_kind}"
"""


# -- the GPUs


def _cards(gigabits: float, gpus: int) -> float:
    """Returns each GPU's bytes/s where these GPUs share network cards."""
    return gigabits * 1e9 / 8 / gpus


def _ddr(channels: int, transfers: float) -> float:
    """Returns the bytes/s of a host's memory: a channel moves 8 bytes at a time."""
    return channels * 8 * transfers


# By compute capability, of one core: bytes of shared memory, threads, float32 units.
PER_CORE = {
    (7, 0): (98304, 2048, 64),
    (7, 5): (65536, 1024, 64),
    (8, 0): (167936, 2048, 64),
    (8, 6): (102400, 1536, 128),
    (8, 9): (102400, 1536, 128),
    (9, 0): (233472, 2048, 128),
    (10, 0): (233472, 2048, 128),
    (10, 3): (233472, 2048, 128),
    (12, 0): (102400, 1536, 128),
}
# Machines with two CPUs each: link, network, host, host memory of a `Gpu`. With two modules to a
# channel DDR5 is slower than its name says.
_DGX_1 = 150e9, _cards(400, 8), PCIE_3, _ddr(2 * 4, 2.133e9)
_DGX_2 = 150e9, _cards(800, 16), PCIE_3, _ddr(2 * 6, 2.666e9)
_DGX_A100 = 300e9, _cards(1600, 8), PCIE_4, _ddr(2 * 8, 3.2e9)
_DGX_H100 = 450e9, _cards(3200, 8), PCIE_5, _ddr(2 * 8, 4.4e9)
_DGX_B200 = 900e9, _cards(3200, 8), PCIE_5, _ddr(2 * 8, 4.4e9)
_DGX_B300 = 900e9, _cards(6400, 8), PCIE_5, _ddr(2 * 8, 5.2e9)
# Eight GPUs in PCIe slots, without NVLink.
_SLOTS_3, _SLOTS_4, _SLOTS_5 = ((pcie, _cards(100, 8), pcie) for pcie in (PCIE_3, PCIE_4, PCIE_5))
# GeForces: as others in slots, with the memory of the hosts in NVIDIA/nccl#1639.
_GEFORCE_4, _GEFORCE_5 = ((*slots, _ddr(2 * 8, 4.8e9)) for slots in (_SLOTS_4, _SLOTS_5))
_G6E = PCIE_4, _cards(400, 8), PCIE_4
# Superchips; the two GPUs of a GB share a CPU.
_GH200_NVL32 = 450e9, _cards(400, 1), C2C, math.inf, GRACE_MEMORY
_GB200_NVL72 = 900e9, _cards(400, 1), C2C / 2, math.inf, GRACE_MEMORY / 2
_GB300_NVL72 = 900e9, _cards(800, 1), C2C / 2, math.inf, GRACE_MEMORY / 2

# Chips whose facts do not fit into a row: capability, cores, clock and L2 of a `Gpu`.
_V100 = (7, 0), 80, 1.53, 6 * MB
_A100 = (8, 0), 108, 1.41, 40 * MB
_RTX4090 = (8, 9), 128, 2.52, 72 * MB
_H100 = (9, 0), 132, 1.98, 50 * MB
_GH200 = (9, 0), 132, 1.98, 60 * MB
_B200 = (10, 0), 148, 1.965, 126 * MB
_GB200 = (10, 0), 152, 2.062, 135_528_448
_B300 = (10, 3), 148, 1.965, 126 * MB
_GB300 = (10, 3), 152, 2.07, 135_528_448
_RTX5090 = (12, 0), 170, 2.407, 96 * MB

_4090, _5090 = "NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 5090"
_A100_40, _A100_80 = "NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB"
_V100_16, _V100_32 = "Tesla V100-SXM2-16GB", "Tesla V100-SXM3-32GB"
# Memory: XLA's target_config/specs (V100s, GB200, GB300), NVIDIA's deviceQuery, or what CUDA or
# PyTorch print on such a GPU; drivers differ a little. Rates: NVIDIA's data sheets, dense, of the
# A10G AWS's, of GeForces the architecture papers with FP32 sums; NVIDIA has no public sheet of the
# H20. Networks: user guides of DGX machines, MLPerf Training 5.1 (B300, Nebius), nccl-tests#367
# (H20), AWS's g5, g6, g6e (slots). Cores, clocks and caches: XLA's specs or deviceQuery.
_KNOWN = (
    Gpu("T4", "Tesla T4", 15_843_721_216, 0.32e12, 65e12, (7, 5), 40, 1.59, 4 * MB, *_SLOTS_3),
    Gpu("L4", "NVIDIA L4", 23_659_151_360, 0.3e12, 121e12, (8, 9), 58, 2.04, 48 * MB, *_SLOTS_4),
    Gpu("L40S", "NVIDIA L40S", 47_576_711_168, 0.864e12, 362e12, (8, 9), 142, 2.52, 96 * MB, *_G6E),
    Gpu("A10G", "NVIDIA A10G", 22_587 * MB, 0.6e12, 70e12, (8, 6), 80, 1.71, 6 * MB, *_SLOTS_4),
    Gpu("RTX4090", _4090, 25_250_627_584, 1.008e12, 165.2e12, *_RTX4090, *_GEFORCE_4),
    Gpu("RTX5090", _5090, 33_680_457_728, 1.792e12, 209.5e12, *_RTX5090, *_GEFORCE_5),
    Gpu("V100-16GB", _V100_16, 16_935_682_048, 0.9e12, 125e12, *_V100, *_DGX_1),
    Gpu("V100-32GB", _V100_32, 34_089_730_048, 0.9e12, 125e12, *_V100, *_DGX_2),
    Gpu("A100-40GB", _A100_40, 42_298_834_944, 1.555e12, 312e12, *_A100, *_DGX_A100),
    Gpu("A100-80GB", _A100_80, 85_094_825_984, 2.039e12, 312e12, *_A100, *_DGX_A100),
    Gpu("H20", "NVIDIA H20", 97_285 * MB, 4.0e12, 148e12, (9, 0), 78, 1.98, 60 * MB, *_DGX_H100),
    Gpu("H100", "NVIDIA H100 80GB HBM3", 84_978_434_048, 3.352e12, 989e12, *_H100, *_DGX_H100),
    Gpu("H200", "NVIDIA H200", 150_110_011_392, 4.8e12, 989e12, *_H100, *_DGX_H100),
    Gpu("B200", "NVIDIA B200", 191_512_969_216, 8.0e12, 2250e12, *_B200, *_DGX_B200),
    Gpu("B300", "NVIDIA B300 SXM6 AC", 274_113 * MB, 8.0e12, 2250e12, *_B300, *_DGX_B300),
    Gpu("GH200", "NVIDIA GH200 480GB", 101_468_602_368, 4.02e12, 989e12, *_GH200, *_GH200_NVL32),
    Gpu("GB200", "NVIDIA GB200", 197_897_748_480, 8.0e12, 2500e12, *_GB200, *_GB200_NVL72),
    Gpu("GB300", "NVIDIA GB300", 297_021_079_552, 8.0e12, 2500e12, *_GB300, *_GB300_NVL72),
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
_BY_KIND = {gpu.device_kind: gpu for gpu in _KNOWN} | {k: GPUS[v] for k, v in ALIASES.items()}
_BY_NAME = {name.upper(): gpu for name, gpu in (GPUS | _BY_KIND).items()}


def named(name: str) -> Gpu:
    """Returns the GPU of this name, in upper or lower case, or of this JAX device kind."""
    if name.upper() not in _BY_NAME:
        raise ValueError(f"no facts about a GPU {name!r}. Name one of {', '.join(GPUS)}.")
    return _BY_NAME[name.upper()]


def of_device_kind(kind: str) -> Gpu | None:
    """Returns the GPU of a JAX device kind; None for an unknown one."""
    return _BY_KIND.get(kind)


@checked
def rates_of(gpu: str, **others: float) -> Rates:
    """Returns the rates of a known GPU, some of them replaced by `others`.

    With `host=`, each GPU has that rate whatever its host's memory allows, unless you pass
    `host_memory=` too. With `link=`, the GPUs of a host have that rate between them: GeForces with
    a driver that lets them read each other's memory, say.

    Example:
        >>> rates = zerojax.tools.rates_of("H100", network=12.5e9)  # bytes/s; the others stay
        >>> print(rates.network / 1e9, int(rates.link / 1e9))
        12.5 350
    """
    for name in ("flops", "memory", "link", "network", "host"):
        if (rate := others.get(name, math.inf)) < LEAST_RATE:
            raise ValueError(
                f"rates_of({gpu!r}, {name}={rate:g}): rates are in bytes/s, or in FLOP/s. Pass "
                f"{name}={rate:g}e9 for {rate:g} GB/s."
            )
    free: dict[str, float] = {"host_memory": math.inf} if "host" in others else {}
    free |= {"through_host": False} if "link" in others else {}
    return dataclasses.replace(named(gpu).rates, **free | others)


def parse_count(text: str) -> tuple[int, Gpu]:
    """Parses '64xH100' into (64, the H100)."""
    if isinstance(text, str) and TPU.search(text):
        raise ValueError(
            f"zerojax knows no speeds of TPUs, so it has no forecast for {text!r}. Compile a step "
            "on zerojax.aot.mesh('v5e:2x4'), say: zerojax.audit shows its memory and collectives, "
            "and XLA refuses what does not fit."
        )
    match = isinstance(text, str) and re.fullmatch(r"\s*(\d{1,99})\s*[xX*]\s*([\w\-. ]+?)\s*", text)
    if not match or int(match[1]) == 0:
        raise ValueError(
            f"{text!r} does not say how many of which GPU. Write for example '64xH100'; known: "
            f"{', '.join(GPUS)}."
        )
    if int(match[1]) > MOST_GPUS:
        raise ValueError(
            f"{text!r} is more than {MOST_GPUS:,} GPUs, and no cluster has as many: JAX makes an "
            "object of each, and XLA numbers them all. Name fewer."
        )
    return int(match[1]), named(match[2])
