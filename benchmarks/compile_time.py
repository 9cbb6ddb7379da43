"""Times to trace and compile steps for GPUs, as ratios: programs alternate in one process.

    python benchmarks/compile_time.py                                    # prints a table
    python benchmarks/compile_time.py --json benchmarks/compile_time.json

The programs are those of `compiled.py`, a 7.5B GPT on 64 H100s. Times are CPU times of all threads
and of the assembler's processes, as multiples of those of plain data parallelism in the same round.
"""

import argparse
import datetime
import json
import os
import statistics

import compiled
import figures
import jax
import results

BASE = compiled.MAIN.rivals("replicated")[0]
ROWS = [
    BASE,
    *compiled.MAIN.rivals(compiled.ANNOTATED, compiled.BY_HAND, compiled.LINEN, compiled.NNX),
    *compiled.MAIN.stages(0, 1, 2, 3),
]


def seconds(row):
    jax.clear_caches()
    before = sum(os.times()[:4])
    compiled.compiled(row)
    return sum(os.times()[:4]) - before


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=results.file)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    times = {row: [] for row in ROWS}
    for turn in range(args.rounds):
        for row in ROWS:
            times[row].append(seconds(row))
            print(f"round {turn + 1}: {row.name:60}{times[row][-1]:8.1f}", flush=True)
    rows = []
    for row in ROWS:
        ratios = [a / b for a, b in zip(times[row], times[BASE], strict=True)]
        spread = [round(min(ratios), 2), round(max(ratios), 2)]
        rows.append({"row": row.name, "time": round(statistics.median(ratios), 2), "range": spread})
        print(f"{row.name:60}{rows[-1]['time']:6.2f}   {spread}", flush=True)
    if args.json:
        record = {**figures.versions(), "date": str(datetime.date.today()), "rows": rows}
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
