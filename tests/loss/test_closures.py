"""Losses that read a state's own copies of parameters, a target network say, which rest padded."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, struct
from flax.training.train_state import TrainState

import zerojax
import zerojax.nnx
from tests.conftest import stages
from tests.reference import assert_close

X = np.random.default_rng(0).normal(size=(16, 84)).astype(np.float32)
NET = nn.Dense(13)  # of neither dimension do 8 devices divide the kernel


class WithTarget(TrainState):
    target: Any = None


def make():
    params = NET.init(jax.random.key(0), X)["params"]
    target = jax.tree.map(lambda p: p + 0.1, params)
    return WithTarget.create(apply_fn=NET.apply, params=params, tx=optax.adam(0.1), target=target)


def difference(online, target):
    return jnp.mean((online - jax.lax.stop_gradient(target) - 1) ** 2)


def loss(state, params, x):
    """Reads the target in the ways that a loss may, which closes over the state."""
    online = NET.apply({"params": params}, x)
    by_logical = NET.apply({"params": zerojax.logical(state).target}, x)
    return difference(online, by_logical) + difference(
        online, state.apply_fn({"params": state.target}, x)
    )


def wanted():
    state = make()
    target = NET.apply({"params": state.target}, X)
    return jax.value_and_grad(lambda p: 2 * difference(NET.apply({"params": p}, X), target))(
        state.params
    )


@pytest.mark.parametrize("stage", stages(1, 3))
def test_a_target_network_has_its_logical_shape(stage):
    plan = zerojax.plan(make, stage=stage)
    state = plan.place(make)
    assert state.target["kernel"].shape == (88, 13)

    @jax.jit
    def value_and_grad(state, x):
        td = lambda params, x: loss(state, params, x)
        return zerojax.value_and_grad(td, plan)(plan.logical(state).params, x)

    value, grads = value_and_grad(state, X)
    assert_close((value, grads), wanted(), 1e-5)
    held = jax.tree.map(jnp.copy, state)  # which no step donates
    _, metrics = zerojax.train_step(lambda params, x: loss(held, params, x))(state, X)
    assert float(metrics["loss"]) == pytest.approx(float(value), rel=1e-5)


@struct.dataclass
class Taught(zerojax.ModuleState):
    teacher: Any = None


def test_a_teacher_of_a_module_state():
    weights = {"w": jnp.ones((84, 13))}
    model = jax.tree_util.Partial(lambda p, x: x @ p["w"], weights)
    placed = zerojax.shard_train_state(
        lambda: Taught.create(model, optax.adam(0.1), teacher=weights), stage=3
    )
    held = jax.tree.map(jnp.copy, placed)

    def loss(model, x):
        taught = x @ zerojax.logical(held).teacher["w"]
        return jnp.mean((model(x) + taught - 3 * held.model(x)) ** 2)

    _, metrics = zerojax.train_step(loss)(placed, X)
    assert float(metrics["loss"]) == pytest.approx(np.mean((X @ np.ones((84, 13))) ** 2), rel=1e-5)


def test_a_teacher_of_nnx():
    models = [nnx.Linear(84, 13, rngs=nnx.Rngs(seed)) for seed in (0, 1)]
    expected = float(difference(*(model(X) for model in models)))
    optimizers = [nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        zerojax.nnx.shard(model, optimizer, stage=3)
    step = zerojax.nnx.train_step(lambda model, x: difference(model(x), models[1](x)))
    assert float(step(models[0], optimizers[0], X)["loss"]) == pytest.approx(expected, rel=1e-5)


def test_a_copy_read_as_it_rests_is_told_of(monkeypatch):
    """At stage 1 no parameter rests padded, and its copy does."""
    state = zerojax.shard_train_state(make, stage=1)
    held = state.target

    def as_it_rests(params, x):
        return difference(*(NET.apply({"params": p}, x) for p in (params, held)))

    with pytest.raises(Exception, match=r"expected to generate shape \(84, 13\)") as caught:
        zerojax.train_step(as_it_rests)(state, X)
    assert any("zerojax.logical(state)" in note for note in caught.value.__notes__)
    monkeypatch.setattr("zerojax._plan.padding._WARNED", [])
    plain = lambda: make().replace(apply_fn=None)
    with pytest.warns(
        UserWarning, match=r"target/kernel has the shape \(84, 13\).*logical\(state\)"
    ):
        zerojax.shard_train_state(plain, stage=1)


def test_a_network_that_is_closed_over_may_go_into_a_function_with_its_own_derivative():
    """`jax.nn.softplus`, so a discriminator's loss: its constants kept the mesh of all devices."""
    other = zerojax.shard_train_state(make)

    def compared(params, x, other):
        scores = NET.apply({"params": params}, x) - NET.apply({"params": other}, x)
        return jax.nn.softplus(scores).mean() + jax.nn.softplus(scores - other["bias"][0]).mean()

    step = zerojax.train_step(lambda p, x: compared(p, x, zerojax.logical(other).params))
    _, metrics = step(zerojax.shard_train_state(make), X)
    params = make().params
    loss, grads = jax.value_and_grad(compared)(params, X, params)
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-5)
    assert float(metrics["grad_norm"]) == pytest.approx(float(optax.tree.norm(grads)), rel=1e-5)
