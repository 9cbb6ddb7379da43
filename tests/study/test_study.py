"""`study`: what is compiled and what is not, and that its figures are a forecast's."""

import dataclasses
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

import zerojax
import zerojax.nnx
from tests import audits, nnx_models
from tests.study import fakes
from zerojax._forecast import cache as _cache
from zerojax._hlo import known as _known


@pytest.fixture
def compiled(monkeypatch):
    return fakes.compiled_nowhere(monkeypatch, lambda stage, count, rows: 90 - 20 * stage + rows)


def made(gpus=("8xH100", "16xH100"), models=fakes.MINE, stages=(1, 3), rows=(4,), **options):
    return zerojax.study(models, gpus=gpus, stages=stages, rows=rows, **options)


def test_each_combination_is_compiled_once_in_order(compiled):
    found = made(models=fakes.MINE | {"again": fakes.MINE["mine"]}, rows=(4, 8, 4))
    wanted = [(stage, count, rows) for count in (8, 16) for stage in (1, 3) for rows in (4, 8)]
    assert compiled == 2 * wanted
    asked = [(cell.model, cell.gpus, cell.stage, cell.asked) for cell in found.cells]
    assert asked == [(model, f"{count}xH100", stage, rows) for model in ("mine", "again")
                     for stage, count, rows in wanted]  # fmt: skip
    assert all(cell.figures.rows == cell.asked for cell in found.cells)


def test_one_of_each_needs_no_list(compiled):
    (cell,) = made("8xH100", stages=3, rows=4).cells
    assert (cell.gpus, cell.stage, cell.asked) == ("8xH100", 3, 4)
    assert made("8xH100", stages=3, rows="largest").cells[0].asked == "largest"


def test_the_largest_rows_fit_and_share_what_is_compiled(compiled):
    """Stage 1 needs 70 GiB and one a row, of 72.8; stage 3 needs 30."""
    found = made("8xH100", rows=["largest", 2])
    assert [cell.figures.rows for cell in found.cells] == [2, 2, 40, 2]
    assert all(cell.fitting for cell in found.cells)
    assert len(compiled) == len(set(compiled)), "2 rows at stage 1 were tried for the largest"
    found = made("8xH100", stages=3, rows="largest", accumulate=3)
    assert found.cells[0].figures.rows == 42 and found.cells[0].settings == "accumulate=3"


@pytest.mark.slow
def test_a_step_of_nnx_costs_what_its_forecast_says(gpu_code):
    step = zerojax.nnx.train_step(nnx_models.loss_fn, accumulate=2, skip_nonfinite=True)
    batch = lambda rows: jax.ShapeDtypeStruct((rows, 16), jnp.float32)
    mine = {"net": (step, nnx_models.make, batch)}
    (cell,) = made("8xH100", mine, stages=3, rows=4, cache=False).cells
    assert not cell.failed
    given = {"gpus": "8xH100", "stages": 3}
    (case,) = zerojax.forecast(step, nnx_models.make, batch(32), **given).cases
    assert (cell.figures.peak, cell.figures.mfu) == (case.peak, case.mfu)


def test_a_step_of_nnx_keeps_its_options(compiled):
    step = zerojax.nnx.train_step(nnx_models.loss_fn, accumulate=2, skip_nonfinite=True)
    batch = lambda rows: jax.ShapeDtypeStruct((rows, 16), jnp.float32)
    mine = {"net": (step, nnx_models.make, batch)}
    (cell,) = made("8xH100", mine, stages=3, rows="largest").cells
    assert cell.settings == "accumulate=2, skip_nonfinite=True" and cell.figures.rows % 2 == 0
    (cell,) = made("8xH100", mine, stages=3, accumulate=4, mutable=("batch_stats",)).cells
    assert cell.settings == "accumulate=4, skip_nonfinite=True", "its fields are its own"


# -- the file


def test_a_later_run_does_what_is_missing(compiled, tmp_path):
    out = tmp_path / "study.json"
    first = made("8xH100", out=out)
    assert len(compiled) == 2
    assert made("8xH100", out=out).cells == first.cells and len(compiled) == 2
    second = made(out=out, rows=[4, 8])
    assert compiled[2:] == [(1, 8, 8), (3, 8, 8), (1, 16, 4), (1, 16, 8), (3, 16, 4), (3, 16, 8)]
    assert set(first.cells) < set(second.cells) and len(second.cells) == 8
    cells = json.loads(out.read_text())["cells"]
    assert len(cells) == 8 and {"peak", "tflops", "key"} <= cells[0].keys()


def test_what_is_done_needs_no_compiler(compiled, tmp_path, monkeypatch):
    def missing():
        raise ModuleNotFoundError("no compiler for GPUs")

    made("8xH100", out=tmp_path / "study.json")
    monkeypatch.setattr(zerojax.aot, "check_packages", missing)
    made("8xH100", out=tmp_path / "study.json")
    with pytest.raises(ModuleNotFoundError, match="no compiler for GPUs"):
        made("16xH100", out=tmp_path / "study.json")


def test_each_cell_is_written_as_it_is_done(monkeypatch, tmp_path):
    out, stages = tmp_path / "study.json", []

    def peak(stage, count, rows):
        stages.append(stage)
        if len(stages) == 3:
            raise KeyboardInterrupt
        return 30

    fakes.compiled_nowhere(monkeypatch, peak)
    with pytest.raises(KeyboardInterrupt):
        made("8xH100", stages=(0, 1, 2, 3), out=out)
    assert [cell["stage"] for cell in json.loads(out.read_text())["cells"]] == [0, 1]
    made("8xH100", stages=(0, 1, 2, 3), out=out)
    assert stages == [0, 1, 2, 2, 3]


def faster(kind="H100", **changed):
    return dataclasses.replace(_known.GPUS[kind].rates, **changed)


def doubled(params, batch):
    return 2 * fakes.loss(params, batch)


def newer(monkeypatch):
    monkeypatch.setattr(jax, "__version__", "9.9.9")


def known_faster(monkeypatch):
    gpu = dataclasses.replace(_known.GPUS["H100"], memory_rate=9e12)
    monkeypatch.setattr("zerojax._study.study.gpu_of", lambda *_: gpu)


STALE = {
    "loss": lambda _: {"models": {"mine": (doubled, *fakes.MINE["mine"][1:])}},
    "rates": lambda _: {"rates": faster(memory=9e12)},
    "zerojax's rates": known_faster,
    "hosts": lambda _: {"per_host": 4},
    "JAX": newer,
    "zerojax": lambda patch: patch.setattr(zerojax, "__version__", "0.0.1"),
    "compiler": lambda patch: patch.setattr(_cache, "_version", lambda name: "1"),
    "XLA's flags": lambda patch: patch.setenv("XLA_FLAGS", "--xla_dump_to="),
    "options": lambda _: {"precision": zerojax.Precision(compute="bfloat16")},
}


@pytest.mark.parametrize("what", STALE)
def test_what_has_changed_since_is_done_again(what, compiled, tmp_path, monkeypatch):
    out = tmp_path / "study.json"
    made("8xH100", out=out)
    made("8xH100", out=out)
    assert len(compiled) == 2
    options = STALE[what](monkeypatch) or {}
    found = made("8xH100", out=out, **options)
    assert len(compiled) == 4
    assert made("8xH100", out=out, **options).cells == found.cells and len(compiled) == 4


def test_options_at_their_defaults_are_no_others(compiled, tmp_path):
    out = tmp_path / "study.json"
    made("8xH100", out=out)
    usual = {"accumulate": 1, "order": "microbatches", "pad": True, "precision": None}
    found = made("8xH100", out=out, per_host=8, rates=None, **usual)
    assert len(compiled) == 2 and {cell.settings for cell in found.cells} == {""}


def test_a_foreign_file_is_refused_before_anything_compiles(compiled, tmp_path):
    out = tmp_path / "mine.json"
    out.write_text("[]")
    with pytest.raises(ValueError, match="Name another file, or remove this one"):
        made("8xH100", out=out)
    assert not compiled


# -- what fails


def test_one_that_fails_is_a_row_with_its_reason(monkeypatch, tmp_path):
    def peak(stage, count, rows):
        if count == 16 and stage == 3:
            raise RuntimeError("out\nof luck")
        if stage == 1:
            raise ValueError(f"{rows} rows do not divide")
        return 30

    compiled = fakes.compiled_nowhere(monkeypatch, peak)
    found = made(out=tmp_path / "study.json")
    assert [cell.failed for cell in found.cells] == [
        "4 rows do not divide", "", "4 rows do not divide", "RuntimeError: out of luck",
    ]  # fmt: skip
    assert [bool(cell.figures) for cell in found.cells] == [False, True, False, False]
    assert len(compiled) == 4
    made(out=tmp_path / "study.json")
    assert compiled[4:] == [(1, 8, 4), (1, 16, 4), (3, 16, 4)], "what failed is tried again"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"gpus": "8xV900"}, ValueError, "no facts about a GPU 'V900'"),
        ({"gpus": []}, ValueError, r"nothing to try: gpus=\[\]"),
        ({"stages": (1, 4)}, ValueError, r"stages=4 is none of \(0, 1, 2, 3\)"),
        ({"rows": (4, 0)}, ValueError, "rows=0 must be positive, or 'largest'"),
        ({"rows": "most"}, ValueError, "rows='most' must be positive, or 'largest'"),
        ({"models": "3x"}, ValueError, "no preset '3x'"),
        ({"models": "124m", "remat": "some"}, ValueError,
         "no remat 'some'. Name one of none, dots, full, or"),
        ({"accumulate": (1, 2)}, ValueError, r"accumulate=\(1, 2\) must be one positive number"),
        ({"rng": None}, TypeError, r"takes no rng=. Beside its own: accumulate, order"),
        ({"gpus": ("8xH100", "8xA100-40GB"), "rates": faster()}, ValueError,
         r"of one GPU, and gpus= names A100-40GB, H100. Make a study of each"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_before_anything_compiles(compiled, options, error, message):
    with pytest.raises(error, match=message):
        made(**{"gpus": "8xH100"} | options)
    assert not compiled


def test_a_broken_model_is_refused_before_anything_compiles(compiled):
    broken = (lambda params, batch: params["nosuch"], *fakes.MINE["mine"][1:])
    with pytest.raises(KeyError, match="nosuch"):
        made(models=fakes.MINE | {"broken": broken})
    assert not compiled


def test_the_page_on_studies_runs(compiled, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib").use("agg")
    monkeypatch.chdir(tmp_path)
    page = (pathlib.Path(__file__).parents[2] / "docs" / "study.md").read_text()
    (code,) = re.findall(r"^```py\n(.*?)^```", page, flags=re.M | re.S)
    exec(code, names := {})
    assert [cell.gpus for cell in names["study"].cells] == ["64xH100", "128xH100", "400xH100"]
    assert {count for _, count, _ in compiled} == {64, 128, 400}
    assert (tmp_path / "study.json").exists() and (tmp_path / "study.png").stat().st_size > 5000


# -- with a compiler


def tokens(rows):
    return jax.ShapeDtypeStruct((rows, 16), jnp.int32)


OWN = {"own": (audits.loss, audits.make_state, tokens)}


@pytest.mark.gpu_code
def test_figures_are_those_of_a_forecast(tmp_path):
    options = {"accumulate": 2, "rates": faster(network=1e9)}
    found = zerojax.study(OWN, gpus="16xH100", stages=(2, 3), rows=4, **options)
    same = zerojax.forecast(
        audits.loss, audits.make_state, tokens(64), gpus="16xH100", stages=(2, 3), **options
    )
    for cell, case in zip(found.cells, same.cases, strict=True):
        made = vars(cell.figures) | {"compile_seconds": 0.0}
        for name in made.keys() & {field.name for field in dataclasses.fields(case)}:
            if name != "compile_seconds":
                assert made[name] == getattr(case, name), name
        assert made["wire_bytes"] == case.wire_bytes > case.network_bytes > 0
        assert made["tflops"] == pytest.approx(case.mfu * 989)
        assert cell.settings == "accumulate=2, network cards of 1 GB/s"
    assert found.cells[0].figures.peak > found.cells[1].figures.peak


@pytest.mark.gpu_code
def test_what_is_compiled_is_kept_for_other_studies(tmp_path, monkeypatch):
    """Stages 1 and 2 are one program without microbatches."""
    monkeypatch.setenv("ZEROJAX_CACHE", str(tmp_path / "cache"))
    zerojax.study(OWN, gpus="8xH100", stages=(1, 2), rows=4)
    files = list((tmp_path / "cache").iterdir())
    assert len(files) == 1
    zerojax.study(OWN, gpus="8xH100", stages=3, rows=4, cache=False)
    assert list((tmp_path / "cache").iterdir()) == files
