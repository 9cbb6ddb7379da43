"""Times of a first step, which traces and compiles, and of later ones on 8 emulated CPU devices, as
ratios: one loss replicated, with FSDP by annotations, and with zerojax at stage 3.

    python benchmarks/first_step.py                                      # prints a table
    python benchmarks/first_step.py --json benchmarks/first_step_cpu.json
    python benchmarks/first_step.py --check        # zerojax against annotations: make first-steps

First steps have CPU times of all threads, later ones times on the clock, as multiples of the
replicated step's in the same round, so that other programs on the machine change them little.
`compile_time.py` has steps compiled for GPUs.
"""

import argparse
import functools
import itertools
import operator
import os
import statistics
import sys

import jax

jax.config.update("jax_num_cpu_devices", 8)  # only matters where there is no GPU
os.environ["ZEROJAX_CACHE"] = ""  # each round compiles

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
import results
import step_time
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec
from rivals import accumulated

import zerojax
import zerojax.nnx
from zerojax.tools._forecast import presets as _presets

TX = optax.adamw(1e-3)
LAYERS, WIDTH, HEADS, VOCAB, TOKENS, ROWS, LAB = 6, 128, 4, 256, 32, 32, 64
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


class LabBlock(nnx.Module):
    """Llama's. With experts, each token goes to two MLPs, each of which has seats for one and a
    half times its share."""

    def __init__(self, experts, rngs):
        made = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(LAB, rngs=rngs) for _ in range(2)])
        self.q, self.out = made(LAB, LAB), made(LAB, LAB)
        self.kv = made(LAB, LAB)  # of half the heads
        self.router = made(LAB, experts) if experts else None
        each = [experts] if experts else []
        shapes = {"gate": (LAB, 3 * LAB), "up": (LAB, 3 * LAB), "down": (3 * LAB, LAB)}
        normal = lambda *shape: nnx.Param(0.02 * rngs.params.normal(shape))
        self.mlp = nnx.Dict({name: normal(*each, *shape) for name, shape in shapes.items()})

    def __call__(self, x):
        y, heads = self.norms[0](x), (*x.shape[:2], -1, LAB // HEADS)
        q, kv = rotated(self.q(y).reshape(heads)), self.kv(y).reshape(heads)
        k, v = jnp.split(kv, 2, axis=2)
        attended = jax.nn.dot_product_attention(q, rotated(k), v, is_causal=True)
        x = x + self.out(attended.reshape(x.shape))
        y = self.norms[1](x)
        return x + (self.mixed(y) if self.router else self.swiglu(y))

    def swiglu(self, x):
        gate, up, down = (self.mlp[name][...] for name in ("gate", "up", "down"))
        return (nnx.silu(x @ gate) * (x @ up)) @ down

    def mixed(self, x):
        experts = self.router.out_features
        shares, chosen = jax.lax.top_k(nnx.softmax(self.router(x)), 2)
        goes = jax.nn.one_hot(chosen, experts).reshape(len(x), -1, experts)
        seat = (goes * (goes.cumsum(1) - 1)).sum(-1).astype(int)
        sits = goes[..., None] * jax.nn.one_hot(seat, 3 * TOKENS // experts)[:, :, None]
        sits = sits.reshape(*chosen.shape, experts, -1)
        outputs = self.swiglu(jnp.einsum("rtkes,rtd->resd", sits, x))
        return jnp.einsum("rtkes,rtk,resd->rtd", sits, shares, outputs)


def rotated(x):
    """Rotary positions."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None, None] / 1e4 ** (jnp.arange(half) / half)
    a, b = jnp.split(x, 2, -1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


class LabLlama(nnx.Module):
    """What a small lab brings: a Llama in a Python loop under remat, or its mixture of experts."""

    def __init__(self, experts, rngs):
        self.embed = nnx.Embed(VOCAB, LAB, rngs=rngs)
        self.blocks = nnx.List([LabBlock(experts, rngs) for _ in range(3)])
        self.norm = nnx.RMSNorm(LAB, rngs=rngs)
        self.head = nnx.Linear(LAB, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = nnx.remat(LabBlock.__call__)(block, x)
        return self.head(self.norm(x))


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


def of_nnx(make_model, who, accumulate=1):
    def make():
        model = make_model(nnx.Rngs(0))
        return model, nnx.Optimizer(model, TX, wrt=nnx.Param)

    def loss_fn(model, batch):
        return cross_entropy(model(batch["x"]), batch["y"])

    if who == OURS:
        step = zerojax.nnx.train_step(loss_fn, accumulate=accumulate)
        run = lambda objects, batch: (objects, step(*objects, batch))
        return run, zerojax.nnx.shard(make, stage=3)
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
        of_model, params = nnx.split(model)
        loss_of = lambda params, batch: loss_fn(nnx.merge(of_model, params), batch)
        held = lambda grads: jax.lax.with_sharding_constraint(grads, places[0])
        loss, grads = accumulated(jax.value_and_grad(loss_of), accumulate, held)(params, batch)
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


SIZE = {"vocab": VOCAB, "tokens": TOKENS, "compute": jnp.float32}
SCANNED, HELD = (kind(LAYERS, WIDTH, HEADS, **SIZE) for kind in (_presets.Gpt, Held))
TEXT = np.random.default_rng(0).integers(0, VOCAB, (ROWS, TOKENS)).astype(np.int32)
PAIRS = {"x": TEXT, "y": np.roll(TEXT, -1, 1)}
IMAGES = np.ones((ROWS, 28, 28, 1), np.float32)
# Layers in a loop without remat: backward gathers weights again, and scatters each gradient on its
# own, where XLA reduces those of annotations at once. Tracing takes twice as long, XLA 1.3 times.
# Loops of collectives wait for others on CPUs, for which XLA takes 1.03 to 1.07 times as long:
# annotations leave them out of order (`zerojax/_fence.py`). The mixture took 1.13 to 1.26. Later
# steps of loops in Python took 1.45 where nothing else ran, and 1.0 beside other programs: they
# have three times as many collectives as those of annotations, whose gradients XLA reduces at once,
# and eight threads on two cores meet in each.
BAR = 1.15
BARS = {
    ("plain JAX: a GPT, its layers in a scan with remat", "first step"): 1.3,
    ("plain JAX: a GPT, its layers in a scan with remat", "step"): 1.3,
    ("nnx: a lab's Llama, remat, 4 microbatches", "first step"): 1.25,
    ("linen: a GPT, its layers in a loop", "first step"): 1.5,
    ("linen: a GPT, its layers in a loop", "step"): 1.5,
    ("nnx: a GPT, its layers in a loop", "first step"): 1.5,
    ("nnx: a GPT, its layers in a loop", "step"): 1.5,
    ("nnx: its mixture of 8 experts, remat", "first step"): 1.35,
    ("nnx: its mixture of 8 experts, remat", "step"): 1.3,
}
PROGRAMS = {  # contestants by name, and their batch
    "plain JAX: a GPT, its layers in a scan with remat": (
        functools.partial(of_trees, SCANNED.loss, SCANNED.make_state, annotated=HELD.loss), TEXT,
    ),
    "linen: a GPT, its layers in a loop": (of_linen(LinenGpt(), TEXT), PAIRS),
    "linen: the CNN of Flax's example": (
        of_linen(LinenCnn(), IMAGES), {"x": IMAGES, "y": np.zeros(ROWS, np.int32)},
    ),
    "nnx: a GPT, its layers in a loop": (functools.partial(of_nnx, NnxGpt), PAIRS),
    "nnx: a lab's Llama, remat, 4 microbatches": (
        functools.partial(of_nnx, functools.partial(LabLlama, 0), accumulate=4), PAIRS,
    ),
    "nnx: its mixture of 8 experts, remat": (
        functools.partial(of_nnx, functools.partial(LabLlama, 8)), PAIRS,
    ),
}  # fmt: skip


def seconds(make, batch, who):
    jax.clear_caches()
    step, state = make(who)
    before = sum(os.times()[:4])
    jax.block_until_ready(step(state, batch))
    return sum(os.times()[:4]) - before


def measured(name, rounds, whos):
    """Returns the times of first steps and of later ones, for each contestant by round."""
    make, batch = PROGRAMS[name]
    batch, steps, states = zerojax.shard_batch(batch), {}, {}
    for who in whos:  # these first steps import, too
        steps[who], state = make(who)
        states[who], _ = steps[who](state, batch)
    later = step_time.interleaved(steps, states, batch, rounds=20)
    times = [{who: seconds(make, batch, who) for who in whos} for _ in range(rounds)]
    return {who: [time[who] for time in times] for who in whos}, later


def ratios(times, who, than):
    """Returns the median and the range of one contestant's times as multiples of another's."""
    each = [a / b for a, b in zip(times[who], times[than], strict=True)]
    return round(statistics.median(each), 2), [round(min(each), 2), round(max(each), 2)]


def check(programs):
    """Fails if zerojax takes more than `BAR` times as long as annotations, twice."""

    def slow(name):
        kinds = zip(("first step", "step"), measured(name, 1, (ANNOTATED, OURS)), strict=True)
        found = {kind: ratios(times, OURS, ANNOTATED)[0] for kind, times in kinds}
        print(name, found, flush=True)
        return [kind for kind, ratio in found.items() if ratio > BARS.get((name, kind), BAR)]

    if missed := [name for name in programs if slow(name) and slow(name)]:
        sys.exit("slower than annotations: " + "; ".join(missed))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=results.file)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", type=results.expression, default="", help=results.ONLY)
    parser.add_argument("--check", action="store_true", help="fail if slower than annotations")
    args = parser.parse_args()
    programs = results.chosen(args.only, PROGRAMS)
    if args.check:
        return check(programs)
    devices = jax.devices()
    made_by = {"device": f"{len(devices)} x {devices[0].device_kind}", "jax": jax.__version__}
    names = list(itertools.product(PROGRAMS, (ANNOTATED, OURS)))
    kept = results.Results(args.json, names, made_by, operator.itemgetter("program", "step"))
    for name in programs:
        first, later = measured(name, args.rounds, (REPLICATED, ANNOTATED, OURS))
        for who in (ANNOTATED, OURS):
            (time, spread), (step, _) = (ratios(t, who, REPLICATED) for t in (first, later))
            row = {"program": name, "step": who, "time": time, "range": spread, "later": step}
            kept.put((name, who), row)
            print(f"{name:52}{who:18}{time:6.2f}   {spread}{step:6.2f}", flush=True)


if __name__ == "__main__":
    main()
