"""Times to trace, compile and run a first step on 8 emulated CPU devices, as ratios: one loss
replicated, with FSDP by annotations, and with zerojax at stage 3.

    python benchmarks/first_step.py                                      # prints a table
    python benchmarks/first_step.py --json benchmarks/first_step_cpu.json

Times are CPU times of all threads, as multiples of the replicated step's in the same round, so that
other programs on the machine change them little. `compile_time.py` has steps compiled for GPUs.
"""

import argparse
import datetime
import functools
import json
import os
import statistics

import jax

jax.config.update("jax_num_cpu_devices", 8)  # only matters where there is no GPU
os.environ["ZEROJAX_CACHE"] = ""  # each round compiles

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
import results
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import zerojax
import zerojax.nnx
from zerojax.tools._forecast import presets as _presets

TX = optax.adamw(1e-3)
LAYERS, WIDTH, HEADS, VOCAB, TOKENS, ROWS = 6, 128, 4, 256, 32, 16
REPLICATED, ANNOTATED, OURS = "replicated", "annotations", "zerojax stage 3"


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class LinenGpt(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH)(tokens) + nn.Embed(TOKENS, WIDTH)(jnp.arange(TOKENS))
        for _ in range(LAYERS):
            attend = nn.MultiHeadDotProductAttention(HEADS)
            x = x + attend(nn.LayerNorm()(x), mask=nn.make_causal_mask(tokens))
            x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))
        return nn.Dense(VOCAB)(x)


class LinenCnn(nn.Module):
    """The network of Flax's MNIST example."""

    @nn.compact
    def __call__(self, x):
        for features in (32, 64):
            x = nn.avg_pool(nn.relu(nn.Conv(features, (3, 3))(x)), (2, 2), (2, 2))
        return nn.Dense(16)(nn.relu(nn.Dense(256)(x.reshape(len(x), -1))))


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attend = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attend(self.norms[0](x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class NnxGpt(nnx.Module):
    """A list of blocks, and a loop over it, as in Flax's tutorials."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(TOKENS, WIDTH, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.positions(jnp.arange(TOKENS))
        for block in self.blocks:
            x = block(x, nnx.make_causal_mask(tokens))
        return self.head(x)


class Held(_presets.Gpt):
    """Constrains layers' activations to the batch's sharding: XLA would move them in a scan."""

    def layer(self, x, p):
        rows = NamedSharding(zerojax.mesh(data=-1), PartitionSpec("data"))
        x, _ = super().layer(jax.lax.with_sharding_constraint(x, rows), p)
        return jax.lax.with_sharding_constraint(x, rows), None


# -- contestants: each makes a step and its state


def of_trees(loss_fn, make_state, who, annotated=None):
    """`annotated` is the loss for FSDP by annotations, if that needs another."""
    if who == OURS:
        return zerojax.train_step(loss_fn), zerojax.shard_train_state(make_state, stage=3)
    stage = 3 if who == ANNOTATED else 0
    loss_fn = annotated if annotated and who == ANNOTATED else loss_fn
    planned = zerojax.plan(make_state, stage=stage, pad=False).abstract()
    shardings = [leaf.sharding for leaf in jax.tree.leaves(planned)]
    places = jax.tree.unflatten(jax.tree.structure(jax.eval_shape(make_state)), shardings)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(places, None))
    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    return step, jax.jit(make_state, out_shardings=places)()


def of_nnx(loss_fn, make, who):
    if who == OURS:
        step = zerojax.nnx.train_step(loss_fn)
        return lambda objects, batch: step(*objects, batch), zerojax.nnx.shard(make, stage=3)
    graph, shapes = nnx.split(nnx.eval_shape(make))
    mesh = zerojax.mesh(data=-1)

    def place(leaf):
        dims = [dim for dim, size in enumerate(leaf.shape) if size % mesh.size == 0]
        sharded = dims and len(leaf.shape) > 1 and who == ANNOTATED
        spec = PartitionSpec(*[None] * dims[0], "data") if sharded else PartitionSpec()
        return NamedSharding(mesh, spec)

    places = jax.tree.map(place, shapes)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(places, None))
    def step(state, batch):
        model, optimizer = nnx.merge(graph, state)
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    return step, jax.jit(lambda: nnx.state(make()), out_shardings=places)()


def of_linen(module, inputs):
    """Returns the contestants for a classifying module, and the arguments that make them."""

    def make_state():
        params = module.init(jax.random.key(0), inputs[:1])["params"]
        return TrainState.create(apply_fn=None, params=params, tx=TX)

    def loss_fn(params, batch):
        return cross_entropy(module.apply({"params": params}, batch["x"]), batch["y"])

    return functools.partial(of_trees, loss_fn, make_state)


def make_nnx():
    model = NnxGpt(nnx.Rngs(0))
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param)


SIZE = {"vocab": VOCAB, "tokens": TOKENS, "compute": jnp.float32}
SCANNED, HELD = (kind(LAYERS, WIDTH, HEADS, **SIZE) for kind in (_presets.Gpt, Held))
TEXT = np.random.default_rng(0).integers(0, VOCAB, (ROWS, TOKENS)).astype(np.int32)
PAIRS = {"x": TEXT, "y": np.roll(TEXT, -1, 1)}
IMAGES = np.ones((ROWS, 28, 28, 1), np.float32)
PROGRAMS = {  # contestants by name, and their batch
    "plain JAX: a GPT, its layers in a scan with remat": (
        functools.partial(of_trees, SCANNED.loss, SCANNED.make_state, annotated=HELD.loss), TEXT,
    ),
    "linen: a GPT, its layers in a loop": (of_linen(LinenGpt(), TEXT), PAIRS),
    "linen: the CNN of Flax's example": (
        of_linen(LinenCnn(), IMAGES), {"x": IMAGES, "y": np.zeros(ROWS, np.int32)},
    ),
    "nnx: a GPT, its layers in a loop": (
        functools.partial(of_nnx, lambda m, batch: cross_entropy(m(batch["x"]), batch["y"]),
                          make_nnx), PAIRS,
    ),
}  # fmt: skip


def seconds(make, batch, who):
    jax.clear_caches()
    step, state = make(who)
    batch = zerojax.shard_batch(batch)
    before = sum(os.times()[:4])
    jax.block_until_ready(step(state, batch))
    return sum(os.times()[:4]) - before


def measured(name, rounds):
    """Returns each contestant's times as multiples of the replicated step's, by round."""
    make, batch = PROGRAMS[name]
    ratios = {ANNOTATED: [], OURS: []}
    for turn in range(rounds + 1):
        times = {who: seconds(make, batch, who) for who in (REPLICATED, *ratios)}
        for who in ratios if turn else ():  # the first round imports
            ratios[who].append(times[who] / times[REPLICATED])
    return ratios


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=results.file)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rows = []
    for name in PROGRAMS:
        for who, ratios in measured(name, args.rounds).items():
            spread = [round(min(ratios), 2), round(max(ratios), 2)]
            rows.append({"program": name, "step": who, "time": round(statistics.median(ratios), 2)})
            rows[-1]["range"] = spread
            print(f"{name:52}{who:18}{rows[-1]['time']:6.2f}   {spread}", flush=True)
    if args.json:
        devices = jax.devices()
        record = {
            "device": f"{len(devices)} x {devices[0].device_kind}",
            "jax": jax.__version__,
            "date": str(datetime.date.today()),
            "rounds": args.rounds,
            "rows": rows,
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
