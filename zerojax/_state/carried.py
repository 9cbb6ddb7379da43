"""The plan that a placed state carries: in its optimizer, from call to call."""

from typing import Any

import optax

from zerojax._state.state import get_tx


class PlannedTransformation(optax.GradientTransformationExtraArgs):
    """A state's own optimizer, carrying the plan the state was placed by.

    Between steps, stages 1 and 2 look the same, so placement alone cannot tell a step its
    plan; and inside `jax.jit` not even placement is visible. The optimizer is static there, so
    the plan travels with it. Equality includes the plan: another plan is another program.
    """

    plan: Any
    original: optax.GradientTransformation

    def __new__(cls, tx: optax.GradientTransformation, plan: Any) -> "PlannedTransformation":
        self = super().__new__(cls, tx.init, tx.update)
        self.plan, self.original = plan, getattr(tx, "original", tx)
        return self

    def __getnewargs__(self) -> tuple[Any, Any]:  # for copy.copy and copy.deepcopy
        return self.original, self.plan

    def __eq__(self, other: object) -> bool:
        return tuple.__eq__(self, other) is True and self.plan == getattr(other, "plan", None)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((tuple.__hash__(self), self.plan))


def carry_plan(state: Any, plan: Any) -> Any:
    """`state`, its optimizer carrying `plan`; unchanged where it has no optimizer field."""
    tx = get_tx(state)
    if tx is None or not hasattr(state, "replace"):
        return state
    return state.replace(tx=PlannedTransformation(tx, plan))


def without_plan(state: Any) -> Any:
    """`state` with the optimizer as the user made it."""
    tx = get_tx(state)
    return state.replace(tx=tx.original) if isinstance(tx, PlannedTransformation) else state


def carried_plan(state: Any) -> Any:
    return getattr(get_tx(state), "plan", None)
