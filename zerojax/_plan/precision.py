"""The dtypes of a step, for storage, compute, communication and the optimizer's state; casts."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from zerojax._state import refusals as _refusals
from zerojax._state.packed import is_packed
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
    "moments": "'bfloat16', or 'int8' (with scales)",
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
            scale for each 64 neighbours, neighbouring values 1/15 to 1/8 apart. Moments are the
            float arrays of its state that have a parameter's path and shape and do not start as
            that parameter (as masters and averages do). Updates compute in float32, and then round
            each number up or down at random, so that its mean is exact. The random bits are a hash
            of the number, the count of updates and the leaf's position: they are the same at every
            stage, on any number of devices, and layer by layer. Vectors, and rows of less than 16,
            are not quantized: `print(plan)` says which moments stay wide.

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
            if value is None or (name == "master" and is_split(value)):
                continue
            is_codes = name == "moments" and _is_codes(value)
            if (dtype := CODES if is_codes else _codecs.float_dtype(value)) is None:
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
        if is_split(self.master) and self.param != NARROW:
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
            if way is None or is_split(way):
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
        return "float32" if is_split(self.master) else self.master

    @property
    def stores(self) -> bool:
        """Whether placing a state changes the dtypes that it is stored in."""
        return self.param is not None or self.moments is not None


def is_split(dtype: object) -> bool:
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
    return jax.tree.map(lambda leaf: cast(leaf, dtype) if is_float(leaf) else leaf, tree)


def seen_in(tree: PyTree, compute: DTypeLike | None, stored: DTypeLike | None) -> PyTree:
    """Returns the shapes of a loss's inputs as the loss sees them. Codes stay: a loss sees their
    weights in the dtype of the others, that in which it computes or these are stored."""
    dtype = compute or stored
    return cast_floats(tree if dtype is None else decoded_in(tree, dtype), compute)


def decoded_in(tree: PyTree, dtype: DTypeLike) -> PyTree:
    """Returns a tree whose codes make weights of this dtype."""
    return jax.tree.map(lambda x: x.astype(dtype) if is_packed(x) else x, tree, is_leaf=is_packed)


def is_float(leaf: PyTree) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", int), jnp.floating)


def cast(leaf: PyTree, dtype: DTypeLike) -> PyTree:
    is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
    return leaf.update(dtype=dtype) if is_shape else leaf.astype(dtype)
