"""What a step is made of, and the options that say how its loss is evaluated."""

import dataclasses
from collections.abc import Callable

import optax

from zerojax._loss import batch as _batch
from zerojax._plan.plan import Plan
from zerojax._plan.precision import Precision, check_precision
from zerojax._types import PyTree


@dataclasses.dataclass(frozen=True)
class Options:
    """The options that say how a loss is evaluated."""

    has_aux: bool | None  # None: as the loss returns it
    accumulate: int
    precision: Precision | None
    regather: bool
    differentiate: bool = True
    prefetch: int | str = "auto"
    mutable: tuple[str, ...] = ()  # names in aux that are fields of a state
    update: str = "after"  # when parameters are updated: "backward", "after" it, "auto"
    batch_specs: PyTree = None

    def __post_init__(self) -> None:
        check_precision(self.precision)
        _batch.check_accumulate(self.accumulate)
        if self.prefetch not in (0, 1, "auto"):
            raise ValueError(
                f"prefetch must be 0, 1 or 'auto', got {self.prefetch!r}: the number of layers "
                "whose weights are gathered ahead of their use."
            )


def precision_of(plan: Plan, given: Precision | None) -> Precision:
    """Returns the dtypes of a step: the plan's, or those given where the plan has none."""
    if given is None:
        return plan.precision or Precision()
    if plan.precision is not None and given != plan.precision:
        raise ValueError(
            f"the step has {given} and the state was placed with {plan.precision}. Leave "
            "precision= out of the step, or place the state again with the one you want."
        )
    if plan.precision is None and given.stores:
        raise ValueError(
            f"{given} says how the state is stored, and the state was placed without it. Place "
            "it with zerojax.shard_train_state(state, precision=...); the step then needs none."
        )
    return given


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The ingredients of a step, read off it as `step.recipe`."""

    loss_fn: Callable[..., PyTree]
    options: Options
    plan: Plan | None = None
    tx: optax.GradientTransformation | None = None
    stage: int | None = None
    skip_nonfinite: bool = False

    @property
    def mutable(self) -> tuple[str, ...]:
        return self.options.mutable
