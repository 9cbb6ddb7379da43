"""Fields of a state, such as batch statistics, that a loss takes and returns updated."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import DictKey

from zerojax._state import refusals as _refusals, state as _state


def with_fields(
    loss_fn: Callable[..., Any], state: Any, names: Sequence[str]
) -> Callable[..., Any]:
    """The loss with fields of the state as keyword arguments; of a `ModuleState`, with the model
    in place of its parameters. It holds the arrays of both where `trace_loss` finds them."""
    fields = {name: _field(state, name) for name in names}
    model_of = getattr(state, "model_of", lambda params: params)

    def loss(fields: dict[str, Any], model_of: Any, params: Any, *args: Any) -> Any:
        return _refusals.called(loss_fn, (model_of(params), *args), fields)

    return jax.tree_util.Partial(loss, fields, model_of)


def names_of(mutable: Sequence[str] | str) -> tuple[str, ...]:
    return (mutable,) if isinstance(mutable, str) else tuple(mutable)


def is_field(path: tuple, names: Sequence[str]) -> bool:
    """Whether a leaf at this path of aux belongs to one of the fields that `names` tells."""
    return bool(path) and isinstance(path[0], DictKey) and path[0].key in names


def has_no_mean(path: tuple, leaf: Any, names: Sequence[str]) -> bool:
    """Whether a leaf of aux is a field's integers, booleans or keys, which one device decides."""
    return is_field(path, names) and not jnp.issubdtype(leaf.dtype, jnp.inexact)


def split_fields(aux: Any, state: Any, names: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """Takes updated fields out of aux, in the dtypes they have in the state.

    What is None there stays as it was.
    """
    if not names:
        return aux, {}
    missing = [n for n in names if not isinstance(aux, dict) or n not in aux]
    if missing:
        raise TypeError(
            f"mutable={list(names)}, but the loss did not return {missing[0]!r}. Return "
            f"(loss, {{{missing[0]!r}: ..., }})."
        )
    new = {name: aux[name] for name in names}
    old = {name: _field(state, name) for name in names}
    _check_structure(new, old)
    fields = jax.tree_util.tree_map_with_path(_like, new, old, is_leaf=_is_none)
    return without_fields(aux, names), fields


def without_fields(aux: Any, names: Sequence[str]) -> Any:
    if not names or not isinstance(aux, dict):
        return aux
    return {k: v for k, v in aux.items() if k not in names} or None


def _like(path: tuple, new: Any, old: Any) -> Any:
    """The new value in the old one's dtype; an error where that is none for it."""
    if new is None:
        return old

    def is_a(kind: Any, leaf: Any) -> bool:
        return jnp.issubdtype(leaf.dtype, kind)

    is_key = is_a(jax.dtypes.extended, new)
    rounds = is_a(jnp.inexact, new) and not is_a(jnp.inexact, old)
    if new.shape != old.shape or rounds or is_key != is_a(jax.dtypes.extended, old):
        raise TypeError(
            f"the loss returned {_state.path_name(path)}, a field in mutable=, as "
            f"{new.dtype}{list(new.shape)}, and the state has it as {old.dtype}{list(old.shape)}. "
            "Return what the state has; a float for an integer is yours to round."
        )
    return new if is_key else new.astype(old.dtype)


def _check_structure(new: Any, old: Any) -> None:
    try:
        jax.tree.map(lambda *_: None, new, old, is_leaf=_is_none)
        return
    except ValueError as error:
        why = str(error)
    have, want = (
        {_state.path_name(p) for p, _ in jax.tree_util.tree_flatten_with_path(t)[0]}
        for t in (new, old)
    )
    what = [f"without {path}, which the state has" for path in sorted(want - have)]
    what += [f"with {path}, which the state has not" for path in sorted(have - want)]
    raise TypeError(
        f"the loss returned the fields in mutable= {what[0] if what else f'otherwise: {why}'}. "
        "Return every leaf that the state has, those that do not change as they came or as None."
    )


def _is_none(leaf: Any) -> bool:
    return leaf is None


def _field(state: Any, name: str) -> Any:
    if isinstance(state, dict) and name in state:
        return state[name]
    if not hasattr(state, name):
        raise ValueError(
            f"mutable= names {name!r}, and a state of type {type(state).__name__} has no such "
            "field. Name one it has."
        )
    return getattr(state, name)
