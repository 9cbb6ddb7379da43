"""Step time of every stage against plain JAX, as ratios: interleaved runs in one process.

Beside it, the peak of host memory, where the emulated devices live: of all of them, in a process
for each; and what calling a step costs when there is next to nothing to compute.

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
import os
import pathlib
import statistics
import subprocess
import sys
import time

import jax

jax.config.update("jax_num_cpu_devices", 8)  # only matters where there is no GPU

import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

import zerojax

sys.path.insert(0, str(pathlib.Path(__file__).parent))
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import host_memory
from flax.training.train_state import TrainState

from examples import demo
from examples.demo import init_params, loss_fn

SIZES = ("layers", "dim", "tokens", "batch")
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--layers", type=int, default=6)
parser.add_argument("--dim", type=int, default=256)
parser.add_argument("--tokens", type=int, default=64)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--rounds", type=int, default=15)
parser.add_argument("--json", type=pathlib.Path)
parser.add_argument("--peak", metavar="NAME", help="one contestant's peak memory, in this process")


def annotated(state, loss_fn=loss_fn):
    """A step of plain JAX that keeps the state where it lies."""
    places = jax.tree.map(lambda x: x.sharding, state)

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        new = state.apply_gradients(grads=grads)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}  # as zerojax's steps do
        return jax.tree.map(jax.lax.with_sharding_constraint, new, places), metrics

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
        metrics = {"loss": value, "grad_norm": optax.tree.norm(grads)}
        return jax.tree.map(jax.lax.with_sharding_constraint, new, places), metrics

    return jax.jit(step, donate_argnums=0)


def rival(made, stage):
    def contestant(make_state):
        # A plain optimizer: the rivals know nothing of plans.
        state = zerojax.shard_train_state(make_state, stage).replace(tx=optax.adamw(1e-3))
        return made(state), state

    return contestant


def ours(stage):
    return lambda make: (zerojax.train_step(loss_fn), zerojax.shard_train_state(make, stage))


CONTESTANTS = {
    "plain, replicated": rival(annotated, 0),
    "plain, FSDP by annotation": rival(annotated, 3),
    "FSDP by hand in shard_map": rival(by_hand, 3),
    **{f"zerojax stage {stage}": ours(stage) for stage in range(4)},
}


def setting(args):
    """What makes the state, and a batch."""

    def make_state():
        params = init_params(jax.random.key(0), args.layers, args.dim, args.tokens)
        return TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))

    rng = np.random.default_rng(0)
    text = rng.integers(0, 256, (args.batch, args.tokens + 1)).astype(np.int32)
    return make_state, zerojax.shard_batch(text)


def peak_memory(args):
    """MiB of the state and of what three steps take beside it."""
    make_state, batch = setting(args)
    step, state = CONTESTANTS[args.peak](make_state)
    shards = (s for x in jax.tree.leaves(state) for s in x.addressable_shards)
    held = sum(shard.data.nbytes for shard in shards)
    compiled = step.lower(state, batch).compile()

    def steps():
        nonlocal state
        for _ in range(3):
            state, _ = jax.block_until_ready(compiled(state, batch))

    return round(held / 2**20) + host_memory.measured(steps)[1]["peak_mib"]


def peak_memories(args):
    sizes = [f"--{name}={getattr(args, name)}" for name in SIZES]
    env = {**os.environ, **host_memory.GIVE_BACK}
    run = lambda name: subprocess.run(
        [sys.executable, __file__, *sizes, "--peak", name], check=True, env=env, text=True,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    return {name: int(run(name).stdout.split()[-1]) for name in CONTESTANTS}


def dispatch():
    """Calls of a step with next to nothing to compute, as multiples of plain JAX's."""
    params, tx = {"w": jnp.ones((16, 16))}, optax.sgd(0.1)
    make = lambda: TrainState.create(apply_fn=None, params=params, tx=tx)
    loss = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
    batch = zerojax.shard_batch(np.ones((16, 16), np.float32))
    states = {
        "plain": zerojax.shard_train_state(make).replace(tx=tx),
        "zerojax": zerojax.shard_train_state(make),
    }
    steps = {"plain": annotated(states["plain"], loss), "zerojax": zerojax.train_step(loss)}
    for name, step in steps.items():
        states[name], _ = step(states[name], batch)
    times = interleaved(steps, states, batch, rounds=200)
    return statistics.median(times["zerojax"]) / statistics.median(times["plain"])


def interleaved(steps, states, batch, rounds):
    times = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            started = time.perf_counter()
            states[name], _ = jax.block_until_ready(step(states[name], batch))
            times[name].append(time.perf_counter() - started)
    return times


def main():
    args = parser.parse_args()
    if args.peak:
        return print(peak_memory(args))
    make_state, batch = setting(args)
    steps, states = {}, {}
    for name, contestant in CONTESTANTS.items():
        steps[name], state = contestant(make_state)
        states[name], metrics = steps[name](state, batch)
        print(f"{name:28} loss {metrics['loss']:.6f}")
    times = interleaved(steps, states, batch, args.rounds)
    base = statistics.median(times["plain, replicated"])
    ratios = {name: statistics.median(t) / base for name, t in times.items()}
    peaks, dispatched = peak_memories(args), dispatch()
    for name, ratio in ratios.items():
        print(f"{name:28}{ratio:6.2f}{peaks[name]:8} MiB")
    print(f"calling a step: {dispatched:.2f} of plain jit")
    if args.json:
        devices = jax.devices()
        record = {
            "device": f"{len(devices)} x {devices[0].device_kind}",
            "jax": jax.__version__,
            "date": datetime.date.today().isoformat(),
            "model": {k: getattr(args, k) for k in SIZES},
            "rounds": args.rounds,
            "median step time, of plain replicated": {k: round(v, 3) for k, v in ratios.items()},
            "peak host memory, MiB": peaks,
            "calling a step, of plain jit": round(dispatched, 2),
        }
        args.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
