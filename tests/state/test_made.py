"""Functions that make a state, whose optimizers may keep arrays; the classes of nnx variables."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import zerojax


def scheduled(outer=None, rate=lambda rates, count: rates[count]):
    rates = jnp.linspace(0.1, 0.5, 3) if outer is None else outer
    tx = optax.sgd(functools.partial(rate, rates))
    return TrainState.create(apply_fn=None, params={"w": jnp.ones((64, 16))}, tx=tx)


@pytest.mark.parametrize("place", [zerojax.plan, zerojax.shard_train_state])
def test_an_optimizer_that_keeps_an_array_of_the_function_is_refused(place):
    for state in (scheduled, jax.eval_shape(scheduled)):
        with pytest.raises(ValueError, match=r"Pass that function itself.*outside of the func"):
            place(state)
    rates = jnp.linspace(0.1, 0.5, 3)
    state = zerojax.shard_train_state(functools.partial(scheduled, rates))
    assert state.params["w"].shape == (64, 16)


def test_leaves_that_are_constants_are_arrays():
    def make():
        return {"params": {"w": jnp.ones(3)}, "n": jnp.asarray(7), "x": jnp.float32(2.5)}

    state = zerojax.plan(make).place(make)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    assert (state["n"].dtype, int(state["n"]), float(state["x"])) == (jnp.int32, 7, 2.5)


def test_hooks_of_nnx_do_not_show_another_value_everywhere():
    """Else variables that rest padded need no class of their own."""
    variable = nnx.Param(jnp.ones((3, 4)))
    variable.set_metadata(on_get_value=lambda _, value: value[:, :2])
    assert (variable[...].shape, variable.T.shape) == ((3, 2), (4, 3))
