"""The optimizer's state: where its leaves are placed, and what optimizers may do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from tests.conftest import make_mesh
from tests.support.models import OPTIMIZERS, gpt_params
from tests.support.reference import assert_close, train_state
from tests.support.shapes import shape, specs


@pytest.mark.parametrize(
    "optimizer", ["adafactor", "lamb", "multi_steps", "schedule_free", "inject_hyperparams"]
)
def test_what_follows_parameters_is_sharded_like_them(optimizer):
    tx, params = OPTIMIZERS[optimizer](), jax.eval_shape(gpt_params)
    plan = zerojax.plan((params, jax.eval_shape(tx.init, params)), stage=1, tx=tx)
    whole = {leaf.path for leaf in plan.leaves if leaf.kind == "opt_state" and not any(leaf.spec)}
    large = {leaf.path for leaf in plan.leaves if leaf.nbytes >= 128 * 4} & whole
    # A factored moment whose own dimensions are not the cut one has nothing to be cut along.
    assert large == {path for path in large if "v_row" in path or "v_col" in path}
    assert bool(large) == (optimizer == "adafactor")


def test_optimizer_state_that_is_replicated_says_why():
    tx, params = optax.adam(0.1), {"Dense_0": {"kernel": shape(64, 8), "bias": shape(3)}}
    pair = {"params": params, "opt_state": jax.eval_shape(tx.init, params)}
    follows = "follows params/Dense_0/bias, which is replicated"
    for options in ({}, {"tx": tx}):  # by paths and shapes alone, or by the optimizer
        plan = zerojax.plan(pair, stage=1, **options)
        moments = {x.path[-6:]: x.reason for x in plan.leaves if x.kind == "opt_state" and x.shape}
        assert moments == {"kernel": None, "0/bias": follows}
    factored = optax.adafactor(0.1, min_dim_size_to_factor=4)
    params = [shape(16, 32), *[shape(6, 20)] * 3]
    plan = zerojax.plan((params, jax.eval_shape(factored.init, params)), tx=factored)
    reasons = {x.path: x.reason for x in plan.leaves}
    assert reasons["1/0/v_col/0"] == "has none of the sharded dimensions of a parameter"
    small = "follows 0/{}: smaller than min_shard_size=128"
    assert reasons["1/0/v_row/2"] == reasons["1/0/v/2"] == small.format(2)
    assert small.format("{1..3}") in str(plan)


def test_an_optimizer_that_reshapes_parameters_is_sharded_by_its_own_shapes():
    params = {"conv": np.ones((3, 8, 16), "f"), "w": np.ones((16, 8), "f")}
    loss = lambda p, x: jnp.mean((x @ p["w"]) ** 2) + jnp.mean(p["conv"] ** 2)
    tx, x = optax.flatten(optax.adam(0.1)), np.ones((8, 16), np.float32)
    state = train_state(params, tx)
    one = jax.jit(lambda s, x: s.apply_gradients(grads=jax.grad(loss)(s.params, x)))(state, x)
    plan = zerojax.plan(state, mesh=make_mesh(2))
    refused = "sharding types refuse what tx.init does (ShardingTypeError)"
    moments = [leaf for leaf in plan.leaves if leaf.kind == "opt_state" and leaf.shape]
    assert len(moments) == 2 and all(refused in leaf.reason for leaf in moments)
    assert refused in str(plan)
    new, _ = zerojax.train_step(loss)(plan.place(state), x)
    assert_close([new.params, new.opt_state], [one.params, one.opt_state])
    assert new.opt_state[0].mu.sharding.spec == P("data")


def test_an_optimizer_that_wants_concrete_values_is_known_by_its_shapes():
    def init(params):
        assert float(jnp.sum(params["w"])) >= 0  # cannot be traced
        return {"moments": params, "count": np.zeros((), int)}

    tx = optax.GradientTransformation(init, lambda g, s, p=None: (g, s))
    params = {"w": np.ones((16, 16), "f")}
    plan = zerojax.plan((params, tx.init(params)), stage=1, tx=tx)
    assert specs(plan)["1/moments/w"] == P("data") and specs(plan)["1/count"] == P()
