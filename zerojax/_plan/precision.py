"""The dtypes of a step: for storage, compute, communication and the optimizer's state.

[Note: rounding moments]
A running mean with a decay of 0.999 moves by a thousandth of its distance, and neighbours in
bfloat16 are up to 1/128 apart: rounded to the nearest, it would stand still. So a number between
two neighbours becomes the upper one with the probability of its distance from the lower one, and
its mean over many steps is right.

The random bits are a hash of the number and of a salt, which is a scalar. We draw no bits for an
array's shape: those of an element would change with the sharding, and with updating layers one at a
time, and `_update/rules.py` could not prove such updates.
"""

import dataclasses
import functools
import itertools
import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.typing import DTypeLike

from zerojax._kernel.device import wide
from zerojax._plan import optimizer as _optimizer
from zerojax._state import carried as _carried, refusals as _refusals, state as _state
from zerojax._state.packed import is_packed
from zerojax._types import PyTree
from zerojax._wire import codecs as _codecs
from zerojax._wire.codecs import Quantized, Ways

NARROW = jnp.dtype(jnp.bfloat16)  # the dtype of narrow moments
_SIGN, _INFINITE, _FINITE = 0x80000000, 0x7F800000, 0x7F7FFFFF  # the bits of float32


@_refusals.knowing_dtypes
@dataclasses.dataclass(frozen=True)
class Precision:
    """Dtypes of a training step; None leaves things as they are.

    Arguments:
        compute: the step casts floating parameters and batch leaves to it before the loss sees
            them. It casts shards, so weights are also gathered in this dtype.
        gather: the dtype in which sharded weights are gathered, if that is not `compute`: a float
            dtype, "int8", "float8_e4m3fn" or a `zerojax.Quantized`. Quantized weights have a scale
            for each block, and are decoded where they are used; gradients are not affected.
            Vectors, and leaves whose shards no block divides, travel unquantized: `print(plan)`
            says which. A dict `{path regex: any of these or None}` differs by path: the first
            pattern that matches counts, and parameters that none matches travel as `compute`.
        reduce: the dtype in which gradients are summed over devices; default, their own. With
            "int8", "int4" or a `zerojax.Quantized` they travel quantized, over one axis of the mesh
            after the other, and are summed in float32.
        param: the dtype in which parameters are stored, from the moment the state is placed.
        master: the dtype of the copies that the optimizer updates and keeps in its (sharded) state;
            with `param="bfloat16", master="float32"` and Adam those are the ZeRO paper's
            2 + 2 + 12 bytes a parameter.
        moments: the dtype of the optimizer's moments between steps, "bfloat16", which halves their
            bytes. Moments are the float arrays of its state that have a parameter's path and shape
            and do not start as that parameter (as masters and averages do). Updates compute in
            float32, and then round each number up or down at random, so that its mean is exact. The
            random bits are a hash of the number, the count of updates and the leaf's position:
            they are the same at every stage, on any number of devices, and layer by layer.

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
        if self.moments not in (None, NARROW):
            raise ValueError(
                f"moments={str(self.moments)!r}: moments can be stored only in bfloat16, which has "
                "the range of float32 (second moments exceed that of float16). Pass 'bfloat16', or "
                "leave moments= out."
            )

    def __repr__(self) -> str:
        """Returns the call that makes it."""

        def shown(way: Ways) -> str:
            if isinstance(way, tuple):
                each = (f"{json.dumps(pattern)}: {shown(one)}" for pattern, one in way)
                return f"{{{', '.join(each)}}}"
            if isinstance(way, Quantized):
                return f'"{way.dtype}"' if way == Quantized(way.dtype) else f"zerojax.{way}"
            return "None" if way is None else f'"{jnp.dtype(way).name}"'  # type: ignore

        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        named = (f"{name}={shown(way)}" for name, way in fields.items() if way is not None)
        return f"Precision({', '.join(named)})"

    @property
    def sums(self) -> DTypeLike | None:
        """The dtype of the sums of gradients."""
        return "float32" if isinstance(self.reduce, Quantized) else self.reduce

    @property
    def stores(self) -> bool:
        """Whether placing a state changes the dtypes that it is stored in."""
        return self.param is not None or self.moments is not None


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
    return jax.tree.map(lambda leaf: _cast(leaf, dtype) if _is_float(leaf) else leaf, tree)


def seen_in(tree: PyTree, compute: DTypeLike | None, stored: DTypeLike | None) -> PyTree:
    """Returns the shapes of a loss's inputs as the loss sees them. Codes stay: a loss sees their
    weights in the dtype of the others, that in which it computes or these are stored."""
    if (dtype := compute or stored) is not None:
        seen = functools.partial(_decoded_in, dtype=dtype)
        tree = jax.tree.map(seen, tree, is_leaf=is_packed)
    return cast_floats(tree, compute)


def _decoded_in(node: PyTree, dtype: DTypeLike) -> PyTree:
    return node.astype(dtype) if is_packed(node) else node


def _is_float(leaf: PyTree) -> bool:
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
    rounded copies. Works with any optax optimizer, with or without zerojax.

    Example:
        >>> tx = zerojax.manual.master_weights(optax.adamw(1e-3))
        >>> params = {"w": jnp.ones((4,), jnp.bfloat16)}
        >>> print(tx.init(params).master["w"].dtype)
        float32
    """
    _refusals.check_tx(tx)
    Precision(param=dtype)  # raises if it is not a float dtype
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
    masters = cast_floats(params, dtype)
    update = _optimizer.update_of((masters, inner), tx)
    are_frozen = _optimizer.frozen_params((masters, inner), update)
    frozen = jax.tree.structure(params).unflatten(are_frozen)
    hole = optax.MaskedNode()
    return MasterState(jax.tree.map(lambda m, f: hole if f else m, masters, frozen), inner)


class NarrowState(NamedTuple):
    """The state of `narrow_moments`; `count` is the number of updates."""

    count: Array
    inner: PyTree


def narrow_moments(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Runs `tx` in float32, and keeps its moments in bfloat16 between updates.

    `zerojax.Precision(moments=)` says which arrays those are and how they are rounded, so that
    running means still move by steps too small for bfloat16. Numbers that bfloat16 represents
    exactly, infinities and NaN do not change. Works with any optax optimizer, with or without
    zerojax; masters go outside: `master_weights(narrow_moments(tx))`.

    Example:
        >>> tx = zerojax.manual.narrow_moments(optax.adamw(1e-3))
        >>> print(tx.init({"w": jnp.ones((4,))}).inner[0].nu["w"].dtype)
        bfloat16
    """
    _refusals.check_tx(tx)
    tx = optax.with_extra_args_support(tx)

    def init(params: PyTree) -> NarrowState:
        return _with_narrow(tx, params, tx.init(params))

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: PyTree
    ) -> tuple[PyTree, NarrowState]:
        old, treedef = jax.tree.flatten(state.inner)
        # Besides moments, arrays that are bfloat16 because the parameters are.
        is_narrow = [x.ndim > 0 and x.dtype == NARROW for x in old]
        inner = [_widened(x) if is_one else x for x, is_one in zip(old, is_narrow, strict=True)]
        grads = jax.tree.map(_widened, updates)
        updates, inner = tx.update(grads, treedef.unflatten(inner), params, **extra)
        new = treedef.flatten_up_to(inner)
        for place in itertools.compress(range(len(new)), is_narrow):
            new[place] = _rounded(new[place], _salt(state.count, place))
        return updates, NarrowState(state.count + 1, treedef.unflatten(new))

    return optax.GradientTransformationExtraArgs(init, update)


def _widened(value: Array) -> Array:
    return value.astype(wide(value.dtype)) if _is_float(value) else value


def _with_narrow(tx: optax.GradientTransformation, params: PyTree, inner: PyTree) -> NarrowState:
    """Returns the state of `narrow_moments` from that of `tx`."""
    are_moments = jax.tree.structure(inner).unflatten(_optimizer.moments(tx, params, inner))
    narrow = jax.tree.map(lambda x, narrows: _cast(x, NARROW) if narrows else x, inner, are_moments)
    return NarrowState(jnp.zeros((), jnp.int32), narrow)


def _salt(count: Array, place: int) -> Array:
    """Returns a number that differs from step to step and from leaf to leaf."""
    return _hash(_hash(count.astype(jnp.uint32)) + jnp.uint32(place))


def _rounded(value: Array, salt: Array) -> Array:
    """Rounds to one of the two neighbours in bfloat16, as the note above says.

    Numbers that bfloat16 represents, infinities and NaN do not change. Finite numbers stay finite.
    """
    bits = lax.bitcast_convert_type(value.astype(jnp.float32), jnp.uint32)
    size = bits & ~jnp.uint32(_SIGN)
    # The bits that bfloat16 drops are the distance from the lower neighbour. As many random bits,
    # added to them, carry into the bits that it keeps with the probability of that distance.
    up = jnp.minimum(size + (_hash(bits ^ salt) >> 16), _FINITE)
    # Without the dropped bits, a NaN may become an infinity.
    other = jnp.where(size > _INFINITE, size | 0x400000, size)
    bits = (bits & jnp.uint32(_SIGN)) | jnp.where(size < _INFINITE, up, other)
    return lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)


def _hash(bits: Array) -> Array:
    """Returns bits each of which depends on all bits of the argument (lowbias32)."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0x846CA68B)
    return bits ^ (bits >> 16)


def _holds(opt_state: PyTree, kind: type) -> bool:
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, kind))
    return any(isinstance(node, kind) for node in nodes)


def stored_with(state: PyTree, precision: Precision | None) -> PyTree:
    """Returns the state, or its shapes, with parameters and optimizer stored as `precision` says.

    A state that is stored so already does not change.
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
            f"precision= changes the optimizer, which a state of type {type(state).__name__} does "
            "not carry. Build the state with tx = zerojax.manual.master_weights(tx), cast its "
            "parameters yourself, and leave param= and master= out; for moments=, build it "
            "with zerojax.manual.narrow_moments(tx)."
        )
    params = state.params
    if narrows:
        opt_state, tx = _with_narrow(tx, params, opt_state), narrow_moments(tx)
    if casts:
        params = cast_floats(params, precision.param)
        if precision.master is None:
            wanted = jax.eval_shape(tx.init, params)
            opt_state = jax.tree.map(lambda x, w: _cast(x, w.dtype), opt_state, wanted)
        else:  # copies of the parameters before they were rounded
            opt_state = _with_masters(tx, state.params, opt_state, precision.master)
            tx = master_weights(tx, precision.master)
    return state.replace(params=params, tx=tx, opt_state=opt_state)
