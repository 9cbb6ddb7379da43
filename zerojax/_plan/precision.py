"""The dtypes of a step: for storage, compute, communication and the optimizer's state."""

import dataclasses
import functools
import itertools
import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.typing import DTypeLike

from zerojax import _compat
from zerojax._kernel.device import wide
from zerojax._plan import encodings as _encodings, optimizer as _optimizer
from zerojax._state import carried as _carried, refusals as _refusals, state as _state
from zerojax._state.hints import layer_dims
from zerojax._state.packed import is_packed
from zerojax._state.state import leaves_with_paths
from zerojax._types import PyTree
from zerojax._wire import codecs as _codecs
from zerojax._wire.codecs import QuantizedWire, Ways

NARROW = jnp.dtype(jnp.bfloat16)  # the dtype of narrow moments, and of weights with corrections
CODES = jnp.dtype(jnp.int8)
SPLIT = "split"
# What a message names in place of a dtype that is none.
ALLOWED = {
    "param": "'bfloat16', 'float16' or 'float32'",
    "master": "'float32', or 'split' (a correction of 8 bits)",
    "moments": "'bfloat16', or 'int8' (codes with scales)",
}


@_refusals.knowing_dtypes
@dataclasses.dataclass(frozen=True)
class Precision:
    """Dtypes of a training step; None leaves things as they are.

    Arguments:
        compute: the step casts floating parameters and batch leaves to it before the loss sees
            them. It casts shards, so weights are also gathered in this dtype.
        gather: the dtype in which sharded weights are gathered, if that is not `compute`: a float
            dtype, "int8", "float8_e4m3fn" or a `zerojax.QuantizedWire`. Quantized weights have a
            scale for each block, and are decoded where they are used; gradients are not affected.
            Vectors, and leaves whose shards no block divides, travel unquantized: `print(plan)`
            says which. A dict `{path regex: any of these or None}` differs by path: the first
            pattern that matches counts, and parameters that none matches travel as `compute`.
        reduce: the dtype in which gradients are summed over devices; default, their own. With
            "int8", "int4" or a `zerojax.QuantizedWire` they travel quantized, over one axis of the
            mesh after the other, and are summed in float32.
        param: the dtype in which parameters are stored, from the moment the state is placed.
        master: the dtype of the copies that the optimizer updates and keeps in its (sharded) state;
            with `param="bfloat16", master="float32"` and Adam those are the ZeRO paper's
            2 + 2 + 12 bytes a parameter. With "split" a master is the bfloat16 weight and a
            correction of 8 bits, together precise to 1 in 32,000; rounded like moments.
        moments: the dtype of the optimizer's moments between steps: "bfloat16", or "int8" with a
            scale for each 64 neighbours, neighbouring codes 1/15 to 1/8 apart. Moments are the
            float arrays of its state that have a parameter's path and shape and do not start as
            that parameter (as masters and averages do). Updates compute in float32, and then round
            each number up or down at random, so that its mean is exact. The random bits are a hash
            of the number, the count of updates and the leaf's position: they are the same at every
            stage, on any number of devices, and layer by layer. Vectors, and rows of less than 16,
            have no codes: `print(plan)` says which moments stay wide.

    Example:
        >>> paper = zerojax.Precision(compute="bfloat16", param="bfloat16", master="float32")
        >>> state = TrainState.create(
        ...     apply_fn=None, params={"w": jnp.ones((64, 16))}, tx=optax.adam(1e-2))
        >>> state = zerojax.shard_train_state(state, stage=1, precision=paper)
        >>> print(state.params["w"].dtype, state.opt_state.master["w"].dtype)
        bfloat16 float32
    """

    compute: DTypeLike | None = None
    reduce: DTypeLike | QuantizedWire | None = None
    param: DTypeLike | None = None
    master: DTypeLike | None = None
    moments: DTypeLike | None = None
    gather: Ways = None

    def __post_init__(self) -> None:
        for name in ("gather", "reduce"):
            object.__setattr__(self, name, _codecs.ways_for(getattr(self, name), name))
        for name in ("compute", "param", "master", "moments"):
            value = getattr(self, name)
            if value is None or (name == "master" and _is_split(value)):
                continue
            if name == "moments" and _is_codes(value):
                object.__setattr__(self, name, CODES)
                continue
            if (dtype := _codecs.float_dtype(value)) is None:
                raise ValueError(
                    f"Precision({name}={value!r}): not a float dtype. Use one such as "
                    f"{ALLOWED.get(name, ALLOWED['param'])}."
                )
            object.__setattr__(self, name, dtype)
        if self.param is not None and jnp.finfo(self.param).bits < 16:
            raise ValueError(
                f"Precision(param={str(self.param)!r}): parameters need 16 bits or more between "
                "steps, because optimizers cannot add to narrower ones. Pass param='bfloat16', and "
                f"gather={str(self.param)!r} to send them in 8 bits, with scales."
            )
        if self.master is not None and self.param is None:
            raise ValueError(
                "Precision(master=...) keeps copies of parameters that are stored in a narrower "
                "dtype. Pass param=... as well, for example param='bfloat16'."
            )
        if _is_split(self.master) and self.param != NARROW:
            raise ValueError(
                f"Precision(param={str(self.param)!r}, master='split'): corrections of 8 bits are "
                "for weights in bfloat16. Pass param='bfloat16', or master='float32'."
            )
        if self.moments not in (None, NARROW, CODES):
            raise ValueError(
                f"moments={str(self.moments)!r}: moments can be stored only in bfloat16, which has "
                "the range of float32 (second moments exceed that of float16), and in int8. Pass "
                "'bfloat16' or 'int8', or leave moments= out."
            )

    def __repr__(self) -> str:
        """Returns the call that makes it."""

        def shown(way: Ways) -> str:
            if isinstance(way, tuple):
                each = (f"{json.dumps(pattern)}: {shown(one)}" for pattern, one in way)
                return f"{{{', '.join(each)}}}"
            if isinstance(way, QuantizedWire):
                return f'"{way.dtype}"' if way == QuantizedWire(way.dtype) else f"zerojax.{way}"
            if way is None or _is_split(way):
                return "None" if way is None else f'"{SPLIT}"'
            return f'"{jnp.dtype(way).name}"'  # type: ignore

        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        named = (f"{name}={shown(way)}" for name, way in fields.items() if way is not None)
        return f"Precision({', '.join(named)})"

    @property
    def sums(self) -> DTypeLike | None:
        """The dtype of the sums of gradients."""
        return "float32" if isinstance(self.reduce, QuantizedWire) else self.reduce

    @property
    def master_dtype(self) -> DTypeLike | None:
        """The dtype in which an update sees masters."""
        return "float32" if _is_split(self.master) else self.master

    @property
    def stores(self) -> bool:
        """Whether placing a state changes the dtypes that it is stored in."""
        return self.param is not None or self.moments is not None


def _is_split(dtype: object) -> bool:
    return isinstance(dtype, str) and dtype == SPLIT


def _is_codes(dtype: Any) -> bool:
    try:
        return jnp.dtype(dtype) == CODES
    except TypeError:
        return False


def check_precision(precision: object) -> object:
    if precision is not None and not isinstance(precision, Precision):
        raise TypeError(
            f"precision must be a zerojax.Precision, got {precision!r}. Pass for example "
            "zerojax.Precision(compute='bfloat16')."
        )
    return precision


def cast_floats(tree: PyTree, dtype: DTypeLike | None) -> PyTree:
    """Casts the floating leaves of `tree`, arrays or shapes."""
    if dtype is None:
        return tree
    return jax.tree.map(lambda leaf: _cast(leaf, dtype) if is_float(leaf) else leaf, tree)


def seen_in(tree: PyTree, compute: DTypeLike | None, stored: DTypeLike | None) -> PyTree:
    """Returns the shapes of a loss's inputs as the loss sees them. Codes stay: a loss sees their
    weights in the dtype of the others, that in which it computes or these are stored."""
    if (dtype := compute or stored) is not None:
        seen = functools.partial(_decoded_in, dtype=dtype)
        tree = jax.tree.map(seen, tree, is_leaf=is_packed)
    return cast_floats(tree, compute)


def _decoded_in(node: PyTree, dtype: DTypeLike) -> PyTree:
    return node.astype(dtype) if is_packed(node) else node


def is_float(leaf: PyTree) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", int), jnp.floating)


def _cast(leaf: PyTree, dtype: DTypeLike) -> PyTree:
    is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
    return leaf.update(dtype=dtype) if is_shape else leaf.astype(dtype)


class MasterState(NamedTuple):
    """The state of `master_weights`. Parameters that `inner` does not update have no copy."""

    master: PyTree
    inner: PyTree


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
    if _is_split(dtype):
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
        # The difference between two close numbers is exact, unless the step is large.
        steps = jax.tree.map(lambda new, old: new - old.astype(new.dtype), new, params)
        return steps, MasterState(_where_copied(state.master, new, state.master), inner)

    return optax.GradientTransformationExtraArgs(init, update)


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
            # The difference of two numbers of bfloat16 is exact, unless the step is large.
            steps[place] = weight.astype(jnp.float32) - weights[place].astype(jnp.float32)
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
        for k in coded:
            inner[k] = _encodings.decoded(old[k], scales[k])
        twice = coded if _compat.KEEPS_BARRIERS else []
        if twice:
            _, first = tx.update(grads, treedef.unflatten(inner), params, **extra)
            found = treedef.flatten_up_to(first)
        for k in twice:
            # A fence: XLA would keep the new moments in float32 until their scales are there.
            codes, scale = lax.optimization_barrier((old[k], _encodings.scales_of(found[k])))
            inner[k], scales[k] = _encodings.decoded(codes, scales[k]), scale
        updates, inner = tx.update(grads, treedef.unflatten(inner), params, **extra)
        new, count = treedef.flatten_up_to(inner), state.count + 1
        for k in coded:
            salt = _encodings.salt(state.count, k)
            scales[k] = scales[k] if twice else _encodings.scales_of(new[k])
            new[k] = _encodings.codes_of(new[k], scales[k], salt)
        for k in narrow:
            new[k] = _encodings.rounded(new[k], _encodings.salt(state.count, k))
        if kind == CODES:
            return updates, CodedState(count, treedef.unflatten(new), treedef.unflatten(scales))
        return updates, NarrowState(count, treedef.unflatten(new))

    return optax.GradientTransformationExtraArgs(init, update)


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
        new = [_cast(x, NARROW) if n else x for x, n in zip(values, are_moments, strict=True)]
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
        lambda x, w: x if x.dtype == w.dtype else _cast(x, w.dtype), opt_state, wanted
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
    is_split, is_coded = _is_split(precision.master), precision.moments == CODES
    masters, moments = (MasterState, SplitState)[is_split], (NarrowState, CodedState)[is_coded]
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
        if is_split:
            opt_state = _with_corrections(tx, state.params, opt_state)
            tx = master_weights(tx, SPLIT)
        elif precision.master is not None:  # copies of the parameters before they were rounded
            opt_state = _with_masters(tx, state.params, opt_state, precision.master)
            tx = master_weights(tx, precision.master)
    return state.replace(params=params, tx=tx, opt_state=opt_state)
