"""Forecasts, studies and choices on a mesh with axes of the user's own."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from tests.forecast import fakes
from tests.step import tensor
from tests.support import audits
from tests.support.reference import train_state

pytestmark = pytest.mark.usefixtures("cpus")
SPECS = {"up": P(None, "data", "tensor"), "down": P(None, "tensor", "data")}
MESH = {"data": 2, "tensor": 2}
BATCH = jax.ShapeDtypeStruct(tensor.BATCH.shape, jnp.float32)
ROWS, DIM = BATCH.shape
STACKS = 4 * tensor.LAYERS * 2 * DIM * tensor.INNER  # bytes
NEEDED = 3 * 2 * ROWS * tensor.LAYERS * 2 * DIM * tensor.INNER
LENGTH = 16
TOKENS = jax.ShapeDtypeStruct((32, LENGTH), jnp.int32)


def made(batch=BATCH, **options):
    usual = {"gpus": "4xH100", "stages": 3, "mesh": MESH, "overrides": SPECS}
    return zerojax.forecast(tensor.scanned, tensor.make_state, batch, **usual | options)


def test_a_tensor_axis_is_compiled_as_in_training():
    result = made(mesh={"data": -1, "tensor": 2})
    (case,) = result.cases
    assert "mesh={'data': -1, 'tensor': 2}" in str(result)
    assert case.parameters == STACKS // 4 and case.share == 2 and case.rows == ROWS // 2
    assert case.flops == NEEDED / 4, "of each GPU, which splits the matmuls of its rows"
    mesh = tensor.cpu_mesh()
    plan = zerojax.plan(tensor.make_state, mesh=mesh, overrides=SPECS)
    batch = zerojax.aot.batch(BATCH, plan)
    report = zerojax.audit(zerojax.train_step(tensor.scanned), plan.abstract(), batch, gpu="H100")
    assert tensor.weights_sent(case.report) == tensor.weights_sent(report)
    assert tensor.weights_sent(case.report, over="tensor"), "sums of activations"
    assert case.peak == report.memory.peak


def test_all_axes_of_the_mesh_may_be_zeros():
    (case,) = made(axis=("data", "tensor"), overrides=None).cases
    assert (case.parameters, case.share, case.rows) == (STACKS // 4, 1, ROWS // 4)


def test_an_axis_of_sequences_is_one_of_the_mesh():
    given = {"gpus": "8xH100", "stages": 3}
    forecast = lambda **how: zerojax.forecast(
        audits.loss, audits.make_state, TOKENS, **given, **how
    ).cases[0]
    named = forecast(mesh={"data": 2, "parts": 4}, sequence=("parts", 0.2))
    counted = forecast(sequence=(4, 0.2))
    assert named.report.plan.sequence == zerojax.Sequences("parts", 0.2)
    assert (named.share, named.rows, named.peak) == (4, 16, counted.peak)
    assert named.wire_bytes == counted.wire_bytes


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mesh": {"data": 3, "tensor": 2}}, ValueError, "3 x 2 does not hold the 4 GPUs of 4xH1"),
        ({"mesh": {"data": -1, "tensor": 3}}, ValueError, r"one may be -1: mesh={'data': -1, 'te"),
        ({"mesh": {}}, ValueError, "a mesh of no axes does not hold the 4 GPUs"),
        ({"mesh": {"data": "2"}}, TypeError, r"must say how long each axis is, as mesh={'data': -"),
        ({"mesh": tensor.cpu_mesh()}, TypeError, r"of a mesh that you have, pass dict\(mesh.shap"),
        ({"axis": "batch"}, ValueError, "axis='batch' must name one axis of the mesh, or several"),
        ({"mesh": {"a": 2, "tensor": 2}}, ValueError, "none is called 'data', the default: pass"),
        ({"sequence": 2}, ValueError, "sequence=2 must name an axis of mesh=, as mesh="),
        ({"sequence": "cp"}, ValueError, "sequence='cp' is no axis of the mesh, whose axes are"),
        ({"mesh": None, "sequence": "cp"}, ValueError, "say without mesh= how many GPUs share"),
        ({"overrides": {"up": P(None, None, "tp")}}, ValueError, "tp"),
        ({"overrides": None}, ValueError, "nothing is sharded over the mesh axes {'tensor': 2}"),
    ],
)
def test_a_mesh_that_cannot_be_meant_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        made(**options)


def annotated():
    boxed = lambda name, x: nn.Partitioned(x, names=tuple(tensor.SPECS[name]))
    params = {name: boxed(name, x) for name, x in tensor.make_state().params.items()}
    return train_state(params, optax.adam(1e-2))


def unboxed(params, x):
    return tensor.scanned(nn.meta.unbox(params), x)


def test_axes_that_the_mesh_lacks_are_named():
    options = {"gpus": "4xH100", "stages": 3}
    settings = lambda **how: zerojax.forecast(unboxed, annotated, BATCH, **options, **how).settings
    lacking = "axes of the model that mesh= lacks: tensor"
    assert lacking in settings() and lacking not in settings(mesh=MESH)


def test_rows_are_those_of_the_gpus_that_share_them(run, monkeypatch):
    batch = lambda rows: jax.ShapeDtypeStruct((rows, DIM), jnp.float32)
    models = {"mine": (tensor.scanned, tensor.make_state, batch)}
    options = {"gpus": "4xH100", "stages": 3, "mesh": MESH, "overrides": SPECS}
    study = zerojax.tools.study(models, rows=4, cache=False, **options)
    assert [(case.rows, case.examples, case.failed) for case in study.cases] == [(4, 8, "")]
    calls = fakes.recorded(monkeypatch, "forecast", fakes.forecast(fakes.case(3, 30)))
    small = "--set layers=2 --set hidden=32 --set heads=2 --set tokens=8 --set vocab=64"
    mesh = "--mesh data=2,tensor=4 --gpus 8xH100 --rows 3"
    assert run("forecast", "124m", *small.split(), *mesh.split())[0] == 0
    (((_, _, batch, _), given),) = calls
    assert batch.shape == (6, 8) and given["mesh"] == {"data": 2, "tensor": 4}


@pytest.mark.filterwarnings("ignore:.* puts nothing in host memory")
def test_a_choice_keeps_the_axes_and_searches_the_rest():
    options = {"gpus": "4xH100", "mesh": MESH, "overrides": SPECS, "min_shard_size": 64}
    found = zerojax.tools.choose(tensor.scanned, tensor.make_state, BATCH, **options)
    counts = {one.way.accumulate for one in found.tried}
    assert counts == {1, 2, 4, 8, 16}, "of the 16 rows that two GPUs share"
    assert all(one.case.share == 2 for one in found.compiled)
    assert {one.way.stage for one in found.tried} == {0, 1, 2, 3}
    lines = found.python(found.best.way)
    assert "mesh = zerojax.mesh(data=2, tensor=2)" in lines
    assert "mesh=mesh, overrides=overrides, min_shard_size=64)" in lines


@pytest.mark.filterwarnings("ignore:.* puts nothing in host memory")
def test_a_choice_has_ways_for_hosts_where_the_mesh_has():
    mesh = {"node": 2, "gpu": 2, "tensor": 2}
    options = {"gpus": "8xH100", "mesh": mesh, "axis": ("node", "gpu"), "per_host": 4}
    found = zerojax.tools.choose(unboxed, annotated, BATCH, **options)
    assert any(one.way.groups for one in found.tried)
    scope = {"zerojax": zerojax, "loss_fn": unboxed, "make_state": annotated}
    exec(found.python(found.best.way), scope)
    assert scope["state"].tx.plan.batch_axes == ("node", "gpu")
    assert scope["step"].lower(scope["state"], np.ones(BATCH.shape, np.float32))
