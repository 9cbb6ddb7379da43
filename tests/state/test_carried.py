"""The plan that a placed state carries in its optimizer, and what the user's functions do of it."""

import copy
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import zerojax
from tests.conftest import make_mesh
from tests.models import mlp
from tests.placed import place
from tests.reference import assert_close, assert_equal_bits

X = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)


def test_placed_states_can_be_copied():
    made = mlp(False)
    state = place(made)
    for copied in (copy.copy(state), copy.deepcopy(state)):
        assert_equal_bits(copied.params, state.params)
    step = zerojax.train_step(made.loss, donate=False)
    assert_equal_bits(step(copied, made.batch)[0].params, step(state, made.batch)[0].params)
    assert step._cache_size() == 1


def applied(variables, x, **options):
    params = variables.get("params", variables)
    assert params["w"].shape == (257, 5), "the user's function sees logical shapes"
    return x @ params["w"].T, options


def whole(variables, x):
    return x @ variables["params"]["w"].T


class WithAverage(TrainState):
    average: Any = None


def made(tx=None, apply_fn=applied, kind=TrainState, **fields):
    keys = jax.random.split(jax.random.key(0))
    params = {
        "w": jax.random.normal(keys[0], (257, 5)),
        "b": jnp.ones(130),
        "c": jax.random.normal(keys[1], (7, 31)),  # 36 columns at rest: a sixth more
    }
    return kind.create(apply_fn=apply_fn, params=params, tx=tx or optax.adam(0.1), **fields)


def test_apply_fn_drops_the_padding_of_parameters(compiled):
    state = made()
    rests = zerojax.shard_train_state(state, mesh=make_mesh(6))
    wanted = X @ state.params["w"].T
    assert rests.params["w"].shape == (258, 5)
    logical = zerojax.logical(rests).params
    for params in (rests.params, logical, {"params": rests.params}, {"params": logical}):
        got, options = rests.apply_fn(params, X, train=True)
        np.testing.assert_allclose(got, wanted, rtol=1e-5)
        assert options == {"train": True}
    named = {"variables": {"params": rests.params, "batch_stats": {}}, "x": X}
    np.testing.assert_allclose(rests.apply_fn(**named)[0], wanted, rtol=1e-5)

    @jax.jit
    def evaluate(state, x):
        return state.apply_fn({"params": state.params}, x)[0]

    for _ in range(2):
        np.testing.assert_allclose(evaluate(rests, X), wanted, rtol=1e-5)
        rests = rests.replace(step=rests.step + 1)
    assert compiled.count("jit(evaluate)") == 1 and evaluate._cache_size() == 1


def test_inside_jit_dropping_the_padding_moves_nothing():
    rests = zerojax.shard_train_state(made(apply_fn=lambda v, x: v["w"] * x), mesh=make_mesh(6))
    doubled = jax.jit(lambda s: s.tx.plan.padded_part({"w": s.apply_fn(s.params, 2)}, "params"))
    text = doubled.lower(rests).compile().as_text()
    assert not re.search("all-gather|all-reduce|all-to-all|collective-permute", text)
    assert doubled(rests)["w"].sharding == rests.params["w"].sharding
    np.testing.assert_array_equal(doubled(rests)["w"], 2 * rests.params["w"])


def test_whole_collections_as_parameters():
    params = {"params": {"w": jax.random.normal(jax.random.key(0), (257, 5))}}
    state = TrainState.create(apply_fn=whole, params=params, tx=optax.sgd(0.1))
    rests = zerojax.shard_train_state(state, mesh=make_mesh(6))
    assert rests.apply_fn(rests.params, X).shape == (6, 257)


@pytest.mark.parametrize("stage", [1, 3])
def test_averages_of_the_parameters_are_applied_too(stage):
    state = made(kind=WithAverage)
    state = state.replace(average=jax.tree.map(lambda x: x / 2, state.params))
    rests = zerojax.shard_train_state(state, stage, mesh=make_mesh(6))
    assert rests.average["w"].shape == (258, 5)
    got, _ = rests.apply_fn({"params": rests.average}, X)
    np.testing.assert_allclose(got, X @ state.params["w"].T / 2, rtol=1e-5)


@pytest.mark.parametrize("options", [{"pad": False}, {"stage": 1}, {"mesh": make_mesh(1)}])
def test_the_users_apply_fn_stays_where_nothing_rests_padded(options):
    state = made()
    rests = zerojax.shard_train_state(state, **{"mesh": make_mesh(6)} | options)
    assert rests.apply_fn is applied
    padded = zerojax.shard_train_state(state, mesh=make_mesh(6))
    assert padded.apply_fn is not applied
    again = zerojax.shard_train_state(padded, **{"mesh": make_mesh(6)} | options)
    assert again.apply_fn is applied
    assert zerojax.plan(padded, mesh=make_mesh(6)).treedef == jax.tree.structure(state)


def test_functions_of_equal_plans_are_equal():
    tx = optax.adam(0.1)
    one, other = (zerojax.shard_train_state(made(tx), mesh=make_mesh(6)) for _ in range(2))
    assert jax.tree.structure(one) == jax.tree.structure(other)
    assert hash(one.tx) == hash(other.tx) and hash(one.apply_fn) == hash(other.apply_fn)
    third = zerojax.shard_train_state(made(tx), mesh=make_mesh(7))
    assert one.tx != third.tx and one.apply_fn != third.apply_fn
    for copied in (copy.copy(one), copy.deepcopy(one)):
        assert copied.apply_fn({"params": copied.params}, X)[0].shape == (6, 257)


OPTIMIZERS = {
    "adam": lambda: optax.adam(1e-2, eps=1e-4),
    "muon": lambda: optax.contrib.muon(0.1),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lamb": lambda: optax.lamb(1e-2),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_loop_of_ones_own_is_exact(name, stage):
    """Means over a leaf, norms and orthogonal updates depend on its shape: padding would show."""
    state = made(OPTIMIZERS[name]())
    rests = zerojax.shard_train_state(state, stage, mesh=make_mesh(6))
    before = [leaf.shape for leaf in jax.tree.leaves(rests)]

    @jax.jit
    def step(state, x):
        def loss(params):
            rest = jnp.sum(params["b"] ** 2) + jnp.sum(params["c"] ** 2)
            return jnp.mean((state.apply_fn(params, x)[0] - 1) ** 2) + rest

        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    for _ in range(2):
        state, rests = step(state, X), step(rests, X)
    assert [leaf.shape for leaf in jax.tree.leaves(rests)] == before
    assert rests.params["w"].sharding.spec == P(*["data"] * (stage == 3))
    logical = zerojax.logical(rests)
    for leaf, here, there in zip(
        rests.tx.plan.leaves, jax.tree.leaves(rests), jax.tree.leaves(logical), strict=True
    ):
        assert np.count_nonzero(here) == np.count_nonzero(there), f"padding of {leaf.path}"
    assert_close(logical.params, state.params, 1e-4)
    assert_close(logical.opt_state, state.opt_state, 1e-4)


def test_the_optimizers_init_of_padded_parameters_is_padded():
    state = made(OPTIMIZERS["adafactor"]())
    rests = zerojax.shard_train_state(state, mesh=make_mesh(6))
    again = jax.jit(rests.tx.init)(rests.params)
    shapes = lambda tree: jax.tree.map(jnp.shape, tree)
    assert shapes(again) == shapes(rests.opt_state) != shapes(state.opt_state)
    assert shapes(rests.tx.init(state.params)) == shapes(state.opt_state)


def test_further_arguments_of_an_optimizer_are_logical():
    seen = []

    def update(updates, state, params=None, *, value, grad):
        seen.append((updates["w"].shape, params["w"].shape, grad["w"].shape, value))
        return updates, state

    tx = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    rests = zerojax.shard_train_state(made(tx), mesh=make_mesh(6))
    grads = jax.tree.map(jnp.ones_like, rests.params)
    new, _ = rests.tx.update(grads, rests.opt_state, rests.params, value=3.0, grad=grads)
    assert seen == [((257, 5), (257, 5), (257, 5), 3.0)]
    np.testing.assert_array_equal(new["w"], np.pad(np.ones((257, 5)), ((0, 1), (0, 0))))


def test_a_step_compiles_the_users_own_update_where_nothing_pads():
    tx = optax.adam(0.1)
    rests = zerojax.shard_train_state(made(tx), mesh=make_mesh(6), pad=False)
    assert (rests.tx.init, rests.tx.update) == (tx.init, tx.update)
