"""The front door: one call from a user's state to a placed one, and the way back."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from zerojax import _move, _planner, _spec, _state
from zerojax._precision import (
    MasterState,
    Precision,
    cast_floats,
    check_precision,
    master_weights,
    with_masters,
)


def shard_train_state(
    state_or_fn: Any,
    stage: int = 3,
    *,
    mesh: Mesh | None = None,
    axis: str | Sequence[str] | None = None,
    overrides: Mapping[str, PartitionSpec] | None = None,
    min_shard_size: int = _spec.DEFAULT_MIN_SHARD_SIZE,
    stacked: str | None = None,
    precision: Precision | None = None,
    tx: Any = None,
) -> Any:
    """Places a training state for a ZeRO stage; what `zerojax.train_step` then takes.

    Arguments:
        state_or_fn: a flax `TrainState` or any state that `zerojax.plan` takes. A function
            without arguments is compiled to make the state already sharded, so that no device
            ever holds it whole.
        stage: 0 replicates, 1 shards the optimizer state, 2 gradients too, 3 parameters too.
        precision: `param=` stores parameters in that dtype, `master=` keeps wider copies of
            them in the optimizer state; steps then compute and reduce in `compute=`, `reduce=`.
        mesh, axis, overrides, min_shard_size, stacked, tx: as in `zerojax.plan`.

    Returns:
        The same type of state; its arrays sharded, its optimizer carrying the plan.

    Example:
        >>> params = {"w": jnp.ones((64, 16))}
        >>> state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
        >>> state = zerojax.shard_train_state(state, stage=3)
        >>> print(state.params["w"].shape, state.params["w"].addressable_shards[0].data.shape)
        (64, 16) (8, 16)
    """
    stored = stored_with(state_or_fn, precision)
    plan = _planner.plan(
        stored, stage=stage, mesh=mesh, axis=axis, overrides=overrides,
        min_shard_size=min_shard_size, stacked=stacked, precision=precision, tx=tx,
    )  # fmt: skip
    return plan.place(stored)


def gather_params(state: Any) -> Any:
    """The parameters as numpy arrays on the host, moved there one leaf at a time.

    Takes a state, or any tree of arrays. In several processes every one calls it, and every one
    gets all of them; a model too large for that goes to files with `zerojax.export_safetensors`.

    Example:
        >>> params = {"w": jnp.ones((64, 16))}
        >>> state = zerojax.shard_train_state((params, ()), stage=3)
        >>> print(type(zerojax.gather_params(state)["w"]).__name__)
        ndarray
    """

    def to_host(leaf: Any) -> Any:
        return leaf if _move.is_key(leaf) else _move.whole(leaf)

    return jax.tree.map(to_host, _state.params_in(state))


def stored_with(state_or_fn: Any, precision: Precision | None) -> Any:
    """The state with its parameters and optimizer as `precision` wants them stored."""
    check_precision(precision)
    if precision is None or precision.param is None:
        return state_or_fn
    if _state.is_state_function(state_or_fn):
        return lambda: stored_with(state_or_fn(), precision)
    state = state_or_fn
    tx = _state.get_tx(_state.without_plan(state))
    if tx is None or not hasattr(state, "replace"):
        raise ValueError(
            f"precision= changes the optimizer, and a state of type {type(state).__name__} does "
            "not carry it. Build the state with tx = zerojax.master_weights(tx) and cast its "
            "parameters yourself."
        )
    if isinstance(state.opt_state, MasterState):
        return state  # placed before, and stored so already
    params = cast_floats(state.params, precision.param)
    if precision.master is None:
        wanted = jax.eval_shape(tx.init, params)
        opt_state = jax.tree.map(lambda x, w: x.astype(w.dtype), state.opt_state, wanted)
        return state.replace(params=params, tx=tx, opt_state=opt_state)
    # From the parameters as given: copies made of rounded ones would start out wrong.
    opt_state = with_masters(tx, state.params, state.opt_state, precision.master)
    tx = master_weights(tx, precision.master)
    return state.replace(params=params, tx=tx, opt_state=opt_state)
