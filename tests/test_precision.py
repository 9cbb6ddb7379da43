"""Dtypes: master copies, compute, and what the options refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import zerojax
from tests.models import gpt, mlp
from tests.reference import assert_close, make_state

BF16 = zerojax.Precision(compute="bfloat16", param="bfloat16", master="float32")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_master_copies_train_like_float32_and_parameters_are_their_rounding(stage):
    made = gpt(True)
    state = make_state(made, optax.adamw(1e-3))
    steps = {
        "master": (zerojax.shard_train_state(state, stage, precision=BF16), BF16),
        "float32": (
            zerojax.shard_train_state(state, stage),
            zerojax.Precision(compute="bfloat16"),
        ),
    }
    ended = {}
    for name, (start, precision) in steps.items():
        step, current = zerojax.train_step(made.loss, precision=precision), start
        for _ in range(5):
            current, metrics = step(current, made.batch)
        ended[name] = current, float(metrics["loss"])
    (masters, loss), (full, full_loss) = ended["master"], ended["float32"]
    assert loss == pytest.approx(full_loss, rel=2e-3)
    copies = masters.opt_state.master
    assert_close(copies, full.params, 2e-3)
    jax.tree.map(
        lambda p, m: np.testing.assert_array_equal(p, m.astype(jnp.bfloat16)),
        masters.params, copies,
    )  # fmt: skip
    assert masters.params["embed"].dtype == jnp.bfloat16
    cut = P("data") if stage else P()
    assert copies["embed"].sharding.spec == cut


def test_tiny_updates_add_up_in_the_masters():
    """A thousandth of a bf16 step each: without masters, a thousand of them are nothing."""
    params = {"w": jnp.full((16, 16), 256.0)}
    loss = lambda p, b: jnp.mean(p["w"].astype(jnp.float32).sum() + 0 * b)
    for precision, moves in ((BF16, True), (zerojax.Precision(param="bfloat16"), False)):
        state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.01))
        state = zerojax.shard_train_state(state, 3, precision=precision)
        step = zerojax.train_step(loss)
        for _ in range(300):
            state, _ = step(state, np.zeros((8, 1), np.float32))
        assert bool(jnp.all(state.params["w"] < 254)) == moves


def test_master_weights_is_an_optax_transformation_like_any_other():
    tx = zerojax.master_weights(optax.adamw(1e-2))
    params = {"w": jnp.ones((4,), jnp.bfloat16)}
    state = tx.init(params)
    updates, state = tx.update({"w": jnp.ones(4)}, state, params)
    new = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(new["w"], state.master["w"].astype(jnp.bfloat16))
    with pytest.raises(ValueError, match=r"call update\(grads, state, params\)"):
        tx.update({"w": jnp.ones(4)}, state)


def test_masters_start_from_the_parameters_as_given_and_may_be_born_sharded():
    make = lambda: make_state(mlp(False), optax.adam(1e-3))
    for state in (make, make()):
        placed = zerojax.shard_train_state(state, 3, precision=BF16)
        assert_close(placed.opt_state.master, make().params, 1e-7)


def test_batch_and_weights_are_computed_in_the_given_dtype():
    seen = {}

    def loss(params, batch):
        seen.update(w=params["in"]["w"].dtype, x=batch["x"].dtype, ids=batch["ids"].dtype)
        return jnp.mean(batch["x"] @ params["in"]["w"])

    made = mlp(False)
    batch = {"x": np.ones((8, 24), np.float32), "ids": np.ones(8, np.int32)}
    plan = zerojax.plan({"params": made.params})
    precision = zerojax.Precision(compute="bfloat16")
    value, grads = zerojax.value_and_grad(loss, plan, precision=precision)(made.params, batch)
    assert seen == {"w": jnp.bfloat16, "x": jnp.bfloat16, "ids": jnp.int32}
    assert value.dtype == grads["in"]["w"].dtype == jnp.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compute": "int8"}, r"compute='int8'\): not a float dtype. Use one such as"),
        ({"reduce": "half-ish"}, r"reduce='half-ish'\): not a float dtype"),
        ({"master": "float32"}, r"Give param=\.\.\. as well"),
    ],
)
def test_bad_precision(options, message):
    with pytest.raises(ValueError, match=message):
        zerojax.Precision(**options)


def test_precision_needs_a_state_that_carries_its_optimizer():
    with pytest.raises(ValueError, match=r"tuple does not carry it.*zerojax.master_weights"):
        zerojax.shard_train_state(({"w": jnp.ones((8, 8))}, ()), precision=BF16)
