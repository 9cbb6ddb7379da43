"""Selects the arrays to differentiate by, and gives gradients the structure of their primals."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from zerojax._collectives import Held

Value = Array | Held  # an input of a scope
Gradient = Any  # of a Value, in its structure; None where there is none
T = TypeVar("T")


def vary(
    values: Sequence[Value], wanted: Sequence[bool]
) -> tuple[list[Array], Callable[[list[Array]], list[Value]]]:
    """Returns the arrays of `values` to differentiate by, and a function that puts them back.

    Of a `Held`, that is the shard, or what backward updates; of the others, the wanted ones of a
    float dtype.
    """
    leaves, treedef = jax.tree.flatten(list(values))
    mask = _varies(values, wanted)
    fixed = where(leaves, [not m for m in mask])
    return where(leaves, mask), lambda varied: treedef.unflatten(merge(mask, varied, fixed))


def gradients(
    values: Sequence[Value], wanted: Sequence[bool], varied: Sequence[Array]
) -> list[Gradient]:
    """Returns gradients in the structure of `values`, None where `vary` left an array out.

    They get the dtypes of `values`: a user's own rule may return wider ones, which JAX takes in
    some places and not in others.
    """
    leaves, treedef = jax.tree.flatten(list(values))
    found, pairs = iter(varied), zip(leaves, _varies(values, wanted), strict=True)
    return treedef.unflatten([next(found).astype(x.dtype) if m else None for x, m in pairs])


def _varies(values: Sequence[Value], wanted: Sequence[bool]) -> list[bool]:
    """Whether each array of `values` is differentiated by."""

    def mask(value: Value, want: bool) -> Held | bool:
        if not isinstance(value, Held):
            return want and is_float(value)
        none = jax.tree.map(lambda _: False, value)
        if none.updating is None:
            return dataclasses.replace(none, shard=want and is_float(value.shard))
        stacks = (want,) * len(none.updating.stacks)
        return dataclasses.replace(none, updating=dataclasses.replace(none.updating, stacks=stacks))

    return jax.tree.leaves(list(map(mask, values, wanted)))


def by_hand(
    plain: Callable[[list[Value]], list[Array]],
    saving: Callable[[list[Value], tuple[bool, ...]], tuple[list[Array], Any]],
    backward: Callable[[list[Value], Any, list[Any]], list[Gradient]],
    inputs: Sequence[Value],
) -> list[Array]:
    """Runs a function whose derivative is written by hand.

    Without derivatives, `plain(inputs)` runs. With them, `saving(inputs, wanted)` gives the outputs
    and what to keep, and `backward(inputs, kept, cotangents)` the gradients of the inputs.
    """

    @jax.custom_vjp
    def call(inputs: list[Value]) -> list[Array]:
        return plain(inputs)

    def forward(inputs: list[Any]) -> tuple[list[Array], Any]:
        wanted, values = _perturbed(inputs)
        outs, saved = saving(values, wanted)
        return outs, (values, saved)

    def transpose(residuals: Any, cts: list[Any]) -> tuple[list[Gradient]]:
        inputs, saved = residuals
        return (backward(inputs, saved, cts),)

    call.defvjp(forward, transpose, symbolic_zeros=True)
    return _without_tangents(call(list(inputs)))


def _perturbed(inputs: Any) -> tuple[tuple[bool, ...], Any]:
    """Returns which of `custom_vjp`'s symbolic inputs are differentiated, and their values."""

    def is_leaf(x: Any) -> bool:
        return hasattr(x, "perturbed")

    wanted = (any(x.perturbed for x in jax.tree.leaves(i, is_leaf=is_leaf)) for i in inputs)
    return tuple(wanted), jax.tree.map(lambda x: x.value, inputs, is_leaf=is_leaf)


def _without_tangents(outs: Sequence[Array]) -> list[Array]:
    """Rids the integers among a `custom_vjp`'s outputs of their (float0) tangents, which most
    primitives cannot differentiate by. `x | x` is `x`, and has no derivative."""

    def clean(out: Array) -> Array:
        is_int = jnp.issubdtype(out.dtype, jnp.integer) or out.dtype == bool
        return jnp.bitwise_or(out, out) if is_int else out

    return list(map(clean, outs))


def float_cotangents(cts: Sequence[Any], outs: Sequence[Any]) -> list[Array | None]:
    """Returns cotangents as arrays of the dtypes of `outs`, even where they are symbolic zeros;
    None where that is no float dtype. A loop's have a dimension more than those of one turn."""

    def array(ct: Any, out: Any) -> Array:
        if type(ct) is jax.custom_derivatives.SymbolicZero:
            aval: Any = ct.aval
            return jnp.zeros(aval.shape, out.dtype)
        return ct.astype(out.dtype)

    return [array(ct, x) if is_float(x) else None for ct, x in zip(cts, outs, strict=True)]


def is_float(value: Any) -> bool:
    return jax.dtypes.issubdtype(value.dtype, np.inexact)


def add(a: Array | None, b: Array | None) -> Any:
    """Returns the sum of two gradients, either of which may be None."""
    return b if a is None else a if b is None else a + b


def add_held(a: Held, b: Held) -> Held:
    """Returns the sum of two gradients of one `Held`."""
    return jax.tree.map(add, a, b, is_leaf=lambda x: x is None)


def zeros_like(value: Array | jax.ShapeDtypeStruct) -> Array | np.ndarray:
    """Returns the zero gradient of a value of any dtype."""
    if is_float(value):
        return jnp.zeros(value.shape, value.dtype)
    return np.zeros(value.shape, jax.dtypes.float0)


def where(items: Sequence[T], mask: Sequence[bool]) -> list[T]:
    return [x for x, keep in zip(items, mask, strict=True) if keep]


def merge(mask: Sequence[bool], yes: Sequence[T], no: Sequence[T]) -> list[T]:
    """Returns the items of `yes` where `mask` is true and those of `no` elsewhere, in order."""
    yes_items, no_items = iter(yes), iter(no)
    return [next(yes_items) if m else next(no_items) for m in mask]
