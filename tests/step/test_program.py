"""The program of one device: means over the mesh, rows in order, keys folded by device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
from tests.models import ROWS, mlp
from tests.placed import place


def test_metrics_are_means_over_the_mesh():
    made = mlp(False)

    def loss(params, batch):
        return made.loss(params, batch), {"rows": batch["x"].shape[0], "x": batch["x"].mean()}

    _, metrics = zerojax.train_step(loss)(place(made), made.batch)
    wanted, grads = jax.value_and_grad(made.loss)(made.params, made.batch)
    assert float(metrics["loss"]) == pytest.approx(float(wanted), rel=1e-6)
    norm = float(optax.tree.norm(grads))
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-6)
    assert float(metrics["aux"]["rows"]) == ROWS // 8
    assert float(metrics["aux"]["x"]) == pytest.approx(float(made.batch["x"].mean()), abs=1e-6)


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("stage", [0, 3])
def test_aux_with_a_row_for_each_example_comes_back_in_the_batch_order(stage, accumulate):
    made = mlp(False)

    def loss(params, batch):
        eight = jnp.arange(ROWS // 8 // accumulate) * 1.0  # as long as a part, but no row each
        return made.loss(params, batch), (batch["y"][:, 0], eight)

    step = zerojax.train_step(loss, accumulate=accumulate)
    _, metrics = step(place(made, stage), made.batch)
    rows, eight = metrics["aux"]
    np.testing.assert_array_equal(rows, made.batch["y"][:, 0])
    np.testing.assert_allclose(eight, np.arange(ROWS // 8 // accumulate))


def test_keys_are_folded_with_the_device_index():
    params = {"w": jnp.ones((16, 16))}

    def loss(params, batch, rng):
        drawn = jax.random.uniform(rng, (batch.shape[0],))
        return jnp.mean(batch @ params["w"]), drawn

    tx = optax.sgd(0.0)
    state = zerojax.shard_train_state(TrainState.create(apply_fn=None, params=params, tx=tx))
    key = jax.random.key(9)
    for rng in (key, jax.random.key_data(key)):
        state, metrics = zerojax.train_step(loss)(state, jnp.ones((16, 16)), rng)
        wanted = [jax.random.uniform(jax.random.fold_in(key, d), (2,)) for d in range(8)]
        np.testing.assert_array_equal(metrics["aux"], np.concatenate(wanted))


def test_old_and_new_keys_are_folded_and_arrays_of_keys_are_split():
    params = {"w": jnp.ones((16, 16))}
    plan = zerojax.plan({"params": params})
    params = plan.place({"params": params})["params"]
    new = jax.random.key(3)
    each = jax.random.split(new, 16)

    def loss(params, batch, rngs, scale):
        drawn = [
            jax.random.uniform(k, batch["keys"].shape) for k in (rngs["a"], rngs["b"], rngs["c"])
        ]
        rows = jax.vmap(jax.random.uniform)(batch["keys"])
        return scale * jnp.mean(batch["x"] @ params["w"]), (*drawn, rows)

    rngs = {"a": new, "b": jax.random.PRNGKey(3), "c": jax.random.key_data(new)}
    grad = zerojax.value_and_grad(loss, plan, has_aux=True)
    batch = {"x": jnp.ones((16, 16)), "keys": each}
    (_, (a, b, c, rows)), _ = grad(params, batch, rngs=rngs, scale=2.0)
    wanted = [jax.random.uniform(jax.random.fold_in(new, d), (2,)) for d in range(8)]
    for drawn in (a, b, c):
        np.testing.assert_array_equal(drawn, np.concatenate(wanted))
    np.testing.assert_array_equal(rows, jax.vmap(jax.random.uniform)(each))
