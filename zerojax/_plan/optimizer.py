"""The optimizer: its update, and the specs of its state.

Specs come from JAX's sharding types rather than from names. Initialised on abstract parameters
that carry their specs on a mesh of Explicit axes, any optax state comes back with a spec for each
leaf.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Jaxpr, Var
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from zerojax import _compat
from zerojax._jaxpr import Inliner, alive, is_var, reads
from zerojax._plan.spec import Rule
from zerojax._state import state as _state
from zerojax._state.state import Leaf, path_name, shape_dtype
from zerojax._types import PyTree


def from_sharding_types(
    tx: optax.GradientTransformation,
    params: PyTree,
    specs: Sequence[PartitionSpec],
    axis_sizes: dict[str, int],
) -> tuple[PyTree, str | None]:
    """Returns the shapes of `tx.init(params)`, each with its spec as `.sharding`.

    Where JAX cannot say, returns None and the reason.
    """
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
        init_shapes(tx, jax.tree.map(shape_dtype, params))  # raises an error of the optimizer's own
        return None, f"tx.init does what sharding types refuse ({type(error).__name__})"
    return shapes, None if shapes is not None else "tx.init wants values"


def init_shapes(tx: optax.GradientTransformation, params: PyTree) -> PyTree:
    """Returns the shapes of `tx.init(params)`, from shapes; None where it wants values."""
    try:
        return jax.eval_shape(tx.init, params)
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):  # a tracer was asked for a value
        return None


def check_optimizer(tx: optax.GradientTransformation, params: PyTree, opt_state: PyTree) -> None:
    """Raises where `opt_state` is not what `tx.init(params)` makes."""
    wanted = init_shapes(tx, jax.tree.map(shape_dtype, params))
    if wanted is None:
        return  # the update itself will raise
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


def leaves_by_path(tree: PyTree) -> dict[str, tuple[int, ...]]:
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {path_name(p): tuple(shape_dtype(v).shape) for p, v in flat}


def from_matching_shapes(
    leaf: Leaf,
    params: Sequence[tuple[Leaf, PartitionSpec]],
    rule: Rule | None,
    why: str | None = None,
) -> tuple[PartitionSpec, str | None]:
    """Returns the spec of the parameter whose path ends this leaf's path, if the shapes agree.

    Otherwise returns what `rule` says of the shape. `why` is why nothing better is known.
    """
    shape = tuple(shape_dtype(leaf.value).shape)
    for param, spec in params:
        tail = param.path[1:]
        same_place = leaf.path[len(leaf.path) - len(tail) :] == tail
        if same_place and tuple(shape_dtype(param.value).shape) == shape:
            return spec, None
    if rule is None:
        return PartitionSpec(), "neither a parameter nor optimizer state"
    spec, reason = rule(leaf.name, shape, PartitionSpec(), 0)
    return spec, "; ".join(
        filter(None, (reason, why and f"sharded by its shape alone: {why}"))
    ) or None


def apply_gradients(
    state: PyTree, grads: PyTree, tx: optax.GradientTransformation | None, fields: dict[str, PyTree]
) -> PyTree:
    """Updates a state: by its own `apply_gradients` where it has one, otherwise with optax."""
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


def frozen_params(state: PyTree, tx: optax.GradientTransformation | None) -> list[bool]:
    """Returns, for each parameter of a state, whether its update never reads its gradient.

    Where the update cannot be traced, all gradients count as read. It may want values or further
    arguments, or be wrong; the step will raise that.
    """
    state = jax.tree.map(shape_dtype, state)
    params, treedef = jax.tree.flatten(_state.get_params(state))

    def update(grads: list, state: PyTree) -> PyTree:
        return apply_gradients(state, treedef.unflatten(grads), tx, {})

    # A mesh of Explicit axes, as above, would refuse some updates.
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        try:
            jaxpr = jax.make_jaxpr(update)(list(map(_gradient_like, params)), state).jaxpr
        except Exception:
            return [False] * len(params)
    read = _sources(jaxpr)
    pairs = zip(params, jaxpr.invars[: len(params)], strict=True)
    return [jnp.issubdtype(p.dtype, jnp.inexact) and grad not in read for p, grad in pairs]


def _gradient_like(param: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct | np.ndarray:
    if jnp.issubdtype(param.dtype, jax.dtypes.extended):
        return np.zeros(param.shape, jax.dtypes.float0)
    return param


def _sources(jaxpr: Jaxpr) -> set[Var]:
    """Returns the variables that the results of a jaxpr come from, inside of calls too."""
    inliner = Inliner()
    eqns = list(inliner.flat(jaxpr.eqns, lambda eqn: eqn.primitive.name in _compat.CALLS))
    outvars = [inliner.named(v) for v in jaxpr.outvars]
    return {*filter(is_var, outvars)}.union(*map(reads, alive(eqns, outvars, reads)))
