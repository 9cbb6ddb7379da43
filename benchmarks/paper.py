"""The tables and figures of the ZeRO paper, compiled for its GPUs, 32 GB V100s.

python benchmarks/paper.py                            # prints all rows
python benchmarks/paper.py --json                     # stores those that are not stored yet
python benchmarks/paper.py --json --only "table 2"    # only some of these
python benchmarks/paper.py --json --again             # all again as stored, without a search

CUDA 13 does not compile for a V100: `zerojax.aot` says what to install. Nothing runs. The memory of
a device is XLA's peak. Times are modelled for V100s and a DGX-2's network cards.
"""

import argparse
import dataclasses
import functools
import json
import math
import multiprocessing
import subprocess
import sys
from concurrent import futures

import figures  # before JAX: it says what JAX may look for
import jax.numpy as jnp
import megatron
import paper_numbers
import results

import zerojax
from zerojax.tools._cli import state_bytes
from zerojax.tools._forecast import presets as _presets
from zerojax.tools._hlo import gpus as _gpus

STORED = figures.HERE / "paper.json"
PACKAGES = ("jaxlib", "jax-cuda12-pjrt", "flax", "optax")
GPU, PER_HOST, MODEL_PARALLEL = _gpus.GPUS["V100-32GB"], 16, 16
LARGEST = 0  # of layers or rows: the most that fit


@dataclasses.dataclass(frozen=True)
class Row:
    layers: int
    hidden: int
    heads: int
    gpus: int
    stage: int
    rows: int  # sequences of 1024 tokens for each `tensor` GPUs
    tensor: int = 1
    activations: str | tuple[str, ...] | None = None


def sized(name, gpus, stage, rows=LARGEST, **options):
    """Returns a row of a preset."""
    model = _presets.preset(name)
    return Row(model.layers, model.hidden, model.heads, gpus, stage, rows, **options)


def split(*arguments, **options):
    """Returns a row with model parallelism and, by default, P_a."""
    return dataclasses.replace(
        sized(*arguments), **{"tensor": MODEL_PARALLEL, "activations": "tensor", **options}
    )


def table_2():
    """Returns rows that vary the depth, at the width of the paper's runs of about that size, with
    one sequence a step."""
    widths = [(1, 1920), (3, 2304), (5, 3072), (9, 4096), (30, 6144), (80, 8192), (600, 16384)]
    for degree, theory in paper_numbers.THEORY.items():
        for stage, billions in enumerate(theory):
            hidden = max(width for least, width in widths if least <= billions)
            shape = LARGEST, hidden, hidden // 128, 64 * degree, stage, 1
            name = f"table 2, MP {degree}, stage {stage}"
            yield name, Row(*shape, degree, "tensor" if degree > 1 else None)


def figure_2():
    """Returns rows with batches that fit. We chose them; of the paper's, only 60B's is known."""
    for name, rows in {"1.5b": 24, "8b": 8}.items():
        yield f"figure 2, {name}, stage 2", sized(name, 400, 2, rows)
    for rows, names in {64: "20b 40b 60b", 32: "80b", 24: "100b", 16: "120b 140b 170b"}.items():
        for name in names.split():
            kept = {"activations": ("host", "tensor")} if name == "170b" else {}
            yield f"figure 2, {name}, stage 2", split(name, 400, 2, rows, **kept)
    for name, rows in {"1.5b": 24, "8b": 16, "20b": 16, "60b": 8, "170b": 4}.items():
        yield f"figure 2, {name}, stage 3", sized(name, 400, 3, rows)


def figure_3():
    shape = {"layers": 75, "hidden": 8192, "heads": 64}
    for gpus, rows in paper_numbers.FIGURE_3_BATCH.items():
        yield f"figure 3, {gpus}, stage 2", split("60b", gpus, 2, rows, **shape)
        yield f"figure 3, {gpus}, stage 2, largest batch", split("60b", gpus, 2, **shape)
        alone = dataclasses.replace(sized("60b", gpus, 3), **shape)
        yield f"figure 3, {gpus}, stage 3, largest batch", alone


def figure_4():
    for stage in (2, 3):
        for name, rows in paper_numbers.FIGURE_4_BATCH.items():
            yield f"figure 4, {name}, stage {stage}", sized(name, 128, stage, rows)
    for name, rows in paper_numbers.FIGURE_4_BASELINES.items():
        yield f"figure 4, {name}, stage 0", sized(name, 128, 0, rows)


def figures_6_to_8():
    for name, stage in paper_numbers.STAGES.items():
        kept = {"activations": paper_numbers.ACTIVATIONS[name]}
        yield f"figure 6, {name}", split("100b", 400, stage, 16, layers=LARGEST, **kept)
        for size in ("40b", "100b"):
            yield f"figure 7, {size}, {name}", split(size, 400, stage, 16, **kept)
        rows = paper_numbers.FIGURE_8_BATCH[name]
        yield f"figure 8, {name}", split("60b", 128, stage, rows, **kept)
        if stage == 2:
            yield f"figure 8, {name}, largest batch", split("60b", 128, stage, **kept)


TABLE_1 = {"table 1": [(p, n, s) for p, n, s, _ in paper_numbers.CELLS] + [(7.5e9, 64, 0)]}
ROWS = TABLE_1 | dict([*table_2(), *figure_2(), *figure_3(), *figure_4(), *figures_6_to_8()])


def compiled_bytes(cells):
    """Returns the bytes of updates, compiled for up to 1024 emulated devices."""
    script = figures.HERE / "argument_bytes.py"
    done = subprocess.run(
        [sys.executable, script], input=json.dumps(cells), stdout=subprocess.PIPE, text=True
    )
    done.check_returncode()
    return json.loads(done.stdout.splitlines()[-1])


@functools.cache
def audited(row):
    """Compiles the step of a row; returns its audit and its model."""
    half = jnp.dtype(GPU.half)
    model = megatron.Megatron(row.layers, row.hidden, row.heads, compute=half)
    sizes = {"data": row.gpus // row.tensor, "tensor": row.tensor}
    sizes = {axis: size for axis, size in sizes.items() if axis == "data" or size > 1}
    mesh = zerojax.aot.mesh(
        f"{row.gpus}x{GPU.name}", tuple(sizes.values()), tuple(sizes), per_host=PER_HOST
    )
    plan = megatron.planned(model, mesh, row.stage)
    step = zerojax.train_step(
        model.loss, plan=plan, schedule=zerojax.Schedule(activations=row.activations)
    )
    batch = zerojax.aot.batch(model.batch(row.rows * plan.size), plan)
    program = step.lower(plan.abstract(), batch).compile()
    return zerojax.audit(program, plan=plan), model


def filled(row):
    """Returns a row with the most layers that fit, to 1 in 100, or sequences, to 1 in 10."""
    wanted = [what for what in ("layers", "rows") if getattr(row, what) == LARGEST]
    if not wanted:
        return row
    (what,) = wanted
    memory = lambda count: audited(dataclasses.replace(row, **{what: count}))[0].memory
    peak = lambda count: memory(count).peak
    if what == "layers":
        count = largest(peak, 0.93 * fits_by_formula(row) / (12 * row.hidden**2), steps=100)
    else:
        count = largest(peak, 4, memory(4).state, steps=10)
    return dataclasses.replace(row, **{what: count})


def fits_by_formula(row):
    """Returns the parameters whose state fills a GPU, by the formula. No stage keeps gradients."""
    data = row.gpus // row.tensor
    return row.tensor * GPU.usable / state_bytes(1, data, row.stage, (2, 0, 12))


def largest(peak, guess, fixed=0, room=GPU.usable, steps=100):
    """Returns the largest compiled count that fits, to one in so many steps, and at least 1.

    Peaks lie about on a line: the line through the two counts nearest to the room gives the next
    guess. While there is only one count, all but the `fixed` bytes grow with it.
    """
    fits, fails, peaks = 0, math.inf, {}
    while fails - fits > 1 + fits // steps:
        count = min(max(int(guess), fits + 1), fails - 1)
        peaks[count] = peak(count)
        fits, fails = (count, fails) if peaks[count] <= room else (fits, count)
        nearest = sorted(peaks, key=lambda each: abs(peaks[each] - room))[:2]
        n, m = nearest if len(nearest) == 2 else (0, count)
        low, high = peaks.get(n, fixed), peaks[m]
        guess = n + (room - low) * (m - n) / (high - low) if high != low else fits + 1
        if len(peaks) > 1 and fits and int(guess) <= fits + fits // steps:
            break
    return max(fits, 1)


def measured(row):
    report, model = audited(row)
    gb = lambda count: round(count / 1e9, 2)
    step = report.step_seconds
    return {
        "billions": round(model.n_params / 1e9, 2),
        "peak_gb": gb(report.memory.peak),
        "state_gb": gb(report.memory.state),
        "host_gb": gb(report.memory.on_host + report.memory.host_kept),
        "fits": report.memory.peak <= GPU.usable,
        "batch": row.rows * row.gpus // row.tensor,
        "step_s": round(step, 3),
        "exposed_s": round(report.exposed_seconds, 3),
        "tflops": round(model.flops(row.rows) / row.tensor / step / 1e12, 1),
        "compiled": {"layers": row.layers, "rows": row.rows},
    }


def made(name, before):
    """Measures a row. For a stored row, compiles only the count that its search found."""
    row = ROWS[name]
    if name == "table 1":
        return {"bytes": compiled_bytes(row)}
    compiled = before["compiled"] if before else {}
    return measured(filled(dataclasses.replace(row, **compiled)))


def settings(row):
    """Returns the options of a row as JSON."""
    return json.loads(json.dumps(dataclasses.asdict(row))) if isinstance(row, Row) else {}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help=f"store in {STORED.name}")
    parser.add_argument("--only", type=results.expression, default="", help=results.ONLY)
    parser.add_argument("--again", action="store_true", help="stored rows too")
    parser.add_argument("--jobs", type=int, default=1, help="processes to compile in")
    parser.add_argument("--list", action="store_true", help="the rows' names")
    arguments = parser.parse_args()
    if arguments.list:
        return print(*ROWS, sep="\n")
    kept = results.Results(STORED if arguments.json else None, ROWS, figures.versions(PACKAGES))
    spawn = multiprocessing.get_context("spawn")
    with futures.ProcessPoolExecutor(arguments.jobs, spawn, max_tasks_per_child=20) as processes:
        running = {}
        for name in results.chosen(arguments.only, ROWS):
            before = kept.rows.get(name, {})
            same = settings(ROWS[name]) == before.get("settings")
            if arguments.again or not same:
                running[processes.submit(made, name, before if same else None)] = name
        for done in futures.as_completed(running):
            row = {"row": running[done], "settings": settings(ROWS[running[done]]), **done.result()}
            print(row, flush=True)
            kept.put(running[done], row)


if __name__ == "__main__":
    main()
