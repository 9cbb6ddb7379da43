"""Groups on nodes of 8 GPUs, by the speed of their network cards, compiled without GPUs.

python benchmarks/groups.py           # prints the rows
python benchmarks/groups.py --json    # stores them too

The benchmark tells XLA that the network is slow, as `docs/wires.md` advises, unless a row says
otherwise.
"""

import dataclasses
import multiprocessing
import os
import pathlib
from concurrent import futures

import figures  # before JAX: it says what JAX may look for
import results

import zerojax
from zerojax.tools._forecast import network as _network, presets as _presets
from zerojax.tools._hlo import gpus as _gpus

CARDS = (50, 25, 12.5, 6.25)  # GB/s of each GPU's network card
NODES, PER_NODE = 8, 8
GPU, NODE = "gpu", ("gpu", "node")
GROUPS = {
    "flat": {"params": NODE, "grads": NODE, "opt_state": NODE},
    "HSDP": {"params": GPU, "grads": GPU, "opt_state": GPU},
    "P, G in the node": {"params": GPU, "grads": GPU, "opt_state": NODE},
    "P in the node": {"params": GPU, "grads": NODE, "opt_state": NODE},
}
# Like MaxText's own; `docs/groups.md` has its hybrid sharding.
LLAMA_7B = _presets.Llama(32, 4096, 32, vocab=32000, kv_heads=32, inner=11008)
ROWS = {f"{name}, accumulate {m}": (name, m, figures.MODEL) for m in (1, 8) for name in GROUPS}
ROWS |= {f"Llama 7B: {name}, accumulate 1": (name, 1, LLAMA_7B) for name in ("flat", "HSDP")}
TWO_HOPS = ("HSDP", "P, G in the node")  # they lose if XLA takes the network for a fast one
NOT_TOLD = ", XLA not told"
ROWS |= {f"{name}, accumulate 1{NOT_TOLD}": (name, 1, figures.MODEL) for name in TWO_HOPS}
ROWS |= {f"Llama 7B: HSDP, accumulate 1{NOT_TOLD}": ("HSDP", 1, LLAMA_7B)}
ROWS = {name: (*row, NOT_TOLD not in name) for name, row in ROWS.items()}
STORED = pathlib.Path(__file__).parent / "groups.json"


def measured(row):
    *row, is_told = row
    return in_process(compiled, row, is_told)


def in_process(measure, row, is_told):
    """Measures a row in a process of its own, because XLA reads its flags once a process."""
    before = os.environ.get("XLA_FLAGS", "")
    if is_told:
        _network.tell(os.environ)
    with futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        found = process.submit(measure, *row).result()
    os.environ["XLA_FLAGS"] = before
    return found


def compiled(groups, accumulate, model):
    """Compiles a model's step and replays it for each speed of the network."""
    mesh = zerojax.aot.mesh(figures.GPUS, (NODES, PER_NODE), ("node", "gpu"))
    precision = zerojax.Precision(compute="bfloat16")
    plan = zerojax.plan(model.make_state, mesh=mesh, groups=GROUPS[groups], precision=precision)
    step = zerojax.train_step(model.loss, plan=plan, accumulate=accumulate)
    rows = figures.ROWS_PER_GPU * plan.size * accumulate
    program = step.lower(plan.abstract(), zerojax.aot.batch(model.batch(rows), plan)).compile()
    return replayed(program, plan, accumulate, CARDS)


def replayed(program, plan, accumulate, cards):
    """Replays a program for each speed of the network, and returns its other costs too."""
    h100, found = _gpus.named("H100"), {}
    for speed in cards:
        rates = dataclasses.replace(h100.rates, network=speed * 1e9)
        gpu = dataclasses.replace(h100, given_rates=rates)
        report = zerojax.audit(program, plan=plan, gpu=gpu, accumulate=accumulate)
        found[f"step_ms at {speed:g} GB/s"] = round(1e3 * report.step_seconds, 1)
    gib = lambda count: round(count / 2**30, 2)
    memory = report.memory
    return found | {
        "compute_ms": round(1e3 * report.replay.compute, 1),
        "host_gib": gib(report.wire_bytes - report.network_bytes),
        "network_gib": gib(report.network_bytes),
        "state_gib": gib(memory.peak - memory.temporary),
        "temp_gib": gib(memory.temporary),
        "findings": report.findings(),
    }


if __name__ == "__main__":
    results.main(__doc__, STORED, ROWS, figures.versions(), measured)
