"""`ModuleState`, with Equinox's modules: their statistics, what is no array, and their loops."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from tests.conftest import make_mesh
from tests.families import tx
from tests.reference import assert_close

eqx = pytest.importorskip("equinox", reason="the Equinox tests need equinox")

BATCH = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)


class Net(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, key):
        self.linear = eqx.nn.Linear(8, 8, key=key)
        self.norm = eqx.nn.BatchNorm(8, "rows", mode="batch")

    def __call__(self, x, state):
        return self.norm(self.linear(x), state)


@flax.struct.dataclass
class State(zerojax.ModuleState):
    norm: Any = None


def loss(model, batch, norm):
    over_rows = jax.vmap(model, axis_name="rows", in_axes=(0, None), out_axes=(0, None))
    y, norm = over_rows(batch, norm)
    return jnp.mean((y + 1) ** 3), {"norm": norm}


@pytest.mark.parametrize("born", [True, False])
def test_batch_norm_is_a_mutable_field(born, mesh):
    def make():
        model, norm = eqx.nn.make_with_state(Net)(jax.random.key(0))
        return State.create(model, optax.sgd(0.1), norm=norm)

    state = zerojax.shard_train_state(make if born else make(), stage=3 if born else 1, mesh=mesh)
    step = zerojax.train_step(loss, mutable="norm")
    if born:
        verified = zerojax.verify(step, state, BATCH, whole_batch=False)
        verified.raise_if_wrong()
    model, norm = eqx.nn.make_with_state(Net)(jax.random.key(0))
    parts = [loss(model, part, norm)[0] for part in BATCH.reshape(8, 2, 8)]
    new, metrics = step(state, BATCH)
    np.testing.assert_allclose(metrics["loss"], np.mean(parts), rtol=1e-5)
    old = jax.tree.leaves(norm)
    assert [x.dtype for x in jax.tree.leaves(new.norm)] == [x.dtype for x in old]


def test_checkpointed_loops_fail_with_a_note(mesh):
    from equinox.internal import while_loop

    def loss(params, x):
        body = lambda carry: (carry[0] + 1, jnp.tanh(carry[1] @ params["w"]))
        run = lambda row: while_loop(
            lambda carry: carry[0] < 3, body, (0, row), max_steps=4, kind="checkpointed"
        )
        return jnp.mean(jax.vmap(lambda row: run(row)[1])(x) ** 2)

    plan = zerojax.plan(({"w": jnp.ones((8, 8))}, ()), stage=0, mesh=mesh)
    with pytest.raises(ValueError, match="Closure-converted") as caught:
        zerojax.value_and_grad(loss, plan)({"w": jnp.ones((8, 8))}, BATCH)
    assert "diffrax.DirectAdjoint()" in " ".join(caught.value.__notes__)


def test_equinox_keeps_what_is_no_array():
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

    key = jax.random.key(0)
    model = Model(
        eqx.nn.Linear(16, 16, key=key), jnp.tanh, np.ones(16, np.float32), key,
        jnp.arange(16)[::-1], jnp.arange(16) > 1,
    )  # fmt: skip
    seen = []

    def loss(model, batch):
        seen.append(type(model))
        assert model.activation is jnp.tanh and model.name == "model"
        return jnp.mean(jax.vmap(model)(batch) ** 2)

    state = zerojax.shard_train_state(zerojax.ModuleState.create(model, tx()), stage=3)
    assert [leaf.path for leaf in state.tx.plan.params] == [
        "params/linear/weight",
        "params/linear/bias",
    ]
    step = zerojax.train_step(loss)
    batch = jax.random.normal(key, (16, 16))
    zerojax.verify(step, state, batch).raise_if_wrong()
    new, _ = step(state, batch)
    trained = new.model
    assert set(seen) == {Model} and isinstance(trained, Model)
    assert trained.activation is jnp.tanh
    np.testing.assert_array_equal(trained.order, model.order)
    assert trained.linear.weight.sharding.spec == P("data")
    opt_state = tx().init(eqx.filter(model, eqx.is_inexact_array))
    grads = eqx.filter_grad(loss)(model, batch)
    updates, _ = tx().update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
    assert_close(trained.linear.weight, eqx.apply_updates(model, updates).linear.weight, 1e-5)
    evaluated = zerojax.eval_step(loss)(new, batch)["loss"]
    assert float(evaluated) == pytest.approx(float(loss(trained, batch)), rel=1e-5)


def test_the_model_of_a_padded_state_is_logical():
    class Linear(eqx.Module):
        w: jax.Array

        def __call__(self, x):
            assert self.w.shape == (257, 5)
            return x @ self.w.T

    model = Linear(jax.random.normal(jax.random.key(0), (257, 5)))
    x = np.ones((6, 5), np.float32)
    state = zerojax.ModuleState.create(model, optax.contrib.muon(1e-2))
    rests = zerojax.shard_train_state(state, mesh=make_mesh(6))
    assert rests.params.w.shape == (258, 5)
    for found in (rests.model, rests.model_of(rests.params), zerojax.logical(rests).model):
        np.testing.assert_allclose(found(x), model(x), rtol=1e-5)
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
        np.testing.assert_array_equal(new.params.w[257:], 0)
