"""Measures real GPUs: one of them against a loop written with only optax, and all in each way.

    python benchmarks/gpu.py                # one GPU, in under 10 minutes; prints a table
    python benchmarks/gpu.py --ways --json  # all GPUs, in under 10 minutes: stages, loops, host
                                            # memory, codes, against annotations and the forecast
    python benchmarks/gpu.py --host --json  # one GPU with state in host memory, in under 9
    python benchmarks/gpu.py --more --json  # one GPU: updates in backward, 13B in 7 bytes a
                                            # parameter, QLoRA of 8B, replayed steps, in under 10
    python benchmarks/gpu.py --ways --rehearse  # likewise each: tiny models, on CPUs

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

import gpu_programs as programs
import jax
import jax.numpy as jnp
import looped
import numpy as np
import results
from jax.sharding import SingleDeviceSharding

import zerojax
from zerojax.tools._forecast import presets as _presets
from zerojax.tools._hlo import gpus as _gpus

HERE = pathlib.Path(__file__).parent
GIB = 2**30
ROUNDS, STEPS = 8, 3  # STEPS of one program, then of the other, ROUNDS times
TINY = _presets.Gpt(2, 64, 4, vocab=256, tokens=32)  # runs the cases without a GPU
TINY_LLAMA = _presets.Llama(2, 64, 4, vocab=256, tokens=32, kv_heads=2, inner=128)
MODELS = {
    "tiny": (TINY, 2),  # its kernels are shorter than their launches
    "124m": (_presets.preset("124m"), 32),
    "1.5b": (_presets.preset("1.5b"), 8),
    "13b": (_presets.preset("13b"), 4),
    "llama-8b": (_presets.preset("llama-8b"), 4),
}
CASES = ("tests", "tiny", "124m", "1.5b", "search", "largest")
SECONDS = dict(zip(CASES, (175, 40, 90, 110, 90, 75), strict=True))  # under 10 minutes
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
MORE = ("update in backward", "7 bytes a parameter", "QLoRA", "each step replayed")
SECONDS |= dict.fromkeys(MORE, 145)  # under 10 minutes
CODES = zerojax.Precision(param="bfloat16", master="split", moments="int8")
SEVEN_BYTES = {"precision": CODES}
WAYS = {  # on all GPUs: options of a state, options of a step, and whether its layers are in a scan
    **{f"stage {stage}": ({"stage": stage}, {}, True) for stage in range(4)},
    "stage 3, a Python loop": ({}, {}, False),
    "stage 3, optimizer state on the host": ({"offload": "opt_state"}, {}, True),
    "stage 3, weights travel in int8": ({}, {"precision": zerojax.Precision(gather="int8")}, True),
}
SECONDS |= dict.fromkeys(WAYS, 80)  # under 10 minutes


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
    mine = Running(programs.ours, model, batch)
    report = zerojax.audit(mine.step, mine.state, batch)
    flops = zerojax.tools.step_flops(mine.step, mine.state, batch)
    mine.turn()  # compiles
    peak = stats("peak_bytes_in_use")
    if alone:
        take_turns(mine)
        mine.state = None
    hand = Running(programs.by_hand, model, batch)
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
    if not is_scan:
        model = looped.Looped(**vars(model))
    batch = zerojax.shard_batch(random_batch(model, rows * jax.device_count()))

    mine = Running(
        functools.partial(programs.ours, of_state=of_state, of_step=of_step), model, batch
    )
    report = zerojax.audit(mine.step, mine.state, batch)
    mine.turn()  # compiles
    peak = stats("peak_bytes_in_use")
    theirs = Running(programs.annotated, model, batch)
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


def measure_forecast(model, rows, program, plain=None):
    """Measures a program of ours against its forecast and, where memory has room, a plain one."""
    batch = random_batch(model, rows)
    mine = Running(program, model, batch)
    born = stats("peak_bytes_in_use")
    report = zerojax.audit(mine.step, mine.state, batch)
    mine.turn()  # compiles
    peak = stats("peak_bytes_in_use")
    # QLoRA's weights in float32, before their codes, take more than its step.
    peak = None if peak == born and on_gpus() else round(peak / GIB, 3)
    others = [Running(plain, model, batch)] if plain else []
    for other in others:
        other.turn()
    take_turns(mine, *others)
    seconds = statistics.median(mine.seconds[1:])
    ratios = [a / b for other in others for a, b in zip(mine.seconds, other.seconds, strict=True)]
    to_plain = {"to_plain": round(statistics.median(ratios[1:]), 4)} if plain else {}
    return to_plain | {
        "params": model.n_params,
        "rows": rows,
        "step_ms": round(1e3 * seconds, 2),
        "modelled_ms": round(1e3 * report.step_seconds, 2) if report.step_seconds else None,
        "tokens_per_s": round(rows * model.tokens / seconds),
        "peak_gib": peak,
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


def on_gpus():
    return jax.default_backend() == "gpu"


def with_layers(layers):
    if not on_gpus():
        return dataclasses.replace(TINY, layers=layers)
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
        Running(programs.ours, model, random_batch(model, 1)).turn()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return False
    finally:
        gc.collect()
    return on_gpus() or layers < 6  # a rehearsal runs out of memory too


def search():
    """Finds how many layers of 4096 train, starting from the forecast's answer."""
    small, limit = forecast_peak(4), stats("bytes_limit") or forecast_peak(5)
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
    env = {"ZEROJAX_TEST_PLATFORM": os.environ.get("JAX_PLATFORMS") or "cuda"}
    # It ends before this process is killed: left behind, it would keep the GPU's memory.
    limit = SECONDS["tests"] - 10
    done = subprocess.run(
        command,
        env=os.environ | env,
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=limit,
    )
    return {"passed": done.returncode == 0, "said": (done.stdout + done.stderr)[-1500:]}


# ---- all cases


def run_case(name, layers, env):
    """Returns the figures of a case from a process of its own, or its error."""
    command = [sys.executable, __file__, "--case", name, "--layers", str(layers)]
    limit = SECONDS[name] * (4 if env else 1)  # machines that rehearse do other things besides
    env = os.environ | env
    # 13B need more than the three quarters that JAX takes.
    env |= {"XLA_CLIENT_MEM_FRACTION": "0.92"} if name in MORE else {}
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=limit, check=False
        )
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
        return copies(GIB if on_gpus() else 2**20)
    if name in ON_HOST:
        offload, activations = ON_HOST[name]
        return measure_forecast(*sized("1.5b"), ours({"offload": offload}, activations=activations))
    if name in MORE:
        return more(name)
    if name in WAYS:
        return measure_way(sized("124m")[0], 8 if on_gpus() else 1, *WAYS[name])
    if name == "largest":
        return measure(with_layers(layers) if layers else TINY, 1, alone=True)
    return measure(*sized(name))


def ours(of_state, **schedule):
    of_step = {"schedule": zerojax.Schedule(**schedule)}
    return functools.partial(programs.ours, of_state=of_state, of_step=of_step)


def more(name):
    """Returns the figures of a case of `MORE`."""
    match MORE.index(name):
        case 0:
            in_backward = ours({}, update="backward")
            return measure_forecast(*sized("1.5b"), in_backward, programs.ours)
        case 1:
            return measure_forecast(*sized("13b"), ours(SEVEN_BYTES, update="backward"))
        case 2:
            return measure_forecast(*sized("llama-8b"), programs.qlora)
        case _:
            return measure_forecast(*sized("124m"), programs.replayed, programs.ours)


def sized(name):
    """Returns a model and its rows; without a GPU, a tiny one."""
    tiny = TINY_LLAMA if name == "llama-8b" else TINY
    model, rows = MODELS[name] if on_gpus() else (tiny, 2)
    return dataclasses.replace(model, compute=sixteen_bits()), rows


def gpus_here():
    """Returns their number and kind, from a process of its own: the question takes their memory."""
    ask = "import jax; d = jax.devices(); print(d[0].platform, len(d), d[0].device_kind, sep='|')"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    platform, *found = done.stdout.strip().split("|")
    return found if platform in ("gpu", "cuda") else None


def rehearsal(count):
    """Returns what stands for GPUs here, and the environment of its cases."""
    flag = f"--xla_force_host_platform_device_count={count}"
    return (str(count), "CPU"), {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flag}


def driver():
    path = pathlib.Path("/proc/driver/nvidia/version")
    found = re.search(r"Module +([\d.]+)", path.read_text()) if path.exists() else None
    return found[1] if found else "unknown"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=results.file, nargs="?", const=HERE / NAMED_BY_GPUS)
    parser.add_argument(
        "--case",
        choices=(*CASES, *HOST_CASES, *MORE, *WAYS),
        help="only this case, in this process",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--host", action="store_true", help="one GPU with state in host memory")
    which.add_argument("--more", action="store_true", help="one GPU, and more ways to use it")
    which.add_argument("--ways", action="store_true", help="all GPUs, in each way")
    parser.add_argument("--rehearse", action="store_true", help="tiny models on emulated CPUs")
    parser.add_argument("--layers", type=int, default=0, help="of the largest (0: a tiny one)")
    args = parser.parse_args()
    if args.case:
        print(json.dumps(case(args.case, args.layers)))
        return
    found, env = gpus_here(), {}
    if args.rehearse:
        found, env = rehearsal(2 if args.ways else 1)
        if args.json and args.json.name == NAMED_BY_GPUS:
            parser.error("--rehearse measures nothing to keep: name another file")
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
    names = HOST_CASES if args.host else WAYS if args.ways else MORE if args.more else CASES
    for name in names:
        layers = record["cases"].get("search", {}).get("layers", 0)
        if name == "largest" and not layers:
            continue  # the search says why
        record["cases"][name] = run_case(name, layers, env)
        print(f"\n{name} (at {time.perf_counter() - started:.0f} s)")
        for what, value in record["cases"][name].items():
            print(f"  {what:20}{value}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(record, indent=1) + "\n")
    if args.json and not args.rehearse:
        print(f"\nPlease send {args.json} with the issue form 'A measurement'")
    failed = [name for name in names if "failed" in record["cases"].get(name, {})]
    if failed and args.rehearse:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
