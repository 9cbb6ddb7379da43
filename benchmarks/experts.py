"""Mixtures of experts on GPUs, with the experts of each layer gathered by all devices, and with
experts that stay apart over the 8 GPUs of a host: compiled without GPUs.

python benchmarks/experts.py           # prints the rows
python benchmarks/experts.py --json    # stores them too

Stage 3 over all GPUs; each has whole sequences of 4,096 tokens, whose layers are rematerialized.
Attention is cuDNN's. Mixtral's experts have seats for an equal share of each sequence, as many as
balanced routers fill. "Dropless" tokens are sorted by expert for `ragged_dot`; in their steps,
rooms of 1.25 equal shares suffice. Qwen3-30B-A3B has attention with 16 heads of 128.
"""

import dataclasses
import functools
import pathlib

import figures  # before JAX: it says what JAX may look for
import jax
import jax.numpy as jnp
import results

import zerojax
from zerojax.tools._forecast import presets as _presets

STORED = pathlib.Path(__file__).parent / "experts.json"
EXPERTS, PER_HOST = "blocks/(gate|up|down)", 8
MIXTRAL = dataclasses.replace(_presets.preset("mixtral-8x7b", attention="cudnn"), tokens=4096)


@dataclasses.dataclass(frozen=True)
class Dropless(_presets.Mixtral):
    """A mixture whose experts take every token that the router sends them."""

    def fed_forward(self, h, p):
        tokens = h.reshape(-1, h.shape[-1])
        scores, experts = jax.lax.top_k((tokens @ p["router"]).astype(jnp.float32), self.top)
        shares, chosen = jax.nn.softmax(scores).astype(h.dtype), experts.reshape(-1)
        order, sizes = jnp.argsort(chosen), jnp.bincount(chosen, length=self.experts)
        rows = tokens[order // self.top]
        gate, up = (jax.lax.ragged_dot(rows, p[name], sizes) for name in ("gate", "up"))
        out = jax.lax.ragged_dot(jax.nn.silu(gate) * up, p["down"], sizes)
        out = out[jnp.argsort(order)].reshape(-1, self.top, h.shape[-1])
        return (out * shares[..., None]).sum(1).reshape(h.shape)


DROPLESS = Dropless(**vars(MIXTRAL))
SIZES = {"layers": 48, "hidden": 2048, "heads": 16, "kv_heads": 4, "inner": 768, "vocab": 151936}
QWEN3 = dataclasses.replace(DROPLESS, **SIZES, experts=128, top=8)
CASES = {
    "Mixtral 8x7B, 8 H200s, 1 sequence each": (MIXTRAL, "8xH200", 1),
    "Mixtral 8x7B, 64 H100s, 1 sequence each": (MIXTRAL, "64xH100", 1),
    "Mixtral 8x7B, 64 H100s, 4 sequences each": (MIXTRAL, "64xH100", 4),
    "Mixtral 8x7B, 256 H200s, 1 sequence each": (MIXTRAL, "256xH200", 1),
    "Mixtral 8x7B dropless, 64 H100s, 1 sequence each": (DROPLESS, "64xH100", 1),
    "Qwen3-30B-A3B dropless, 8 H100s, 1 sequence each": (QWEN3, "8xH100", 1),
}
ROWS = {
    f"{name}, experts {how}": (*case, how)
    for name, case in CASES.items()
    for how in ("gathered", "apart")
}


def compiled(model, gpus, sequences, how):
    count, names = int(gpus.partition("x")[0]), ("data", "expert")
    mesh = zerojax.aot.mesh(gpus, shape=(count // PER_HOST, PER_HOST), axis_names=names)
    kept = {"experts": {"expert": EXPERTS}} if how == "apart" else {"axis": names}
    plan = zerojax.plan(model.make_state, stage=3, mesh=mesh, **kept)
    step = zerojax.train_step(functools.partial(model.loss, remat="full"), plan=plan)
    batch = zerojax.aot.batch(model.batch(sequences * count), plan)
    return step.lower(plan.abstract(), batch).compile(), plan


def measured(row):
    program, plan = compiled(*row)
    report = zerojax.audit(program, plan=plan)
    made = figures.figures("", program, plan)
    sent = {kind: round(count / 2**30, 2) for kind, count in report.totals.items()}
    columns = {name: made[name] for name in figures.COLUMNS[1:]}
    compute = round(1e3 * report.replay.compute, 1)
    return columns | {"compute_ms": compute, "sent_gib": sent, "findings": made["findings"]}


if __name__ == "__main__":
    results.main(__doc__, STORED, ROWS, figures.versions(), measured)
