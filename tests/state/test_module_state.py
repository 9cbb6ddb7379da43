"""`ModuleState`, with Equinox's modules: what is no array in them, their loops and padding."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from tests.conftest import make_mesh
from tests.support.reference import assert_close

eqx = pytest.importorskip("equinox", reason="the Equinox tests need equinox")

TWO = make_mesh(2)


class Model(eqx.Module):
    linear: eqx.nn.Linear
    activation: object
    table: np.ndarray
    key: jax.Array
    order: jax.Array
    keep: jax.Array
    name: str = "model"

    def __call__(self, x):
        x = self.activation(self.linear(x * self.table))[self.order]
        x = jnp.where(self.keep, x, 0.0)  # wants its arrays to be of the same mesh
        return x + jax.random.uniform(self.key)


def test_what_is_no_array_is_kept():
    key, order = jax.random.key(0), jnp.arange(16)
    linear, table = eqx.nn.Linear(16, 16, key=key), np.ones(16, np.float32)
    model = Model(linear, jnp.tanh, table, key, order[::-1], order > 1)
    seen = []

    def loss(model, batch):
        seen.append(type(model))
        assert model.activation is jnp.tanh and model.name == "model"
        return jnp.mean(jax.vmap(model)(batch) ** 2)

    state = zerojax.ModuleState.create(model, optax.sgd(0.1))
    state = zerojax.shard_train_state(state, mesh=TWO)
    paths = [leaf.path for leaf in state.tx.plan.params]
    assert paths == ["params/linear/weight", "params/linear/bias"]
    batch = np.random.default_rng(0).normal(size=(16, 16)).astype("f")
    trained = zerojax.train_step(loss)(state, batch)[0].model
    assert set(seen) == {Model} and isinstance(trained, Model)
    assert trained.activation is jnp.tanh
    np.testing.assert_array_equal(trained.order, model.order)
    assert trained.linear.weight.sharding.spec == P("data")
    grads = eqx.filter_grad(loss)(model, batch)
    assert_close(trained.linear.weight, model.linear.weight - 0.1 * grads.linear.weight)


class Linear(eqx.Module):
    w: jax.Array

    def __call__(self, x):
        assert self.w.shape == (257, 5)
        return x @ self.w.T


def test_the_model_of_a_padded_state_is_logical():
    """Muon's update depends on the shape of a matrix: padding would show."""
    model, x = Linear(jax.random.normal(jax.random.key(0), (257, 5))), np.ones((6, 5), "f")
    state = zerojax.ModuleState.create(model, optax.contrib.muon(1e-2))
    rests = zerojax.shard_train_state(state, mesh=make_mesh(6))
    assert rests.params.w.shape == (258, 5)
    for shown in (rests.model, rests.model_of(rests.params), zerojax.unpad(rests).model):
        np.testing.assert_allclose(shown(x), model(x), rtol=1e-5)
    np.testing.assert_allclose(jax.jit(lambda s, x: s.model(x))(rests, x), model(x), rtol=1e-5)

    @jax.jit
    def own(state, x):
        grads = jax.grad(lambda params: jnp.mean(state.model_of(params)(x) ** 2))(state.params)
        return state.apply_gradients(grads=grads)

    step = zerojax.train_step(lambda model, x: jnp.mean(model(x) ** 2), donate=False)
    wanted = own(state, x).params.w
    for new in (own(rests, x), step(rests, x)[0]):
        assert new.params.w.sharding.spec == P("data")
        assert_close(new.model.w, wanted, 1e-5)
        assert not np.any(new.params.w[257:])
