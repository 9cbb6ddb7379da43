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
import itertools
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.extend.core import Jaxpr, Var

from zerojax import _compat
from zerojax._axis_types import auto_axes, computed_with, typed_as
from zerojax._jaxprs import Eqn, is_var
from zerojax._kernel.places import LeafPlan
from zerojax._plan import move as _move
from zerojax._plan.layout import Layout, check_plan
from zerojax._specs import axes_size, names_in
from zerojax._state import carried as _carried, state as _state
from zerojax._types import PyTree, Shape
from zerojax._warn import warn

_WARNED: list[str] = []  # the path that a warning has named: one warning in a process is enough

# The arrays of placed states that rest padded, by their ids, with paths and logical shapes.
_RESTING: dict[int, tuple[weakref.ref[Array], str, Shape]] = {}
# The functions that drop padding, as jaxprs name them.
DROP = frozenset({"logical_leaves", "_logical"})

T = TypeVar("T", Array, np.ndarray)
Shaped = Array | np.ndarray | jax.ShapeDtypeStruct
Resting = tuple[str, Shape]  # the path and the logical shape of an array that rests padded


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

    def is_short(leaf: LeafPlan, value: Shaped) -> bool:
        long = leaf.padded_place.padded(leaf.shape)
        is_meant = like is None or shapes.get(leaf.path.partition("/")[2]) == long
        return is_meant and value.shape == leaf.shape != long

    return _changed(plan, tree, kind, padded_leaves, is_short)


def _is_padded(leaf: LeafPlan, value: Shaped) -> bool:
    return value.shape != leaf.shape and value.shape == leaf.padded_place.padded(leaf.shape)


def _changed(
    plan: Layout,
    tree: PyTree,
    kind: str,
    change: Callable[[ByPosition, Layout], dict[int, Array]],
    is_meant: Callable[[LeafPlan, Shaped], bool],
) -> PyTree:
    """Returns `tree` with a change to those leaves of the plan that are meant."""
    at, leaves = plan._positions[kind], _state.leaves_with_paths(tree) if plan._pads else []
    meant: dict[int, PyTree] = {
        at[leaf.name]: leaf.value
        for leaf in leaves
        if leaf.name in at and isinstance(leaf.value, Shaped)
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
    dims = zip(leaf.shape, leaf.padded_shape, leaf.update.spec, strict=False)
    splits = ((n, names_in([entry])) for n, long, entry in dims if n != long)
    why = [f"{axes_size(plan.mesh, [*axes])} devices do not divide {n}" for n, axes in splits]
    warn(
        f"{leaf.path} has the shape {leaf.shape} and is stored padded as {leaf.padded_shape}, "
        f"because {' and '.join(why)}{others}. Steps, checkpoints and "
        "gather_params show its own shape. If you apply the model yourself, take the parameters "
        f"from zerojax.unpad({arguments}), or place the state with pad=False."
    )


def remember(arrays: Iterable[tuple[PyTree, str, Shape]]) -> None:
    """Keeps which arrays rest padded, with their paths and logical shapes: parts of states do not
    say it."""
    for value, path, shape in arrays:
        if isinstance(value, jax.Array) and not isinstance(value, Tracer):
            forget = functools.partial(_forget, id(value))
            _RESTING[id(value)] = weakref.ref(value, forget), path, shape


def _forget(key: int, reference: weakref.ref[Array]) -> None:
    if (known := _RESTING.get(key)) and known[0] is reference:
        _RESTING.pop(key, None)


def remember_state(state: PyTree, plan: Layout) -> None:
    if plan._pads_params:
        leaves = jax.tree.leaves(state)
        remember((leaves[at], path, shape) for at, path, shape in plan._rest_padded)


def resting(value: PyTree) -> Resting | None:
    """Returns the path and the logical shape of an array that rests padded in some state."""
    known = _RESTING.get(id(value))
    return None if known is None or known[0]() is not value else known[1:]


def resting_shapes(tree: PyTree, but: Container[str] = ()) -> dict[str, Shape]:
    """Returns the logical shapes of arrays of a tree that rest padded in some state, by name."""
    leaves = (leaf for leaf in _state.leaves_with_paths(tree) if leaf.name not in but)
    pairs = ((leaf.name, resting(leaf.value)) for leaf in leaves)
    return {name: known[1] for name, known in pairs if known}


def check_closed_over(jaxpr: Jaxpr, values: Sequence[PyTree]) -> None:
    """Raises for a loss that reads what rests padded in some state as it rests. The last inputs of
    its jaxpr are the `values` that it closes over."""
    inputs = jaxpr.invars[len(jaxpr.invars) - len(values) :]
    if _RESTING and (read := _as_it_rests(jaxpr, zip(inputs, map(resting, values), strict=True))):
        path, shape = read
        raise ValueError(
            f"the loss closes over {path} of a placed state, which has the shape {shape} and is "
            "padded. Close over zerojax.unpad(state) of that state, or place it with pad=False."
        )


def _as_it_rests(jaxpr: Jaxpr, known: Iterable[tuple[Var, Resting | None]]) -> Resting | None:
    """Returns what is known of the first variable that is read for more than its logical part."""
    facts = {v: fact for v, fact in known if fact}
    for eqn in jaxpr.eqns:
        operands = [facts.get(v) if is_var(v) else None for v in eqn.invars]
        if Eqn(eqn).name in DROP:
            continue
        bodies = _compat.closed_jaxprs(eqn)
        read = None if bodies else next(filter(None, operands), None)
        for body, consts in bodies:  # of a `cond`, the predicate comes first
            pairs = zip(reversed(body.invars), reversed(operands), strict=False)
            constants = zip(body.constvars, map(resting, consts), strict=True)
            read = read or _as_it_rests(body, itertools.chain(pairs, constants))
        if read:
            return read
    return None


def padded_shapes(tree: PyTree, plan: _carried.CarriedPlan = None) -> dict[str, Shape]:
    """Returns the logical shapes of the padded leaves of a tree, by name.

    The states in the tree carry their plans; pass `plan` for a tree that is a state without one.
    """
    if plan is not None:
        check_plan(plan, "plan=")
        if not _has_plan(tree):
            plan._check_structure(tree)
            return _padded(tree, {leaf.path: leaf for leaf in plan.leaves})
    shapes: dict[str, Shape] = {}
    for path, part in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_has_plan)[0]:
        if _has_plan(part):
            leaves = {leaf.path: leaf for leaf in _carried.carried_plan(part).leaves}
            prefix = f"{_state.path_name(path)}/" if path else ""
            shapes |= {prefix + name: shape for name, shape in _padded(part, leaves).items()}
    return shapes


def padded_param_shapes(
    params: PyTree, state: PyTree, plan: _carried.CarriedPlan = None
) -> dict[str, Shape]:
    """Returns the logical shapes of the padded parameters of a state, by their names in `params`.

    Pass `plan` for a state that carries none, or for parameters in place of a state.
    """
    if plan is not None:
        check_plan(plan, "plan=")
    layout: Layout | None = _carried.carried_plan(state)
    if layout is None and plan is not None:
        plan._check_params(params)
        layout = plan
    leaves = [] if layout is None else layout.params
    planned = {leaf.path.partition("/")[2]: leaf for leaf in leaves}
    return resting_shapes(params, but=planned) | _padded(params, planned)


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


def on_host(tree: PyTree, plan: _carried.CarriedPlan = None) -> PyTree:
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
