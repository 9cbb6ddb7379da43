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
from tests.conftest import stages
from tests.reference import assert_equal_bits

GOOD = np.ones((16, 16), np.float32)
BAD = {
    "nan on one device": np.where(np.arange(16)[:, None] == 9, np.nan, GOOD).astype(np.float32),
    "overflow": np.full((16, 16), 1e30, np.float32),
}


class State(TrainState):
    seen: Any = None
    dynamic_scale: Any = None
    skipped: Any = None


def make_state(**fields):
    params = {"w": jax.random.normal(jax.random.key(0), (16, 32)), "b": jnp.zeros(3)}
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    return State.create(apply_fn=None, params=params, tx=tx, **fields)


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2) + jnp.sum(params["b"] ** 2)


def host(tree):
    return jax.device_get(tree)


@pytest.mark.parametrize("stage", stages(1, 3))
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("bad", BAD)
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(stage, accumulate, bad):
    state = zerojax.shard_train_state(make_state(), stage)
    step = zerojax.train_step(loss_fn, skip_nonfinite=True, accumulate=accumulate)
    state, metrics = jax.block_until_ready(step(state, GOOD))
    assert int(metrics["skipped"]) == 0
    before = host((state.params, state.opt_state))
    state, metrics = jax.block_until_ready(step(state, BAD[bad]))
    assert int(metrics["skipped"]) == 1 and int(state.step) == 2
    assert_equal_bits((state.params, state.opt_state), before)
    state, metrics = jax.block_until_ready(step(state, GOOD))
    assert int(metrics["skipped"]) == 0 and step._cache_size() == 1
    assert not np.array_equal(host(state.params["w"]), before[0]["w"])


@pytest.mark.parametrize("stage", stages(1, 3))
def test_finite_steps_are_those_of_a_plain_step(stage):
    ends = []
    for skips in (True, False):
        state = zerojax.shard_train_state(make_state(), stage)
        step = zerojax.train_step(loss_fn, skip_nonfinite=skips)
        for _ in range(3):
            state, metrics = jax.block_until_ready(step(state, GOOD))
        assert ("skipped" in metrics) == skips
        ends.append(host(state))
    for a, b in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)


def test_mutable_fields_are_kept_too():
    def loss(params, batch, seen):
        return loss_fn(params, batch), {"seen": seen + jnp.sum(batch)}

    state = zerojax.shard_train_state(make_state(seen=jnp.float32(0)))
    step = zerojax.train_step(loss, skip_nonfinite=True, mutable=("seen",))
    state, _ = step(state, GOOD)
    seen = float(state.seen)
    state, _ = step(state, BAD["nan on one device"])
    assert float(state.seen) == seen > 0


@pytest.mark.parametrize("stage", stages(1, 3))
def test_a_field_of_the_state_counts_what_was_skipped(tmp_path, stage):
    state = zerojax.shard_train_state(make_state(skipped=jnp.int32(0)), stage)
    step = zerojax.train_step(loss_fn, skip_nonfinite=True)
    for batch in (GOOD, BAD["overflow"], GOOD, BAD["nan on one device"]):
        state, _ = jax.block_until_ready(step(state, batch))
    assert int(state.skipped) == 2 and int(state.step) == 4
    zerojax.save(tmp_path / "c", state)
    state, _ = step(zerojax.restore(tmp_path / "c", state), BAD["overflow"])
    assert int(state.skipped) == 3


def test_a_field_of_that_name_that_is_no_count_is_left_alone():
    state = zerojax.shard_train_state(make_state(skipped=jnp.ones(3)))
    state, metrics = zerojax.train_step(loss_fn, skip_nonfinite=True)(state, BAD["overflow"])
    assert int(metrics["skipped"]) == 1 and state.skipped.tolist() == [1, 1, 1]


def test_skipping_still_gives_the_old_memory_away():
    state = zerojax.shard_train_state(make_state())
    step = zerojax.train_step(loss_fn, skip_nonfinite=True)
    memory = step.lower(state, GOOD).compile().memory_analysis()
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    assert memory.alias_size_in_bytes == held


# -- float16


def small_loss(params, batch):
    """Gradients of about 1e-9, far below what float16 holds."""
    return jnp.mean((batch @ params["w"]).astype(jnp.float32)) * 1e-7


HALF = zerojax.Precision(compute="float16", reduce="float16")


@pytest.mark.parametrize("stage", stages(1, 3))
def test_a_scaled_loss_has_gradients_that_float16_would_lose(stage):
    exact = jax.grad(small_loss)(make_state().params, GOOD)["w"]
    for scale, found in ((None, 0.0), (DynamicScale(scale=2.0**20), float(jnp.linalg.norm(exact)))):
        state = zerojax.shard_train_state(make_state(dynamic_scale=scale), stage)
        _, metrics = zerojax.train_step(small_loss, precision=HALF)(state, GOOD)
        assert float(metrics["grad_norm"]) == pytest.approx(found, rel=2e-3)
        wanted = float(small_loss(make_state().params, GOOD))
        assert float(metrics["loss"]) == pytest.approx(wanted, rel=1e-2)


@pytest.mark.parametrize("stage", stages(1, 3))
def test_the_scale_shrinks_where_gradients_overflow_and_grows_back(stage):
    scale = DynamicScale(scale=2.0**40, growth_interval=2)
    state = zerojax.shard_train_state(make_state(dynamic_scale=scale), stage)
    step = zerojax.train_step(loss_fn, precision=HALF)
    scales, skipped = [], []
    for _ in range(40):
        before = host((state.params, state.opt_state))
        state, metrics = jax.block_until_ready(step(state, GOOD))
        scales.append(float(metrics["loss_scale"]))
        skipped.append(int(metrics["skipped"]))
        if skipped[-1]:
            assert_equal_bits((state.params, state.opt_state), before)
    first = skipped.index(0)
    assert first > 5 and all(skipped[:first]) and step._cache_size() == 1
    assert scales[: first + 1] == [2.0 ** (40 - i) for i in range(first + 1)]
    assert max(scales[first:]) > scales[first]  # two finite steps, and it grew


def test_a_dict_may_hold_the_scale():
    tx = optax.sgd(0.1)
    params = make_state().params
    state = {"params": params, "opt_state": tx.init(params), "dynamic_scale": DynamicScale()}
    plan = zerojax.plan(state, tx=tx)
    step = zerojax.train_step(loss_fn, tx=tx, plan=plan)
    state, metrics = step(plan.place(state), GOOD)
    assert float(metrics["loss_scale"]) == 65536 and int(state["dynamic_scale"].fin_steps) == 1


def test_the_scale_is_part_of_a_checkpoint(tmp_path):
    make = lambda: make_state(dynamic_scale=DynamicScale(scale=8.0))
    state = zerojax.shard_train_state(make)
    zerojax.save(tmp_path / "c", state)
    assert float(zerojax.restore(tmp_path / "c", state).dynamic_scale.scale) == 8


def test_verify_knows_loss_scales():
    scale = DynamicScale(scale=2.0**10)
    state = zerojax.shard_train_state(make_state(dynamic_scale=scale), 3)
    assert zerojax.verify(zerojax.train_step(loss_fn), state, GOOD).ok
