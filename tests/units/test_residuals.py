"""The check that no full weight is among what is kept for backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from tests.conftest import make_mesh
from zerojax._engine import body as _body

DIM = 16
PARAMS = {"w": np.ones((DIM, DIM), "f") / DIM, "v": np.ones((3, DIM, DIM), "f") / DIM}
BATCH = np.ones(
    (8 * DIM, DIM), "f"
)  # each device's part, and all that comes of it, is of w's shape


def loss(params, x):
    x = jnp.tanh(x @ params["w"])
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["v"])
    return jnp.mean(x**2)


def with_frozen_weights(params, x):
    frozen = jax.lax.stop_gradient(params["w"])
    return jnp.mean(jnp.tanh(x @ params["v"][0] @ frozen) ** 2)


def traced(loss=loss, **options):
    plan = zerojax.plan({"params": PARAMS}, stage=3, mesh=make_mesh())
    assert all(leaf.rest.axes for leaf in plan.params)
    return jax.make_jaxpr(zerojax.value_and_grad(loss, plan, **options))(PARAMS, BATCH)


@pytest.fixture
def nothing_matches(monkeypatch):
    """A JAX whose residuals are no longer the objects that went in."""
    strip = _body.strip
    blind = lambda vjp, known, wanted: strip(vjp, [None] * len(known), wanted)
    monkeypatch.setattr(_body, "strip", blind)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_weights_kept_for_backward_are_an_error(nothing_matches, prefetch):
    with pytest.raises(RuntimeError, match=r"full weights would be kept.*regather=False"):
        traced(prefetch=prefetch)


def test_frozen_weights_kept_for_backward_are_an_error(nothing_matches):
    """As with LoRA, where nearly all are. Here no other weight is needed by backward."""
    with pytest.raises(RuntimeError, match=r"full weights would be kept.*regather=False"):
        traced(with_frozen_weights)


def test_the_remedy_runs(nothing_matches):
    traced(regather=False)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_activations_of_a_weights_shape_are_kept(prefetch, monkeypatch):
    alike = []
    check = _body.Body.check_stripped

    def spy(self, saved, varied, derive):
        weights = {(x.shape, x.dtype) for x in varied}
        alike.append(any((x.shape, x.dtype) in weights for x in saved.arrays))
        check(self, saved, varied, derive)

    monkeypatch.setattr(_body.Body, "check_stripped", spy)
    traced(prefetch=prefetch)
    assert any(alike), "no activation looked like a weight, so nothing was told apart"
