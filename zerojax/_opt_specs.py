"""Specs of the optimizer state, from JAX's own sharding types rather than from names.

Initialising the optimizer on abstract parameters that carry their shard specs on a mesh of
Explicit axes makes JAX propagate them: every leaf of any optax state comes back with its own.
"""

from collections.abc import Sequence
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from zerojax._spec import Rule
from zerojax._state import Leaf, path_name, shape_dtype


def from_sharding_types(
    tx: optax.GradientTransformation,
    params: Any,
    specs: Sequence[PartitionSpec],
    axis_sizes: dict[str, int],
) -> Any:
    """Shapes of `tx.init(params)`, each with its spec as `.sharding`; None if JAX cannot say."""
    explicit = (AxisType.Explicit,) * len(axis_sizes)
    mesh = AbstractMesh(tuple(axis_sizes.values()), tuple(axis_sizes), axis_types=explicit)
    values, treedef = jax.tree.flatten(params)
    typed = [
        jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=NamedSharding(mesh, spec))
        for s, spec in zip(map(shape_dtype, values), specs, strict=True)
    ]
    with jax.sharding.use_abstract_mesh(mesh):
        try:
            return jax.eval_shape(tx.init, treedef.unflatten(typed))
        except (jax.errors.JAXTypeError, TypeError, ValueError, NotImplementedError):
            return None  # it wants concrete values, or computes what sharding types refuse


def check_called(tx: Any) -> None:
    """Raises for an optimizer that is not one yet, `optax.adam` for `optax.adam(1e-3)`."""
    if tx is not None and not (hasattr(tx, "init") and hasattr(tx, "update")):
        name = getattr(tx, "__name__", type(tx).__name__)
        raise TypeError(
            f"tx= is {name}, not an optimizer. Pass an optax.GradientTransformation: call it, as "
            "in optax.adam(1e-3)."
        )


def check_optimizer(tx: optax.GradientTransformation, params: Any, opt_state: Any) -> None:
    """Raises where `opt_state` is not what `tx.init(params)` makes."""
    abstract = jax.tree.map(shape_dtype, params)
    try:
        wanted = jax.eval_shape(tx.init, abstract)
    except (jax.errors.JAXTypeError, TypeError, ValueError, NotImplementedError):
        return  # needs concrete parameters; the update itself will tell
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
    leaf: Leaf, params: Sequence[tuple[Leaf, PartitionSpec]], rule: Rule | None
) -> tuple[PartitionSpec, str | None]:
    """The spec of the parameter whose path ends this leaf's path, if the shapes agree."""
    shape = tuple(shape_dtype(leaf.value).shape)
    for param, spec in params:
        tail = param.path[1:]
        same_place = leaf.path[len(leaf.path) - len(tail) :] == tail
        if same_place and tuple(shape_dtype(param.value).shape) == shape:
            return spec, None
    if rule is None:
        return PartitionSpec(), "neither a parameter nor optimizer state"
    return rule(leaf.name, shape, PartitionSpec(), False)
