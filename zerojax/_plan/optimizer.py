"""Specs of the optimizer state, from JAX's own sharding types rather than from names.

Initialising the optimizer on abstract parameters that carry their shard specs on a mesh of
Explicit axes makes JAX propagate them: every leaf of any optax state comes back with its own.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from zerojax import _compat
from zerojax._jaxpr import Inliner, alive, is_var
from zerojax._plan.spec import Rule
from zerojax._state import state as _state
from zerojax._state.state import Leaf, path_name, shape_dtype


def from_sharding_types(
    tx: optax.GradientTransformation,
    params: Any,
    specs: Sequence[PartitionSpec],
    axis_sizes: dict[str, int],
) -> tuple[Any, str | None]:
    """Shapes of `tx.init(params)`, each with its spec as `.sharding`; or None, and why JAX cannot
    say."""
    explicit = (AxisType.Explicit,) * len(axis_sizes)
    mesh = AbstractMesh(tuple(axis_sizes.values()), tuple(axis_sizes), axis_types=explicit)
    values, treedef = jax.tree.flatten(params)
    typed = [
        jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=NamedSharding(mesh, spec))
        for s, spec in zip(map(shape_dtype, values), specs, strict=True)
    ]
    try:
        with jax.sharding.use_abstract_mesh(mesh):
            shapes = init_shapes(tx, treedef.unflatten(typed))
    except Exception as error:
        init_shapes(tx, jax.tree.map(shape_dtype, params))  # raises what is the optimizer's own
        return None, f"tx.init does what sharding types refuse ({type(error).__name__})"
    return shapes, None if shapes is not None else "tx.init wants values"


def init_shapes(tx: optax.GradientTransformation, params: Any) -> Any:
    """Shapes of `tx.init(params)`, of shapes; None where it wants values."""
    try:
        return jax.eval_shape(tx.init, params)
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):  # of tracers asked for values
        return None


def check_optimizer(tx: optax.GradientTransformation, params: Any, opt_state: Any) -> None:
    """Raises where `opt_state` is not what `tx.init(params)` makes."""
    wanted = init_shapes(tx, jax.tree.map(shape_dtype, params))
    if wanted is None:
        return  # the update itself will tell
    remedy = "Make it anew: opt_state = tx.init(params)."
    have, want = leaves_by_path(opt_state), leaves_by_path(wanted)
    odd = sorted(have.keys() ^ want.keys())
    if odd:
        where = "only in the state" if odd[0] in have else "missing from the state"
        raise ValueError(
            f"optimizer and parameters do not match: opt_state/{odd[0]} is {where}. {remedy}"
        )
    for path, shape in have.items():
        if shape != want[path]:
            raise ValueError(
                f"optimizer and parameters do not match: opt_state/{path} has shape {shape}, "
                f"and tx.init(params) makes {want[path]}. {remedy}"
            )


def leaves_by_path(tree: Any) -> dict[str, tuple[int, ...]]:
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {path_name(p): tuple(shape_dtype(v).shape) for p, v in flat}


def from_matching_shapes(
    leaf: Leaf,
    params: Sequence[tuple[Leaf, PartitionSpec]],
    rule: Rule | None,
    why: str | None = None,
) -> tuple[PartitionSpec, str | None]:
    """The spec of the parameter whose path ends this leaf's path, if the shapes agree. `why`:
    what has led here."""
    shape = tuple(shape_dtype(leaf.value).shape)
    for param, spec in params:
        tail = param.path[1:]
        same_place = leaf.path[len(leaf.path) - len(tail) :] == tail
        if same_place and tuple(shape_dtype(param.value).shape) == shape:
            return spec, None
    if rule is None:
        return PartitionSpec(), "neither a parameter nor optimizer state"
    spec, reason = rule(leaf.name, shape, PartitionSpec(), False)
    return spec, "; ".join(filter(None, (reason, why and f"cut by its shape alone: {why}"))) or None


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
