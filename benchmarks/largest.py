"""The largest GPT that GPUs train, by the bytes of its state and the memory of their host, compiled
without a GPU.

python benchmarks/largest.py           # prints the rows
python benchmarks/largest.py --json    # stores them too

adamw, and 4 sequences of 1024 tokens a GPU, each layer with `jax.checkpoint`. State that has a
place in host memory rests there: moments as far as they fit, and then parameters. The values that
layers keep for backward rest there too. Depth grows with width. Several GPUs are at stage 3.
"""

import dataclasses
import functools

import figures  # before JAX: it says what JAX may look for
import results

import zerojax
from zerojax.tools._forecast import presets as _presets
from zerojax.tools._hlo import gpus as _gpus

STORED = figures.HERE / "largest.json"
NAMES = ("T4", "L4", "L40S", "A100-40GB", "A100-80GB", "H100", "H200", "B200")
SEVERAL = ("2xT4",)
HOSTS = (0, 64, 128, 512)  # GB
LEFT = 0.9  # of a host's memory: the system, Python and data take the rest
SEQUENCES = 4

LADDER = [  # 0.2 to 70 billion parameters, up to 1.4 times the one before, 1.1 above 7 billion
    _presets.Gpt(layers=round(width / 112), hidden=width, heads=width // 128)
    for width in range(1024, 8704, 128)
]


@dataclasses.dataclass(frozen=True)
class Way:
    at_rest: float  # bytes of each parameter: itself, its correction, two moments and their scales
    precision: dict = dataclasses.field(default_factory=dict, hash=False)
    update: str = "auto"


FP32, SEVEN = 12, 2 + 1 + 2 * (1 + 2 / 64)
CODES = {"param": "bfloat16", "master": "split", "moments": "int8"}
WAYS = {
    "": Way(FP32),
    ", in backward": Way(FP32, update="backward"),
    ", 7 bytes, in backward": Way(SEVEN, CODES, "backward"),
}


def planned(model, gpus, room, way):
    """Plans a state that fills the host memory beside the values that layers keep."""
    kept = 2 * model.layers * SEQUENCES * model.tokens * model.hidden
    offload = zerojax.Offload(params=True, max_bytes=max(0, int(room) - kept)) if room else None
    mesh = zerojax.aot.mesh(gpus)
    precision = zerojax.Precision(compute=model.compute, **way.precision)
    options = {"mesh": mesh, "offload": offload, "precision": precision}
    return zerojax.plan(model.make_state, stage=0 if mesh.size == 1 else 3, **options)


@functools.cache
def audited(model, gpus, room, way):
    """Compiles a step for GPUs with so much host memory, and reads its memory and time."""
    model = _presets.on(model, _gpus.parse_count(gpus)[1])
    plan = planned(model, gpus, room, way)
    activations = "host" if plan._offloads else None
    step = zerojax.train_step(
        model.loss, plan=plan, schedule=zerojax.Schedule(activations=activations, update=way.update)
    )
    batch = zerojax.aot.batch(model.batch(SEQUENCES * plan.size), plan)
    return zerojax.audit(step.lower(plan.abstract(), batch).compile(), plan=plan)


def largest(gpus, room, way):
    """Returns the largest model of the ladder that fits, and the audit of its step.

    The largest known to fit and the smallest known not to fit close in on each other. The search
    then tries the model that would fill the GPUs if memory grew with the parameters.
    """
    count, gpu = _gpus.parse_count(gpus)
    at_most = lambda count: sum(model.n_params <= count for model in LADDER)
    bound = count * (gpu.usable + room) / way.at_rest  # a larger state fits neither memory
    fits, fails, tried = 0, at_most(bound), at_most(0.88 * bound) - 1
    while fails - fits > 1:
        tried = min(max(tried, fits + 1), fails - 1)
        peak = audited(LADDER[tried], gpus, room, way).memory.peak
        fits, fails = (tried, fails) if peak <= gpu.usable else (fits, tried)
        tried = at_most(LADDER[tried].n_params * gpu.usable / peak) - 1
    return LADDER[fits], audited(LADDER[fits], gpus, room, way)


def measured(row):
    gpus, host, way = row
    model, report = largest(gpus, LEFT * host * 1e9, way)
    gib = lambda count: round(count / 2**30, 1)
    tokens = SEQUENCES * model.tokens * _gpus.parse_count(gpus)[0]
    return {
        "billions": round(model.n_params / 1e9, 1),
        "layers": model.layers,
        "hidden": model.hidden,
        "device_gib": gib(report.memory.peak),
        "usable_gib": gib(report.gpu.usable),
        "host_gib": gib(report.memory.on_host + report.memory.host_kept),
        "step_s": round(report.step_seconds, 1),
        "tokens_per_s": round(tokens / report.step_seconds),
    }


def rows():
    """Yields the name of every row, and its GPUs, host memory and way."""
    machines = [(name, f"1x{name}", HOSTS) for name in NAMES]
    for name, gpus, hosts in [*machines, *((name, name, (0,)) for name in SEVERAL)]:
        for host in hosts:
            for way in [""] if host else WAYS:  # the host's state is updated in backward as it is
                yield f"{name}, {host} GB{way}", (gpus, host, WAYS[way])


if __name__ == "__main__":
    results.main(__doc__, STORED, dict(rows()), figures.versions(), measured)
