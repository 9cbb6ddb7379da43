"""The models that are forecast: losses, steps in place of losses, presets, and functions that the
command line names."""

import dataclasses
import functools
import importlib
import inspect
import json
import os
import pathlib
import runpy
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


# -- what the command line names


def changed_preset(name: str, settings: Sequence[tuple[str, object]]) -> Gpt:
    """Returns a preset with some of its fields changed."""
    return functools.reduce(
        lambda model, one: _changed(model, *one), settings, _presets.preset(name)
    )


def of_function(
    name: str, config: pathlib.Path | None, settings: Sequence[tuple[str, object]]
) -> Ingredients:
    """Calls module:function, or file.py:function, with its config and settings.

    Settings are arguments of the function, or else fields of its config: a JSON object has the
    function's arguments; the function gets what a Python file's `get_config()` returns as one.
    """
    function = _imported(name)
    fields = {} if config is None else _read(config)
    for field, value in settings:
        if isinstance(fields, dict) and "." not in field:
            fields[field] = value  # the function says whether it takes it
        else:
            fields = _changed(fields, field, value)
    args, kwargs = ((), fields) if isinstance(fields, dict) else ((fields,), {})
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(
            f"{name}{signature}: {error}. Pass its arguments by --set name=value or by --config."
        ) from None
    ingredients = function(*args, **kwargs)
    if not isinstance(ingredients, tuple) or len(ingredients) not in (3, 4):
        size = f" of {len(ingredients)}" if isinstance(ingredients, tuple) else ""
        raise ValueError(f"{name} returned {type(ingredients).__name__}{size}. Return {RETURNS}.")
    return ingredients if len(ingredients) == 4 else (*ingredients, None)


def _imported(name: str) -> Callable[..., Any]:
    module, _, function = name.rpartition(":")
    folder = os.getcwd()
    if module.endswith(".py"):  # as Python runs a script: what is beside it can be imported
        path = pathlib.Path(module).absolute()
        folder, module = str(path.parent), path.stem
    sys.path.insert(0, folder)
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ValueError(
            f"{name} cannot be imported: {error}. Name module:function, seen from this directory, "
            f"or file.py:function, where function() returns {RETURNS}."
        ) from None


def _read(path: pathlib.Path) -> Any:
    """Returns a JSON object, or the config that `get_config()` of a Python file returns."""
    try:
        if path.suffix == ".py":
            return runpy.run_path(str(path))["get_config"]()
        arguments = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"--config {path} cannot be read: {error.strerror}.") from None
    except KeyError:
        raise ValueError(f"--config {path} has no function get_config().") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--config {path} is not JSON: {error}. Pass a .json file with the function's "
            "arguments, or a .py file whose get_config() returns its one argument."
        ) from None
    if not isinstance(arguments, dict):
        raise ValueError(f"--config {path} is a JSON {type(arguments).__name__}, not an object.")
    return arguments


def _changed(config: Any, name: str, value: object) -> Any:
    """Returns a config with a field changed, or one of that field's fields."""
    first, _, rest = name.partition(".")
    fields = _fields(config)
    if first not in fields:
        has = f"Its fields: {', '.join(fields)}" if fields else "It has no fields"
        raise ValueError(f"--set {name}: there is no {first!r} in {type(config).__name__}. {has}.")
    if rest:
        value = _changed(fields[first], rest, value)
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return dataclasses.replace(config, **{first: value})
    if isinstance(config, dict):
        return config | {first: value}
    setattr(config, first, value)
    return config


def _fields(config: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(config):
        return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    if hasattr(config, "items"):  # a dict, or a ConfigDict, which is none
        return dict(config.items())
    names = (name for name in dir(config) if not name.startswith("_"))
    fields = {name: getattr(config, name) for name in names}
    return {name: value for name, value in fields.items() if not inspect.isroutine(value)}


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
