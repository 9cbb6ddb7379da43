"""Leaves that the devices do not divide: padded at rest, logical to whoever computes with them."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import zerojax
from tests.conftest import make_mesh
from tests.support.reference import assert_equal_bits, train_state

COLLECTIVES = r"= \S+ (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\("
W = np.arange(1, 257 * 5 + 1, dtype=np.float32).reshape(257, 5)
SIX = make_mesh(6)


def made():
    state = train_state({"w": W}, optax.adam(0.1))
    adam, *rest = state.opt_state
    return state.replace(opt_state=(adam._replace(mu={"w": W}), *rest))


def placed(devices=6, stage=3):
    return zerojax.shard_train_state(made(), stage, mesh=make_mesh(devices))


def pair():
    """A state that carries no plan, and its plan."""
    plan = zerojax.plan(({"w": W}, ()), mesh=SIX)
    return plan.place(({"w": W}, ())), plan


@pytest.mark.parametrize(("devices", "rests"), [(1, 257), (6, 258), (7, 259)])
def test_logical_in_and_out_of_jit(devices, rests):
    state = placed(devices)
    w = state.params["w"]
    assert w.shape == (rests, 5)
    assert {s.data.shape for s in w.addressable_shards} == {(rests // devices, 5)}
    for logical in (zerojax.unpad, jax.jit(state.tx.plan.unpad)):
        shown = logical(state)
        assert_equal_bits((shown.params["w"], shown.opt_state[0].mu["w"]), (W, W))
        assert shown.step.shape == () and shown.tx == state.tx
    shapes = state.tx.plan.unpad(state.tx.plan.abstract())
    assert shapes.params["w"].shape == shapes.opt_state[0].mu["w"].shape == W.shape


@pytest.mark.parametrize(("rows", "stage"), [(15, 1), (15, 3), (16, 3)])
def test_what_a_jitted_function_returns_may_have_any_logical_shape(rows, stage):
    """JAX cannot name some of the shardings that XLA chooses where a device has less, or none."""
    w = np.arange(rows * 31, dtype=np.float32).reshape(rows, 31)
    state = {"params": {"w": w}, "opt_state": {"mu": w}}
    plan = zerojax.plan(state, stage=stage, mesh=SIX)
    for function in (plan.unpad, jax.jit(plan.unpad), jax.jit(plan.scatter)):
        assert_equal_bits(function(plan.place(state)), state)


def test_parameters_are_gathered_without_padding_wherever_they_are():
    state, (of_pair, plan) = placed(), pair()
    both = zerojax.gather_params({"one": state, "other": {"x": np.ones(3)}})
    assert_equal_bits(both["one"].params, {"w": W})
    assert_equal_bits(zerojax.unpad(of_pair, plan)[0], {"w": W})
    for gathered in (
        zerojax.gather_params(state),
        zerojax.gather_params(of_pair, plan),
        zerojax.gather_params(of_pair[0], plan),
        zerojax.gather_params(of_pair[0], plan=state.tx.plan),
    ):
        assert_equal_bits(gathered, {"w": W})
    assert_equal_bits(zerojax.gather_params(of_pair[0]), {"w": W})  # the arrays are known
    computed = jax.tree.map(lambda x: 2 * x, of_pair[0])
    assert zerojax.gather_params(computed)["w"].shape == (258, 5)  # nothing tells
    scalar = zerojax.gather_params({"scale": jax.device_put(2.0)})["scale"]
    assert isinstance(scalar, np.ndarray) and scalar == 2


def test_parameters_may_be_one_array():
    plan = zerojax.plan((W, ()), mesh=SIX)
    params, _ = plan.place((W, ()))
    grad = jax.jit(zerojax.value_and_grad(lambda w, x: jnp.mean(x @ w), plan))
    np.testing.assert_allclose(grad(params, np.ones((6, 257), "f"))[1][:257], 0.2)
    assert_equal_bits(zerojax.gather_params(params, plan), W)


def test_a_state_that_changed_since_it_was_placed_is_planned_by_what_it_is_now():
    state = placed().replace(step=5)
    leaves = {leaf.path: leaf for leaf in zerojax.plan(state).leaves}
    assert leaves["params/w"].shape == (257, 5) and leaves["step"].shape == ()
    assert_equal_bits(zerojax.unpad(state).params, {"w": W})


@pytest.mark.parametrize(("stage", "devices"), [(3, 7), (3, 1), (1, 6), (0, 8)])
def test_a_padded_state_is_placed_again(stage, devices):
    state, wanted = placed(), placed(devices, stage)
    again = zerojax.shard_train_state(state, stage, mesh=make_mesh(devices))
    assert again.tx.plan == wanted.tx.plan
    for one, other in zip(*map(jax.tree.leaves, (again, wanted)), strict=True):
        assert one.sharding == other.sharding
        assert_equal_bits(one, other)
    assert state.params["w"].shape == (258, 5) and not state.params["w"].is_deleted()


@pytest.mark.parametrize(
    "copied", [jax.device_get, lambda state: jax.device_put(state, NamedSharding(SIX, P()))]
)
def test_copies_of_a_padded_state_are_placed_again_and_saved(copied, tmp_path):
    copy = copied(placed())
    again = zerojax.shard_train_state(copy, mesh=make_mesh(7))
    assert again.params["w"].shape == (259, 5)
    assert_equal_bits(zerojax.gather_params(again), {"w": W})
    zerojax.save(tmp_path / "copy", copy)
    like = zerojax.plan(again, mesh=make_mesh(5))
    assert_equal_bits(zerojax.gather_params(zerojax.restore(tmp_path / "copy", like)), {"w": W})


def layered(params, x):
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
    return jnp.mean((jax.lax.scan(layer, x, params["w"])[0] @ params["v"]) ** 2)


@pytest.mark.parametrize(
    ("stage", "padded", "where"),
    [(3, {"w", "v"}, jax.jit), (3, {"w"}, lambda f: f), (3, set(), jax.jit), (1, set(), jax.jit)],
)
def test_gradients_are_padded_leaf_by_leaf_and_their_padding_is_zero(stage, padded, where):
    """In place, the gradient of a weight takes over what is in its padding."""
    draw = np.random.default_rng(0)
    params = {"w": draw.normal(size=(4, 13, 13)) / 4, "v": draw.normal(size=(13, 13))}
    params, x = jax.tree.map(lambda p: p.astype("f"), (params, draw.normal(size=(6, 13))))
    state = {"params": params, "opt_state": ()}
    plan = zerojax.plan(state, stage=stage, mesh=SIX, stacked="w")
    resting = jax.tree.map(lambda p: p + 0.1, plan.place(state)["params"])  # padding is not zero
    logical = jax.tree.map(lambda p: p + 0.1, params)
    given = {name: (resting if name in padded else logical)[name] for name in params}
    value, grads = where(zerojax.value_and_grad(layered, plan))(given, x)
    wanted, by_one_device = jax.jit(jax.value_and_grad(layered))(logical, x)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    assert grads["w"].shape == (4, 18 if "w" in padded else 13, 13)
    assert grads["v"].shape == (18 if "v" in padded else 13, 13)
    np.testing.assert_allclose(grads["w"][:, :13], by_one_device["w"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(grads["v"][:13], by_one_device["v"], rtol=1e-5, atol=1e-6)
    assert not np.any(grads["w"][:, 13:]) and not np.any(grads["v"][13:])


def test_parameters_replaced_by_logical_ones_are_updated_in_groups():
    mesh = jax.sharding.Mesh(SIX.devices.reshape(2, 3), ("node", "gpu"))
    groups = {"params": "gpu", "grads": "gpu", "opt_state": ("gpu", "node")}
    params = {"w": np.ones((4, 13, 13), "f")}
    state = train_state(params, optax.sgd(1.0))
    state = zerojax.shard_train_state(state, mesh=mesh, groups=groups, stacked="w")
    step = zerojax.train_step(lambda params, x: jnp.sum(params["w"]) + jnp.mean(x))
    state, _ = step(state.replace(params={"w": 3 * params["w"]}), np.ones(6, np.float32))
    assert state.params["w"].shape == (4, 18, 13)
    assert_equal_bits(zerojax.gather_params(state), {"w": 2 * params["w"]})


def test_an_update_of_ones_own_moves_nothing_and_clears_the_padding():
    state = placed()
    plan = state.tx.plan

    def by_optimizer(state):
        new = plan.scatter(state)
        return plan.constrain(new.apply_gradients(grads=jax.tree.map(jnp.ones_like, new.params)))

    def by_hand(state):
        shown = zerojax.unpad(state)
        assert shown.params["w"].shape == (257, 5)
        return plan.constrain(jax.tree.map(lambda x: 2 * x, shown))

    def into_the_padding(state):
        return plan.constrain(jax.tree.map(lambda x: x + jnp.ones_like(x), state))

    for update, wanted in ((by_optimizer, None), (by_hand, 2 * W), (into_the_padding, W + 1)):
        compiled = jax.jit(update).lower(state).compile()
        assert not re.findall(COLLECTIVES, compiled.as_text())
        new = compiled(state)
        for leaf in (new.params["w"], new.opt_state[0].mu["w"]):
            assert leaf.sharding == state.params["w"].sharding and not np.any(leaf[257:])
            assert wanted is None or np.array_equal(leaf[:257], wanted)


def test_flaxs_error_about_a_shape_has_a_note_in_a_step():
    model = nn.Dense(257)
    params = {"kernel": np.ones((31, 257), "f"), "bias": np.ones(257, "f")}
    state = train_state(params, optax.sgd(0.1))
    state = zerojax.shard_train_state(state, mesh=SIX)
    held = state.params
    loss = lambda params, x: jnp.mean(model.apply({"params": held}, x) * params["bias"])
    grad = zerojax.value_and_grad(loss, state.tx.plan)
    x = np.ones((6, 31), "f")
    for call in (lambda: zerojax.train_step(loss)(state, x), lambda: grad(state.params, x)):
        with pytest.raises(Exception, match=r"expected to generate shape \(31, 257\)") as caught:
            call()
        notes = " ".join(caught.value.__notes__)
        assert re.search(r"print\(plan\).*zerojax\.unpad\(state\)", notes)
