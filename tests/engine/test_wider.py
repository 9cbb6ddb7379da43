"""Rules of the user's that return wider gradients than what they are of, as JAX takes them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from tests.support.reference import assert_close, train_state
from tests.support.schedules import value_and_grad


def linear_with(dtype):
    """Returns a product whose gradients are of float32, the weight's, and of this dtype."""

    def forward(w, x):
        return x @ w, (w, x)

    def backward(saved, grad):
        w, x, grad = (value.astype(jnp.float32) for value in (*saved, grad))
        return x.T @ grad, (grad @ w.T).astype(dtype)

    linear = jax.custom_vjp(lambda w, x: x @ w)
    linear.defvjp(forward, backward)
    return linear


linear, wider = linear_with(jnp.bfloat16), linear_with(jnp.float32)


def make(width):
    draw = np.random.default_rng(0)
    weights = lambda *shape: (draw.normal(size=(*shape, width, width)) / 4).astype(jnp.bfloat16)
    params = {name: weights() for name in ("called", "checkpointed", "wider")}
    params["stack"] = weights(3)
    return train_state(params, optax.sgd(0.5))


def loss(params, x, wrap=lambda layer: layer):
    x = jax.jit(linear)(params["called"], x)
    x = wider(params["wider"], jax.checkpoint(linear)(params["checkpointed"], x))
    # JAX takes no carry with a wider gradient in a loop.
    x, _ = jax.lax.scan(wrap(lambda x, w: (linear(w, x), None)), x, params["stack"])
    return jnp.mean(x.astype(jnp.float32) ** 2)


@pytest.mark.parametrize(
    ("width", "stage", "wrap", "options"),
    [
        (19, 3, jax.checkpoint, {"prefetch": 1}),  # padded
        (16, 0, lambda layer: layer, {"accumulate": 2, "order": "layers"}),
    ],
)
def test_a_wider_gradient_is_rounded_to_the_dtype_of_its_parameter(width, stage, wrap, options):
    state = make(width)
    x = np.random.default_rng(9).normal(size=(16, width)).astype(jnp.bfloat16)
    wanted_loss, wanted = jax.jit(jax.value_and_grad(loss))(state.params, x)
    assert wanted["stack"].dtype == jnp.float32, "JAX takes it"
    plan = zerojax.plan(state, stage=stage, stacked="stack")
    wrapped = functools.partial(loss, wrap=wrap)
    value, grads = jax.jit(value_and_grad(wrapped, plan, **options))(state.params, x)
    assert float(value) == pytest.approx(float(wanted_loss), rel=1e-2)
    assert_close(grads, jax.tree.map(lambda x: np.asarray(x, jnp.bfloat16), wanted), 1e-2)
