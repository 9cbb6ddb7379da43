"""Times to trace and compile steps for GPUs, as ratios: programs alternate in one process.

    python benchmarks/compile_time.py                                    # prints a table
    python benchmarks/compile_time.py --json benchmarks/compile_time.json

A 7.5B GPT, its layers in a scan or in a Python loop, on 64 and on 8 H100s; and a small one, whose
loop has 300 parameters. Times are CPU times of all threads and of the assembler's processes, as
multiples of those of plain data parallelism with the same layers on the same GPUs, in the same
round.
"""

import argparse
import dataclasses
import datetime
import json
import os
import statistics

import compiled
import figures
import jax
import results

REPLICATED = "replicated"
PARTS = ("trace", "XLA", "assembler")
EIGHT = dataclasses.replace(compiled.MAIN, gpus="8xH100")
LOOP = dataclasses.replace(compiled.MAIN, model="7.5b loop")
SMALL = dataclasses.replace(EIGHT, model="small loop")
ROWS = [
    *compiled.MAIN.rivals(
        REPLICATED, compiled.ANNOTATED, compiled.BY_HAND, compiled.LINEN, compiled.NNX
    ),
    *compiled.MAIN.stages(0, 1, 2, 3),
    dataclasses.replace(compiled.MAIN, moments="int8"),
    *(
        row
        for setting in (EIGHT, LOOP, SMALL)
        for row in (*setting.rivals(REPLICATED, compiled.ANNOTATED), setting)
    ),
]


def seconds(row):
    """Returns the CPU seconds of each part."""
    jax.clear_caches()
    start = os.times()
    lowered, options, _ = compiled.traced(row)
    between = os.times()
    lowered.compile(compiler_options=options or None)
    end = os.times()
    return (
        sum(between[:4]) - sum(start[:4]),
        sum(end[:2]) - sum(between[:2]),
        sum(end[2:4]) - sum(between[2:4]),
    )


def setting(name):
    return name.rpartition(": ")[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=results.file)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", type=results.expression, default="", help=results.ONLY)
    args = parser.parse_args()
    named = {row.name: row for row in ROWS}
    times = {name: [] for name in results.chosen(args.only, named)}
    for turn in range(args.rounds):
        for name, spent in times.items():
            spent.append(seconds(named[name]))
            print(f"round {turn + 1}: {name:60}{spent[-1]}", flush=True)
    rows = []
    for name, spent in times.items():
        wholes = [sum(parts) for parts in times[f"{setting(name)}: {REPLICATED}"]]
        ratios = [sum(parts) / whole for parts, whole in zip(spent, wholes, strict=True)]
        shares = [
            statistics.median(part) / statistics.median(wholes) for part in zip(*spent, strict=True)
        ]
        rows.append({
            "row": name,
            "time": round(statistics.median(ratios), 2),
            "range": [round(min(ratios), 2), round(max(ratios), 2)],
            **{part: round(share, 2) for part, share in zip(PARTS, shares, strict=True)},
        })  # fmt: skip
        print(*rows[-1].values(), flush=True)
    if args.json:
        record = {**figures.versions(), "date": str(datetime.date.today()), "rows": rows}
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
