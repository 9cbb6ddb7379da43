"""Steps under `jax_enable_x64`, where Python's integers are indices of 64 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from tests.conftest import make_mesh
from tests.support.reference import train_state
from tests.support.schedules import train_step

X = np.ones((8, 16), np.float32)
NOTHING = lambda f: f


@pytest.mark.parametrize(
    ("layers", "wrap", "options"),
    [
        (3, jax.checkpoint, {}),  # rolled up
        (70, NOTHING, {}),  # as many outside of loops as travel side by side
        (3, jax.checkpoint, {"roll": True, "prefetch": 1, "order": "layers", "accumulate": 2}),
        (3, jax.checkpoint, {"roll": True, "activations": "host"}),
    ],
)
def test_layers_in_a_python_loop(layers, wrap, options):
    draw = np.random.default_rng(0)
    params = [{"w": draw.normal(size=(16, 16)).astype(np.float32) / 9} for _ in range(layers)]

    def loss(params, x):
        for p in params:
            x = wrap(lambda p, x: x + jnp.tanh(x @ p["w"]))(p, x)
        return jnp.mean(x**2)

    with jax.enable_x64(True):
        value, grads = jax.value_and_grad(loss)(params, X)
        state = train_state(params, optax.sgd(0.1))
        state = zerojax.shard_train_state(state, stage=3, mesh=make_mesh(2))
        state, metrics = train_step(loss, **options)(state, X)
        wanted = {"loss": value, "grad_norm": optax.tree.norm(grads)}
        assert {k: metrics[k].dtype for k in wanted} == dict.fromkeys(wanted, jnp.float32)
        for name, number in wanted.items():
            assert float(metrics[name]) == pytest.approx(float(number), rel=1e-5)
        new = jax.tree.map(lambda p, g: p - 0.1 * np.asarray(g), params, grads)
        for a, b in zip(*map(jax.tree.leaves, (zerojax.gather_params(state), new)), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
