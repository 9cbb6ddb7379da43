"""The benchmarks' page holds what is stored; the rivals train what we train."""

import collections
import dataclasses
import functools
import importlib
import json
import re

import jax
import numpy as np
import pytest

import zerojax
from tests.conftest import make_mesh
from tests.support.processes import ROOT, output
from zerojax.tools._cli import state_bytes
from zerojax.tools._forecast import presets as _presets  # whose models the benchmarks train

BENCHMARKS = ROOT / "benchmarks"
MODEL = _presets.Gpt(2, 32, 2, vocab=64, tokens=16)


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(importlib.import_module("rivals"), "SMALL", 0)  # the model's arrays are


def stored(file):
    return json.loads((BENCHMARKS / file).read_text())["rows"]


# -- rivals: each way of theirs once, those that can with microbatches


def numbers(model):
    """A state with weights that are not zero, and a batch."""
    draw = np.random.default_rng(0)
    normal = lambda x: draw.normal(size=x.shape).astype(x.dtype)
    integers = lambda x: draw.integers(0, 64, x.shape).astype(x.dtype)
    state = jax.eval_shape(model.make_state)
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state)
    state = zeros.replace(params=jax.tree.map(lambda x: normal(x) / 20, state.params))
    batch = lambda x: (integers if np.issubdtype(x.dtype, np.integer) else normal)(x)
    return state, jax.tree.map(batch, model.batch(32))


@functools.cache
def ours(accumulate):
    """The loss, and what adamw has of the gradients, by name."""
    state, batch = numbers(MODEL)
    state = zerojax.shard_train_state(state, stage=3)
    state, metrics = zerojax.train_step(MODEL.loss, accumulate=accumulate)(state, batch)
    return metrics["loss"], by_name(zerojax.gather_params(state.opt_state))


# What Flax's modules call the GPT's parameters: an expression makes its outermost layer first.
OURS = {"Embed_0": "embed", "LayerNorm_0": "norm", "ScanCheckpointLinenBlock_0": "blocks"}
OURS |= {"blocks LayerNorm_0": "norm1", "blocks LayerNorm_1": "norm2"}
OURS |= {"Dense_0": "proj", "Dense_1": "qkv", "Dense_2": "down", "Dense_3": "up"}
OURS |= {"layers": "blocks", "block_0": "blocks", "block_1": "blocks"}
NOT_OURS = {"params", "opt_state", "mu", "nu", "kernel", "scale", "embedding", "value"}
NOT_OURS |= {"embeddings", "gamma"}


def name_of(path):
    """'mu blocks qkv', wherever that is in the state of a rival."""
    words = re.findall(r"[A-Za-z]\w*", jax.tree_util.keystr(path))
    name = next((word for word in words if word in ("mu", "nu")), "params")
    for word in [word for word in words if word not in NOT_OURS]:
        within = name.split()[-1]
        name += " " + OURS.get(f"{within} {word}", OURS.get(word, word))
    return name


def by_name(tree):
    """Stacks what layers in a loop have under the same name."""
    named = collections.defaultdict(list)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        named[name_of(path)].append(leaf)
    return {name: leaf if not more else np.stack([leaf, *more])
            for name, (leaf, *more) in named.items()}  # fmt: skip


RIVALS = [
    ("rivals", "annotations, blocks", 2),
    ("rivals_by_hand", "by hand", 2),
    ("rivals_flax", "flax linen, blocks", 2),
    ("rivals_flax", "flax nnx, nothing", 1),
]
# Of packages that `make foreign` installs.
PACKAGES = ("scalax, blocks", "parallax FSDP", "parallax AUTO, pairs", "keras")


@pytest.mark.parametrize(
    ("module", "name", "accumulate"),
    [pytest.param(*each, marks=pytest.mark.ci) for each in RIVALS]
    + [pytest.param("rivals_packages", name, 1, marks=pytest.mark.slow) for name in PACKAGES],
)
def test_rivals_train_what_we_train(module, name, accumulate):
    state, batch = numbers(MODEL)
    weights, mesh, layers = by_name(state.params), make_mesh(), collections.Counter()
    step, places = importlib.import_module(module).STEPS[name](MODEL, mesh, "full", accumulate)

    def value(path, x):
        name = name_of(path)
        held = weights.get(name, np.zeros(x.shape, x.dtype))
        if held.ndim > x.ndim:  # of one layer
            held, layers[name] = held[layers[name]], layers[name] + 1
        return jax.device_put(held, x.sharding)

    placed = jax.tree_util.tree_map_with_path(value, places)
    assert weights.keys() <= by_name(placed).keys()
    after, loss = step(placed, zerojax.shard_batch(batch, mesh))

    wanted, moments = ours(accumulate)
    assert float(loss) == pytest.approx(float(wanted), rel=1e-3)
    specs, leaves = {}, jax.tree.leaves(after)
    for (path, place), now in zip(jax.tree_util.tree_leaves_with_path(places), leaves, strict=True):
        assert now.sharding.is_equivalent_to(place.sharding, place.ndim), path
        specs[name_of(path)] = tuple(place.sharding.spec)
    matrices = [path for path in weights if not re.search("norm|bias", path)]
    assert [path for path in matrices if not {"data", "model"} & {*specs[path]}] == []
    gradients = {path: grad for path, grad in moments.items() if path.startswith("mu ")}
    assert len(gradients) == len(weights)
    theirs = by_name(after)
    for path, grad in gradients.items():
        assert np.linalg.norm(theirs[path] - grad) <= 0.03 * np.linalg.norm(grad) > 0, path


# -- what is stored


def test_the_page_holds_what_is_stored():
    output(BENCHMARKS / "render.py", "--check")


ROW = {"row": "a", "step_ms": 100.0, "wire_gib": 10.0, "peak_gib": 5.0}
WORSE = [
    ({"step_ms": 100.9, "peak_gib": 1.0}, []),
    ({"step_ms": 101.1}, ["a: step_ms 100.0 -> 101.1"]),
    ({"wire_gib": 10.11}, ["a: wire_gib 10.0 -> 10.11"]),
    ({"peak_gib": 5.09}, []),
    ({"peak_gib": 5.11}, ["a: peak_gib 5.0 -> 5.11"]),
]


def test_a_change_may_cost_one_percent_of_speed_and_two_of_memory():
    worse_than = importlib.import_module("compiled").worse_than
    assert all(worse_than(ROW, {**ROW, **change}) == worse for change, worse in WORSE)


def test_what_is_checked_must_be_stored():
    compiled = importlib.import_module("compiled")
    with pytest.raises(SystemExit, match=r"not stored, run with --json:\n7\.5b 64xH100"):
        compiled.check({"a": ROW})
    files = [path.name for path in BENCHMARKS.glob("compiled_jax*.json")]
    assert len(files) >= 2
    for file in files:
        assert {row.name for row in compiled.CHECKED} <= {row["row"] for row in stored(file)}


def test_bytes_at_rest_are_those_that_plans_have_now():
    rows, ours = stored("state_bytes.json"), importlib.import_module("state_bytes")
    assert [row["row"] for row in rows] == [*ours.ROWS]
    for row in rows:
        stage, precision, _ = ours.ROWS[row["row"]]
        plan = zerojax.plan(ours.SMALL.make_state, stage=stage, precision=precision)
        leaves = jax.tree.leaves(plan.abstract())
        shards = [np.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves]
        count = sum(n * leaf.dtype.itemsize for n, leaf in zip(shards, leaves, strict=True))
        each = count * (8 if stage == 3 else 1) / ours.SMALL.n_params
        assert row["emulated"] == pytest.approx(each, abs=6e-4), row["row"]
        assert row["compiled"] == pytest.approx(each, rel=0.01), row["row"]


# -- published steps


def test_forecasts_of_published_steps_are_those_of_the_stored_schedules():
    published = importlib.import_module("published")
    texts, kept = published.stored_schedules(), json.loads(published.STORED.read_text())
    rows = {row["row"]: row for row in kept["rows"]}
    assert rows.keys() == published.ROWS.keys() <= texts.keys()
    assert not any('.py"' in text for text in texts.values()), "no paths of the machine"
    name = "MaxText Llama 2 7B, 8 H100"
    row, module = published.ROWS[name], published.Module(texts[name])
    share = row.gpu.rates.flops / row.gpu.flops
    assert round(published.replayed(module, row, share), 3) == rows[name]["forecast"]
    assert rows[name]["measured"] == row.seconds == 0.721
    slow = dataclasses.replace(row, network=0.001, per_host=4)
    assert published.replayed(module, slow, share) > 2 * rows[name]["forecast"]
    assert kept["summary"]["error"]["held out"] == published.summary(kept, error="error")


def test_the_library_reaches_what_was_fitted():
    """A100s as fitted; on H100s, the fit is close to what the library had, and that stays."""
    published = importlib.import_module("published")
    gpus = {row.gpu.name: row.gpu for row in published.ROWS.values()}
    fitted = json.loads(published.STORED.read_text())["fitted"]
    for name, chip, rel in (("A100-80GB", "Ampere", 0.02), ("H100", "Hopper", 0.04)):
        reached = zerojax.tools.rates_of(name).flops / gpus[name].flops
        assert reached == pytest.approx(fitted[chip], rel=rel)


# -- the paper's model and tables


@pytest.mark.ci
def test_the_papers_model_is_the_gpt_on_parts_of_heads():
    """Its gradients, and the FLOPs that its formula has."""
    megatron = importlib.import_module("megatron")
    sizes = {"hidden": 32, "heads": 4, "vocab": 64, "tokens": 16, "compute": "float32"}
    mine, theirs = megatron.Megatron(4, **sizes), _presets.Gpt(4, **sizes)
    state, batch = numbers(theirs)
    scaled = lambda params: megatron.SCALE * theirs.loss(params, batch)
    wanted = jax.jit(jax.grad(scaled))(state.params)

    def headwise(qkv):  # from the queries of all heads, the keys, the values to those of each head
        split = qkv.reshape(4, 32, 3, 4, 8)
        return split.swapaxes(2, 3).reshape(qkv.shape)

    def as_mine(tree):
        blocks = dict(tree["blocks"], qkv=headwise(tree["blocks"]["qkv"]))
        blocks |= {name: blocks[name].swapaxes(1, 2) for name in ("proj", "down")}
        return {**tree, "blocks": blocks}

    plan = megatron.planned(mine, zerojax.mesh(data=4, tensor=2), 3)
    params = plan.place(mine.make_state().replace(params=as_mine(state.params))).params
    assert "tensor" in params["blocks"]["up"].sharding.spec
    grads = jax.jit(zerojax.value_and_grad(mine.loss, plan))(params, batch)[1]
    for path, grad in by_name(as_mine(wanted)).items():
        atol = 1e-5 * np.abs(grad).max()
        np.testing.assert_allclose(by_name(grads)[path], grad, atol=atol, err_msg=path)

    batch = zerojax.aot.batch(mine.batch(2 * plan.size), plan)
    step = zerojax.train_step(mine.loss, plan=plan)
    replay = zerojax.audit(step, plan.abstract(), batch, plan=plan).replay
    assert 2 * replay.flops == mine.flops(2)


def test_the_papers_rows_are_all_stored_as_they_are_made_now():
    paper = importlib.import_module("paper")
    rows = {row["row"]: row for row in stored("paper.json")}
    assert list(rows) == list(paper.ROWS)
    for name, row in rows.items():
        assert row["settings"] == paper.settings(paper.ROWS[name]), f"{name}: make it again"
    shown = {name.partition(",")[0] for name in rows}
    assert shown == {"table 1", "table 2", *(f"figure {n}" for n in (2, 3, 4, 6, 7, 8))}

    theory = importlib.import_module("paper_numbers").THEORY
    for degree, sizes in theory.items():
        stages, widths = range(len(sizes)), (2, 2, 12)
        wanted = [degree * 32 / state_bytes(1, 64, stage, widths) for stage in stages]
        assert sizes == pytest.approx(wanted, rel=0.03)
    digest = importlib.import_module("results").digest(BENCHMARKS / "paper.json").encode()
    pictures = (ROOT / "docs" / "pictures").glob("paper*.png")
    behind = [path.name for path in pictures if digest not in path.read_bytes()]
    assert behind == [], "draw these again"
