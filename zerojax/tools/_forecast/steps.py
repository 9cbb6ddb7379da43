"""Steps that stand for their loss where something is forecast."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import optax

from zerojax._step.step import Step, train_step
from zerojax._types import PyTree

NnxStep: TypeAlias = Callable[..., PyTree]  # whose own type would import flax.nnx


class Parts(NamedTuple):
    """What a step of nnx was made of, as for a loss of states; `options` are those it was given."""

    loss: Any
    make_state: Any
    rng: PyTree
    options: dict[str, Any]


def is_of_nnx(loss_fn: object) -> bool:
    return hasattr(loss_fn, "_unmade")  # flax.nnx is not imported for those who have none


def parts_of_nnx(step: Any, make: Any, rng: PyTree) -> Parts:
    """Takes a step of nnx and a function that makes a model and its optimizer apart."""
    made, make_state, keys = functional(step, make, rng)
    usual = options_of(train_step(made.recipe.loss_fn)) | {"precision": None}
    options = options_of(made) | {"precision": made.recipe.options.precision}
    given = {name: value for name, value in options.items() if value != usual[name]}
    return Parts(made.recipe.loss_fn, make_state, keys, given)


def functional(loss_fn: Any, make_state: Any, rng: PyTree) -> tuple[Any, Any, PyTree]:
    """Returns a step of nnx as one of states, with a function that makes one; all else as it is."""
    check_one(loss_fn)
    is_nnx = is_of_nnx(loss_fn)
    _check_trains(loss_fn.functional if is_nnx else loss_fn)
    return loss_fn._unmade(make_state, rng) if is_nnx else (loss_fn, make_state, rng)


def check_one(loss_fn: object) -> None:
    """Raises for several steps: each has a state and options of its own, as losses have not."""
    losses = loss_fn.items() if isinstance(loss_fn, Mapping) else ()
    if named := [name for name, one in losses if is_of_nnx(one) or isinstance(one, Step)]:
        raise TypeError(
            f"a dict has several losses, and {named[0]!r} is a step. Give one step, not in a dict, "
            "and others each in a call of its own."
        )


def _check_trains(step: object) -> None:
    if isinstance(step, Step) and not step.recipe.options.differentiates:
        raise TypeError(
            "a step of eval_step trains nothing, and forecasts are of training steps. Give the "
            "loss, or a step of train_step."
        )


def options_of(step: Step, tx: optax.GradientTransformation | None = None) -> dict[str, Any]:
    """Returns the options that a step was made with, but for those that its state is placed by."""
    recipe = step.recipe
    names = ("accumulate", "order", "regather", "prefetch", "mutable", "update", "activations")
    names += ("batch_specs",)
    return {name: getattr(recipe.options, name) for name in names} | {
        "tx": tx or recipe.tx,
        "skip_nonfinite": recipe.skip_nonfinite,
        "donate": step.donate,
        "compiler_options": step.compiler_options,
    }
