"""Fields of a state, such as batch statistics, that a loss takes and returns updated."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax import _refusals


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

    def like(new: Any, old: Any) -> Any:
        if new is None:
            return old
        rounds = jnp.issubdtype(old.dtype, jnp.integer) and jnp.issubdtype(new.dtype, jnp.floating)
        return (jnp.round(new) if rounds else new).astype(old.dtype)

    is_none = lambda leaf: leaf is None  # noqa: E731
    fields = {n: jax.tree.map(like, aux[n], _field(state, n), is_leaf=is_none) for n in names}
    left = {k: v for k, v in aux.items() if k not in names}
    return left or None, fields


def _field(state: Any, name: str) -> Any:
    if isinstance(state, dict) and name in state:
        return state[name]
    if not hasattr(state, name):
        raise ValueError(
            f"mutable= names {name!r}, and a state of type {type(state).__name__} has no such "
            "field. Name one it has."
        )
    return getattr(state, name)
