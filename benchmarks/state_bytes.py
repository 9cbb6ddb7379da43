"""Bytes a parameter of a state at rest, by precision, at stages 0 and 3.

python benchmarks/state_bytes.py           # prints the rows
python benchmarks/state_bytes.py --json    # stores them too

Counted twice: the shards of a small GPT on 8 emulated devices after a step, and the arguments of
7.5B's step as compiled for 8 H100s. Those of the first device count, times 8 at stage 3, so that
each figure is what one copy of the state takes. Steps have adamw, 4 sequences of 1024 tokens a GPU
and `jax.checkpoint` around each layer.
"""

import figures  # before JAX: it says what JAX may look for
import jax
import numpy as np
import results

import zerojax
from zerojax.tools._forecast import presets as _presets

GPUS, SEQUENCES = "8xH100", 4
BF16 = {"param": "bfloat16"}
PRECISIONS = {
    "fp32": {},
    "masters": {**BF16, "master": "float32"},
    "split": {**BF16, "master": "split"},
    "codes": {**BF16, "master": "split", "moments": "int8"},
}
ROWS = {
    f"stage {stage}, {name}": (stage, zerojax.Precision(compute="bfloat16", **options), "auto")
    for stage in (0, 3)
    for name, options in PRECISIONS.items()
}
ROWS |= {
    f"{name}, in backward": (*ROWS[name][:2], "backward")
    for name in ("stage 3, fp32", "stage 3, codes")
}
SMALL = _presets.Gpt(layers=4, hidden=512, heads=4, vocab=2048, tokens=32)
STORED = figures.HERE / "state_bytes.json"


def emulated(stage, precision, update):
    """Returns the bytes of a state's shards on the first device, after a step."""
    plan = zerojax.plan(SMALL.make_state, stage=stage, precision=precision)
    step = zerojax.train_step(SMALL.loss, plan=plan, schedule=zerojax.Schedule(update=update))
    batch = zerojax.shard_batch(np.zeros((8, SMALL.tokens), np.int32))
    state, _ = step(plan.place(SMALL.make_state), batch)
    first = jax.devices()[0]
    shards = [s for leaf in jax.tree.leaves(state) for s in leaf.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == first)


def compiled(stage, precision, update):
    """Returns the audit of a step compiled for GPUs."""
    model = _presets.preset("7.5b")
    plan = zerojax.plan(
        model.make_state, stage=stage, precision=precision, mesh=zerojax.aot.mesh(GPUS)
    )
    step = zerojax.train_step(model.loss, plan=plan, schedule=zerojax.Schedule(update=update))
    batch = zerojax.aot.batch(model.batch(SEQUENCES * plan.size), plan)
    report = zerojax.audit(step.lower(plan.abstract(), batch).compile(), plan=plan)
    return report, model.n_params


def measured(row):
    copies = 8 if row[0] == 3 else 1
    report, count = compiled(*row)
    return {
        "emulated": round(copies * emulated(*row) / SMALL.n_params, 3),
        "compiled": round(copies * report.memory.state / count, 3),
        "peak_gib": round(report.memory.peak / 2**30, 1),
        "step_ms": round(1e3 * report.step_seconds),
    }


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    results.main(__doc__, STORED, ROWS, figures.versions(), measured)
