"""Pads arrays that the devices do not divide, and drops the padding again.

[Note: padding]
At the border of a jitted function JAX refuses shardings that do not divide, so arrays rest there
with zeros at the end of the sharded dimension. Inside, a constraint may name such a sharding: XLA
then gives each device but the last ones ceil(n / N) elements, which is just what it has of the
padded array, and neither dropping the padding nor adding it moves anything. A step's loss and its
optimizer see the shapes that they would see on one device: Muon's scale and Adafactor's means
depend on them.
"""

import functools
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from zerojax import _compat
from zerojax._kernel.places import LeafPlan
from zerojax._plan import move as _move
from zerojax._plan.layout import Layout
from zerojax._state import carried as _carried, state as _state
from zerojax._types import PyTree, Shape
from zerojax._warn import warn

_WARNED: list[str] = []  # what a user was warned of: once in a process

T = TypeVar("T", Array, np.ndarray)


@overload
def padded(value: np.ndarray, shape: Shape) -> np.ndarray: ...
@overload
def padded(value: Array, shape: Shape) -> Array: ...
def padded(value, shape):
    """Returns `value` with zeros at its end, where it is not padded yet."""
    if np.shape(value) == shape:  # of a number too, as states made by functions have
        return value
    widths = [(0, want - have) for have, want in zip(value.shape, shape, strict=True)]
    return jnp.pad(value, widths) if isinstance(value, jax.Array) else np.pad(value, widths)


def unpadded(value: T, shape: Shape) -> T:
    """Returns the part of `value` that is not padding."""
    return value if value.shape == shape else value[tuple(map(slice, shape))]


@functools.partial(jax.jit, static_argnums=1)
def logical_leaves(values: Mapping[int, Array], plan: Layout) -> dict[int, Array]:
    """Drops the padding of the leaves at some positions in a state of `plan`."""
    found: dict[int, Array] = {}
    for i, value in values.items():
        leaf = plan.leaves[i]
        sharding = leaf.padded_place.sharding(plan.mesh)
        value = jax.lax.with_sharding_constraint(_compat.fetched(value), sharding)
        value = unpadded(value, leaf.shape)
        found[i] = _compat.constrained(value, sharding)
    return found


@functools.partial(jax.jit, static_argnums=1)
def padded_leaves(values: Mapping[int, Array], plan: Layout) -> dict[int, Array]:
    """Pads the leaves at some positions in a state of `plan`."""
    found: dict[int, Array] = {}
    for i, value in values.items():
        place = plan.leaves[i].padded_place
        value = padded(_compat.fetched(value), place.padded(plan.leaves[i].shape))
        found[i] = jax.lax.with_sharding_constraint(value, place.sharding(plan.mesh))
    return found


@functools.partial(jax.jit, static_argnums=1)
def cleared_leaves(values: Mapping[int, Array], plan: Layout) -> dict[int, Array]:
    """Puts zeros into the padding of the leaves at some positions in a state of `plan`."""
    return padded_leaves(logical_leaves(values, plan), plan)


def cleared_part(tree: PyTree, plan: Layout, kind: str) -> PyTree:
    """Puts zeros into the padding of what `logical_part` takes."""
    long = _padded_among(tree, plan, kind)
    return _with(tree, plan, kind, cleared_leaves(long, plan)) if long else tree


def logical_part(tree: PyTree, plan: Layout, kind: str) -> PyTree:
    """Drops the padding of parameters, of their gradients, or of an optimizer state.

    `kind` says of which. The leaves of `tree` may be some of the plan's, which are found by their
    paths. What is not padded stays as it is.
    """
    long = _padded_among(tree, plan, kind)
    return _with(tree, plan, kind, logical_leaves(long, plan)) if long else tree


def padded_part(tree: PyTree, plan: Layout, kind: str, like: PyTree = None) -> PyTree:
    """Pads what `logical_part` takes; with `like`, the leaves that are padded there."""
    among = _known(tree if like is None else like, plan, kind)
    short = {
        i: value
        for i, value in _known(tree, plan, kind).items()
        if value.shape == plan.leaves[i].shape
        and plan.leaves[i].padded_place.padding
        and (like is None or (i in among and is_padded(among[i], plan, i)))
    }
    return _with(tree, plan, kind, padded_leaves(short, plan)) if short else tree


def _padded_among(tree: PyTree, plan: Layout, kind: str) -> dict[int, Array]:
    return {i: value for i, value in _known(tree, plan, kind).items() if is_padded(value, plan, i)}


def is_padded(value: Array, plan: Layout, position: int) -> bool:
    """Whether `value` has the padded shape of a leaf, and that is another than its own."""
    leaf = plan.leaves[position]
    return value.shape != leaf.shape and value.shape == leaf.padded_place.padded(leaf.shape)


def _known(tree: PyTree, plan: Layout, kind: str) -> dict[int, Array]:
    """Returns the leaves of `tree` that have the path of a leaf of the plan, by its position."""
    at = plan.positions[kind]
    leaves = _state.leaves_with_paths(tree)
    return {at[leaf.name]: leaf.value for leaf in leaves if leaf.name in at and _is_array(leaf)}


def _is_array(leaf: _state.Leaf) -> bool:
    return isinstance(leaf.value, jax.Array | np.ndarray)


def _with(tree: PyTree, plan: Layout, kind: str, found: Mapping[int, Array]) -> PyTree:
    """Returns `tree` with the leaves in `found` in their places."""
    at = plan.positions[kind]
    leaves, treedef = jax.tree.flatten(tree)
    names = [leaf.name for leaf in _state.leaves_with_paths(tree)]
    pairs = zip(names, leaves, strict=True)
    return treedef.unflatten(found.get(at.get(name, -1), value) for name, value in pairs)


def tell_of_padding(state: PyTree, plan: Layout) -> None:
    """Tells users who apply a model to padded parameters themselves what to do instead.

    Flax says that two shapes differ. A plain function of parameters may just return more columns,
    so whoever has a state that does not drop the padding is warned.
    """
    # A state's own copies of parameters, such as a target network's, rest padded from stage 1 on.
    copies = [leaf for leaf in plan.leaves if leaf.kind != _state.OPT_STATE and leaf.rest.padding]
    longer = sorted(copies, key=lambda leaf: -leaf.nbytes)
    if not longer:
        return
    if _carried.hides_padding(state) or _WARNED:
        return
    _WARNED.append(longer[0].path)
    leaf, more = longer[0], len(longer) - 1
    others = f"{more} more array{'s' * (more > 1)}"
    given = "state" if _carried.carried_plan(state) is not None else "state, plan"
    warn(
        f"{leaf.path} has the shape {leaf.shape} and rests padded as {leaf.padded_shape}, because "
        f"{plan.size} devices do not divide it"
        + (f"; so {'do' if more > 1 else 'does'} {others}. " if more else ". ")
        + "Steps, checkpoints and full_params show the first shape. Where you apply the model "
        f"yourself, take the parameters from zerojax.unpad({given}), or place the state with "
        "pad=False."
    )


def padded_shapes(tree: PyTree, plan: Any = None) -> dict[str, Shape]:
    """Returns the logical shapes of the padded leaves of a tree, by name.

    The states in the tree carry their plans; `plan` is for a tree that is a state without one.
    """
    if plan is not None and not _has_plan(tree):
        plan.check_structure(tree)
        return _padded(_state.leaves_with_paths(tree), _planned(plan.leaves))
    found: dict[str, Shape] = {}
    for path, part in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_has_plan)[0]:
        if _has_plan(part):
            planned = _planned(_carried.carried_plan(part).leaves)
            named = _padded(_state.leaves_with_paths(part), planned)
            prefix = f"{_state.path_name(path)}/" if path else ""
            found |= {prefix + name: shape for name, shape in named.items()}
    return found


def padded_param_shapes(params: PyTree, state: PyTree, plan: Any = None) -> dict[str, Shape]:
    """Returns the logical shapes of the padded parameters of a state, by their names among these.

    `plan` is for a state without one, or for parameters in place of a state.
    """
    layout: Layout | None = _carried.carried_plan(state)
    if layout is None and plan is not None:
        plan.check_params(params)
        layout = plan
    if layout is None:
        return {}
    planned = {name.partition("/")[2]: leaf for name, leaf in _planned(layout.params).items()}
    return _padded(_state.leaves_with_paths(params), planned)


def _has_plan(node: object) -> bool:
    return _carried.carried_plan(node) is not None


def _planned(leaves: Iterable[LeafPlan]) -> dict[str, LeafPlan]:
    """Returns, by name, the leaves that rest padded."""
    return {leaf.path: leaf for leaf in leaves if leaf.rest.padding}


def _padded(leaves: list[_state.Leaf], planned: Mapping[str, LeafPlan]) -> dict[str, Shape]:
    """Returns the logical shapes of leaves that a plan pads.

    A state may carry its plan and have other leaves by now, or leaves without their padding.
    """
    pairs = ((leaf, planned.get(leaf.name)) for leaf in leaves)
    return {
        leaf.name: plan.shape
        for leaf, plan in pairs
        if plan is not None and np.shape(leaf.value) == plan.padded_shape
    }


def on_host(tree: PyTree, shapes: Mapping[str, Shape]) -> PyTree:
    """Returns a tree whose padded leaves are on the host, in these logical shapes."""
    leaves = _state.leaves_with_paths(tree)
    return jax.tree.structure(tree).unflatten(
        unpadded(_move.to_host(leaf.value), shapes[leaf.name])
        if leaf.name in shapes and not isinstance(leaf.value, jax.ShapeDtypeStruct)
        else leaf.value
        for leaf in leaves
    )
