"""Pads arrays that the devices do not divide, and drops the padding again.

[Note: padding]
At the border of a jitted function JAX refuses shardings that do not divide, so arrays rest there
with zeros at the end of the sharded dimension. Inside, a constraint may name such a sharding: XLA
then gives each device but the last ones ceil(n / N) elements. A device has just these of the padded
array too, so neither dropping the padding nor adding it moves anything. A step's loss and its
optimizer see the shapes that they would see on one device, because Muon's scale and Adafactor's
means depend on them.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Sharding

from zerojax import _compat
from zerojax._axis_types import auto_axes, computed_with, typed_as
from zerojax._kernel.places import LeafPlan
from zerojax._plan import move as _move
from zerojax._plan.layout import Layout
from zerojax._state import carried as _carried, state as _state
from zerojax._types import PyTree, Shape
from zerojax._warn import warn

_WARNED: list[str] = []  # the path that a warning has named: one warning in a process is enough

# A leaf that a plan of this process pads, by the shape and sharding of its arrays.
_LOOKS: dict[tuple[Shape, Sharding], LeafPlan] = {}

T = TypeVar("T", Array, np.ndarray)


def padded(value: T, shape: Shape) -> T:
    """Returns `value` with zeros at its end, unless it has this shape already."""
    if np.shape(value) == shape:  # states made by functions may have plain numbers
        return value
    widths = [(0, want - have) for have, want in zip(value.shape, shape, strict=True)]
    pad: Any = jnp.pad if isinstance(value, jax.Array) else np.pad
    return pad(value, widths)


def unpadded(value: T, shape: Shape) -> T:
    """Returns `value` without its padding."""
    return value if value.shape == shape else value[tuple(map(slice, shape))]


# -- inside `jax.jit` or outside, by the positions of leaves in a state of a plan

ByPosition = Mapping[int, Array]


@functools.partial(jax.jit, static_argnums=1)
@auto_axes()
def logical_leaves(values: ByPosition, plan: Layout) -> dict[int, Array]:
    def logical(leaf: LeafPlan, given: Array) -> Array:
        sharding = leaf.padded_place.sharding(plan.mesh)
        value = jax.lax.with_sharding_constraint(_compat.fetched(computed_with(given)), sharding)
        value = _compat.constrained(unpadded(value, leaf.shape), sharding)
        # Whole over ZeRO's axes in its type, because they do not divide it.
        own = {*plan.mesh.axis_names} - {*plan.batch_axes}
        return typed_as(value, given, leaf.padded_place.within(own))

    return {i: logical(plan.leaves[i], value) for i, value in values.items()}


@functools.partial(jax.jit, static_argnums=1)
@auto_axes()
def padded_leaves(values: ByPosition, plan: Layout) -> dict[int, Array]:
    def long(leaf: LeafPlan, given: Array) -> Array:
        place = leaf.padded_place
        value = padded(_compat.fetched(computed_with(given)), place.padded(leaf.shape))
        value = jax.lax.with_sharding_constraint(value, place.sharding(plan.mesh))
        return typed_as(value, given, place.spec)

    return {i: long(plan.leaves[i], value) for i, value in values.items()}


@functools.partial(jax.jit, static_argnums=1)
def cleared_leaves(values: ByPosition, plan: Layout) -> dict[int, Array]:
    return padded_leaves(logical_leaves(values, plan), plan)


def logical_part(plan: Layout, tree: PyTree, kind: str = "") -> PyTree:
    """Drops the padding of a state; of a part of one, such as gradients, if `kind` says of which.

    `tree` may lack leaves of the plan, and have others: their paths tell.
    """
    return _changed(plan, tree, kind, logical_leaves, _is_padded)


def cleared(plan: Layout, grads: PyTree) -> PyTree:
    """Puts zeros into the padding of gradients."""
    return _changed(plan, grads, _state.PARAMS, cleared_leaves, _is_padded)


def padded_part(plan: Layout, tree: PyTree, kind: str, like: PyTree = None) -> PyTree:
    """Pads what `logical_part` takes; with `like`, only the leaves that are padded there."""
    shapes = {leaf.name: np.shape(leaf.value) for leaf in _state.leaves_with_paths(like)}

    def is_short(leaf: LeafPlan, value: Array) -> bool:
        long = leaf.padded_place.padded(leaf.shape)
        is_meant = like is None or shapes.get(leaf.path.partition("/")[2]) == long
        return is_meant and value.shape == leaf.shape != long

    return _changed(plan, tree, kind, padded_leaves, is_short)


def _is_padded(leaf: LeafPlan, value: Any) -> bool:
    return value.shape != leaf.shape and value.shape == leaf.padded_place.padded(leaf.shape)


def _changed(
    plan: Layout,
    tree: PyTree,
    kind: str,
    change: Callable[[ByPosition, Layout], dict[int, Array]],
    is_meant: Callable[[LeafPlan, Any], bool],
) -> PyTree:
    """Returns `tree` with a change to those leaves of the plan that are meant."""
    at, leaves = plan.positions[kind] if plan.pads else {}, _state.leaves_with_paths(tree)
    meant: dict[int, Any] = {
        at[leaf.name]: leaf.value
        for leaf in leaves
        if leaf.name in at and isinstance(leaf.value, Array | np.ndarray | jax.ShapeDtypeStruct)
        if is_meant(plan.leaves[at[leaf.name]], leaf.value)
    }
    if not meant:
        return tree
    is_abstract = any(isinstance(value, jax.ShapeDtypeStruct) for value in meant.values())
    new = jax.eval_shape(lambda: change(meant, plan)) if is_abstract else change(meant, plan)
    return jax.tree.structure(tree).unflatten(
        new.get(at.get(leaf.name, -1), leaf.value) for leaf in leaves
    )


# -- of states, outside of `jax.jit`


def warn_of_padding(state: PyTree, plan: Layout) -> None:
    """Tells users who apply a model to padded parameters themselves what to do instead.

    Flax raises because two shapes differ, but a plain function of parameters may just return more
    columns. So we warn of each state that does not drop the padding.
    """
    # A state's own copies of parameters, such as a target network's, rest padded from stage 1 on.
    copies = [leaf for leaf in plan.leaves if leaf.kind != _state.OPT_STATE and leaf.rest.padding]
    if not copies or _carried.hides_padding(state) or _WARNED:
        return
    leaf, more = max(copies, key=lambda leaf: leaf.nbytes), len(copies) - 1
    _WARNED.append(leaf.path)
    others = f" ({more} more array{'s are' if more > 1 else ' is'} padded too)" if more else ""
    arguments = "state" if _has_plan(state) else "state, plan"
    warn(
        f"{leaf.path} has the shape {leaf.shape} and rests padded as {leaf.padded_shape}, because "
        f"{plan.size} devices do not divide it{others}. Steps, checkpoints and full_params show "
        "its own shape. If you apply the model yourself, take the parameters from "
        f"zerojax.unpad({arguments}), or place the state with pad=False."
    )


def remember(plan: Layout) -> None:
    """Keeps what the padded arrays of a plan look like, for parts of states, which have no plan."""
    for leaf, place in zip(plan.leaves, plan.shardings, strict=True):
        if leaf.rest.padding:
            key = leaf.padded_shape, place
            # Zeros after the longest of those that look alike are after each of them.
            _LOOKS[key] = max(_LOOKS.get(key, leaf), leaf, key=lambda each: each.shape)


def warn_of_ends(leaves: Iterable[_state.Leaf], state: PyTree, plan: Layout | None) -> None:
    """Warns of an array that looks padded by a plan of this process, but is in no known plan.

    It has the shape and sharding of an array that a plan pads, and zeros at its end. So may have
    others, such as a bias that is not trained yet: an error would be too much. Processes may have
    planned other states, and would not agree: with several, nothing is looked at.
    """
    layout = _carried.carried_plan(state) or plan
    known = {_param_name(leaf) for leaf in (layout.params if layout else ())}
    for leaf in leaves:
        value = leaf.value
        is_here = isinstance(value, jax.Array) and value.is_fully_addressable
        if leaf.name in known or not is_here or not jnp.issubdtype(value.dtype, jnp.number):
            continue
        like = _LOOKS.get((value.shape, value.sharding))
        if like is not None and not _move.to_host(_has_end(value, like.shape)):
            warn(
                f"{leaf.name} {value.shape} ends in zeros, and is placed as {like.path} of a state "
                f"is, which is {like.shape} and rests padded. If these zeros are padding, they "
                "leave too: pass the state, or plan= with all parameters, or take a part of them "
                "from zerojax.unpad(state).params (for nnx, state = zerojax.nnx.state(model, "
                "optimizer))."
            )


@functools.partial(jax.jit, static_argnums=1)
@auto_axes()
def _has_end(value: Array, shape: Shape) -> Array:
    """Whether something follows an array of this shape but zeros."""
    value = _compat.fetched(computed_with(value))
    dim = next(d for d, n in enumerate(shape) if n < value.shape[d])
    return jnp.any(jax.lax.slice_in_dim(value, shape[dim], None, axis=dim))


def padded_shapes(tree: PyTree, plan: Any = None) -> dict[str, Shape]:
    """Returns the logical shapes of the padded leaves of a tree, by name.

    The states in the tree carry their plans; pass `plan` for a tree that is a state without one.
    """
    if plan is not None and not _has_plan(tree):
        plan.check_structure(tree)
        return _padded(tree, {leaf.path: leaf for leaf in plan.leaves})
    shapes: dict[str, Shape] = {}
    for path, part in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_has_plan)[0]:
        if _has_plan(part):
            leaves = {leaf.path: leaf for leaf in _carried.carried_plan(part).leaves}
            prefix = f"{_state.path_name(path)}/" if path else ""
            shapes |= {prefix + name: shape for name, shape in _padded(part, leaves).items()}
    return shapes


def padded_param_shapes(params: PyTree, state: PyTree, plan: Any = None) -> dict[str, Shape]:
    """Returns the logical shapes of the padded parameters of a state, by their names in `params`.

    Pass `plan` for a state that carries none, or for parameters in place of a state.
    """
    layout: Layout | None = _carried.carried_plan(state)
    if layout is None and plan is not None:
        plan.check_params(params)
        layout = plan
    leaves = [] if layout is None else layout.params
    return _padded(params, {_param_name(leaf): leaf for leaf in leaves})


def _param_name(leaf: LeafPlan) -> str:
    return leaf.path.partition("/")[2]


def _has_plan(node: object) -> bool:
    return _carried.carried_plan(node) is not None


def _padded(tree: PyTree, planned: Mapping[str, LeafPlan]) -> dict[str, Shape]:
    """Returns the logical shapes of the leaves of a tree that rest padded, by their names there.

    A state that carries its plan may have other leaves by now, or leaves without their padding.
    """
    padded = {name: leaf for name, leaf in planned.items() if leaf.rest.padding}
    return {
        leaf.name: padded[leaf.name].shape
        for leaf in (_state.leaves_with_paths(tree) if padded else ())
        if leaf.name in padded and np.shape(leaf.value) == padded[leaf.name].padded_shape
    }


def on_host(tree: PyTree, plan: Any = None) -> PyTree:
    """Returns a tree whose padded leaves are on the host, in their logical shapes."""

    def logical(value: PyTree, shape: Shape) -> PyTree:
        is_shape = isinstance(value, jax.ShapeDtypeStruct)
        return value if is_shape else unpadded(_move.to_host(value), shape)

    return replaced(tree, padded_shapes(tree, plan), logical)


def replaced(
    tree: PyTree, shapes: Mapping[str, Shape], logical: Callable[[PyTree, Shape], PyTree]
) -> PyTree:
    """Returns a tree with `logical(value, shape)` in place of the leaves of these names."""
    if not shapes:
        return tree
    return jax.tree.structure(tree).unflatten(
        logical(leaf.value, shapes[leaf.name]) if leaf.name in shapes else leaf.value
        for leaf in _state.leaves_with_paths(tree)
    )
