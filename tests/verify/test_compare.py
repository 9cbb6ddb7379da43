"""Leaf against reference: how far rounding may go, and what cannot be told."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from tests.models import ROWS, mlp
from tests.reference import make_state
from tests.verify.steps import (
    ADAM,
    MASKED,
    W,
    X,
    check_by_hand,
    masked_loss,
    placed,
    roots,
    squares,
)
from zerojax._step import parameter as _parameter


def attention(params, x):
    keys = x @ params["w"] + params["bias"]  # shifts all logits of a query alike
    return jnp.mean((jax.nn.softmax((x @ params["w"]) @ keys.mT) @ x - x[:, ::-1]) ** 2)


def test_noise_that_adam_blows_up_is_no_false_alarm():
    params, x = {**W, "bias": jnp.ones(16)}, X.reshape(ROWS // 4, 4, 24)
    report = zerojax.verify(zerojax.train_step(attention), placed(params), x)
    assert report.ok, report
    unseen = {c.path: c for c in report.checks if c.verdict == "too small to tell"}
    assert {"grads/bias", "params/bias"} <= unseen.keys() and len(unseen) <= 4
    assert 0 < unseen["params/bias"].scale <= unseen["params/bias"].tolerance


@pytest.mark.parametrize("options", [
    {"compute": "bfloat16"},
    {"compute": "bfloat16", "reduce": "float32", "param": "bfloat16", "master": "float32"},
], ids=["compute", "paper"])  # fmt: skip
def test_narrow_precision_widens_the_tolerance(options):
    made = mlp(False)
    precision = zerojax.Precision(**options)
    state = zerojax.shard_train_state(make_state(made, ADAM), 2, precision=precision)
    step = zerojax.train_step(made.loss)
    report = zerojax.verify(step, state, made.batch)
    assert report.ok, report
    assert report.tolerance == 5e-2
    assert "mean over the parts, in float32" in report.losses
    tight = zerojax.verify(step, state, made.batch, tolerance=np.float32(1e-6))
    assert not tight.ok and tight.tolerance == np.float32(1e-6)


@pytest.mark.parametrize("factor", [1, 8])
def test_weights_cast_to_bfloat16_are_judged_so_where_the_loss_widens_them_again(
    factor, monkeypatch
):
    reduced = _parameter.Parameter.reduced
    monkeypatch.setattr(
        _parameter.Parameter, "reduced", lambda self, grad: reduced(self, grad) * factor
    )
    loss = lambda p, x: squares({"w": p["w"].astype(jnp.float32)}, x.astype(jnp.float32)).mean()
    step = zerojax.train_step(loss, precision=zerojax.Precision(compute="bfloat16"))
    report = zerojax.verify(step, placed(W), X)
    assert report.ok == (factor == 1), report
    assert factor == 1 or "grads/w" in {check.path for check in report.wrong}


def test_what_a_narrow_loss_means_is_judged_in_float32():
    loss = lambda params, batch: 1 + 1e-3 * masked_loss(params, batch)  # alike but for 0.1%
    state = placed(W, precision=zerojax.Precision(compute="bfloat16"))
    report = zerojax.verify(zerojax.train_step(loss), state, MASKED)
    assert [c.path for c in report.wrong] == ["loss on the whole batch"], report


def test_a_dropped_reduction_shows_on_later_devices():
    report = check_by_hand("dropped", tx=optax.sgd(0.1))
    assert {c.path for c in report.checks if c.copies_differ} == {"loss", "params/w"}
    assert report.checks[0].verdict == "wrong" and report.checks[0].excess > 100


@pytest.mark.parametrize("x", [
    jnp.full_like(X, jnp.nan), jnp.zeros_like(X)
], ids=["loss", "gradients"])  # fmt: skip
def test_a_nan_on_both_sides_is_no_agreement(x):
    report = zerojax.verify(zerojax.train_step(roots), placed(W), x)
    assert not report.ok and not report.wrong
    assert {check.path for check in report.not_finite} >= {"grads/w", "params/w"}
    assert str(report).startswith("cannot tell")
    with pytest.raises(AssertionError, match=r"not finite on one device.*jax.debug_nans\(True\)"):
        report.raise_if_wrong()
