"""The FLOPs that a step needs, and the peak of its devices."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from tests.conftest import make_mesh
from zerojax._forecast import mfu as _mfu

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


def test_parameters_in_host_memory_need_the_same():
    offload = zerojax.Offload(params=True, min_bytes=0)
    plan = zerojax.plan(make_state, tx=optax.sgd(1.0), offload=offload)
    step = zerojax.train_step(loss_fn, plan=plan, tx=optax.sgd(1.0), mutable=("shift",))
    assert plan.abstract()["params"]["w"].sharding.memory_kind == "pinned_host"
    assert zerojax.step_flops(step, plan.abstract(), BATCH) == 3 * FORWARD


def test_padding_needs_no_flops():
    """Over five devices `w` rests as [3, 65, 64]."""
    plan = zerojax.plan(make_state, tx=optax.sgd(1.0), mesh=make_mesh(5))
    step = zerojax.train_step(loss_fn, plan=plan, tx=optax.sgd(1.0), mutable=("shift",))
    assert plan.abstract()["params"]["w"].shape == (LAYERS, 65, DIM)
    assert zerojax.step_flops(step, plan.abstract(), BATCH) == 3 * FORWARD


def devices(*kinds):
    return [types.SimpleNamespace(device_kind=kind) for kind in kinds]


def test_peak_flops_is_of_all_devices_or_unknown():
    h100, t4 = "NVIDIA H100 80GB HBM3", "Tesla T4"
    assert zerojax.peak_flops(devices(h100, h100)) == 2 * 989e12
    assert zerojax.peak_flops(devices(h100, t4)) == 989e12 + 65e12
    assert zerojax.peak_flops(devices(h100, "another")) is None


def test_flops_of_matmuls_and_convolutions():
    a, b = jnp.ones((4, 8)), jnp.ones((8, 16))
    assert _mfu.matmul_flops(lambda a, b: a @ b, a, b) == 2 * 4 * 8 * 16
    batched = lambda x: jnp.einsum("bij,bjk->bik", x, x)
    assert _mfu.matmul_flops(batched, jnp.ones((3, 8, 8))) == 3 * 2 * 8**3
    image, kernel = jnp.ones((2, 8, 8, 3)), jnp.ones((3, 3, 3, 16))
    conv = lambda x, k: jax.lax.conv_general_dilated(
        x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    # Each of 2 * 8 * 8 * 16 outputs adds 3 * 3 * 3 products.
    assert _mfu.matmul_flops(conv, image, kernel) == 2 * 2 * 8 * 8 * 16 * 27
    assert _mfu.matmul_flops(jnp.tanh, a) == 0


def test_flops_in_loops_branches_and_remat():
    x = jnp.ones((8, 8))
    one = 2 * 8**3
    scan = lambda x: jax.lax.scan(lambda c, _: (c @ c, None), x, None, length=5)[0]
    assert _mfu.matmul_flops(scan, x) == 5 * one
    assert _mfu.matmul_flops(jax.checkpoint(lambda x: jnp.sin(x @ x)), x) == one
    cond = lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x)
    assert _mfu.matmul_flops(cond, x) == 2 * one
    loop = lambda x: jax.lax.while_loop(lambda c: c[0, 0] > 0, lambda c: c @ c, x)
    assert _mfu.matmul_flops(loop, x) == one
    assert _mfu.matmul_flops(jax.jit(lambda x: x @ x), x) == one
