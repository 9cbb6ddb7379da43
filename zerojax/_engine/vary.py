"""Which arrays a scope is differentiated by, and gradients in the shape of what they are of."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = Any


def vary(values: Sequence[Any], wanted: Sequence[bool]) -> tuple[list, Callable[[list], list]]:
    """The arrays of `values` to differentiate by, and a function that puts them back.

    Of a `Held`, that is the shard; of the others, the wanted ones of a float dtype.
    """
    leaves, treedef = jax.tree.flatten(list(values))
    mask = _varies(values, wanted)
    fixed = where(leaves, [not m for m in mask])
    return where(leaves, mask), lambda varied: treedef.unflatten(merge(mask, varied, fixed))


def gradients(values: Sequence[Any], wanted: Sequence[bool], varied: Sequence[Any]) -> list[Any]:
    """Gradients in the shape of `values`, None where `vary` left an array out."""
    mask, found = _varies(values, wanted), iter(varied)
    leaves = iter([next(found) if m else None for m in mask])
    return [
        tuple(next(leaves) for _ in value) if isinstance(value, tuple) else next(leaves)
        for value in values
    ]


def _varies(values: Sequence[Any], wanted: Sequence[bool]) -> list[bool]:
    mask: list[bool] = []
    for value, want in zip(values, wanted, strict=True):
        arrays = value if isinstance(value, tuple) else (value,)
        mask += [False] * (len(arrays) - 1) + [want and is_float(arrays[-1])]
    return mask


def perturbed(inputs: Any) -> tuple[list[bool], Any]:
    """From `custom_vjp`'s symbolic inputs: which are differentiated, and their values."""
    is_leaf = lambda x: hasattr(x, "perturbed")  # noqa: E731
    wanted = [any(x.perturbed for x in jax.tree.leaves(i, is_leaf=is_leaf)) for i in inputs]
    return wanted, jax.tree.map(lambda x: x.value, inputs, is_leaf=is_leaf)


def instantiated(ct: Any) -> Array:
    """A cotangent as an array, though it be a symbolic zero."""
    if type(ct) is jax.custom_derivatives.SymbolicZero:
        aval: Any = ct.aval
        return jnp.zeros(aval.shape, aval.dtype)
    return ct


def without_tangents(outs: Sequence[Array]) -> list[Array]:
    """Outputs of a `custom_vjp`, its integers rid of their (float0) tangents, which most
    primitives cannot differentiate by. `x | x` is `x`, and has no derivative."""

    def clean(out: Array) -> Array:
        is_int = jnp.issubdtype(out.dtype, jnp.integer) or out.dtype == bool
        return jnp.bitwise_or(out, out) if is_int else out

    return list(map(clean, outs))


def is_float(value: Any) -> bool:
    return jax.dtypes.issubdtype(value.dtype, np.inexact)


def add(a: Any, b: Any) -> Any:
    """The sum of two gradients, either of which may be None."""
    return b if a is None else a if b is None else a + b


def zeros_like(value: Any) -> Any:
    """The zero gradient of a value, whatever its dtype."""
    if is_float(value):
        return jnp.zeros(value.shape, value.dtype)
    return np.zeros(value.shape, jax.dtypes.float0)


def where(items: Sequence[Any], mask: Sequence[bool]) -> list[Any]:
    return [x for x, keep in zip(items, mask, strict=True) if keep]


def merge(mask: Sequence[bool], yes: Sequence[Any], no: Sequence[Any]) -> list[Any]:
    yes_items, no_items = iter(yes), iter(no)
    return [next(yes_items) if m else next(no_items) for m in mask]
