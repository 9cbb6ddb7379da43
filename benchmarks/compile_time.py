"""Times to trace and compile steps for GPUs, as ratios: programs alternate in one process.

    python benchmarks/compile_time.py                                    # prints a table
    python benchmarks/compile_time.py --json benchmarks/compile_time.json

A 7.5B GPT, its layers in a scan or in a Python loop, on 64 and on 8 H100s. Times are CPU times of
all threads and of the assembler's processes, as multiples of those of plain data parallelism with
the same layers on the same GPUs, in the same round.
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
LOOP = dataclasses.replace(compiled.MAIN, model="7.5b loop")
ROWS = [
    *compiled.MAIN.rivals(
        REPLICATED, compiled.ANNOTATED, compiled.BY_HAND, compiled.LINEN, compiled.NNX
    ),
    *compiled.MAIN.stages(0, 1, 2, 3),
    *(
        row
        for setting in (dataclasses.replace(compiled.MAIN, gpus="8xH100"), LOOP)
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
    args = parser.parse_args()
    times = {row.name: [] for row in ROWS}
    for turn in range(args.rounds):
        for row in ROWS:
            times[row.name].append(seconds(row))
            print(f"round {turn + 1}: {row.name:60}{times[row.name][-1]}", flush=True)
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
