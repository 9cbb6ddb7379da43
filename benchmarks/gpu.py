"""What one real GPU makes of it, beside a loop written with optax alone. Takes under 8 minutes.

    python benchmarks/gpu.py                                 # prints a table
    python benchmarks/gpu.py --json benchmarks/gpu_h200.json # and keeps it

Each case has a process of its own, so that its peak of memory is its own. Within one, the two
programs take turns. Where there is no GPU it says so and ends well.
"""

import argparse
import datetime
import gc
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import zerojax
from zerojax import _presets

HERE = pathlib.Path(__file__).parent
GIB = 2**30
ROUNDS, STEPS = 8, 3  # turns each program takes, and steps a turn
TINY = _presets.Gpt(2, 64, 4, vocab=256, tokens=32)  # to see the cases run where there is no GPU
MODELS = {
    "tiny": (TINY, 2),
    "124m": (_presets.GPTS["124m"], 32),
    "1.5b": (_presets.GPTS["1.5b"], 8),
}
CASES = ("tests", "124m", "1.5b", "largest")
SECONDS = {"tests": 100, "124m": 90, "1.5b": 110, "largest": 170}  # at most; under 8 minutes in all


# ---- the two programs


def make_params(model):
    """Random ones, not zeros: a GPU clocks higher when it multiplies zeros."""
    shapes, treedef = jax.tree.flatten(model.shapes())
    keys = jax.random.split(jax.random.key(0), len(shapes))
    leaves = [0.02 * jax.random.normal(k, s.shape) for k, s in zip(keys, shapes, strict=True)]
    return treedef.unflatten(leaves)


def ours(model):
    def make_state():
        return TrainState.create(apply_fn=None, params=make_params(model), tx=optax.adamw(1e-4))

    state = zerojax.shard_train_state(make_state, stage=3)
    return zerojax.train_step(model.losses(("full",))["full"]), state


def by_hand(model):
    tx, loss_fn = optax.adamw(1e-4), model.losses(("full",))["full"]

    def step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    def make_state():
        params = make_params(model)
        return params, tx.init(params)

    return jax.jit(step, donate_argnums=0), jax.jit(make_state)()


# ---- what is measured


def random_batch(model, rows):
    tokens = np.random.default_rng(0).integers(0, model.vocab, (rows, model.tokens))
    return jnp.asarray(tokens.astype(np.int32))


def stats(what):
    return (jax.devices()[0].memory_stats() or {}).get(what, 0)


def seconds_of(step, state, batch):
    """Of one step, over a turn; and the state after it."""
    started = time.perf_counter()
    for _ in range(STEPS):
        state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    return (time.perf_counter() - started) / STEPS, state


def measure(name):
    """Of a model: step time, what was forecast, and how it compares with a loop by hand."""
    model, rows = MODELS[name]
    batch = random_batch(model, rows)
    step, state = ours(model)
    report = zerojax.audit(step, state, batch)
    flops = zerojax.step_flops(step, state, batch)
    _, state = seconds_of(step, state, batch)
    peak = stats("peak_bytes_in_use")
    plain, plain_state = by_hand(model)
    _, plain_state = seconds_of(plain, plain_state, batch)
    mine, hand = [], []
    for _ in range(ROUNDS):
        spent, state = seconds_of(step, state, batch)
        mine.append(spent)
        spent, plain_state = seconds_of(plain, plain_state, batch)
        hand.append(spent)
    seconds, limit = statistics.median(mine), zerojax.peak_flops()
    return {
        "params": model.n_params,
        "rows": rows,
        "step_ms": round(1e3 * seconds, 2),
        "by_hand_ms": round(1e3 * statistics.median(hand), 2),
        "to_by_hand": round(statistics.median(a / b for a, b in zip(mine, hand, strict=True)), 4),
        "tokens_per_s": round(rows * model.tokens / seconds),
        "mfu": round(flops / seconds / limit, 3) if limit else None,
        "modelled_ms": round(1e3 * report.step_seconds, 2) if report.step_seconds else None,
        "peak_gib": round(peak / GIB, 3),
        "forecast_peak_gib": round(report.memory.peak / GIB, 3),
    }


def with_layers(layers):
    return _presets.Gpt(layers, 4096, 32)  # 0.2e9 parameters a layer


def forecast_peak(layers):
    """Compiled only: nothing is allocated."""
    model = with_layers(layers)
    plan = zerojax.plan(model.make_state, stage=3)
    step = zerojax.train_step(model.losses(("full",))["full"])
    return zerojax.audit(step, plan.abstract(), model.batch(1), plan=plan).memory.peak


def trains(layers):
    """Whether it does, and if so for how long a step takes."""
    model = with_layers(layers)
    try:
        step, state = ours(model)
        batch = random_batch(model, 1)
        _, state = seconds_of(step, state, batch)
        return seconds_of(step, state, batch)[0]
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None
    finally:
        gc.collect()


def largest():
    """Layers of 4096 are added until it trains no longer; the search begins where the forecast
    says that memory ends."""
    small, limit = forecast_peak(4), stats("bytes_limit")
    each = (forecast_peak(8) - small) / 4
    expected = 4 + int((limit - small) / each)
    layers, tried = expected, {}
    while layers and (tried.setdefault(layers, trains(layers))) is None:
        layers -= 1
    while layers + 1 not in tried and (tried.setdefault(layers + 1, trains(layers + 1))):
        layers += 1
    gib, model = lambda count: round(count / GIB, 2), with_layers(layers)
    return {
        "layers": layers,
        "params": model.n_params,
        "expected_layers": expected,
        "limit_gib": gib(limit),
        "forecast_peak_gib": gib(small + (layers - 4) * each),
        "peak_gib": gib(stats("peak_bytes_in_use")),
        "step_ms": round(1e3 * tried[layers], 1),
        "tokens_per_s": round(model.tokens / tried[layers]),
    }


def tests():
    """Those that need one real GPU."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/test_gpu.py"]
    env = {**os.environ, "ZEROJAX_TEST_PLATFORM": "cuda"}
    done = subprocess.run(
        command, env=env, cwd=HERE.parent, capture_output=True, text=True, check=False
    )
    return {"passed": done.returncode == 0, "said": (done.stdout + done.stderr)[-1500:]}


# ---- all of it


def run_case(name, seconds):
    """Its figures, from a process of its own; or what went wrong."""
    command = [sys.executable, __file__, "--case", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"took longer than {seconds} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"failed": (done.stderr or done.stdout)[-1500:]}
    return json.loads(lines[-1])


def versions():
    return {
        "jax": jax.__version__,
        "jaxlib": jax.lib.__version__,
        "date": str(datetime.date.today()),
    }


def has_gpu():
    """Asked in a process of its own: who asks holds the GPU's memory."""
    ask = "import jax; d = jax.devices()[0]; print(d.platform, d.device_kind, sep='|')"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    platform, _, kind = done.stdout.strip().partition("|")
    return kind if platform in ("gpu", "cuda") else None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--case", choices=(*CASES, "tiny"), help="this one only, in this process")
    args = parser.parse_args()
    if args.case:
        cases = {"tests": tests, "largest": largest}
        print(json.dumps(cases[args.case]() if args.case in cases else measure(args.case)))
        return
    device = has_gpu()
    if device is None:
        print("No GPU here, so nothing to measure. With one: pip install '.[gpu]', and again.")
        return
    started = time.perf_counter()
    record = {
        "device": device,
        "jax": jax.__version__,
        "date": str(datetime.date.today()),
        "cases": {},
    }
    print(f"{device}, JAX {record['jax']}")
    for name in CASES:
        record["cases"][name] = run_case(name, SECONDS[name])
        print(f"\n{name} (at {time.perf_counter() - started:.0f} s)")
        for what, value in record["cases"][name].items():
            print(f"  {what:20}{value}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
