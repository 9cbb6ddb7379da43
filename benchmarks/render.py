"""Writes the stored results into their pages, between the marks that name them."""

import argparse
import functools
import itertools
import json
import pathlib
import re
import sys

import render_gpu
import render_paper
import render_state

HERE = pathlib.Path(__file__).parent
DOCS = HERE.parent / "docs"
PAGES = tuple(
    DOCS / f"{name}.md"
    for name in ("measured", "groups", "loss", "paper", "stages", "which_stage", "wires")
) + (HERE / "README.md",)
MEMORY_GIB = 80e9 / 2**30  # of the GPUs in the tables
FLAGS = {
    "reduce_scatter_combine_threshold_bytes=1": "scatter",
    "enable_latency_hiding_scheduler=True": "scheduler",
}


def compiled() -> str:
    """Renders compiled programs, one table per model: the newest JAX, and step times on others."""
    newest, *older = (
        json.loads(path.read_text()) for path in sorted(HERE.glob("compiled_jax*.json"))[::-1]
    )
    dates = [f"{result['jax']} ({_dates(result)})" for result in (newest, *older)]
    lines = [f"JAX {dates[0]}" + "".join(f"; the last column JAX {d}" for d in dates[1:]) + ".", ""]
    for path in sorted(HERE.glob("rivals_*.json")):
        _put_beside(newest["rows"], json.loads(path.read_text())["rows"])
    others = [{row["row"]: row for row in result["rows"]} for result in older]
    header = ["program", "step", "exposed", "efficiency", "sent", "peak"]
    header += [f"step, {result['jax']}" for result in older]
    for model, rows in itertools.groupby(newest["rows"], lambda row: row["row"].split()[0]):
        lines += [f"**{model}**", "", _line(header), "|---|" + "---:|" * (len(header) - 1)]
        for setting, programs in itertools.groupby(rows, lambda row: _parts(row)[0]):
            lines.append(_line([f"*{setting}*", *[""] * (len(header) - 1)]))
            for row in programs:
                found = [rows.get(row["row"]) for rows in others]
                steps = [f"{other['step_ms']:.0f} ms" if other else "—" for other in found]
                lines.append(_line([*_cells(row), *steps]))
        lines.append("")
    return "\n".join(lines[:-1])


def _put_beside(rows, more):
    """Inserts rows from environments of their own after those of the same setting."""
    setting = lambda row: row["row"].split(": ")[0]
    for row in more:
        same = [i for i, other in enumerate(rows) if setting(other) == setting(row)]
        rows.insert(same[-1] + 1, row)


def _parts(row) -> tuple[str, str]:
    """Splits '7.5b 64xH100 x4 full: stage 3' into '64xH100 x4 full' and 'stage 3'."""
    setting, program = row["row"].split(": ")
    return setting.split(" ", 1)[1], program


def _cells(row) -> list[str]:
    program = _parts(row)[1]
    for flag, short in FLAGS.items():
        program = program.replace(flag, short)
    ours = program.startswith("stage")
    too_much = ", too much" * (row["peak_gib"] > MEMORY_GIB)
    return [
        f"**{program}**" if ours else program,
        f"{row['step_ms']:.0f} ms",
        f"{row['exposed_ms']:.1f} ms",
        f"{1 - row['exposed_ms'] / row['step_ms']:.1%}",
        f"{row['wire_gib']:.2f} GiB",
        f"{row['peak_gib']:.2f} GiB{too_much}",
    ]


def compile_time() -> str:
    """Renders times to compile, as multiples of plain data parallelism's."""
    stored, parts = _stored("compile_time.json"), ("trace", "XLA", "assembler")

    def layers(row):
        return "loop" if row["row"].split(" ")[1] == "loop" else "scan"

    rows = [
        [
            _parts(row)[1],
            f"{layers(row)}, {row['row'].split(' x4')[0].split(' ')[-1]}",
            f"{row['time']:.2f} ({row['range'][0]:.2f} to {row['range'][1]:.2f})",
            *(f"{row[part]:.2f}" for part in parts),
        ]
        for row in stored["rows"]
    ]
    header = ["program", "layers, GPUs", "trace and compile", *parts]
    return _table(header, rows, {"device": "7.5B, 4 rows a GPU, full remat", **stored})


def first_step() -> str:
    """Renders the times of first and of later steps, as multiples of the replicated ones'."""
    stored = _stored("first_step_cpu.json")
    cells = {(row["program"], row["step"]): row for row in stored["rows"]}
    programs, steps = (list(dict.fromkeys(names)) for names in zip(*cells, strict=True))

    def shown(row):
        low, high = row["range"]
        later = f"{row['later']:.2f}" if "later" in row else "—"
        return [f"{row['time']:.2f} ({low:.2f} to {high:.2f})", later]

    shown_of = lambda program: (shown(cells[program, step]) for step in steps)
    rows = [[program, *itertools.chain(*shown_of(program))] for program in programs]
    header = itertools.chain(*((f"{step}: first", "later") for step in steps))
    return _table(["program", *header], rows, stored)


def step_time(file="step_time_cpu.json") -> str:
    """Renders the step times of all contestants on emulated devices."""
    stored = _stored(file)
    cells = {(row["model"], row["step"]): row for row in stored["rows"]}
    models, steps = (list(dict.fromkeys(names)) for names in zip(*cells, strict=True))

    def shown(model, step):
        row = cells.get((model, step))
        if not row:
            return ["—", "—"]
        low, high = row["quartiles"]
        return [f"{row['time']:.2f} ({low:.2f} to {high:.2f})", f"{row['peak_mib']} MiB"]

    rows = [[step, *(cell for model in models for cell in shown(model, step))] for step in steps]
    header = [what for model in models for what in (f"{model}: time", "peak host memory")]
    calls = f"Calling a step takes {stored['calling a step, of plain jit']:.2f} of plain `jax.jit`."
    return _table(["step", *header], rows, stored) + f"\n\n{calls}"


def memory() -> str:
    """Renders, by stage, the state as a multiple of the formula; temporary and peak MiB."""
    stored = _stored("memory_8xH100.json")
    mib = lambda count: f"{count / 2**20:.0f}"
    rows = [
        [row["model"], row["optimizer"]]
        + [
            f"{s['state'] / s['formula']:.3f} / {mib(s['temporary'])} / {mib(s['peak'])}"
            for s in row["stages"]
        ]
        for row in stored["rows"]
    ]
    stages = [f"stage {stage}" for stage in range(4)]
    return _table(["model", "optimizer", *stages], rows, {"device": stored["gpus"], **stored})


def scaling() -> str:
    """Renders times to plan, trace and compile, as multiples of `jax.jit`'s."""
    stored = _stored("scaling_cpu.json")
    rows = [
        [f"{row['count']} {KINDS[row['what']]}"]
        + [f"{row[k]:.2f}" if k in row else "—" for k in ("plan", "trace", "compile")]
        for row in stored["rows"]
    ]
    return _table(["", "plan", "trace", "compile"], rows, stored)


def largest() -> str:
    """Renders the largest model, and how long its step takes: by the bytes of its state where
    nothing is in host memory, and by that memory."""
    stored = _stored("largest.json")
    on_gpus = _table(*render_state.largest(stored["rows"]), {"device": "GPUs", **stored})
    return f"{on_gpus}\n\n{_rows(*render_state.largest_with_host(stored['rows']))}"


def long_context() -> str:
    """Renders sequences that are split, beside code by hand and annotations."""
    return _rows(*render_state.long_context(_stored("long_context.json")["rows"]))


def longest() -> str:
    """Renders the longest sequences that fit."""
    return _rows(*render_state.longest(_stored("longest.json")["rows"]))


def state_bytes() -> str:
    """Renders bytes a parameter between steps, and what a step takes in all."""
    return _rows(*render_state.state_bytes(_stored("state_bytes.json")["rows"]))


def machines() -> str:
    """Renders what models some machines train."""
    rows = []
    for row in _stored("machines.json")["rows"]:
        model, _, _, *options = row["arguments"].split()
        stage = options[options.index("--stages") + 1]
        offload = ", state in host memory" if "--offload" in options else ""
        peak = f"{row['peak_gib']:.1f} of {row['usable_gib']:.1f} GiB"
        size = model.upper() + offload
        rows.append([row["row"], size, stage, peak, f"{row['tokens_per_s']:,}"])
    header = ["you have", "you train, for example", "stage", "peak of a GPU", "tokens/s"]
    return _rows(header, rows)


GROUPS = {
    "flat": "flat ZeRO-3",
    "HSDP": "HSDP",
    "P, G in the node": "AMSP",
    "P in the node": "hpZ",
}
SEVERAL = ("flat", "P, G in the node", "P in the node")
LAYERS = {
    "accumulate=8": "`accumulate=8`",
    'accumulate=8, order="layers"': '`accumulate=8, order="layers"`',
    'accumulate=8, order="layers", activations="host"': 'the same and `activations="host"`',
    "one batch of 32 rows": "one batch of 32 rows, `accumulate=1`",
}
HPZ = '`regather="gpu"`'
WIRES = {
    "exact": "exact",
    "exact, kept in the node": f"exact, {HPZ}",
    "weights int8, kept in the node": f"weights int8, {HPZ}",
    "weights int8, gradients int8, kept in the node": f"weights and gradients int8, {HPZ}",
    "weights int8, gradients int4, kept in the node": f"weights int8, gradients int4, {HPZ}",
}


def groups() -> str:
    """Renders steps with groups by the speed of the network."""
    once = {f"{group}, accumulate 1": name for group, name in GROUPS.items()}
    several = {f"{g}, accumulate 8": f"{GROUPS[g]}, 8 microbatches" for g in SEVERAL}
    return _by_speed("groups.json", once, several)


def layered() -> str:
    """Renders microbatches one after another, layer by layer and as one batch, by the speed of the
    network."""
    return _by_speed("layered.json", LAYERS)


def wires() -> str:
    """Renders hpZ and quantization by the speed of the network."""
    rows = {f"7.5b 64xH100 x4: {way}": name for way, name in WIRES.items()}
    return _by_speed("wires.json", rows)


def _by_speed(file, *parts: dict[str, str]) -> str:
    """Renders rows by the speed of network cards, under the names in `parts`. The fastest of a part
    is bold."""
    stored = {row["row"]: row for row in _stored(file)["rows"]}
    first = stored[next(iter(parts[0]))]
    speeds = [key for key in first if key.startswith("step_ms at ") and " 25 " not in key]
    lines = []
    for part in parts:
        found = {name: stored[row] for row, name in part.items()}
        least = {key: min(row[key] for row in found.values()) for key in speeds}
        for name, row in found.items():
            steps = [f"{row[k]:.0f}" for k in speeds]
            bold = [
                f"**{s}**" if row[k] == least[k] else s for s, k in zip(steps, speeds, strict=True)
            ]
            lines.append([name, *bold, f"{row['network_gib']:.2f}", f"{row['temp_gib']:.1f}"])
    cards = [key.split()[2] for key in speeds]
    return _rows(["", *cards, "GiB between nodes", "temporary GiB"], lines)


USES = {
    "held out": "of JAX, fitted to nothing",
    "fit": "of JAX, that the rates were fitted to",
    "PyTorch": "of PyTorch",
}


def choices() -> str:
    """Renders how often `--choose` leaves out a faster configuration, and how much faster."""
    stored = json.loads((HERE / "choices.json").read_text())
    said = [f"JAX {stored['jax']} ({_dates(stored)})."]
    for kind, name in (("", "exact numbers"), ("_quantized", "quantization")):
        slower = [row[f"slower{kind}"] for row in stored["rows"]]
        many = f"{sum(map(bool, slower))} of {len(slower)}, by at most {max(slower):.1%}"
        said.append(f"With {name}, a faster configuration was left out in {many}.")
    return "\n".join(said)


SHOWN_PUBLISHED = (
    "MaxText Llama 2 70B, 512 H100",
    "MaxText Mixtral 8x7B, 256 H200",
    "MaxText Llama 2 70B in float8, 1024 H100",
    "PAX GPT 5B, 256 H100",
)


def published() -> str:
    """Renders published steps of JAX that nothing was fitted to, with their replays."""
    rows = [
        [
            row["row"],
            f"{row['measured']:.3f} s",
            f"{row['forecast']:.3f} s",
            f"{row['error']:+.1f}%",
            f"{row['peak_gib']:.1f} of {row['usable_gib']:.1f}",
        ]
        for row in _stored("published.json")["rows"]
        if row["use"] == "held out" and row["row"] in SHOWN_PUBLISHED
    ]
    return _rows(["step", "measured", "forecast", "error", "peak, GiB"], rows)


def published_summary() -> str:
    """Renders the errors over published steps."""
    stored = _stored("published.json")
    rows = [
        [kind, str(part["rows"]), f"{part['mean']}%", f"{part['worst']}%",
         f"{part['pairs_in_order']} of {part['pairs']}"]
        for use, kind in USES.items()
        for part in [stored["summary"]["error"][use]]
    ]  # fmt: skip
    header = ["steps", "how many", "mean error", "largest", "pairs in order"]
    return f"{_rows(header, rows)}\n\nJAX {stored['jax']} ({stored['date']})."


def paper(name: str) -> str:
    """Renders a table or figure of the ZeRO paper beside the compiled rows."""
    rows = {row["row"]: row for row in _stored("paper.json")["rows"]}
    return _rows(*render_paper.TABLES[name](rows))


def gpu() -> str:
    """Renders measurements on real GPUs, one line per model, with empty cells if there are none."""
    tables = []
    for stored in _on_gpus():
        cases = stored["cases"]
        tables.append(_table(*render_gpu.beside_optax(cases), stored))
        if "to_device" in cases.get("copies", {}):
            told, *with_host = render_gpu.with_host(cases)
            tables += [told, _rows(*with_host)]
        header, rows = render_gpu.more(cases)
        tables += [_rows(header, rows)] * bool(rows)
    return "\n\n".join(tables) or _rows(*render_gpu.beside_optax({}))


WANTED = ("2 x Tesla T4", "NVIDIA H200", "8 x NVIDIA H100 80GB HBM3")


def ways() -> str:
    """Renders steps on all GPUs of a machine beside annotations, and names machines without."""
    found = {stored["device"]: (*render_gpu.ways(stored["cases"]), stored) for stored in _on_gpus()}
    tables = [_table(header, rows, stored) for header, rows, stored in found.values() if rows]
    missing = [name for name in WANTED if name not in found or not found[name][1]]
    if missing:
        tables.append(_rows(["GPUs", "measured"], [[name, "not yet"] for name in missing]))
    return "\n\n".join(tables)


def _on_gpus():
    return [json.loads(path.read_text()) for path in sorted(HERE.glob("gpu_*.json"))]


KINDS = {
    "scanned": "layers in a scan",
    "unrolled": "layers unrolled",
    "many_leaves": "arrays",
}


def _stored(name):
    return json.loads((HERE / name).read_text())


def _table(header, rows, stored) -> str:
    made_by = f"{stored['device']}, JAX {stored['jax']} ({_dates(stored)})."
    return f"{made_by}\n\n{_rows(header, rows)}"


def _dates(stored) -> str:
    """Returns the date of the file, or the first and last dates of its rows."""
    dates = [stored["date"]] if "date" in stored else [row["date"] for row in stored["rows"]]
    return " to ".join(sorted({min(dates), max(dates)}))


def _rows(header, rows) -> str:
    return "\n".join([_line(header), "|---|" + "---:|" * (len(header) - 1), *map(_line, rows)])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def rendered(text: str) -> str:
    mark = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- /\2 -->)", re.DOTALL)
    return mark.sub(lambda m: m[1] + TABLES[m[2]]() + "\n" + m[3], text)


TABLES = {
    "compiled": compiled,
    "compile_time": compile_time,
    "first_step": first_step,
    "step_time": step_time,
    "step_time_packages": functools.partial(step_time, "step_time_packages_cpu.json"),
    "scaling": scaling,
    "memory": memory,
    "gpu": gpu,
    "ways": ways,
    "largest": largest,
    "machines": machines,
    "state_bytes": state_bytes,
    "groups": groups,
    "layered": layered,
    "long_context": long_context,
    "longest": longest,
    "wires": wires,
    "choices": choices,
    "published": published,
    "published_summary": published_summary,
    **{name: functools.partial(paper, name) for name in render_paper.TABLES},
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only fail if a page is out of date")
    arguments = parser.parse_args()
    for page in PAGES:
        text = page.read_text()
        if not arguments.check:
            page.write_text(rendered(text))
        elif rendered(text) != text:
            sys.exit(f"{page.name} is older than the results. Run python benchmarks/render.py.")
