"""zerojax.mean: the exact masked mean, on a mesh, through accumulation, and off it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
from tests.conftest import stages
from tests.reference import assert_close

PARAMS = {"w": jax.random.normal(jax.random.key(0), (16, 16))}
X = jax.random.normal(jax.random.key(1), (32, 16))
# Very uneven: whole shards, and whole microbatches, without a single true element.
MASK = jnp.arange(32) % 7 < jnp.arange(32) // 9


def masked_loss(mean, params, batch):
    errors = jnp.sum((batch["x"] @ params["w"]) ** 2, -1)
    return mean(errors, where=batch["mask"]) + 0.1 * mean(jnp.abs(errors), where=batch["other"])


def plain_mean(values, where):
    return jnp.sum(jnp.where(where, values, 0)) / where.sum()


BATCH = {"x": X, "mask": MASK, "other": jnp.arange(32) < 3}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jitted"])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("stage", stages(1, 3))
def test_masked_loss_equals_one_device(stage, accumulate, wrap):
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=optax.sgd(0.1))
    plan = zerojax.plan(state, stage=stage)
    loss = wrap(lambda p, b: masked_loss(zerojax.mean, p, b))
    grad = jax.jit(zerojax.value_and_grad(loss, plan, accumulate=accumulate))
    value, grads = grad(plan.place(state).params, BATCH)
    wanted, wanted_grads = jax.value_and_grad(
        lambda p: masked_loss(plain_mean, p, BATCH)
    )(PARAMS)  # fmt: skip
    assert float(value) == pytest.approx(float(wanted), rel=1e-5)
    assert_close(grads, wanted_grads, 2e-6)


def test_mean_of_local_means_would_be_wrong():
    plan = zerojax.plan({"params": PARAMS}, stage=3)
    params = plan.place({"params": PARAMS})["params"]
    local = lambda p, b: jnp.nan_to_num(masked_loss(plain_mean, p, b))
    wrong, _ = zerojax.value_and_grad(local, plan)(params, BATCH)
    right = masked_loss(plain_mean, PARAMS, BATCH)
    assert abs(float(wrong) - float(right)) > 0.1 * float(right)


def test_off_the_mesh_it_is_the_plain_mean():
    np.testing.assert_allclose(zerojax.mean(X), jnp.mean(X), rtol=1e-6)
    where = X > 0
    np.testing.assert_allclose(zerojax.mean(X, where=where), jnp.mean(X, where=where), rtol=1e-6)
    assert float(zerojax.mean(X, where=jnp.zeros_like(where))) == 0
    assert float(zerojax.mean(jnp.array([1, 2]))) == 1.5


def test_mask_for_rows_broadcasts_over_tokens():
    values = jnp.arange(12.0).reshape(3, 4)
    where = jnp.array([[True], [False], [True]])
    assert float(zerojax.mean(values, where=where)) == pytest.approx(5.5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_values_are_summed_wide(dtype):
    values = (jnp.arange(100_000) % 7).astype(dtype)
    mean = zerojax.mean(values)
    assert mean.dtype == dtype
    assert float(mean) == pytest.approx(float(jnp.mean(values.astype(jnp.float32))), rel=4e-3)


def test_weights_are_no_mask():
    with pytest.raises(TypeError, match=r"float32.*takes no weights. Pass weights > 0"):
        zerojax.mean(X, where=jnp.ones_like(X))
    assert float(zerojax.mean(jnp.array([1.0, 5.0]), where=jnp.array([1, 0]))) == 1
