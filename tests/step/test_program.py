"""The program of one device: means over the mesh, rows in order, keys folded by device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
from tests import linear

ROWS = np.random.default_rng(0).normal(size=(64, 64)).astype("f")


@pytest.mark.parametrize("accumulate", [1, 4])
def test_aux_is_a_mean_over_the_mesh_and_has_rows_in_the_order_of_the_batch(accumulate):
    share = len(ROWS) // 8 // accumulate

    def loss(params, batch):
        aux = {"count": batch.shape[0], "mean": batch.mean(), "rows": batch[:, 0]}
        return linear.loss(params, batch), aux | {"share": jnp.arange(share) * 1.0}  # no rows

    _, metrics = zerojax.train_step(loss, accumulate=accumulate)(linear.placed(), ROWS)
    aux = metrics["aux"]
    assert float(aux["count"]) == share
    assert float(aux["mean"]) == pytest.approx(float(ROWS.mean()), abs=1e-6)
    np.testing.assert_array_equal(aux["rows"], ROWS[:, 0])
    np.testing.assert_allclose(aux["share"], np.arange(share))


def test_keys_are_folded_with_the_device_index():
    params = {"w": np.ones((16, 16), "f")}

    def loss(params, batch, rng):
        drawn = jax.random.uniform(rng, (batch.shape[0],))
        return jnp.mean(batch @ params["w"]), drawn

    tx = optax.sgd(0.0)
    state = zerojax.shard_train_state(TrainState.create(apply_fn=None, params=params, tx=tx))
    key = jax.random.key(9)
    for rng in (key, jax.random.key_data(key)):
        state, metrics = zerojax.train_step(loss)(state, np.ones((16, 16), "f"), rng)
        np.testing.assert_array_equal(metrics["aux"], drawn_by(key))


@jax.jit
def drawn_by(key):
    return jnp.concatenate([jax.random.uniform(jax.random.fold_in(key, d), (2,)) for d in range(8)])


def test_old_and_new_keys_are_folded_and_arrays_of_keys_are_split():
    plan = zerojax.plan({"params": {"w": np.ones((16, 16), "f")}})
    params = plan.place({"params": {"w": np.ones((16, 16), "f")}})["params"]
    new = jax.random.key(3)
    each = jax.random.split(new, 16)

    def loss(params, batch, rngs, scale):
        drawn = [
            jax.random.uniform(k, batch["keys"].shape) for k in (rngs["a"], rngs["b"], rngs["c"])
        ]
        rows = jax.vmap(jax.random.uniform)(batch["keys"])
        return scale * jnp.mean(batch["x"] @ params["w"]), (*drawn, rows)

    rngs = {"a": new, "b": jax.random.PRNGKey(3), "c": jax.random.key_data(new)}
    grad = jax.jit(zerojax.value_and_grad(loss, plan, has_aux=True))
    batch = {"x": np.ones((16, 16), "f"), "keys": each}
    (_, (a, b, c, rows)), _ = grad(params, batch, rngs=rngs, scale=2.0)
    for drawn in (a, b, c):
        np.testing.assert_array_equal(drawn, drawn_by(new))
    np.testing.assert_array_equal(rows, jax.jit(jax.vmap(jax.random.uniform))(each))
