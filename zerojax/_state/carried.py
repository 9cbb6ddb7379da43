"""The plan of a placed state, which its optimizer carries from call to call.

[Note: the plan in the optimizer]
`train_step(loss_fn)` gets no plan, but needs the one that placed its state. Placement cannot tell:
between steps, stages 1 and 2 look the same, and inside `jax.jit` an array has no placement. A table
elsewhere would miss states that were copied or replaced, and a new field would change the user's
class and the tree in checkpoints.

The optimizer is a static field of a `TrainState`. So it survives `jax.jit`, `state.replace` and
`jax.tree.map`, and `jax.jit` compares it when it looks for a compiled program. `Plan.place`
therefore replaces `state.tx` by a `PlannedTransformation`: the user's own `init` and `update`,
together with the plan. The plan takes part in its equality, so a state of another plan compiles
another program. A state without an optimizer field (a tuple, a dict) cannot carry a plan; its user
passes `plan=` to the step.

[Note: the user's own functions and padding]
Users call the optimizer and `apply_fn` with padded arrays: `state.apply_gradients(grads=grads)` in
their own loop, `state.apply_fn({"params": state.params}, x)` to sample. Both functions are static
fields, so both can know the plan. If it pads, they drop the padding of their arguments, call the
user's function with the shapes of one device, and pad the optimizer's results. A step calls them
with logical shapes, and they only call the user's function.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import optax

from zerojax import _compat
from zerojax._axis_types import auto_axes, computed_with, typed_as
from zerojax._state.refusals import is_flax_module
from zerojax._state.state import OPT_STATE, PARAMS, get_tx
from zerojax._types import PyTree

CarriedPlan: TypeAlias = Any  # a `Plan`, which a package above this one defines


class PlannedTransformation(optax.GradientTransformationExtraArgs):
    """A user's optimizer with the plan of its state; see the notes above."""

    plan: CarriedPlan
    original: optax.GradientTransformation

    def __new__(
        cls, tx: optax.GradientTransformation, plan: CarriedPlan
    ) -> "PlannedTransformation":
        original = getattr(tx, "original", tx)
        init, update = original.init, original.update
        if plan._pads or plan._offloads:
            init = functools.partial(_init, original, plan)
            update = functools.partial(_update, original, plan)
        self = super().__new__(cls, init, update)
        self.plan, self.original = plan, original
        return self

    def __getnewargs__(self) -> tuple[optax.GradientTransformation, object]:  # for copy.copy
        return self.original, self.plan

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlannedTransformation) and self._compared == other._compared

    def __ne__(self, other: object) -> bool:  # instead of tuple's own
        return not self == other

    def __hash__(self) -> int:
        return hash(self._compared)

    @property
    def _compared(self) -> tuple:
        return self.original.init, self.original.update, self.plan


# JAX would rebuild a named tuple from its fields, without the plan: nnx maps over optimizers to
# print them.
jax.tree_util.register_static(PlannedTransformation)


def _init(tx: optax.GradientTransformation, plan: CarriedPlan, params: PyTree) -> PyTree:
    """Returns `tx.init` of the logical parameters, padded if `params` are."""
    logical = plan._logical_part(params, PARAMS)
    opt_state = tx.init(logical)
    return opt_state if logical is params else plan._padded_part(opt_state, OPT_STATE)


def _update(
    tx: optax.GradientTransformation,
    plan: CarriedPlan,
    updates: PyTree,
    state: PyTree,
    params: PyTree = None,
    **extra: PyTree,
) -> tuple[PyTree, PyTree]:
    """Runs `tx.update` on logical shapes, on the devices. Its results are padded, and in host
    memory, like its arguments."""
    if any(map(_compat.is_on_host, jax.tree.leaves(params))):
        raise ValueError(
            "the parameters are in host memory, where optax cannot add updates to them. "
            "zerojax.train_step brings them to the devices layer by layer. In your own loop, bring "
            "all of them there: state.replace(params=jax.device_put(state.params, "
            "jax.memory.Space.Device)); plan.constrain puts them back."
        )
    like, given = updates if params is None else params, state
    updates, resting, params, extra = computed_with((updates, state, params, extra))
    with auto_axes():
        state = jax.tree.map(_compat.fetched, resting)
        logical = functools.partial(plan._logical_part, kind=PARAMS)
        more = {name: logical(value) for name, value in extra.items()}
        inner = plan._logical_part(state, OPT_STATE)
        new_updates, new_state = tx.update(logical(updates), inner, logical(params), **more)
        new_state = jax.tree.map(
            lambda new, old: _compat.stored(new) if _compat.is_on_host(old) else new,
            plan._padded_part(new_state, OPT_STATE, state),
            resting,
        )
        new_updates = plan._padded_part(new_updates, PARAMS, updates if params is None else params)
    return typed_as(new_updates, like), typed_as(new_state, given)


@dataclasses.dataclass(frozen=True)
class PlannedApply:
    """A user's `apply_fn` for parameters that may be padded; see the second note above."""

    original: Callable[..., PyTree]
    plan: CarriedPlan

    def __call__(self, *args: PyTree, **named: PyTree) -> PyTree:
        named = {name: self._logical(value) for name, value in named.items()}
        return self.original(*map(self._logical, args), **named)

    def _logical(self, variables: PyTree) -> PyTree:
        """Drops the padding of parameters: all of `variables`, or one collection in them."""
        variables = self.plan._logical_part(variables, PARAMS)
        if not isinstance(variables, Mapping) or PARAMS not in variables:
            return variables
        params = self.plan._logical_part(variables[PARAMS], PARAMS)
        return variables if params is variables[PARAMS] else {**variables, PARAMS: params}


def carry_plan(state: PyTree, plan: CarriedPlan) -> PyTree:
    """Returns `state` with `plan` in its optimizer; a state without an optimizer stays as it is."""
    state = without_plan(state)
    tx = get_tx(state)
    if tx is None or not hasattr(state, "replace"):
        return state
    functions: dict[str, object] = {"tx": PlannedTransformation(tx, plan)}
    # A function that `jax.jit` compares, like the optimizer.
    apply_fn = getattr(type(state), "__dataclass_fields__", {}).get("apply_fn")
    is_static = apply_fn is not None and not apply_fn.metadata.get("pytree_node", True)
    if plan._pads_params and is_static and callable(state.apply_fn):
        functions["apply_fn"] = PlannedApply(state.apply_fn, plan)
    return state.replace(**functions)


def without_plan(state: PyTree) -> PyTree:
    """Returns `state` with the user's own optimizer and `apply_fn`."""
    fields = {name: getattr(state, name, None) for name in ("tx", "apply_fn")}
    planned = (PlannedTransformation, PlannedApply)
    originals = {k: v.original for k, v in fields.items() if isinstance(v, planned)}
    return state.replace(**originals) if originals else state


def carried_plan(state: PyTree) -> CarriedPlan:
    """Returns the plan in the optimizer of `state`, or None."""
    return getattr(get_tx(state), "plan", None)


def hides_padding(state: PyTree) -> bool:
    """Whether a placed state can show its model the parameters without padding."""
    apply_fn = getattr(state, "apply_fn", None)
    # Flax's models raise for another shape; a function that the user calls directly may not.
    model = getattr(getattr(apply_fn, "original", None), "__self__", None)
    return is_flax_module(model) or getattr(type(state), "makes_models", False)
