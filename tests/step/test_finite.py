"""Steps that are left out, and losses scaled for float16."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState

import zerojax
from tests.conftest import make_mesh
from tests.support.reference import assert_equal_bits

GOOD = np.ones((8, 16), np.float32)
NAN_ON_ONE_DEVICE = np.where(np.arange(8)[:, None] == 5, np.nan, GOOD).astype(np.float32)
OVERFLOW = np.full((8, 16), 1e30, np.float32)
HALF = zerojax.Precision(compute="float16", reduce="float16")


class State(TrainState):
    seen: Any = None
    dynamic_scale: Any = None
    skipped: Any = None


def make_state(**fields):
    params = {"w": jax.random.normal(jax.random.key(0), (16, 32)), "b": jnp.zeros(3)}
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    return State.create(apply_fn=None, params=params, tx=tx, **fields)


def placed(devices=2, **fields):
    return zerojax.shard_train_state(make_state(**fields), mesh=make_mesh(devices))


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2) + jnp.sum(params["b"] ** 2)


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted():
    def loss(params, batch, seen):
        return loss_fn(params, batch), {"seen": seen + jnp.sum(batch)}

    state = placed(seen=jnp.float32(0), skipped=jnp.int32(0))
    step = zerojax.train_step(loss, skip_nonfinite=True, mutable=("seen",), accumulate=2)
    state, metrics = jax.block_until_ready(step(state, GOOD))
    assert metrics["skipped"] == 0 and state.seen > 0
    before = jax.device_get((state.params, state.opt_state, state.seen))
    for count, batch in enumerate((OVERFLOW, NAN_ON_ONE_DEVICE), 1):
        state, metrics = jax.block_until_ready(step(state, batch))
        assert metrics["skipped"] == 1 and (state.skipped, state.step) == (count, 1 + count)
        assert_equal_bits((state.params, state.opt_state, state.seen), before)
    state, metrics = step(state, GOOD)
    assert metrics["skipped"] == 0 and state.skipped == 2 and step._cache_size() == 1
    assert not np.array_equal(state.params["w"], before[0]["w"])


def test_a_field_of_that_name_that_is_no_count_is_left_alone():
    step = zerojax.train_step(loss_fn, skip_nonfinite=True)
    state, metrics = step(placed(devices=1, skipped=jnp.ones(3)), OVERFLOW)
    assert metrics["skipped"] == 1 and state.skipped.tolist() == [1, 1, 1]


@pytest.mark.parametrize("scale", [None, 2.0**20])
def test_a_scaled_loss_has_gradients_that_float16_would_lose(scale):
    def small_loss(params, batch):
        """Gradients of about 1e-9, far below what float16 holds."""
        return jnp.mean((batch @ params["w"]).astype(jnp.float32)) * 1e-7

    loss, exact = jax.value_and_grad(small_loss)(make_state().params, GOOD)
    state = placed(dynamic_scale=scale and DynamicScale(scale=scale))
    _, metrics = zerojax.train_step(small_loss, precision=HALF)(state, GOOD)
    norm = float(jnp.linalg.norm(exact["w"])) if scale else 0.0
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=2e-3)
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-2)


def test_the_scale_shrinks_where_gradients_overflow_and_grows_back():
    """In a dict, which may hold the scale too."""
    params, tx = make_state().params, optax.adam(1e-2)
    scale = DynamicScale(scale=2.0**40, growth_interval=2)
    state = {"params": params, "opt_state": tx.init(params), "dynamic_scale": scale}
    plan = zerojax.plan(state, tx=tx, mesh=make_mesh(2))
    state, step = plan.place(state), zerojax.train_step(loss_fn, tx=tx, plan=plan, precision=HALF)
    scales, skipped = [], []
    for _ in range(40):
        before = jax.device_get((state["params"], state["opt_state"]))
        state, metrics = jax.block_until_ready(step(state, GOOD))
        scales.append(float(metrics["loss_scale"]))
        skipped.append(int(metrics["skipped"]))
        if skipped[-1]:
            assert_equal_bits((state["params"], state["opt_state"]), before)
    first = skipped.index(0)
    assert first > 5 and all(skipped[:first]) and step._cache_size() == 1
    assert scales[: first + 1] == [2.0 ** (40 - i) for i in range(first + 1)]
    assert max(scales[first:]) > scales[first]  # two finite steps, and it grew


def test_verify_knows_loss_scales():
    state = placed(dynamic_scale=DynamicScale(scale=2.0**10))
    assert zerojax.verify(zerojax.train_step(loss_fn), state, GOOD).ok
