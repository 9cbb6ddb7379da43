"""A `tensor` axis of the user's own beside ZeRO's: parameters are gathered over ZeRO's alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import zerojax
from tests.conftest import stages
from tests.step.tensor import (
    BATCH,
    DIM,
    INNER,
    LAYERS,
    cpu_mesh,
    layer,
    make_state,
    placed,
    scanned,
)

PART = LAYERS * DIM * INNER * 4 * 2 // 2  # bytes of both stacks on one of two tensor devices
SENT = PART * 3 // 4  # by each of four data devices, in one gather or one reduce-scatter


def indexed(params, x):
    for index in range(LAYERS):
        x, _ = jax.checkpoint(layer)(x, {k: v[index] for k, v in params.items()})
    return jnp.mean(x**2)


def in_two_loops(params, x):
    for half in (slice(0, 2), slice(2, 4)):
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, {k: v[half] for k, v in params.items()})
    return jnp.mean(x**2)


def in_groups(params, x):
    groups = {k: v.reshape(2, 2, *v.shape[1:]) for k, v in params.items()}
    two = lambda x, group: jax.lax.scan(jax.checkpoint(layer), x, group)
    return jnp.mean(jax.lax.scan(lambda x, g: (two(x, g)[0], None), x, groups)[0] ** 2)


def weights_sent(report):
    """Bytes by kind of what serves parameters, all of it along `data`; along `tensor`, others."""
    sent = {}
    for one in report.traffic:
        if one.wire_bytes < 1000:
            continue  # scalars
        if one.axes == ("data",):
            sent[one.kind] = sent.get(one.kind, 0) + one.wire_bytes * one.trips
        else:  # activations, and the sum of Megatron's second matmul
            assert (one.axes, one.kind) == (("tensor",), "all-reduce")
            assert not any(part.paths for part in one.parts), one
    return sent


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stage", stages(1, 3))
def test_parameters_are_gathered_and_reduced_over_data_alone(stage, accumulate):
    state = placed(cpu_mesh(), stage)
    step = zerojax.train_step(scanned, accumulate=accumulate)
    report = zerojax.audit(step, state, BATCH)
    report.check()
    sent = {
        0: {"all-reduce": 2 * SENT},
        1: {"reduce-scatter": SENT, "all-gather": SENT},
        2: {"reduce-scatter": SENT * accumulate, "all-gather": SENT},
        3: {"reduce-scatter": SENT * accumulate, "all-gather": 2 * SENT * accumulate},
    }[stage]
    assert weights_sent(report) == pytest.approx(sent, rel=1e-3)  # scalars travel along
    expected, want = make_state(), None
    for _ in range(3):
        want, grads = jax.value_and_grad(scanned)(expected.params, BATCH)
        expected = expected.apply_gradients(grads=grads)
        state, metrics = step(state, BATCH)
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)
    for name, value in zerojax.gather_params(state).items():
        np.testing.assert_allclose(value, expected.params[name], atol=1e-5)


@pytest.mark.parametrize("loss", [indexed, in_two_loops, in_groups])
def test_stacks_keep_the_axis_through_what_is_done_to_them(loss):
    state = placed(cpu_mesh(), 3)
    report = zerojax.audit(zerojax.train_step(loss), state, BATCH)
    sent = weights_sent(report)
    assert sent["reduce-scatter"] == pytest.approx(SENT)
    # XLA on CPUs drops the barriers around remats, and may gather once for both directions.
    assert sent["all-gather"] in (SENT, 2 * SENT)
    _, grads = jax.value_and_grad(loss)(make_state().params, BATCH)
    plan = zerojax.plan(state, stage=3, mesh=cpu_mesh())
    ours = jax.jit(zerojax.value_and_grad(loss, plan))(state.params, BATCH)[1]
    for name, grad in grads.items():
        np.testing.assert_allclose(ours[name], grad, atol=1e-6)


@pytest.mark.gpu_code
def test_gpus_move_no_more():
    devices = zerojax.aot.mesh("8xH100").devices.reshape(4, 2)
    mesh = jax.sharding.Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    plan = zerojax.plan(make_state, stage=3, mesh=mesh, overrides={
        "up": P(None, "data", "tensor"), "down": P(None, "tensor", "data"),
    })  # fmt: skip
    batch = zerojax.aot.batch(jax.ShapeDtypeStruct(BATCH.shape, BATCH.dtype), plan)
    report = zerojax.audit(zerojax.train_step(scanned), plan.abstract(), batch, plan=plan)
    sent = weights_sent(report)
    assert sent["reduce-scatter"] == SENT
    # The last layer's forward and backward are neighbours: XLA may gather once for both.
    assert 2 - 1 / LAYERS <= sent["all-gather"] / SENT <= 2 + 1 / LAYERS


@pytest.mark.parametrize("manual", [{"data"}, {"data", "tensor"}, {"data", "other"}])
def test_gathers_by_hand_keep_the_axis_where_it_is_xlas(manual):
    mesh = cpu_mesh()
    if "other" in manual:  # an axis of one device that is in nobody's way
        mesh = jax.make_mesh(
            (4, 2, 1), ("data", "tensor", "other"), axis_types=(AxisType.Auto,) * 3
        )
    state = placed(mesh, 3)
    plan = zerojax.plan(state, stage=3, mesh=mesh)
    specs = zerojax.param_specs(plan)

    def grads(params, x):
        loss = lambda parts: jnp.mean(zerojax.scan(layer, x, parts)[0] ** 2) / 4
        made = jax.grad(loss)(zerojax.shards(params, plan))
        return {name: grad.data for name, grad in made.items()}

    run = jax.jit(functools.partial(
        jax.shard_map, mesh=plan.mesh, in_specs=(specs, P("data")), out_specs=specs,
        axis_names=manual, check_vma=False,
    )(grads))  # fmt: skip
    found = run(state.params, BATCH)
    _, want = jax.value_and_grad(scanned)(make_state().params, BATCH)
    for name, grad in want.items():
        np.testing.assert_allclose(found[name], grad, atol=1e-6)
    if "tensor" not in manual:
        report = zerojax.audit(run.lower(state.params, BATCH).compile(), plan=plan)
        assert weights_sent(report)["reduce-scatter"] == SENT


def test_parts_over_the_axis_are_gathered_over_zeros_alone():
    """In a `shard_map` over both axes that has each device's part over `tensor` too."""
    state = placed(cpu_mesh(), 3)
    plan = zerojax.plan(state, stage=3, mesh=cpu_mesh())
    specs = zerojax.param_specs(plan, ["tensor"])
    shapes = []

    def part_of_layer(x, p):
        shapes.append(p["up"].shape)
        return x + jax.lax.psum(jnp.tanh(x @ p["up"]) @ p["down"], "tensor"), None

    def grads(params, x):  # psum makes each of the two devices along `tensor` give all of them
        loss = lambda parts: jnp.mean(zerojax.scan(part_of_layer, x, parts)[0] ** 2) / 8
        made = jax.grad(loss)(zerojax.shards(params, plan))
        return {name: grad.data for name, grad in made.items()}

    run = jax.shard_map(
        grads, mesh=plan.mesh, in_specs=(specs, P("data")), out_specs=specs, check_vma=False
    )
    found = jax.jit(run)(state.params, BATCH)
    assert set(shapes) == {(DIM, INNER // 2)}
    for name, grad in jax.grad(scanned)(make_state().params, BATCH).items():
        np.testing.assert_allclose(found[name], grad, atol=1e-6)
    with pytest.raises(ValueError, match=r"names 'pipe', .* \('data', 'tensor'\)\. Name some of"):
        zerojax.param_specs(plan, ["pipe"])


def narrow(stage, loss, mesh=None, axis=None, precision=None, **options):
    """The metrics of a step in bfloat16, of one stack that is sharded over `tensor` and one that
    is not."""
    precision = zerojax.Precision(compute="bfloat16") if precision is None else precision
    mesh = mesh or cpu_mesh()
    params = make_state().params
    params["up"] = jax.device_put(params["up"], NamedSharding(mesh, P(None, None, "tensor")))
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))
    state = zerojax.shard_train_state(state, stage, mesh=mesh, axis=axis, precision=precision)
    return zerojax.train_step(loss, **options)(state, BATCH)[1]


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (0, {}),
        (1, {"accumulate": 2}),
        (3, {}),
        (3, {"precision": zerojax.Precision(reduce="bfloat16")}),
    ],
)
def test_bfloat16_runs_on_cpu_devices(stage, options):
    """XLA:CPU aborts the process at such sums, so that they are in float32 there."""
    wanted, grads = jax.jit(jax.value_and_grad(scanned))(make_state().params, BATCH)
    metrics = narrow(stage, scanned, **options)
    assert float(metrics["loss"]) == pytest.approx(float(wanted), rel=1e-2)
    assert float(metrics["grad_norm"]) == pytest.approx(float(optax.tree.norm(grads)), rel=1e-2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("collective", ["pmean", "all_gather"])
def test_a_collective_of_the_loss_in_bfloat16_is_refused(collective, dtype):
    over = {
        "pmean": lambda x: jax.lax.pmean(x, "data"),
        "all_gather": lambda x: jax.lax.all_gather(x, "data", tiled=True).mean(0),
    }

    def loss(params, x):
        return scanned(params, x - over[collective]((x @ params["up"][0]).astype(dtype)).mean())

    if dtype == "float32":
        assert jnp.isfinite(narrow(3, loss)["loss"])
        return
    with pytest.raises(
        ValueError, match=r"beside .*\('tensor',\): XLA would abort.* Cast to float"
    ):
        narrow(3, loss)


def test_codes_of_bfloat16_are_refused():
    mesh = zerojax.mesh(node=2, gpu=2, tensor=2)
    precision = zerojax.Precision(compute="bfloat16", reduce="int8")
    with pytest.raises(
        ValueError, match=r"reduce_scatter of bfloat16.*without Precision\(reduce=\)"
    ):
        narrow(3, scanned, mesh, ("node", "gpu"), precision)
