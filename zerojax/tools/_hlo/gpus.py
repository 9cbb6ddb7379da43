"""What describes a GPU: its speeds as programs reach them, and what XLA must know of it."""

import dataclasses
import math

# What well-tuned programs reach of the data sheet's figures, measured on H100s: 600 of 989
# TFLOP/s in bf16 matmuls, 2.7 of 3.35 TB/s of memory, 350 of 450 GB/s over NVLink. Published steps
# agree: docs/calibration.md.
REACHED_FLOPS, REACHED_MEMORY, REACHED_LINK = 600 / 989, 2.7 / 3.352, 350 / 450
REACHED_HOST = 50 / 64
# Of cuDNN's causal attention, both ways, as published for H100s: docs/calibration.md.
REACHED_ATTENTION = 0.5
# NVIDIA's Grace benchmarking guide expects 80 to 95% of the data sheet's rate in STREAM.
REACHED_HOST_MEMORY = 0.8

# The CUDA context, NCCL's buffers and fragmentation take the rest.
USABLE_MEMORY = 0.92

CUDA_13 = (7, 5)  # the lowest compute capability that its compiler knows
IN_FULL = "f32 highest"  # operands of float32 that are not rounded to TF32
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
    attention: float = math.inf  # FLOP/s of cuDNN's attention; never more than `flops`
    flops8: float = 0.0  # of matmuls of float8; never less than `flops`
    tf32: float = math.inf  # of float32 as JAX multiplies it by default; never more than `flops`
    fp32: float = math.inf  # of float32 with precision="highest", and of float64

    def of_matmuls(self, dtype: str) -> float:
        """Returns the FLOP/s of matmuls whose operands have an HLO dtype, such as f8e4m3fn, or
        are float32 `IN_FULL`."""
        if dtype.startswith("f8"):
            return max(self.flops, self.flops8)
        if dtype in (IN_FULL, "f64"):
            return min(self.flops, self.fp32)
        return min(self.flops, self.tf32) if dtype == "f32" else self.flops

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

    @property
    def fp32(self) -> float:
        """FLOP/s in float32 without tensor cores, an addition and a multiplication a cycle."""
        return 2 * self.cores * self.fpus_per_core * self.clock_ghz * 1e9

    @property
    def shared_per_block(self) -> int:
        """The most that a block may have: from the A100 on, CUDA keeps 1 KiB of it to itself."""
        return self.shared_per_core - 1024 * (self.capability >= (8, 0))


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a typical machine has around each of its GPUs, in bytes/s in one direction."""

    link: float  # between the GPUs of a host
    network: float  # a GPU's share of the host's network cards
    host: float  # between a GPU and its host's memory
    host_memory: float = math.inf  # of a host with several GPUs, reading and writing together
    own_memory: float = math.inf  # a superchip's: its GPU's share of its CPU's memory


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Data-sheet facts. Rates are bytes/s, FLOP/s dense in 16 bits with sums in fp32."""

    name: str
    device_kind: str  # as a real one reports itself to JAX
    memory: int
    memory_rate: float
    flops: float
    chip: Chip
    machine: Machine
    reached_flops: float = REACHED_FLOPS  # share of `flops` that matmuls reach
    given_rates: Rates | None = None  # replace those derived from the data sheet

    @property
    def half(self) -> str:
        """The dtype of 16 bits that it computes in; bfloat16 came with the A100's generation."""
        return "bfloat16" if self.chip.capability >= (8, 0) else "float16"

    @property
    def flops8(self) -> float:
        """Dense FLOP/s in float8, which came with the L4's generation."""
        return 2 * self.flops if self.chip.capability >= (8, 9) else 0.0

    @property
    def tf32(self) -> float:
        """Dense FLOP/s of float32 rounded to TF32, which came with the A100's generation."""
        return self.flops / 2 if self.chip.capability >= (8, 0) else self.chip.fp32

    @property
    def usable(self) -> int:
        return int(self.memory * USABLE_MEMORY)

    @property
    def rates(self) -> Rates:
        """The part of the data sheet's rates that programs reach."""
        machine = self.machine
        return self.given_rates or Rates(
            self.flops * self.reached_flops,
            self.memory_rate * REACHED_MEMORY,
            machine.link * REACHED_LINK,
            machine.network,
            host=min(machine.host * REACHED_HOST, machine.own_memory * REACHED_HOST_MEMORY / 2),
            host_memory=machine.host_memory * REACHED_HOST_MEMORY,
            attention=self.flops * REACHED_ATTENTION,
            flops8=self.flops8 * self.reached_flops,
            tf32=self.tf32 * self.reached_flops,
            fp32=self.chip.fp32 * self.reached_flops,
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
  shared_memory_per_block_optin: {chip.shared_per_block}
  cuda_compute_capability {{ major: {major}{minor_text} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{self.device_kind}"
"""
