"""Optimizers that keep masters and moments in other dtypes; states stored as a precision says."""

import collections
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.typing import DTypeLike

from zerojax import _compat
from zerojax._declared import checked
from zerojax._plan import encodings as _encodings, optimizer as _optimizer
from zerojax._plan.precision import CODES, NARROW, Precision, cast, cast_floats, is_float, is_split
from zerojax._state import carried as _carried, refusals as _refusals, state as _state
from zerojax._state.hints import layer_dims
from zerojax._state.state import leaves_with_paths
from zerojax._types import PyTree, wide
from zerojax._update.matrices import check_no_moments


class MasterState(NamedTuple):
    """The state of `master_weights`. Parameters that `inner` does not update have no copy."""

    master: PyTree
    inner: PyTree


class SplitState(NamedTuple):
    """The state of `master_weights(tx, "split")`; `count` is the number of updates.

    Parameters that `inner` does not update, and those that are not floats, have no correction.
    """

    count: Array
    correction: PyTree
    inner: PyTree


class NarrowState(NamedTuple):
    """The state of `narrow_moments`; `count` is the number of updates."""

    count: Array
    inner: PyTree


class CodedState(NamedTuple):
    """The state of `narrow_moments(tx, "int8")`; `count` is the number of updates.

    Where `inner` has codes, `scales` has their scales.
    """

    count: Array
    inner: PyTree
    scales: PyTree


# Their fields are paths in files. `optax.tree.get` would also read an empty field of one state.
WrapperState = MasterState | SplitState | NarrowState | CodedState
KEEPS_MASTERS, KEEPS_MOMENTS = (MasterState, SplitState), (NarrowState, CodedState)


def states_in(tree: PyTree) -> Iterator[WrapperState]:
    """Yields the states of these wrappers in a tree, the outer ones first."""
    for node in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, WrapperState)):
        if isinstance(node, WrapperState):
            yield node
            yield from states_in(node.inner)


@checked
def master_weights(
    tx: optax.GradientTransformation, dtype: DTypeLike | None = "float32"
) -> optax.GradientTransformationExtraArgs:
    """Runs `tx` on copies of the parameters in `dtype` (None: their own), kept in its state.

    The parameters themselves may be stored in a narrower dtype: each update sets them to the
    rounded copies. With "split" they are stored in bfloat16, and the state keeps corrections of 8
    bits in place of copies. Works with any optax optimizer, with or without zerojax.

    Example:
        >>> tx = zerojax.manual.master_weights(optax.adamw(1e-3))
        >>> params = {"w": jnp.ones((4,), jnp.bfloat16)}
        >>> print(tx.init(params).master["w"].dtype)
        float32
    """
    _refusals.check_tx(tx)
    tx, splits = optax.with_extra_args_support(tx), is_split(dtype)
    wide = jnp.float32 if splits else dtype
    Precision(param=wide)  # raises if it is not a float dtype

    def init(params: PyTree) -> MasterState | SplitState:
        return _with_masters(tx, params, tx.init(cast_floats(params, wide)), dtype)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: PyTree
    ) -> tuple[PyTree, MasterState | SplitState]:
        if params is None:
            raise ValueError("master_weights needs params: call update(grads, state, params).")
        weights, treedef = jax.tree.flatten(params)
        rest = treedef.flatten_up_to(state.correction if splits else state.master)
        places = [k for k, x in enumerate(rest) if not isinstance(x, optax.MaskedNode)]
        if splits and (odd := {weights[k].dtype.name for k in places} - {NARROW.name}):
            raise ValueError(
                f"master_weights(tx, 'split') has corrections of bfloat16 weights, and parameters "
                f"are {', '.join(odd)}. Pass them in bfloat16."
            )
        new = list(weights)
        for k in places:
            new[k] = _encodings.joined(weights[k], rest[k]) if splits else rest[k]
        grads, masters = cast_floats(updates, wide), treedef.unflatten(new)
        updates, inner = tx.update(grads, state.inner, masters, **extra)
        steps = treedef.flatten_up_to(updates)
        new = treedef.flatten_up_to(optax.apply_updates(masters, updates))
        for k in places:
            rest[k] = new[k]
            if splits:
                weight, rest[k] = _encodings.split(new[k], _encodings.salt(state.count, k))
                new[k] = weight.astype(wide)
            old = weights[k].astype(new[k].dtype)
            # Exact for two close numbers, and for infinities.
            steps[k] = jnp.where(new[k] == old, 0, new[k] - old)
        updates, rest = treedef.unflatten(steps), treedef.unflatten(rest)
        new_state = SplitState(state.count + 1, rest, inner) if splits else MasterState(rest, inner)
        return updates, new_state

    return optax.GradientTransformationExtraArgs(init, update)


def _with_masters(
    tx: optax.GradientTransformation, params: PyTree, inner: PyTree, dtype: DTypeLike | None
) -> MasterState | SplitState:
    """Returns the state of `master_weights` from that of `tx`, before parameters are narrow."""
    splits = is_split(dtype)
    masters = cast_floats(params, jnp.float32 if splits else dtype)
    update = _optimizer.update_of((masters, inner), tx)
    frozen = _optimizer.frozen_params((masters, inner), update)

    def rest(param: PyTree, master: PyTree, is_frozen: bool) -> PyTree:
        if is_frozen or (splits and not is_float(param)):
            return optax.MaskedNode()
        if not splits:
            return master
        is_shape = isinstance(param, jax.ShapeDtypeStruct)
        return cast(param, CODES) if is_shape else _encodings.split(param)[1]

    kept = jax.tree.map(rest, params, masters, jax.tree.structure(masters).unflatten(frozen))
    return SplitState(jnp.zeros((), jnp.int32), kept, inner) if splits else MasterState(kept, inner)


@checked
def narrow_moments(
    tx: optax.GradientTransformation, dtype: DTypeLike = "bfloat16"
) -> optax.GradientTransformationExtraArgs:
    """Runs `tx` in float32, and keeps its moments in bfloat16 or int8 between updates.

    `zerojax.Precision(moments=)` says which arrays those are and how they are rounded, so that
    running means still move by steps too small for `dtype`. Numbers that it represents exactly,
    infinities and NaN do not change. Works with any optax optimizer, with or without zerojax;
    masters go outside: `master_weights(narrow_moments(tx))`.

    Example:
        >>> tx = zerojax.manual.narrow_moments(optax.adamw(1e-3))
        >>> print(tx.init({"w": jnp.ones((4,))}).inner[0].nu["w"].dtype)
        bfloat16
    """
    _refusals.check_tx(tx)
    tx, kind = optax.with_extra_args_support(tx), Precision(moments=dtype).moments or NARROW

    def init(params: PyTree) -> NarrowState | CodedState:
        return _with_narrow(tx, params, tx.init(params), kind)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: PyTree
    ) -> tuple[PyTree, NarrowState | CodedState]:
        old, treedef = jax.tree.flatten(state.inner)
        scales = treedef.flatten_up_to(state.scales) if kind == CODES else []
        coded = [k for k, scale in enumerate(scales) if not isinstance(scale, optax.MaskedNode)]
        # Besides moments, arrays that are bfloat16 because the parameters are.
        narrow = [k for k, x in enumerate(old) if x.ndim > 0 and x.dtype == NARROW]
        inner, grads = list(old), jax.tree.map(_widened, updates)
        for k in narrow:
            inner[k] = _widened(old[k])
        others = _others(state.inner, updates, coded)

        def settled(codes: Sequence[Array]) -> dict[int, Array]:
            own = {k: (codes[k], scales[k]) for k in coded}
            return {k: _encodings.settled(*own[k], [own[o] for o in others[k]]) for k in coded}

        def updated(codes: Sequence[Array]) -> tuple[PyTree, list[Array]]:
            for k, code in settled(codes).items():
                inner[k] = _encodings.decoded(code, scales[k])
            updates, new = tx.update(grads, treedef.unflatten(inner), params, **extra)
            return updates, treedef.flatten_up_to(new)

        fenced, new_scales = list(old), {}
        first = updated(old)[1] if coded and _compat.KEEPS_BARRIERS else []
        for k in coded if first else []:
            # A fence: XLA would keep the new moments in float32 until their scales are there.
            fence = old[k], _encodings.scales_of(first[k])
            fenced[k], new_scales[k] = lax.optimization_barrier(fence)
        (updates, new), count = updated(fenced), state.count + 1
        for k in coded:
            scales[k] = new_scales[k] if first else _encodings.scales_of(new[k])
            new[k] = _encodings.codes_of(new[k], scales[k], _encodings.salt(state.count, k))
        for k, code in settled(new).items():
            new[k] = code
        for k in narrow:
            new[k] = _encodings.rounded(new[k], _encodings.salt(state.count, k))
        state = state._replace(count=count, inner=treedef.unflatten(new))
        return updates, state._replace(scales=treedef.unflatten(scales)) if coded else state

    return optax.GradientTransformationExtraArgs(init, update)


def _others(inner: PyTree, updates: PyTree, coded: Sequence[int]) -> dict[int, list[int]]:
    """Returns, for each of some leaves of an optimizer's state, those of the same parameter."""
    params = {leaf.path for leaf in leaves_with_paths(updates)}
    leaves, alike = leaves_with_paths(inner), collections.defaultdict[tuple, list[int]](list)
    for k in coded:
        path = leaves[k].path
        tails = (path[start:] for start in range(len(path) + 1))
        alike[next((tail for tail in tails if tail in params), path)].append(k)
    return {k: [o for o in group if o != k] for group in alike.values() for k in group}


def _widened(value: Array) -> Array:
    return value.astype(wide(value.dtype)) if is_float(value) else value


def _with_narrow(
    tx: optax.GradientTransformation, params: PyTree, inner: PyTree, kind: DTypeLike
) -> NarrowState | CodedState:
    """Returns the state of `narrow_moments` from that of `tx`."""
    check_no_moments(inner, kind)
    values, treedef = jax.tree.flatten(inner)
    count, scales = jnp.zeros((), jnp.int32), [optax.MaskedNode() for _ in values]
    stacks = layer_dims(params, None) if kind == CODES else {}
    triples = zip(leaves_with_paths(inner), _optimizer.moments(tx, params, inner), strict=True)
    for place, ((path, value), is_moment) in enumerate(triples):
        layers = next((n for stack, n in stacks.items() if path[-len(stack) :] == stack), 0)
        if is_moment and kind != CODES:
            values[place] = cast(value, NARROW)
        elif is_moment and _encodings.is_worth_codes(tuple(value.shape), layers):
            values[place], scales[place] = _encodings.typed_codes(value)
    inner = treedef.unflatten(values)
    if kind != CODES:
        return NarrowState(count, inner)
    return CodedState(count, inner, treedef.unflatten(scales))


def _as_made(
    tx: optax.GradientTransformation, params: PyTree, opt_state: PyTree, dtype: DTypeLike | None
) -> PyTree:
    """Returns an optimizer state in the dtypes that it has for parameters of this dtype."""
    new = cast_floats(params, dtype)
    if jax.tree.all(jax.tree.map(lambda old, new: old.dtype == new.dtype, params, new)):
        return opt_state  # `tx.init` may need values
    wanted = jax.eval_shape(tx.init, new)
    return jax.tree.map(
        lambda x, w: x if x.dtype == w.dtype else cast(x, w.dtype), opt_state, wanted
    )


def stored_with(state: PyTree, precision: Precision | None) -> PyTree:
    """Returns the state, or its shapes, with parameters and optimizer stored as `precision` says.

    A state that is stored so already does not change.
    """
    if precision is None or not precision.stores:
        return state
    opt_state = _state.get_opt_state(state)
    if precision.moments is not None:
        check_no_moments(opt_state, precision.moments)
    kinds = {type(node) for node in states_in(opt_state)}
    for dtype, pair in ((precision.master, KEEPS_MASTERS), (precision.moments, KEEPS_MOMENTS)):
        there, wanted = kinds.intersection(pair), pair[is_split(dtype) or dtype == CODES]
        if dtype is not None and there and wanted not in there:
            raise ValueError(
                f"{precision} says that the optimizer state has a format that it lacks. "
                "Save the state, and restore it with like=zerojax.plan(make_state, precision=)."
            )
    casts = precision.param is not None and kinds.isdisjoint(KEEPS_MASTERS)
    narrows = precision.moments is not None and kinds.isdisjoint(KEEPS_MOMENTS)
    if not casts and not narrows:
        return state
    tx = _state.get_tx(_carried.without_plan(state))
    if tx is None or not hasattr(state, "replace"):
        raise ValueError(
            f"precision= changes the optimizer, which a state of type {type(state).__name__} does "
            "not carry. Build the state with tx = zerojax.manual.master_weights(tx), cast its "
            "parameters yourself, and leave param= and master= out; for moments=, build it "
            "with zerojax.manual.narrow_moments(tx)."
        )
    params = state.params
    if narrows:
        kind = precision.moments or NARROW
        opt_state, tx = _with_narrow(tx, params, opt_state, kind), narrow_moments(tx, kind)
    if casts:
        params = cast_floats(params, precision.param)
        opt_state = _as_made(tx, state.params, opt_state, precision.master_dtype or precision.param)
        if precision.master is not None:  # of the parameters before they were rounded
            opt_state = _with_masters(tx, state.params, opt_state, precision.master)
            tx = master_weights(tx, precision.master)
    return state.replace(params=params, tx=tx, opt_state=opt_state)
