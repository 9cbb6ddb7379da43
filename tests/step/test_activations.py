"""What a layer's backward needs, kept in host memory or in parts until then."""

import collections
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import zerojax
from tests.collectives import collectives
from tests.conftest import make_mesh, mostly_slow
from tests.reference import assert_close
from tests.step import tensor
from tests.step.test_stream import BATCH, BOTH, loss, stacks
from zerojax import _compat
from zerojax._engine import residuals as _residuals
from zerojax._hlo.transfers import TO_DEVICE, TO_HOST
from zerojax._step import host_slices as _slices

LAYERS, DIM = 4, 128
ROWS = len(BATCH) // 8
OFFLOADED = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["layer_in"],
    offload_src="device",
    offload_dst="pinned_host",
)


@pytest.fixture(autouse=True)
def all_sizes(monkeypatch):
    monkeypatch.setattr(_residuals, "SMALL", 0)


def with_a_policy(params, batch):
    def layer(x, p):
        x = checkpoint_name(x, "layer_in")
        return x + jnp.tanh((x * p["norm"]) @ p["w"]), None

    layer = jax.checkpoint(layer, policy=OFFLOADED)
    x, _ = jax.lax.scan(layer, params["embed"][batch], params["blocks"])
    return jnp.mean((x @ params["embed"].T) ** 2)


def trained(loss, stage, devices=8, offload=None, steps=2, **options):
    """The parameters after steps, and the shapes of what loops have returned in host memory."""
    mesh = make_mesh(devices)
    state = zerojax.shard_train_state(stacks, stage, mesh=mesh, offload=offload)
    step = zerojax.train_step(loss, **options)
    jaxpr = step.trace(state, BATCH).jaxpr.jaxpr
    scans = [eqn for eqn in _compat.every_eqn(jaxpr) if eqn.primitive.name == "scan"]
    kept = {
        v.aval.shape
        for eqn in scans
        for v in eqn.outvars[_compat.scan_counts(eqn.params)[1] :]
        if v.aval.memory_space == _compat.HOST
    }
    for _ in range(steps):
        state, metrics = jax.block_until_ready(step(state, BATCH))
    assert step._cache_size() == 1
    return jax.device_get((zerojax.gather_params(state), metrics)), kept


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
    options = {"prefetch": prefetch, **options}
    got, kept = trained(loss, stage, activations="host", **options)
    wanted, nothing = trained(loss, stage, **options)
    # As a loop's last layer computes its backward first, prefetching keeps its input at hand.
    ahead = prefetch and (stage == 3 or "update" in options)
    assert kept == {(LAYERS - ahead, ROWS // options.get("accumulate", 1), DIM)}
    assert not nothing
    assert_close(got, wanted, 1e-6)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_without_regather_full_weights_stay_on_the_devices(prefetch):
    options = {"regather": False, "prefetch": prefetch}
    got, kept = trained(loss, 3, activations="host", **options)
    wanted, nothing = trained(loss, 3, **options)
    assert (kept, nothing) == ({(LAYERS, ROWS, DIM)}, set())
    assert_close(got, wanted, 1e-6)
    state = zerojax.shard_train_state(stacks, 3)
    step = zerojax.train_step(loss, activations="host", **options)
    found = collectives(step.trace(state, BATCH).jaxpr)
    size = sum(leaf.size for leaf in jax.tree.leaves(state.params) if leaf.ndim > 1)
    assert size <= sum(c.moved for c in found if c.kind == "all-gather") < 1.1 * size


def test_on_one_device():
    got, kept = trained(loss, 0, devices=1, activations="host")
    wanted, _ = trained(loss, 0, devices=1)
    assert kept == {(LAYERS, len(BATCH), DIM)}
    assert_close(got, wanted, 1e-6)


@pytest.mark.parametrize(("stage", "prefetch"), [(0, 0), (2, 0), (3, 0), (3, 1)])
def test_a_policy_of_the_users_that_offloads(stage, prefetch):
    got, kept = trained(with_a_policy, stage, prefetch=prefetch)
    wanted, _ = trained(loss, stage, prefetch=prefetch)
    assert kept == {(LAYERS - prefetch, ROWS, DIM)}
    assert_close(got, wanted, 1e-6)


def test_where_xla_does_not_find_them_by_the_counter(monkeypatch):
    """As older JAX on GPUs: backward's slices are those of scanned indices."""
    wanted, _ = trained(loss, 3, prefetch=0)
    monkeypatch.setattr(_slices, "are_found", lambda device: False)
    for found, where in ((with_a_policy, None), (loss, "host")):
        got, kept = trained(found, 3, prefetch=0, activations=where)
        assert kept == {(LAYERS, ROWS, DIM)}
        assert_close(got, wanted, 1e-6)


@pytest.mark.parametrize(("prefetch", "offload"), [(0, None), (1, None), (0, BOTH)])
def test_loops_with_host_memory_are_not_unrolled(prefetch, offload):
    """XLA for GPUs does not compile such loops."""

    def unrolled(params, batch):
        layer = jax.checkpoint(lambda x, p: (x + jnp.tanh((x * p["norm"]) @ p["w"]), None))
        x, _ = jax.lax.scan(layer, params["embed"][batch], params["blocks"], unroll=2)
        return jnp.mean((x @ params["embed"].T) ** 2)

    def found(offload, activations):
        state = zerojax.shard_train_state(stacks, 3, offload=offload)
        step = zerojax.train_step(unrolled, prefetch=prefetch, activations=activations)
        eqns = _compat.every_eqn(step.trace(state, BATCH).jaxpr.jaxpr)
        scans = [eqn for eqn in eqns if eqn.primitive.name == "scan"]
        return {eqn.params["unroll"] for eqn in scans if eqn.params["length"] >= LAYERS - 1}

    assert found(offload, None if offload else "host") == {1}
    assert found(None, None) == {2}


def test_without_checkpoint_all_that_jax_keeps():
    def plain(params, batch):
        def layer(x, p):
            return x + jnp.tanh((x * p["norm"]) @ p["w"]), None

        x, _ = jax.lax.scan(layer, params["embed"][batch], params["blocks"])
        return jnp.mean((x @ params["embed"].T) ** 2)

    got, kept = trained(plain, 3, prefetch=0, activations="host")
    wanted, _ = trained(plain, 3, prefetch=0)
    assert kept == {(LAYERS, ROWS, DIM)}  # its input, and the derivative of tanh
    assert_close(got, wanted, 1e-6)


def test_small_arrays_stay(monkeypatch):
    monkeypatch.setattr(_residuals, "SMALL", 4 * ROWS * DIM + 1)
    assert trained(loss, 3, activations="host", steps=1)[1] == set()


@pytest.mark.parametrize("stage", [0, 3])
def test_in_parts_over_a_tensor_axis(stage):
    """Half of each layer's input is kept, on the devices or in host memory."""
    mesh, half = tensor.cpu_mesh(), f"f32[{tensor.LAYERS},8,{tensor.DIM // 2}]"
    ends = {}
    for activations in (None, "tensor", ("host", "tensor")):
        state = tensor.placed(mesh, stage)
        step = zerojax.train_step(tensor.scanned, activations=activations)
        text = step.lower(state, tensor.BATCH).compile().as_text()
        assert (half in text) == (activations is not None)
        for _ in range(2):
            state, metrics = jax.block_until_ready(step(state, tensor.BATCH))
        ends[activations] = jax.device_get((state.params, metrics))
    assert_close(ends["tensor"], ends[None], 1e-6)
    assert_close(ends["host", "tensor"], ends[None], 1e-6)


def test_parts_leave_the_matmuls_as_they_are():
    """Of what travels over `tensor`, the all-gathers of layer inputs alone are new."""
    sent = []
    for activations in (None, "tensor"):
        step = zerojax.train_step(tensor.scanned, activations=activations)
        report = zerojax.audit(step, tensor.placed(tensor.cpu_mesh(), 3), tensor.BATCH)
        over = [one for one in report.traffic if one.axes == ("tensor",)]
        sent.append(collections.Counter((one.kind, one.wire_bytes, one.trips) for one in over))
    part = len(tensor.BATCH) // 4 * tensor.DIM // 2
    assert sent[1] - sent[0] == {("all-gather", 4 * part, tensor.LAYERS): 1}
    assert not sent[0] - sent[1]


def test_reductions_stay_as_they_are():
    """At stage 0, gradients of several microbatches are reduced once."""
    found = []
    for activations in (None, "host"):
        state = zerojax.shard_train_state(stacks, 0)
        step = zerojax.train_step(loss, accumulate=2, activations=activations)
        report = zerojax.audit(step, state, BATCH)
        found.append(report.totals)
    assert found[0] == found[1]


def test_value_and_grad_has_it_too():
    state = zerojax.shard_train_state(stacks, 3)
    plan = zerojax.plan(state, stage=3)
    fns = [zerojax.value_and_grad(loss, plan, activations=where) for where in ("host", None)]
    texts = [str(jax.make_jaxpr(fn)(state.params, BATCH)) for fn in fns]
    assert ["<host>" in text for text in texts] == [True, False]
    assert_close(*(jax.device_get(jax.jit(fn)(state.params, BATCH)) for fn in fns), 1e-6)


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
        trained(loss, 3, **options)


def test_a_loss_without_layers_is_refused():
    unrolled = lambda params, batch: jnp.mean(
        (params["embed"][batch] @ params["blocks"]["w"][0]) ** 2
    )
    with pytest.raises(ValueError, match="the loss has no scan of stacked parameters outside"):
        trained(unrolled, 3, activations="host")


HOW = [(loss, "host"), (with_a_policy, None)]


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
    plan = zerojax.plan(lambda: stacks(dim=dim, layers=layers), stage=3, mesh=mesh)
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
        specs = {f"params/{name}": spec for name, spec in tensor.SPECS.items()}
        plan = zerojax.plan(tensor.make_state, stage=3, mesh=mesh, axis="data", overrides=specs)
        step = zerojax.train_step(tensor.scanned, plan=plan, activations=where, prefetch=0)
        shape = jax.ShapeDtypeStruct((2**16, tensor.DIM), "float32")
        compiled = step.lower(plan.abstract(), zerojax.aot.batch(shape, plan)).compile()
        found.append(compiled.memory_analysis().temp_size_in_bytes)
    kept = tensor.LAYERS * 4 * 2**14 * tensor.DIM
    assert found[0] - found[1] > 0.3 * kept  # where backward begins, one layer's input is whole
