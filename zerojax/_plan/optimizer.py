"""The optimizer: its update, and the specs of its state.

Specs come from JAX's sharding types rather than from names. Initialised on abstract parameters
that carry their specs on a mesh of Explicit axes, any optax state comes back with a spec for each
leaf.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from zerojax._kernel.jaxprs import Atom, is_var
from zerojax._kernel.places import Rule
from zerojax._state import state as _state
from zerojax._state.state import Leaf, leaves_with_paths, shape_dtype, zero_gradient
from zerojax._types import PyTree, is_key
from zerojax._update import parts as _parts
from zerojax._update.parts import Flat, Update


def typed_state(
    state: PyTree,
    tx: optax.GradientTransformation | None,
    specs: Sequence[PartitionSpec],
    rule: Rule,
) -> tuple[PyTree, str | None]:
    """Returns the shapes of a state's optimizer state, each with its spec as `.sharding`.

    They are those that padded parameters give, because types with a spec must divide. Where JAX
    cannot say, returns None and the reason. Raises where `tx.init` makes another tree.
    """
    opt_state = _state.get_opt_state(state)
    if tx is None or opt_state is None:
        return None, None
    params, treedef = jax.tree.flatten(jax.tree.map(shape_dtype, _state.get_params(state)))
    try:
        made = jax.eval_shape(tx.init, treedef.unflatten(params))
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):  # a tracer was asked for a value
        return None, "tx.init needs values"  # as will the update, which raises then
    _check_match(opt_state, made)
    explicit = dict.fromkeys(rule.mesh.axis_names, AxisType.Explicit)
    typed_mesh = rule.mesh.abstract_mesh.update_axis_types(explicit)

    def typed(param: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        shape, sharding = rule.padded_shape(param.shape, spec), NamedSharding(typed_mesh, spec)
        return jax.ShapeDtypeStruct(shape, param.dtype, sharding=sharding)

    try:
        with jax.sharding.use_abstract_mesh(typed_mesh):
            padded = jax.eval_shape(tx.init, treedef.unflatten(map(typed, params, specs)))
    except Exception as error:
        return None, f"tx.init does what sharding types refuse ({type(error).__name__})"
    if jax.tree.structure(padded) != jax.tree.structure(made):
        return None, "tx.init makes another tree of padded parameters"
    return padded, None


def _check_match(opt_state: PyTree, made: PyTree) -> None:
    """Raises where an optimizer state is not what `tx.init(params)` has made."""
    have, want = (
        {leaf.name: tuple(shape_dtype(leaf.value).shape) for leaf in leaves_with_paths(tree)}
        for tree in (opt_state, made)
    )
    remedy = "Make it again: opt_state = tx.init(params)."
    for path in [*sorted(have.keys() ^ want.keys()), *have]:
        if path not in want:
            odd = "is only in the state"
        elif path not in have:
            odd = "is missing from the state"
        elif have[path] != want[path]:
            odd = f"has shape {have[path]}, and tx.init(params) makes {want[path]}"
            if have[path][1:] == want[path]:
                remedy = (
                    "If the state is a stack of copies, as for jax.pmap, pass one of them: "
                    "flax.jax_utils.unreplicate(state)."
                )
        else:
            continue
        raise ValueError(f"optimizer and parameters do not match: opt_state/{path} {odd}. {remedy}")


def followed(
    leaf: Leaf, params: Sequence[tuple[Leaf, PartitionSpec]]
) -> tuple[PartitionSpec, str | None] | None:
    """Returns the spec of the parameter whose path ends this leaf's path, if the shapes agree."""
    for param, spec in params:
        tail = param.path[1:]
        same_place = leaf.path[len(leaf.path) - len(tail) :] == tail
        if same_place and shape_dtype(param.value).shape == shape_dtype(leaf.value).shape:
            return spec, None if any(spec) else f"follows {param.name}, which is replicated"
    return None


def from_matching_shapes(
    leaf: Leaf,
    params: Sequence[tuple[Leaf, PartitionSpec]],
    rule: Rule | None,
    why: str | None = None,
) -> tuple[PartitionSpec, str | None]:
    """Returns the spec of the parameter that a leaf follows, or else what `rule` says of its shape.

    `why` is why nothing better is known.
    """
    found = followed(leaf, params)
    if found is not None:
        return found
    if rule is None:
        return PartitionSpec(), "neither a parameter nor optimizer state"
    spec, reason = rule(leaf.name, shape_dtype(leaf.value).shape, PartitionSpec(), 0)
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

    Where the update cannot be traced, all gradients count as read. It may need values or further
    arguments, or be wrong; the step will raise that.
    """
    function, shapes = flat_update(state, tx)
    params = jax.tree.leaves(jax.tree.map(shape_dtype, _state.get_params(state)))
    try:
        program = _parts.traced(function, shapes)
    except Exception:
        return [False] * len(params)
    _check_kept(program, state)
    read = _parts.inputs_of(program)
    return [jnp.issubdtype(p.dtype, jnp.inexact) and i not in read for i, p in enumerate(params)]


def _check_kept(program: Flat, state: PyTree) -> None:
    """Raises where the update of a state that is shapes reads what was traced together with it."""
    is_made = all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(state))
    if is_made and any(isinstance(value, Tracer) for value in program.constants.values()):
        raise ValueError(
            "the optimizer keeps an array from within the trace of the function that makes the "
            "state. Pass zerojax.plan or shard_train_state the function itself, not its "
            "jax.eval_shape; where that does not help, make the optimizer outside of the function."
        )


def moments(tx: optax.GradientTransformation, params: PyTree, opt_state: PyTree) -> list[bool]:
    """Returns which leaves of an optimizer state are moments, or other running sums of gradients.

    They are float arrays that follow a parameter, and do not start as that parameter.
    """
    values, treedef = jax.tree.flatten(jax.tree.map(shape_dtype, params))

    def init(values: list) -> list:
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            return jax.tree.leaves(tx.init(treedef.unflatten(values)))

    program = _parts.traced(init, values)
    read = _parts.origins(program, [True] * len(values))
    own = [(leaf, PartitionSpec()) for leaf in leaves_with_paths((params,))]

    def is_moment(leaf: Leaf, start: Atom) -> bool:
        found = shape_dtype(leaf.value)
        is_array = bool(found.shape) and jnp.issubdtype(found.dtype, jnp.floating)
        is_copy = is_var(start) and start in read
        return is_array and not is_copy and followed(leaf, own) is not None

    return list(map(is_moment, leaves_with_paths(opt_state), program.outvars))


def update_in_parts(
    state: PyTree,
    tx: optax.GradientTransformation | None,
    on_host: Sequence[bool],
    stacked: Sequence[bool],
) -> Update | None:
    """Returns the update of a state whose leaves rest where `on_host` says; None where it cannot be
    traced. Its inputs are the gradients, then the state's leaves."""
    function, shapes = flat_update(state, tx)
    params = len(shapes) - len(on_host)
    of_params = [
        s
        for s, leaf in zip(stacked, leaves_with_paths(state), strict=True)
        if leaf.kind == _state.PARAMS
    ]
    try:
        return Update(function, shapes, [False] * params + [*on_host], of_params + [*stacked])
    except Exception:
        return None


def flat_update(
    state: PyTree, tx: optax.GradientTransformation | None, mutable: Sequence[str] = ()
) -> tuple[Callable[[list], list], list[PyTree]]:
    """Returns the update as a function from gradients and the leaves of a state to those of the
    next, and the shapes that it takes. Fields in `mutable` stay as they are."""
    state = jax.tree.map(shape_dtype, state)
    leaves, treedef = jax.tree.flatten(state)
    params, params_treedef = jax.tree.flatten(_state.get_params(state))
    grads = [zero_gradient(p) if is_key(p) else p for p in params]

    def update(values: list) -> list:
        grads = params_treedef.unflatten(values[: len(params)])
        state = treedef.unflatten(values[len(params) :])
        # A mesh of Explicit axes, as above, would refuse some updates.
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            fields = {name: _state.field(state, name) for name in mutable}
            return jax.tree.leaves(apply_gradients(state, grads, tx, fields))

    return update, [*grads, *leaves]
