"""Microbatches: exact means are kept, and refused where they cannot be."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
from tests.loss.test_mean import BATCH, PARAMS
from tests.reference import assert_close


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda p, b: jax.lax.scan(
                lambda c, x: (c + zerojax.mean(x, where=x > 0), None), 0.0, b["x"]
            )[0] + p["w"].sum(),
            r"inside scan cannot be made exact.*outside of loops",
        ),
        (
            lambda p, b: zerojax.mean(b["x"], where=b["x"] @ p["w"] > 0),
            r"mask depends on parameters.*Compute the mask from the batch",
        ),
        *(
            (
                lambda p, b, f=f: f(zerojax.mean(b["x"] @ p["w"], where=b["mask"][:, None]), b),
                r"not linear.*outside of the loss, or use accumulate=1",
            )
            for f in (
                lambda m, b: m**2,
                lambda m, b: jnp.log(m * m + 1),
                lambda m, b: 1 / m,
                lambda m, b: m / zerojax.mean(b["x"], where=b["x"] > 0),
                lambda m, b: jax.jit(jnp.sin)(m),
                lambda m, b: zerojax.mean((b["x"] - m) ** 2),
                lambda m, b: zerojax.mean(b["x"] - m, where=b["mask"][:, None]),
                lambda m, b: jnp.where(m > 0, m, 0),
                lambda m, b: (m, {"perplexity": jnp.exp(m)}),
            )
        ),
    ],
)  # fmt: skip
def test_counts_that_accumulation_cannot_know_are_refused(loss, message):
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=optax.sgd(0.1))
    with pytest.raises(ValueError, match=message):
        zerojax.train_step(loss, accumulate=2)(zerojax.shard_train_state(state), BATCH)
    zerojax.train_step(loss)(zerojax.shard_train_state(state), BATCH)


def test_linear_uses_pass_through_accumulation():
    def loss(params, batch):
        part = zerojax.mean(batch["x"] @ params["w"], where=batch["mask"][:, None])
        vmapped = jax.vmap(lambda s: zerojax.mean(s * batch["x"], where=batch["mask"][:, None]))
        terms = jnp.stack([part, -2 * part / 3]).sum() + vmapped(jnp.arange(3.0)).sum()
        return jnp.where(batch["x"].shape[0] > 0, terms, 0.0), {"again": part.reshape(1)[0]}

    plan = zerojax.plan({"params": PARAMS}, stage=3)
    params = plan.place({"params": PARAMS})["params"]
    (one, aux), grads = zerojax.value_and_grad(loss, plan, has_aux=True)(params, BATCH)
    split = zerojax.value_and_grad(loss, plan, has_aux=True, accumulate=4)
    (four, split_aux), split_grads = split(params, BATCH)
    assert float(four) == pytest.approx(float(one), rel=1e-5)
    assert float(split_aux["again"]) == pytest.approx(float(aux["again"]), rel=1e-5)
    assert_close(split_grads, grads, 1e-5)


@pytest.mark.parametrize("accumulate", [0, -1, 1.5, "2"])
def test_accumulate_that_is_no_count(accumulate):
    with pytest.raises(ValueError, match=r"accumulate must be a positive integer"):
        zerojax.train_step(lambda p, b: 0.0, accumulate=accumulate)
