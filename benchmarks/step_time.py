"""Step time of every stage against plain JAX, as ratios: interleaved runs in one process.

    python benchmarks/step_time.py                       # prints a table
    python benchmarks/step_time.py --json out.json       # and keeps it

The rivals are what one would write without zerojax: data parallelism (everything replicated),
FSDP by annotation (state sharded, the rest left to XLA), and FSDP by hand in a `shard_map`. On
emulated CPU devices the ratios say what the program costs; they say nothing of a GPU, where
collectives run beside compute.
"""

import argparse
import datetime
import json
import pathlib
import statistics
import sys
import time

import jax

jax.config.update("jax_num_cpu_devices", 8)  # only matters where there is no GPU

import numpy as np
import optax
from jax.sharding import PartitionSpec

import zerojax

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from flax.training.train_state import TrainState

from examples import demo
from examples.demo import init_params, loss_fn

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--layers", type=int, default=6)
parser.add_argument("--dim", type=int, default=256)
parser.add_argument("--tokens", type=int, default=64)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--rounds", type=int, default=15)
parser.add_argument("--json", type=pathlib.Path)


def annotated(state):
    """A step of plain JAX that keeps the state where it lies."""
    places = jax.tree.map(lambda x: x.sharding, state)

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        new = state.apply_gradients(grads=grads)
        return jax.tree.map(jax.lax.with_sharding_constraint, new, places), {"loss": loss}

    return jax.jit(step, donate_argnums=0)


def by_hand(state):
    """ZeRO-3 of this one model: its weights gathered in its layers, by somebody who knows it."""
    specs = jax.tree.map(lambda x: x.sharding.spec, state.params)
    places = jax.tree.map(lambda x: x.sharding, state)
    size = jax.device_count()

    def whole(shards, specs, layers=0):
        gather = lambda x, spec: (
            jax.lax.all_gather(x, "data", axis=tuple(spec).index("data") - layers, tiled=True)
            if "data" in tuple(spec) else x
        )  # fmt: skip
        return jax.tree.map(gather, shards, specs)

    def loss(shards, text):
        inputs, targets = text[:, :-1], text[:, 1:]
        block = lambda x, p: demo.block(x, whole(p, specs["blocks"], layers=1))
        ends = [name for name in shards if name != "blocks"]
        params = whole(*({name: tree[name] for name in ends} for tree in (shards, specs)))
        x = params["embed"][inputs] + params["position"]
        x, _ = jax.lax.scan(jax.checkpoint(block), x, shards["blocks"])
        logits = demo.norm(x, params["norm"]) @ params["embed"].T
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return losses.mean() / size

    def gradients(shards, text):
        value, grads = jax.value_and_grad(loss)(shards, text)
        summed = lambda g, spec: g if "data" in tuple(spec) else jax.lax.psum(g, "data")
        return jax.lax.psum(value, "data"), jax.tree.map(summed, grads, specs)

    mapped = jax.shard_map(
        gradients, mesh=places.step.mesh, in_specs=(specs, PartitionSpec("data")),
        out_specs=(PartitionSpec(), specs), check_vma=False,
    )  # fmt: skip

    def step(state, batch):
        value, grads = mapped(state.params, batch)
        new = state.apply_gradients(grads=grads)
        return jax.tree.map(jax.lax.with_sharding_constraint, new, places), {"loss": value}

    return jax.jit(step, donate_argnums=0)


def contestants(make_state):
    tx = optax.adamw(1e-3)  # a plain optimizer: the rivals know nothing of plans
    for name, stage, made in (
        ("plain, replicated", 0, annotated),
        ("plain, FSDP by annotation", 3, annotated),
        ("FSDP by hand in shard_map", 3, by_hand),
    ):
        state = zerojax.shard_train_state(make_state, stage).replace(tx=tx)
        yield name, made(state), state
    for stage in range(4):
        step = zerojax.train_step(loss_fn)
        yield f"zerojax stage {stage}", step, zerojax.shard_train_state(make_state, stage)


def main():
    args = parser.parse_args()

    def make_state():
        params = init_params(jax.random.key(0), args.layers, args.dim, args.tokens)
        return TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))

    rng = np.random.default_rng(0)
    text = rng.integers(0, 256, (args.batch, args.tokens + 1)).astype(np.int32)
    batch = zerojax.shard_batch(text)
    steps, states = {}, {}
    for name, step, state in contestants(make_state):
        states[name], metrics = step(state, batch)
        steps[name] = step
        print(f"{name:28} loss {metrics['loss']:.6f}")
    times = {name: [] for name in steps}
    for _ in range(args.rounds):
        for name, step in steps.items():
            started = time.perf_counter()
            states[name], _ = jax.block_until_ready(step(states[name], batch))
            times[name].append(time.perf_counter() - started)
    base = statistics.median(times["plain, replicated"])
    ratios = {name: statistics.median(t) / base for name, t in times.items()}
    for name, ratio in ratios.items():
        print(f"{name:28}{ratio:6.2f}")
    if args.json:
        devices = jax.devices()
        record = {
            "device": f"{len(devices)} x {devices[0].device_kind}",
            "jax": jax.__version__,
            "date": datetime.date.today().isoformat(),
            "model": {k: getattr(args, k) for k in ("layers", "dim", "tokens", "batch")},
            "rounds": args.rounds,
            "median step time, of plain replicated": {k: round(v, 3) for k, v in ratios.items()},
        }
        args.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
