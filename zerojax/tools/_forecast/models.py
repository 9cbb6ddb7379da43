"""The models that are forecast: losses, steps in place of losses, presets, and functions that the
command line names."""

import dataclasses
import importlib
import inspect
import os
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from zerojax._step.step import Step
from zerojax._step.step_options import TrainOptions
from zerojax._types import PyTree
from zerojax.tools._forecast import presets as _presets
from zerojax.tools._forecast.presets import Gpt

Loss: TypeAlias = Callable[..., PyTree]
NnxStep: TypeAlias = Callable[..., PyTree]  # whose own type would import flax.nnx
# The loss or several, make_state, the batch, and a key if the loss takes one.
Ingredients = tuple[Loss | Mapping[str, Loss], Callable[[], PyTree], PyTree, PyTree]
RETURNS = "(loss_fn, make_state, batch) or (loss_fn, make_state, batch, rng)"
OWN = "(loss_fn, make_state, batch), with a function batch(rows) that returns a global batch"
# A preset or its name; or a loss and make_state, or a step of nnx and the function that makes its
# model and optimizer, and a function of the rows of a global batch.
Given: TypeAlias = str | Gpt | tuple[Loss | NnxStep, Callable[[], PyTree], Callable[[int], PyTree]]


# -- steps in place of losses


def is_of_nnx(loss_fn: object) -> bool:
    return hasattr(loss_fn, "_unmade")  # flax.nnx is not imported for those who have none


def taken_apart(
    loss_fn: Any, make_state: Any, rng: PyTree
) -> tuple[dict[str, Loss], Any, PyTree, dict[str, Any]]:
    """Returns losses by name, the function that makes a state, a key, and the options of a step.

    A step stands for its loss, with the options that are not the defaults. One of nnx comes with a
    function that makes a model and its optimizer.
    """
    if is_of_nnx(loss_fn):
        loss_fn, make_state, rng = loss_fn._unmade(make_state, rng)
    if isinstance(loss_fn, Step):
        options, usual = loss_fn.recipe.options, TrainOptions()
        if not options.differentiates:
            raise TypeError(
                "a step of eval_step trains nothing, and forecasts are of training steps. Pass the "
                "loss, or a step of train_step."
            )
        names = [field.name for field in dataclasses.fields(options) if field.name != "plan"]
        own = {k: v for k in names if (v := getattr(options, k)) != getattr(usual, k)}
        return {"": loss_fn.recipe.loss_fn}, make_state, rng, own
    losses = loss_fn if isinstance(loss_fn, Mapping) else {"": loss_fn}
    # Each step has a state and options of its own, which losses do not.
    if named := [name for name, one in losses.items() if is_of_nnx(one) or isinstance(one, Step)]:
        raise TypeError(
            f"a dict has several losses, and {named[0]!r} is a step. Pass one step, not in a dict, "
            "and others each in a call of its own."
        )
    return dict(losses), make_state, rng, {}


# -- functions that the command line names


def of_function(name: str, arguments: Mapping[str, object]) -> Ingredients:
    """Calls module:function, or file.py:function."""
    module, _, function = name.rpartition(":")
    folder = os.getcwd()
    if module.endswith(".py"):  # as Python runs a script: it can import the files beside it
        path = pathlib.Path(module).absolute()
        folder, module = str(path.parent), path.stem
    sys.path.insert(0, folder)
    try:
        call = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ValueError(
            f"{name} cannot be imported: {error}. Name module:function, seen from this directory, "
            f"or file.py:function, where function() returns {RETURNS}."
        ) from None
    signature = inspect.signature(call)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ValueError(
            f"{name}{signature}: {error}. Pass its arguments by --set name=value."
        ) from None
    ingredients = call(**arguments)
    if not isinstance(ingredients, tuple) or len(ingredients) not in (3, 4):
        size = f" of {len(ingredients)}" if isinstance(ingredients, tuple) else ""
        raise ValueError(f"{name} returned {type(ingredients).__name__}{size}. Return {RETURNS}.")
    return ingredients if len(ingredients) == 4 else (*ingredients, None)


# -- models of a study


def checked_models(models: str | Sequence[str] | Mapping[str, Given]) -> Mapping[str, Given]:
    """Returns the models by name, with presets looked up."""
    if not isinstance(models, Mapping):
        models = {name: name for name in ([models] if isinstance(models, str) else models)}
    if not models:
        raise ValueError("no models. Name one or several presets, or pass a dict of your own.")
    named = {k: _presets.preset(v) if isinstance(v, str) else v for k, v in models.items()}
    for name, one in named.items():
        is_own = isinstance(one, tuple) and len(one) == 3 and all(map(callable, one))
        if not is_own and not isinstance(one, Gpt):
            raise ValueError(f"the model {name!r} is neither a preset nor {OWN}.")
    return named
