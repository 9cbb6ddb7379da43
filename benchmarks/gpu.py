"""Measures real GPUs: one of them against a loop written with only optax, and all in each way.

    python benchmarks/gpu.py                # one GPU, in under 10 minutes; prints a table
    python benchmarks/gpu.py --ways --json  # all GPUs, in under 10 minutes: stages, loops, host
                                            # memory, codes, against annotations and the forecast
    python benchmarks/gpu.py --host --json  # one GPU with state in host memory, in under 9

`--json` stores the cases in `benchmarks/gpu_<GPUs>.json`, beside those that it has; another name
may follow. `python benchmarks/render.py` then shows them in docs/measured.md.

Each case runs in a process of its own, so that it has a peak memory of its own. The two programs
alternate in it. Without a GPU, the benchmark says so and exits with 0.
"""

import argparse
import dataclasses
import datetime
import functools
import gc
import importlib.util
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import looped
import numpy as np
import optax
import results
import rivals
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
NAMED_BY_GPUS = "gpu_<GPUs>.json"
ON_HOST = {  # the parts of the 1.5B in host memory: `offload=`, `activations=`
    "host: nothing": (None, None),
    "host: opt_state": ("opt_state", None),
    "host: opt_state, params": (BOTH, None),
    "host: all three": (BOTH, "host"),
}
HOST_CASES = ("copies", *ON_HOST)
SECONDS |= dict.fromkeys(HOST_CASES, 150)  # under 9 minutes
WAYS = {  # on all GPUs: options of a state, options of a step, and whether its layers are in a scan
    **{f"stage {stage}": ({"stage": stage}, {}, True) for stage in range(4)},
    "stage 3, a Python loop": ({}, {}, False),
    "stage 3, optimizer state on the host": ({"offload": "opt_state"}, {}, True),
    "stage 3, weights travel in int8": ({}, {"precision": zerojax.Precision(gather="int8")}, True),
}
SECONDS |= dict.fromkeys(WAYS, 80)  # under 10 minutes


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
    return zerojax.train_step(
        model.losses(("full",))["full"], schedule=zerojax.Schedule(activations=activations)
    ), state


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


def sixteen_bits():
    """Returns what a GPU computes in: those before the A100's generation have no bfloat16."""
    gpu = _gpus.of_device_kind(jax.devices()[0].device_kind)
    return gpu.half if gpu else "bfloat16"


def measure_way(model, rows, of_state, of_step, is_scan):
    """Measures a way to train on all GPUs against annotations and against its forecast."""
    model = dataclasses.replace(model, compute=sixteen_bits())
    if not is_scan:
        model = looped.Looped(**vars(model))
    batch = zerojax.shard_batch(random_batch(model, rows * jax.device_count()))

    def way(model):
        def make_state():
            return TrainState.create(apply_fn=None, params=make_params(model), tx=optax.adamw(1e-4))

        step = zerojax.train_step(model.losses(("full",))["full"], **of_step)
        return step, zerojax.shard_train_state(make_state, **of_state)

    mine = Running(way, model, batch)
    report = zerojax.audit(mine.step, mine.state, batch)
    mine.turn()  # compiles
    peak = stats("peak_bytes_in_use")
    theirs = Running(annotated, model, batch)
    theirs.turn()
    take_turns(mine, theirs)
    pairs = list(zip(mine.seconds[1:], theirs.seconds[1:], strict=True))
    seconds = statistics.median(a for a, _ in pairs)
    return {
        "params": model.n_params,
        "rows": rows,
        "step_ms": round(1e3 * seconds, 2),
        "to_annotations": round(statistics.median(a / b for a, b in pairs), 4),
        "tokens_per_s": round(len(batch) * model.tokens / seconds),
        "modelled_ms": round(1e3 * report.step_seconds, 2) if report.step_seconds else None,
        "peak_gib": round(peak / GIB, 3),
        "forecast_peak_gib": round(report.memory.peak / GIB, 3),
    }


def annotated(model):
    """Returns FSDP by annotations of parameters and activations, with random weights."""
    step, state = rivals.STEPS["annotations, blocks"](model, zerojax.mesh(data=-1), "full", 1)

    def make_state():
        return TrainState.create(apply_fn=None, params=make_params(model), tx=state.tx)

    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    rests = jax.jit(make_state, out_shardings=places)()
    return (lambda state, batch: step(state, batch)), rests


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
    if name in WAYS:
        model = MODELS["124m" if jax.default_backend() == "gpu" else "tiny"]
        return measure_way(model[0], 8 if model[0] is not TINY else 1, *WAYS[name])
    if name == "largest":
        return measure(with_layers(layers) if layers else TINY, 1, alone=True)
    return measure(*MODELS[name])


def gpus_here():
    """Returns their number and kind, from a process of its own: the question takes their memory."""
    ask = "import jax; d = jax.devices(); print(d[0].platform, len(d), d[0].device_kind, sep='|')"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    platform, *found = done.stdout.strip().split("|")
    return found if platform in ("gpu", "cuda") else None


def driver():
    path = pathlib.Path("/proc/driver/nvidia/version")
    found = re.search(r"Module +([\d.]+)", path.read_text()) if path.exists() else None
    return found[1] if found else "unknown"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=results.file, nargs="?", const=HERE / NAMED_BY_GPUS)
    parser.add_argument(
        "--case",
        choices=(*CASES, *HOST_CASES, *WAYS, "tiny"),
        help="only this case, in this process",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--host", action="store_true", help="one GPU with state in host memory")
    which.add_argument("--ways", action="store_true", help="all GPUs, in each way")
    parser.add_argument("--layers", type=int, default=0, help="of the largest (0: a tiny one)")
    args = parser.parse_args()
    if args.case:
        print(json.dumps(case(args.case, args.layers)))
        return
    found = gpus_here()
    if found is None:
        print("No GPU here, so nothing to measure. With one: pip install '.[gpu]', and again.")
        return
    count, device = found
    started = time.perf_counter()
    record = {
        "device": f"{count} x {device}" if count != "1" else device,
        "driver": driver(),
        "jax": jax.__version__,
        "jaxlib": jax.lib.__version__,
        "date": str(datetime.date.today()),
        "cases": {},
    }
    if args.json and args.json.name == NAMED_BY_GPUS:
        short = re.sub(r"\W+", "_", record["device"].lower().replace("nvidia ", ""))
        args.json = HERE / f"gpu_{short}.json"
    if args.json and args.json.exists():
        record["cases"] = json.loads(args.json.read_text())["cases"]
    print(f"{record['device']}, driver {record['driver']}, JAX {record['jax']}")
    for name in HOST_CASES if args.host else WAYS if args.ways else CASES:
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
