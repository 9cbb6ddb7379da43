"""Losses that close over arrays: elsewhere, sharded, or copies of parameters that rest padded."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec as P

import zerojax
import zerojax.nnx
from tests.conftest import make_mesh
from tests.support.reference import assert_close, train_state

X = np.random.default_rng(0).normal(size=(16, 84)).astype(np.float32)
NET = nn.Dense(13)  # of neither dimension do 8 devices divide the kernel


class WithTarget(TrainState):
    target: Any = None


def make():
    params = jax.jit(NET.init)(jax.random.key(0), X)["params"]
    target = jax.tree.map(lambda p: p + 0.1, params)
    return WithTarget.create(apply_fn=NET.apply, params=params, tx=optax.adam(0.1), target=target)


def difference(online, target):
    return jnp.mean((online - jax.lax.stop_gradient(target) - 1) ** 2)


def test_a_target_network_has_its_logical_shape():
    """In the ways that a loss may read it, which closes over the state."""
    plan = zerojax.plan(make)
    state = plan.place(make)
    assert state.target["kernel"].shape == (88, 13)

    def loss(state, params, x):
        online = NET.apply({"params": params}, x)
        by_logical = NET.apply({"params": zerojax.unpad(state).target}, x)
        by_apply = state.apply_fn({"params": state.target}, x)
        return difference(online, by_logical) + difference(online, by_apply)

    @jax.jit
    def value_and_grad(state, x):
        of = lambda params, x: loss(state, params, x)
        return zerojax.value_and_grad(of, plan)(plan.unpad(state).params, x)

    value, grads = value_and_grad(state, X)
    target = NET.apply({"params": make().target}, X)
    plain = lambda p: 2 * difference(NET.apply({"params": p}, X), target)
    assert_close((value, grads), jax.jit(jax.value_and_grad(plain))(make().params), 1e-5)
    held = jax.tree.map(jnp.copy, state)  # which no step donates
    _, metrics = zerojax.train_step(lambda params, x: loss(held, params, x))(state, X)
    assert float(metrics["loss"]) == pytest.approx(float(value), rel=1e-5)


def test_a_copy_read_as_it_rests_is_told_of():
    """At stage 1 no parameter rests padded, and its copy does."""
    state = zerojax.shard_train_state(make, stage=1)
    held = state.target

    def as_it_rests(params, x):
        return difference(*(NET.apply({"params": p}, x) for p in (params, held)))

    with pytest.raises(Exception, match=r"expected to generate shape \(84, 13\)") as caught:
        zerojax.train_step(as_it_rests)(state, X)
    assert any("zerojax.unpad(state)" in note for note in caught.value.__notes__)


class Teacher:
    """An object that is no pytree, with a method as the loss."""

    def __init__(self, params):
        self.params = params

    def loss(self, params, x):
        return difference(x @ params["kernel"], self.params["kernel"].mean(0))


def in_a_scan(held, params, x):
    turn = lambda total, _: (total + of(held, params, x), None)
    return jax.lax.scan(turn, 0.0, None, length=2)[0]


def of(held, params, x):
    return Teacher(held).loss(params, x)


PADDED = r"closes over params/kernel of a placed .*shape \(84, 13\) and .* zerojax.unpad\(state\)"
LOSSES = {
    "a closure": lambda held: lambda params, x: of(held, params, x),
    "a partial": lambda held: functools.partial(of, held),
    "a method": lambda held: Teacher(held).loss,
    "a pytree": lambda held: jax.tree_util.Partial(of, held),
    "in a checkpoint": lambda held: jax.checkpoint(functools.partial(of, held)),
    "in a jit": lambda held: jax.jit(functools.partial(of, held)),
    "in a scan": lambda held: functools.partial(in_a_scan, held),
    "computed": lambda held: lambda p, x: of(jax.tree.map(lambda leaf: 2 * leaf, held), p, x),
}


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """Of a teacher that rests padded: as it was placed, trained and restored."""
    plan, path = zerojax.plan(make), tmp_path_factory.mktemp("teacher") / "state"
    placed = plan.place(make)
    mean_square = lambda p, x: jnp.mean((x @ p["kernel"] + p["bias"]) ** 2)
    train = zerojax.train_step(mean_square, donate=False)
    trained, _ = train(placed, X)
    compiled, _ = train.compile(placed, X)(placed, X)
    zerojax.save(path, trained)
    return [placed, trained, compiled, zerojax.restore(path, like=plan)]


@pytest.mark.parametrize("loss_of", LOSSES.values(), ids=LOSSES)
def test_padded_parameters_that_a_loss_closes_over_are_refused(loss_of, teachers):
    student = zerojax.shard_train_state(make)
    for teacher in teachers:
        for step in (zerojax.train_step, zerojax.eval_step):
            with pytest.raises(ValueError, match=PADDED):
                step(loss_of(teacher.params))(student, X)
        with pytest.raises(ValueError, match=PADDED):
            zerojax.value_and_grad(loss_of(teacher.params), teacher.tx.plan)(student.params, X)


@pytest.mark.parametrize("loss_of", LOSSES.values(), ids=LOSSES)
def test_their_logical_values_are_taken(loss_of, teachers):
    teacher = teachers[1]
    params = jax.tree.map(jnp.asarray, zerojax.gather_params(teacher.params))
    assert params["kernel"].shape == (84, 13), "of a part of a state, too"
    wanted = float(loss_of(params)(make().params, X))
    inside = lambda params, x: loss_of(zerojax.unpad(teacher).params)(params, x)
    for loss in (loss_of(zerojax.unpad(teacher).params), inside):
        metrics = zerojax.eval_step(loss)(zerojax.shard_train_state(make), X)
        assert float(metrics["loss"]) == pytest.approx(wanted, rel=1e-5)


def test_a_network_that_is_closed_over_may_go_into_a_function_with_its_own_derivative():
    """`jax.nn.softplus`, so a discriminator's loss: its constants kept the mesh of all devices."""
    other = zerojax.shard_train_state(make)

    def compared(params, x, other):
        scores = NET.apply({"params": params}, x) - NET.apply({"params": other}, x)
        return jax.nn.softplus(scores).mean() + jax.nn.softplus(scores - other["bias"][0]).mean()

    step = zerojax.train_step(lambda p, x: compared(p, x, zerojax.unpad(other).params))
    _, metrics = step(zerojax.shard_train_state(make), X)
    params = make().params
    loss, grads = jax.jit(jax.value_and_grad(compared))(params, X, params)
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-5)
    assert float(metrics["grad_norm"]) == pytest.approx(float(optax.tree.norm(grads)), rel=1e-5)


def test_arrays_elsewhere_are_replicated():
    on_one = jax.device_put(jnp.linspace(0.5, 2, 8), jax.devices()[3])
    sharded = jax.device_put(jnp.arange(8.0), NamedSharding(make_mesh(), P("data")))
    numbers = np.asarray(on_one)
    params = {"w": jnp.ones((84, 8)) / 84}
    loss = lambda params, x: jnp.mean((jnp.tanh(x @ params["w"]) * numbers + sharded) ** 2)
    plan = zerojax.plan({"params": params})
    grads = jax.jit(zerojax.value_and_grad(loss, plan))(params, X)[1]
    assert_close(grads, jax.jit(jax.grad(loss))(params, X), 2e-6)


@pytest.mark.parametrize(("stage", "rows"), [(0, 8), (3, 9)])
def test_debug_flags_of_jax_say_where_a_bad_value_comes_from(stage, rows):
    def loss(params, batch):
        logarithms = jnp.log(batch["x"] @ params["w"])
        return jnp.mean(logarithms**2) + jnp.sqrt(params["b"])

    def step_on(x, b, **flags):
        params = {"w": jnp.ones((rows, 31)), "b": jnp.float32(b)}
        state = train_state(params, optax.sgd(0.1))
        state = zerojax.shard_train_state(state, stage=stage, mesh=make_mesh(2))
        with jax.debug_nans("nans" in flags), jax.debug_infs("infs" in flags):
            return zerojax.train_step(loss)(state, {"x": np.full((8, rows), x, np.float32)})

    for x, flag in ((np.nan, "nans"), (np.inf, "infs")):
        with pytest.raises(FloatingPointError, match="not finite, in batch/x"):
            step_on(x, 1, **{flag: True})
    for x, flag in ((-1, "nans"), (0, "infs")):
        with pytest.raises(FloatingPointError, match="encountered") as caught:
            step_on(x, 1, **{flag: True})
        assert "logarithms = jnp.log" in str(caught.traceback[-1].statement)
    with pytest.raises(FloatingPointError, match="derivatives of the loss"):
        step_on(1, 0, infs=True)
    assert np.isfinite(step_on(1, 1, nans=True, infs=True)[1]["loss"])
