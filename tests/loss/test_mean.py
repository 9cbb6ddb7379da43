"""zerojax.mean: the exact masked mean, on a mesh, through accumulation, and off it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from tests.conftest import make_mesh
from tests.support import draw
from tests.support.reference import assert_close

X = draw.normal(1, 32, 16)


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


# -- through microbatches

PARAMS = {"w": draw.normal(0, 16, 16)}
# Very uneven: whole shards, and whole microbatches, without a single true element.
MASK = np.arange(32) % 7 < np.arange(32) // 9
BATCH = {"x": X, "mask": MASK}
PLAN = zerojax.plan({"params": PARAMS}, mesh=make_mesh(2))
PAIR = zerojax.plan((PARAMS, ()), mesh=make_mesh(2))


def masked(params, batch, mean=zerojax.mean):
    return mean(batch["x"] @ params["w"], where=batch["mask"][:, None])


def in_a_loop(params, batch):
    body = lambda total, x: (total + zerojax.mean(x, where=x > 0), None)
    return jax.lax.scan(body, 0.0, batch["x"])[0] + params["w"].sum()


NOT_LINEAR = r"not linear.*outside of the loss, or use accumulate=1"


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (in_a_loop, r"inside scan cannot be made exact.*outside of loops"),
        (
            lambda p, b: zerojax.mean(b["x"], where=b["x"] @ p["w"] > 0),
            "mask depends on parameters.*Compute the mask from the batch",
        ),
        (lambda p, b: masked(p, b) ** 2, NOT_LINEAR),
        (lambda p, b: masked(p, b) * masked(p, b), NOT_LINEAR),
        (lambda p, b: 1 / masked(p, b), NOT_LINEAR),
        (lambda p, b: jax.jit(jnp.sin)(masked(p, b)), NOT_LINEAR),
        (lambda p, b: zerojax.mean(b["x"] - masked(p, b)), NOT_LINEAR),
        (lambda p, b: jnp.mean((b["x"] - masked(p, b)) * b["x"]), NOT_LINEAR),  # a baseline
        (lambda p, b: masked(p, b) / b["mask"].sum(), NOT_LINEAR),
        (lambda p, b: jnp.where(b["mask"], masked(p, b), 0).mean(), NOT_LINEAR),
        (lambda p, b: jnp.where(masked(p, b) > 0, masked(p, b), 0), NOT_LINEAR),
        (lambda p, b: (masked(p, b), {"perplexity": jnp.exp(masked(p, b))}), NOT_LINEAR),
    ],
)
def test_counts_that_accumulation_cannot_know_are_refused(loss, message):
    state = PAIR.abstract()
    step = functools.partial(zerojax.train_step, loss, plan=PAIR, tx=optax.identity())
    with pytest.raises(ValueError, match=message):
        step(accumulate=2).trace(state, BATCH)
    step().trace(state, BATCH)


def test_linear_uses_pass_through_accumulation():
    def loss(params, batch, mean=zerojax.mean):
        part = masked(params, batch, mean)
        vmapped = jax.vmap(lambda s: mean(s * batch["x"], where=batch["mask"][:, None]))
        terms = jnp.stack([part, -2 * part / 3]).sum() + vmapped(jnp.arange(3.0)).sum()
        terms += jnp.mean(batch["x"] ** 2 - params["w"][0, 0] * part)
        return jnp.where(batch["x"].shape[0] > 0, terms, 0.0), {"again": part.reshape(1)[0]}

    plain = jax.value_and_grad(lambda p: loss(p, BATCH, jnp.mean), has_aux=True)
    (value, aux), grads = jax.jit(plain)(PARAMS)
    split = jax.jit(zerojax.value_and_grad(loss, PLAN, has_aux=True, accumulate=4))
    (got, got_aux), got_grads = split(PLAN.place({"params": PARAMS})["params"], BATCH)
    assert float(got) == pytest.approx(float(value), rel=1e-5)
    assert float(got_aux["again"]) == pytest.approx(float(aux["again"]), rel=1e-5)
    assert_close(got_grads, grads, 1e-5)
