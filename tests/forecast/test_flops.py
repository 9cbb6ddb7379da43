"""The FLOPs that a step needs, and the peak of its devices."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import zerojax
from tests.conftest import make_mesh
from tests.support.schedules import scheduled

ROWS, DIM, LAYERS = 16, 64, 3
BATCH = np.ones((ROWS, DIM), np.float32)
FORWARD = 2 * ROWS * DIM * DIM * LAYERS
TX = optax.sgd(1.0)


def loss_fn(params, batch, rng=None, *, shift=0.0):
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
    x, _ = lax.scan(layer, batch + shift, params["w"])
    return jnp.mean(x), {"shift": jnp.asarray(shift) + 1}


def make_state():
    params = {"w": jnp.zeros((LAYERS, DIM, DIM))}
    return {"params": params, "opt_state": TX.init(params), "shift": jnp.zeros(())}


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 0},
        {"stage": 3},
        {"offload": zerojax.Offload(params=True, min_bytes=0)},
        {"mesh": make_mesh(5)},  # over which `w` rests as [3, 65, 64]
    ],
    ids=str,
)
def test_a_step_needs_three_times_the_forward(options):
    """What `jax.checkpoint` computes again and padding do not count; what devices share, once."""
    plan = zerojax.plan(make_state, tx=TX, **options)
    w = plan.abstract()["params"]["w"]
    assert (w.shape[1] == 65) == ("mesh" in options)
    assert (w.sharding.memory_kind == "pinned_host") == ("offload" in options)
    for accumulate in (1, 2):
        given = {"tx": TX, "mutable": ("shift",), "accumulate": accumulate}
        step = zerojax.train_step(loss_fn, plan=plan, **scheduled(given))
        key = jax.random.key(0)
        assert zerojax.tools.step_flops(step, plan.abstract(), BATCH, key) == 3 * FORWARD
    assert zerojax.tools.step_flops(step, plan.place(make_state), BATCH) == 3 * FORWARD


@pytest.mark.parametrize("of_plan", [True, False])
def test_a_loss_that_needs_its_inputs_in_16_bits_is_counted_in_them(of_plan):
    """Its layer returns what `scan` carries only if parameters and batch are as narrow."""

    def narrow_loss(params, batch, *, shift):
        layer = lambda x, w: (x @ w + batch, None)
        x, _ = lax.scan(layer, batch.astype(jnp.bfloat16), params["w"])
        return jnp.mean(x), {"shift": shift}

    precision = zerojax.Precision(compute="bfloat16")
    plan = zerojax.plan(make_state, tx=TX, precision=precision if of_plan else None)
    given = {"tx": TX, "mutable": ("shift",), "precision": None if of_plan else precision}
    step = zerojax.train_step(narrow_loss, plan=plan, **scheduled(given))
    assert zerojax.tools.step_flops(step, plan.abstract(), BATCH) == 3 * FORWARD


def test_peak_flops_is_of_all_devices_or_unknown():
    device = lambda kind: types.SimpleNamespace(device_kind=kind)
    peak = lambda *kinds: zerojax.tools.peak_flops([*map(device, kinds)])
    assert peak("NVIDIA H100 80GB HBM3", "Tesla T4") == 989e12 + 65e12
    assert peak("NVIDIA H100 80GB HBM3", "another") is None


def convolved(x):
    kernel, names = jnp.ones((3, 3, 3, 16)), ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=names)


ONE = 2 * 8**3  # of a matmul of 8 by 8


@pytest.mark.parametrize(
    ("function", "shape", "flops"),
    [
        (lambda x: x @ jnp.ones((8, 16)), (4, 8), 2 * 4 * 8 * 16),
        (lambda x: jnp.einsum("bij,bjk->bik", x, x), (3, 8, 8), 3 * ONE),
        # Each of 2 * 8 * 8 * 16 outputs adds 3 * 3 * 3 products.
        (convolved, (2, 8, 8, 3), 2 * 2 * 8 * 8 * 16 * 27),
        (lambda x: lax.scan(lambda c, _: (c @ c, None), x, None, length=5)[0], (8, 8), 5 * ONE),
        (jax.checkpoint(lambda x: jnp.sin(x @ x)), (8, 8), ONE),
        # the more expensive branch, and a loop of unknown length once
        (lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x), (8, 8), 2 * ONE),
        (lambda x: lax.while_loop(lambda c: c[0, 0] > 0, lambda c: c @ c, x), (8, 8), ONE),
    ],
)
def test_flops_of_operations(function, shape, flops):
    state = {"params": {"x": jnp.ones(shape)}, "opt_state": ()}
    plan = zerojax.plan(state, stage=0, tx=TX)
    step = zerojax.train_step(lambda p, _: function(p["x"]).sum(), plan=plan, tx=TX)
    assert zerojax.tools.step_flops(step, state, BATCH) == 3 * flops
