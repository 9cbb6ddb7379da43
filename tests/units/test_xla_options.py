"""The XLA options of a step: which GPUs need them, and what is combined."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec

import zerojax
from tests import audits
from tests.conftest import make_mesh
from zerojax._engine import xla_options as _xla_options


@pytest.mark.gpu_code
def test_steps_on_gpus_that_xla_does_not_know_ask_it_to_hide_communication():
    jaxpr = jax.make_jaxpr(lambda x: x)(1.0).jaxpr
    for gpus, wanted in (
        ("8xA100-80GB", {_xla_options.HIDE_LATENCY: True}), ("1xA100-80GB", {}), ("8xH100", {}),
        ("2xL4", {_xla_options.HIDE_LATENCY: True}), ("8xB200", {}), ("8xB300", {}),
        ("8xRTX5090", {_xla_options.HIDE_LATENCY: True}),
    ):  # fmt: skip
        assert _xla_options.options_for(jaxpr, zerojax.aot.mesh(gpus), ahead=False) == wanted, gpus


@pytest.mark.gpu_code
def test_loops_that_read_padded_weights_in_place_multiply_by_cublas():
    def options(policy, padded):
        layer = jax.checkpoint(lambda total, x: total + jnp.sin(x).sum(), policy=policy)
        turn = lambda total, x: (layer(total, jax.lax.all_gather(x, "data", tiled=True)), None)
        loop = lambda xs: jax.lax.scan(turn, 0.0, xs)[0]
        specs = {"in_specs": PartitionSpec(None, "data"), "out_specs": PartitionSpec()}
        mapped = jax.shard_map(loop, mesh=make_mesh(), **specs, check_vma=False)
        jaxpr = jax.make_jaxpr(mapped)(jnp.ones((3, 64))).jaxpr
        return _xla_options.options_for(jaxpr, zerojax.aot.mesh("8xH100"), True, padded)

    assert options(None, True) == {_xla_options.TRITON_GEMM: False}
    assert options(None, False) == {}
    assert options(jax.checkpoint_policies.dots_saveable, True) == {}


def test_a_layer_is_one_collective_unless_it_is_too_large_for_the_scheduler():
    gathers, scatters = _xla_options.COMBINE_GATHERS, _xla_options.COMBINE_SCATTERS
    layer = lambda size: [
        _xla_options.LoopBytes(size, size // 8, size),
        _xla_options.LoopBytes(8, 1, 8),
    ]
    most = 2**32 - 1
    assert _xla_options.combined(layer(3 * 2**30), most) == {
        gathers: 3 * 2**30 + 3 * 2**26, scatters: (3 * 2**30 + 3 * 2**26) // 8,
    }  # fmt: skip
    narrow = _xla_options.LoopBytes(3 * 2**30, 3 * 2**27, 6 * 2**30)  # gathered in 16 bits
    assert _xla_options.combined([narrow], most)[_xla_options.IN_FLIGHT] == 2
    assert _xla_options.MEMORY_SLOP not in _xla_options.combined([narrow], most)
    assert _xla_options.combined(layer(6 * 2**30), most) == {
        gathers: most, scatters: most // 8, _xla_options.MEMORY_SLOP: 150,
        _xla_options.IN_FLIGHT: 2,
    }  # fmt: skip


def test_what_a_loop_gathers_and_reduces_is_counted():
    """A gather's thresholds count what comes out; a reduce-scatter moves what goes in."""

    def turn(total, shard):
        whole = jax.lax.all_gather(shard, "data", tiled=True)
        return total + jax.lax.psum_scatter(whole, "data", tiled=True).sum(), None

    specs = {"in_specs": PartitionSpec(None, "data"), "out_specs": PartitionSpec()}
    loop = lambda xs: jax.lax.scan(turn, 0.0, xs)[0]
    mapped = jax.shard_map(loop, mesh=make_mesh(), **specs, check_vma=False)
    jaxpr = jax.make_jaxpr(mapped)(jnp.ones((3, 64))).jaxpr
    assert _xla_options.traffic_of(jaxpr).loops == [_xla_options.LoopBytes(64 * 4, 8 * 4, 64 * 4)]


@pytest.mark.gpu_code
def test_large_weights_wait_for_gradients_where_the_scheduler_knows_the_wires():
    for gpus, wanted in [
        ("8xH100", False), ("16xH100", True), ("16xB200", True), ("16xA100-80GB", False),
        ("16xRTX5090", False),
    ]:  # fmt: skip
        assert _xla_options.knows_wires(zerojax.aot.mesh(gpus)) == wanted, gpus


@pytest.mark.gpu_code
@pytest.mark.parametrize("regather", ["gpu", True])
@pytest.mark.parametrize(
    ("gpus", "shape", "wanted"),
    [("16xH100", (2, 8), True), ("8xH100", (2, 4), False), ("8xA100-80GB", (2, 4), True)],
)
def test_two_collectives_are_in_flight_between_hosts(gpus, shape, regather, wanted):
    mesh = zerojax.aot.mesh(gpus, shape, ("node", "gpu"))
    plan = zerojax.plan(audits.make_state, mesh=mesh, axis=("node", "gpu"))
    step = zerojax.train_step(audits.loss, plan=plan, regather=regather)
    jaxpr = step.without_options.trace(plan.abstract(), audits.tokens(plan)).jaxpr.jaxpr
    options = _xla_options.options_for(jaxpr, mesh, ahead=True)
    assert options.get(_xla_options.IN_FLIGHT) == (2 if wanted else None)
    assert options[_xla_options.DOUBLE_BUFFER]


def test_rows_of_tables_are_no_weights():
    """A loop over microbatches that looks tokens up is none over layers."""
    params = {"table": jnp.ones((512, 32))}
    plan = zerojax.plan({"params": params}, mesh=make_mesh())
    loss = lambda p, tokens: jnp.mean(p["table"][tokens] ** 2)
    grad = zerojax.value_and_grad(loss, plan, accumulate=2)
    jaxpr = jax.make_jaxpr(grad)(plan.abstract()["params"], jnp.zeros(64, int)).jaxpr
    (loop,) = _xla_options.traffic_of(jaxpr).loops
    assert "all_to_all" in str(jaxpr)
    assert loop == _xla_options.LoopBytes()


def layers_in_line(remat):
    layer = lambda x, w: jnp.tanh(x @ w)
    layer = jax.checkpoint(layer) if remat else layer

    def loss(params, x):
        for w in params["layers"]:
            x = layer(x, w)
        return jnp.mean(x**2)

    return loss


@pytest.mark.parametrize("accumulate", [1, 2])
def test_layers_in_no_loop_are_counted_one_by_one(accumulate):
    """A loop over microbatches is none over layers."""
    params = {"layers": [jnp.ones((64, 64))] * 3}
    plan = zerojax.plan({"params": params}, mesh=make_mesh())
    whole, shard = 64 * 64 * 4, 64 * 64 * 4 // 8

    def traffic(remat):
        grad = zerojax.value_and_grad(layers_in_line(remat), plan, accumulate=accumulate)
        jaxpr = jax.make_jaxpr(grad)(plan.abstract()["params"], jnp.ones((32, 64))).jaxpr
        return _xla_options.traffic_of(jaxpr, microbatches=accumulate)

    found = traffic(remat=True)
    layer = _xla_options.LoopBytes(whole, shard, whole, in_place=True)
    assert found.layers == [layer] * 3 and not found.loops
    found = traffic(remat=False)
    assert not found.layers and not found.loops
    assert (found.rest.scattered, found.rest.reduced) == (3 * shard, 3 * whole)


def test_thresholds_of_layers_in_no_loop():
    gathers, scatters = _xla_options.COMBINE_GATHERS, _xla_options.COMBINE_SCATTERS
    size, bucket = 2**30, _xla_options.BUCKET
    layer, small = (_xla_options.LoopBytes(n, n // 8, n) for n in (size, 2**20))
    in_line = lambda *layers, rest=small: _xla_options.in_line(
        _xla_options.Traffic(layers=list(layers), rest=rest)
    )
    assert in_line(layer, small) == {gathers: size + size // 16, scatters: (size + size // 16) // 8}
    assert in_line(small, small) == {gathers: bucket, scatters: bucket // 8}
    assert in_line(rest=layer) == {scatters: bucket // 8}
    assert in_line(rest=_xla_options.LoopBytes(size)) == {}
    looped = _xla_options.Traffic([_xla_options.LoopBytes(0, 1, 8)], rest=layer)
    assert _xla_options.in_line(looped) == {}


@pytest.mark.gpu_code
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("remat", [True, False])
def test_layers_in_no_loop_are_not_combined_into_one_collective(remat, accumulate):
    dim, layers = 4096, 6
    make = lambda: TrainState.create(
        apply_fn=None, tx=optax.adam(1e-3),
        params={"layers": [jnp.ones((dim, dim))] * layers},
    )  # fmt: skip
    plan = zerojax.plan(make, stage=3, mesh=zerojax.aot.mesh("16xH100"))
    rows = jax.ShapeDtypeStruct((16 * 2048 * accumulate, dim), "float32")
    step = zerojax.train_step(layers_in_line(remat), accumulate=accumulate)
    report = zerojax.audit(step, plan.abstract(), zerojax.aot.batch(rows, plan)).check()
    for kind in ("all-gather", "reduce-scatter"):
        largest = max(one.wire_bytes for one in report.traffic if one.kind == kind)
        assert largest <= dim * dim * 4, kind
