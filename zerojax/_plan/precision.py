"""Dtypes: what is stored, what is computed in, what travels, what the optimizer keeps."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zerojax._plan import optimizer as _optimizer
from zerojax._state import carried as _carried, refusals as _refusals, state as _state


@dataclasses.dataclass(frozen=True)
class Precision:
    """Dtypes of a training step; None leaves things as they are.

    Arguments:
        compute: floating parameters and batch leaves are cast to it before the loss sees them.
            Weights are cast as shards, so it is also the dtype they are gathered in.
        reduce: the dtype gradients are summed over devices in; default, the dtype they come in.
        param: the dtype that parameters are stored in, from where the state is placed.
        master: the dtype of the copies the optimizer updates, kept among its (sharded) state;
            with `param="bfloat16", master="float32"` and Adam that is the ZeRO paper's
            2 + 2 + 12 bytes a parameter.

    Example:
        >>> paper = zerojax.Precision(compute="bfloat16", param="bfloat16", master="float32")
        >>> state = TrainState.create(
        ...     apply_fn=None, params={"w": jnp.ones((64, 16))}, tx=optax.adam(1e-2))
        >>> state = zerojax.shard_train_state(state, stage=1, precision=paper)
        >>> print(state.params["w"].dtype, state.opt_state.master["w"].dtype)
        bfloat16 float32
    """

    compute: Any = None
    reduce: Any = None
    param: Any = None
    master: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            try:
                dtype = jnp.dtype(value)
            except TypeError:
                dtype = None
            if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
                raise ValueError(
                    f"Precision({field.name}={value!r}): not a float dtype. Use one such as "
                    "'bfloat16', 'float16' or 'float32'."
                )
            object.__setattr__(self, field.name, dtype)
        if self.master is not None and self.param is None:
            raise ValueError(
                "Precision(master=...) keeps copies of parameters that are stored narrower. "
                "Give param=... as well, for example param='bfloat16'."
            )


def promoted(one: Any, other: Any) -> Any:
    """The dtype that holds both. JAX has none for floats of 8 bits, whose values bfloat16 has."""
    one, other = jnp.dtype(one), jnp.dtype(other)
    if one == other:
        return one

    def known(dtype: Any) -> Any:
        narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 16
        return jnp.bfloat16 if narrow else dtype

    return jnp.promote_types(known(one), known(other))


def cast_floats(tree: Any, dtype: Any) -> Any:
    """Casts the floating leaves of `tree`; shapes too."""
    if dtype is None:
        return tree

    def cast(leaf: Any) -> Any:
        if not jnp.issubdtype(getattr(leaf, "dtype", int), jnp.floating):
            return leaf
        return _cast(leaf, dtype)

    return jax.tree.map(cast, tree)


def _cast(leaf: Any, dtype: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)
    return leaf.astype(dtype)


def wide(dtype: Any) -> Any:
    """A dtype for sums and means of `dtype`: its own, float32 at least; of integers JAX's float."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return jnp.result_type(float)
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)


def exact_share(ways: int) -> tuple[float, float]:
    """`1 / ways` as a power of two, which narrow dtypes hold exactly, and the factor that is left.

    The first goes into a loss, where it keeps sums of its gradients from overflowing; the second,
    which is rounded in most dtypes, onto the sums. It is 1 where `ways` is a power of two.
    """
    power = 1 << (ways - 1).bit_length()
    return 1 / power, power / ways


def check_precision(precision: Any) -> None:
    if precision is not None and not isinstance(precision, Precision):
        raise TypeError(
            f"precision must be a zerojax.Precision, got {precision!r}. Pass for example "
            "zerojax.Precision(compute='bfloat16')."
        )


class MasterState(NamedTuple):
    """State of `master_weights`; without copies of parameters that `inner` does not update."""

    master: Any
    inner: Any


def master_weights(
    tx: optax.GradientTransformation, dtype: Any = "float32"
) -> optax.GradientTransformationExtraArgs:
    """Runs `tx` on copies of the parameters in `dtype`, kept in the optimizer state.

    The parameters themselves may be stored narrower; after each update they are the copies,
    rounded. Works with any optax optimizer, with or without zerojax.

    Example:
        >>> tx = zerojax.master_weights(optax.adamw(1e-3))
        >>> params = {"w": jnp.ones((4,), jnp.bfloat16)}
        >>> print(tx.init(params).master["w"].dtype)
        float32
    """
    _refusals.check_tx(tx)
    Precision(param=dtype)  # raises where it is no float
    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> MasterState:
        return with_masters(tx, params, tx.init(cast_floats(params, dtype)), dtype)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        if params is None:
            raise ValueError("master_weights needs params: call update(grads, state, params).")
        is_hole = lambda copy: isinstance(copy, optax.MaskedNode)  # noqa: E731
        copy_or_own = lambda copy, own: own if is_hole(copy) else copy  # noqa: E731
        masters = jax.tree.map(copy_or_own, state.master, params, is_leaf=is_hole)
        grads = cast_floats(updates, dtype)
        updates, inner = tx.update(grads, state.inner, masters, **extra)
        new = optax.apply_updates(masters, updates)
        steps = jax.tree.map(_step_onto, new, params)
        copies = jax.tree.map(
            lambda copy, new: copy if is_hole(copy) else new, state.master, new, is_leaf=is_hole
        )
        return steps, MasterState(copies, inner)

    return optax.GradientTransformationExtraArgs(init, update)


def _step_onto(new: jax.Array, old: jax.Array) -> jax.Array:
    """What apply_updates must add to `old` to land on `new`, rounded.

    Both are close, so the difference is exact but for far jumps, and never accumulates. In the
    wider dtype, which JAX adds to all but floats of 8 bits.
    """
    if jnp.issubdtype(old.dtype, jnp.floating) and jnp.finfo(old.dtype).bits < 16:
        rounded = new.astype(old.dtype).astype(new.dtype)
        return (rounded - old.astype(new.dtype)).astype(old.dtype)
    return new - old.astype(new.dtype)


def with_masters(
    tx: optax.GradientTransformation, params: Any, inner: Any, dtype: Any
) -> MasterState:
    """The state of `master_weights`, from that of `tx`, with copies of what `tx` updates."""
    masters = cast_floats(params, dtype)
    frozen = jax.tree.structure(params).unflatten(_optimizer.frozen_params((masters, inner), tx))
    hole = optax.MaskedNode()
    return MasterState(jax.tree.map(lambda m, f: hole if f else m, masters, frozen), inner)


def stored_with(state: Any, precision: Precision | None) -> Any:
    """The state, or its shapes, with parameters and optimizer as `precision` wants them stored.

    One that is stored so already stays as it is.
    """
    if precision is None or precision.param is None:
        return state
    if isinstance(_state.get_opt_state(state), MasterState):
        return state
    tx = _state.get_tx(_carried.without_plan(state))
    if tx is None or not hasattr(state, "replace"):
        raise ValueError(
            f"precision= changes the optimizer, and a state of type {type(state).__name__} does "
            "not carry it. Build the state with tx = zerojax.master_weights(tx), cast its "
            "parameters yourself, and leave param= and master= out."
        )
    params = cast_floats(state.params, precision.param)
    if precision.master is None:
        wanted = jax.eval_shape(tx.init, params)
        opt_state = jax.tree.map(lambda x, w: _cast(x, w.dtype), state.opt_state, wanted)
        return state.replace(params=params, tx=tx, opt_state=opt_state)
    # From the parameters as given: copies made of rounded ones would start out wrong.
    opt_state = with_masters(tx, state.params, state.opt_state, precision.master)
    tx = master_weights(tx, precision.master)
    return state.replace(params=params, tx=tx, opt_state=opt_state)
