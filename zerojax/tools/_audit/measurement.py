"""What a compiled step costs: its traffic, its memory, its modelled schedule."""

import collections
import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence

from zerojax._plan.plan import Plan
from zerojax._table import human_bytes, shortened
from zerojax.tools._hlo.gpus import IN_FULL, Gpu
from zerojax.tools._hlo.module import Module
from zerojax.tools._hlo.schedule import LONGEST_NAME, Collective, Replay, place_of

FEW = 0.01  # of the FLOPs of a step
# Files that have no source lines of a user's, those that start a command among them.
OURS = (
    "<frozen runpy>",
    "/bin/zerojax",
    "/zerojax/_",
    "/zerojax/tools/",
    "/zerojax/nnx.py",
    "/zerojax/aot.py",
    "/jax/",
    "/flax/",
    "/optax/",
    "/jaxlib/",
)
BF16, FLOAT32 = "bfloat16", "float32"
DTYPES = {"bf16": BF16, "f16": "float16", "f32": FLOAT32, IN_FULL: FLOAT32}  # XLA's, as JAX's


@dataclasses.dataclass(frozen=True)
class MemoryUse:
    """Bytes of a device's memory. The state's are exact; of temporary memory, gathered weights and
    gradients are those alive at the schedule's peak, and activations are the rest."""

    parameters: int
    optimizer: int
    other_state: int
    batch: int
    gathered: int
    gradients: int
    activations: int
    outputs: int  # that reuse no argument's memory
    donated: int  # arguments whose memory outputs reuse
    on_host: int = 0  # arguments in host memory, which are not counted above
    host_donated: int = 0  # of those, what outputs reuse
    host_temporary: int = 0

    @property
    def host_kept(self) -> int:
        """Bytes that wait for backward in host memory: temporary there, and no copy of the
        state."""
        return self.host_temporary if self.host_donated == self.on_host else 0

    @property
    def state(self) -> int:
        return self.parameters + self.optimizer + self.other_state

    @property
    def temporary(self) -> int:
        return self.gathered + self.gradients + self.activations

    @property
    def peak(self) -> int:
        return self.state + self.batch + self.temporary + self.outputs

    @property
    def on_device(self) -> str:
        """The peak and what it holds, as text."""
        uses = {
            "parameters": self.parameters,
            "optimizer": self.optimizer,
            "gradients": self.gradients,
            "gathered weights": self.gathered,
            "activations": self.activations,
            "batch": self.batch,
            "rest": self.other_state + self.outputs,
        }
        parts = ", ".join(f"{use} {human_bytes(nbytes)}" for use, nbytes in uses.items())
        donated = human_bytes(self.donated)
        return f"{human_bytes(self.peak)} at the peak: {parts}; donated and reused {donated}"

    def __str__(self) -> str:
        on_host = {"state": self.on_host, "kept for backward": self.host_kept}
        parts = ", ".join(f"{use} {human_bytes(size)}" for use, size in on_host.items() if size)
        return self.on_device + (f"; in host memory: {parts}" if parts else "")


@dataclasses.dataclass(frozen=True, repr=False)
class Measurement:
    """What a compiled step costs."""

    module: Module
    traffic: Sequence[Collective]
    memory: MemoryUse
    replay: Replay
    gpu: Gpu | None
    devices: int
    per_host: int  # of them, those of one host
    plan: Plan | None
    accumulate: int  # microbatches that gather their weights one after another
    trains: bool  # else the step has no gradients and returns no state
    not_donated: tuple[str, ...]
    placement: tuple[tuple[str, str], ...]  # leaves not sharded as planned: (path, how)
    kept: tuple[tuple[str, str], ...]  # stacks of gathered weights that a loop keeps: (path, array)
    warnings: tuple[str, ...]
    backend: str
    written: tuple[str, ...]  # the program's dtypes of matmuls, where the GPU lacks one

    @property
    def step_seconds(self) -> float | None:
        return self.replay.step if self.gpu else None

    @property
    def exposed_seconds(self) -> float | None:
        return self.replay.exposed if self.gpu else None

    @property
    def caveat(self) -> str:
        """A reason not to trust the modelled times, if there is one."""
        on_cpu = self.gpu is not None and self.backend == "cpu"
        return "compiled for CPUs, where no collective runs beside compute" if on_cpu else ""

    @property
    def matmuls(self) -> tuple[str, ...]:
        """The dtypes of matmuls, without those of few FLOPs."""
        flops = self.replay.flops_by_dtype
        most = max(flops.values(), default=0)
        many = {DTYPES.get(dtype, dtype) for dtype, count in flops.items() if count > most * FEW}
        return tuple(sorted(many))

    @property
    def wide_matmuls(self) -> str:
        """The share of FLOPs in float32 beside narrower matmuls, and the line with most of them; or
        why none are narrow."""
        if BF16 in self.written and BF16 not in self.matmuls:
            gpu = self.gpu.name if self.gpu else "GPU"
            return f"written in {BF16}, which a {gpu} does not have: compute in float16"
        if len(self.matmuls) < 2 or FLOAT32 not in self.matmuls:
            return ""
        places: Counter[str] = Counter()
        for instruction, dtype, flops in self.replay.matmuls:
            if DTYPES.get(dtype) == FLOAT32:
                source = self.module.source(instruction, OURS)
                place = place_of(source, instruction.op_name)
                places[place.rsplit("/", 1)[-1] if source else place] += flops
        ((most, _),) = places.most_common(1)
        share = places.total() / self.replay.flops
        return f"{share:.0%} of FLOPs in float32, most at {shortened([most], LONGEST_NAME)[0]}"

    @property
    def pinned(self) -> int:
        """The bytes of host memory that a process with all GPUs of a host keeps pinned."""
        return self.per_host * (self.memory.on_host + self.memory.host_kept)

    def host_bytes(self, way: str) -> float:
        """The bytes that each device copies in a step, to the host or from there."""
        return sum(one.total_bytes for one in self.replay.transfers if one.way == way)

    @property
    def overlap(self) -> float | None:
        """The share of compute in the step's time: 1 where all communication is hidden."""
        return self.replay.compute / self.replay.step if self.gpu and self.replay.step else None

    @property
    def wire_bytes(self) -> float:
        """The bytes that each device sends in a step."""
        return sum(t.total_bytes for t in self.traffic)

    @property
    def network_bytes(self) -> float:
        """The bytes that each device sends to other hosts in a step."""
        return sum(t.network_bytes * t.trips for t in self.traffic)

    @functools.cached_property
    def totals(self) -> dict[str, float]:
        """The bytes that each device sends, by kind of collective."""
        sums: dict[str, float] = collections.defaultdict(float)
        for one in self.traffic:
            sums[one.kind] += one.total_bytes
        return dict(sorted(sums.items(), key=lambda item: -item[1]))
