"""The parts of a user's state: parameters, optimizer state, everything else.

A state is any pytree whose leaves are under `params` and `opt_state` (attributes or keys), or a
tuple that starts with these two. Lists, and named tuples with other fields, are trees of
parameters. No other package knows these container types.
"""

import contextlib
import dataclasses
import difflib
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun
from jax.tree_util import DictKey, GetAttrKey, SequenceKey, keystr

from zerojax import _compat
from zerojax._axis_types import NO_MESH, seen_as
from zerojax._state import patches as _patches
from zerojax._types import PyTree, is_key

NNX_FIELDS = ("variables",)  # what a loss of an nnx model updates besides the parameters
PARAMS, OPT_STATE, OTHER = "params", "opt_state", "other"


class Leaf(NamedTuple):
    """A leaf of a tree, with its path."""

    path: tuple
    value: PyTree

    @property
    def name(self) -> str:
        return path_name(self.path)

    @property
    def kind(self) -> str:
        return kind_of(self.path)


def path_name(path: tuple) -> str:
    """Returns a path in the form of plans and errors, such as "params/dense/kernel"."""
    return keystr(path, simple=True, separator="/")


def kind_of(path: tuple) -> str:
    """Returns the part of a state that a path leads into: params, opt_state or other."""
    match path[0] if path else None:
        case GetAttrKey(name) | DictKey(name) if name in (PARAMS, OPT_STATE):
            return name
        case SequenceKey(idx) if idx < 2:
            return (PARAMS, OPT_STATE)[idx]
    return OTHER


def leaves_with_paths(tree: PyTree) -> list[Leaf]:
    return [Leaf(path, value) for path, value in jax.tree_util.tree_flatten_with_path(tree)[0]]


def named_leaves(tree: PyTree, separator: str = "/") -> list[Leaf]:
    """Returns the leaves with their paths; raises if two paths read alike once joined."""
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


def leaves_of(state: PyTree) -> list[Leaf]:
    """Returns a state's leaves with their paths; raises if one of them is not an array."""
    leaves = named_leaves(state)
    for leaf in leaves:
        is_text = isinstance(leaf.value, str | bytes)
        if is_text or not (_is_array(leaf.value) or np.isscalar(leaf.value)):
            what = f"the string {leaf.value!r}" if is_text else f"a {type(leaf.value).__name__}"
            raise TypeError(
                f"state leaf {leaf.name} is {what}, not an array. Make it a static field "
                "(flax.struct.field(pytree_node=False)) or an array, or leave it out."
            )
    _check_single(state)
    params = get_params(state)
    if jax.tree.leaves(params) and not any(leaf.kind == PARAMS for leaf in leaves):
        raise ValueError(
            f"JAX does not know the names of the fields of {type(state).__name__}. Register it "
            "with jax.tree_util.register_dataclass, or with register_pytree_with_keys."
        )
    if leaves and params is None:
        raise no_parameters(state)
    return leaves


def no_parameters(state: object) -> ValueError:
    entries = state.items() if isinstance(state, Mapping) else ()
    if inner := next((name for name, entry in entries if hasattr(entry, "params")), None):
        return ValueError(f"entry {inner!r} of this dict is a whole state. Pass only that.")
    message = getattr(type(state), "no_parameters", None)
    return ValueError(
        message
        or f"a state of type {type(state).__name__} has no parameters. Pass a flax TrainState, a "
        "tuple (params, opt_state), or {'params': ..., 'opt_state': ...}."
    )


def shape_dtype(value: PyTree) -> jax.ShapeDtypeStruct:
    """Returns the shape and canonical dtype of an array, key array, numpy or Python scalar."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        dtype = value.dtype if is_key(value) else jax.dtypes.canonicalize_dtype(value.dtype)
        return jax.ShapeDtypeStruct(value.shape, dtype)
    return jax.ShapeDtypeStruct((), jax.dtypes.canonicalize_dtype(np.result_type(type(value))))


def _check_single(state: object) -> None:
    """Raises for several states in one tuple or list, such as a GAN's two."""
    parts = state if isinstance(state, tuple | list) and not hasattr(state, PARAMS) else ()
    for index, part in enumerate(parts):
        if not _is_plain_tuple(part) and None not in (get_params(part), get_opt_state(part)):
            raise ValueError(
                f"element {index} of this {type(state).__name__} is a whole state, a "
                f"{type(part).__name__}. Pass each by itself: "
                "tuple(zerojax.shard_train_state(s) for s in states)."
            )


def get_params(state: PyTree) -> PyTree:
    return _part(state, PARAMS)


def get_opt_state(state: PyTree) -> PyTree:
    return _part(state, OPT_STATE)


def _part(state: PyTree, kind: str) -> PyTree:
    if not _is_plain_tuple(state) or hasattr(state, kind):
        return field(state, kind)
    parts: dict[str, PyTree] = dict(zip((PARAMS, OPT_STATE), state, strict=False))
    return parts.get(kind)


def field(state: PyTree, name: str) -> PyTree:
    """Returns a field of a state, or None."""
    return state.get(name) if isinstance(state, dict) else getattr(state, name, None)


def params_in(tree: PyTree) -> PyTree:
    """Returns the parameters of a state, or all of a tree of parameters.

    The second element of a tuple tells `(params, opt_state)` from parameters in a tuple.
    """
    if not _is_plain_tuple(tree):
        params = get_params(tree)
        return tree if params is None else params
    _check_single(tree)
    if len(tree) < 2 or _is_array(tree[1]) or _holds_optax(tree[0]):  # the state of an optimizer
        return tree
    if (tree[1] == () and len(tree) == 2) or _holds_optax(tree[1]):
        return tree[0]
    raise ValueError(
        f"a tuple whose second element is a {type(tree[1]).__name__} may be (params, opt_state), "
        "or a tuple of parameters. Pass its first element, state[0], or the parameters as a list, "
        "list(params)."
    )


def _is_array(value: object) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _is_plain_tuple(tree: object) -> bool:
    return isinstance(tree, tuple) and not hasattr(tree, "_fields")


def _holds_optax(tree: PyTree) -> bool:
    """Whether any part of a tree is a state of optax, which is always a named tuple of optax."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: hasattr(node, "_fields"))
    return any(type(node).__module__.split(".")[0] in ("optax", "zerojax") for node in nodes)


def replace(state: PyTree, **parts: PyTree) -> PyTree:
    """Returns the state with new values of some parts."""
    if isinstance(state, dict):
        return {**state, **parts}
    if hasattr(state, "_replace"):
        return state._replace(**parts)
    if isinstance(state, tuple):
        items = list(state)
        for name, value in parts.items():
            items[(PARAMS, OPT_STATE).index(name)] = value
        return tuple(items)
    if hasattr(state, "replace"):
        return state.replace(**parts)
    return dataclasses.replace(state, **parts)


def get_tx(state: object) -> optax.GradientTransformation | None:
    """Returns the optimizer in a static field of the state, as in flax's TrainState."""
    return getattr(state, "tx", None)


def matching(pattern: str, names: dict[tuple, str], option: str) -> set[tuple]:
    """Returns the paths whose names match a pattern; raises if none does."""
    paths = {path for path, name in names.items() if finds(pattern, name, option)}
    if not paths:
        raise ValueError(
            f"{option} has the path pattern {pattern!r}, which matches no parameter. "
            f"{paths_like(pattern, sorted(names.values()))}"
        )
    return paths


def check_patterns(patterns: Iterable[str], names: Sequence[str], option: str) -> None:
    """Raises if one of an option's path patterns matches no parameter."""
    for pattern in patterns:
        matching(pattern, {(name,): name for name in names}, option)


def paths_like(unknown: str, paths: Sequence[str]) -> str:
    """Ends an error about an unknown path: suggests one with a similar part, or lists a few."""
    length, by_part = unknown.count("/") + 1, dict[str, str]()
    for path in paths:
        names = path.split("/")
        for start in range(len(names) - length + 1):
            by_part.setdefault("/".join(names[start : start + length]), path)
    for close in difflib.get_close_matches(unknown, by_part, n=1):
        return f"Did you mean {by_part[close]}?"
    return f"Paths are such as {', '.join(paths[:3])}."


def finds(pattern: object, name: str, option: str) -> bool:
    """Whether the path pattern of an option matches a name; raises for a wrong pattern."""
    if not isinstance(pattern, str):
        raise TypeError(
            f"{option}{pattern!r} is not a path pattern. Pass one regular expression, a string, as "
            f"in {option}'norm|bias'."
        )
    try:
        if re.search(pattern, "") and re.search(r"(^|\(|(?<!\\)\|)(\||\)|$)", pattern):
            raise ValueError(
                f"{option} has the path pattern {pattern!r}, which is empty or has an empty "
                "alternative: it matches every path. Leave the option out, or pass '.*' to mean "
                "all."
            )
        return re.search(pattern, name) is not None
    except re.error as error:
        raise ValueError(
            f"{option} has the path pattern {pattern!r}, which is not a regular expression "
            f"({error}). Escape its special characters."
        ) from None


def is_state_function(state: object) -> bool:
    """Whether the caller passed a function that makes the state."""
    return isinstance(state, Callable) and not hasattr(state, PARAMS)


def made_by(make_state: Callable[[], PyTree]) -> PyTree:
    """Calls a user's function; without the mesh that is set, if its axes are the reason for an
    error. Flax constrains a weight over the axes of its annotation, which the mesh may lack; nnx
    does so at once, with no mesh set too."""
    try:
        return make_state()
    except (ValueError, AssertionError) as error:
        nnx = sys.modules.get("flax.nnx")  # who has not imported it, makes no such model
        is_set = not jax.sharding.get_abstract_mesh().empty
        if not _compat.said(error, _compat.OF_MESHES) or not (nnx or is_set):
            raise
        later = nnx.use_eager_sharding(False) if nnx else contextlib.nullcontext()
        with later, seen_as(NO_MESH), contextlib.suppress(Exception):
            return make_state()
        raise


def state_of(make_state: Callable[[], PyTree]) -> PyTree:
    """Returns the state that a function makes, without tracers in its static fields.

    See [Note: what a made state keeps], in `patches.py`. It calls the function once, in its own
    trace: if the function caches a value or sets an attribute, these have tracers of this call, and
    another call would have others. A program that computes only the values of these tracers runs at
    once, so one device has none of the state's other arrays.
    """
    calls: list[tuple[PyTree, list[bool], list[int]]] = []

    def arrays() -> tuple[list[Tracer], list[Tracer]]:
        leaves, treedef = jax.tree.flatten(made_by(make_state))
        is_traced = [isinstance(leaf, Tracer) for leaf in leaves]
        # Shapes in place of leaves, which must not outlive this trace.
        fields = treedef.unflatten([shape_dtype(x) if isinstance(x, Tracer) else x for x in leaves])
        kept = _patches.tracers_in(fields)
        calls.append((fields, is_traced, list(map(id, kept))))
        return list(itertools.compress(leaves, is_traced)), kept

    run = jaxpr_as_fun(closed := jax.make_jaxpr(arrays)())
    fields, is_traced, kept = calls[0]
    if kept:
        # XLA leaves out the rest. Compiled first, it runs now instead of in the outer trace.
        try:
            values = jax.jit(lambda: run()[-len(kept) :]).lower().compile()()
        except TypeError as error:  # it has inputs: tracers of an outer trace
            outer = [f"{x.dtype}{list(x.shape)}" for x in closed.consts if isinstance(x, Tracer)]
            if not outer:
                raise
            raise TypeError(
                "the optimizer, or another static field of the state, reads a value that jax.jit "
                f"traces: {', '.join(outer)}. Make and shard the state outside of jax.jit. A rate "
                "that changes is a schedule, or optax.inject_hyperparams puts it into the state."
            ) from error
        known = dict(zip(kept, values, strict=True))
        fields = _patches.replaced(fields, lambda tracer: known[id(tracer)])
    leaves, treedef = jax.tree.flatten(fields)
    # A constant comes out as JAX's own literal, which in 0.10 may have no shape.
    arrays_of_state, pairs = map(jnp.asarray, run()), zip(leaves, is_traced, strict=True)
    return treedef.unflatten(next(arrays_of_state) if traced else leaf for leaf, traced in pairs)
