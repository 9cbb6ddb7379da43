"""A `tensor` axis of the user's own beside ZeRO's: parameters are gathered over ZeRO's alone."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import zerojax
from tests.step.tensor import (
    BATCH,
    DIM,
    LAYERS,
    PART,
    SENT,
    cpu_mesh,
    layer,
    make_state,
    placed,
    scanned,
    weights_sent,
)
from tests.support.reference import train_state
from tests.support.schedules import train_step


@functools.cache
def plain_grads():
    return jax.device_get(jax.jit(jax.grad(scanned))(make_state().params, BATCH))


# -- steps


@pytest.mark.parametrize(
    ("stage", "sent"),
    [
        (1, {"reduce-scatter": SENT, "all-gather": SENT}),
        (3, {"reduce-scatter": 2 * SENT, "all-gather": 4 * SENT}),
    ],
)
def test_parameters_are_gathered_and_reduced_over_data_alone(stage, sent):
    state = placed(cpu_mesh(), stage)
    step = zerojax.train_step(scanned, accumulate=2)
    report = zerojax.audit(step, state, BATCH)
    report.check()
    assert weights_sent(report) == pytest.approx(sent, rel=1e-3)  # scalars travel along
    assert weights_sent(report, "tensor").keys() == {"all-reduce"}  # Megatron's, of activations
    wanted = jax.jit(lambda s, g: s.apply_gradients(grads=g))(make_state(), plain_grads())
    state, _ = step(state, BATCH)
    for name, value in zerojax.gather_params(state).items():
        np.testing.assert_allclose(value, wanted.params[name], atol=1e-5)


def indexed(params, x):
    for index in range(LAYERS):
        x, _ = jax.checkpoint(layer)(x, {k: v[index] for k, v in params.items()})
    return jnp.mean(x**2)


def in_groups(params, x):
    groups = {k: v.reshape(2, 2, *v.shape[1:]) for k, v in params.items()}
    two = lambda x, group: jax.lax.scan(jax.checkpoint(layer), x, group)
    return jnp.mean(jax.lax.scan(lambda x, g: (two(x, g)[0], None), x, groups)[0] ** 2)


@pytest.mark.parametrize("loss", [indexed, in_groups])
def test_stacks_keep_the_axis_through_what_is_done_to_them(loss):
    state = placed(cpu_mesh(), 3)
    plan = zerojax.plan(state, mesh=cpu_mesh())
    lowered = jax.jit(zerojax.value_and_grad(loss, plan)).lower(state.params, BATCH)
    compiled = lowered.compile()
    sent = weights_sent(zerojax.audit(compiled, plan=plan))
    assert sent["reduce-scatter"] == pytest.approx(SENT)
    # XLA on CPUs drops the barriers around remats, and may gather once for both directions.
    assert sent["all-gather"] in (SENT, 2 * SENT)
    for name, grad in compiled(state.params, BATCH)[1].items():
        np.testing.assert_allclose(grad, plain_grads()[name], atol=1e-6)


@pytest.mark.gpu_code
def test_gpus_move_no_more():
    devices = zerojax.aot.mesh("8xH100").devices.reshape(4, 2)
    mesh = Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    plan = zerojax.plan(make_state, stage=3, mesh=mesh, overrides={
        "up": P(None, "data", "tensor"), "down": P(None, "tensor", "data"),
    })  # fmt: skip
    batch = zerojax.aot.batch(jax.ShapeDtypeStruct(BATCH.shape, BATCH.dtype), plan)
    report = zerojax.audit(zerojax.train_step(scanned), plan.abstract(), batch, plan=plan)
    sent, once = weights_sent(report), PART * 3 // 4
    assert sent["reduce-scatter"] == once
    # The last layer's forward and backward are neighbours: XLA may gather once for both.
    assert 2 - 1 / LAYERS <= sent["all-gather"] / once <= 2 + 1 / LAYERS


# -- bfloat16


def narrow(stage, loss, mesh=None, axis=None, precision=None, **options):
    """A step in bfloat16, of one stack that is sharded over `tensor` and one that is not."""
    precision = precision or zerojax.Precision(compute="bfloat16")
    mesh, params = mesh or cpu_mesh(), make_state().params
    params["up"] = jax.device_put(params["up"], NamedSharding(mesh, P(None, None, "tensor")))
    state = train_state(params, optax.sgd(0.1))
    state = zerojax.shard_train_state(state, stage, mesh=mesh, axis=axis, precision=precision)
    return train_step(loss, **options), state, BATCH


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (0, {}),
        (1, {"accumulate": 2}),
        (3, {"precision": zerojax.Precision(compute="bfloat16", reduce="bfloat16")}),
    ],
)
def test_bfloat16_runs_on_cpu_devices(stage, options):
    """XLA:CPU aborts the process at such sums, so that they are in float32 there."""
    step, *args = narrow(stage, scanned, **options)
    norm = float(optax.tree.norm(plain_grads()))
    assert float(step(*args)[1]["grad_norm"]) == pytest.approx(norm, rel=1e-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_collective_of_the_loss_in_bfloat16_is_refused(dtype):
    def loss(params, x):
        return scanned(
            params, x - jax.lax.pmean((x @ params["up"][0]).astype(dtype).mean(), "data")
        )

    step, *args = narrow(3, loss)
    said = r"beside .*\('tensor',\): XLA would abort.* Cast to float"
    refused = pytest.raises(ValueError, match=said)
    with refused if dtype == "bfloat16" else contextlib.nullcontext():
        step.trace(*args)


def test_codes_of_bfloat16_are_refused():
    mesh = zerojax.mesh(node=2, gpu=2, tensor=2)
    precision = zerojax.Precision(compute="bfloat16", reduce="int8")
    step, *args = narrow(3, scanned, mesh, ("node", "gpu"), precision)
    with pytest.raises(
        ValueError, match=r"reduce_scatter of bfloat16.*without Precision\(reduce=\)"
    ):
        step.trace(*args)


# -- an axis that nothing is sharded over


def test_an_axis_that_nothing_is_sharded_over_is_refused():
    """Every replica would compute the same batch, and nobody would see."""
    state = zerojax.shard_train_state(make_state(), mesh=cpu_mesh())
    step = zerojax.train_step(scanned, donate=False)

    def tensor(params, batch):  # a function's name is no axis
        return scanned(params, batch)

    remedy = (
        r"mesh axes {'tensor': 2}.*Each of 2 replicas would compute the same batch.*"
        r"axis=\('data', 'tensor'\), have one split seq.*='tensor', or pass a mesh without"
    )
    uses = step, step.lower, step.trace, zerojax.eval_step(scanned)
    for use in (*uses, zerojax.train_step(jax.jit(tensor))):
        with pytest.raises(ValueError, match=remedy):
            use(state, BATCH)


def test_an_axis_that_the_model_uses_by_itself_is_its_own_affair():
    mesh = cpu_mesh()
    step, state = zerojax.train_step(scanned), zerojax.shard_train_state(make_state(), mesh=mesh)
    step.trace(zerojax.shard_train_state(make_state(), mesh=mesh, axis=mesh.axis_names), BATCH)
    step.trace(state, jax.device_put(BATCH, NamedSharding(mesh, P("data", "tensor"))))
    table = jax.device_put(np.eye(DIM, dtype="f"), NamedSharding(mesh, P(None, "tensor")))
    zerojax.train_step(lambda p, x: scanned(p, x @ table)).trace(state, BATCH)
    along = lambda x: jax.lax.with_sharding_constraint(x, P(None, "tensor"))
    with jax.set_mesh(mesh):
        zerojax.train_step(lambda p, x: scanned(p, along(x))).trace(state, BATCH)
