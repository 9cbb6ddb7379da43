"""The plan of a placed state, which its optimizer carries from call to call.

[Note: the plan in the optimizer]
`train_step(loss_fn)` is given no plan, yet must know the one that its state was placed by.
Placement cannot tell: between steps, stages 1 and 2 look the same, and inside `jax.jit` an array
has no placement. A table kept elsewhere would miss states that were copied or replaced, and a new
field would change the user's class and the tree in checkpoints.

The optimizer is there already. It is a static field of a `TrainState`, so it survives `jax.jit`,
`state.replace` and `jax.tree.map`, and `jax.jit` compares it when it looks for a compiled program.
`Plan.place` therefore replaces `state.tx` with a `PlannedTransformation`: the user's own `init` and
`update`, together with the plan. The plan takes part in its equality, so a state placed by
another plan compiles another program. A state without an optimizer field (a tuple, a dict) cannot
carry a plan; its user passes `plan=` to the step.
"""

from typing import Any

import optax

from zerojax._state.state import get_tx
from zerojax._types import PyTree


class PlannedTransformation(optax.GradientTransformationExtraArgs):
    """A user's optimizer with the plan its state was placed by; see the note above."""

    plan: Any  # a `Plan`, which a package above this one defines
    original: optax.GradientTransformation

    def __new__(cls, tx: optax.GradientTransformation, plan: object) -> "PlannedTransformation":
        self = super().__new__(cls, tx.init, tx.update)
        self.plan, self.original = plan, getattr(tx, "original", tx)
        return self

    def __getnewargs__(self) -> tuple[optax.GradientTransformation, object]:  # for copy.copy
        return self.original, self.plan

    def __eq__(self, other: object) -> bool:
        return tuple.__eq__(self, other) is True and self.plan == getattr(other, "plan", None)

    def __ne__(self, other: object) -> bool:  # or tuple's own would be used
        return not self == other

    def __hash__(self) -> int:
        return hash((tuple.__hash__(self), self.plan))


def carry_plan(state: PyTree, plan: object) -> PyTree:
    """Returns `state` with `plan` in its optimizer, or as it is where it has no optimizer field."""
    tx = get_tx(state)
    if tx is None or not hasattr(state, "replace"):
        return state
    return state.replace(tx=PlannedTransformation(tx, plan))


def without_plan(state: PyTree) -> PyTree:
    """Returns `state` with the optimizer as the user made it."""
    tx = get_tx(state)
    return state.replace(tx=tx.original) if isinstance(tx, PlannedTransformation) else state


def carried_plan(state: PyTree) -> Any:
    """Returns the plan in the optimizer of `state`, or None."""
    return getattr(get_tx(state), "plan", None)
