"""The model that the command line names: a preset, or what a function of the user's returns."""

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
from typing import Any

from zerojax._step.step import Step
from zerojax._types import PyTree
from zerojax.tools._forecast import presets as _presets
from zerojax.tools._forecast.forecast import Loss
from zerojax.tools._forecast.presets import Gpt
from zerojax.tools._forecast.steps import options_of
from zerojax.tools._hlo import known as _known

# The loss or several, make_state, the batch, and a key if the loss takes one.
Model = tuple[Loss | Mapping[str, Loss], Callable[[], PyTree], PyTree, PyTree]
Setting = tuple[str, object]  # a name, with dots for fields of fields, and a value
RETURNS = "(loss_fn, make_state, batch) or (loss_fn, make_state, batch, rng)"


def of_preset(
    name: str, gpus: str, rows: int, remats: Sequence[str], settings: Sequence[Setting] = ()
) -> Model:
    """Returns a model by its size, with some of its fields changed."""
    count, gpu = _known.parse_count(gpus)
    preset = _presets.on(changed_preset(name, settings), gpu)
    return preset.losses(remats), preset.make_state, preset.batch(rows * count), None


def changed_preset(name: str, settings: Sequence[Setting]) -> Gpt:
    """Returns a preset with some of its fields changed."""
    return functools.reduce(
        lambda model, one: _changed(model, *one), settings, _presets.preset(name)
    )


def of_function(
    name: str, config: pathlib.Path | None = None, settings: Sequence[Setting] = ()
) -> Model:
    """Calls module:function, or file.py:function, with its config and settings.

    Settings are arguments of the function, or else fields of its config: a JSON object has the
    function's arguments; what a Python file's `get_config()` returns is passed whole.
    """
    function = _imported(name)
    given = {} if config is None else _read(config)
    for field, value in settings:
        if isinstance(given, dict) and "." not in field:
            given[field] = value  # the function says whether it takes it
        else:
            given = _changed(given, field, value)
    made = _called(function, name, given)
    if not isinstance(made, tuple) or len(made) not in (3, 4):
        size = f" of {len(made)}" if isinstance(made, tuple) else ""
        raise ValueError(f"{name} returned {type(made).__name__}{size}. Return {RETURNS}.")
    loss, make_state, batch, *rng = made
    return loss, make_state, batch, rng[0] if rng else None


def ingredients(
    losses: Loss | Mapping[str, Loss], stage: int, options: Mapping[str, PyTree]
) -> tuple[Loss, dict[str, PyTree], dict[str, PyTree]]:
    """Returns one loss, and what `train_step` and `plan` are given with it.

    Of several losses that is the first. A ready step keeps its microbatches; other
    options that are named here replace its own.
    """
    named = {name: value for name, value in options.items() if value is not None}
    if not isinstance(losses, Step):
        loss = losses if callable(losses) else next(iter(losses.values()))
        return loss, named, {"stage": stage, "precision": None}
    recipe, own = losses.recipe, options_of(losses)
    named |= {name: own[name] for name in ("accumulate", "order")}
    placed = {"stage": stage, "tx": recipe.tx}
    return recipe.loss_fn, own | named, placed | {"precision": recipe.options.precision}


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
            f"{name} cannot be imported: {error}. Give module:function, seen from this directory, "
            f"or file.py:function, where function() returns {RETURNS}."
        ) from None


def _read(path: pathlib.Path) -> Any:
    """Returns a JSON object, or what the `get_config()` of a Python file does."""
    try:
        if path.suffix == ".py":
            return runpy.run_path(str(path))["get_config"]()
        found = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"--config {path} cannot be read: {error.strerror}.") from None
    except KeyError:
        raise ValueError(f"--config {path} has no function get_config().") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--config {path} is no JSON: {error}. Give a .json file with the function's "
            "arguments, or a .py file whose get_config() returns its one argument."
        ) from None
    if not isinstance(found, dict):
        raise ValueError(f"--config {path} is no JSON object, but a {type(found).__name__}.")
    return found


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
    found = {name: getattr(config, name) for name in names}
    return {name: value for name, value in found.items() if not inspect.isroutine(value)}


def _called(function: Callable[..., Any], name: str, given: Any) -> Any:
    """Calls a function with arguments by name, or with a config."""
    args, kwargs = ((), given) if isinstance(given, dict) else ((given,), {})
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(
            f"{name}{signature}: {error}. Give its arguments by --set name=value or by --config."
        ) from None
    return function(*args, **kwargs)
