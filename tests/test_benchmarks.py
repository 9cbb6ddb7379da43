"""The benchmarks' page holds what is stored; the rivals train what we train."""

import dataclasses
import importlib
import json
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

import zerojax
from tests.conftest import make_mesh
from zerojax._forecast import presets as _presets
from zerojax._hlo import known as _known

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"
RIVALS = {
    "rivals": ("replicated", "annotations, blocks", "largest dimension, blocks"),
    "rivals_by_hand": ("by hand",),
}
MODEL = _presets.Gpt(2, 64, 4, vocab=128, tokens=32)


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(importlib.import_module("rivals"), "SMALL", 0)  # the model's arrays are


def test_the_page_holds_what_is_stored():
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "render.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


ROW = {"row": "a", "step_ms": 100.0, "wire_gib": 10.0, "peak_gib": 5.0}


@pytest.mark.parametrize(
    ("change", "worse"),
    [({}, []), ({"step_ms": 99.0, "peak_gib": 1.0}, []), ({"step_ms": 100.9}, []),
     ({"step_ms": 101.1}, ["a: step_ms 100.0 -> 101.1"]),
     ({"wire_gib": 10.11}, ["a: wire_gib 10.0 -> 10.11"]),
     ({"peak_gib": 5.09}, []), ({"peak_gib": 5.11}, ["a: peak_gib 5.0 -> 5.11"])],
)  # fmt: skip
def test_a_change_may_cost_one_percent_of_speed_and_two_of_memory(change, worse):
    assert importlib.import_module("compiled").worse_than(ROW, {**ROW, **change}) == worse


def test_what_is_checked_must_be_stored():
    compiled = importlib.import_module("compiled")
    with pytest.raises(SystemExit, match=r"not stored, run with --json:\n7\.5b 64xH100"):
        compiled.check({"a": ROW})
    files = list(BENCHMARKS.glob("compiled_jax*.json"))
    assert len(files) >= 2
    for path in files:
        stored = {row["row"] for row in json.loads(path.read_text())["rows"]}
        assert {row.name for row in compiled.CHECKED} <= stored


def made(model):
    """A state with weights that are not zero, and a batch."""
    keys = iter(jax.random.split(jax.random.key(0), 100))

    def weight(x):
        return 0.05 * jax.random.normal(next(keys), x.shape)

    state = model.make_state()
    state = state.replace(params=jax.tree.map(weight, state.params))
    rng = np.random.default_rng(0)

    def data(x):
        integers = np.issubdtype(x.dtype, np.integer)
        values = rng.integers(0, 64, x.shape) if integers else rng.normal(size=x.shape)
        return values.astype(x.dtype)

    return state, jax.tree.map(data, model.batch(32))


def first_moments(state):
    """Of adamw after one step: a tenth of the gradients."""
    return jax.tree.map(np.asarray, state.opt_state[0].mu)


def assert_trained_alike(name, module, model, accumulate=1):
    mesh = make_mesh()
    state, batch = made(model)
    step, places = importlib.import_module(module).STEPS[name](model, mesh, "full", accumulate)
    state = places.replace(
        step=state.step, params=state.params, opt_state=state.opt_state
    )  # the optimizer that the rival's own state carries
    specs = [tuple(x.sharding.spec) for x in jax.tree.leaves(places)]
    assert any("data" in spec for spec in specs) == (name != "replicated")
    placed = jax.tree.map(lambda x, to: jax.device_put(x, to.sharding), state, places)
    after, loss = step(placed, zerojax.shard_batch(batch, mesh))
    assert jax.tree.map(lambda x: x.sharding, after) == jax.tree.map(lambda x: x.sharding, places)

    ours = zerojax.shard_train_state(made(model)[0], stage=3, mesh=mesh)
    ours, metrics = zerojax.train_step(model.loss, accumulate=accumulate)(ours, batch)
    assert loss == pytest.approx(float(metrics["loss"]), rel=1e-3)
    for theirs, mine in zip(
        jax.tree.leaves(first_moments(after)), jax.tree.leaves(first_moments(ours)), strict=True
    ):
        assert np.linalg.norm(theirs - mine) <= 0.03 * np.linalg.norm(mine) > 0


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", (1, 2))
@pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in RIVALS.items() for n in names])
def test_rivals_train_what_we_train(module, name, accumulate):
    assert_trained_alike(name, module, MODEL, accumulate)


# What Flax's modules call the GPT's parameters: an expression makes its outermost layer first.
OF_THE_MODEL = {"Embed_0": "embed", "LayerNorm_0": "norm", "ScanCheckpointLinenBlock_0": "blocks"}
OF_A_BLOCK = {
    "LayerNorm_0": "norm1", "Dense_1": "qkv", "Dense_0": "proj",
    "LayerNorm_1": "norm2", "Dense_3": "up", "Dense_2": "down",
}  # fmt: skip
NOT_OURS = {"params", "opt_state", "mu", "nu", "kernel", "scale", "embedding", "value"}


def counterpart(path):
    """('mu', ('blocks', 'qkv')), of where Flax's modules have that."""
    names = re.findall(r"[A-Za-z]\w*", jax.tree_util.keystr(path))
    first, *rest = [name for name in names if name not in NOT_OURS]
    ours = OF_THE_MODEL.get(first, first), *(OF_A_BLOCK.get(name, name) for name in rest)
    return next((n for n in names if n in ("mu", "nu")), "params"), ours


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "accumulate"), [("flax linen", 1), ("flax linen", 2), ("flax nnx", 1)]
)
@pytest.mark.parametrize("constrain", ["blocks", "nothing"])
def test_rivals_on_flax_train_what_we_train(name, constrain, accumulate):
    mesh = make_mesh()
    state, batch = made(MODEL)
    make = importlib.import_module("rivals_flax").STEPS[f"{name}, {constrain}"]
    step, places = make(MODEL, mesh, "full", accumulate)
    params = {
        tuple(re.findall(r"\w+", jax.tree_util.keystr(path))): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)
    }
    unused = set(params)

    def weight(path, x):
        kind, ours = counterpart(path)
        if kind == "params" and ours in params:
            unused.remove(ours)
            return jax.device_put(params[ours], x.sharding)
        return jax.device_put(np.zeros(x.shape, x.dtype), x.sharding)

    after, loss = step(jax.tree_util.tree_map_with_path(weight, places), zerojax.shard_batch(batch))
    assert not unused
    cut = [x for x in jax.tree.leaves(after) if "data" in tuple(x.sharding.spec)]
    assert len(cut) == 3 * 6  # all but the norms: weights, and two moments of each

    mine, metrics = zerojax.train_step(MODEL.loss, accumulate=accumulate)(
        zerojax.shard_train_state(made(MODEL)[0], stage=3, mesh=mesh), batch
    )
    assert float(loss) == pytest.approx(float(metrics["loss"]), rel=1e-3)
    found = {counterpart(p): x for p, x in jax.tree_util.tree_leaves_with_path(after)}
    for path, grad in jax.tree_util.tree_leaves_with_path(first_moments(mine)):
        theirs = found["mu", tuple(re.findall(r"\w+", jax.tree_util.keystr(path)))]
        assert np.linalg.norm(theirs - grad) <= 0.03 * np.linalg.norm(grad) > 0, path


@pytest.mark.slow
def test_the_vision_model_trains_alike_by_hand():
    vit = importlib.import_module("vit")
    model = vit.Vit(2, 64, 4, tokens=16, inner=96, patch=12, classes=64)
    assert_trained_alike("by hand", "rivals_by_hand", model)


def test_rows_that_are_put_leave_the_others(tmp_path):
    results, path = importlib.import_module("results"), tmp_path / "rows.json"
    made_by = {"jax": "1.2"}
    old = {"row": "b", "ms": 1, "date": "2026-01-01"}
    path.write_text(json.dumps({**made_by, "rows": [old]}))
    kept = results.Results(path, ["a", "b", "c"], made_by)
    kept.put("c", {"row": "c", "ms": 2})
    kept.put("a", {"row": "a", "ms": 3})
    stored = json.loads(path.read_text())
    assert [(row["row"], row["ms"]) for row in stored["rows"]] == [("a", 3), ("b", 1), ("c", 2)]
    assert stored["jax"] == "1.2" and stored["rows"][1] == old
    assert stored["rows"][0]["date"] > old["date"]
    with pytest.raises(SystemExit, match=r"was made by \{'jax': '1.2'\}, not by \{'jax': '1.3'\}"):
        results.Results(path, ["a"], {"jax": "1.3"})
    assert json.loads(path.read_text()) == stored


def test_results_that_cannot_be_kept_are_refused_before_they_are_made(tmp_path):
    script = BENCHMARKS / "scaling.py"
    for wrong, said in [
        (["--json", str(tmp_path / "none" / "x.json")], "cannot be written"),
        (["--only", "("], "not a regular expression"),
        (["--only", "gpt5"], "nothing is called 'gpt5'. There are:\nscanned 4\n"),
    ]:
        done = subprocess.run([sys.executable, script, *wrong], capture_output=True, text=True)
        assert done.returncode and said in done.stderr, done.stderr


def test_rivals_are_those_that_are_named():
    compiled = importlib.import_module("compiled")
    with pytest.raises(ValueError, match="no rival is called 'annotations, bloks': replicated;"):
        compiled.Row("1.5b", "8xH100", rival="annotations, bloks")
    llama = _presets.Llama(2, 64, 4, kv_heads=2, inner=96)
    with pytest.raises(ValueError, match="a GPT here, and Llama is not"):
        compiled.STEPS[compiled.LINEN](llama, make_mesh(), "full", 1)


def stored(path):
    return json.loads(path.read_text())


def keys_of_ours():
    newest = sorted(BENCHMARKS.glob("compiled_jax*.json"))[-1]
    return list(stored(newest)["rows"][0])


@pytest.mark.parametrize("rival", ("maxtext", "levanter"))
def test_rows_have_the_same_keys_and_name_what_was_measured(rival):
    result = stored(BENCHMARKS / f"rivals_{rival}.json")
    assert result["packages"] and result["jax"]
    assert result["rows"]
    for row in result["rows"]:
        assert list(row) == keys_of_ours() and row["date"]


# What docs/offload.md calls the rows of MaxText.
OFFLOADED = {
    "MaxText's own step: nothing": "on the devices",
    "MaxText, the optimizer state": "in host memory",
    "MaxText, optimizer state, activations": "with activations in host memory",
    "MaxText, optimizer state, parameters": "with parameters in host memory",
    "MaxText, all three": "all of it in host memory",
}
SPEEDS = tuple(f"step_ms at {speed} GB/s" for speed in (50, 25, 12.5))


def test_rows_in_host_memory_have_the_same_keys_and_are_those_of_the_docs():
    ours = stored(BENCHMARKS / "offload.json")["rows"][0]
    page = (BENCHMARKS.parent / "docs" / "offload.md").read_text()
    rows = {row["row"]: row for row in stored(BENCHMARKS / "offload_maxtext.json")["rows"]}
    assert all(list(row) == list(ours) for row in rows.values())
    maxtext = "7.5B on 8 H100s, MaxText + reduce_scatter_combine_threshold_bytes=1"
    for called, what in OFFLOADED.items():
        row = rows[f"{maxtext}: {what}"]
        speeds = SPEEDS if row["host_gib"] else SPEEDS[:1]
        host = f"{row['host_gib']:.1f}" if row["host_gib"] else "0"
        cells = [called, f"{row['device_gib']:.1f}", host, *(f"{row[s]:.0f}" for s in speeds)]
        assert f"| {' | '.join(cells)} |" in page


# -- published steps


def test_forecasts_of_published_steps_are_those_of_the_stored_schedules():
    published = importlib.import_module("published")
    texts, found = published.stored_schedules(), json.loads(published.STORED.read_text())
    rows = {row["row"]: row for row in found["rows"]}
    assert rows.keys() == published.ROWS.keys() <= texts.keys()
    assert not any('.py"' in text for text in texts.values()), "no paths of the machine"
    name = "MaxText Llama 2 7B, 8 H100"
    row, module = published.ROWS[name], published.Module(texts[name])
    share = row.gpu.rates.flops / row.gpu.flops
    assert round(published.replayed(module, row, share), 3) == rows[name]["forecast"]
    assert rows[name]["measured"] == row.seconds == 0.721
    slow = dataclasses.replace(row, network=0.001, per_host=4)
    assert published.replayed(module, slow, share) > 2 * rows[name]["forecast"]
    assert found["summary"]["error"]["held out"] == published.summary(found, error="error")


def test_the_library_reaches_what_was_fitted():
    """A100s as fitted; on H100s, the fit is close to what the library had, and that stays."""
    fitted = json.loads((BENCHMARKS / "published.json").read_text())["fitted"]
    assert _known.GPUS["A100-80GB"].reached_flops == pytest.approx(fitted["Ampere"], rel=0.02)
    assert _known.GPUS["H100"].reached_flops == pytest.approx(fitted["Hopper"], rel=0.04)


def test_a_share_is_fitted_by_least_squares(monkeypatch):
    published = importlib.import_module("published")
    names = list(published.JAX)[:3]
    seconds = {name: published.ROWS[name].seconds for name in names}
    step = lambda module, row, share: row.seconds * (0.2 + 0.8 * 0.65 / share)
    monkeypatch.setattr(published, "replayed", step)
    assert published.fitted(seconds, names) == pytest.approx(0.65)


def test_errors_of_published_steps_and_their_order():
    published = importlib.import_module("published")
    row = lambda measured, error: {"use": "held out", "measured": measured, "error": error}
    rows = [row(1.0, 50.0), row(1.2, -5.0), row(1.25, 0.0), row(9.0, 1.0)]
    found = published.summary({"rows": rows}, error="error")
    # 1.2 and 1.25 are too close to be a pair; the first is told to be slower than both.
    assert found == {"rows": 4, "mean": 14.0, "worst": 50.0, "pairs": 5, "pairs_in_order": 3}


PAPER = {"hidden": 32, "heads": 4, "vocab": 64, "tokens": 16, "compute": "float32"}


def planned_on_cpus(model, tensor, stage):
    shape, names = ((8,), ("data",)) if tensor == 1 else ((4, 2), ("data", "tensor"))
    mesh = jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))
    return importlib.import_module("megatron").planned(model, mesh, stage)


@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("tensor", [1, 2])
def test_the_papers_model_is_the_gpt_on_parts_of_heads(tensor, stage):
    megatron = importlib.import_module("megatron")
    ours, theirs = megatron.Megatron(4, **PAPER), _presets.Gpt(4, **PAPER)
    state, batch = made(theirs)
    wanted = jax.grad(lambda params: megatron.SCALE * theirs.loss(params, batch))(state.params)

    def headwise(qkv):  # from the queries of all heads, the keys, the values to those of each head
        split = qkv.reshape(4, 32, 3, 4, 8)
        return split.swapaxes(2, 3).reshape(qkv.shape)

    def as_ours(tree):
        blocks = dict(tree["blocks"], qkv=headwise(tree["blocks"]["qkv"]))
        blocks |= {name: blocks[name].swapaxes(1, 2) for name in ("proj", "down")}
        return {**tree, "blocks": blocks}

    plan = planned_on_cpus(ours, tensor, stage)
    params = plan.place(ours.make_state().replace(params=as_ours(state.params))).params
    if tensor > 1:
        assert "tensor" in params["blocks"]["up"].sharding.spec
    grads = jax.jit(zerojax.value_and_grad(ours.loss, plan))(params, batch)[1]
    for path, grad in jax.tree_util.tree_leaves_with_path(as_ours(wanted)):
        (found,) = (g for p, g in jax.tree_util.tree_leaves_with_path(grads) if p == path)
        np.testing.assert_allclose(found, grad, atol=1e-5 * np.abs(grad).max(), err_msg=str(path))


@pytest.mark.parametrize(("tensor", "stage"), [(1, 0), (2, 3)])
def test_the_papers_flops_are_those_that_run(tensor, stage):
    model = importlib.import_module("megatron").Megatron(4, **PAPER)
    plan = planned_on_cpus(model, tensor, stage)
    batch = zerojax.aot.batch(model.batch(2 * plan.size), plan)
    step = zerojax.train_step(model.loss, plan=plan)
    replay = zerojax.audit(step, plan.abstract(), batch, plan=plan).replay
    assert tensor * replay.flops == model.flops(2)


@pytest.mark.parametrize("guess", [1, 30, 2000])
@pytest.mark.parametrize("fixed", [0, 300])
def test_the_largest_that_fits_is_found_along_a_line(guess, fixed):
    paper, tried = importlib.import_module("paper"), []

    def peak(count):
        tried.append(count)
        return 300 + 7 * count + (count % 2)

    assert paper.largest(peak, guess, fixed, room=995) == 99
    assert 99 in tried and len(tried) == len(set(tried)) <= 5
    assert paper.largest(lambda count: 5000, guess, fixed, room=1000) == 1


def test_the_papers_rows_are_all_stored_as_they_are_made_now():
    paper = importlib.import_module("paper")
    rows = {row["row"]: row for row in stored(BENCHMARKS / "paper.json")["rows"]}
    assert list(rows) == list(paper.ROWS)
    for name, row in rows.items():
        assert row["settings"] == paper.settings(paper.ROWS[name]), f"{name}: make it again"
    shown = {name.partition(",")[0] for name in rows}
    assert shown == {"table 1", "table 2", *(f"figure {n}" for n in (2, 3, 4, 6, 7, 8))}


def test_table_2s_theory_is_the_formula():
    paper_numbers = importlib.import_module("paper_numbers")
    for degree, sizes in paper_numbers.THEORY.items():
        for stage, billions in enumerate(sizes):
            each = zerojax.memory_table(1, 64).bytes_per_device(1, 64, stage)
            assert billions == pytest.approx(degree * 32 / each, rel=0.03)


def test_the_papers_pictures_are_of_what_is_stored():
    digest = importlib.import_module("results").digest(BENCHMARKS / "paper.json")
    pictures = list((BENCHMARKS.parent / "docs" / "pictures").glob("paper*.png"))
    assert pictures
    for path in pictures:
        assert digest.encode() in path.read_bytes(), f"{path.name} is behind: draw it again"
