"""Steps that others measured and published, compiled for the same GPUs and replayed.

python benchmarks/published.py              # replays the stored schedules and compares
python benchmarks/published.py --json       # stores the comparison, for docs/measured.md
python benchmarks/published.py --compile    # first compiles rows without a stored schedule

The model, sequence, batch, checkpointing, dtypes and mesh follow the source; the step is this
library's (`published_maxtext.py` compiles MaxText's own). Attention is cuDNN's, which compiles
without a GPU. XLA's rematerialization is off, as in the published runs.

The benchmark fits one constant for each generation of GPUs, the share of the data sheet's FLOP/s
that matmuls reach, to every other row. The rows between them show its error. Rows of PyTorch are
other programs for the same models: the benchmark compares them, but fits nothing to them if there
are rows of JAX. Nothing is fitted to the rows of `later` either: they came after the constants.
"""

import argparse
import dataclasses
import datetime
import functools
import io
import itertools
import json
import pathlib
import re
import statistics
import sys
import tarfile

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import figures  # before JAX: it says what JAX may look for
import published_models as models

import zerojax
from zerojax.tools._forecast import presets as _presets
from zerojax.tools._hlo import gpus as _gpus, timeline as _timeline
from zerojax.tools._hlo.module import Module

STORED = figures.HERE / "published.json"
SCHEDULES = figures.HERE / "published.tar.xz"
OPTIONS = {"xla_disable_hlo_passes": "rematerialization"}

DGXC = "NVIDIA/dgxc-benchmarking maxtext/README_70b.md"
LLAMA3, LLAMA2 = f"{DGXC} at 85380ff", f"{DGXC} at 143b90d"
TOOLBOX = "NVIDIA/JAX-Toolbox docs/frameworks/maxtext/README.md at bcbbfa5"
PAX = "NVIDIA/JAX-Toolbox rosetta/rosetta/projects/pax/README.md at 8b3ce01"
A3 = "AI-Hypercomputer/maxtext src/maxtext/configs/gpu/a3/llama_2_7b/README.md at e591f30"
RECIPES = "AI-Hypercomputer/gpu-recipes training"
FOUNDRY = "mosaicml/llm-foundry scripts/train/benchmarking/README.md at 8c8dd48"
TITAN = "pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md at b5bcd76"
KEMPNER = "KempnerInstitute/KempnerForge benchmarks/mfu_scaling/mfu_scaling.md at 5666d0d"

fused = functools.partial(dataclasses.replace, attention="cudnn")
LLAMA3_70B = fused(_presets.preset("llama-70b"), tokens=8192)
LLAMA2_70B = fused(_presets.preset("llama-70b"), tokens=4096, vocab=32000)
LLAMA3_8B = fused(_presets.preset("llama-8b"), tokens=8192)
LLAMA2_7B = _presets.Llama(32, 4096, 32, 32000, 4096, kv_heads=32, inner=11008, attention="cudnn")
LLAMA2_13B = dataclasses.replace(
    LLAMA2_7B, layers=40, hidden=5120, heads=40, kv_heads=40, inner=13824
)
SAVE_QKV, SAVE_ATTENTION = "q+k+v", "q+k+v+attended+proj"
SAVE_ALL_BUT_WIDE, DOTS = "q+k+v+proj+down", "dots"
SAVE_ALL_BUT_MLP, SAVE_ALL_OF_EXPERTS = "q+k+v+proj", "q+k+v+proj+gate+up+routed"


def gpt(layers, hidden, heads, vocab=50368, tokens=2048):
    return _presets.Gpt(layers, hidden, heads, vocab, tokens, attention="cudnn")


MPT = {
    "7b": gpt(32, 4096, 32),
    "13b": gpt(40, 5120, 40),
    "30b": gpt(48, 7168, 56),
    "70b": gpt(80, 8192, 64),
}
PAX_5B = gpt(24, 4096, 32, 50304)
MIXTRAL = models.Masked(**vars(fused(_presets.preset("mixtral-8x7b"), tokens=4096)))
EXPERTS = "blocks/(gate|up|down)"

ORIGIN = re.compile(r"\d+ [\"{]|(File|Function|Stack)\w+$")  # tables of files, functions, frames
METADATA = re.compile(r", metadata=\{[^}]*\}")


@dataclasses.dataclass(frozen=True)
class Row:
    """A published step, by its source's description."""

    name: str
    model: _presets.Gpt
    gpus: str
    rows: int  # sequences of each GPU
    remat: str
    seconds: float
    source: str
    shard: int = 0  # GPUs that share one copy; 0 for all
    network: float = 0  # GB/s of a GPU's network card; 0 for the data sheet's
    per_host: int = 8
    accumulate: int = 1
    reduce: str = "bfloat16"
    combine: tuple[int, int, int] = (0, 0, 0)  # MiB: all-gathers, all-reduces, reduce-scatters
    scan: bool = True
    param: str | None = None  # the dtype of parameters, if not float32
    experts: int = 1  # GPUs that share the experts of one copy
    sequence: int = 1  # GPUs that share a sequence
    options: tuple = ()  # of XLA

    @property
    def count(self):
        return _gpus.parse_count(self.gpus)[0]

    @property
    def gpu(self):
        return _gpus.parse_count(self.gpus)[1]

    @property
    def generation(self):
        return {8: "Ampere", 9: "Hopper"}[self.gpu.capability[0]]


def at_speed(tokens_per_second, row):
    """Completes a row whose source states the tokens per second of each GPU."""
    tokens = row.rows * row.accumulate * row.model.tokens / row.sequence
    return dataclasses.replace(row, seconds=round(tokens / tokens_per_second, 3))


LARGE = {  # NVIDIA's: the model, its remat, the source, and seconds by GPUs
    "Llama 2 70B": (
        LLAMA2_70B,
        SAVE_ALL_BUT_WIDE,
        LLAMA2,
        {64: 6.999, 128: 7.072, 256: 7.153, 512: 7.091, 1024: 7.084, 2048: 7.066},
    ),
    "Llama 3 70B": (
        LLAMA3_70B,
        SAVE_QKV,
        LLAMA3,
        {128: 15.563, 256: 15.444, 512: 15.519, 1024: 15.603, 2048: 15.898},
    ),
}


def of_jax():
    for name, (model, remat, source, times) in LARGE.items():
        for count, seconds in times.items():
            shard, scatters = (count, 32) if count <= 256 else (128, 16)
            yield Row(f"MaxText {name}, {count} H100", model, f"{count}xH100", 2, remat, seconds,
                      source, shard=shard, combine=(2048, 2048, scatters))  # fmt: skip
    large = dict(shard=128, combine=(2048, 2048, 16))
    yield Row("MaxText Llama 3.1 70B, 256 H200", LLAMA3_70B, "256xH200", 2, SAVE_ATTENTION, 15.516,
              f"{RECIPES}/a3ultra/llama3-1-70b at 2e1fd5e", **large)  # fmt: skip
    unrolled = dict(combine=(1024, 1024, 128), scan=False)
    yield Row("MaxText Llama 2 7B, 8 H100", LLAMA2_7B, "8xH100", 2, DOTS, 0.721, TOOLBOX,
              **unrolled)  # fmt: skip
    cloud = functools.partial(Row, remat=DOTS, shard=8, reduce="float32", scan=False)
    reduces = {8: 128, 16: 64, 32: 512, 64: 1024, 128: 1024}
    for count, seconds in {8: 1.454, 16: 1.695, 32: 1.757, 64: 1.749, 128: 1.907}.items():
        combine = (128, reduces[count], 128 if count == 128 else 64)
        yield cloud(f"MaxText Llama 2 7B, {count} H100 of A3", LLAMA2_7B, f"{count}xH100", 4,
                    seconds=seconds, source=A3, network=12.5, combine=combine)  # fmt: skip
    yield cloud("MaxText Llama 2 7B, 256 H100 of A3 Mega", LLAMA2_7B, "256xH100", 4, seconds=1.5,
                source=f"{RECIPES}/a3mega/llama-2-7b at d57d222", network=25,
                combine=(1024, 1024, 128))  # fmt: skip
    yield Row("PAX GPT 5B, 256 H100", PAX_5B, "256xH100", 8, DOTS, 1.236, PAX)
    yield Row("PAX GPT 5B, 256 A100", PAX_5B, "256xA100-80GB", 8, DOTS, 2.852, PAX)


FLOAT8 = {  # NVIDIA's too, likewise
    "Llama 2 70B": (LLAMA2_70B, SAVE_ALL_BUT_MLP, LLAMA2, {64: 4.324, 1024: 5.062}),
    "Llama 3 70B": (LLAMA3_70B, SAVE_QKV, LLAMA3, {128: 9.074, 1024: 9.483}),
}
# Mixtral takes more than the 80% of memory that XLA's scheduler allows here, where it would then
# overlap nothing. It allowed the published run 90%.
MORE_MEMORY = (("xla_gpu_memory_limit_slop_factor", 150),)


def later():
    """Yields steps of JAX that were forecast before anything could be fitted to them."""
    for name, (model, remat, source, times) in FLOAT8.items():
        float8 = functools.partial(Row, model=models.Float8(**vars(model)), rows=2, remat=remat)
        for count, seconds in times.items():
            named = {"name": f"MaxText {name} in float8, {count} H100", "gpus": f"{count}xH100"}
            yield float8(**named, seconds=seconds, source=source, shard=min(count, 128))
    shared = {"shard": 16, "experts": 8, "param": "bfloat16", "options": MORE_MEMORY}
    name, source = "MaxText Mixtral 8x7B, 256 H200", f"{RECIPES}/a3ultra/mixtral-8x7b at 611d8ff"
    yield Row(name, MIXTRAL, "256xH200", 5, SAVE_ALL_OF_EXPERTS, 3.437, source, **shared)


FOUNDRY_ROWS = (  # size, GPUs, sequences, tokens/s of each GPU
    ("13b", "128xH100", 16, 5080),
    ("30b", "32xH100", 14, 2308),
    ("30b", "128xH100", 14, 2199),
    ("70b", "64xH100", 8, 1039),
    ("70b", "512xH100", 8, 1007),
    ("7b", "32xA100-80GB", 18, 3725),
    ("70b", "64xA100-80GB", 8, 410),
)


def of_pytorch():
    """Yields the steps of PyTorch that recompute most of a layer: for the others zerojax would keep
    less."""
    for size, gpus, rows, speed in FOUNDRY_ROWS:
        name = f"llm-foundry MPT {size}, {gpus.replace('x', ' ').removesuffix('-80GB')}"
        network = 25 if "A100" in gpus else 0
        row = Row(name, MPT[size], gpus, rows, "full", 0, FOUNDRY, network=network)
        yield at_speed(speed, row)
    kempner = functools.partial(Row, model=dataclasses.replace(LLAMA3_8B, tokens=4096),
                                remat="full", seconds=0, source=KEMPNER, per_host=4)  # fmt: skip
    yield at_speed(10471, kempner("KempnerForge Llama 8B, 1 H200", gpus="1xH200", rows=2,
                                  accumulate=4))  # fmt: skip
    yield at_speed(9746, kempner("KempnerForge Llama 8B, 4 H200", gpus="4xH200", rows=4,
                                 accumulate=2))  # fmt: skip
    for count, speed in {8: 6667, 128: 6514}.items():
        yield at_speed(speed, Row(f"torchtitan Llama 3.1 8B, {count} H100 of 500 W", LLAMA3_8B,
                                  f"{count}xH100", 2, DOTS, 0, TITAN))  # fmt: skip
    for tokens, (sequence, speed) in {32768: (1, 3890), 262144: (8, 548)}.items():
        name = f"torchtitan Llama 3.1 8B in float8, {tokens >> 10}k tokens, 8 H100 of 500 W"
        model = models.Float8(**vars(dataclasses.replace(LLAMA3_8B, tokens=tokens)))
        row = Row(name, model, "8xH100", 1, "full", 0, TITAN, sequence=sequence)
        yield at_speed(speed, row)


JAX = {row.name: row for row in (*of_jax(), *later())}
ROWS = JAX | {row.name: row for row in of_pytorch()}
# Every other row of JAX; for A100s, where JAX has only one row, every other row of all.
FITTED = {
    *[row.name for row in of_jax()][::2],
    *[name for name in ROWS if ROWS[name].generation == "Ampere"][::2],
}


def compiled(row):
    """Compiles a row's step, and returns the text of its schedule."""
    shard = row.shard or row.count
    sizes = {"replica": row.count // shard, "data": shard // row.experts // row.sequence}
    sizes |= {"expert": row.experts, "sequence": row.sequence}
    sizes = {axis: size for axis, size in sizes.items() if size > 1} or {"data": 1}
    mesh = zerojax.aot.mesh(row.gpus, (*sizes.values(),), (*sizes,), per_host=row.per_host)
    groups = dict.fromkeys(("params", "grads", "opt_state"), tuple(sizes)[1:])
    plan = zerojax.plan(
        row.model.make_state,
        stage=3,
        mesh=mesh,
        groups=groups if "replica" in sizes else None,
        experts={"expert": EXPERTS} if "expert" in sizes else None,
        sequence="sequence" if "sequence" in sizes else None,
        precision=zerojax.Precision(compute="bfloat16", param=row.param, reduce=row.reduce),
    )
    loss = functools.partial(row.model.loss, remat=row.remat)
    step = zerojax.train_step(
        loss,
        plan=plan,
        accumulate=row.accumulate,
        schedule=zerojax.Schedule(compiler_options=OPTIONS | dict(row.options)),
    )
    rows = row.rows * row.count * row.accumulate // row.sequence
    batch = zerojax.aot.batch(row.model.batch(rows), plan)
    return step.lower(plan.abstract(), batch).compile().as_text()


# -- schedules, in one archive, because they have much in common


def stored_schedules():
    if not SCHEDULES.exists():
        return {}
    with tarfile.open(SCHEDULES) as archive:
        members = archive.getmembers()
        return {m.name: archive.extractfile(m).read().decode() for m in members}


def store_schedules(texts):
    with tarfile.open(SCHEDULES, "w:xz", preset=9) as archive:
        for name, text in sorted(texts.items()):
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))


def without_origins(text):
    """Drops the origins of instructions (lines of Python, names), which replays do not read."""
    lines = (line for line in text.splitlines() if not ORIGIN.match(line))
    return "\n".join(METADATA.sub("", line) for line in lines)


def compile_missing(names, compiled, of=str):
    """Compiles the rows without a schedule, and stores each at once."""
    texts = stored_schedules()
    for name in (name for name in names if of(name) not in texts):
        texts[of(name)] = without_origins(compiled(ROWS[name]))
        store_schedules(texts)
        print(f"compiled {of(name)}", flush=True)


def by_maxtext(name):
    return f"{name}, its own program"


# -- the comparison


def replayed(module, row, share):
    rates = dataclasses.replace(row.gpu.rates, flops=share * row.gpu.flops)
    if row.network:
        rates = dataclasses.replace(rates, network=row.network * 1e9)
    return _timeline.replay(module, rates, row.per_host).step


def fitted(modules, names):
    """Returns the share of the FLOP/s that fits these rows, by least squares of relative errors.

    Assumes that a step's time is linear in the time of a FLOP, between two shares about the best.
    """
    low, high = 1 / 0.7, 1 / 0.55
    slopes, offsets = [], []
    for name in names:
        row = ROWS[name]
        at_low, at_high = (replayed(modules[name], row, 1 / x) / row.seconds for x in (low, high))
        slope = (at_high - at_low) / (high - low)
        slopes.append(slope)
        offsets.append(1 - at_low + slope * low)
    return sum(s * s for s in slopes) / sum(map(lambda s, o: s * o, slopes, offsets))


def compared():
    """Replays every stored schedule with the fitted constants and with the library's."""
    texts = stored_schedules()
    modules = {name: Module(text) for name, text in texts.items()}
    names = [name for name in ROWS if name in modules]
    fits = {}
    for generation in ("Hopper", "Ampere"):
        chosen = [n for n in FITTED if n in modules and ROWS[n].generation == generation]
        fits[generation] = round(fitted(modules, chosen), 4)
    return {"fitted": fits, "rows": [one(texts, modules, name, fits) for name in names]}


def one(texts, modules, name, fits):
    row, own = ROWS[name], modules.get(by_maxtext(name))
    error = lambda seconds: round(100 * (seconds / row.seconds - 1), 1)
    library = row.gpu.rates.flops / row.gpu.flops
    forecast = replayed(modules[name], row, library)
    return {
        "row": name,
        "source": row.source,
        "use": "fit" if name in FITTED else "held out" if name in JAX else "PyTorch",
        "measured": row.seconds,
        "forecast": round(forecast, 3),
        "error": error(forecast),
        "error_fitted": error(replayed(modules[name], row, fits[row.generation])),
        "error_of_its_own_program": own and error(replayed(own, row, library)),
        "peak_gib": round(zerojax.audit(texts[name]).memory.peak / 2**30, 1),
        "usable_gib": round(row.gpu.usable / 2**30, 1),
    }


def summary(found, use="held out", error="error_fitted"):
    """Returns the mean and the largest error of rows, and how many pairs are in the right order.

    A pair counts if its published steps differ by more than 10%.
    """
    rows = [row for row in found["rows"] if row["use"] == use]
    errors = [abs(row[error]) for row in rows]
    pairs = [
        (a["measured"] < b["measured"]) == (told(a, error) < told(b, error))
        for a, b in itertools.combinations(rows, 2)
        if abs(a["measured"] / b["measured"] - 1) > 0.1
    ]
    return {
        "rows": len(rows),
        "mean": round(statistics.mean(errors), 1),
        "worst": max(errors),
        "pairs": len(pairs),
        "pairs_in_order": sum(pairs),
    }


def told(row, error):
    """Returns the forecast of a row, in seconds."""
    return row["measured"] * (1 + row[error] / 100)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help=f"store in {STORED.name}")
    parser.add_argument("--compile", action="store_true", help="compile rows without a schedule")
    arguments = parser.parse_args()
    if arguments.compile:
        compile_missing(ROWS, compiled)
    found = compared()
    for row in found["rows"]:
        told = f"{row['measured']:8.3f} {row['forecast']:8.3f} {row['error']:+6.1f}%"
        print(f"{row['row']:45s} {row['use']:9s} {told}, fitted {row['error_fitted']:+6.1f}%")
    print("shares of the data sheet's FLOP/s:", found["fitted"])
    found["summary"] = {
        error: {use: summary(found, use, error) for use in ("fit", "held out", "PyTorch")}
        for error in ("error", "error_fitted")
    }
    print(json.dumps(found["summary"], indent=1))
    if arguments.json:
        made_by = figures.versions() | {"date": str(datetime.date.today())}
        STORED.write_text(json.dumps(made_by | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
