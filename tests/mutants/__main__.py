"""Puts defects into the package, one at a time, and says which test kills each.

    python -m tests.mutants                        # all of them
    python -m tests.mutants NAME ... --first TEST  # some; this test runs first
    python -m tests.mutants --write                # keeps the result in killed.json

First runs the test that killed a mutant the last time, then those of the module that it changes,
then all that are quick, until one fails. The exit code is 1 where a mutant that killed.json has a
test for survives.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import pathlib
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence

from tests.mutants import runs, table
from tests.mutants.runs import KILLED, Outcome
from tests.mutants.table import HERE, ROOT, Mutant

KEPT = HERE / "killed.json"
EVERYTHING = ["tests"]
Kept = dict[str, str]  # of one mutant: its fate, the test that killed it, when and with what


def main() -> int:
    arguments = parsed_arguments()
    kept, mutants = json.loads(KEPT.read_text()), table.read()
    if unknown := set(arguments.names) - mutants.keys():
        sys.exit(f"there is no mutant {min(unknown)!r}: name some of {', '.join(mutants)}")
    chosen = [mutants[name] for name in arguments.names or mutants]
    outcomes = judged(chosen, kept, arguments.first, arguments.workers)
    now = {mutant.name: as_kept(mutant, outcomes[mutant.name]) for mutant in chosen}
    if arguments.write:
        known = kept | now
        lines = [f'"{name}": {json.dumps(known[name])}' for name in mutants if name in known]
        KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    killed = [name for name, one in now.items() if one["fate"] in KILLED]
    lost = [n for n, one in kept.items() if n in now.keys() - killed and one["fate"] in KILLED]
    for name in lost:
        print(f"lost: {name}, which {kept[name]['test']} killed at {kept[name]['commit']}")
    print(f"{len(killed)} of {len(now)} mutants are killed")
    return 1 if lost else 0


def parsed_arguments() -> argparse.Namespace:
    words = {"formatter_class": argparse.RawDescriptionHelpFormatter, "description": __doc__}
    parser = argparse.ArgumentParser("python -m tests.mutants", **words)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--first", nargs="+", default=[], metavar="TEST")
    parser.add_argument("--workers", default="auto", help="of pytest, as -n takes them")
    parser.add_argument("--write", action="store_true")
    return parser.parse_args()


def judged(
    mutants: Sequence[Mutant], kept: Mapping[str, Kept], first: list[str], workers: str
) -> dict[str, Outcome]:
    """Returns what becomes of mutants, where the tests in `first` run before all others."""
    outcomes: dict[str, Outcome] = {}
    with runs.copied_checkout() as checkout:
        for mutant in mutants:  # before anything runs
            mutant.applied((checkout / mutant.file).read_text())
        for mutant in mutants:
            last = kept[mutant.name]["test"] if mutant.name in kept else ""
            named = [first, [last] if last else [], [near(mutant)]]
            with runs.applied(mutant, checkout):
                outcomes[mutant.name] = first_failure(checkout, named, workers)
            print(as_line(mutant.name, outcomes[mutant.name]), flush=True)
        tests = {one.test for one in outcomes.values() if one.fate in KILLED}
        wrong = runs.failing(checkout, sorted(tests), workers) if tests else set()
    for name in [name for name, one in outcomes.items() if one.test in wrong]:
        outcomes[name] = dataclasses.replace(outcomes[name], fate="unfounded")
        print(f"{name} is not killed: {outcomes[name].test} fails without it too")
    return outcomes


def first_failure(checkout: pathlib.Path, named: list[list[str]], workers: str) -> Outcome:
    """Runs groups of tests one after another, and then all that are quick, until one fails."""
    seconds = 0
    for tests in [*filter(None, named), EVERYTHING]:
        outcome = runs.run(checkout, tests, workers if tests is EVERYTHING else "0")
        seconds += outcome.seconds
        if outcome.fate:
            return dataclasses.replace(outcome, seconds=seconds)
    return Outcome("survived", seconds=seconds)


def near(mutant: Mutant) -> str:
    """Returns where the tests of the module are that a mutant changes."""
    _, *package, module = (part.strip("_") for part in pathlib.PurePath(mutant.file).parts)
    return "/".join(["tests", *package, f"test_{module}"])


def as_kept(mutant: Mutant, outcome: Outcome) -> Kept:
    versions = f"JAX {importlib.metadata.version('jax')}, Python {platform.python_version()}"
    about = {"fate": outcome.fate, "test": outcome.test, "message": outcome.message}
    git = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    when = {"commit": commit.strip(), "with": versions}
    return {"breaks": mutant.breaks, **about, **when, "date": datetime.date.today().isoformat()}


def as_line(name: str, outcome: Outcome) -> str:
    return f"{name}: {outcome.fate} {outcome.test} ({outcome.seconds} s) {outcome.message}"


if __name__ == "__main__":
    sys.exit(main())
