"""The plan that a placed state carries in its optimizer, and what the user's functions do of it."""

import copy
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
from tests.support.reference import assert_close, assert_equal_bits

X = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
DRAW = np.random.default_rng(1)
PARAMS = {
    "w": DRAW.normal(size=(257, 5)).astype("f"),
    "b": np.ones(130, "f"),
    "c": DRAW.normal(size=(7, 31)).astype("f"),  # 36 columns at rest: a sixth more
}
ADAM, SIX = optax.adam(0.1), make_mesh(6)


class WithAverage(TrainState):
    average: Any = None


def applied(variables, x, **options):
    params = variables.get("params", variables)
    assert params["w"].shape == (257, 5), "the user's function sees logical shapes"
    return x @ params["w"].T, options


def made(tx=ADAM):
    average = jax.tree.map(lambda x: x / 2, PARAMS)
    return WithAverage.create(apply_fn=applied, params=PARAMS, tx=tx, average=average)


def test_apply_fn_drops_the_padding_of_parameters(compiled):
    state = zerojax.shard_train_state(made(), mesh=SIX)
    wanted = X @ PARAMS["w"].T
    assert state.params["w"].shape == state.average["w"].shape == (258, 5)
    logical = zerojax.unpad(state).params
    for params in (state.params, logical, {"params": state.params}, {"params": logical}):
        got, options = state.apply_fn(params, X, train=True)
        np.testing.assert_allclose(got, wanted, rtol=1e-5)
        assert options == {"train": True}
    named = {"variables": {"params": state.params, "batch_stats": {}}, "x": X}
    np.testing.assert_allclose(state.apply_fn(**named)[0], wanted, rtol=1e-5)
    halved, _ = state.apply_fn({"params": state.average}, X)
    np.testing.assert_allclose(halved, wanted / 2, rtol=1e-5)
    evaluate = jax.jit(lambda state, x: state.apply_fn({"params": state.params}, x)[0])
    for _ in range(2):
        np.testing.assert_allclose(evaluate(state, X), wanted, rtol=1e-5)
        state = state.replace(step=state.step + 1)
    assert evaluate._cache_size() == 1


@pytest.mark.parametrize("options", [{"pad": False}, {"stage": 0}, {"mesh": make_mesh(1)}])
def test_the_users_functions_stay_where_nothing_rests_padded(options):
    options = {"mesh": SIX} | options
    state = zerojax.shard_train_state(made(), **options)
    assert state.apply_fn is applied
    assert (state.tx.init, state.tx.update) == (ADAM.init, ADAM.update)
    padded = zerojax.shard_train_state(made(), mesh=SIX)
    assert padded.apply_fn is not applied
    assert zerojax.shard_train_state(padded, **options).apply_fn is applied
    assert zerojax.plan(padded, mesh=SIX)._treedef == jax.tree.structure(made())


def test_functions_of_equal_plans_are_equal_and_can_be_copied():
    one, other = (zerojax.shard_train_state(made(), mesh=SIX) for _ in range(2))
    assert jax.tree.structure(one) == jax.tree.structure(other)
    assert hash(one.tx) == hash(other.tx) and hash(one.apply_fn) == hash(other.apply_fn)
    third = zerojax.shard_train_state(made(), mesh=make_mesh(7))
    assert one.tx != third.tx and one.apply_fn != third.apply_fn
    for copied in (copy.copy(one), copy.deepcopy(one)):
        assert jax.tree.structure(copied) == jax.tree.structure(one)
        assert_equal_bits(copied.params, one.params)
        assert copied.apply_fn({"params": copied.params}, X)[0].shape == (6, 257)


@pytest.mark.parametrize(
    ("tx", "stage"),
    [
        (optax.contrib.muon(0.1), 3),
        (optax.adafactor(1e-2, min_dim_size_to_factor=4), 1),
        (optax.MultiSteps(optax.lamb(1e-2), 2).gradient_transformation(), 3),
    ],
)
def test_a_loop_of_ones_own_is_exact(tx, stage):
    """Means over a leaf, norms and orthogonal updates depend on its shape: padding would show."""
    state = made(tx)
    rests = zerojax.shard_train_state(state, stage, mesh=SIX)
    shapes = lambda tree: jax.tree.map(jnp.shape, tree)
    before = shapes(rests)
    wanted = rests if stage == 3 else state
    assert shapes(jax.eval_shape(rests.tx.init, rests.params)) == shapes(wanted.opt_state)
    assert shapes(jax.eval_shape(rests.tx.init, PARAMS)) == shapes(state.opt_state)

    @jax.jit
    def step(state, x):
        def loss(params):
            rest = jnp.sum(params["b"] ** 2) + jnp.sum(params["c"] ** 2)
            return jnp.mean((state.apply_fn(params, x)[0] - 1) ** 2) + rest

        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    for _ in range(2):
        state, rests = step(state, X), step(rests, X)
    assert shapes(rests) == before
    assert rests.params["w"].sharding.spec == P(*["data"] * (stage == 3))
    logical = zerojax.unpad(rests)
    for leaf, here, there in zip(
        rests.tx.plan.leaves, jax.tree.leaves(rests), jax.tree.leaves(logical), strict=True
    ):
        assert np.count_nonzero(here) == np.count_nonzero(there), f"padding of {leaf.path}"
    assert_close((logical.params, logical.opt_state), (state.params, state.opt_state), 1e-4)


def test_further_arguments_of_an_optimizer_are_logical():
    seen = []

    def update(updates, state, params=None, *, value, grad):
        seen.append((updates["w"].shape, params["w"].shape, grad["w"].shape, value))
        return updates, state

    tx = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    rests = zerojax.shard_train_state(made(tx), mesh=SIX)
    grads = rests.params
    new, _ = rests.tx.update(grads, rests.opt_state, rests.params, value=3.0, grad=grads)
    assert seen == [((257, 5), (257, 5), (257, 5), 3.0)]
    assert_equal_bits(new["w"], np.pad(PARAMS["w"], ((0, 1), (0, 0))))
