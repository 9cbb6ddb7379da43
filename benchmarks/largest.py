"""The largest GPT that one GPU trains, by the memory of its host, compiled without a GPU.

python benchmarks/largest.py           # prints the rows
python benchmarks/largest.py --json    # stores them too

fp32 parameters and adamw, 16 bytes a parameter with the gradients; 4 sequences of 1024 tokens, each
layer with `jax.checkpoint`. Moments rest in host memory as far as they fit, and then parameters.
The values that layers keep for backward rest there too. Depth grows with width.
"""

import dataclasses
import functools

import figures  # before JAX: it says what JAX may look for
import jax.numpy as jnp
import results

import zerojax
from zerojax.tools._forecast import presets as _presets
from zerojax.tools._hlo import gpus as _gpus

STORED = figures.HERE / "largest.json"
NAMES = ("T4", "L4", "L40S", "A100-40GB", "A100-80GB", "H100", "H200", "B200")
HOSTS = (0, 64, 128, 512)  # GB
LEFT = 0.9  # of a host's memory: the system, Python and data take the rest
SEQUENCES = 4
AT_REST = 12  # bytes of each parameter: itself and two moments

LADDER = [  # 0.2 to 70 billion parameters, up to 1.4 times the one before, 1.1 above 7 billion
    _presets.Gpt(layers=round(width / 112), hidden=width, heads=width // 128)
    for width in range(1024, 8704, 128)
]


def planned(model, gpu, room):
    """Plans a state that fills the host memory beside the values that layers keep."""
    kept = 2 * model.layers * SEQUENCES * model.tokens * model.hidden
    offload = zerojax.Offload(params=True, max_bytes=max(0, int(room) - kept)) if room else None
    mesh, precision = zerojax.aot.mesh(f"1x{gpu}"), zerojax.Precision(compute=model.compute)
    return zerojax.plan(model.make_state, stage=0, mesh=mesh, offload=offload, precision=precision)


@functools.cache
def audited(model, gpu, room):
    """Compiles a step for a GPU with so much host memory, and reads its memory and time."""
    model = dataclasses.replace(model, compute=jnp.dtype(_gpus.named(gpu).half))
    plan = planned(model, gpu, room)
    step = zerojax.train_step(model.loss, plan=plan, activations="host" if plan.offloads else None)
    batch = zerojax.aot.batch(model.batch(SEQUENCES), plan)
    return zerojax.audit(step.lower(plan.abstract(), batch).compile(), plan=plan)


def largest(gpu, room):
    """Returns the largest model of the ladder that fits, and the audit of its step.

    The largest known to fit and the smallest known not to fit close in on each other. The search
    then tries the model that would fill the GPU if memory grew with the parameters.
    """
    usable, fits = _gpus.named(gpu).usable, 0
    at_most = lambda count: sum(model.n_params <= count for model in LADDER)
    fails = tried = at_most((usable + room) / AT_REST)  # a larger state fits neither memory
    while fails - fits > 1:
        tried = min(max(tried, fits + 1), fails - 1)
        peak = audited(LADDER[tried], gpu, room).memory.peak
        fits, fails = (tried, fails) if peak <= usable else (fits, tried)
        tried = at_most(LADDER[tried].n_params * usable / peak) - 1
    return LADDER[fits], audited(LADDER[fits], gpu, room)


def measured(row):
    gpu, host = row
    model, report = largest(gpu, LEFT * host * 1e9)
    gib = lambda count: round(count / 2**30, 1)
    return {
        "billions": round(model.n_params / 1e9, 1),
        "layers": model.layers,
        "hidden": model.hidden,
        "device_gib": gib(report.memory.peak),
        "usable_gib": gib(report.gpu.usable),
        "host_gib": gib(report.memory.on_host + report.memory.host_kept),
        "step_s": round(report.step_seconds, 1),
        "tokens_per_s": round(SEQUENCES * model.tokens / report.step_seconds),
    }


if __name__ == "__main__":
    rows = {f"{gpu}, {host} GB": (gpu, host) for gpu in NAMES for host in HOSTS}
    results.main(__doc__, STORED, rows, figures.versions(), measured)
