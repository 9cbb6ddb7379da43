"""Programs for TPUs, which nobody has run: that they compile, and what the audit reads in them."""

import collections

import jax
import pytest

import zerojax
from tests.support.families import BATCH, FAMILIES
from tests.support.schedules import scheduled
from zerojax.tools._forecast.presets import Gpt

pytestmark = pytest.mark.tpu_code

GPT = Gpt(layers=4, hidden=256, heads=4, vocab=1024, tokens=128)
SIZES = {"blocks/" + name: n for name, n in (("qkv", 3), ("proj", 1), ("up", 4), ("down", 4))}
SIZES = {name: 4 * n * 256 * 256 for name, n in SIZES.items()}
SIZES |= {"embed": 1024 * 256, "pos": 128 * 256, "norm": 256}
SIZES |= {"blocks/norm1": 4 * 256, "blocks/norm2": 4 * 256}


def audited(where="v5e:2x4", stage=3, offload=None, rows=16, **options):
    plan = zerojax.plan(GPT.make_state, stage=stage, mesh=zerojax.aot.mesh(where), offload=offload)
    step = zerojax.train_step(GPT.loss, **scheduled(options))
    return zerojax.audit(step, plan.abstract(), zerojax.aot.batch(GPT.batch(rows), plan)).check()


def moved(report, kind):
    """The elements of each parameter that come out of its gathers, or go into its reductions."""
    elements = collections.Counter()
    for one in report.traffic:
        for part, its in zip(one.parts, one.stands_for or [one.kind] * len(one.parts), strict=True):
            grows = one.group if one.kind == "all-gather" else 1
            for path in part.paths if its == kind else ():
                elements[path.removeprefix("params/")] += part.size * grows * one.trips
    return elements


def test_a_step_of_stage_3_moves_each_parameter_as_the_plan_says():
    """Gathers that compute hides are in fusions, those of vectors are all-reduces of zeros, their
    reduce-scatters too, and loops do not say how long they are."""
    report = audited(prefetch=0)
    assert report.backend == "tpu" and report.gpu is None and report.step_seconds is None
    assert report.replay.unknown_loops == [] and report.network_bytes == 0
    # Backward does not need the positions.
    twice = {name: (1 if name == "pos" else 2) * size for name, size in SIZES.items()}
    assert moved(report, "all-gather") == twice
    assert moved(report, "reduce-scatter") == SIZES
    matrices = sum(size for name, size in SIZES.items() if "norm" not in name)
    assert report.totals["reduce-scatter"] == 2 * matrices * 7 / 8
    assert report.totals["all-gather"] == 2 * (2 * matrices - SIZES["pos"]) * 7 / 8
    assert {one.trips for one in report.traffic if one.loops} == {4}
    assert any(one.asynchronous for one in report.traffic)
    told = str(report)
    assert "8 devices (TPUs)" in told and "zerojax knows no speeds of TPUs" in told
    assert "GPU" not in told and "between hosts" not in told and "FLOPs" not in told
    with pytest.raises(ValueError, match="no times to plot: zerojax knows no speeds of TPUs"):
        report.plot()
    assert report.findings(min_overlap=0.5) == [
        "min_overlap= needs modelled times, and zerojax knows no speeds of TPUs. Leave it out."
    ]
    with pytest.raises(ValueError, match="gpu='H100' would give a program for TPUs the times of"):
        zerojax.audit(report.module.text, gpu="H100")
    assert zerojax.audit(report.module.text).backend == "tpu"


@pytest.mark.parametrize(("where", "ahead"), [("v5e:2x4", 1), ("v6e:2x4", 0), ("v5p:2x2x2", 0)])
def test_only_on_a_v5e_is_a_layer_gathered_ahead(where, ahead):
    report = audited(where)
    # The last layer of forward, gathered ahead, serves the first of backward.
    gathers = 7 if ahead else 8
    assert moved(report, "all-gather")["blocks/up"] == gathers * SIZES["blocks/up"] / 4
    trips = sorted({one.trips for one in report.traffic if one.loops})
    assert trips == ([2, 3] if ahead else [4])


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_lower_stages(stage):
    report = audited(stage=stage)
    everything = sum(SIZES.values())
    if stage == 0:
        assert set(report.totals) == {"all-reduce"}
    else:
        assert moved(report, "all-gather") == SIZES and moved(report, "reduce-scatter") == SIZES
    assert report.memory.parameters == 4 * everything


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("order", ["microbatches", "layers"])
def test_microbatches(stage, order):
    report = audited(stage=stage, rows=64, accumulate=4, order=order, prefetch=0)
    gathers = {3: 8 if order == "microbatches" else 2}.get(stage, 1)
    assert moved(report, "all-gather")["blocks/up"] == gathers * SIZES["blocks/up"]


@pytest.mark.parametrize(
    ("offload", "kinds"), [("opt_state", 2), (("opt_state", "params"), 3)]
)  # fmt: skip
@pytest.mark.parametrize("prefetch", [0, 1])
def test_state_in_host_memory(offload, kinds, prefetch):
    """XLA refuses a program whose results do not rest there."""
    report = audited(offload=offload, prefetch=prefetch)
    large = sum(SIZES[f"blocks/{name}"] for name in ("qkv", "up", "down")) + SIZES["embed"]
    assert report.memory.on_host == kinds * 4 * large / 8 == report.memory.host_donated
    assert report.host_bytes("to the host") == report.memory.on_host
    assert report.host_bytes("to the device") >= report.memory.on_host


def test_activations_in_host_memory():
    report = audited(activations="host")
    assert report.memory.host_kept == (4 - 1) * 2 * 128 * 256 * 2, "the last layer's does not wait"
    assert report.host_bytes("to the host") == report.memory.host_kept


def test_what_does_not_fit_is_refused():
    """XLA says by how much."""
    large = Gpt(layers=1, hidden=2**13, heads=64, vocab=2**19, tokens=128)
    plan = zerojax.plan(large.make_state, stage=1, mesh=zerojax.aot.mesh("v5e:2x4"))
    batch = zerojax.aot.batch(large.batch(8), plan)
    lowered = zerojax.train_step(large.loss).lower(plan.abstract(), batch)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"CompileTimeHbmOom(.|\n)*exceed"):
        lowered.compile()


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name):
    family = FAMILIES[name]()
    names = family.mesh.axis_names if family.mesh else "data"
    mesh = zerojax.aot.mesh("v5e:2x2", (2, 2) if family.mesh else None, names)
    plan = zerojax.plan(family.make, stage=3, mesh=mesh, min_shard_size=1)
    batch = zerojax.aot.batch(jax.ShapeDtypeStruct(BATCH.shape, BATCH.dtype), plan)
    report = zerojax.audit(zerojax.train_step(family.loss), plan.abstract(), batch).check()
    assert report.backend == "tpu" and report.memory.parameters == plan.bytes_per_device()["params"]


def test_meshes():
    for name, count, hosts in [("v5e:2x4", 8, 1), ("v6e:4x4", 16, 4), ("v5p:2x2x2", 8, 2)]:
        mesh = zerojax.aot.mesh(name)
        assert mesh.shape == {"data": count} and mesh == zerojax.aot.mesh(name)
        assert len({device.process_index for device in mesh.devices.flat}) == hosts
    two = zerojax.aot.mesh("v5e:2x4", (2, 4), ("replica", "data"))
    assert two.shape == {"replica": 2, "data": 4}
