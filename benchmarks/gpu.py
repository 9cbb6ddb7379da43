"""Measures one real GPU against a loop written with only optax, and with state in host memory.

    python benchmarks/gpu.py                                 # prints a table, in under 10 minutes
    python benchmarks/gpu.py --json benchmarks/gpu_h200.json # stores it too
    python benchmarks/gpu.py --host --json benchmarks/gpu_h200.json # adds host memory, under 9

Each case runs in a process of its own, so that it has a peak memory of its own. The two programs
alternate in it. Without a GPU, the benchmark says so and exits with 0.
"""

import argparse
import datetime
import functools
import gc
import importlib.util
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
import results
from flax.training.train_state import TrainState
from jax.sharding import SingleDeviceSharding

import zerojax
from zerojax.tools._forecast import presets as _presets
from zerojax.tools._hlo import gpus as _gpus

HERE = pathlib.Path(__file__).parent
GIB = 2**30
ROUNDS, STEPS = 8, 3  # STEPS of one program, then of the other, ROUNDS times
TINY = _presets.Gpt(2, 64, 4, vocab=256, tokens=32)  # runs the cases without a GPU
MODELS = {
    "tiny": (TINY, 2),
    "124m": (_presets.preset("124m"), 32),
    "1.5b": (_presets.preset("1.5b"), 8),
}
CASES = ("tests", "124m", "1.5b", "search", "largest")
SECONDS = {"tests": 180, "124m": 90, "1.5b": 110, "search": 90, "largest": 75}  # under 10 minutes
BOTH = ("opt_state", "params")
ON_HOST = {  # the parts of the 1.5B in host memory: `offload=`, `activations=`
    "host: nothing": (None, None),
    "host: opt_state": ("opt_state", None),
    "host: opt_state, params": (BOTH, None),
    "host: all three": (BOTH, "host"),
}
HOST_CASES = ("copies", *ON_HOST)
SECONDS |= dict.fromkeys(HOST_CASES, 150)  # under 9 minutes


# ---- the two programs


def make_params(model):
    """Makes random weights, not zeros: a GPU clocks higher when it multiplies zeros."""
    shapes, treedef = jax.tree.flatten(model.shapes())
    keys = jax.random.split(jax.random.key(0), len(shapes))
    leaves = [0.02 * jax.random.normal(k, s.shape) for k, s in zip(keys, shapes, strict=True)]
    return treedef.unflatten(leaves)


def ours(model, offload=None, activations=None):
    def make_state():
        return TrainState.create(apply_fn=None, params=make_params(model), tx=optax.adamw(1e-4))

    state = zerojax.shard_train_state(make_state, stage=3, offload=offload)
    return zerojax.train_step(model.losses(("full",))["full"], activations=activations), state


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


# ---- the measurements


def random_batch(model, rows):
    tokens = np.random.default_rng(0).integers(0, model.vocab, (rows, model.tokens))
    return jnp.asarray(tokens.astype(np.int32))


def stats(what):
    return (jax.devices()[0].memory_stats() or {}).get(what, 0)


class Running:
    """A program with its state, and the seconds per step of each `turn`."""

    def __init__(self, program, model, batch):
        self.batch, self.seconds = batch, []
        self.step, self.state = program(model)

    def turn(self):
        started = time.perf_counter()
        for _ in range(STEPS):
            self.state, metrics = self.step(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        self.seconds.append((time.perf_counter() - started) / STEPS)


def measure(model, rows, alone=False):
    """Measures the step time of a model against the forecast and against a loop by hand.

    With `alone`, its state leaves no room for another, so the loop by hand comes afterwards.
    """
    batch = random_batch(model, rows)
    mine = Running(ours, model, batch)
    report = zerojax.audit(mine.step, mine.state, batch)
    flops = zerojax.tools.step_flops(mine.step, mine.state, batch)
    mine.turn()  # compiles
    peak = stats("peak_bytes_in_use")
    if alone:
        take_turns(mine)
        mine.state = None
    hand = Running(by_hand, model, batch)
    hand.turn()
    take_turns(*([hand] if alone else [mine, hand]))
    pairs = list(zip(mine.seconds[1:], hand.seconds[1:], strict=True))
    seconds, limit = statistics.median(a for a, _ in pairs), zerojax.tools.peak_flops()
    return {
        "params": model.n_params,
        "rows": rows,
        "step_ms": round(1e3 * seconds, 2),
        "by_hand_ms": round(1e3 * statistics.median(b for _, b in pairs), 2),
        "to_by_hand": round(statistics.median(a / b for a, b in pairs), 4),
        "tokens_per_s": round(rows * model.tokens / seconds),
        "mfu": round(flops / seconds / limit, 3) if limit else None,
        "modelled_ms": round(1e3 * report.step_seconds, 2) if report.step_seconds else None,
        "peak_gib": round(peak / GIB, 3),
        "forecast_peak_gib": round(report.memory.peak / GIB, 3),
    }


def measure_on_host(model, rows, offload, activations):
    """Measures a model with a part in host memory against the forecast."""
    batch = random_batch(model, rows)
    mine = Running(functools.partial(ours, offload=offload, activations=activations), model, batch)
    report = zerojax.audit(mine.step, mine.state, batch)
    mine.turn()  # compiles
    take_turns(mine)
    seconds = statistics.median(mine.seconds[1:])
    return {
        "params": model.n_params,
        "rows": rows,
        "step_ms": round(1e3 * seconds, 2),
        "modelled_ms": round(1e3 * report.step_seconds, 2) if report.step_seconds else None,
        "tokens_per_s": round(rows * model.tokens / seconds),
        "peak_gib": round(stats("peak_bytes_in_use") / GIB, 3),
        "forecast_peak_gib": round(report.memory.peak / GIB, 3),
        "host_gib": round((report.memory.on_host + report.memory.host_kept) / GIB, 3),
    }


def copies(nbytes):
    """Measures the link between GPU and host memory in GB/s: each way, and both at once."""
    device = jax.devices()[0]
    there = SingleDeviceSharding(device, memory_kind="pinned_host")
    here = SingleDeviceSharding(device, memory_kind="device")
    value = jax.device_put(jnp.zeros(nbytes, jnp.uint8), here)
    kept = jax.device_put(value, there)

    def rate(*copies):
        seconds = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            jax.block_until_ready([jax.device_put(x, to) for x, to in copies])
            seconds.append(time.perf_counter() - started)
        return round(nbytes / statistics.median(seconds) / 1e9, 1)

    gpu = _gpus.of_device_kind(device.device_kind)
    return {
        "to_device": rate((kept, here)),
        "to_host": rate((value, there)),
        "both_at_once": rate((kept, here), (value, there)),
        "modelled": round(gpu.rates.to_host(1) / 1e9, 1) if gpu else None,
    }


def take_turns(*programs):
    for _ in range(ROUNDS):
        for program in programs:
            program.turn()


def with_layers(layers):
    return _presets.Gpt(layers, 4096, 32)  # 0.2e9 parameters a layer


def forecast_peak(layers):
    """Only compiles, and allocates nothing."""
    model = with_layers(layers)
    plan = zerojax.plan(model.make_state, stage=3)
    step = zerojax.train_step(model.losses(("full",))["full"])
    return zerojax.audit(step, plan.abstract(), model.batch(1), plan=plan).memory.peak


def trains(layers):
    try:
        model = with_layers(layers)
        Running(ours, model, random_batch(model, 1)).turn()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return False
    finally:
        gc.collect()
    return True


def search():
    """Finds how many layers of 4096 train, starting from the forecast's answer."""
    small, limit = forecast_peak(4), stats("bytes_limit")
    each = (forecast_peak(8) - small) / 4
    layers = expected = 4 + int((limit - small) / each)
    if trains(layers):
        while trains(layers + 1):
            layers += 1
    else:
        layers -= 1
        while layers and not trains(layers):
            layers -= 1
    return {"layers": layers, "expected_layers": expected, "limit_gib": round(limit / GIB, 2)}


def tests():
    """Runs the tests that need one real GPU."""
    if importlib.util.find_spec("pytest") is None:
        return {"skipped": "pytest is not installed"}
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/test_gpu.py"]
    env = {**os.environ, "ZEROJAX_TEST_PLATFORM": "cuda"}
    # It ends before this process is killed: left behind, it would keep the GPU's memory.
    limit = SECONDS["tests"] - 10
    done = subprocess.run(
        command,
        env=env,
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=limit,
    )
    return {"passed": done.returncode == 0, "said": (done.stdout + done.stderr)[-1500:]}


# ---- all cases


def run_case(name, layers=0):
    """Returns the figures of a case from a process of its own, or its error."""
    command = [sys.executable, __file__, "--case", name, "--layers", str(layers)]
    limit = SECONDS[name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"took longer than {limit} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"failed": (done.stderr or done.stdout)[-1500:]}
    return json.loads(lines[-1])


def case(name, layers):
    """Returns the output of the process of a case."""
    if name == "tests":
        return tests()
    if name == "search":
        return search()
    if name == "copies":
        return copies(GIB if jax.default_backend() == "gpu" else 2**20)
    if name in ON_HOST:
        model = MODELS["1.5b" if jax.default_backend() == "gpu" else "tiny"]
        return measure_on_host(*model, *ON_HOST[name])
    if name == "largest":
        return measure(with_layers(layers) if layers else TINY, 1, alone=True)
    return measure(*MODELS[name])


def has_gpu():
    """Asks in a process of its own, because the question takes the GPU's memory."""
    ask = "import jax; d = jax.devices()[0]; print(d.platform, d.device_kind, sep='|')"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    platform, _, kind = done.stdout.strip().partition("|")
    return kind if platform in ("gpu", "cuda") else None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=results.file)
    parser.add_argument(
        "--case", choices=(*CASES, *HOST_CASES, "tiny"), help="only this case, in this process"
    )
    parser.add_argument("--host", action="store_true", help="only the cases of host memory")
    parser.add_argument("--layers", type=int, default=0, help="of the largest (0: a tiny one)")
    args = parser.parse_args()
    if args.case:
        print(json.dumps(case(args.case, args.layers)))
        return
    device = has_gpu()
    if device is None:
        print("No GPU here, so nothing to measure. With one: pip install '.[gpu]', and again.")
        return
    started = time.perf_counter()
    record = {
        "device": device,
        "jax": jax.__version__,
        "jaxlib": jax.lib.__version__,
        "date": str(datetime.date.today()),
        "cases": {},
    }
    if args.host and args.json and args.json.exists():
        record["cases"] = json.loads(args.json.read_text())["cases"]
    print(f"{device}, JAX {record['jax']}")
    for name in HOST_CASES if args.host else CASES:
        layers = record["cases"].get("search", {}).get("layers", 0)
        if name == "largest" and not layers:
            continue  # the search says why
        record["cases"][name] = run_case(name, layers)
        print(f"\n{name} (at {time.perf_counter() - started:.0f} s)")
        for what, value in record["cases"][name].items():
            print(f"  {what:20}{value}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
