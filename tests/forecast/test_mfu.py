"""What a step must compute, over what the devices could."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax

ROWS, DIM, LAYERS = 16, 64, 3
BATCH = np.ones((ROWS, DIM), np.float32)
FORWARD = 2 * ROWS * DIM * DIM * LAYERS


def loss_fn(params, batch, rng=None, *, shift=0.0):
    def layer(x, w):
        return jnp.tanh(x @ w), None

    x, _ = jax.lax.scan(jax.checkpoint(layer), batch + shift, params["w"])
    return jnp.mean(x), {"shift": jnp.asarray(shift) + 1}


def make_state():
    params = {"w": jnp.zeros((LAYERS, DIM, DIM))}
    return {"params": params, "opt_state": optax.sgd(1.0).init(params), "shift": jnp.zeros(())}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_needs_three_times_the_forward_at_any_stage(stage, accumulate):
    """What `jax.checkpoint` computes again, and what 8 devices share, count once."""
    plan = zerojax.plan(make_state, stage=stage, tx=optax.sgd(1.0))
    step = zerojax.train_step(
        loss_fn, plan=plan, tx=optax.sgd(1.0), accumulate=accumulate, mutable=("shift",)
    )
    assert zerojax.step_flops(step, plan.abstract(), BATCH) == 3 * FORWARD
    key = jax.random.key(0)
    assert zerojax.step_flops(step, plan.place(make_state), BATCH, key) == 3 * FORWARD


def devices(*kinds):
    return [types.SimpleNamespace(device_kind=kind) for kind in kinds]


def test_peak_flops_is_of_all_devices_or_unknown():
    h100, t4 = "NVIDIA H100 80GB HBM3", "Tesla T4"
    assert zerojax.peak_flops(devices(h100, h100)) == 2 * 989e12
    assert zerojax.peak_flops(devices(h100, t4)) == 989e12 + 65e12
    assert zerojax.peak_flops(devices(h100, "another")) is None
