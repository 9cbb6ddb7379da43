"""The measurements of an audit, as the contract, the timeline and the report read them."""

import collections
import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Sequence

from zerojax._plan.plan import Plan
from zerojax._table import human_bytes, shortened
from zerojax.tools._hlo.gpus import IN_FULL, Gpu
from zerojax.tools._hlo.module import Module
from zerojax.tools._hlo.schedule import Replay

LONGEST_NAME = 60
FEW = 0.01  # of the FLOPs of a step
# Files that have no source lines of a user's, those that start a command among them.
OURS = (
    "<frozen runpy>",
    "/bin/zerojax",
    "/zerojax/_",
    "/zerojax/nnx.py",
    "/zerojax/aot.py",
    "/jax/",
    "/flax/",
    "/optax/",
    "/jaxlib/",
)
WIDE = ("f32", IN_FULL)
BF16 = "bfloat16"
NOTEBOOK = re.compile(r".*[/\\]ipykernel_\d+[/\\]\d+\.py:")  # files that nobody can open


@dataclasses.dataclass(frozen=True)
class Part:
    """One array of a collective, and the parameters it belongs to, where they are known."""

    array: str
    dtype: str
    elements: int
    nbytes: float
    paths: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Traffic:
    """A collective of the compiled program. Bytes are per device, times are seconds of one run.

    `between` is the compute scheduled between its start and done, `exposed` the time that the
    program waits for it.
    """

    name: str
    kind: str
    parts: tuple[Part, ...]
    wire_bytes: float  # of one run
    network_bytes: float  # those between hosts
    trips: int
    loops: tuple[str, ...]
    group: int
    on_host: int
    axes: tuple[str, ...] | None
    asynchronous: bool
    seconds: float
    between: float
    exposed: float
    scope: str
    source: str | None

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(sorted({part.dtype for part in self.parts}))

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(path for part in self.parts for path in part.paths))

    @property
    def total_bytes(self) -> float:
        return self.wire_bytes * self.trips

    @property
    def serves(self) -> str:
        """The parameters it moves, where they are known; else its place in the user's code."""
        if self.paths:
            named = ", ".join(shortened(self.paths[:2], LONGEST_NAME))
            return named + (f" and {len(self.paths) - 2} more" if len(self.paths) > 2 else "")
        return shortened([place_of(self.source, self.scope)], LONGEST_NAME)[0]


def place_of(source: str | None, scope: str) -> str:
    """Returns where something is in the user's code: its line, else JAX's scope."""
    return NOTEBOOK.sub("cell line ", source or scope)


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
        """What waits for backward in host memory: temporary there, and no copy of the state."""
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
class Measured:
    """A compiled step: its traffic, memory and modelled schedule."""

    module: Module
    traffic: Sequence[Traffic]
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
        """What is to be known of the modelled times, if anything."""
        on_cpu = self.gpu is not None and self.backend == "cpu"
        return "compiled for CPUs, where no collective runs beside compute" if on_cpu else ""

    @property
    def matmuls(self) -> tuple[str, ...]:
        """The dtypes that matmuls are in, but for those of few FLOPs."""
        known = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", IN_FULL: "float32"}
        flops = self.replay.flops_by_dtype
        most = max(flops.values(), default=0)
        found = (known.get(dtype, dtype) for dtype, count in flops.items() if count > most * FEW)
        return tuple(dict.fromkeys(sorted(found)))

    @property
    def wide_matmuls(self) -> str:
        """The share of FLOPs in float32 beside narrower matmuls, and the line with most of them; or
        why none are narrow."""
        if BF16 in self.written and BF16 not in self.matmuls:
            gpu = self.gpu.name if self.gpu else "GPU"
            return f"written in {BF16}, which a {gpu} does not have: compute in float16"
        if len(self.matmuls) < 2 or "float32" not in self.matmuls:
            return ""
        places: Counter[str] = Counter()
        for one in self.replay.matmuls:
            if one.dtype in WIDE:
                source = self.module.source(one.instruction, OURS)
                place = place_of(source, one.instruction.op_name)
                places[place.rsplit("/", 1)[-1] if source else place] += one.flops
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
