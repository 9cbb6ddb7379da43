"""What calling a step costs, until the call returns, against what JAX and Flax need themselves.

    python benchmarks/calls.py                                 # on 8 emulated devices and on one
    python benchmarks/calls.py --json benchmarks/calls_cpu.json

The arrays are tiny, and each call starts when the devices are idle. Times are CPU times of the
thread that calls, so that other programs on the machine change them little. The threads of the
devices compute, except that one device's thread may be the caller's. Contestants take turns in one
process, and ratios are those of medians. For a plain state, the reference is `jax.jit` of the step:
the same program on the same trees and shardings. For a nnx model it is `nnx.cached_partial` of a
loop by hand on the same sharded model.
"""

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import time

import jax

if "--devices" in sys.argv:
    jax.config.update("jax_num_cpu_devices", int(sys.argv[sys.argv.index("--devices") + 1]))

import jax.numpy as jnp
import numpy as np
import optax
import results
from flax import nnx
from flax.training.train_state import TrainState

import zerojax
import zerojax.nnx

WIDTH = 8
BATCH = np.ones((WIDTH, WIDTH), np.float32)


# -- plain states: a step, and `jax.jit` of the same step


def plain(count, tx):
    """Returns calls, by contestant, of a state with `count` weights."""
    params = {f"w{i:03}": jnp.full((WIDTH, WIDTH), 0.1) for i in range(count)}

    def loss_fn(params, batch):
        return jnp.mean((batch @ sum(params.values())) ** 2)

    def caller(jit):
        state = TrainState.create(apply_fn=None, params=params, tx=tx)
        state, step = zerojax.shard_train_state(state, stage=3), zerojax.train_step(loss_fn)
        step = jax.jit(step, donate_argnums=0) if jit else step
        batch = zerojax.shard_batch(BATCH)

        def call():
            nonlocal state
            state, metrics = step(state, batch)
            return lambda: (state, metrics)

        return call

    return {"jax.jit": caller(True), "zerojax": caller(False)}


# -- nnx: a step, and loops by hand


class Linears(nnx.Module):
    def __init__(self, count, rngs):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(count)])

    def __call__(self, x):
        # The layers side by side, because a chain would be compute.
        kernel = sum(layer.kernel[...] for layer in self.layers)
        return x @ kernel + sum(layer.bias[...] for layer in self.layers)


def by_hand(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(mean_square)(model, batch)
    metrics = {"loss": loss, "grad_norm": optax.tree.norm(nnx.as_pure(grads))}  # as zerojax's do
    optimizer.update(model, grads)
    return metrics


def mean_square(model, batch):
    return jnp.mean(model(batch) ** 2)


def of_nnx(count, tx):
    """Returns calls, by contestant, of a nnx model with `count` layers."""

    def caller(who):
        model = Linears(count, nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        zerojax.nnx.shard(model, optimizer, stage=3)
        batch = zerojax.shard_batch(BATCH)
        if who == "jax.jit":
            step, state, *others = zerojax.nnx.train_step(mean_square).pure(model, optimizer, batch)
            step = jax.jit(step, donate_argnums=0)

            def call():
                nonlocal state
                state, metrics = step(state, *others)
                return lambda: (state, metrics)

            return call
        step, objects = nnx.jit(by_hand, donate_argnums=(0, 1)), (model, optimizer)
        if who == "zerojax":
            step = zerojax.nnx.train_step(mean_square)
        elif who == "nnx.cached_partial":
            step, objects = nnx.cached_partial(step, *objects), ()

        def call():
            metrics = step(*objects, batch)
            return lambda: (nnx.state((model, optimizer)), metrics)

        return call

    names = ("nnx.cached_partial", "nnx.jit", "jax.jit", "zerojax")
    return {name: caller(name) for name in names}


ADAM = optax.adam(1e-3)
ROWS = {
    "300 leaves: 100 weights with Adam": (plain, 100),
    "900 leaves: 300 weights with Adam": (plain, 300),
    "nnx: 100 linears with Adam": (of_nnx, 100),
}


def measured(name, rounds):
    """Returns the median milliseconds of a call, by contestant; the first is the reference."""
    make, count = ROWS[name]
    calls = make(count, ADAM)
    times, names = {who: [] for who in calls}, list(calls)
    for turn in range(rounds + 3):
        at = turn % len(names)
        for who in (*names[at:], *names[:at]):
            started = time.thread_time()
            results_of = calls[who]()
            took = time.thread_time() - started
            jax.block_until_ready(results_of())
            if turn > 2:  # the first ones compile
                times[who].append(took)
    return {who: statistics.median(took) * 1e3 for who, took in times.items()}


def rows_of(devices, rounds, only):
    rows = []
    for name in ROWS:
        if only and only not in name:
            continue
        medians = measured(name, rounds)
        reference = next(iter(medians.values()))
        for who, median in medians.items():
            rows.append({"devices": devices, "state": name, "call": who, "ms": round(median, 2)})
            rows[-1]["ratio"] = round(median / reference, 2)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=results.file)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", help="part of a row's name", default="")
    parser.add_argument("--devices", type=int, help="only these, in this process")
    args = parser.parse_args()
    if args.devices:
        return print(json.dumps(rows_of(args.devices, args.rounds, args.only)))
    rows = []
    for devices in (8, 1):
        command = [sys.executable, __file__, "--devices", str(devices), "--only", args.only]
        command += ["--rounds", str(args.rounds)]
        run = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE)
        for row in json.loads(run.stdout.splitlines()[-1]):
            rows.append(row)
            print(
                f"{devices} devices  {row['state']:36}{row['call']:20}{row['ms']:8.2f} ms"
                f"{row['ratio']:7.2f}",
                flush=True,
            )
    if args.json:
        record = {
            "jax": jax.__version__,
            "date": datetime.date.today().isoformat(),
            "rounds": args.rounds,
            "rows": rows,
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
