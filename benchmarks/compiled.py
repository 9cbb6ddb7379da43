"""Speed, exposed communication, traffic and memory of steps, compiled on a machine without GPUs.

python benchmarks/compiled.py                      # prints all rows
python benchmarks/compiled.py --json               # stores them for this JAX version
python benchmarks/compiled.py --json --missing     # only rows that are not stored yet
python benchmarks/compiled.py --check              # compares a few rows with the stored ones
"""

import argparse
import dataclasses
import multiprocessing
import os
import pathlib
import sys
from concurrent import futures

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import figures  # before JAX: it says what JAX may look for
import jax
import looped
import results
import rivals
import rivals_by_hand
import rivals_flax
import vit
from jax.sharding import NamedSharding, PartitionSpec

import zerojax
from zerojax.tools._forecast import presets as _presets

HERE = pathlib.Path(__file__).parent
STEPS = {**rivals.STEPS, **rivals_by_hand.STEPS, **rivals_flax.STEPS}
MASTER = zerojax.Precision(compute="bfloat16", param="bfloat16", master="float32")
SLOWER, LARGER = 1.01, 1.02  # the most that a change may cost


@dataclasses.dataclass(frozen=True)
class Row:
    model: str
    gpus: str
    stage: int = 3
    remat: str = "full"
    rows: int = 4  # sequences of 1024 tokens, or images, per GPU and microbatch
    accumulate: int = 1
    master: bool = False  # bf16 parameters, fp32 copies
    moments: str = ""  # their dtype
    rival: str = ""
    options: tuple = ()  # a rival's

    def __post_init__(self):
        if self.rival and self.rival not in STEPS:
            raise ValueError(f"no rival is called {self.rival!r}: {'; '.join(STEPS)}")

    @property
    def name(self):
        times = f"{self.accumulate}x" if self.accumulate > 1 else "x"
        how = self.rival or f"stage {self.stage}"
        extra = " + master" * self.master + f" + {self.moments} moments" * bool(self.moments)
        extra += " + " * bool(self.options)
        flags = ",".join(f"{k.removeprefix('xla_gpu_')}={v}" for k, v in self.options)
        return f"{self.model} {self.gpus} {times}{self.rows} {self.remat}: {how}{extra}{flags}"

    def stages(self, *stages):
        return [dataclasses.replace(self, stage=stage) for stage in stages]

    def rivals(self, *names, options=()):
        return [dataclasses.replace(self, rival=name, options=options) for name in names]


# Flags that help most rivals, on H100s and on A100s.
SCATTER_ONE = (("xla_gpu_reduce_scatter_combine_threshold_bytes", 1),)
HIDE_LATENCY = (("xla_gpu_enable_latency_hiding_scheduler", True),)
ANNOTATED, LARGEST, BY_HAND = "annotations, blocks", "largest dimension, blocks", "by hand"
NNX, LINEN = "flax nnx, blocks", "flax linen, blocks"
BEST = (NNX, ANNOTATED, BY_HAND)
MAIN = Row("7.5b", "64xH100")
MICROBATCHES = dataclasses.replace(MAIN, accumulate=8)
SMALL = Row("1.5b", "8xH100")
LARGER_GPT = Row("13b", "64xH100")
LLAMA = Row("llama-8b", "64xH100")
VIT = Row("vit-g", "64xH100", rows=64)
TRILLION = Row("1t", "1024xH100", rows=1)


def beside(row, *names):
    """Returns a row of zerojax, and its rivals with the flag that suits them."""
    flag = HIDE_LATENCY if "A100" in row.gpus else SCATTER_ONE
    return [row, *row.rivals(*names, options=flag)]


def elsewhere(row, *names, gpus=("8xH100", "512xH100", "64xA100-80GB")):
    """Returns the same on other GPUs, and with microbatches, which the nnx rival lacks."""
    others = [dataclasses.replace(row, gpus=where) for where in gpus]
    summed = [LINEN if name == NNX else name for name in names]
    return [
        *(each for other in others for each in beside(other, *names)),
        *beside(dataclasses.replace(row, accumulate=8), *summed),
    ]


# 1.5B is 1920 wide and ViT-g 1408, which 512 GPUs do not divide.
ROWS = [
    *beside(MAIN, *BEST, LINEN, LARGEST),
    *MAIN.rivals(*BEST, LINEN, LARGEST, "annotations, weights"),
    *MAIN.rivals(*(f"{f}, nothing" for f in ("annotations", "largest dimension"))),
    *MAIN.rivals("flax linen, nothing", "flax nnx, nothing"),
    *MAIN.stages(1, 2),
    *dataclasses.replace(MAIN, master=True).stages(1, 2, 3),
    *beside(dataclasses.replace(MAIN, remat="dots"), *BEST),
    *beside(dataclasses.replace(MAIN, remat="none", rows=1), ANNOTATED, BY_HAND),
    *beside(dataclasses.replace(MAIN, remat="none", rows=2), ANNOTATED, BY_HAND),  # 4 do not fit
    Row("7.5b", "128xH100"),
    *elsewhere(MAIN, *BEST),
    *MICROBATCHES.stages(1, 2),
    *SMALL.stages(0),
    *SMALL.rivals("replicated"),
    *beside(SMALL, *BEST),
    *SMALL.stages(1, 2),
    *elsewhere(SMALL, *BEST, gpus=("64xH100", "8xA100-80GB")),
    *beside(LARGER_GPT, *BEST),
    *elsewhere(LARGER_GPT, *BEST),
    *beside(LLAMA, ANNOTATED, BY_HAND),
    *beside(dataclasses.replace(LLAMA, remat="dots"), ANNOTATED, BY_HAND),
    *elsewhere(LLAMA, ANNOTATED, BY_HAND),
    Row("llama-13b", "64xH100"),
    Row("llama-13b", "64xH100", remat="dots"),
    *beside(VIT, ANNOTATED, LARGEST, BY_HAND),
    *VIT.rivals(LARGEST, "largest dimension, nothing"),
    *elsewhere(VIT, ANNOTATED, LARGEST, BY_HAND, gpus=("8xH100", "64xA100-80GB")),
    *beside(TRILLION, ANNOTATED, BY_HAND),
]
CHECKED = [
    MAIN,
    Row("7.5b", "64xA100-80GB"),
    *MAIN.stages(2),
    dataclasses.replace(MAIN, remat="dots"),
    Row("7.5b", "8xH100"),
    *MICROBATCHES.stages(2),
    LLAMA,
    TRILLION,
]


def compiled(row):
    """Returns the program of a row, and its plan if zerojax runs the row."""
    lowered, options, plan = traced(row)
    return lowered.compile(compiler_options=options or None), plan


def traced(row):
    """Returns the lowered step of a row, the options to compile it with, and its plan or None."""
    model, mesh = model_of(row), zerojax.aot.mesh(row.gpus)
    batch = model.batch(row.rows * row.accumulate * mesh.size)
    if not row.rival:
        precision = zerojax.Precision(moments=row.moments) if row.moments else None
        precision = MASTER if row.master else precision
        plan = zerojax.plan(model.make_state, stage=row.stage, mesh=mesh, precision=precision)
        loss = model.losses((row.remat,))[row.remat]
        step = zerojax.train_step(loss, accumulate=row.accumulate)
        return step.lower(plan.abstract(), zerojax.aot.batch(batch, plan)), {}, plan
    step, state = STEPS[row.rival](model, mesh, row.remat, row.accumulate)
    split = NamedSharding(mesh, PartitionSpec("data"))
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split), batch)
    options = figures.compiler_options(row.options, mesh.devices.flat[0])
    return step.lower(state, batch), options, None


def model_of(row):
    own = vit.PRESETS | looped.PRESETS
    return own.get(row.model) or _presets.preset(row.model)


def measure(row):
    program, plan = compiled(row)
    return figures.figures(row.name, program, plan, row.accumulate)


def results_path():
    return HERE / f"compiled_jax{'.'.join(jax.__version__.split('.')[:3])}.json"


def check(stored):
    """Exits with 1 if a program got slower or larger than the stored one."""
    if not stored:  # a new JAX is no reason to refuse a change
        print(f"nothing is stored for JAX {jax.__version__}: run with --json, look, and commit it")
        return
    if missing := [row.name for row in CHECKED if row.name not in stored]:
        sys.exit("\n".join(["not stored, run with --json:", *missing]))
    spawn = multiprocessing.get_context("spawn")
    with futures.ProcessPoolExecutor(os.cpu_count(), spawn) as processes:
        measured = list(processes.map(measure, CHECKED))
    print(*map(figures.shown, measured), sep="\n")
    if worse := [what for now in measured for what in worse_than(stored[now["row"]], now)]:
        sys.exit("\n".join(["worse than stored:", *worse]))


def worse_than(was, now):
    """Returns the figures that got worse by more than a change may cost."""
    limits = {"step_ms": SLOWER, "wire_gib": SLOWER, "peak_gib": LARGER}
    return [
        f"{now['row']}: {what} {was[what]} -> {now[what]}"
        for what, limit in limits.items()
        if now[what] > was[what] * limit
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help=f"store in {results_path().name}")
    parser.add_argument("--only", type=results.expression, default="", help=results.ONLY)
    parser.add_argument("--missing", action="store_true", help="only rows that are not stored yet")
    parser.add_argument("--check", action="store_true", help="fail if a row got worse")
    parser.add_argument("--list", action="store_true", help="the rows' names")
    arguments = parser.parse_args()
    rows = {row.name: row for row in ROWS}
    if arguments.list:
        return print(*rows, sep="\n")
    before = {row["row"]: row for row in results.stored(results_path())["rows"]}
    print(figures.head())
    if arguments.check:
        return check(before)
    kept = results.Results(results_path() if arguments.json else None, rows, figures.versions())
    done = before if arguments.missing else ()
    for name in results.chosen(arguments.only, rows):
        if name in done:
            continue
        try:
            row = measure(rows[name])
        except jax.errors.JaxRuntimeError as error:
            print(f"{name:88s} {str(error).splitlines()[0][:120]}", flush=True)
            kept.drop(name)
            continue
        print(figures.shown(row), *row["findings"], sep="\n    ", flush=True)
        kept.put(name, row)


if __name__ == "__main__":
    main()
