"""A study as text: its table, and what it concludes."""

import dataclasses
import json
import pathlib

import pytest

from tests.study import fakes
from tests.test_cli_text import long_lines, titles
from zerojax import _text
from zerojax._study.cell import Cell
from zerojax._study.result import Study
from zerojax._study.stored import Stored


def study(*cells):
    return Study(cells)


def scaled(*throughputs, counts=(64, 128, 400), asked="largest", **given):
    """Cells of ever more GPUs, each of which does so much."""
    return [
        fakes.cell(f"{count}xH100", asked=asked, tflops=each, **{"rows": 4 * at + 4} | given)
        for at, (count, each) in enumerate(zip(counts, throughputs, strict=True))
    ]


def test_the_table_has_a_line_for_each_cell():
    made = study(
        fakes.cell(asked=4, tflops=440.4), fakes.cell(asked="largest", rows=22, tflops=0.12345),
        fakes.cell(stage=1, peak=90), fakes.cell(stage=2, failed="out of luck"),
    )  # fmt: skip
    lines = [line.split() for line in str(made).splitlines()]
    assert titles(str(made)) == [
        "model", "GPUs", "stage", "rows", "peak", "TFLOP/s", "MFU", "tokens/s", "exposed",
    ]  # fmt: skip
    start = ["7.5b", "64xH100"]
    assert lines[3] == [*start, "3", "4", "30.0", "GiB", "440", "44.5%", "262,144", "20%"]
    assert lines[4][2:8] == ["3", "max", "22", "30.0", "GiB", "0.123"]
    assert lines[5] == [*start, "1", "4", "90.0", "GiB", "no", "room", "-", "-", "-"]
    assert lines[6] == [*start, "2", "4", "-", "failed", "-", "-", "-"]
    text = str(made)
    assert "; remat full" in text.splitlines()[0]
    assert "Failed: 7.5b on 64xH100, stage 2, 4 rows: out of luck" in text
    assert "Most of each GPU for 7.5b: 440 TFLOP/s, at stage 3 on 64xH100 with 4 rows." in text
    assert "<td>max 22</td>" in made._repr_html_() and "out of luck" in made._repr_html_()


def test_the_title_says_where_a_gpu_lacks_the_models_dtype():
    one = fakes.cell("8xT4", wide_matmuls="written in bfloat16, which a T4 does not have")
    text = " ".join(str(study(fakes.cell(), one)).split())
    assert "; remat full; matmuls: written in bfloat16, which a T4 does not have model" in text
    old = {name: value for name, value in one.to_dict().items() if name != "wide_matmuls"}
    assert Cell.of_dict(old).figures.wide_matmuls == "", "a file of an earlier version"


def test_growth_with_the_largest_rows_is_super_linear():
    growing, level = scaled(400.0, 440.0, 500.0), scaled(400.0, 440.0, 403.0, stage=2)
    fixed = scaled(400.0, 440.0, 500.0, asked=4, rows=4, stage=1)
    too_large = scaled(300.0, 0, 0, peak=90, model="60b")[:1]
    made = study(*reversed(growing), *level, *fixed, *too_large, *scaled(1.0, 0, 0, stage=0)[:1])
    (growth,) = made.super_linear
    assert (growth.first, growth.last) == (growing[0], growing[2]) and growth.factor == 1.25
    line = (
        "Super-linear: 7.5b at stage 3. From 64 to 400 H100s, each GPU does 400 and then 500 "
        "TFLOP/s, with 4 and then 12 rows."
    )
    assert str(made).endswith(line) and made.to_dict()["super_linear"] == [line]


def test_the_best_is_of_one_model_and_fits():
    cells = [*scaled(400.0, 440.0, 430.0), *scaled(600.0, 0, 0, model="60b")[:1],
             *scaled(700.0, 0, 0, peak=90)[:1]]  # fmt: skip
    made = study(*cells)
    assert made.best("7.5b") is cells[1] and made.best("60b") is cells[3]
    assert made.best("other") is None


def test_where_nothing_fits_a_remedy_is_named():
    made = study(fakes.cell(peak=90), fakes.cell(stage=2, peak=85), fakes.cell(failed="no luck"))
    assert "Nothing fits of 7.5b. The least is 85.0 GiB: use more GPUs, a higher" in str(made)
    assert "Nothing fits" not in str(study(fakes.cell(failed="no luck")))


def test_as_data():
    cells = (fakes.cell(), fakes.cell(stage=1, failed="no luck"))
    found = json.loads(json.dumps(study(*cells).to_dict()))
    assert found["cells"] == [cell.to_dict() for cell in cells] and found["super_linear"] == []
    assert found["cells"][0]["fits"] and "peak" not in found["cells"][1]


@pytest.mark.parametrize("model", ["llama-405b", "mixtral-8x7b tokens=4096 layers=16"])
def test_it_fits_eighty_columns(model, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    cells = scaled(400.0, 440.0, 500.0, counts=(64, 128, 1024), model=model, peak=70)
    cells.append(dataclasses.replace(fakes.cell(failed="no " * 100), model=model))
    with _text.fitted():
        text = str(study(*cells))
    assert not long_lines(text) and text.count("\n") >= 10
    assert "TFLOP/s" in text


def test_a_narrow_table_leaves_out_the_waiting_rather_than_go_on_below(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    cells = scaled(400.0, 440.0, 500.0, counts=(64, 128, 1024), model="mixtral-8x7b")
    with _text.fitted():
        text = str(study(*cells))
    assert titles(text)[-1] == "tokens/s" and text.count("64xH100") == 1
    assert titles(str(study(*cells)))[-1] == "exposed"


def test_the_guides_table_is_that_of_the_stored_study(monkeypatch):
    root = pathlib.Path(__file__).parents[2]
    monkeypatch.setenv("COLUMNS", "80")
    cells = Stored(root / "benchmarks" / "study.json").cells
    with _text.fitted():
        text = str(Study(tuple(cells)))
    assert len(cells) == 3 and f"```text\n{text}\n```" in (root / "docs/study.md").read_text()
