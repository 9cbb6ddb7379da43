"""The user's own update, and which gradients it never reads.

A parameter is frozen by its optimizer, as in `optax.selective_transform(tx, freeze_mask=...)` or
`optax.multi_transform` with `optax.set_to_zero`. What such an update does with gradients can be
read off its jaxpr, so nobody needs to say it a second time.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh

from zerojax import _compat
from zerojax._jaxpr import Inliner, alive, is_var
from zerojax._state import state as _state


def apply_gradients(
    state: Any, grads: Any, tx: optax.GradientTransformation | None, fields: dict[str, Any]
) -> Any:
    """The user's own update where the state has one, optax's otherwise."""
    if hasattr(state, "apply_gradients"):
        return state.apply_gradients(grads=grads, **fields)
    if tx is None:
        raise ValueError(
            f"a state of type {type(state).__name__} has no apply_gradients. Pass the optimizer: "
            "zerojax.train_step(loss_fn, tx=tx, plan=plan)."
        )
    params = _state.get_params(state)
    updates, opt_state = tx.update(grads, _state.get_opt_state(state), params)
    new_params = optax.apply_updates(params, updates)
    return _state.replace(state, params=new_params, opt_state=opt_state, **fields)


def frozen_params(state: Any, tx: optax.GradientTransformation | None) -> list[bool]:
    """For each parameter of a state, whether the update goes without its gradient."""
    shapes = jax.tree.map(_state.shape_dtype, state)
    return unread(lambda grads, state: apply_gradients(state, grads, tx, {}), shapes)


def unread(update: Callable[[Any, Any], Any], state: Any) -> list[bool]:
    """For each parameter of `state`, whether `update(grads, state)` reads its gradient nowhere.

    Where the update cannot be traced, all gradients count as read: it wants values or arguments
    besides, or is wrong, which is the step's to say.
    """
    params, treedef = jax.tree.flatten(_state.get_params(state))
    # A mesh of Explicit axes around (`optimizer.py`) must not say what can be traced.
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        try:
            closed = jax.make_jaxpr(lambda grads, state: update(treedef.unflatten(grads), state))(
                list(map(_gradient_like, params)), state
            )
        except Exception:
            return [False] * len(params)
    read = _reads(closed.jaxpr)
    floats = [jnp.issubdtype(p.dtype, jnp.inexact) for p in params]
    grads = iter(closed.jaxpr.invars)
    return [next(grads) not in read and is_float for is_float in floats]


def _gradient_like(param: Any) -> Any:
    if jnp.issubdtype(param.dtype, jax.dtypes.extended):
        return np.zeros(param.shape, jax.dtypes.float0)
    return jax.ShapeDtypeStruct(param.shape, param.dtype)


def _reads(jaxpr: Any) -> set[Any]:
    """The variables that the results of a jaxpr come from, calls looked into."""
    inliner = Inliner()
    eqns: list[Any] = []

    def walk(eqn: Any) -> None:
        eqn = inliner.resolved(eqn)
        if eqn.primitive.name not in _compat.CALLS:
            eqns.append(eqn)
            return
        for inner in inliner.expand(eqn):
            walk(inner)

    for eqn in jaxpr.eqns:
        walk(eqn)
    outvars = [inliner.named(v) for v in jaxpr.outvars]
    reads_of = lambda eqn: [v for v in eqn.invars if is_var(v)]  # noqa: E731
    return {*filter(is_var, outvars)}.union(*map(reads_of, alive(eqns, outvars, reads_of)))
