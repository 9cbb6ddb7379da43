"""`study`: what is compiled and what is not, and which rows fit."""

import dataclasses
import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
import zerojax.nnx
from tests.forecast import fakes
from tests.support import nnx_models
from tests.support.schedules import scheduled
from zerojax.tools._forecast.forecast import Workload

MINE = {"mine": (fakes.loss, fakes.make_state, fakes.batch)}
USABLE = fakes.H100.usable / 2**30  # 72.8 GiB


@pytest.fixture
def compiled(monkeypatch):
    """Stage 1 needs 70 GiB and one a row, stage 3 needs 30."""
    return fakes.compiled_nowhere(monkeypatch, lambda stage, count, rows: 90 - 20 * stage + rows)


def made(gpus=("8xH100", "16xH100"), models=MINE, stages=(1, 3), rows=(4,), **options):
    return zerojax.tools.study(models, gpus=gpus, stages=stages, rows=rows, **scheduled(options))


def of(loss=fakes.loss, rate=1e-3, batch=fakes.batch):
    return {"mine": (loss, functools.partial(fakes.make_state, rate), batch)}


def test_each_combination_is_compiled_once_in_order(compiled):
    found = made(models=MINE | {"again": MINE["mine"]}, rows=(4, 8, 4))
    wanted = [(stage, count, rows) for count in (8, 16) for stage in (1, 3) for rows in (4, 8)]
    assert compiled == 2 * wanted
    asked = [(cell.model, cell.gpus, cell.stage, cell.asked) for cell in found.cases]
    ways = [(f"{count}xH100", stage, rows) for stage, count, rows in wanted]
    assert asked == [(model, *way) for model in ("mine", "again") for way in ways]
    one, (single,) = found.cases[0], made("8xH100", stages=1, rows=4).cases
    assert single == one and (one.model, one.gpus, one.stage) == ("mine", "8xH100", 1)
    assert (one.rows, one.peak, one.usable) == (4, 74 * 2**30, fakes.H100.usable)
    assert (one.wire_bytes, one.network_bytes) == (7, 4)
    assert one.tflops == pytest.approx(989 * one.mfu) and not one.fits


def test_figures_are_those_of_a_forecast():
    rates = zerojax.tools.rates_of("H100", network=1e9)
    options = {"gpus": "8xH100", "stages": 3, "accumulate": 2, "rates": rates}
    with fakes.cpus_for_gpus():
        (cell,) = zerojax.tools.study(MINE, rows=4, cache=False, **scheduled(options)).cases
        same = zerojax.forecast(fakes.loss, fakes.make_state, fakes.batch(32), **scheduled(options))
    (case,) = same.cases
    costs, others = cell.to_dict(), {"model", "asked", "settings"}
    for name, value in case.to_dict().items():
        assert name in others or costs[name] == value, name
    assert cell.wire_bytes > 0 and cell.rows == 4
    assert cell.settings == "accumulate=2, network cards of 1 GB/s" and not cell.failed


def test_a_step_of_nnx_keeps_its_options(compiled):
    step = zerojax.nnx.train_step(nnx_models.loss_fn, accumulate=2, skip_nonfinite=True)
    batch = lambda rows: jax.ShapeDtypeStruct((rows, 16), jnp.float32)
    mine = {"net": (step, nnx_models.make, batch)}
    (cell,) = made("8xH100", mine, stages=3, rows="largest").cases
    assert cell.settings == "accumulate=2, skip_nonfinite=True" and cell.rows % 2 == 0
    (cell,) = made("8xH100", mine, stages=3, accumulate=4, mutable=("batch_stats",)).cases
    assert cell.settings == "accumulate=4, skip_nonfinite=True", "its fields are its own"


# -- the largest rows

MEASURED = {4: 6.2, 56: 54.3, 72: 61.5, 80: 70.5, 88: 81.9, 96: 83.9}  # 7.5B on 64 H100s
LADDER = [*range(1, 17), *range(18, 34, 2), *range(36, 68, 4), *range(72, 136, 8)]


@pytest.mark.parametrize(
    ("peak", "most"),
    [
        (lambda rows: 3 + rows, 64),
        (lambda rows: 60 + 10 * rows, 1),
        (lambda rows: 3 + 0.01 * rows, 6656),
        (lambda rows: 20 + rows**1.5, 14),
        (lambda rows: MEASURED[rows], 80),
    ],
)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_most_rows_that_fit_are_found_in_a_few_compiles(peak, most, microbatches, monkeypatch):
    gib = lambda stage, count, rows: peak(rows // microbatches)
    compiled = fakes.compiled_nowhere(monkeypatch, gib)
    (cell,) = made("8xH100", stages=3, rows="largest", accumulate=microbatches).cases
    assert (cell.rows, cell.fits) == (most * microbatches, True)
    tried = [rows // microbatches for _, _, rows in compiled]
    assert peak(most) <= USABLE < min(peak(rows) for rows in tried if rows > most)
    assert len(tried) == len(set(tried)) <= 6
    assert {rows for rows in tried if rows < 136} <= set(LADDER)


def test_the_search_ends_whatever_memory_does(monkeypatch):
    for need, rows, compiles in (
        (lambda rows: 80 + rows, 2, 4),
        (lambda rows: 3, 2 * 15 * 2**13, 3),
        (lambda rows: 20 if rows < 200 else 80, 192, 50),  # no line at all
    ):
        compiled = fakes.compiled_nowhere(monkeypatch, lambda stage, count, rows: need(rows))
        (cell,) = made("8xH100", stages=3, rows="largest", accumulate=2).cases
        assert cell.rows == rows and len(compiled) <= compiles


def test_numbers_of_rows_are_compiled_once(compiled):
    (four, most) = made("8xH100", stages=3, rows=(4, "largest")).cases
    assert (four.rows, four.asked, most.asked) == (4, 4, "largest") and most.rows == 40
    assert len(compiled) == len(set(compiled)) and (3, 8, 4) in compiled


# -- the largest model


def sized(of_layers=lambda layers: jnp.zeros((layers, 4))):
    def model(layers):
        tx = optax.sgd(0.1)
        make = lambda: TrainState.create(apply_fn=None, params={"w": of_layers(layers)}, tx=tx)
        return lambda params, x: jnp.mean(params["w"] ** 2) + 0 * jnp.sum(x), make, fakes.batch

    return {"deep": model}


@pytest.mark.parametrize(
    ("peak", "most", "compiles"),
    [
        (lambda layers: 3 + 1.1 * layers, 63, 4),
        (lambda layers: 30 + layers, 42, 4),
        (lambda layers: max(20 + layers / 9, 4 + layers), 68, 6),
        (lambda layers: 20 * layers, 3, 2),
    ],
)
def test_the_most_layers_that_fit_are_found_in_a_few_compiles(peak, most, compiles, monkeypatch):
    seen = fakes.compiled_nowhere(monkeypatch, lambda stage, count, rows: 0)
    case_of = Workload.case

    def case(work, variant, *how):
        layers = work.state.params["w"].shape[0]
        one = case_of(work, variant, *how)
        return dataclasses.replace(one, peak=int(peak(layers) * 2**30), n_params=4 * layers)

    monkeypatch.setattr(Workload, "case", case)
    study = made("8xH100", sized(), stages=3, rows=4)
    (cell,) = study.cases
    assert (cell.size, cell.n_params, cell.fits, cell.rows) == (most, 4 * most, True, 4)
    assert len(seen) <= compiles and study.best("deep") is cell
    assert f"  {most}: " in str(study) and f"Best for deep: {most}, " in str(study)


def test_the_largest_model_is_real():
    of = lambda layers: jnp.zeros((layers, 16, 2**20))
    rates = {"gpus": "8xH100", "stages": 3, "rows": 4, "cache": False}
    with fakes.cpus_for_gpus():
        (cell,) = zerojax.tools.study(sized(of), **rates).cases
    layer = 16 * 2**20 * 4  # fp32: a shard of each parameter, and its gradient
    assert cell.n_params == cell.size * 2**24 and not cell.failed
    assert 0 <= cell.spare < layer and cell.fits


@pytest.mark.parametrize(
    ("params", "most", "dim", "settings"),
    [
        (lambda n: {"w": (n, 16, 64)}, 320, 1, "stacked='^(w)$'"),
        (lambda n: {"w": (n, 16, 64), "b": (n, 64)}, 320, 1, "stacked='^(b|w)$'"),
        (lambda n: {"w": (n, 16, 64), "b": (n, 64)}, 240, 1, ""),  # a plan sees these
        (lambda n: {"w": (n, 16, 64), "x": {"y": (2, 8, 8), "z": (2, 8)}}, 320, 1, "x/y|x/z"),
        (lambda n: {"w": (n, 16, n)}, 320, 0, ""),  # a width
        (lambda n: {"w": (n, 64)}, 320, 0, ""),  # of a table
    ],
)
def test_many_layers_are_no_dimension_of_a_weight(params, most, dim, settings, monkeypatch):
    def make(layers):
        values = jax.tree.map(jnp.zeros, params(layers), is_leaf=lambda node: type(node) is tuple)
        return TrainState.create(apply_fn=None, params=values, tx=optax.sgd(0.1))

    def case(work, *how):
        (w,) = (leaf for leaf in work.plan_at(3).params if leaf.path == "params/w")
        dims[w.shape[0]] = w.dim
        return fakes.case(3, 0.999 * USABLE * w.shape[0] / most, gpus=work.gpus)

    dims = {}
    monkeypatch.setattr(Workload, "case", case)
    of_layers = lambda layers: (fakes.loss, functools.partial(make, layers), fakes.batch)
    with fakes.cpus_for_gpus():
        (cell,) = made("8xH100", {"deep": of_layers}, stages=3, cache=False).cases
    assert (cell.size, dims[most], bool(cell.settings)) == (most, dim, bool(settings))
    assert settings in cell.settings


def test_the_largest_of_both_or_of_nothing_is_refused(compiled):
    with pytest.raises(ValueError, match="Pass the rows of each GPU, such as rows=4"):
        made("8xH100", sized(), rows="largest")
    (cell,) = made("8xH100", sized(), stages=3).cases
    assert "Name a number that adds parameters" in cell.failed, "memory is the same with any"
    with pytest.raises(ValueError, match="neither a preset nor"):
        made("8xH100", {"mine": lambda layers: layers})


# -- what fails


def test_packages_are_missed_before_anything_compiles(compiled, monkeypatch):
    def missing():
        raise ModuleNotFoundError("no compiler for GPUs")

    monkeypatch.setattr(zerojax.aot, "_check_packages", missing)
    with pytest.raises(ModuleNotFoundError, match="no compiler for GPUs"):
        made("32xH100")
    assert not compiled


def test_one_that_fails_is_a_row_with_its_reason(monkeypatch):
    def peak(stage, count, rows):
        if count == 16 and stage == 3:
            raise RuntimeError("out\nof luck")
        if stage == 1:
            raise ValueError(f"{rows} rows do not divide")
        return 30

    compiled, found = fakes.compiled_nowhere(monkeypatch, peak), made()
    odd, luck = "4 rows do not divide", "RuntimeError: out of luck"
    assert [cell.failed for cell in found.cases] == [odd, "", odd, luck]
    assert [cell.peak > 0 for cell in found.cases] == [False, True, False, False]
    assert len(compiled) == 4


def twice_as_many(rows):
    return fakes.batch(2 * rows)


OF_TWO = {"gpus": ("8xH100", "8xA100-40GB"), "rates": zerojax.tools.rates_of("H100")}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": []}, r"nothing to try: gpus=\[\]"),
        ({"stages": (1, 4)}, r"stages=4 is none of \(0, 1, 2, 3\)"),
        ({"rows": (4, 0)}, "rows=0 must be positive, or 'largest'"),
        ({"models": "3x"}, "no preset '3x'. Name one of"),
        ({"models": []}, "no models. Name one or several presets"),
        ({"models": of(batch=fakes.batch(8))}, r"with a function batch\(rows\) that returns"),
        ({"models": of(batch=twice_as_many)}, r"batch\(8\) of 'mine' has no array of 8 rows"),
        ({"models": "124m", "remat": "some"}, "no remat 'some'. Name one of none, dots, full, or"),
        ({"rng": None}, r"study: got an unexpected keyword argument 'rng'"),
        (OF_TWO, r"of one GPU, and gpus= names A100-40GB, H100. Make a study of each"),
    ],
)
def test_bad_input_is_refused_before_anything_compiles(compiled, options, message):
    with pytest.raises((KeyError, TypeError, ValueError), match=message):
        made(**{"gpus": "8xH100"} | options)
    assert not compiled


def test_the_guides_study_runs(compiled, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib").use("agg")
    monkeypatch.chdir(tmp_path)
    page = (pathlib.Path(__file__).parents[2] / "docs" / "gpus.md").read_text()
    (code,) = re.findall(r"^```py\n(study = .*?)^```", page, flags=re.M | re.S)
    exec(code, names := {"zerojax": zerojax})
    assert [cell.gpus for cell in names["study"].cases] == ["64xH100", "128xH100", "400xH100"]
    assert {count for _, count, _ in compiled} == {64, 128, 400}
    assert (tmp_path / "study.png").stat().st_size > 5000
