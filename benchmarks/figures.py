"""The figures of a program compiled on a machine without GPUs.

`main` is the command line of rivals that need an environment of their own.
"""

import argparse
import importlib.metadata
import os
import pathlib

# jax reads these when it is imported, and so does XLA's plugin: import this module before both.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
import results

import zerojax
from zerojax._features import xla_options as _xla_options
from zerojax.tools._forecast import presets as _presets

HERE = pathlib.Path(__file__).parent
MODEL, GPUS, ROWS_PER_GPU = _presets.preset("7.5b"), "64xH100", 4
SCATTER_ONE = (_xla_options.COMBINE_SCATTERS, 1)  # helps most rivals
FLAGS = ((), (SCATTER_ONE,))
COLUMNS = ("row", "step_ms", "exposed_ms", "matmul_share", "wire_gib", "state_gib", "temp_gib",
           "peak_gib")  # fmt: skip


def figures(name, program, plan=None, accumulate=1):
    """Returns the costs of a step, from its program and, for a step of zerojax, its plan."""
    report = zerojax.audit(program, plan=plan, accumulate=accumulate)
    gib = lambda count: round(count / 2**30, 3)
    all_reduces = [t.wire_bytes for t in report.traffic if t.kind == "all-reduce"]
    slow = [t for t in report.traffic if t.loops and not t.asynchronous and t.kind == "all-gather"]
    matmuls = report.replay.flops / report.gpu.rates.flops
    return {
        "row": name,
        "step_ms": round(1e3 * report.step_seconds, 1),
        "exposed_ms": round(1e3 * report.exposed_seconds, 1),
        "matmul_share": round(matmuls / report.step_seconds, 3),
        "wire_gib": gib(report.wire_bytes),
        "largest_all_reduce_bytes": round(max(all_reduces, default=0)),
        "synchronous_gathers_in_loops": sum(t.trips for t in slow),
        "state_gib": gib(report.memory.peak - report.memory.temporary),
        "temp_gib": gib(report.memory.temporary),
        "peak_gib": gib(report.memory.peak),
        "findings": [] if plan is None else report.findings(),
    }


def head():
    return f"JAX {jax.__version__}\n{COLUMNS[0]:88s}" + "".join(f"{c:>13s}" for c in COLUMNS[1:])


def shown(result):
    cells = (str(result[column]) for column in COLUMNS[1:])
    return f"{result['row']:88s}" + "".join(f"{cell:>13s}" for cell in cells)


def compiler_options(flags, device):
    """Returns a row's flags, and the flags for compiling without devices, if XLA knows them."""
    wanted = [(_xla_options.COLLECTIVE_KERNELS, ""), (_xla_options.TIME_KERNELS, False), *flags]
    return {name: value for name, value in wanted if _xla_options.is_known(name, value, device)}


def versions(packages=("jaxlib", "jax-cuda13-pjrt", "flax", "optax")):
    """Returns the versions of the packages that made the figures."""
    return {
        "jax": jax.__version__,
        "packages": {each: importlib.metadata.version(each) for each in packages},
    }


def main(rival, compiled, remats, packages):
    """Compiles `compiled(mesh, remat, options)` for each remat, with and without the flag.

    Prints, and stores with --json, under the versions of these packages.
    """
    parser = argparse.ArgumentParser()
    path = HERE / f"rivals_{rival.lower()}.json"
    parser.add_argument("--json", action="store_true", help=f"store in {path.name}")
    parser.add_argument("--only", type=results.expression, default="", help=results.ONLY)
    arguments = parser.parse_args()
    named = {name: settings for name, *settings in _named(rival, remats)}
    kept = results.Results(path if arguments.json else None, named, versions(packages))
    print(head())
    mesh = zerojax.aot.mesh(GPUS)
    for name in results.chosen(arguments.only, named):
        remat, flags = named[name]
        program = compiled(mesh, remat, compiler_options(flags, mesh.devices.flat[0]))
        row = figures(name, program)
        print(shown(row), flush=True)
        kept.put(name, row)


def _named(rival, remats):
    """Yields every row: its name, as `compiled.py` gives it, its remat and its flags."""
    for remat in remats:
        for flags in FLAGS:
            extra = "".join(f" + {k.removeprefix('xla_gpu_')}={v}" for k, v in flags)
            yield f"7.5b {GPUS} x{ROWS_PER_GPU} {remat}: {rival}{extra}", remat, flags
