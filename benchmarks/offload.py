"""State and activations in host memory, by the speed of the link, compiled without GPUs.

python benchmarks/offload.py           # prints the rows
python benchmarks/offload.py --json    # stores them too
"""

import dataclasses
import math
import pathlib

import figures  # before JAX: it says what JAX may look for
import jax
import optax
import results
from flax.training.train_state import TrainState

import zerojax
from zerojax.tools._forecast import presets as _presets
from zerojax.tools._hlo import gpus as _gpus

LINKS = (50, 35, 25, 12.5)  # GB/s in each direction, of each GPU
STORED = pathlib.Path(__file__).parent / "offload.json"
BOTH = ("opt_state", "params")
ADAM, CLIPPED = optax.adamw(1e-4), optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))


@dataclasses.dataclass(frozen=True)
class Row:
    model: str
    gpus: str
    rows: int  # of each GPU
    tx: optax.GradientTransformation = ADAM
    offload: str | tuple[str, ...] | None = "opt_state"
    update: str = "auto"
    activations: str | None = None
    stage: int = 3
    accumulate: int = 1
    order: str = "microbatches"
    at_once: bool = False  # moves the whole tree to the devices and back, as loops by hand do


ROWS = {
    "7.5B on 8 H100s: on the devices": Row("7.5b", "8xH100", 4, offload=None),
    "7.5B on 8 H100s: on the devices, updated in backward": Row(
        "7.5b", "8xH100", 4, offload=None, update="backward"
    ),
    "7.5B on 8 H100s: in host memory": Row("7.5b", "8xH100", 4),
    "7.5B on 8 H100s: in host memory, updated after": Row("7.5b", "8xH100", 4, update="after"),
    "7.5B on 8 H100s: in host memory, clipped": Row("7.5b", "8xH100", 4, CLIPPED),
    "7.5B on 8 H100s: with parameters in host memory": Row("7.5b", "8xH100", 4, offload=BOTH),
    "7.5B on 8 H100s: with activations in host memory": Row(
        "7.5b", "8xH100", 4, activations="host"
    ),
    "7.5B on 8 H100s: all of it in host memory": Row(
        "7.5b", "8xH100", 4, offload=BOTH, activations="host"
    ),
    "7.5B on 8 H100s: with parameters in host memory, 8 microbatches": Row(
        "7.5b", "8xH100", 4, offload=BOTH, accumulate=8
    ),
    "7.5B on 8 H100s: with parameters in host memory, 8 microbatches in layers": Row(
        "7.5b", "8xH100", 4, offload=BOTH, accumulate=8, order="layers"
    ),
    "7.5B on 8 H100s: all of it in host memory, 8 microbatches in layers": Row(
        "7.5b", "8xH100", 4, offload=BOTH, activations="host", accumulate=8, order="layers"
    ),
    "7.5B on 8 H100s: the whole tree at once": Row("7.5b", "8xH100", 4, at_once=True),
    "7.5B on 8 H100s, stage 2: on the devices, updated after": Row(
        "7.5b", "8xH100", 4, offload=None, update="after", stage=2
    ),
    "7.5B on 8 H100s, stage 2: on the devices": Row("7.5b", "8xH100", 4, offload=None, stage=2),
    "7.5B on 64 H100s, stage 2: on the devices, updated after": Row(
        "7.5b", "64xH100", 4, offload=None, update="after", stage=2
    ),
    "7.5B on 64 H100s, stage 2: on the devices": Row("7.5b", "64xH100", 4, offload=None, stage=2),
    "7.5B on one H100: on the device": Row("7.5b", "1xH100", 16, offload=None),
    "7.5B on one H100: in host memory": Row("7.5b", "1xH100", 16),
    "7.5B on one H100: in host memory, updated after": Row("7.5b", "1xH100", 16, update="after"),
    "7.5B on one H100: all of it in host memory": Row(
        "7.5b", "1xH100", 16, offload=BOTH, activations="host"
    ),
    "13B on one H200: in host memory": Row("13b", "1xH200", 16),
    "1.5B on one L4: on the device": Row("1.5b", "1xL4", 8, offload=None),
    "1.5B on one T4: in host memory": Row("1.5b", "1xT4", 2),
    "1.5B on one L4: in host memory": Row("1.5b", "1xL4", 8),
}


def stepped(row, plan, model):
    """A step of zerojax or by hand, where `apply_gradients` fetches and stores all of the state."""
    if not row.at_once:
        names = ("update", "activations", "order")
        schedule = zerojax.Schedule(**{name: getattr(row, name) for name in names})
        return zerojax.train_step(
            model.loss, plan=plan, accumulate=row.accumulate, schedule=schedule
        )
    value_and_grad = zerojax.value_and_grad(model.loss, plan)

    def step(state, batch):
        loss, grads = value_and_grad(state.params, batch)
        return plan.constrain(state.apply_gradients(grads=grads)), loss

    return jax.jit(step, donate_argnums=0)


def measured(row):
    """Compiles a model's step and replays it."""
    _, gpu = _gpus.parse_count(row.gpus)
    model, mesh = _presets.on(_presets.preset(row.model), gpu), zerojax.aot.mesh(row.gpus)
    precision = zerojax.Precision(compute=model.compute)

    def make():
        params = model.make_state().params
        return TrainState.create(apply_fn=None, params=params, tx=row.tx)

    placed = {"offload": row.offload, "precision": precision}
    plan = zerojax.plan(make, stage=row.stage, mesh=mesh, **placed)
    batch = zerojax.aot.batch(model.batch(row.rows * plan.size * row.accumulate), plan)
    program = stepped(row, plan, model).lower(plan.abstract(), batch).compile()
    return replayed(program, plan, 1 if row.order == "layers" else row.accumulate)


def replayed(program, plan=None, rounds=1):
    """Replays a step for each speed of the link. A rival's step has no plan."""
    found = {}
    for speed in LINKS:
        report = zerojax.audit(program, plan=plan, accumulate=rounds)
        rates = dataclasses.replace(report.gpu.rates, host=speed * 1e9, host_memory=math.inf)
        report = zerojax.audit(
            program,
            plan=plan,
            gpu=dataclasses.replace(report.gpu, given_rates=rates),
            accumulate=rounds,
        )
        found[f"step_ms at {speed} GB/s"] = round(1e3 * report.step_seconds, 1)
    gib = lambda count: round(count / 2**30, 2)
    return found | {
        "compute_ms": round(1e3 * report.replay.compute, 1),
        "device_gib": gib(report.memory.peak),
        "usable_gib": gib(report.gpu.usable),
        "host_gib": gib(report.memory.on_host + report.memory.host_kept),
        "to_device_gib": gib(report.host_bytes("to the device")),
        "to_host_gib": gib(report.host_bytes("to the host")),
        "findings": report.findings() if plan else [],
    }


if __name__ == "__main__":
    results.main(__doc__, STORED, ROWS, figures.versions(), measured)
