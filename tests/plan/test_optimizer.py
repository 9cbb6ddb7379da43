"""The optimizer's state: where its leaves are placed, and what optimizers may do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P

import zerojax
from tests.models import OPTIMIZERS, gpt_params
from tests.reference import assert_close, tree_bytes
from tests.shapes import params_plan, shape, specs


def test_optimizer_that_was_not_called():
    for refused in (
        lambda: params_plan({"w": shape(16, 16)}, tx=optax.adam),
        lambda: zerojax.train_step(lambda params, batch: 0.0, tx=optax.adam),
    ):
        with pytest.raises(TypeError, match=r"tx= is adam.*call it, as in optax.adam"):
            refused()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizer_state_is_sharded_by_sharding_types(optimizer):
    tx = OPTIMIZERS[optimizer]()
    params = jax.eval_shape(gpt_params)
    opt_state = jax.eval_shape(tx.init, params)
    plan = zerojax.plan((params, opt_state), stage=1, tx=tx)
    leaves = [leaf for leaf in plan.leaves if leaf.kind == "opt_state"]
    shared = sum(leaf.nbytes for leaf in leaves if any(leaf.spec))
    # `masked` has no state; Adafactor's moments are rows and columns.
    assert shared >= {"masked": 0, "adafactor": 0.3}.get(optimizer, 0.99) * tree_bytes(opt_state)
    whole = [leaf for leaf in leaves if not any(leaf.spec)]
    large = [leaf.path for leaf in whole if np.prod(leaf.shape) >= 128]
    # A factored moment whose own dimensions are not the cut one has nothing to be cut along.
    assert all("v_row" in path or "v_col" in path for path in large), large
    assert optimizer == "adafactor" or not large


def test_optimizer_state_that_is_replicated_names_the_parameter_it_follows():
    tx, params = optax.adam(0.1), {"Dense_0": {"kernel": jnp.ones((64, 8)), "bias": jnp.ones(3)}}
    follows = "follows params/Dense_0/bias, which is replicated"
    for state, options in (
        (TrainState.create(apply_fn=None, params=params, tx=tx), {}),
        ({"params": params, "opt_state": tx.init(params)}, {}),  # by its path and shape alone
        ({"params": params, "opt_state": tx.init(params)}, {"tx": tx}),
    ):
        plan = zerojax.plan(state, stage=1, **options)
        reasons = {leaf.path: leaf.reason for leaf in plan.leaves if leaf.kind == "opt_state"}
        moments = {path: why for path, why in reasons.items() if path.endswith(("kernel", "bias"))}
        assert set(moments.values()) == {follows, None} and len(moments) == 4
        assert all((why == follows) == path.endswith("bias") for path, why in moments.items())
    factored = optax.adafactor(0.1, min_dim_size_to_factor=8)
    params = {"w": jnp.ones((16, 32))}
    plan = zerojax.plan((params, factored.init(params)), tx=factored)
    assert "its own dimensions carry no shard of a parameter" in {x.reason for x in plan.leaves}


def ravelled(inner):
    """As shampoo- and SOAP-like optimizers: one vector for all parameters."""

    def update(grads, state, params=None):
        flat, unravel = ravel_pytree(grads)
        updates, state = inner.update(flat, state)
        return unravel(updates), state

    return optax.GradientTransformation(lambda p: inner.init(ravel_pytree(p)[0]), update)


@pytest.mark.parametrize("wrapper", [optax.flatten, ravelled])
def test_optimizers_that_reshape_parameters(wrapper, mesh):
    params = {"conv": jnp.ones((3, 8, 16)), "w": jnp.ones((16, 8))}
    loss = lambda p, x: jnp.mean((x @ p["w"]) ** 2) + jnp.mean(p["conv"] ** 2)
    tx, x = wrapper(optax.adam(0.1)), np.ones((8, 16), np.float32)
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    wanted = state.apply_gradients(grads=jax.grad(loss)(params, x))
    plan = zerojax.plan(state, stage=3, mesh=mesh)
    refused = "tx.init does what sharding types refuse (ShardingTypeError)"
    moments = [leaf for leaf in plan.leaves if leaf.kind == "opt_state" and leaf.shape]
    assert len(moments) == 2 and all(refused in leaf.reason for leaf in moments)
    assert refused in str(plan)
    state, _ = zerojax.train_step(loss)(plan.place(state), x)
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    assert state.opt_state[0].mu.sharding.spec == P("data")


def test_errors_of_the_optimizer_are_its_own():
    def init(params):
        raise ValueError("lr must be positive")

    wrong = optax.GradientTransformation(init, optax.sgd(0.1).update)
    with pytest.raises(ValueError, match="lr must be positive"):
        zerojax.plan(({"w": jnp.ones(8)}, ()), stage=1, tx=wrong)


def test_optimizer_that_wants_concrete_values_falls_back_to_shapes():
    def init(params):
        assert float(jnp.sum(params["w"])) >= 0  # cannot be traced
        return {"moments": jax.tree.map(jnp.zeros_like, params), "count": jnp.zeros((), int)}

    tx = optax.GradientTransformation(init, lambda g, s, p=None: (g, s))
    params = {"w": jnp.ones((16, 16))}
    plan = zerojax.plan((params, tx.init(params)), stage=1, tx=tx)
    assert specs(plan)["1/moments/w"] == P("data") and specs(plan)["1/count"] == P()


def test_optimizer_and_params_that_do_not_match():
    params = {"w": jnp.ones((16, 16))}
    tx = optax.adam(1e-3)
    with pytest.raises(ValueError, match=r"opt_state/0/mu/v.*Make it again: opt_state = tx.init"):
        zerojax.plan((params, tx.init({"v": params["w"]})), tx=tx)
    with pytest.raises(ValueError, match=r"opt_state/0/mu/w has shape \(8,\).*tx.init"):
        zerojax.plan((params, tx.init({"w": jnp.ones(8)})), tx=tx)
    stacked = jax.tree.map(lambda x: jnp.stack([x] * 4), (params, tx.init(params)))
    with pytest.raises(ValueError, match=r"count has shape \(4,\).*unreplicate\(state\)"):
        zerojax.plan(stacked, tx=tx)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_adafactor_where_padding_would_have_it_factor_another_matrix(stage):
    """It factors what has two dimensions of 16; 8 devices pad 15 to that."""
    shapes = {"w": (15, 17), "wide": (15, 40), "stack": (3, 15, 17), "factored": (17, 33)}
    keys = dict(zip(shapes, jax.random.split(jax.random.key(0), len(shapes)), strict=True))
    params = {name: jax.random.normal(keys[name], shape) for name, shape in shapes.items()}
    tx = optax.adafactor(0.1, min_dim_size_to_factor=16, momentum=0.9)
    loss = lambda p, x: sum(jnp.mean((x[:, None] * w - 1) ** 2) for w in map(jnp.ravel, p.values()))
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    placed, step = zerojax.shard_train_state(state, stage), zerojax.train_step(loss)
    x = np.ones(8)
    moments = {leaf.path: leaf for leaf in placed.tx.plan.leaves if leaf.kind == "opt_state"}
    for name in ("w", "wide", "stack"):
        leaf = next(leaf for path, leaf in moments.items() if path.endswith(f"/v/{name}"))
        assert leaf.shape == shapes[name] and any(leaf.shard_spec) == (stage > 0)
    for _ in range(2):
        state = state.apply_gradients(grads=jax.grad(loss)(state.params, x))
        placed, _ = step(placed, x)
    placed = zerojax.logical(placed)
    assert_close([placed.params, placed.opt_state], [state.params, state.opt_state])
