"""The models that are forecast: losses, steps in the place of losses, presets, and functions that
the command line names."""

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
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from zerojax._state import refusals as _refusals
from zerojax._step.step import Step
from zerojax._step.step_options import TrainOptions
from zerojax._types import PyTree
from zerojax.tools._forecast import presets as _presets
from zerojax.tools._forecast.presets import Gpt
from zerojax.tools._hlo import gpus as _known

Loss: TypeAlias = Callable[..., PyTree]
NnxStep: TypeAlias = Callable[..., PyTree]  # whose own type would import flax.nnx
# The loss or several, make_state, the batch, and a key if the loss takes one.
Ingredients = tuple[Loss | Mapping[str, Loss], Callable[[], PyTree], PyTree, PyTree]
Setting = tuple[str, object]  # a name, with dots for fields of fields, and a value
RETURNS = "(loss_fn, make_state, batch) or (loss_fn, make_state, batch, rng)"
OWN = "(loss_fn, make_state, batch), with a function batch(rows) that returns a global batch"
# A preset or its name; or a loss and make_state, or a step of nnx and what makes its model and
# optimizer, and a function of the rows of a global batch.
Given: TypeAlias = str | Gpt | tuple[Loss | NnxStep, Callable[[], PyTree], Callable[[int], PyTree]]


# -- steps in the place of losses


class NnxParts(NamedTuple):
    """What a step of nnx was made of, as for a loss of states; `options` are those it was given."""

    loss: Any
    make_state: Any
    rng: PyTree
    options: dict[str, Any]


def is_of_nnx(loss_fn: object) -> bool:
    return hasattr(loss_fn, "_unmade")  # flax.nnx is not imported for those who have none


def parts_of_nnx(step: Any, make: Any, rng: PyTree) -> NnxParts:
    """Takes a step of nnx and a function that makes a model and its optimizer apart."""
    step, make_state, keys = functional(step, make, rng)
    return NnxParts(step.recipe.loss_fn, make_state, keys, own_options(step))


def functional(loss_fn: Any, make_state: Any, rng: PyTree) -> tuple[Any, Any, PyTree]:
    """Returns a step of nnx as one of states, with a function that makes one; all else as it is."""
    check_one(loss_fn)
    is_nnx = is_of_nnx(loss_fn)
    step = loss_fn.functional if is_nnx else loss_fn
    if isinstance(step, Step) and not step.recipe.options.differentiates:
        raise TypeError(
            "a step of eval_step trains nothing, and forecasts are of training steps. Give the "
            "loss, or a step of train_step."
        )
    return loss_fn._unmade(make_state, rng) if is_nnx else (loss_fn, make_state, rng)


def check_one(loss_fn: object) -> None:
    """Raises for several steps: each has a state and options of its own, as losses have not."""
    losses = loss_fn.items() if isinstance(loss_fn, Mapping) else ()
    if named := [name for name, one in losses if is_of_nnx(one) or isinstance(one, Step)]:
        raise TypeError(
            f"a dict has several losses, and {named[0]!r} is a step. Give one step, not in a dict, "
            "and others each in a call of its own."
        )


def own_options(step: Step) -> dict[str, Any]:
    """Returns the options that a step was made with, but for those that are as they are by default
    and for its plan."""
    usual, options = TrainOptions(), step.recipe.options
    names = [field.name for field in dataclasses.fields(options) if field.name != "plan"]
    named = {name: getattr(options, name) for name in names}
    return {name: value for name, value in named.items() if value != getattr(usual, name)}


# -- what the command line names


def of_preset(
    name: str, gpus: str, rows: int, remats: Sequence[str], settings: Sequence[Setting] = ()
) -> Ingredients:
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
) -> Ingredients:
    """Calls module:function, or file.py:function, with its config and settings.

    Settings are arguments of the function, or else fields of its config: a JSON object has the
    function's arguments; what a Python file's `get_config()` returns is passed whole.
    """
    function = _imported(name)
    fields = {} if config is None else _read(config)
    for field, value in settings:
        if isinstance(fields, dict) and "." not in field:
            fields[field] = value  # the function says whether it takes it
        else:
            fields = _changed(fields, field, value)
    ingredients = _called(function, name, fields)
    if not isinstance(ingredients, tuple) or len(ingredients) not in (3, 4):
        size = f" of {len(ingredients)}" if isinstance(ingredients, tuple) else ""
        raise ValueError(f"{name} returned {type(ingredients).__name__}{size}. Return {RETURNS}.")
    loss, make_state, batch, *rng = ingredients
    return loss, make_state, batch, rng[0] if rng else None


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
        arguments = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"--config {path} cannot be read: {error.strerror}.") from None
    except KeyError:
        raise ValueError(f"--config {path} has no function get_config().") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--config {path} is no JSON: {error}. Give a .json file with the function's "
            "arguments, or a .py file whose get_config() returns its one argument."
        ) from None
    if not isinstance(arguments, dict):
        raise ValueError(f"--config {path} is no JSON object, but a {type(arguments).__name__}.")
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


def _called(function: Callable[..., Any], name: str, fields: Any) -> Any:
    """Calls a function with arguments by name, or with a config."""
    args, kwargs = ((), fields) if isinstance(fields, dict) else ((fields,), {})
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(
            f"{name}{signature}: {error}. Give its arguments by --set name=value or by --config."
        ) from None
    return function(*args, **kwargs)


# -- models of a study


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A model of a study as one kind of GPU computes it; `options` are those of its steps."""

    name: str
    loss: Loss
    make_state: Callable[[], PyTree]
    make_batch: Callable[[int], PyTree]
    options: dict[str, Any]
    own: dict[str, Any]  # those of a step of nnx
    remat: str = ""  # of a preset
    rng: PyTree = None

    def batch(self, rows: int) -> PyTree:
        """Returns the shapes of a global batch."""
        batch = self.make_batch(rows)
        _refusals.check_arrays(batch, "batch")
        if (rows,) not in {np.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}:
            raise ValueError(
                f"the batch({rows}) of {self.name!r} has no array of {rows} rows. It must return "
                "the global batch of so many rows, or its shapes."
            )
        return batch


def checked_models(models: str | Sequence[str] | Mapping[str, Given]) -> Mapping[str, Given]:
    """Returns the models by name, all of them known."""
    if not isinstance(models, Mapping):
        models = {name: name for name in ([models] if isinstance(models, str) else models)}
    if not models:
        raise ValueError("no models. Name one or several presets, or pass a dict of your own.")
    named = {k: _presets.preset(v) if isinstance(v, str) else v for k, v in models.items()}
    for name, one in named.items():
        is_own = isinstance(one, tuple) and len(one) == 3 and all(map(callable, one))
        if not is_own and not isinstance(one, Gpt):
            raise ValueError(f"the model {name!r} is no preset, and not {OWN}.")
    return named
