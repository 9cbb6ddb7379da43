"""The longest sequence of which Llama-8B trains on 1, 8 and 64 H100s, compiled without GPUs.

python benchmarks/longest.py           # prints the rows
python benchmarks/longest.py --json    # stores them too

The model is that of `long_context.py`, with MLPs and losses in chunks. Hosts of 8 GPUs have 1.9 TB,
as in DeepSpeed's ALST; one GPU has all of it. XLA does not know the workspace of cuDNN's attention
without a GPU: 4 bytes for each element of the queries are set aside for it.
"""

import dataclasses
import math

import figures  # before JAX: it says what JAX may look for
import long_context
import results

import zerojax
from zerojax.tools._hlo import flow as _flow

STORED = figures.HERE / "longest.json"
HOST, LEFT = 1.9e12, 0.9  # of a host's memory: the system, Python and data take the rest
BFLOAT16 = zerojax.Precision(compute="bfloat16")
SEVEN = zerojax.Precision(param="bfloat16", master="split", moments="int8", compute="bfloat16")
AXIS, AUDITS = long_context.AXIS, {}


@dataclasses.dataclass(frozen=True)
class Way:
    shape: tuple[int, int]  # rows of the batch, and devices that share each
    activations: str | None = None
    offload: str | tuple[str, ...] | None = None
    precision: zerojax.Precision = BFLOAT16
    update: str = "auto"
    repeated: int = 1  # how often each head of keys and values is there
    first: int = 128  # thousands of tokens to try first

    @property
    def gpus(self):
        return math.prod(self.shape)

    def workspace(self, thousands):
        return 4 * 1024 * thousands * long_context.PRESET.hidden // self.shape[1]


BACKWARD = {"update": "backward"}
ROWS = {
    "1 H100, 7 bytes a parameter": Way((1, 1), precision=SEVEN, **BACKWARD, first=64),
    "1 H100, 7 bytes a parameter, activations in host memory": Way(
        (1, 1), "host", precision=SEVEN, **BACKWARD, first=256
    ),
    "1 H100, all in host memory": Way((1, 1), "host", ("opt_state", "params"), first=512),
    "8 H100s": Way((1, 8), **BACKWARD, first=1424),
    "8 H100s, activations in host memory": Way((1, 8), "host", **BACKWARD, first=5632),
    "64 H100s, 32 for each of 2 sequences": Way((2, 32), **BACKWARD, repeated=4, first=6144),
    "64 H100s, 32 for each of 2 sequences, activations in host memory": Way(
        (2, 32), "host", **BACKWARD, repeated=4, first=19456
    ),
}


def audited(way, thousands):
    """Compiles a step, once, and returns what it takes."""
    if (way, thousands) in AUDITS:
        return AUDITS[way, thousands]
    model = long_context.model_of(long_context.Long, 1024 * thousands, True, repeated=way.repeated)
    mesh = zerojax.aot.mesh(f"{way.gpus}xH100", shape=way.shape, axis_names=("data", AXIS))
    options = {"mesh": mesh, "offload": way.offload, "precision": way.precision}
    options |= {"sequence": AXIS} if way.gpus > 1 else {"axis": "data"}
    plan = zerojax.plan(model.make_state, stage=3 if way.gpus > 1 else 0, **options)
    schedule = zerojax.Schedule(activations=way.activations, update=way.update)
    step = zerojax.train_step(model.loss, plan=plan, schedule=schedule)
    batch = zerojax.aot.batch(model.batch(way.shape[0]), plan)
    report = zerojax.audit(step.lower(plan.abstract(), batch).compile(), plan=plan)
    print(f"  {thousands}k tokens: {use(way, report, thousands)}", flush=True)
    return AUDITS.setdefault((way, thousands), report)


def use(way, report, tokens):
    """Returns the parts of a device's memory, and of the host's, that a step fills, or would fill
    without tokens."""
    host = LEFT * HOST / min(way.gpus, 8)
    memory = report.memory
    device = memory.peak + way.workspace(tokens) if tokens else memory.peak - memory.temporary
    host_kept = memory.host_kept if tokens else 0
    return device / report.gpu.usable, (memory.on_host + host_kept) / host


def longest(way):
    """Returns the most thousands of tokens that fit; a sixteenth more do not.

    Memory grows with tokens almost in a line. Two lengths give it, and the next one is where it
    meets the limit.
    """
    grain = way.shape[1] * long_context.CHUNK // 1024
    fits, fails, tried = 0, math.inf, way.first
    at, start = 0, use(way, audited(way, tried), 0)
    while fails - fits > max(fits / 16, grain):
        full = use(way, audited(way, tried), tried)
        fits, fails = (tried, fails) if max(full) <= 1 else (fits, tried)
        pairs = zip(start, full, strict=True)
        ends = [tried + (1 - b) * (tried - at) / (b - a) for a, b in pairs if a != b]
        at, start = tried, full
        tried = min(max(0.995 * min(ends), fits + max(fits / 17, grain)), fails - grain)
        tried = int(tried // grain * grain)
    return fits


def measured(way):
    thousands = longest(way)
    report = audited(way, thousands)
    gib = lambda count: round(count / 2**30, 1)
    memory, host = report.memory, min(way.gpus, 8)
    _, longer = max((t, use(way, r, t)) for (w, t), r in AUDITS.items() if w == way)
    parts = ("parameters", "optimizer", "gathered", "gradients", "activations")
    return {
        "tokens": 1024 * thousands,
        "bound": " and ".join(w for w, u in zip(("GPU", "host"), longer, strict=True) if u > 1),
        "device_gib": gib(memory.peak),
        "workspace_gib": gib(way.workspace(thousands)),
        "usable_gib": gib(report.gpu.usable),
        "parts_gib": {part: gib(getattr(memory, part)) for part in parts},
        "largest": largest(report),
        "host_gib": gib(host * (memory.on_host + memory.host_kept)),
        "step_s": round(report.step_seconds, 1),
        "exposed_s": round(report.exposed_seconds, 1),
        "tokens_per_s": round(1024 * thousands * way.shape[0] / report.step_seconds),
    }


def largest(report, count=6):
    """Returns the largest temporary buffers at the peak, in GiB, after the lines that fill them."""
    sizes = {}
    for buffer, holders in _flow.peak(report.module).items():
        name = next((one.op_name for one, _ in holders if one.op_name), buffer[0].opcode)
        shape = f"{buffer[0].arrays[buffer[1]].dims}"
        sizes[f"{shape} {name[-90:]}"] = round(_flow.device_bytes([buffer]) / 2**30, 1)
    return dict(sorted(sizes.items(), key=lambda item: -item[1])[:count])


if __name__ == "__main__":
    results.main(__doc__, STORED, ROWS, figures.versions(), measured)
