"""Compares the ZeRO stages on a small GPT: bytes per device, communication, step time.

    python examples/compare_stages.py                   # 8 emulated CPU devices, or your GPUs
    python examples/compare_stages.py --dim 1024 --layers 24 --accumulate 4

"state" is what a device stores between steps; "peak" is peak memory during a step, according to
the compiler. The program reads collectives from the compiled step: how often they run, and how many
bytes a device sends. Emulated devices share the machine's cores, so their times mean little: the
program prints the ratio to stage 0 instead.
"""

import argparse
import statistics
import time

import jax

jax.config.update("jax_num_cpu_devices", 8)  # only matters without a GPU

import numpy as np
import optax
from flax.training.train_state import TrainState
from train_gpt import GPT, next_byte_loss

import zerojax

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--dim", type=int, default=128, help="a multiple of 32")
parser.add_argument("--tokens", type=int, default=64, help="length of a training sequence")
parser.add_argument("--batch", type=int, default=32, help="sequences per step, over all devices")
parser.add_argument("--accumulate", type=int, default=1, help="microbatches per step")
parser.add_argument("--steps", type=int, default=10, help="steps to time at each stage")

COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather")
HEADER = ["stage", "params", "optimizer", "state", "peak", *COLLECTIVES, "step"]


def measured(stage, args, loss_fn, make_state, text):
    """Returns the audit of a stage's step and its seconds, both from one compiled program."""
    state = zerojax.shard_train_state(make_state, stage=stage)
    step = zerojax.train_step(loss_fn, accumulate=args.accumulate)
    batch = zerojax.shard_batch(text[zerojax.run.process_slice(args.batch)])
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
    uses = (memory.parameters, memory.optimizer, memory.state, memory.peak)
    ratio = f"{seconds / seconds_of_stage_0:.2f} x"
    took = ratio if report.backend == "cpu" else f"{seconds * 1e3:.1f} ms, {ratio}"
    collectives = (runs_and_bytes(report, kind) for kind in COLLECTIVES)
    return [str(stage), *map(mebibytes, uses), *collectives, took]


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
    zerojax.run.log(f"{len(devices)} x {devices[0].device_kind}; MiB per device:\n")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        zerojax.run.log("  ".join(cell.rjust(w) for cell, w in zip(cells, widths, strict=True)))
    for fault in faults:  # broken promises of a stage, if any
        zerojax.run.log(fault)


if __name__ == "__main__":
    main()
