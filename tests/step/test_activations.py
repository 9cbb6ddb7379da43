"""What a layer's backward needs, kept in host memory or in parts until then."""

import collections
import functools
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import zerojax
from tests.conftest import make_mesh
from tests.step import tensor
from tests.support import audits, steps
from tests.support.audits import DIM, LAYERS
from tests.support.collectives import collectives, scans_of
from tests.support.reference import assert_close
from tests.support.schedules import train_step, value_and_grad
from tests.support.steps import BOTH

ROWS = 256  # of a device; of fewer, a layer's input would be too small to travel
OFFLOADED = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["layer_in"],
    offload_src="device",
    offload_dst="pinned_host",
)
HOST = {"activations": "host"}


def named(x, p):
    return audits.layer(checkpoint_name(x, "layer_in"), p)


with_a_policy = functools.partial(
    audits.loss, wrap=lambda _: jax.checkpoint(named, policy=OFFLOADED), dtype="float32"
)
checkpointed = functools.partial(audits.loss, dtype="float32")
plain = functools.partial(checkpointed, wrap=lambda layer: layer)


def traced(loss, stage=3, devices=8, offload=None, rows=ROWS, **options):
    """The jaxpr of a step, for shapes."""
    plan = zerojax.plan(audits.make_state, stage=stage, mesh=make_mesh(devices), offload=offload)
    step = train_step(loss, **options)
    return step.trace(plan.abstract(), audits.tokens(plan, rows)).jaxpr


def kept(jaxpr):
    """The shapes of what loops stack up in host memory: an array of each turn."""
    shapes = set()
    for eqn in scans_of(jaxpr, nested=True):
        body = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])
        for whole, one in zip(eqn.outvars, body.outvars, strict=True):
            is_stacked = whole.aval.shape[1:] == one.aval.shape != whole.aval.shape
            if is_stacked and whole.aval.memory_space == jax.memory.Space.Host:
                shapes.add(whole.aval.shape)
    return shapes


@pytest.mark.parametrize(
    ("loss", "options", "layers", "rows"),
    [
        (checkpointed, HOST | {"prefetch": 0}, LAYERS, ROWS),
        # A loop's last layer computes its backward first, which has its input at hand.
        (checkpointed, HOST | {"prefetch": 1, "update": "backward"}, LAYERS - 1, ROWS),
        (checkpointed, HOST | {"stage": 2, "accumulate": 2, "prefetch": 0}, LAYERS, ROWS // 2),
        (checkpointed, HOST | {"prefetch": 1, "offload": BOTH}, LAYERS - 1, ROWS),
        (checkpointed, HOST | {"regather": False}, LAYERS, ROWS),
        (checkpointed, HOST | {"stage": 0, "devices": 1}, LAYERS, ROWS),
        # Without a checkpoint there is the derivative of tanh, too.
        (plain, HOST | {"prefetch": 0}, LAYERS, ROWS),
        (with_a_policy, {"stage": 0, "prefetch": 0}, LAYERS, ROWS),
        (with_a_policy, {"prefetch": 1}, LAYERS - 1, ROWS),
    ],
)
def test_layer_inputs_are_kept_in_host_memory(loss, options, layers, rows):
    """`tests/test_steps.py` has such a step give one device's numbers."""
    assert kept(traced(loss, **options)) == {(layers, rows, DIM)}


@pytest.mark.parametrize("options", [{}, {"regather": False}, HOST | {"rows": ROWS // 4}])
def test_what_is_small_or_not_asked_for_stays(options):
    assert kept(traced(checkpointed, **options)) == set()


def test_a_policy_of_the_users_gives_what_one_device_gives():
    row = steps.Row("layers", {"data": 2}, {"stage": 3}, {"prefetch": 0}, loss=with_a_policy)
    assert "<host>" in str(row.jaxpr)
    assert_close(jax.device_get(row.result.state.params), row.reference[0].params)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_loops_with_host_memory_are_not_unrolled(prefetch):
    """XLA for GPUs does not compile such loops."""

    def unrolled(params, batch):
        layer = jax.checkpoint(audits.layer)
        x, _ = jax.lax.scan(layer, params["embed"][batch], params["layers"], unroll=2)
        return jnp.mean(x**2)

    def times(**options):
        loops = scans_of(traced(unrolled, prefetch=prefetch, **options), nested=True)
        return {eqn.params["unroll"] for eqn in loops if eqn.params["length"] >= LAYERS - 1}

    assert times(activations="host") == times(offload=BOTH) == {1}
    assert times() == {2}


def test_reductions_stay_as_they_are():
    """At stage 0, gradients of several microbatches are reduced once."""
    usual, on_host = (
        collections.Counter(collectives(traced(checkpointed, 0, accumulate=2, **options)))
        for options in ({}, HOST)
    )
    assert usual == on_host


def test_value_and_grad_has_it_too():
    plan = zerojax.plan(audits.make_state, stage=3)
    args = plan.abstract().params, audits.tokens(plan, ROWS)
    for where in ("host", None):
        grad = value_and_grad(checkpointed, plan, activations=where)
        assert ("<host>" in str(jax.make_jaxpr(grad)(*args))) == (where is not None)


# -- in parts over a tensor axis

PARTS = steps.row("tensor")
HALF = f"f32[{tensor.LAYERS},{steps.ROWS},{tensor.DIM // 2}]"


def test_parts_leave_the_matmuls_as_they_are():
    """Half of each layer's input is kept. Of what travels over `tensor`, the all-gathers of layer
    inputs alone are new."""
    whole = steps.Row(PARTS.model, PARTS.mesh_of, PARTS.placed)
    assert [HALF in row.text for row in (whole, PARTS)] == [False, True]
    sent = []
    for row in (whole, PARTS):
        over = [one for one in row.report.traffic if one.axes == ("tensor",)]
        sent.append(collections.Counter((one.kind, one.wire_bytes, one.trips) for one in over))
    part = 4 * steps.ROWS * tensor.DIM // 2
    assert sent[1] - sent[0] == {("all-gather", part, tensor.LAYERS): 1}
    assert not sent[0] - sent[1]


def test_parts_in_host_memory():
    options = {"activations": ("host", "tensor"), "prefetch": 0}
    row = steps.Row(PARTS.model, PARTS.mesh_of, {**PARTS.placed, "stage": 0}, options)
    assert HALF in row.text and "<host>" in str(row.jaxpr)
    assert_close(jax.device_get(row.result.state.params), row.reference[0].params)


# -- compiled for GPUs


@pytest.mark.gpu_code
@pytest.mark.parametrize(
    ("gpus", "loss", "where"), [("8xH100", checkpointed, "host"), ("1xH100", with_a_policy, None)]
)
def test_on_gpus_they_travel_by_the_copy_engines(gpus, loss, where):
    mesh, layers, dim, rows = zerojax.aot.mesh(gpus), 8, 512, 2048
    plan = zerojax.plan(lambda: audits.make_state(None, layers, dim), stage=3, mesh=mesh)
    step = train_step(loss, plan=plan, activations=where)
    batch = zerojax.aot.batch(jax.ShapeDtypeStruct((rows * mesh.size,), "int32"), plan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of older JAX, which reads them by kernels
        compiled = step.lower(plan.abstract(), batch).compile()
    report = zerojax.audit(compiled, plan=plan)
    one = 4 * rows * dim
    kept = compiled.memory_analysis().host_temp_size_in_bytes
    assert kept in (layers * one, (layers - 1) * one)
    assert report.host_bytes("to the host") == report.host_bytes("to the device") == kept
    in_loops = [copy for copy in report.replay.transfers if copy.trips > 1]
    assert in_loops and all(copy.asynchronous for copy in in_loops)
    if jax.__version_info__ >= (0, 11):
        assert all(copy.by_engine for copy in in_loops)
        assert report.findings() == []
    assert "kept for backward" in str(report)
