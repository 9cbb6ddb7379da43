"""Steps that stand for their loss where something is forecast."""

from typing import Any, NamedTuple

import optax

from zerojax._step.step import Step, train_step
from zerojax._types import PyTree


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
    return loss_fn._unmade(make_state, rng) if is_of_nnx(loss_fn) else (loss_fn, make_state, rng)


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
