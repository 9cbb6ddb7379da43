"""The optimizer: its update as a function of arrays, and the specs of its state.

Specs come from JAX's sharding types, not from names. `tx.init`, called on abstract parameters that
carry their specs on a mesh of Explicit axes, returns any optax state with a spec for each leaf.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from zerojax._axis_types import owned_by
from zerojax._jaxprs import is_var
from zerojax._plan.rule import Rule
from zerojax._state import carried as _carried, refusals as _refusals, state as _state
from zerojax._state.state import Leaf, leaves_with_paths, shape_dtype
from zerojax._types import PyTree, is_key, zero_gradient
from zerojax._update.matrices import is_of_matrices, owner_spec, owners_of
from zerojax._update.update import Update, on_no_mesh

Guard = Callable[[Array, PyTree, PyTree], PyTree]


def typed_state(
    state: PyTree,
    tx: optax.GradientTransformation | None,
    specs: Sequence[PartitionSpec],
    rule: Rule,
) -> tuple[PyTree, str | None]:
    """Returns the shapes of a state's optimizer state, each with its spec as `.sharding`.

    The shapes are those for padded parameters, because types with a spec must divide. Where JAX
    cannot tell, returns None and the reason. Raises if `tx.init` makes another tree.
    """
    opt_state = _state.get_opt_state(state)
    if tx is None or opt_state is None:
        return None, None
    params, treedef = jax.tree.flatten(jax.tree.map(shape_dtype, _state.get_params(state)))
    try:
        plain = jax.eval_shape(tx.init, treedef.unflatten(params))
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):  # it reads the value of a tracer
        return None, "tx.init needs values"  # as will the update, which raises then
    remedy = getattr(type(state), "optimizer_again", "Make it again: opt_state = tx.init(params).")
    _check_match(opt_state, plain, remedy)
    explicit = dict.fromkeys(rule.mesh.axis_names, AxisType.Explicit)
    typed_mesh = rule.mesh.abstract_mesh.update_axis_types(explicit)
    typed = [
        param.update(
            shape=rule.padded_shape(param.shape, spec), sharding=NamedSharding(typed_mesh, spec)
        )
        for param, spec in zip(params, specs, strict=True)
    ]
    try:
        with jax.sharding.use_abstract_mesh(typed_mesh), owned_by(None):
            padded = jax.eval_shape(tx.init, treedef.unflatten(typed))
    # What cannot propagate a spec raises errors of many types; `tx.init` itself has run above.
    except Exception as error:
        return None, f"sharding types refuse what tx.init does ({type(error).__name__})"
    structure = functools.partial(jax.tree.structure, is_leaf=is_of_matrices)
    if structure(padded) != structure(plain):
        return None, "tx.init makes another tree for padded parameters"

    def owned(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = owner_spec(leaf.shape, rule.axes)
        place = NamedSharding(typed_mesh, spec)
        return leaf.update(shape=rule.padded_shape(leaf.shape, spec), sharding=place)

    def as_typed(new: PyTree, old: PyTree) -> PyTree:
        return jax.tree.map(owned, old) if is_of_matrices(new) else new

    return jax.tree.map(as_typed, padded, plain, is_leaf=is_of_matrices), None


def _check_match(opt_state: PyTree, remade: PyTree, remedy: str) -> None:
    """Raises if an optimizer state is not what `tx.init(params)` has made."""
    have, want = (
        {leaf.name: tuple(shape_dtype(leaf.value).shape) for leaf in leaves_with_paths(tree)}
        for tree in (opt_state, remade)
    )
    for path in [*sorted(have.keys() ^ want.keys()), *have]:
        shape, wanted = have.get(path), want.get(path)
        if shape == wanted:
            continue
        odd = f"has shape {shape}, but tx.init(params) makes {wanted}"
        if shape is None or wanted is None:
            odd = "is missing" if shape is None else "is only in the state"
        if shape and shape[1:] == wanted:
            remedy = (
                "If the state is a stack of copies, as for jax.pmap, pass one of them: "
                "flax.jax_utils.unreplicate(state)."
            )
        raise ValueError(f"optimizer and parameters do not match: opt_state/{path} {odd}. {remedy}")


def followed(
    leaf: Leaf, params: Sequence[tuple[Leaf, PartitionSpec]]
) -> tuple[PartitionSpec, str | None] | None:
    """Returns the spec of the parameter whose path ends this leaf's path, if the shapes agree."""
    shape = shape_dtype(leaf.value).shape
    for param, spec in params:  # by its path first: these are many pairs
        if is_of(leaf, param) and shape_dtype(param.value).shape == shape:
            return spec, None if any(spec) else f"follows {param.name}, which is replicated"
    return None


def is_of(leaf: Leaf, param: Leaf) -> bool:
    """Whether a leaf's path ends as a parameter's does."""
    return leaf.path[max(0, len(leaf.path) - len(param.path) + 1) :] == param.path[1:]


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
    """Returns a state after its update. `inputs` are the gradients, the state, its new fields, and
    whether the step is finite, which a guard against steps that are not wants to know."""
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
    """Returns the update of a state, which replaces these fields; it reads shapes only."""
    state = jax.tree.map(shape_dtype, state)
    params = _state.get_params(state)
    grads = jax.tree.map(lambda p: zero_gradient(p) if is_key(p) else p, params)
    fields = {name: _state.field(state, name) for name in names}
    shapes, treedef = jax.tree.flatten((grads, state, fields, jax.ShapeDtypeStruct((), bool)))

    def update(values: list) -> list:
        return jax.tree.leaves(next_state(tx, guard, *treedef.unflatten(values)))

    own = None if hasattr(state, "apply_gradients") else tx
    without_plan = jax.tree.structure(_carried.without_plan(state))
    identity = without_plan, own, tuple(names), guard is not None, owners_of(state)
    return Update(update, shapes, identity)


def frozen_params(state: PyTree, update: Update) -> list[bool]:
    """Returns, for each parameter of a state, whether its update never reads its gradient.

    If the update cannot be traced, all gradients count as read.
    """
    params = jax.tree.leaves(jax.tree.map(shape_dtype, _state.get_params(state)))
    try:
        with on_no_mesh():
            program = update.traced(update.shapes)
    # An update is a user's code. It may need values or further arguments, or be wrong: the step,
    # which has these values, raises whatever the error is.
    except Exception:
        return [False] * len(params)
    is_shapes = all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(state))
    if is_shapes and any(isinstance(value, Tracer) for value in program.constants.values()):
        raise ValueError(
            "the optimizer holds a tracer of the function that makes the state. Pass that function "
            "itself to zerojax.plan or shard_train_state, not its jax.eval_shape; if that does not "
            "help, make the optimizer outside of the function."
        )
    read = program.read()
    return [not is_key(p) and i not in read for i, p in enumerate(params)]


def moments(tx: optax.GradientTransformation, params: PyTree, opt_state: PyTree) -> list[bool]:
    """Returns which leaves of an optimizer state are moments, or other running sums of gradients.

    Those are float arrays that follow a parameter, and do not start as that parameter.
    """
    values, treedef = jax.tree.flatten(jax.tree.map(shape_dtype, params))

    def init(values: list) -> list:
        return jax.tree.leaves(tx.init(treedef.unflatten(values)))

    with on_no_mesh():
        program = Update(init, values).traced(values)
    read = program.origins(dict(enumerate(program.invars)))
    own = [(leaf, PartitionSpec()) for leaf in leaves_with_paths((params,))]
    are_moments = []
    for leaf, start in zip(leaves_with_paths(opt_state), program.outvars, strict=True):
        struct = shape_dtype(leaf.value)
        is_float = jnp.issubdtype(struct.dtype, jnp.floating)
        is_copy = is_var(start) and start in read
        follows = bool(struct.shape) and followed(leaf, own) is not None
        are_moments.append(is_float and follows and not is_copy)
    return are_moments
