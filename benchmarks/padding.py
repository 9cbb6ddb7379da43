"""Steps on GPU counts that do not divide the leaves, beside counts that do; compiled without GPUs.

python benchmarks/padding.py           # prints the rows
python benchmarks/padding.py --json    # stores them too
"""

import argparse
import dataclasses
import math
import pathlib

import figures  # before JAX: it says what JAX may look for
import jax
import results
import rivals
from jax.sharding import NamedSharding, PartitionSpec

import zerojax
from zerojax.tools._forecast import presets as _presets
from zerojax.tools._hlo import gpus as _gpus

# The ZeRO paper's GPU. It has no bfloat16, and CUDA 13 does not compile for it. So these are its
# rates and memory, with the H100's programs, and 800 Gb/s of network for 8 GPUs.
V100 = dataclasses.replace(
    _gpus.named("H100"),
    name="V100",
    memory=32 * 2**30,
    memory_rate=0.9e12,
    flops=125e12,
    link=150e9,
    network=12.5e9,
    host=16e9,
    host_memory=math.inf,
)
COUNTS = (6, 12, 48, 100, 384, 400, 1000)


@dataclasses.dataclass(frozen=True)
class Row:
    model: str
    gpus: str
    per_host: int = 8
    rows: int = 4  # sequences of 1024 tokens per GPU
    remat: str = "full"
    rival: str = ""

    @property
    def name(self):
        how = self.rival or "stage 3"
        return f"{self.model} {self.gpus} ({self.per_host} a host) x{self.rows} {self.remat}: {how}"


RIVAL = "annotations, blocks"
NEAR = (("60xH100", 4), ("64xH100", 4), ("400xH100", 8), ("512xH100", 8))
PADDED = [
    *(Row("7.5b", "60xH100", 4, rows) for rows in (4, 2, 8)),
    Row("7.5b", "60xH100", 4, remat="dots"),
    Row("7.5b", "60xH100", 4, rows=1, remat="none"),
    Row("13b", "60xH100", 4),
    *(Row(model, "400xH100") for model in ("7.5b", "100b")),
]


DIVIDES = {"60xH100": "64xH100", "400xH100": "512xH100"}  # the next count that does
ROWS = [
    *(
        dataclasses.replace(row, gpus=gpus)
        for row in PADDED
        for gpus in (row.gpus, DIVIDES[row.gpus])
    ),
    Row("170b", "400xH100"),
    *(Row("7.5b", *gpus, rival=RIVAL) for gpus in NEAR),
]
BY_NAME = {row.name: row for row in ROWS}


def measured(row):
    """Compiles the step of a row, and reads its costs from the program."""
    mesh = zerojax.aot.mesh(row.gpus, per_host=row.per_host)
    model = _presets.preset(row.model)
    batch = model.batch(row.rows * mesh.size)
    if row.rival:
        step, state = rivals.STEPS[row.rival](model, mesh, row.remat, 1)
        split = NamedSharding(mesh, PartitionSpec("data"))
        batch = jax.ShapeDtypeStruct(batch.shape, batch.dtype, sharding=split)
        options = figures.compiler_options((), mesh.devices.flat[0])
        program, plan = step.lower(state, batch).compile(compiler_options=options), None
    else:
        plan = zerojax.plan(model.make_state, mesh=mesh)
        step = zerojax.train_step(model.losses((row.remat,))[row.remat])
        batch = zerojax.aot.batch(batch, plan)
        program = step.lower(plan.abstract(), batch).compile()
    found = figures.figures(row.name, program, plan)
    if row.model in ("100b", "170b"):
        replayed = zerojax.audit(program, plan=plan, gpu=V100)
        found["V100_step_ms"] = round(1e3 * replayed.step_seconds, 1)
        found["V100_fits"] = replayed.memory.peak < V100.usable
    return found


def bytes_by_count(name):
    """Returns a preset's state on each device, as a multiple of its share of the logical bytes."""
    found = {}
    for count in COUNTS:
        per_host = next(n for n in (8, 6, 4) if count % n == 0)
        mesh = zerojax.aot.mesh(f"{count}xH100", per_host=per_host)
        plan = zerojax.plan(_presets.preset(name).make_state, mesh=mesh)
        logical = sum(leaf.nbytes for leaf in plan.leaves)
        found[str(count)] = round(sum(plan.bytes_per_device().values()) * count / logical, 4)
    return {"row": f"state bytes: {name}"} | found


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    path = pathlib.Path(__file__).with_suffix(".json")
    parser.add_argument("--json", action="store_true", help=f"store in {path.name}")
    parser.add_argument("--only", type=results.expression, default="", help=results.ONLY)
    arguments = parser.parse_args()
    states = {f"state bytes: {name}": name for name in _presets.PRESETS}
    names = [*BY_NAME, *states]
    kept = results.Results(path if arguments.json else None, names, figures.versions())
    print(figures.head())
    for name in results.chosen(arguments.only, names):
        if name in states:
            row = bytes_by_count(states[name])
            print(row, flush=True)
        else:
            try:
                row = measured(BY_NAME[name])
            except (jax.errors.JaxRuntimeError, ValueError) as error:
                row = {"row": name, "refused": str(error).splitlines()[0][:160]}
                print(row, flush=True)
            else:
                print(figures.shown(row), *row["findings"], sep="\n    ", flush=True)
        kept.put(name, row)


if __name__ == "__main__":
    main()
