"""The check that no full weight is among what is kept for backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from tests.conftest import make_mesh
from zerojax._kernel import body as _body

DIM = 16
PARAMS = {"w": np.ones((DIM, DIM), "f") / DIM, "v": np.ones((3, DIM, DIM), "f") / DIM}
BATCH = np.ones((8 * DIM, DIM), "f")  # each device's part is of w's shape, and what comes of it


def loss(params, x):
    x = jnp.tanh(x @ params["w"])
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["v"])
    return jnp.mean(x**2)


def with_frozen_weights(params, x):
    """As with LoRA, where nearly all are. Here no other weight is needed by backward."""
    frozen = jax.lax.stop_gradient(params["w"])
    return jnp.mean(jnp.tanh(x @ params["v"][0] @ frozen) ** 2)


def traced(loss=loss, **options):
    plan = zerojax.plan({"params": PARAMS}, stage=3, mesh=make_mesh())
    return jax.make_jaxpr(zerojax.value_and_grad(loss, plan, **options))(PARAMS, BATCH)


def test_weights_kept_for_backward_are_an_error_and_activations_of_their_shape_are_none(
    monkeypatch,
):
    for prefetch in (0, 1):
        traced(prefetch=prefetch)
    strip = _body.strip  # of a JAX whose residuals are no longer the objects that went in
    blind = lambda vjp, known, wanted: strip(vjp, [None] * len(known), wanted)
    monkeypatch.setattr(_body, "strip", blind)
    for kept, prefetch in ((loss, 0), (loss, 1), (with_frozen_weights, 0)):
        with pytest.raises(RuntimeError, match=r"full weights would be kept.*regather=False"):
            traced(kept, prefetch=prefetch)
    traced(regather=False)  # the remedy
