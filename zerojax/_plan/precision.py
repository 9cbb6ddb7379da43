"""The dtypes of a step: those of storage, compute, communication and the optimizer's state."""

import dataclasses
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from zerojax._kernel.device import wide
from zerojax._plan import optimizer as _optimizer
from zerojax._state import carried as _carried, refusals as _refusals, state as _state
from zerojax._types import PyTree
from zerojax._wire import codecs as _codecs, rounding as _rounding
from zerojax._wire.codecs import Quantized, Ways

NARROW = jnp.dtype(jnp.bfloat16)  # of moments


@dataclasses.dataclass(frozen=True)
class Precision(_refusals.KnownDtypes):
    """Dtypes of a training step; None leaves things as they are.

    Arguments:
        compute: floating parameters and batch leaves are cast to it before the loss sees them.
            Weights are cast as shards, so it is also the dtype they are gathered in.
        gather: what sharded weights are gathered as, where that is not `compute`: a float dtype,
            or "int8", "float8_e4m3fn" or a `zerojax.Quantized`. Quantized weights have a scale for
            each block, and are decoded where they are used. Gradients do not notice. Vectors, and
            leaves whose shards no block divides, travel as they are: `print(plan)` says which. A
            dict `{path regex: any of these or None}` says it of some: of patterns that match a path
            the first counts, and what none matches travels as `compute`.
        reduce: the dtype gradients are summed over devices in; default, the dtype they come in.
            With "int8", "int4" or a `zerojax.Quantized` they travel quantized, one axis of the mesh
            after the other, and are summed in float32.
        param: the dtype that parameters are stored in, from where the state is placed.
        master: the dtype of the copies the optimizer updates, kept among its (sharded) state;
            with `param="bfloat16", master="float32"` and Adam that is the ZeRO paper's
            2 + 2 + 12 bytes a parameter.
        moments: the dtype that the optimizer's moments rest in, "bfloat16", with half the bytes:
            float arrays of its state with a parameter's place and shape that do not start as the
            parameter (masters and averages do). Updates compute in float32 and then round
            stochastically, to either neighbour and on average to the number. The random bits are a
            hash of the number, the count of updates and the leaf's position: they are the same at
            every stage, on any number of devices, and layer by layer.

    Example:
        >>> paper = zerojax.Precision(compute="bfloat16", param="bfloat16", master="float32")
        >>> state = TrainState.create(
        ...     apply_fn=None, params={"w": jnp.ones((64, 16))}, tx=optax.adam(1e-2))
        >>> state = zerojax.shard_train_state(state, stage=1, precision=paper)
        >>> print(state.params["w"].dtype, state.opt_state.master["w"].dtype)
        bfloat16 float32
    """

    compute: DTypeLike | None = None
    reduce: DTypeLike | Quantized | None = None
    param: DTypeLike | None = None
    master: DTypeLike | None = None
    moments: DTypeLike | None = None
    gather: Ways = None

    def __post_init__(self) -> None:
        for name in ("gather", "reduce"):
            object.__setattr__(self, name, _codecs.ways_for(getattr(self, name), name))
        for name in ("compute", "param", "master", "moments"):
            if (value := getattr(self, name)) is None:
                continue
            if (dtype := _codecs.float_dtype(value)) is None:
                raise ValueError(
                    f"Precision({name}={value!r}): not a float dtype. Use one such as "
                    "'bfloat16', 'float16' or 'float32'."
                )
            object.__setattr__(self, name, dtype)
        if self.master is not None and self.param is None:
            raise ValueError(
                "Precision(master=...) keeps copies of parameters that are stored narrower. "
                "Give param=... as well, for example param='bfloat16'."
            )
        if self.moments not in (None, NARROW):
            raise ValueError(
                f"moments={str(self.moments)!r}: moments can rest in bfloat16, which has the "
                "range of float32 (second moments leave that of float16), or as they are. Pass "
                "'bfloat16', or leave it out."
            )
        adds_as_stored = self.moments is not None and self.param and not self.master
        if adds_as_stored and _is_8_bit_float(jnp.dtype(self.param)):
            raise ValueError(
                f"Precision(param={str(self.param)!r}, moments=...): updates with narrow moments "
                "are computed in float32, which JAX adds to no float of 8 bits. Give "
                "master='float32' as well."
            )

    @property
    def sums(self) -> DTypeLike | None:
        """The dtype of the sums of gradients."""
        return "float32" if isinstance(self.reduce, Quantized) else self.reduce

    @property
    def stores(self) -> bool:
        """Whether a state is stored otherwise than it is given."""
        return self.param is not None or self.moments is not None


def promoted(one: DTypeLike, other: DTypeLike) -> np.dtype:
    """Returns the dtype that has the values of both."""
    one, other = jnp.dtype(one), jnp.dtype(other)
    if one == other:
        return one
    # JAX promotes no float of 8 bits; bfloat16 has the values of all of them.
    known = [jnp.bfloat16 if _is_8_bit_float(dtype) else dtype for dtype in (one, other)]
    return jnp.promote_types(*known)


def _is_8_bit_float(dtype: np.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 16


def cast_floats(tree: PyTree, dtype: DTypeLike | None) -> PyTree:
    """Casts the floating leaves of `tree`, be they arrays or shapes."""
    if dtype is None:
        return tree
    return jax.tree.map(lambda leaf: _cast(leaf, dtype) if _is_float(leaf) else leaf, tree)


def _is_float(leaf: PyTree) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", int), jnp.floating)


def _cast(leaf: PyTree, dtype: DTypeLike) -> PyTree:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)
    return leaf.astype(dtype)


def check_precision(precision: object) -> object:
    if precision is not None and not isinstance(precision, Precision):
        raise TypeError(
            f"precision must be a zerojax.Precision, got {precision!r}. Pass for example "
            "zerojax.Precision(compute='bfloat16')."
        )
    return precision


class MasterState(NamedTuple):
    """The state of `master_weights`. Parameters that `inner` does not update have no copy."""

    master: PyTree
    inner: PyTree


def master_weights(
    tx: optax.GradientTransformation, dtype: DTypeLike | None = "float32"
) -> optax.GradientTransformationExtraArgs:
    """Runs `tx` on copies of the parameters in `dtype` (None: their own), kept in its state.

    The parameters themselves may be stored in a narrower dtype; after each update they are the
    copies, rounded. Works with any optax optimizer, with or without zerojax.

    Example:
        >>> tx = zerojax.manual.master_weights(optax.adamw(1e-3))
        >>> params = {"w": jnp.ones((4,), jnp.bfloat16)}
        >>> print(tx.init(params).master["w"].dtype)
        float32
    """
    _refusals.check_tx(tx)
    Precision(param=dtype)  # raises where it is no float
    tx = optax.with_extra_args_support(tx)

    def init(params: PyTree) -> MasterState:
        return _with_masters(tx, params, tx.init(cast_floats(params, dtype)), dtype)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: PyTree
    ) -> tuple[PyTree, MasterState]:
        if params is None:
            raise ValueError("master_weights needs params: call update(grads, state, params).")
        masters = _where_copied(state.master, state.master, params)
        grads = cast_floats(updates, dtype)
        updates, inner = tx.update(grads, state.inner, masters, **extra)
        new = optax.apply_updates(masters, updates)
        steps = jax.tree.map(_step_onto, new, params)
        return steps, MasterState(_where_copied(state.master, new, state.master), inner)

    return optax.GradientTransformationExtraArgs(init, update)


def _where_copied(copies: PyTree, yes: PyTree, no: PyTree) -> PyTree:
    """Returns the leaves of `yes` where there is a copy, and those of `no` elsewhere."""

    def is_hole(copy: object) -> bool:
        return isinstance(copy, optax.MaskedNode)

    return jax.tree.map(
        lambda copy, y, n: n if is_hole(copy) else y, copies, yes, no, is_leaf=is_hole
    )


def _step_onto(new: jax.Array, old: jax.Array) -> jax.Array:
    """Returns what apply_updates must add to `old` to make it `new`, rounded.

    Both are close, so the difference is exact unless the step is large, and errors never
    accumulate. It is in the wider dtype, which JAX can add to any float but those of 8 bits.
    """
    if _is_8_bit_float(old.dtype):
        rounded = new.astype(old.dtype).astype(new.dtype)
        return (rounded - old.astype(new.dtype)).astype(old.dtype)
    return new - old.astype(new.dtype)


def _with_masters(
    tx: optax.GradientTransformation, params: PyTree, inner: PyTree, dtype: DTypeLike | None
) -> MasterState:
    """Returns the state of `master_weights` from that of `tx`, with copies of what `tx` updates."""
    masters = cast_floats(params, dtype)
    update = _optimizer.update_of((masters, inner), tx)
    are_frozen = _optimizer.frozen_params((masters, inner), update)
    frozen = jax.tree.structure(params).unflatten(are_frozen)
    hole = optax.MaskedNode()
    return MasterState(jax.tree.map(lambda m, f: hole if f else m, masters, frozen), inner)


class NarrowState(NamedTuple):
    """The state of `narrow_moments`. `count` is the number of updates."""

    count: jax.Array
    inner: PyTree


def narrow_moments(
    tx: optax.GradientTransformation, dtype: DTypeLike = "bfloat16"
) -> optax.GradientTransformationExtraArgs:
    """Runs `tx` in float32, and keeps its moments in bfloat16 between updates.

    `zerojax.Precision(moments=)` says which those are and how they are rounded: running means go on
    moving by steps too small for bfloat16. What it holds exactly, such as zeros, stays as it is, as
    do infinities and NaN. Works with any optax optimizer, with or without zerojax; with masters,
    inside them: `master_weights(narrow_moments(tx))`.

    Example:
        >>> tx = zerojax.manual.narrow_moments(optax.adamw(1e-3))
        >>> print(tx.init({"w": jnp.ones((4,))}).inner[0].nu["w"].dtype)
        bfloat16
    """
    _refusals.check_tx(tx)
    Precision(moments=jnp.dtype(dtype))  # raises where it is another
    tx = optax.with_extra_args_support(tx)

    def init(params: PyTree) -> NarrowState:
        return _with_narrow(tx, params, tx.init(params))

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: PyTree
    ) -> tuple[PyTree, NarrowState]:
        old, treedef = jax.tree.flatten(state.inner)
        # Besides moments: what rests in bfloat16 because the parameters do.
        is_narrow = [x.ndim > 0 and x.dtype == NARROW for x in old]
        inner = [_widened(x) if is_one else x for x, is_one in zip(old, is_narrow, strict=True)]
        grads = jax.tree.map(_widened, updates)
        updates, inner = tx.update(grads, treedef.unflatten(inner), params, **extra)
        new = treedef.flatten_up_to(inner)
        for place in itertools.compress(range(len(new)), is_narrow):
            new[place] = _rounding.rounded(new[place], _rounding.salt(state.count, place))
        return updates, NarrowState(state.count + 1, treedef.unflatten(new))

    return optax.GradientTransformationExtraArgs(init, update)


def _widened(value: jax.Array) -> jax.Array:
    return value.astype(wide(value.dtype)) if _is_float(value) else value


def _with_narrow(tx: optax.GradientTransformation, params: PyTree, inner: PyTree) -> NarrowState:
    """Returns the state of `narrow_moments` from that of `tx`."""
    are_moments = jax.tree.structure(inner).unflatten(_optimizer.moments(tx, params, inner))
    narrow = jax.tree.map(lambda x, narrows: _cast(x, NARROW) if narrows else x, inner, are_moments)
    return NarrowState(jnp.zeros((), jnp.int32), narrow)


def storing(
    tx: optax.GradientTransformation, opt_state: PyTree, precision: Precision | None
) -> optax.GradientTransformation:
    """Returns the optimizer that `stored_with` makes of `tx`, whose state is `opt_state`."""
    if precision is None:
        return tx
    if precision.moments is not None and not _holds(opt_state, NarrowState):
        tx = narrow_moments(tx)
    if precision.master is not None and not _holds(opt_state, MasterState):
        tx = master_weights(tx, precision.master)
    return tx


def _holds(opt_state: PyTree, kind: type) -> bool:
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, kind))
    return any(isinstance(node, kind) for node in nodes)


def stored_with(state: PyTree, precision: Precision | None) -> PyTree:
    """Returns the state, or its shapes, with parameters and optimizer stored as `precision` says.

    A state that is stored so already stays as it is.
    """
    if precision is None or not precision.stores:
        return state
    opt_state = _state.get_opt_state(state)
    casts = precision.param is not None and not _holds(opt_state, MasterState)
    narrows = precision.moments is not None and not _holds(opt_state, NarrowState)
    if not casts and not narrows:
        return state
    tx = _state.get_tx(_carried.without_plan(state))
    if tx is None or not hasattr(state, "replace"):
        raise ValueError(
            f"precision= changes the optimizer, and a state of type {type(state).__name__} does "
            "not carry it. Build the state with tx = zerojax.manual.master_weights(tx), cast its "
            "parameters yourself, and leave param= and master= out; for moments=, build it "
            "with zerojax.manual.narrow_moments(tx)."
        )
    params, stored = state.params, storing(tx, opt_state, precision)
    if narrows:
        opt_state = _with_narrow(tx, params, opt_state)
        tx = narrow_moments(tx)
    if casts:
        params = cast_floats(params, precision.param)
        if precision.master is None:
            wanted = jax.eval_shape(tx.init, params)
            opt_state = jax.tree.map(lambda x, w: _cast(x, w.dtype), opt_state, wanted)
        else:
            # Made from the parameters as given: copies of rounded ones would start out wrong.
            opt_state = _with_masters(tx, state.params, opt_state, precision.master)
    return state.replace(params=params, tx=stored, opt_state=opt_state)
