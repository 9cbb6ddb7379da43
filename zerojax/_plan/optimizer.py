"""Specs of the optimizer state, from JAX's own sharding types rather than from names.

Initialising the optimizer on abstract parameters that carry their shard specs on a mesh of
Explicit axes makes JAX propagate them: every leaf of any optax state comes back with its own.
"""

from collections.abc import Sequence
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from zerojax._plan.spec import Rule
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
