"""Llama-8B with its sequences split over GPUs, beside code by hand and annotations, compiled
without GPUs.

python benchmarks/long_context.py           # prints the rows
python benchmarks/long_context.py --json    # stores them too

The attention is cuDNN's. Each layer has `jax.checkpoint`, and so have the chunks of the loss. Each
GPU has 1/8 of one sequence. All rows have the same model:

- zerojax: the loss is that of a whole sequence, and `sequence=` splits it.
- by hand: the loss is that of a part of a sequence. It says the positions of the part, exchanges
  tokens for heads around attention, and takes labels from the batch. ZeRO is zerojax's.
- annotations: plain `jax.jit`. Constraints split each layer's input and output along the tokens,
  and what attention reads and returns along the heads. Weights are whole in a layer.

The last row compares times to trace and to compile with those of the same tokens in whole
sequences, one a GPU: CPU times of all threads and of the assembler's processes, which alternate.
"""

import dataclasses
import functools
import os
import pathlib
import statistics

import figures  # before JAX: it says what JAX may look for
import jax
import jax.numpy as jnp
import optax
import results
from jax.sharding import NamedSharding, PartitionSpec as P

import zerojax
from zerojax.tools._forecast import presets as _presets

GPUS, SIZE, AXIS, CHUNK = "8xH100", 8, "sequence", 2048
PRESET = _presets.preset("llama-8b", attention="cudnn")
STORED = pathlib.Path(__file__).parent / "long_context.json"


@dataclasses.dataclass(frozen=True)
class Long(_presets.Llama):
    """A Llama whose loss, and MLPs if `in_chunks`, take so many tokens at once."""

    chunk: int = CHUNK
    in_chunks: bool = False
    repeated: int = 1  # how often attention reads each head of keys and values

    def loss(self, params, tokens, remat="full"):
        labels = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
        return self.loss_of(params, tokens, labels, remat)

    def loss_of(self, params, tokens, labels, remat="full"):
        params = jax.tree.map(lambda leaf: leaf.astype(self.compute), params)
        x, _ = jax.lax.scan(self._rematted(remat), self.embedded(params, tokens), params["blocks"])

        def losses(x, labels):
            logits = self.logits(params, x).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))

        return zerojax.mean(self.by_chunk(losses, x, labels), where=labels >= 0)

    def by_chunk(self, code, *arrays):
        """Runs code on a chunk of tokens after the other."""
        rows, tokens = arrays[0].shape[:2]
        chunks = [x.reshape(-1, self.chunk, *x.shape[2:]) for x in arrays]
        out = jax.lax.map(lambda each: jax.checkpoint(code)(*each), chunks)
        return out.reshape(rows, tokens, *out.shape[2:])

    def layer(self, x, p):
        rows, tokens, dim = x.shape
        h = _presets._rms_norm(x, p["norm1"])
        q, k, v = ((h @ p[n]).reshape(rows, tokens, -1, dim // self.heads) for n in "qkv")
        k, v = (jnp.repeat(each, self.repeated, 2) for each in (self.rotated(k), v))
        x = x + self.attended(self.rotated(q), k, v).reshape(x.shape) @ p["proj"]

        def fed(x):
            return x + self.fed_forward(_presets._rms_norm(x, p["norm2"]), p)

        return self.by_chunk(fed, x) if self.in_chunks else fed(x), None

    def rotated(self, x):
        return _presets._rotated(x)


class ByHand(Long):
    """The same for a device's part of a sequence, in code that names the axis."""

    def loss(self, params, batch, remat="full"):
        return self.loss_of(params, batch["inputs"], batch["labels"], remat)

    def rotated(self, x):
        tokens, features = x.shape[1], x.shape[3]
        rates = 500000.0 ** (-jnp.arange(0, features, 2) / features)
        places = jax.lax.axis_index(AXIS) * tokens + jnp.arange(tokens)
        a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        sin, cos = (turn(places[:, None, None] * rates) for turn in (jnp.sin, jnp.cos))
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)

    def attended(self, q, k, v):
        whole = [jax.lax.all_to_all(x, AXIS, 2, 1, tiled=True) for x in (q, k, v)]
        return jax.lax.all_to_all(super().attended(*whole), AXIS, 1, 2, tiled=True)


@dataclasses.dataclass(frozen=True)
class Annotated(Long):
    """The same with constraints for the partitioner of XLA. A chunk has tokens of each device."""

    mesh: jax.sharding.Mesh | None = None

    def held(self, x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*spec)))

    def loss_of(self, params, *others):
        head = self.held(params["head"].astype(self.compute))  # once, and not for every chunk
        return super().loss_of(params | {"head": head}, *others)

    def layer(self, x, p):
        x, _ = super().layer(self.held(x, "data", AXIS), jax.tree.map(self.held, p))
        return self.held(x, "data", AXIS), None

    def attended(self, q, k, v):
        parts = [self.held(x, "data", AXIS) for x in (q, k, v)]
        whole = [self.held(x, "data", None, AXIS) for x in parts]
        return self.held(self.held(super().attended(*whole), "data", None, AXIS), "data", AXIS)

    def by_chunk(self, code, *arrays):
        rows, tokens = arrays[0].shape[:2]

        def cut(x):  # (rows, tokens, ...) to (chunks, rows, tokens of a chunk, ...)
            parts = x.reshape(rows, SIZE, -1, self.chunk, *x.shape[2:])
            return jnp.moveaxis(self.held(parts, "data", AXIS), 2, 0)

        def held(arrays):
            arrays = [self.held(x, "data", AXIS) for x in arrays]
            return self.held(jax.checkpoint(code)(*arrays), "data", AXIS)

        out = jax.lax.map(held, [*map(cut, arrays)])
        out = self.held(jnp.moveaxis(out, 0, 2), "data", AXIS)
        return out.reshape(rows, tokens, *out.shape[4:])


def mesh_of():
    return zerojax.aot.mesh(GPUS, shape=(1, SIZE), axis_names=("data", AXIS))


def model_of(kind, tokens, in_chunks=False, **fields):
    return kind(**{**vars(PRESET), "tokens": tokens}, in_chunks=in_chunks, **fields)


def split(tokens, in_chunks):
    """A step of zerojax whose loss is that of a whole sequence."""
    model = model_of(Long, tokens, in_chunks)
    plan = zerojax.plan(model.make_state, stage=3, mesh=mesh_of(), sequence=AXIS)
    return zerojax.train_step(model.loss, plan=plan), plan, model.batch(1)


def by_hand(tokens, in_chunks):
    """A step of zerojax whose loss is that of a part."""
    model = model_of(ByHand, tokens, in_chunks)
    plan = zerojax.plan(model.make_state, stage=3, mesh=mesh_of(), axis=("data", AXIS))
    part = jax.ShapeDtypeStruct((SIZE, tokens // SIZE), jnp.int32)
    return zerojax.train_step(model.loss, plan=plan), plan, {"inputs": part, "labels": part}


def whole(tokens, in_chunks):
    """A step of zerojax whose GPUs have a sequence each, and as many tokens."""
    model = model_of(Long, tokens // SIZE, in_chunks)
    plan = zerojax.plan(model.make_state, stage=3, mesh=mesh_of(), axis=("data", AXIS))
    return zerojax.train_step(model.loss, plan=plan), plan, model.batch(SIZE)


def annotated(tokens, in_chunks):
    """Returns a lowered step of plain JAX, sharded as zerojax shards it."""
    mesh = mesh_of()
    model = model_of(Annotated, tokens, in_chunks, mesh=mesh)
    plan = zerojax.plan(model.make_state, stage=3, mesh=mesh, axis=("data", AXIS), pad=False)
    state = plan.abstract()
    places = jax.tree.map(lambda x: x.sharding, state)
    hold = jax.lax.with_sharding_constraint

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(places, None))
    def step(state, batch):
        loss, grads = jax.value_and_grad(model.loss)(state.params, batch)
        return state.apply_gradients(grads=hold(grads, places.params)), loss

    held = NamedSharding(mesh, P("data", AXIS))
    return step.lower(state, jax.ShapeDtypeStruct((1, tokens), jnp.int32, sharding=held))


def compiled(kind, tokens, in_chunks):
    if kind not in STEPS:
        options = figures.compiler_options((), mesh_of().devices.flat[0])
        return annotated(tokens, in_chunks).compile(compiler_options=options or None), None
    step, plan, batch = STEPS[kind](tokens, in_chunks)
    return step.lower(plan.abstract(), zerojax.aot.batch(batch, plan)).compile(), plan


STEPS = {"zerojax": split, "by hand": by_hand}
TIMES, ROUNDS = "tracing and compiling, 32k tokens", 3
ROWS = {  # only a million tokens need MLPs in chunks
    f"{tokens // 1024}k tokens: {kind}": (kind, tokens, tokens == 2**20)
    for tokens in (2**15, 2**17, 2**20)
    for kind in (*STEPS, "annotations")
}
ROWS |= {TIMES: None}


def measured(row):
    if row is None:
        return times()
    program, plan = compiled(*row)
    report = zerojax.audit(program, plan=plan)
    made = figures.figures("", program, plan)
    sent = {kind: round(count / 2**30, 3) for kind, count in report.totals.items()}
    columns = {name: made[name] for name in figures.COLUMNS[1:]}
    compute = round(1e3 * report.replay.compute, 1)
    return columns | {"compute_ms": compute, "sent_gib": sent, "findings": made["findings"]}


def times():
    """Returns medians, as multiples of those of whole sequences."""
    spent = {whole: [], split: []}
    for _ in range(ROUNDS):
        for make, parts in spent.items():
            jax.clear_caches()
            step, plan, batch = make(2**15, False)
            state, batch = plan.abstract(), zerojax.aot.batch(batch, plan)
            at = [sum(os.times()[:4])]
            lowered = step.lower(state, batch)
            at.append(sum(os.times()[:4]))
            lowered.compile()
            at.append(sum(os.times()[:4]))
            parts.append((at[1] - at[0], at[2] - at[1], at[2] - at[0]))
            print(make.__name__, parts[-1], flush=True)
    medians = {
        make: [*map(statistics.median, zip(*each, strict=True))] for make, each in spent.items()
    }
    ratios = [round(a / b, 2) for a, b in zip(medians[split], medians[whole], strict=True)]
    seconds = [round(each, 1) for each in medians[whole]]
    names = ("trace", "compile", "both")
    named = lambda values: dict(zip(names, values, strict=True))
    return {"times": named(ratios), "of_seconds": named(seconds)}


if __name__ == "__main__":
    results.main(__doc__, STORED, ROWS, figures.versions(), measured)
