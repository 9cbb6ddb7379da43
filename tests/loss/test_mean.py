"""zerojax.mean: the exact masked mean, on a mesh, through accumulation, and off it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from tests.support import draw
from tests.support.reference import assert_close

PARAMS = {"w": draw.normal(0, 16, 16)}
X = draw.normal(1, 32, 16)
# Very uneven: whole shards, and whole microbatches, without a single true element.
MASK = jnp.arange(32) % 7 < jnp.arange(32) // 9
BATCH = {"x": X, "mask": MASK, "other": jnp.arange(32) < 3}


def masked_loss(mean, params, batch):
    errors = jnp.sum((batch["x"] @ params["w"]) ** 2, -1)
    return mean(errors, where=batch["mask"]) + 0.1 * mean(jnp.abs(errors), where=batch["other"])


def plain_mean(values, where):
    return jnp.sum(jnp.where(where, values, 0)) / where.sum()


@pytest.mark.parametrize("accumulate", [1, 4])
def test_masked_loss_equals_one_device(accumulate):
    plan = zerojax.plan({"params": PARAMS})
    params = plan.place({"params": PARAMS})["params"]
    loss = jax.jit(lambda p, b: masked_loss(zerojax.mean, p, b))
    grad = jax.jit(zerojax.value_and_grad(loss, plan, accumulate=accumulate))
    value, grads = grad(params, BATCH)
    one_device = jax.jit(jax.value_and_grad(lambda p: masked_loss(plain_mean, p, BATCH)))
    wanted, wanted_grads = one_device(PARAMS)
    assert float(value) == pytest.approx(float(wanted), rel=1e-5)
    assert_close(grads, wanted_grads, 2e-6)


def test_off_the_mesh_it_is_the_plain_mean():
    where = X > 0
    np.testing.assert_allclose(zerojax.mean(X), jnp.mean(X), rtol=1e-6)
    np.testing.assert_allclose(zerojax.mean(X, where=where), jnp.mean(X, where=where), rtol=1e-6)
    assert float(zerojax.mean(X, where=jnp.zeros_like(where))) == 0
    assert float(zerojax.mean(jnp.array([1, 2]))) == 1.5
    assert float(zerojax.mean(jnp.array([1.0, 5.0]), where=jnp.array([1, 0]))) == 1


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
