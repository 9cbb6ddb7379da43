"""Fields of a state, such as batch statistics, that a loss takes and returns updated."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import DictKey

from zerojax._state import refusals as _refusals, state as _state
from zerojax._types import PyTree, is_key
from zerojax._warn import warn

UPDATED = ("step", _state.PARAMS, _state.OPT_STATE)  # by the optimizer


def with_fields(
    loss_fn: Callable[..., PyTree], state: PyTree, names: Sequence[str]
) -> Callable[..., PyTree]:
    """Returns the loss with fields of the state as keyword arguments.

    The loss of a `ModuleState` takes the model in place of its parameters. The result is a
    `Partial`, in which `trace_loss` finds the arrays of the fields and of the model.
    """
    fields = {name: _field(state, name) for name in names}
    model_of = getattr(state, "model_of", lambda params: params)

    def loss(fields: PyTree, model_of: Callable, params: PyTree, *args: PyTree) -> PyTree:
        return _refusals.called(loss_fn, (model_of(params), *args), fields)

    return jax.tree_util.Partial(loss, fields, model_of)


def is_field(path: tuple, names: Sequence[str]) -> bool:
    """Whether the leaf of aux at this path belongs to one of the fields in `names`."""
    return bool(path) and isinstance(path[0], DictKey) and path[0].key in names


def has_no_mean(path: tuple, leaf: jax.Array, names: Sequence[str]) -> bool:
    """Whether a leaf of aux is a field's integers, booleans or keys: those of one device count."""
    return is_field(path, names) and not jnp.issubdtype(leaf.dtype, jnp.inexact)


def split_fields(
    aux: PyTree, state: PyTree, names: Sequence[str]
) -> tuple[PyTree, dict[str, PyTree]]:
    """Takes the updated fields out of aux, in the dtypes that they have in the state.

    A leaf that is None in aux stays as it was. Warns of fields in aux that the step will not
    update.
    """
    _warn_of_others(aux, state, names)
    if not names:
        return aux, {}
    if missing := [n for n in names if not isinstance(aux, dict) or n not in aux]:
        raise TypeError(
            f"mutable={list(names)}, but the loss did not return {missing[0]!r}. Return "
            f"(loss, {{{missing[0]!r}: ..., }})."
        )
    new = {name: aux[name] for name in names}
    old = {name: _field(state, name) for name in names}
    try:
        fields = jax.tree_util.tree_map_with_path(_like, new, old, is_leaf=lambda x: x is None)
    except ValueError as error:
        have, want = ({leaf.name for leaf in _state.leaves_with_paths(of)} for of in (new, old))
        ways = [f"without {path}, which is in the state" for path in sorted(want - have)]
        ways += [f"with {path}, which is not in the state" for path in sorted(have - want)]
        raise TypeError(
            f"the loss returned the fields in mutable= {[*ways, f'otherwise: {error}'][0]}. Return "
            "every leaf that the state has, one that does not change as it came or as None."
        ) from None
    return without_fields(aux, names), fields


def without_fields(aux: PyTree, names: Sequence[str]) -> PyTree:
    if not names or not isinstance(aux, dict):
        return aux
    return {k: v for k, v in aux.items() if k not in names} or None


def _warn_of_others(aux: PyTree, state: PyTree, names: Sequence[str]) -> None:
    """Warns where aux has what looks like a field of the state that is not in `mutable=`."""
    shapes = functools.partial(jax.tree.map, lambda leaf: getattr(leaf, "shape", None))
    for name, new in aux.items() if isinstance(aux, dict) else ():
        is_like = jax.tree.leaves(new) and shapes(new) == shapes(_state.field(state, str(name)))
        if is_like and name not in (*names, *UPDATED):
            warn(
                f"the loss returns {name!r} in aux, and the state has a field of that name, which "
                f"the step leaves as it was. With mutable=({name!r},) the step passes the field to "
                f"the loss as {name}= and keeps the one that it returns. For a metric, take "
                "another name."
            )


def _like(path: tuple, new: jax.Array | None, old: jax.Array) -> jax.Array:
    """Returns the new value in the old one's dtype; raises where that would lose something."""
    if new is None:
        return old
    rounds = jnp.issubdtype(new.dtype, jnp.inexact) and not jnp.issubdtype(old.dtype, jnp.inexact)
    if new.shape != old.shape or rounds or is_key(new) != is_key(old):
        raise TypeError(
            f"the loss returned {_state.path_name(path)}, a field in mutable=, as "
            f"{new.dtype}{list(new.shape)}, and the state has it as {old.dtype}{list(old.shape)}. "
            "Return it with the shape and dtype of the state; a float for an integer is yours to "
            "round."
        )
    return new if is_key(new) else new.astype(old.dtype)


def _field(state: PyTree, name: str) -> PyTree:
    kind = type(state).__name__
    if not (name in state if isinstance(state, dict) else hasattr(state, name)):
        raise ValueError(
            f"mutable= names {name!r}, and a state of type {kind} has no such field. Name one it "
            f"has{_with_arrays(state)}."
        )
    value = _state.field(state, name)
    # A placed optimizer is static to JAX, which finds no leaves in it.
    for leaf in jax.tree.leaves(value, is_leaf=_is_optimizer):
        if not _is_array(leaf):
            what = "an optimizer" if _is_optimizer(leaf) else f"a {type(leaf).__name__}"
            raise TypeError(
                f"mutable= names {name!r}, which in a state of type {kind} has {what}, and a loss "
                f"updates arrays. Name a field that has only arrays{_with_arrays(state)}."
            )
    return value


def _is_optimizer(value: object) -> bool:
    return isinstance(value, optax.GradientTransformation)


def _is_array(leaf: object) -> bool:
    return hasattr(leaf, "dtype") or isinstance(leaf, int | float | complex)


def _with_arrays(state: PyTree) -> str:
    """Returns, for a message, the fields of a state that a loss may update."""
    by_name = getattr(state, "_asdict", lambda: getattr(state, "__dict__", {}))  # named tuples
    fields = state if isinstance(state, dict) else by_name()
    leaves = {name: jax.tree.leaves(v) for name, v in fields.items() if name not in UPDATED}
    names = [repr(name) for name, of in leaves.items() if of and all(map(_is_array, of))]
    if names:
        return f": {' or '.join(names)}"
    return ". This state has none that the optimizer does not update: add one to its class"
