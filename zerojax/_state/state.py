"""What the parts of a user's state are: parameters, optimizer state, everything else.

This is the one place that knows about container types. A state is any pytree whose leaves
sit under `params` and `opt_state` (attributes or keys), or a tuple that starts with those two.
A list is none, nor is a named tuple with other fields: those are trees of parameters.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax.core import meta
from jax.sharding import PartitionSpec
from jax.tree_util import DictKey, GetAttrKey, SequenceKey, keystr

PARAMS, OPT_STATE, OTHER = "params", "opt_state", "other"


class Leaf(NamedTuple):
    path: tuple
    value: Any

    @property
    def name(self) -> str:
        return path_name(self.path)

    @property
    def kind(self) -> str:
        return kind_of(self.path)


def path_name(path: tuple) -> str:
    return keystr(path, simple=True, separator="/")


def kind_of(path: tuple) -> str:
    match path[0] if path else None:
        case GetAttrKey(name) | DictKey(name) if name in (PARAMS, OPT_STATE):
            return name
        case SequenceKey(idx) if idx < 2:
            return (PARAMS, OPT_STATE)[idx]
    return OTHER


def leaves_with_paths(tree: Any) -> list[Leaf]:
    return [Leaf(path, value) for path, value in jax.tree_util.tree_flatten_with_path(tree)[0]]


def named_leaves(tree: Any, separator: str = "/") -> list[Leaf]:
    """The leaves with their paths; an error where two have one name, their keys so joined."""
    leaves = leaves_with_paths(tree)
    named: dict[str, Leaf] = {}
    for leaf in leaves:
        name = keystr(leaf.path, simple=True, separator=separator)
        other = named.setdefault(name, leaf)
        if other is not leaf:
            raise ValueError(
                f"leaves {keystr(other.path)} and {keystr(leaf.path)} are both named {name}. "
                "Rename one."
            )
    return leaves


def leaves_of(state: Any) -> list[Leaf]:
    """The leaves with their paths; an error where one of them is no array."""
    leaves = named_leaves(state)
    for leaf in leaves:
        if not _is_array(leaf.value) and not np.isscalar(leaf.value):
            raise TypeError(
                f"state leaf {leaf.name} is a {type(leaf.value).__name__}, not an array. Make it "
                "an array, or a static field (flax.struct.field(pytree_node=False))."
            )
        if isinstance(leaf.value, str | bytes):
            raise TypeError(
                f"state leaf {leaf.name} is the string {leaf.value!r}, not an array. Make it a "
                "static field (flax.struct.field(pytree_node=False)) or leave it out."
            )
    _check_single(state)
    params = get_params(state)
    if jax.tree.leaves(params) and not any(leaf.kind == PARAMS for leaf in leaves):
        raise ValueError(
            f"JAX does not name the fields of {type(state).__name__}. Register it with "
            "jax.tree_util.register_dataclass, or with register_pytree_with_keys."
        )
    if leaves and params is None:
        raise no_parameters(state)
    return leaves


def no_parameters(state: Any) -> ValueError:
    return ValueError(
        f"no parameters in a state of type {type(state).__name__}. Pass a flax TrainState, "
        "a tuple (params, opt_state), or {'params': ..., 'opt_state': ...}."
    )


def shape_dtype(value: Any) -> jax.ShapeDtypeStruct:
    """Shape and canonical dtype of an array, key array, numpy or Python scalar."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        dtype = value.dtype
        if not jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
            dtype = jax.dtypes.canonicalize_dtype(dtype)
        return jax.ShapeDtypeStruct(value.shape, dtype)
    return jax.ShapeDtypeStruct((), jax.dtypes.canonicalize_dtype(np.result_type(type(value))))


def _check_single(state: Any) -> None:
    """Raises for several states in one tuple or list, such as a GAN's two."""
    parts = state if isinstance(state, tuple | list) and not hasattr(state, PARAMS) else ()
    for index, part in enumerate(parts):
        if not _is_plain_tuple(part) and None not in (get_params(part), get_opt_state(part)):
            raise ValueError(
                f"element {index} of this {type(state).__name__} is a whole state, a "
                f"{type(part).__name__}. Pass each by itself: "
                "tuple(zerojax.shard_train_state(s) for s in states)."
            )


def get_params(state: Any) -> Any:
    return _get(state, PARAMS, 0)


def get_opt_state(state: Any) -> Any:
    return _get(state, OPT_STATE, 1)


def params_in(tree: Any) -> Any:
    """The parameters of a state, or all of `tree` where it is no state but parameters.

    `(params, opt_state)` is told from parameters in a tuple by its second element.
    """
    if not _is_plain_tuple(tree):
        params = get_params(tree)
        return tree if params is None else params
    _check_single(tree)
    if len(tree) < 2 or _is_array(tree[1]) or _holds_optax(tree[0]):  # an optimizer's state alone
        return tree
    if (tree[1] == () and len(tree) == 2) or _holds_optax(tree[1]):
        return tree[0]
    raise ValueError(
        f"a tuple whose second element is a {type(tree[1]).__name__} may be (params, opt_state), "
        "or parameters all of it. Pass its first element, state[0], or the parameters as a list, "
        "list(params)."
    )


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _is_plain_tuple(tree: Any) -> bool:
    return isinstance(tree, tuple) and not hasattr(tree, "_fields")


def _holds_optax(tree: Any) -> bool:
    """Whether some of it is state of optax, whose states are all named tuples of its own."""
    is_named = lambda node: hasattr(node, "_fields")  # noqa: E731
    nodes = jax.tree.leaves(tree, is_leaf=is_named)
    return any(type(node).__module__.split(".")[0] in ("optax", "zerojax") for node in nodes)


def replace(state: Any, **parts: Any) -> Any:
    """The same state with some of its named parts exchanged."""
    if isinstance(state, dict):
        return {**state, **parts}
    if hasattr(state, "_replace"):
        return state._replace(**parts)
    if isinstance(state, tuple):
        order = {PARAMS: 0, OPT_STATE: 1}
        items = list(state)
        for name, value in parts.items():
            items[order[name]] = value
        return tuple(items)
    if hasattr(state, "replace"):
        return state.replace(**parts)
    return dataclasses.replace(state, **parts)


def get_tx(state: Any) -> optax.GradientTransformation | None:
    """The optimizer that a state carries as a static field, as flax's TrainState does."""
    return getattr(state, "tx", None)


def base_specs(state: Any, axes: Sequence[str], mesh_axes: Sequence[str]) -> list[PartitionSpec]:
    """The axes other than ZeRO's that leaves have already, from flax boxes or from placement."""
    keep = set(mesh_axes) - set(axes)

    def kept(spec: PartitionSpec | None, rank: int) -> PartitionSpec:
        entries = (tuple(spec) if spec is not None else ())[:rank]
        return PartitionSpec(*(_filtered(entry, keep) for entry in entries))

    specs: list[PartitionSpec] = []
    for node in jax.tree.leaves(state, is_leaf=is_box):
        values = jax.tree.leaves(node)
        spec = _box_spec(node) if is_box(node) else None
        for value in values:
            placed = getattr(value, "sharding", None)
            given = spec if spec is not None else getattr(placed, "spec", None)
            specs.append(kept(given, len(shape_dtype(value).shape)))
    return specs


def matching(pattern: str, names: dict[tuple, str], option: str) -> set[tuple]:
    """The paths whose names a pattern finds; an error where it finds none."""
    try:
        found = {path for path, name in names.items() if re.search(pattern, name)}
    except re.error as error:
        raise ValueError(
            f"{option} has the path pattern {pattern!r}, which is no regular expression ({error}). "
            "Escape its special characters."
        ) from None
    if not found:
        raise ValueError(
            f"{option} has the path pattern {pattern!r}, which no parameter matches. Name some; "
            f"paths are such as {', '.join(sorted(names.values())[:3])}."
        )
    return found


def is_box(node: Any) -> bool:
    return isinstance(node, meta.AxisMetadata)


def _box_spec(box: Any) -> PartitionSpec | None:
    get = getattr(box, "get_partition_spec", None)
    return get() if get is not None else None


def _filtered(entry: Any, keep: set[str]) -> Any:
    names = (entry,) if isinstance(entry, str) else tuple(entry or ())
    kept = tuple(n for n in names if n in keep)
    return None if not kept else kept[0] if len(kept) == 1 else kept


def _get(state: Any, name: str, index: int) -> Any:
    if isinstance(state, dict):
        return state.get(name)
    if hasattr(state, name):
        return getattr(state, name)
    return state[index] if _is_plain_tuple(state) and len(state) > index else None


def is_state_function(state: Any) -> bool:
    """Whether the caller passed a function that makes the state, to have it born sharded."""
    return isinstance(state, Callable) and not hasattr(state, PARAMS)
