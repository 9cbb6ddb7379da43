"""The ZeRO paper's Figure 1 and Table 1: from the formula, and from compiled programs."""

import json
import pathlib
import runpy
import subprocess
import sys

import numpy as np
import pytest

import zerojax

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
PUBLISHED = runpy.run_path(str(BENCHMARKS / "paper_numbers.py"))
FIGURE_1, as_printed = PUBLISHED["FIGURE_1"], PUBLISHED["as_printed"]
CELLS = PUBLISHED["CELLS"] + [(7.5e9, 64, stage, printed) for stage, printed in FIGURE_1.items()]


def by_formula(params, devices, stage):
    return zerojax.memory_table(params, devices).bytes_per_device(params, devices, stage)


def test_the_papers_numbers_by_formula():
    assert as_printed(4187.5, 4187, 1e12) and not as_printed(4188.0, 4187, 1e12)
    assert as_printed(1.875, 1.88, 7.5e9) and not as_printed(1.87, 1.88, 7.5e9)
    assert len(CELLS) == 54 + 4
    for *cell, printed in CELLS:
        assert as_printed(by_formula(*cell) / 1e9, printed, cell[0]), cell


def test_the_papers_numbers_by_compiled_programs():
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
    for (*cell, printed), found in zip(CELLS[::4], compiled, strict=True):
        # 1024 rows hold a few hundred parameters less than 7.5e9: rounded to 1e-4 GB.
        assert as_printed(round(found / 1e9, 4), printed, cell[0]), (cell, found)
        assert found == pytest.approx(by_formula(*cell), rel=1e-6), cell


def test_rows_and_text():
    table = zerojax.memory_table([7.5e9, 1e12], [4, 64], stages=(3, 1))
    first = {"params": 7.5e9, "devices": 4, "stage": 3, "bytes_per_device": 30e9}
    assert len(table.to_dict()) == 8 and table.to_dict()[0] == first
    header, _, first, *_, last = str(table).splitlines()
    assert header.split("  ")[-2:] == ["stage 3, GB", "stage 1, GB"], "in the order asked for"
    assert first.split() == ["7.5B", "4", "30.00", "52.50"]
    assert last.split() == ["1000B", "64", "250.00", "4,187.50"]
    assert "<td>31.41</td>" in zerojax.memory_table(7.5e9, 64)._repr_html_()
    numbers = zerojax.memory_table(np.float32(1e9), np.int64(8))
    assert numbers.to_dict() == zerojax.memory_table(1e9, 8).to_dict()
    with pytest.raises(KeyError, match="no row for 2e\\+09 parameters, 8 devices, stage 3"):
        numbers.bytes_per_device(2e9, 8, 3)
    with pytest.raises(ValueError, match="stage 4 is none of"):
        zerojax.memory_table(1e9, 8, stages=(1, 4))
