"""The optimizer: its update, traced once for a plan and its steps, and the specs of its state.

Specs come from JAX's sharding types rather than from names. Initialised on abstract parameters
that carry their specs on a mesh of Explicit axes, any optax state comes back with a spec for each
leaf.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from zerojax._kernel.jaxprs import Atom, is_var
from zerojax._kernel.places import Rule
from zerojax._state import carried as _carried, refusals as _refusals, state as _state
from zerojax._state.state import Leaf, leaves_with_paths, shape_dtype
from zerojax._types import PyTree, is_key, zero_gradient
from zerojax._update.update import Update, on_no_mesh

Guard = Callable[[Array, PyTree, PyTree], PyTree]


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


def next_state(
    tx: optax.GradientTransformation | None, guard: Guard | None, *inputs: PyTree
) -> PyTree:
    """Returns a state after its update, from the gradients, the state, new fields for it, and
    whether the step is finite, for a guard against what is not."""
    grads, state, fields, is_finite = inputs
    with jax.named_scope("optimizer"):
        new = _refusals.updated(apply_gradients, state, grads, tx, fields)
    return new if guard is None else guard(is_finite, new, state)


def update_of(
    state: PyTree,
    tx: optax.GradientTransformation | None,
    names: Sequence[str] = (),
    guard: Guard | None = None,
) -> Update:
    """Returns the update of a state, of which only shapes are read, with these fields new."""
    state = jax.tree.map(shape_dtype, state)
    params = _state.get_params(state)
    grads = jax.tree.map(lambda p: zero_gradient(p) if is_key(p) else p, params)
    fields = {name: _state.field(state, name) for name in names}
    shapes, treedef = jax.tree.flatten((grads, state, fields, jax.ShapeDtypeStruct((), bool)))

    def update(values: list) -> list:
        return jax.tree.leaves(next_state(tx, guard, *treedef.unflatten(values)))

    own = None if hasattr(state, "apply_gradients") else tx
    without_plan = jax.tree.structure(_carried.without_plan(state))
    return Update(update, shapes, (without_plan, own, tuple(names), guard is not None))


def frozen_params(state: PyTree, update: Update) -> list[bool]:
    """Returns, for each parameter of a state, whether its update never reads its gradient.

    Where the update cannot be traced, all gradients count as read. It may need values or further
    arguments, or be wrong; the step will raise that.
    """
    params = jax.tree.leaves(jax.tree.map(shape_dtype, _state.get_params(state)))
    try:
        with on_no_mesh():
            program = update.traced(update.shapes)
    except Exception:
        return [False] * len(params)
    is_shapes = all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(state))
    if is_shapes and any(isinstance(value, Tracer) for value in program.constants.values()):
        raise ValueError(
            "the optimizer keeps an array from within the trace of the function that makes the "
            "state. Pass zerojax.plan or shard_train_state the function itself, not its "
            "jax.eval_shape; where that does not help, make the optimizer outside of the function."
        )
    read = program.read()
    return [jnp.issubdtype(p.dtype, jnp.inexact) and i not in read for i, p in enumerate(params)]


def moments(tx: optax.GradientTransformation, params: PyTree, opt_state: PyTree) -> list[bool]:
    """Returns which leaves of an optimizer state are moments, or other running sums of gradients.

    They are float arrays that follow a parameter, and do not start as that parameter.
    """
    values, treedef = jax.tree.flatten(jax.tree.map(shape_dtype, params))

    def init(values: list) -> list:
        return jax.tree.leaves(tx.init(treedef.unflatten(values)))

    with on_no_mesh():
        program = Update(init, values).traced(values)
    read = program.origins(range(len(values)))
    own = [(leaf, PartitionSpec()) for leaf in leaves_with_paths((params,))]

    def is_moment(leaf: Leaf, start: Atom) -> bool:
        found = shape_dtype(leaf.value)
        is_array = bool(found.shape) and jnp.issubdtype(found.dtype, jnp.floating)
        is_copy = is_var(start) and start in read
        return is_array and not is_copy and followed(leaf, own) is not None

    return list(map(is_moment, leaves_with_paths(opt_state), program.outvars))
