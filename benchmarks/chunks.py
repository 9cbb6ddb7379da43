"""Llama-8B on 8 H100s with its loss in one piece and in chunks of tokens, compiled without GPUs.

python benchmarks/chunks.py           # prints the rows
python benchmarks/chunks.py --json    # stores them too
"""

import functools
import pathlib

import figures  # before JAX: it says what JAX may look for
import jax
import jax.numpy as jnp
import optax
import results

import zerojax
from zerojax.tools._forecast import presets as _presets

GPUS, CHUNK = "8xH100", 1024
WHOLE, CHUNKS = "in one piece", f"in chunks of {CHUNK}"
UPDATES = {"": "auto", ', update="backward"': "backward"}
ROWS = {  # the tokens of a GPU, one sequence; whether its loss is in chunks; when it updates
    f"{tokens // 1024}k tokens, {way}{text}": (tokens, way == CHUNKS, update)
    for tokens in (8192, 32768)
    for text, update in UPDATES.items()
    for way in (WHOLE, CHUNKS)
}
STORED = pathlib.Path(__file__).parent / "chunks.json"


def loss(model, in_chunks, params, tokens):
    params = jax.tree.map(lambda leaf: leaf.astype(model.compute), params)
    layer = jax.checkpoint(model.layer)
    x, _ = jax.lax.scan(layer, model.embedded(params, tokens), params["blocks"])
    labels, mask = jnp.roll(tokens, -1, 1), jnp.arange(model.tokens) < model.tokens - 1

    def loss_of(row):
        logits = model.logits(params, row[0]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, row[1])

    if not in_chunks:
        return zerojax.mean(loss_of((x, labels)), where=mask)
    rows = (x.reshape(-1, model.hidden), labels.reshape(-1))
    losses = jax.lax.map(jax.checkpoint(loss_of), rows, batch_size=CHUNK)
    return zerojax.mean(losses.reshape(labels.shape), where=mask)


def measured(row):
    tokens, in_chunks, update = row
    schedule = zerojax.Schedule(update=update)
    model = _presets.preset("llama-8b", tokens=tokens, attention="cudnn")
    plan = zerojax.plan(model.make_state, mesh=zerojax.aot.mesh(GPUS), stage=3)
    step = zerojax.train_step(
        functools.partial(loss, model, in_chunks), plan=plan, schedule=schedule
    )
    batch = zerojax.aot.batch(model.batch(plan.size), plan)
    program = step.lower(plan.abstract(), batch).compile()
    report = zerojax.audit(program, plan=plan)
    head = [one for one in report.traffic if one.paths == ("params/head",)]
    counts = {one.kind: 0 for one in head}
    for one in head:
        counts[one.kind] += one.trips
    made = figures.figures("", program, plan)
    return {name: made[name] for name in figures.COLUMNS[1:]} | {"head": counts}


if __name__ == "__main__":
    results.main(__doc__, STORED, ROWS, figures.versions(), measured)
