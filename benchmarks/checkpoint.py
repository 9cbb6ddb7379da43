"""Host memory and times of saving and restoring a state of 2 GiB or more.

    python benchmarks/checkpoint.py                          # prints the figures
    python benchmarks/checkpoint.py --json checkpoint.json   # and stores them

Memory is the peak resident set of a fresh process, less its memory before (Linux). Emulated devices
are in host memory, so the benchmark subtracts the restored state from a restore's peak. It tells
glibc to give freed memory back; otherwise the peak would be that of glibc's pools.
"""

import argparse
import datetime
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

import jax

jax.config.update("jax_num_cpu_devices", 4)

import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import zerojax

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import results
from host_memory import GIVE_BACK, measured

MIB = 2**20
# When times are measured, glibc keeps memory: virtual machines take long to map a new page.
KEEP = {"MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_MMAP_MAX_": "0"}
WARM_UP = 2  # saves, until their memory is mapped
STEP_S = 0.25
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--layers", type=int, default=5)
parser.add_argument("--dim", type=int, default=6144)
parser.add_argument("--json", type=results.file)
parser.add_argument("--only", help="only measurements that match this regex", default="")
parser.add_argument("--run", help="one measurement, in this process: 'save 3', 'restore 1', ...")
parser.add_argument("--directory", type=pathlib.Path)


def make_state(args):
    keys = jax.random.split(jax.random.key(0), args.layers)
    shape = (args.dim, args.dim)
    params = {f"layer{i}": jax.random.normal(key, shape) / 99 for i, key in enumerate(keys)}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
    # Moments as after some steps: Orbax would not write zeros at all.
    return state.replace(opt_state=jax.tree.map(lambda x: x + 1, state.opt_state))


def loss_fn(params, batch):
    for weight in params.values():
        batch = jnp.tanh(batch @ weight)
    return jnp.mean(batch**2)


def save(args, stage):
    state = jax.block_until_ready(zerojax.shard_train_state(lambda: make_state(args), stage))
    return measured(lambda: zerojax.save(args.directory / f"stage{stage}", state))[1]


def restore(args, stage, written=3):
    plan = zerojax.plan(lambda: make_state(args), stage=stage)
    path = args.directory / f"stage{written}"
    state, result = measured(lambda: jax.block_until_ready(zerojax.restore(path, plan)))
    held = sum(s.data.nbytes for x in jax.tree.leaves(state) for s in x.addressable_shards) / MIB
    return {**result, "state_mib": round(held), "above_state_mib": round(result["peak_mib"] - held)}


def resumed(args, stage, fresh):
    """Returns the peak of three steps, from a new state or a restored one."""
    plan = zerojax.plan(lambda: make_state(args), stage=stage)
    state = plan.place(lambda: make_state(args))
    if not fresh:
        zerojax.save(args.directory / "resumed", state)
        del state
        state = zerojax.restore(args.directory / "resumed", plan)
    step = zerojax.train_step(loss_fn)
    batch = np.ones((8, args.dim), np.float32)

    def steps():
        nonlocal state
        for _ in range(3):
            state, _ = jax.block_until_ready(step(state, batch))

    return measured(steps)[1]


def background(args):
    """Returns the share of a blocking save's time that a background save gives back to the loop.

    Times loops with and without the save, including the wait at the end. A step donates the state
    and then sleeps, as if GPUs computed: emulated devices would use the cores that write.
    """
    state = zerojax.shard_train_state(lambda: make_state(args))
    step = jax.jit(lambda state: state.replace(step=state.step + 1), donate_argnums=0)
    saved = 0

    def loop(steps, checkpoints=None):
        nonlocal state, saved
        started = time.perf_counter()
        if checkpoints is not None:
            saved += 1
            checkpoints.save(saved, state)
        for _ in range(steps):
            state = jax.block_until_ready(step(state))
            time.sleep(STEP_S)
        if checkpoints is not None:
            checkpoints.wait()
        return time.perf_counter() - started

    loop(1)
    with zerojax.Checkpoints(args.directory / "blocking", keep=1, background=False) as blocking:
        blocking_s = sorted([loop(0, blocking) for _ in range(WARM_UP + 5)][WARM_UP:])
    steps = math.ceil(5 * blocking_s[2] / STEP_S)
    with zerojax.Checkpoints(args.directory / "background", keep=1) as checkpoints:
        saving = [loop(steps, checkpoints) for _ in range(WARM_UP + 5)][WARM_UP:]
    plain = min(loop(steps) for _ in range(2))  # little more than the sleeps
    lost = sorted(seconds - plain for seconds in saving)
    return {
        "steps_in_loop": steps,
        "blocking_save_s": [round(seconds, 2) for seconds in blocking_s],
        "lost_to_background_save_s": [round(seconds, 2) for seconds in lost],
        "hidden_median": round(1 - lost[2] / blocking_s[2], 3),
        "hidden_fastest": round(1 - lost[0] / blocking_s[0], 3),
    }


WORK = {
    "save 3": lambda args: save(args, 3),
    "save 0": lambda args: save(args, 0),
    "restore 3 at 3": lambda args: restore(args, 3),
    "restore 0 at 3": lambda args: restore(args, 3, written=0),
    "restore 3 at 1": lambda args: restore(args, 1),
    "steps, fresh": lambda args: resumed(args, 3, fresh=True),
    "steps, resumed": lambda args: resumed(args, 3, fresh=False),
    "background": background,
}

STEPS = ("steps, fresh", "steps, resumed")


def main():
    args = parser.parse_args()
    if args.run:
        print(json.dumps(WORK[args.run](args)))
        return
    leaf = args.dim**2 * 4 / MIB
    found = {"state_mib": leaf * args.layers * 3, "limit_mib": 1.3 * leaf + leaf / 4}
    args.directory = pathlib.Path(tempfile.mkdtemp())
    try:
        for name in [name for name in WORK if re.search(args.only, name)]:
            # Steps of a state so large take minutes on emulated devices.
            dim = min(args.dim, 2048) if name in STEPS else args.dim
            directory = args.directory / str(dim)
            sizes = ["--layers", str(args.layers), "--dim", str(dim)]
            command = [sys.executable, __file__, *sizes, "--directory", directory, "--run", name]
            env = {**os.environ, **(KEEP if name == "background" else GIVE_BACK)}
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env)
            found[name] = json.loads(done.stdout.splitlines()[-1])
            print(f"{name:20}{found[name]}", flush=True)
    finally:
        shutil.rmtree(args.directory)
    print({k: v for k, v in found.items() if k.endswith("mib")})
    if args.json:
        here = {
            "device": f"{len(jax.devices())} x {jax.devices()[0].device_kind}, emulated",
            "jax": jax.__version__,
            "date": datetime.date.today().isoformat(),
        }
        kept = json.loads(args.json.read_text()) if args.json.exists() else {}
        of_today = {name: kept.get(name) for name in here} == here
        record = {**(kept if of_today else {}), **here, **found}
        args.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
