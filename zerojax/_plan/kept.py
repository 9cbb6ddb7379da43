"""Optimizers that keep masters and moments in other dtypes; states stored as a precision says."""

import collections
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.typing import DTypeLike

from zerojax import _compat
from zerojax._declared import checked
from zerojax._kernel.device import wide
from zerojax._plan import encodings as _encodings, optimizer as _optimizer
from zerojax._plan.precision import (
    CODES,
    NARROW,
    SPLIT,
    Precision,
    cast,
    cast_floats,
    is_float,
    is_split,
)
from zerojax._state import carried as _carried, refusals as _refusals, state as _state
from zerojax._state.hints import layer_dims
from zerojax._state.state import leaves_with_paths
from zerojax._types import PyTree


class MasterState(NamedTuple):
    """The state of `master_weights`. Parameters that `inner` does not update have no copy."""

    master: PyTree
    inner: PyTree


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
    tx = optax.with_extra_args_support(tx)
    if is_split(dtype):
        return _split_weights(tx)
    Precision(param=dtype)  # raises if it is not a float dtype

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
        steps = jax.tree.map(_step, new, params)
        return steps, MasterState(_where_copied(state.master, new, state.master), inner)

    return optax.GradientTransformationExtraArgs(init, update)


def _step(new: Array, old: Array) -> Array:
    """Returns what to add to a weight: exact for two close numbers, and for infinities."""
    wide = old.astype(new.dtype)
    return jnp.where(new == wide, 0, new - wide)


def _where_copied(copies: PyTree, yes: PyTree, no: PyTree) -> PyTree:
    """Returns the leaves of `yes` where there is a copy, and those of `no` elsewhere."""

    def is_hole(copy: object) -> bool:
        return isinstance(copy, optax.MaskedNode)

    return jax.tree.map(
        lambda copy, y, n: n if is_hole(copy) else y, copies, yes, no, is_leaf=is_hole
    )


def _with_masters(
    tx: optax.GradientTransformation, params: PyTree, inner: PyTree, dtype: DTypeLike | None
) -> MasterState:
    """Returns the state of `master_weights` from that of `tx`, copying only what `tx` updates."""
    masters, hole = cast_floats(params, dtype), optax.MaskedNode()
    frozen = _frozen(tx, masters, inner)
    return MasterState(jax.tree.map(lambda m, f: hole if f else m, masters, frozen), inner)


def _frozen(tx: optax.GradientTransformation, masters: PyTree, inner: PyTree) -> PyTree:
    update = _optimizer.update_of((masters, inner), tx)
    are_frozen = _optimizer.frozen_params((masters, inner), update)
    return jax.tree.structure(masters).unflatten(are_frozen)


class SplitState(NamedTuple):
    """The state of `master_weights(tx, "split")`; `count` is the number of updates.

    Parameters that `inner` does not update, and those that are not floats, have no correction.
    """

    count: Array
    correction: PyTree
    inner: PyTree


def _split_weights(
    tx: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Runs `tx` on masters that are bfloat16 parameters with corrections."""

    def init(params: PyTree) -> SplitState:
        return _with_corrections(tx, params, tx.init(cast_floats(params, jnp.float32)))

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: PyTree
    ) -> tuple[PyTree, SplitState]:
        if params is None:
            raise ValueError("master_weights needs params: call update(grads, state, params).")
        weights, treedef = jax.tree.flatten(params)
        codes = treedef.flatten_up_to(state.correction)
        has_code = [not isinstance(code, optax.MaskedNode) for code in codes]
        if odd := {x.dtype.name for x in itertools.compress(weights, has_code)} - {NARROW.name}:
            raise ValueError(
                f"master_weights(tx, 'split') has corrections of bfloat16 weights, and parameters "
                f"are {', '.join(odd)}. Pass them in bfloat16."
            )
        masters = [
            _encodings.joined(weight, code) if has else weight
            for weight, code, has in zip(weights, codes, has_code, strict=True)
        ]
        grads, masters = cast_floats(updates, jnp.float32), treedef.unflatten(masters)
        updates, inner = tx.update(grads, state.inner, masters, **extra)
        steps = treedef.flatten_up_to(updates)
        new = treedef.flatten_up_to(optax.apply_updates(masters, updates))
        for place in itertools.compress(range(len(new)), has_code):
            salt = _encodings.salt(state.count, place)
            weight, codes[place] = _encodings.split(new[place], salt)
            steps[place] = _step(weight.astype(jnp.float32), weights[place])
        state = SplitState(state.count + 1, treedef.unflatten(codes), inner)
        return treedef.unflatten(steps), state

    return optax.GradientTransformationExtraArgs(init, update)


def _with_corrections(
    tx: optax.GradientTransformation, params: PyTree, inner: PyTree
) -> SplitState:
    """Returns the state of `_split_weights` from that of `tx`, before parameters are narrow."""

    def code(param: PyTree, is_frozen: bool) -> PyTree:
        if is_frozen or not is_float(param):
            return optax.MaskedNode()
        if isinstance(param, jax.ShapeDtypeStruct):
            return param.update(dtype=CODES)
        return _encodings.split(param)[1]

    frozen = _frozen(tx, cast_floats(params, jnp.float32), inner)
    return SplitState(jnp.zeros((), jnp.int32), jax.tree.map(code, params, frozen), inner)


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
        holes: list[Any] = [optax.MaskedNode()] * len(old)
        scales = treedef.flatten_up_to(state.scales) if kind == CODES else holes
        coded = [k for k, scale in enumerate(scales) if not isinstance(scale, optax.MaskedNode)]
        # Besides moments, arrays that are bfloat16 because the parameters are.
        narrow = [k for k, x in enumerate(old) if x.ndim > 0 and x.dtype == NARROW]
        inner, grads = list(old), jax.tree.map(_widened, updates)
        for k in narrow:
            inner[k] = _widened(old[k])
        others = _others(state.inner, updates, coded)

        def settled(codes: Sequence[Any]) -> dict[int, Array]:
            own = {k: (codes[k], scales[k]) for k in coded}
            return {k: _encodings.settled(*own[k], [own[o] for o in others[k]]) for k in coded}

        def updated(codes: Sequence[Any]) -> tuple[PyTree, list[Any]]:
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
        if kind == CODES:
            return updates, CodedState(count, treedef.unflatten(new), treedef.unflatten(scales))
        return updates, NarrowState(count, treedef.unflatten(new))

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
    leaves, treedef = leaves_with_paths(inner), jax.tree.structure(inner)
    values, are_moments = [leaf.value for leaf in leaves], _optimizer.moments(tx, params, inner)
    count = jnp.zeros((), jnp.int32)
    if kind != CODES:
        new = [cast(x, NARROW) if n else x for x, n in zip(values, are_moments, strict=True)]
        return NarrowState(count, treedef.unflatten(new))
    stacks, scales = layer_dims(params, None), list[Any]([optax.MaskedNode()] * len(values))
    for place in itertools.compress(range(len(values)), are_moments):
        path, value = leaves[place].path, values[place]
        layers = next((n for stack, n in stacks.items() if path[-len(stack) :] == stack), 0)
        if not _encodings.is_worth_codes(tuple(value.shape), layers):
            continue
        if isinstance(value, jax.ShapeDtypeStruct):
            scale = jax.ShapeDtypeStruct(_encodings.scale_shape(value.shape), NARROW)
            values[place], scales[place] = value.update(dtype=CODES), scale
        else:
            values[place], scales[place] = _encodings.typed_codes(value)
    return CodedState(count, treedef.unflatten(values), treedef.unflatten(scales))


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


def _holds(opt_state: PyTree, *kinds: type) -> bool:
    """Whether a state has nodes of one of these kinds."""
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, kinds))
    return any(isinstance(node, kinds) for node in nodes)


def stored_with(state: PyTree, precision: Precision | None) -> PyTree:
    """Returns the state, or its shapes, with parameters and optimizer stored as `precision` says.

    A state that is stored so already does not change.
    """
    if precision is None or not precision.stores:
        return state
    opt_state = _state.get_opt_state(state)
    splits, codes = is_split(precision.master), precision.moments == CODES
    masters, moments = (MasterState, SplitState)[splits], (NarrowState, CodedState)[codes]
    casts = precision.param is not None and not _holds(opt_state, MasterState, SplitState)
    narrows = precision.moments is not None and not _holds(opt_state, NarrowState, CodedState)
    others = [precision.master is not None and not casts and not _holds(opt_state, masters)]
    others += [precision.moments is not None and not narrows and not _holds(opt_state, moments)]
    if any(others):
        raise ValueError(
            f"{precision} says that the optimizer state is kept in another way than it is. Save "
            "the state, and restore it with like=zerojax.plan(make_state, precision=)."
        )
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
        if splits:
            opt_state = _with_corrections(tx, state.params, opt_state)
            tx = master_weights(tx, SPLIT)
        elif precision.master is not None:  # copies of the parameters before they were rounded
            opt_state = _with_masters(tx, state.params, opt_state, precision.master)
            tx = master_weights(tx, precision.master)
    return state.replace(params=params, tx=tx, opt_state=opt_state)
