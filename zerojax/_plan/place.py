"""The front door: a call that places a user's state, and one that brings parameters back."""

import jax
import numpy as np

from zerojax._declared import takes
from zerojax._plan import move as _move, padding as _padding, planner as _planner
from zerojax._plan.plan import Plan, check_plan
from zerojax._plan.plan_options import StateOptions
from zerojax._state import carried as _carried, refusals as _refusals, state as _state
from zerojax._state.state import Leaf
from zerojax._types import PyTree, is_key


@takes(StateOptions)
def shard_train_state(state_or_fn: PyTree, options: StateOptions) -> PyTree:
    """Places a training state for a ZeRO stage, as `zerojax.train_step` expects it.

    Arguments:
        state_or_fn: a flax `TrainState` or any state that `zerojax.plan` takes. A function
            without arguments is compiled to make the state already sharded, so that no device
            ever has all of it.
        {options}

    Returns:
        The same type of state; its arrays sharded, its optimizer carrying the plan.

    Example:
        >>> params = {"w": jnp.ones((64, 16))}
        >>> state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
        >>> state = zerojax.shard_train_state(state, stage=3)
        >>> print(state.params["w"].shape, state.params["w"].addressable_shards[0].data.shape)
        (64, 16) (8, 16)
    """
    _refusals.check_alive(state_or_fn)
    return _planner.plan(state_or_fn, **vars(options)).place(state_or_fn)


def unpad(state: PyTree, plan: Plan | None = None) -> PyTree:
    """Returns a placed state without its padding, to apply a model to its parameters yourself.

    Parameters that the devices do not divide rest with zeros at the end of one dimension. Steps,
    checkpoints and `full_params` see them without; a model of your own must be given them so.
    Inside `jax.jit` they stay sharded. Outside JAX has no arrays with such shards, and every
    device gets what was padded whole. Other leaves are returned as they are.

    Arguments:
        plan: the plan, for states that do not carry an optimizer (tuples, dicts).

    Example:
        >>> params = {"w": jnp.ones((257, 3))}
        >>> state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
        >>> state = zerojax.shard_train_state(state, stage=3)
        >>> print(state.params["w"].shape, zerojax.unpad(state).params["w"].shape)
        (264, 3) (257, 3)
    """
    _refusals.check_alive(state)
    if plan is not None:
        check_plan(plan, "plan=")
    plan = _carried.carried_plan(state) or plan
    if plan is None:
        raise ValueError(
            f"a state of type {type(state).__name__} does not carry the plan that it was placed "
            "by. Pass it: zerojax.unpad(state, plan)."
        )
    return plan.unpad(state)


def full_params(state: PyTree, plan: Plan | None = None) -> PyTree:
    """Returns the parameters as numpy arrays on the host, moved there one leaf at a time.

    Takes a state, or any tree of arrays; a pair that may be either is refused. In several
    processes every one calls it and gets all parameters; a model too large for that goes to files
    with `zerojax.checkpoint.export_safetensors`. What does not carry its plan (a tuple, a dict,
    parameters alone) is given with it where the plan pads parameters.

    Example:
        >>> params = {"w": jnp.ones((64, 16))}
        >>> state = zerojax.shard_train_state((params, ()), stage=3)
        >>> print(type(zerojax.full_params(state)["w"]).__name__)
        ndarray
    """
    _refusals.check_alive(state)
    _refusals.check_values(state)
    if plan is not None:
        check_plan(plan, "plan=")
    params = _state.params_in(state)
    if params is state and plan is None:  # parameters, or several states in one tree
        shapes = _padding.padded_shapes(params)
    else:
        shapes = _padding.padded_param_shapes(params, state, plan)

    def full(leaf: Leaf) -> PyTree:
        if is_key(leaf.value):
            return leaf.value
        value = _move.to_host(leaf.value)
        logical = _padding.unpadded(value, shapes.get(leaf.name, value.shape))
        return np.asarray(logical, order="C")  # `ascontiguousarray` would make a row of a scalar

    return jax.tree.structure(params).unflatten(map(full, _state.leaves_with_paths(params)))
