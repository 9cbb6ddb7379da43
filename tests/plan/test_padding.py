"""Leaves that the devices do not divide: padded at rest, logical to whoever computes with them."""

import re
import warnings

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec as P

import zerojax
from tests.conftest import make_mesh
from tests.reference import assert_equal_bits
from zerojax._plan import padding as _padding

COLLECTIVES = r"= \S+ (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\("
W = np.arange(1, 257 * 5 + 1, dtype=np.float32).reshape(257, 5)
RESTS = {1: 257, 6: 258, 7: 259}


def made(tx=None, **params):
    params = {"w": jnp.asarray(W)} | params
    return TrainState.create(apply_fn=None, params=params, tx=tx or optax.adam(0.1))


def placed(devices=6, stage=3, **params):
    return zerojax.shard_train_state(made(**params), stage, mesh=make_mesh(devices))


@pytest.mark.parametrize("devices", RESTS)
def test_logical_in_and_out_of_jit(devices):
    state = placed(devices)
    for where in (lambda f: f, jax.jit):
        rests = state.params["w"]
        assert rests.shape == (RESTS[devices], 5)
        assert {s.data.shape for s in rests.addressable_shards} == {(RESTS[devices] // devices, 5)}
        for logical in (zerojax.logical, state.tx.plan.logical):
            found = where(logical)(state)
            np.testing.assert_array_equal(found.params["w"], W)
            assert found.opt_state[0].mu["w"].shape == (257, 5)
            assert found.step.shape == () and found.tx == state.tx


@pytest.mark.parametrize("rows", [15, 16, 20, 21, 257])
def test_what_a_jitted_function_returns_may_have_any_logical_shape(rows):
    """JAX 0.12 cannot name some of the shardings that XLA chooses for such results."""
    w = np.arange(rows * 31, dtype=np.float32).reshape(rows, 31)
    state = {"params": {"w": w}, "opt_state": {"mu": w}}
    loss = lambda params, x: jnp.mean((x @ params["w"]) ** 2)
    x = np.ones((6, rows), np.float32)
    for stage in (1, 2, 3):
        plan = zerojax.plan(state, stage=stage, mesh=make_mesh(6))
        at_rest = plan.place(state)
        for function in (plan.logical, jax.jit(plan.logical), jax.jit(plan.scatter)):
            assert_equal_bits(function(at_rest)["params"], {"w": w})
        grads = jax.jit(zerojax.value_and_grad(loss, plan))({"w": w}, x)[1]
        np.testing.assert_allclose(grads["w"], jax.grad(loss)({"w": w}, x)["w"], rtol=1e-5)


def test_logical_of_a_state_without_an_optimizer():
    pair = ({"w": jnp.asarray(W)}, ())
    plan = zerojax.plan(pair, mesh=make_mesh(6))
    state = plan.place(pair)
    assert_equal_bits(zerojax.logical(state, plan)[0], {"w": W})
    with pytest.raises(ValueError, match=r"tuple does not carry.*zerojax.logical\(state, plan\)"):
        zerojax.logical(state)


def test_parameters_are_gathered_without_padding_wherever_they_are():
    state = placed(6)
    pair = ({"w": jnp.asarray(W)}, ())
    plan = zerojax.plan(pair, mesh=make_mesh(6))
    params, _ = pair_of = plan.place(pair)
    both = zerojax.gather_params({"one": state, "other": {"x": np.ones(3)}})
    assert_equal_bits(both["one"].params, {"w": W})
    for found in (
        zerojax.gather_params(state),
        zerojax.gather_params(pair_of, plan),
        zerojax.gather_params(params, plan),
        zerojax.gather_params(params, plan=state.tx.plan),
    ):
        assert_equal_bits(found, {"w": W})
    assert zerojax.gather_params(params)["w"].shape == (258, 5)  # nothing tells
    with pytest.raises(ValueError, match=r"state leaf params/w is missing"):
        zerojax.gather_params({"v": params["w"]}, plan)
    with pytest.raises(TypeError, match=r"plan= takes a plan, got 3"):
        zerojax.gather_params(params, 3)


def test_parameters_may_be_one_array():
    plan = zerojax.plan((jnp.asarray(W), ()), mesh=make_mesh(6))
    params, _ = plan.place((jnp.asarray(W), ()))
    _, grads = jax.jit(zerojax.value_and_grad(lambda w, x: jnp.mean(x @ w), plan))(
        params, np.ones((6, 257), np.float32)
    )
    np.testing.assert_allclose(np.asarray(grads)[:257], 0.2)
    np.testing.assert_array_equal(zerojax.gather_params(params, plan), W)


def test_a_state_that_changed_since_it_was_placed_is_planned_by_what_it_is_now():
    state = placed(6).replace(step=5, opt_state=())
    leaves = {leaf.path: leaf for leaf in zerojax.plan(state, tx=optax.identity()).leaves}
    assert leaves["params/w"].shape == (257, 5) and leaves["step"].shape == ()
    assert_equal_bits(zerojax.logical(state).params, {"w": W})


def test_host_copies_of_a_padded_state_are_placed_again_and_saved(tmp_path):
    state = placed(6)
    copies = {
        "host": jax.device_get(state),
        "one device": jax.device_put(state, jax.devices()[0]),
        "replicated": jax.device_put(state, NamedSharding(make_mesh(6), P())),
    }
    for name, copy in copies.items():
        again = zerojax.shard_train_state(copy, 3, mesh=make_mesh(7))
        assert again.params["w"].shape == (259, 5)
        assert_equal_bits(zerojax.gather_params(again), {"w": W})
        zerojax.save(tmp_path / name, copy)
        like = zerojax.plan(state, mesh=make_mesh(5))
        assert_equal_bits(zerojax.gather_params(zerojax.restore(tmp_path / name, like)), {"w": W})
    with pytest.raises(TypeError, match="without values to place"):
        state.tx.plan.place(state.tx.plan.abstract())


def test_gradients_are_padded_leaf_by_leaf_and_their_padding_is_zero():
    """In place, the gradient of a weight takes over what is in its padding."""
    params = {"w": jnp.ones((4, 13, 13)), "v": jnp.ones((13, 13))}
    state = {"params": params, "opt_state": ()}
    plan = zerojax.plan(state, mesh=make_mesh(6), stacked="w")
    garbage = jax.tree.map(lambda x: x + 1, plan.place(state)["params"])
    half = garbage | {"v": params["v"] + 1}

    def loss(params, x):
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
        return jnp.mean(jax.lax.scan(layer, x, params["w"])[0] @ params["v"])

    x = np.linspace(-1, 1, 6 * 13, dtype=np.float32).reshape(6, 13)
    wanted = jax.grad(loss)(jax.tree.map(lambda p: p + 1, params), x)
    for given, shape in ((garbage, (18, 13)), (half, (13, 13))):
        for grad in (
            zerojax.value_and_grad(loss, plan),
            jax.jit(zerojax.value_and_grad(loss, plan)),
        ):
            grads = grad(given, x)[1]
            assert grads["w"].shape == (4, 18, 13) and grads["v"].shape == shape
            assert grads["w"].sharding.spec == P(None, "data")
            np.testing.assert_allclose(grads["w"][:, :13], wanted["w"], rtol=1e-5, atol=1e-7)
            np.testing.assert_allclose(grads["v"][:13], wanted["v"], rtol=1e-5, atol=1e-7)
            assert not np.any(grads["w"][:, 13:]) and not np.any(grads["v"][13:])


def test_parameters_replaced_by_logical_ones_are_updated_in_groups():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:6]).reshape(2, 3), ("node", "gpu"))
    groups = {"params": "gpu", "grads": "gpu", "opt_state": ("gpu", "node")}
    params = {"w": jnp.ones((4, 13, 13))}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0))
    state = zerojax.shard_train_state(state, mesh=mesh, groups=groups, stacked="w")
    assert state.params["w"].shape == (4, 18, 13)
    step = zerojax.train_step(lambda params, x: jnp.sum(params["w"]) + jnp.mean(x))
    state, _ = step(state.replace(params={"w": 3 * params["w"]}), np.ones(6, np.float32))
    assert_equal_bits(zerojax.gather_params(state), {"w": np.full((4, 13, 13), 2, np.float32)})
    assert state.params["w"].shape == (4, 18, 13)


def test_an_update_by_an_optimizer_moves_nothing():
    state = placed(6)
    plan = state.tx.plan

    def update(state):
        new = plan.scatter(state)
        return plan.constrain(new.apply_gradients(grads=jax.tree.map(jnp.ones_like, new.params)))

    assert not re.findall(COLLECTIVES, jax.jit(update).lower(state).compile().as_text())


def test_padding_is_dropped_and_added_without_a_collective():
    state = placed(6)
    plan = state.tx.plan

    def update(state):
        logical = zerojax.logical(state)
        assert logical.params["w"].shape == (257, 5)
        return plan.constrain(jax.tree.map(lambda x: 2 * x, logical))

    lowered = jax.jit(update).lower(state).compile()
    assert not re.findall(COLLECTIVES, lowered.as_text())
    new = lowered(state)
    assert new.params["w"].sharding == state.params["w"].sharding
    np.testing.assert_array_equal(new.params["w"], np.pad(2 * W, ((0, 1), (0, 0))))


@pytest.mark.parametrize("stage", [1, 3])
def test_constrain_clears_what_a_user_put_into_the_padding(stage):
    state = placed(7, stage)
    garbage = jax.tree.map(lambda x: x + jnp.ones_like(x), state)
    assert np.all(np.asarray(garbage.opt_state[0].mu["w"])[257:] == 1)
    new = jax.jit(state.tx.plan.constrain)(garbage)
    for leaf in (new.params["w"], new.opt_state[0].mu["w"]):
        np.testing.assert_array_equal(leaf[257:], 0)
    np.testing.assert_array_equal(zerojax.gather_params(new)["w"], W + 1)


@pytest.mark.parametrize("devices", RESTS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_value_and_grad_of_padded_and_of_logical_parameters(devices, stage):
    loss = lambda params, x: jnp.mean((x @ params["w"].T) ** 2 / 1e6)
    x = np.arange(2 * 42 * 5, dtype=np.float32).reshape(84, 5) / 100
    state = placed(devices, stage)
    plan = state.tx.plan
    wanted, wanted_grads = jax.value_and_grad(loss)({"w": jnp.asarray(W)}, x)
    for params in (state.params, zerojax.logical(state).params):
        for where in (lambda f: f, jax.jit):
            value, grads = where(zerojax.value_and_grad(loss, plan))(params, x)
            assert grads["w"].shape == params["w"].shape
            np.testing.assert_allclose(value, wanted, rtol=1e-5)
            np.testing.assert_allclose(grads["w"][:257], wanted_grads["w"], rtol=1e-4)
            np.testing.assert_array_equal(grads["w"][257:], 0)


@pytest.mark.parametrize("stage, devices", [(3, 7), (3, 1), (1, 6), (2, 4), (0, 8)])
def test_a_padded_state_is_placed_again(stage, devices):
    state = placed(6)
    again = zerojax.shard_train_state(state, stage, mesh=make_mesh(devices))
    wanted = placed(devices, stage)
    assert again.tx.plan == wanted.tx.plan
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(wanted), strict=True):
        assert one.sharding == other.sharding
        np.testing.assert_array_equal(one, other)
    assert_equal_bits(zerojax.gather_params(again), {"w": W})
    assert state.params["w"].shape == (258, 5) and not state.params["w"].is_deleted()


def test_a_plan_of_a_padded_state_sees_logical_shapes():
    state = placed(7)
    assert zerojax.plan(state, mesh=make_mesh(7)) == state.tx.plan
    other = zerojax.plan(state, mesh=make_mesh(6))
    assert {leaf.path: (leaf.shape, leaf.padded_shape) for leaf in other.params} == {
        "params/w": ((257, 5), (258, 5))
    }


@pytest.fixture
def not_warned(monkeypatch):
    monkeypatch.setattr(_padding, "_WARNED", [])


def applied(params, x):
    return x @ params["w"].T


@flax.struct.dataclass
class Bare:
    params: dict
    opt_state: tuple


@pytest.mark.parametrize(
    "state, remedy",
    [
        (({"w": W}, ()), r"0/w has.*zerojax\.logical\(state, plan\)"),
        ({"params": {"w": W}}, r"params/w has.*zerojax\.logical\(state, plan\)"),
        (Bare({"w": W}, ()), r"params/w has.*zerojax\.logical\(state, plan\)"),
        (made(v=W), r"so does 1 more array.*zerojax\.logical\(state\)"),
        (lambda: made(), r"params/w has.*zerojax\.logical\(state\)"),
    ],
    ids=["tuple", "dict", "dataclass", "TrainState", "function"],
)
def test_who_cannot_be_helped_is_warned_once(state, remedy, not_warned):
    shapes = r"has the shape \(257, 5\) and rests padded as \(258, 5\), because 6 devices do not"
    with pytest.warns(UserWarning, match=f"{shapes}.*pad=False") as seen:
        zerojax.plan(state, mesh=make_mesh(6)).place(state)
    assert re.search(remedy, str(seen[0].message)) and len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        placed(7)


def of_flax():
    """Flax's own error says what to do, if its model is called with padded parameters."""
    state = made().replace(apply_fn=nn.Dense(5).apply)
    zerojax.shard_train_state(state, mesh=make_mesh(6))


@pytest.mark.parametrize(
    "place",
    [
        of_flax,
        lambda: placed(6, stage=2),
        lambda: placed(1),
        lambda: zerojax.shard_train_state(made(), mesh=make_mesh(6), pad=False),
        lambda: zerojax.shard_train_state(
            zerojax.ModuleState.create(
                jax.tree_util.Partial(applied, {"w": jnp.asarray(W)}), optax.sgd(0.1)
            ),
            mesh=make_mesh(6),
        ),
    ],
    ids=["flax", "stage 2", "divides", "pad=False", "ModuleState"],
)
def test_who_needs_no_help_is_not_warned(place, not_warned):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        place()


def test_flaxs_error_about_a_shape_has_a_note():
    model = nn.Dense(257)
    params = model.init(jax.random.key(0), jnp.ones((1, 31)))["params"]
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))
    state = zerojax.shard_train_state(state, mesh=make_mesh(6))
    with pytest.raises(Exception, match=r"expected to generate shape \(31, 257\)") as caught:
        model.apply({"params": state.params}, jnp.ones((1, 31)))
    (note,) = (n for n in caught.value.__notes__ if "zerojax" in n)
    assert re.search(
        r"pads kernel from \(31, 257\) to \(31, 258\).*zerojax\.logical\(state\)", note
    )
    with pytest.raises(Exception, match="expected to generate shape") as caught:
        model.apply({"params": params}, jnp.ones((1, 30)))
    assert not any("zerojax" in n for n in getattr(caught.value, "__notes__", []))
