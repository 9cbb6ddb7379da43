"""The ZeRO paper's Figure 1 and Table 1: from the formula, and from compiled programs."""

import json
import pathlib
import runpy
import subprocess
import sys

import pytest

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
PUBLISHED = runpy.run_path(str(BENCHMARKS / "paper_numbers.py"))
FIGURE_1, as_printed = PUBLISHED["FIGURE_1"], PUBLISHED["as_printed"]
CELLS = PUBLISHED["CELLS"] + [(7.5e9, 64, stage, printed) for stage, printed in FIGURE_1.items()]


@pytest.fixture
def by_formula(run):
    """The bytes of each device by the command line."""

    def by_formula(params, devices, stage):
        sizes = ("--params", str(params), "--devices", str(devices), "--stages", str(stage))
        (row,) = json.loads(run("table", "--json", *sizes)[1])
        return 1e9 * row[f"stage {stage}, GB"]

    return by_formula


def test_the_papers_numbers_by_formula(by_formula):
    assert as_printed(4187.5, 4187, 1e12) and not as_printed(4188.0, 4187, 1e12)
    assert as_printed(1.875, 1.88, 7.5e9) and not as_printed(1.87, 1.88, 7.5e9)
    assert len(CELLS) == 54 + 4
    for *cell, printed in CELLS:
        assert as_printed(by_formula(*cell) / 1e9, printed, cell[0]), cell


@pytest.mark.ci
def test_the_papers_numbers_by_compiled_programs(by_formula):
    """Argument bytes of really compiled programs, on up to 1024 emulated devices: of each fourth,
    so that all stages and numbers of devices are among them."""
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "argument_bytes.py"],
        input=json.dumps([cell[:3] for cell in CELLS[::4]]),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = json.loads(done.stdout.splitlines()[-1])
    for (*cell, printed), nbytes in zip(CELLS[::4], compiled, strict=True):
        # 1024 rows hold a few hundred parameters less than 7.5e9: rounded to 1e-4 GB.
        assert as_printed(round(nbytes / 1e9, 4), printed, cell[0]), (cell, nbytes)
        assert nbytes == pytest.approx(by_formula(*cell), rel=1e-6), cell
