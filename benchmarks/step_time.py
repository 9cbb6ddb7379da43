"""Step time of every stage against plain JAX, as ratios from interleaved runs in one process.

Also measures the peak host memory of all emulated devices together, in one process for each
program, and the cost of calling a step that computes next to nothing.

    python benchmarks/step_time.py                       # prints a table
    python benchmarks/step_time.py --json out.json       # stores it too
    python benchmarks/step_time.py --packages            # beside the rivals of rivals_packages.py

The models are small versions of those that `compiled.py` compiles for GPUs, with the same rivals.
On emulated CPU devices the ratios measure the cost of the program. They say nothing about GPUs,
where collectives overlap with compute.
"""

import argparse
import datetime
import functools
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
from flax.training.train_state import TrainState

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import host_memory
import results
import rivals
import rivals_by_hand
import rivals_flax

import zerojax
from zerojax.tools._forecast import presets as _presets

# XLA for CPUs emulates bf16, and more slowly in a `shard_map` than outside of one.
SIZE = {"vocab": 256, "tokens": 64, "compute": jnp.float32}
MODELS = {
    "GPT": _presets.Gpt(6, 256, 4, **SIZE),
    "Llama": _presets.Llama(6, 256, 4, **SIZE, kv_heads=2, inner=688),
}
ROWS = 16  # of a batch
STEPS = {**rivals.STEPS, **rivals_by_hand.STEPS, **rivals_flax.STEPS}
REPLICATED = "replicated"
RIVALS = [
    REPLICATED, "annotations, blocks", "largest dimension, blocks", "flax linen, blocks",
    "flax nnx, blocks", "by hand",
]  # fmt: skip


def take_packages():
    """Takes packages, which need an environment of their own, and the model that all have."""
    import rivals_packages

    STEPS.update(rivals_packages.STEPS)
    RIVALS[2:] = rivals_packages.STEPS
    del MODELS["Llama"]


def rival(name, model):
    """Returns a step, and a state with arbitrary values."""
    step, places = STEPS[name](model, zerojax.plan(model.make_state).mesh, "full", 1)
    fill = lambda x: jnp.full(x.shape, 0.01 if jnp.issubdtype(x.dtype, jnp.floating) else 0)
    return step, jax.tree.map(lambda x: jax.device_put(fill(x).astype(x.dtype), x.sharding), places)


def ours(stage, model):
    return zerojax.train_step(model.loss), zerojax.shard_train_state(model.make_state, stage)


def contestants(name):
    """Returns, by contestant, a function that makes its step and state of the model."""
    of_flax = {r for r in RIVALS if r.startswith("flax")} if name != "GPT" else set()
    made = {r: functools.partial(rival, r) for r in RIVALS if r not in of_flax}
    return made | {f"zerojax stage {stage}": functools.partial(ours, stage) for stage in range(4)}


def batch_of(model):
    text = np.random.default_rng(0).integers(0, model.vocab, (ROWS, model.tokens))
    return zerojax.shard_batch(text.astype(np.int32))


def peak_memory(name, contestant):
    """Returns the MiB of the state, and those that three steps need in addition."""
    model = MODELS[name]
    step, state = contestants(name)[contestant](model)
    batch = batch_of(model)
    shards = (s for x in jax.tree.leaves(state) for s in x.addressable_shards)
    held = sum(shard.data.nbytes for shard in shards)
    compiled = step.lower(state, batch).compile()

    def steps():
        nonlocal state
        for _ in range(3):
            state, _ = jax.block_until_ready(compiled(state, batch))

    return round(held / 2**20) + host_memory.measured(steps)[1]["peak_mib"]


def peak_memories(name, flags):
    env = {**os.environ, **host_memory.GIVE_BACK}
    run = lambda contestant: subprocess.run(
        [sys.executable, __file__, *flags, "--peak", name, contestant], check=True, env=env,
        text=True, stdout=subprocess.PIPE,
    )  # fmt: skip
    return {contestant: int(run(contestant).stdout.split()[-1]) for contestant in contestants(name)}


def step_times(name, rounds):
    """Returns quartiles of each step's time over that of the replicated one in the same round."""
    model, steps, states = MODELS[name], {}, {}
    batch = batch_of(model)
    for contestant, make in contestants(name).items():
        steps[contestant], state = make(model)
        states[contestant], _ = steps[contestant](state, batch)
    times = interleaved(steps, states, batch, rounds)
    ratios = lambda t: [a / b for a, b in zip(t, times[REPLICATED], strict=True)]
    return {c: statistics.quantiles(ratios(t), method="inclusive") for c, t in times.items()}


def dispatch():
    """Times calls of a step that computes next to nothing, as a multiple of plain JAX's."""
    params, tx = {"w": jnp.ones((16, 16))}, optax.sgd(0.1)
    make = lambda: TrainState.create(apply_fn=None, params=params, tx=tx)
    loss_fn = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)

    @functools.partial(jax.jit, donate_argnums=0)
    def plain(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}  # as zerojax's steps do
        return state.apply_gradients(grads=grads), metrics

    batch = zerojax.shard_batch(np.ones((16, 16), np.float32))
    states = {
        "plain": zerojax.shard_train_state(make).replace(tx=tx),
        "zerojax": zerojax.shard_train_state(make),
    }
    steps = {"plain": plain, "zerojax": zerojax.train_step(loss_fn)}
    for name, step in steps.items():
        states[name], _ = step(states[name], batch)
    times = interleaved(steps, states, batch, rounds=200)
    return statistics.median(times["zerojax"]) / statistics.median(times["plain"])


def interleaved(steps, states, batch, rounds):
    """Returns seconds by round; each round starts with another contestant."""
    times, names = {name: [] for name in steps}, list(steps)
    for turn in range(rounds):
        at = turn % len(names)
        for name in (*names[at:], *names[:at]):
            started = time.perf_counter()
            states[name], _ = jax.block_until_ready(steps[name](states[name], batch))
            times[name].append(time.perf_counter() - started)
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=22, help="2 or more")
    parser.add_argument("--json", type=results.file)
    parser.add_argument("--packages", action="store_true", help="beside rivals_packages.py")
    parser.add_argument(
        "--peak", nargs=2, metavar=("MODEL", "CONTESTANT"), help="peak memory, in this process"
    )
    args = parser.parse_args()
    if args.packages:
        take_packages()
    if args.peak:
        model, contestant = args.peak
        if model not in MODELS or contestant not in contestants(model):
            parser.error(f"--peak takes one of {list(MODELS)} and of {list(contestants('GPT'))}")
        return print(peak_memory(model, contestant))
    if args.rounds < 2:
        parser.error("--rounds: quartiles need 2 or more")
    rows = []
    for name in MODELS:
        peaks = peak_memories(name, ["--packages"] * args.packages)
        for contestant, times in step_times(name, args.rounds).items():
            low, median, high = (round(ratio, 3) for ratio in times)
            row = {"model": name, "step": contestant, "time": median, "quartiles": [low, high]}
            rows.append({**row, "peak_mib": peaks[contestant]})
            spread = f"{median:6.2f} ({low:.2f}-{high:.2f})"
            print(f"{name:8}{contestant:28}{spread}{peaks[contestant]:8} MiB", flush=True)
    dispatched = dispatch()
    print(f"calling a step: {dispatched:.2f} of plain jit")
    if args.json:
        devices = jax.devices()
        record = {
            "device": f"{len(devices)} x {devices[0].device_kind}",
            "jax": jax.__version__,
            "date": datetime.date.today().isoformat(),
            "rounds": args.rounds,
            "rows": rows,
            "calling a step, of plain jit": round(dispatched, 2),
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
