"""Compiles steps for TPUs, which nothing here has run on, and counts their memory and collectives.

    make tpu-compile && python benchmarks/tpus.py   # docs/limits.md says what it shows

A 124M GPT, 4 x 1024 tokens a chip. Bytes are the compiler's. A step passes if it keeps what its
stage promises, `zerojax.audit(...).check()`.
"""

import argparse
import datetime
import importlib.metadata

import zerojax
from zerojax.tools._forecast.presets import preset

ROWS = {  # the slice, options of the plan, options of the step
    "stage 0": ("v5e:2x4", {"stage": 0}, {}),
    "stage 1": ("v5e:2x4", {"stage": 1}, {}),
    "stage 2": ("v5e:2x4", {"stage": 2}, {}),
    "stage 3": ("v5e:2x4", {"stage": 3}, {}),
    "stage 3, four microbatches": ("v5e:2x4", {"stage": 3}, {"accumulate": 4}),
    "stage 3, optimizer state on the host": ("v5e:2x4", {"stage": 3, "offload": "opt_state"}, {}),
    "stage 3, that and parameters on the host": (
        "v5e:2x4",
        {"stage": 3, "offload": ("opt_state", "params")},
        {},
    ),
    "stage 3, activations on the host": (
        "v5e:2x4",
        {"stage": 3},
        {"schedule": zerojax.Schedule(activations="host")},
    ),
    "stage 3 on v6e": ("v6e:2x4", {"stage": 3}, {}),
    "stage 3 on v5p": ("v5p:2x2x2", {"stage": 3}, {}),
}
GPT = preset("124m")
KINDS = ("all-gather", "reduce-scatter", "all-reduce")


def measured(where, planned, options):
    plan = zerojax.plan(GPT.make_state, mesh=zerojax.aot.mesh(where), **planned)
    batch = zerojax.aot.batch(GPT.batch(4 * plan.size), plan)
    report = zerojax.audit(zerojax.train_step(GPT.loss, **options), plan.abstract(), batch)
    report.check()
    memory = report.memory
    host = memory.on_host + memory.host_kept
    return where, memory.state, memory.peak, host, report.totals


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print("| step | slice | state MiB | peak MiB | host MiB | gathered, scattered, summed MiB |")
    print("|---|---|---|---|---|---|")
    for name, row in ROWS.items():
        where, *sizes, sent = measured(*row)
        numbers = " | ".join(f"{size / 2**20:,.0f}" for size in sizes)
        kinds = ", ".join(f"{sent.get(kind, 0) / 2**20:,.0f}" for kind in KINDS)
        print(f"| {name} | {where} | {numbers} | {kinds} |", flush=True)
    versions = (f"{name} {importlib.metadata.version(name)}" for name in ("jax", "libtpu"))
    print(f"\n{', '.join(versions)}, {datetime.date.today()}")


if __name__ == "__main__":
    main()
