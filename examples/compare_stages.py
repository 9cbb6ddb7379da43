"""Compares the stages of ZeRO on a small GPT: bytes on each device, what travels, the step's time.

    python examples/compare_stages.py                   # 8 emulated CPU devices, or your GPUs
    python examples/compare_stages.py --dim 1024 --layers 24 --accumulate 4

State is what a device holds between steps, peak the most while one runs, by the compiler's own
account. Collectives are read off the compiled program: how often they run in a step, and what a
device sends by them. Emulated devices share the machine's cores, so that their times mean little;
what is printed is the ratio to stage 0.
"""

import argparse
import statistics
import time

import jax

jax.config.update("jax_num_cpu_devices", 8)  # only matters where there is no GPU

import numpy as np
import optax
from flax.training.train_state import TrainState
from train_gpt import GPT, next_byte_loss

import zerojax

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--dim", type=int, default=128, help="a multiple of 32")
parser.add_argument("--tokens", type=int, default=64, help="length of a training sequence")
parser.add_argument("--batch", type=int, default=32, help="sequences a step, over all devices")
parser.add_argument("--accumulate", type=int, default=1, help="microbatches a step")
parser.add_argument("--steps", type=int, default=10, help="to time, of each stage")

HEADER = [
    "stage", "params", "optimizer", "state", "peak", "all-reduce", "reduce-scatter", "all-gather",
    "step",
]  # fmt: skip
COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather")


def measured(stage, args, loss_fn, make_state, text):
    """(audit, seconds of a step) at a stage; the compiled program is the one that is timed."""
    state = zerojax.shard_train_state(make_state, stage=stage)
    step = zerojax.train_step(loss_fn, accumulate=args.accumulate)
    batch = zerojax.shard_batch(text[zerojax.process_slice(args.batch)])
    compiled = step.lower(state, batch).compile()
    report = zerojax.audit(compiled, state, accumulate=args.accumulate)
    seconds = []
    for _ in range(args.steps + 1):
        started = time.perf_counter()
        state, _ = jax.block_until_ready(compiled(state, batch))
        seconds.append(time.perf_counter() - started)
    return report, statistics.median(seconds[1:])


def row(stage, report, seconds, seconds_of_stage_0):
    memory = report.memory
    held = (memory.parameters, memory.optimizer, memory.state, memory.peak)
    ratio = f"{seconds / seconds_of_stage_0:.2f} x"
    took = ratio if report.backend == "cpu" else f"{seconds * 1e3:.1f} ms, {ratio}"
    travels = (runs_and_bytes(report, kind) for kind in COLLECTIVES)
    return [str(stage), *map(mebibytes, held), *travels, took]


def runs_and_bytes(report, kind):
    runs = sum(one.trips for one in report.traffic if one.kind == kind)
    return f"{runs} x, {mebibytes(report.totals[kind])}" if runs else "-"


def mebibytes(count):
    return f"{count / 2**20:.2f}"


def main():
    args = parser.parse_args()
    zerojax.initialize()
    model = GPT(args.layers, args.dim, args.tokens)
    text = np.random.default_rng(0).integers(0, 256, (args.batch, args.tokens + 1), np.int32)

    def loss_fn(params, text):
        return next_byte_loss(model, params, text)

    def make_state():
        params = model.init(jax.random.key(0), text[:1, :-1])["params"]
        return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))

    rows, faults, first = [HEADER], [], None
    for stage in range(4):
        report, seconds = measured(stage, args, loss_fn, make_state, text)
        first = first or seconds
        rows.append(row(stage, report, seconds, first))
        faults += [f"stage {stage}: {fault}" for fault in report.findings()]
    devices = jax.devices()
    zerojax.log(f"{len(devices)} x {devices[0].device_kind}; MiB per device:\n")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        zerojax.log("  ".join(cell.rjust(w) for cell, w in zip(cells, widths, strict=True)))
    for fault in faults:  # what breaks a stage's promise, should anything
        zerojax.log(fault)


if __name__ == "__main__":
    main()
