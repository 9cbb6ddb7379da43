"""Audits of real steps on CPU devices: traffic and memory to the byte."""

import functools
import json

import jax
import jax.numpy as jnp
import optax
import pytest

import zerojax
from tests import audits
from tests.models import MODELS
from tests.reference import make_state

STAGES = (0, 1, 2, 3)
N = 8
SCALAR = 2 * 4 * (N - 1) // N  # bytes that each device sends to sum one float32


@functools.cache
def audited(model, stage):
    """(report, plan, compiled): models with remat, so that stage 3 gathers twice."""
    made = MODELS[model](True)
    state = zerojax.shard_train_state(make_state(made, optax.adamw(1e-3)), stage)
    plan = state.tx.plan
    compiled = zerojax.train_step(made.loss).lower(state, made.batch).compile()
    return zerojax.audit(compiled, plan=plan), plan, compiled


def sent_for(report, kind):
    """Bytes by parameter; of joined operations each array has its own."""
    found = {}
    for one in report.traffic:
        for part in one.parts if one.kind == kind else ():
            factor = {"all-gather": N - 1, "all-reduce": 2 * (N - 1) / N}.get(kind, (N - 1) / N)
            path = ", ".join(part.paths)
            found[path] = found.get(path, 0) + part.nbytes * factor * one.trips
    return found


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("model", ["mlp", "gpt"])
def test_traffic_is_the_papers_to_the_byte(model, stage):
    report, plan, _ = audited(model, stage)
    psi = sum(leaf.nbytes for leaf in plan.params if leaf.dim is not None) * (N - 1) / N
    whole = sum(leaf.nbytes for leaf in plan.params if leaf.dim is None) * 2 * (N - 1) / N
    scalars = report.totals["all-reduce"] - whole
    assert scalars % SCALAR == 0 and 1 <= scalars / SCALAR < 10  # the loss, and parts of the norm
    if stage == 0:  # everything is whole: 2 psi
        assert psi == 0 and set(report.totals) == {"all-reduce"}
        return
    assert report.totals["reduce-scatter"] == psi
    if stage < 3:
        assert report.totals["all-gather"] == psi
    assert report.wire_bytes == sum(report.totals.values())
    assert report.check() is report


@pytest.mark.parametrize("model", ["mlp", "gpt"])
def test_stage_3_gathers_every_weight_at_most_twice(model):
    """Exactly twice in loops; XLA may spare itself the second gather of what is used once."""
    report, plan, _ = audited(model, 3)
    gathered = sent_for(report, "all-gather")
    cut = {leaf.path: leaf for leaf in plan.params if leaf.dim is not None}
    assert set(gathered) == set(cut)
    for path, leaf in cut.items():
        times = gathered[path] / (leaf.nbytes * (N - 1) / N)
        assert times == 2 if leaf.stacked else 1 <= times <= 2, path
    layers = [t for t in report.traffic if "blocks" in t.serves and t.kind != "all-reduce"]
    assert {(t.trips, len(t.loops)) for t in layers} <= {(3, 1)}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("model", ["mlp", "gpt"])
def test_every_collective_is_traced_to_what_it_serves(model, stage):
    report, plan, _ = audited(model, stage)
    cut = {leaf.path: leaf.nbytes for leaf in plan.params if leaf.dim is not None}
    whole = {leaf.path for leaf in plan.params if leaf.dim is None}
    assert sent_for(report, "reduce-scatter") == {p: size * 7 / 8 for p, size in cut.items()}
    assert set(sent_for(report, "all-gather")) == set(cut)
    assert set(sent_for(report, "all-reduce")) - {""} == whole
    assert {t.axes for t in report.traffic} == {("data",)}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("model", ["mlp", "gpt"])
def test_memory_is_the_plans_and_the_compilers(model, stage):
    report, plan, compiled = audited(model, stage)
    state, memory = plan.bytes_per_device(), report.memory
    found = (memory.parameters, memory.optimizer, memory.other_state)
    assert found == (state["params"], state["opt_state"], state["other"])
    stats = compiled.memory_analysis()
    assert memory.state + memory.batch == stats.argument_size_in_bytes
    assert memory.temporary == stats.temp_size_in_bytes
    assert memory.donated == stats.alias_size_in_bytes == memory.state
    assert report.not_donated == report.placement == report.kept == ()
    # The loss and the norm; CPU programs count a pointer for each output beside it.
    assert memory.outputs == 8
    outputs = stats.output_size_in_bytes - 8 * len(report.module.root(report.module.entry).arrays)
    assert outputs == memory.donated + memory.outputs
    assert memory.peak == memory.state + memory.batch + memory.temporary + 8


def test_gradients_are_whole_at_stage_1_and_shards_at_3():
    """At the fullest moment; stage 1 sums those of microbatches whole."""
    gradients = {
        stage: audits.audited(audits.planned("cpu", stage), accumulate=2).memory.gradients
        for stage in (1, 3)
    }
    stack = audits.LAYERS * audits.DIM**2 * 4
    assert gradients[1] > stack > gradients[3] > 0


def test_arrays_shapes_programs_and_text_are_audited_alike():
    made = MODELS["mlp"](True)
    state = zerojax.shard_train_state(make_state(made, optax.adamw(1e-3)), 3)
    plan, step = state.tx.plan, zerojax.train_step(made.loss)
    shapes = zerojax.aot.batch(jax.tree.map(zerojax._state.state.shape_dtype, made.batch), plan)
    compiled = audited("mlp", 3)[2]
    reports = [
        audited("mlp", 3)[0],
        zerojax.audit(step, state, made.batch),
        zerojax.audit(step, plan.abstract(), shapes),
        zerojax.audit(compiled.as_text(), plan=plan),
        zerojax.audit(compiled.as_text()),
    ]
    assert len({tuple(sorted(r.totals.items())) for r in reports}) == 1
    assert len({(r.memory.parameters, r.memory.optimizer) for r in reports}) == 1
    assert reports[-1].plan is None and reports[-1].devices == 8
    assert not state.params["in"]["w"].is_deleted()


def test_to_dict_is_plain_and_whole():
    report = audited("gpt", 3)[0]
    found = json.loads(json.dumps(report.to_dict()))
    assert found["stage"] == 3 and found["devices"] == 8
    assert len(found["traffic"]) == len(report.traffic)
    assert sum(t["total_bytes"] for t in found["traffic"]) == report.wire_bytes
    assert found["memory"]["parameters"] == report.memory.parameters
    assert found["step_seconds"] is None, "no times are modelled for CPUs"


def test_it_prints_as_a_table():
    report = audited("gpt", 3)[0]
    text = str(report)
    assert text.startswith("ZeRO stage 3, 8 devices (cpu)\nmemory per device  ")
    assert "donated and reused" in text and "modelled step" not in text
    assert "all-gather 26" in text and ", reduce-scatter 134.8 KiB, all-reduce 1.6 KiB" in text
    header, _, *rows = text.split("\n\n")[1].splitlines()
    assert " ".join(header.split()) == "collective dtype sent times loops group when serves"
    (row,) = (r for r in rows if r.endswith("params/blocks/qkv") and r.startswith("reduce"))
    # (32, 96) in fp32: 12 KiB, less the own eighth
    assert " ".join(row.split()) == "reduce-scatter f32 10.5 KiB 3 1 data sync params/blocks/qkv"


def test_a_modelled_gpu_adds_times():
    compiled = audited("gpt", 3)[2]
    report = zerojax.audit(compiled, gpu="H100")
    assert report.step_seconds > report.exposed_seconds > 0
    assert report.step_seconds == pytest.approx(report.replay.compute + report.exposed_seconds)
    assert report.overlap == pytest.approx(report.replay.compute / report.step_seconds)
    assert "modelled step" in str(report) and "between" in str(report)
    slower = zerojax.audit(compiled, gpu="T4")
    assert slower.step_seconds > report.step_seconds
    with pytest.raises(ValueError, match=r"no facts about a GPU 'X1'. Name one of T4, L4"):
        zerojax.audit(compiled, gpu="X1")


def test_long_tables_say_how_much_is_left_out():
    mesh = audits.mesh_of("cpu")

    def run(xs):
        return [jax.lax.all_gather(x * (i + 1), "data") for i, x in enumerate(xs)]

    p = jax.sharding.PartitionSpec
    xs = [jnp.ones((8, i + 1)) for i in range(43)]
    run = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=p("data"), out_specs=p("data")))
    report = zerojax.audit(run.lower(xs).compile())
    assert len(report.traffic) >= 41
    assert str(report).endswith(f"... and {len(report.traffic) - 40} smaller ones")


def test_plots_need_times():
    report = audited("mlp", 3)[0]
    with pytest.raises(ValueError, match=r"no times to plot: .* for cpu. Pass gpu='H100' to audit"):
        report.plot()


def test_plot_writes_a_picture(tmp_path):
    pytest.importorskip("matplotlib").use("agg")
    import matplotlib.pyplot as plt

    report = zerojax.audit(audited("gpt", 3)[2], gpu="H100")
    figure = report.plot(str(tmp_path / "step.png"))
    assert (tmp_path / "step.png").read_bytes()[:4] == b"\x89PNG"
    (axes,) = figure.axes
    labels = {t.get_text() for t in axes.get_legend().get_texts()}
    assert labels >= {"compute", "all-gather", "reduce-scatter", "exposed"}
    assert any(t.get_text() == "x 3" for t in axes.texts), "loops say how often they run"
    assert "on 8 x H100" in axes.get_title()
    plt.close(figure)


def test_plot_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.pyplot", None)
    report = zerojax.audit(audited("mlp", 3)[2], gpu="H100")
    with pytest.raises(ModuleNotFoundError, match="Run: pip install matplotlib"):
        report.plot()


def test_a_state_without_its_batch_is_refused():
    made = MODELS["mlp"](False)
    step = zerojax.train_step(made.loss)
    with pytest.raises(TypeError, match=r"compiles the step for a state and a batch: audit\(step"):
        zerojax.audit(step)
    with pytest.raises(TypeError, match=r"audit\(step, state, batch\)"):
        zerojax.audit(step, make_state(made, optax.sgd(0.1)))
