"""Kills a run with SIGKILL at random moments, many times. It must end like an undisturbed run.

    python benchmarks/kill.py --processes 2 --kills 20 --log kill.log

The script kills one process (the others must end by themselves) or all of them, and starts the run
again. The run must resume from a complete checkpoint, no older than the last one that it knew to be
complete. In the end its state must equal that of an undisturbed run, bit for bit.
"""

import argparse
import pathlib
import random
import shutil
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from tests.support.processes import Run, completed

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--processes", type=int, default=2)
parser.add_argument("--devices", type=int, default=2, help="emulated, of each process")
parser.add_argument("--kills", type=int, default=20)
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--log", type=pathlib.Path)
DIM, EVERY, BOUND = 256, 2, 60.0


def main():
    args = parser.parse_args()
    dice = random.Random(args.seed)
    root = pathlib.Path(tempfile.mkdtemp())
    lines = []

    def say(line):
        print(line, flush=True)
        lines.append(line)

    def arguments(name):
        pairs = {
            "directory": root / name, "steps": args.steps, "every": EVERY, "dim": DIM,
            "devices": args.devices, "step-seconds": 0.03,
        }  # fmt: skip
        return [str(x) for key, value in pairs.items() for x in (f"--{key}", value)]

    want = completed(args.processes, root / "logs", *arguments("undisturbed")).digest()
    say(f"{args.processes} processes x {args.devices} devices, {args.steps} steps: {want[:16]}")
    kills = at_least = 0
    while True:
        run = Run(args.processes, root / f"logs{kills}", arguments("killed"))
        first = kills < args.kills and dice.random() < 0.75  # or else as it starts and compiles
        pause = dice.uniform(0.0, 1.0)
        while run.processes[0].poll() is None and (
            run.said(r"^from (\d+)") is None or (first and not run.steps_done())
        ):
            time.sleep(0.01)
        if run.processes[0].poll() is None and kills < args.kills:
            time.sleep(pause)
        running = [p for p in run.processes if p.poll() is None]
        start = int(run.said(r"^from (\d+)") or -1)
        assert start >= at_least and start % EVERY == 0, f"went on from {start}, not {at_least}"
        if kills == args.kills or not running:
            codes = run.wait(600)
            assert codes == [0] * args.processes, run.text()
            break
        victims = running if dice.random() < 0.5 else [dice.choice(running)]
        for victim in victims:
            victim.kill()
        done, killed_at = start + run.steps_done(), time.monotonic()
        run.wait(BOUND)
        took = time.monotonic() - killed_at
        kills += 1
        unfinished = sorted(p.name for p in (root / "killed").glob("*tmp*"))
        steps = [int(p.name) for p in (root / "killed").iterdir() if p.name.isdigit()]
        at_least = max([at_least, *steps])
        when = f"{pause:.2f} s into its {'steps' if first else 'start'}"
        say(
            f"kill {kills:2}: {len(victims)} of {args.processes}, {when}, from {start} "
            f"to {done}; complete {sorted(steps)}, unfinished {unfinished}; "
            f"all ended after {took:.1f} s"
        )
    assert run.digest() == want, f"ended with {run.digest()}"
    say(f"after {kills} kills, from {start}: {run.digest()[:16]}, bit-equal")
    if args.log:
        args.log.write_text("\n".join(lines) + "\n")
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
