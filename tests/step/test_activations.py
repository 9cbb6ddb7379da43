"""What a layer's backward needs, kept in host memory or in parts until then."""

import collections
import functools
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import zerojax
from tests import audits, steps
from tests.audits import DIM, LAYERS
from tests.collectives import collectives
from tests.conftest import make_mesh, mostly_slow
from tests.reference import assert_close
from tests.step import tensor
from tests.steps import BOTH
from zerojax import _compat
from zerojax._hlo.transfers import TO_DEVICE, TO_HOST
from zerojax._step import host_slices as _slices

ROWS = 256  # of a device; of fewer, a layer's input would be too small to travel
OFFLOADED = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["layer_in"],
    offload_src="device",
    offload_dst="pinned_host",
)


def named(x, p):
    return audits.layer(checkpoint_name(x, "layer_in"), p)


with_a_policy = functools.partial(
    audits.loss, wrap=lambda _: jax.checkpoint(named, policy=OFFLOADED), dtype="float32"
)
checkpointed = functools.partial(audits.loss, dtype="float32")
plain = functools.partial(checkpointed, wrap=lambda layer: layer)


def traced(loss, stage=3, devices=8, offload=None, rows=ROWS, **options):
    """The jaxpr of a step, for shapes."""
    mesh = make_mesh(devices)
    plan = zerojax.plan(audits.make_state, stage=stage, mesh=mesh, offload=offload)
    step = zerojax.train_step(loss, **options)
    return step.trace(plan.abstract(), audits.tokens(plan, rows)).jaxpr.jaxpr


def scans(jaxpr):
    return [eqn for eqn in _compat.every_eqn(jaxpr) if eqn.primitive.name == "scan"]


def kept(*args, **options):
    """The shapes of what loops return in host memory."""
    return {
        v.aval.shape
        for eqn in scans(traced(*args, **options))
        for v in eqn.outvars[_compat.scan_counts(eqn.params)[1] :]
        if v.aval.memory_space == _compat.HOST
    }


@pytest.mark.parametrize(
    ("stage", "prefetch", "options"),
    [
        (3, 0, {}),
        (3, 1, {"update": "backward"}),
        (2, 1, {"update": "backward"}),
        (2, 0, {"accumulate": 2}),
        (0, 0, {"accumulate": 2}),
        (3, 1, {"offload": BOTH, "update": "backward"}),
    ],
)
def test_layer_inputs_in_host_memory(stage, prefetch, options):
    """`tests/test_steps.py` has such a step give one device's numbers."""
    options = {"prefetch": prefetch, **options}
    # As a loop's last layer computes its backward first, prefetching keeps its input at hand.
    ahead = prefetch and (stage == 3 or "update" in options)
    shape = (LAYERS - ahead, ROWS // options.get("accumulate", 1), DIM)
    assert kept(checkpointed, stage, activations="host", **options) == {shape}
    assert kept(checkpointed, stage, **options) == set()


@pytest.mark.parametrize("prefetch", [0, 1])
def test_without_regather_full_weights_stay_on_the_devices(prefetch):
    options = {"regather": False, "prefetch": prefetch}
    assert kept(checkpointed, activations="host", **options) == {(LAYERS, ROWS, DIM)}
    assert kept(checkpointed, **options) == set()
    found = collectives(traced(checkpointed, activations="host", **options))
    size = (LAYERS + 2) * DIM * DIM  # the table has as many rows as two layers
    assert size <= sum(c.moved for c in found if c.kind == "all-gather") < 1.1 * size


def test_on_one_device():
    assert kept(checkpointed, 0, devices=1, activations="host") == {(LAYERS, ROWS, DIM)}


@pytest.mark.parametrize(("stage", "prefetch"), [(0, 0), (2, 0), (3, 0), (3, 1)])
def test_a_policy_of_the_users_that_offloads(stage, prefetch):
    assert kept(with_a_policy, stage, prefetch=prefetch) == {(LAYERS - prefetch, ROWS, DIM)}


def test_small_arrays_stay():
    assert kept(checkpointed, rows=ROWS // 4, activations="host") == set()


def test_without_checkpoint_all_that_jax_keeps():
    """A layer's input, and the derivative of tanh."""
    assert kept(plain, prefetch=0, activations="host") == {(LAYERS, ROWS, DIM)}


@pytest.mark.parametrize("how", ["policy", "plain", "indices", "indices and policy"])
def test_gradients_are_those_of_one_device(how, monkeypatch):
    """With `indices` as older JAX on GPUs, whose XLA does not find slices by a loop's counter:
    backward's are those of scanned indices."""
    if "indices" in how:
        monkeypatch.setattr(_slices, "are_found", lambda device: False)
    loss = {"plain": plain, "indices": checkpointed}.get(how, with_a_policy)
    options = {"activations": None if "policy" in how else "host", "prefetch": 0}
    row = steps.Row("layers", {"data": 2}, {"stage": 3}, options, loss=loss)
    assert "<host>" in str(row.jaxpr)
    assert_close(jax.device_get(row.result.state.params), row.reference[0].params)


@pytest.mark.parametrize(("prefetch", "offload"), [(0, None), (1, None), (0, BOTH)])
def test_loops_with_host_memory_are_not_unrolled(prefetch, offload):
    """XLA for GPUs does not compile such loops."""

    def unrolled(params, batch):
        layer = jax.checkpoint(audits.layer)
        x, _ = jax.lax.scan(layer, params["embed"][batch], params["layers"], unroll=2)
        return jnp.mean(x**2)

    def found(offload, activations):
        options = {"prefetch": prefetch, "activations": activations}
        loops = scans(traced(unrolled, offload=offload, **options))
        return {eqn.params["unroll"] for eqn in loops if eqn.params["length"] >= LAYERS - 1}

    assert found(offload, None if offload else "host") == {1}
    assert found(None, None) == {2}


def test_reductions_stay_as_they_are():
    """At stage 0, gradients of several microbatches are reduced once."""
    found = [
        collections.Counter(collectives(traced(checkpointed, 0, accumulate=2, activations=where)))
        for where in (None, "host")
    ]
    assert found[0] == found[1]


def test_value_and_grad_has_it_too():
    plan = zerojax.plan(audits.make_state, stage=3)
    args = plan.abstract().params, audits.tokens(plan, ROWS)
    for where in ("host", None):
        grad = zerojax.value_and_grad(checkpointed, plan, activations=where)
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


# -- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activations": "tensor"}, "activations='tensor' is not known. Pass 'host', or an axis of "
         "the mesh over which the batch is not split: this mesh has none; "),
        ({"activations": "data"}, "activations='data' is not known"),
        ({"activations": 1}, "activations=1 does not say where they are kept. Pass 'host'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        traced(checkpointed, **options)


def test_a_loss_without_layers_is_refused():
    one = lambda params, batch: jnp.mean((params["embed"][batch] @ params["layers"]["w"][0]) ** 2)
    with pytest.raises(ValueError, match="the loss has no scan of stacked parameters outside"):
        traced(one, activations="host")


# -- on GPUs

HOW = [(checkpointed, "host"), (with_a_policy, None)]


@pytest.mark.gpu_code
@pytest.mark.parametrize(
    ("gpus", "loss", "where"),
    mostly_slow(
        [(gpus, *how) for gpus in ("1xH100", "8xH100") for how in HOW],
        lambda gpus, loss, where: (gpus == "8xH100") == (where == "host"),
    ),
)
def test_on_gpus_they_travel_by_the_copy_engines(gpus, loss, where):
    mesh, layers, dim, rows = zerojax.aot.mesh(gpus), 8, 512, 2048
    plan = zerojax.plan(lambda: audits.make_state(None, layers, dim), stage=3, mesh=mesh)
    step = zerojax.train_step(loss, plan=plan, activations=where)
    batch = zerojax.aot.batch(jax.ShapeDtypeStruct((rows * mesh.size,), "int32"), plan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of older JAX, which reads them by kernels
        compiled = step.lower(plan.abstract(), batch).compile()
    report = zerojax.audit(compiled, plan=plan)
    one = 4 * rows * dim
    kept = compiled.memory_analysis().host_temp_size_in_bytes
    assert kept in (layers * one, (layers - 1) * one)
    assert report.host_bytes(TO_HOST) == report.host_bytes(TO_DEVICE) == kept
    in_loops = [copy for copy in report.replay.transfers if copy.trips > 1]
    assert in_loops and all(copy.asynchronous for copy in in_loops)
    if jax.__version_info__ >= (0, 11):
        assert all(copy.by_engine for copy in in_loops)
        assert report.findings() == []
    assert "kept for backward" in str(report)


@pytest.mark.gpu_code
def test_on_gpus_parts_are_half():
    mesh = zerojax.aot.mesh("8xH100", shape=(4, 2), axis_names=("data", "tensor"))
    found = []
    for where in (None, "tensor"):
        options = {"stage": 3, "mesh": mesh, "axis": "data", "overrides": steps.SPECS}
        plan = zerojax.plan(tensor.make_state, **options)
        step = zerojax.train_step(tensor.scanned, plan=plan, activations=where, prefetch=0)
        shape = jax.ShapeDtypeStruct((2**16, tensor.DIM), "float32")
        compiled = step.lower(plan.abstract(), zerojax.aot.batch(shape, plan)).compile()
        found.append(compiled.memory_analysis().temp_size_in_bytes)
    kept = tensor.LAYERS * 4 * 2**14 * tensor.DIM
    assert found[0] - found[1] > 0.3 * kept  # where backward begins, one layer's input is whole
