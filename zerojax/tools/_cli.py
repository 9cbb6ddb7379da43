"""The command line: zerojax forecast | study | audit | table | launch.

It exits with 0 where all is well, with 1 where something does not fit or breaks its contract, and
with 2 on bad input.
"""

import argparse
import dataclasses
import functools
import gc
import importlib
import inspect
import itertools
import json
import os
import pathlib
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

import jax

import zerojax
from zerojax import _figures, tools as _tools
from zerojax._kernel.places import groups_of
from zerojax._plan.precision import Precision
from zerojax._run import programs as _programs
from zerojax._step.schedule import MICROBATCHES, Schedule
from zerojax._table import Printed, Table, fitted, paragraphs
from zerojax._types import PyTree
from zerojax.tools import _launch
from zerojax.tools._audit.report import Report, check_limits
from zerojax.tools._flags import OF_STEP, parser
from zerojax.tools._forecast import cache as _cache, network as _network, presets as _presets
from zerojax.tools._forecast.forecast import ForecastOptions, LossFn, Workload, each_once
from zerojax.tools._forecast.presets import Gpt
from zerojax.tools._forecast.study import LARGEST
from zerojax.tools._hlo import gpus as _known
from zerojax.tools._hlo.gpus import Gpu, Rates

ALL_WELL, NOT_WELL, BAD_INPUT = 0, 1, 2
GB = 1e9
# The flags of a step that say nothing of its program, or have a default.
WHERE = {"gpus", "rows", "cache", "network", "host_link", "per_host"}
OF_HLO = {*WHERE, "accumulate"}  # which HLO takes; of the others it is compiled already
OF_CHOICES = {*WHERE, "settings", "compute", "master", "split", "moments"}
LIBRARIES = ("site-packages", f"{os.sep}zerojax{os.sep}", "<frozen", f"lib{os.sep}python")
RETURNS = "(loss_fn, make_state, batch) or (loss_fn, make_state, batch, rng)"
# The loss or several, make_state, the batch, and a key if the loss takes one.
Ingredients = tuple[LossFn | Mapping[str, LossFn], Callable[[], PyTree], PyTree, PyTree]
Outcome: TypeAlias = tuple[Printed | Table, object, str, bool]


def main(argv: Sequence[str] | None = None) -> int:
    runs = {run.__name__: run for run in (forecast, study, audit, launch, table)}
    # What a trace makes lives as long as it: to look through it often takes a tenth of the time.
    gc.set_threshold(100_000)
    with fitted():
        return _run(parser(runs).parse_args(argv))


def _run(arguments: argparse.Namespace) -> int:
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `zerojax ... | head` is no error
    if not os.path.exists("/proc/driver/nvidia"):
        # Otherwise a plugin that is only here to compile with complains that there is no GPU.
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    plot = getattr(arguments, "plot", None)
    try:
        if plot:
            _figures.check_picture(plot)
        with _cache.kept(_programs.folder() if getattr(arguments, "cache", False) else None):
            result, data, text, is_well = arguments.run(arguments)
        if plot:
            result.plot(plot)  # type: ignore
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # of a user's module or of the compiler, in a line
        if os.environ.get("ZEROJAX_TRACEBACK"):
            raise
        print(f"zerojax: {described(error)}", file=sys.stderr)
        return BAD_INPUT
    hint = f"\n\n{arguments.hint}" if sys.stdout.isatty() else ""
    print(json.dumps(data, indent=1, default=str) if arguments.json else f"{text}{hint}")
    return ALL_WELL if is_well else NOT_WELL


def described(error: Exception) -> str:
    """Describes an error in one line, with its type and place if it is not of this package."""
    text = " ".join(str(error).split())[:600]
    frames = traceback.extract_tb(error.__traceback__)
    ours = pathlib.Path(zerojax.__file__).parent
    if not frames or ours in pathlib.Path(frames[-1].filename).parents:
        return text or type(error).__name__
    theirs = [f for f in frames if not any(part in f.filename for part in LIBRARIES)]
    where = f" ({theirs[-1].filename}:{theirs[-1].lineno})" if theirs else ""
    return f"{type(error).__name__}: {text}{where}. For the traceback, set ZEROJAX_TRACEBACK=1."


# -- commands: each returns its result, that as JSON and as text, and whether all is well


def forecast(arguments: argparse.Namespace) -> Outcome:
    """Forecasts memory, traffic and speed of a step, by compiling it."""
    model = _model(arguments)
    if not arguments.choose:
        result = zerojax.forecast(*model, **_options(arguments, zerojax.forecast))
        return result, result.to_dict(), str(result), result.best is not None
    taken = {*OF_CHOICES, *inspect.signature(_tools.choose).parameters}
    if flags := _flags(arguments, {"stages", *OF_STEP} - taken):
        raise ValueError(
            f"--choose takes no {flags}: it finds the fastest way itself. Leave out one of the two."
        )
    result = _tools.choose(*model, **_options(arguments, _tools.choose))
    return result, result.to_dict(), str(result), any((result.best, result.best_quantized))


def study(arguments: argparse.Namespace) -> Outcome:
    """Forecasts models on several numbers of GPUs: how throughput scales."""
    result = _tools.study(_models_of(arguments), **_options(arguments, _tools.study))
    failed = any(case.failed for case in result.cases)
    fits = any(case.fits for case in result.cases)
    return result, result.to_dict(), str(result), fits and not failed


def audit(arguments: argparse.Namespace) -> Outcome:
    """Lists what a compiled program sends and holds; checks its contract."""
    limits = {name: getattr(arguments, name) for name in ("max_peak_bytes", "min_overlap")}
    check_limits(**limits)
    path = pathlib.Path(arguments.model)
    if path.exists() or arguments.model.endswith((".hlo", ".txt")):
        report = _audited_text(path, arguments)
    else:
        losses, *model = _model(arguments)
        losses = next(iter(losses.values())) if isinstance(losses, dict) else losses
        result = zerojax.forecast(losses, *model, **_options(arguments, zerojax.forecast))
        report = result.cases[0].report
        assert report is not None, "forecasts have the reports of their cases"
    findings = report.findings(**limits)
    broken = paragraphs([f"broken: {line}" for line in findings])
    text = f"{report}\n\n{broken}".rstrip()
    return report, report.to_dict() | {"findings": findings}, text, not findings


def _audited_text(path: pathlib.Path, arguments: argparse.Namespace) -> Report:
    """Audits a file of HLO, compiled by whomever."""
    if flags := _flags(arguments, {*OF_STEP} - OF_HLO):
        raise ValueError(f"{path} is compiled already. Leave out {flags}.")
    gpu = None if arguments.gpu is None else _known.named(arguments.gpu)
    if arguments.network or arguments.host_link:
        if gpu is None:
            raise ValueError(
                "--network and --host-link change a GPU's links. Name the GPU, too: --gpu H100."
            )
        gpu = dataclasses.replace(gpu, given_rates=_rates(arguments, gpu))
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not text"
        raise ValueError(
            f"{path} cannot be read as HLO ({why}). Name a file with the text of "
            "compiled.as_text(), a preset, or module:function."
        ) from None
    count = arguments.accumulate or 1
    return zerojax.audit(text, gpu=gpu, per_host=arguments.per_host, accumulate=count)


def table(arguments: argparse.Namespace) -> Outcome:
    """Prints the ZeRO paper's memory table, or yours. Its Figure 1 is a row: 7.5B on 64 devices."""
    names = "params", "devices", "stages"
    params, devices, stages = (each_once(getattr(arguments, name)) for name in names)
    widths = arguments.param_bytes, arguments.grad_bytes, arguments.optimizer_bytes

    header = ("parameters", "devices", *(f"stage {stage}, GB" for stage in stages))
    rows = [
        [
            f"{count / 1e9:g}B",
            each,
            *(state_bytes(count, each, stage, widths) / GB for stage in stages),
        ]
        for count, each in itertools.product(params, devices)
    ]
    formats = dict.fromkeys(header[2:], "{:,.2f}".format)
    result = Table(header, rows, formats=formats, right=header[:1], keys=2)
    return result, result.to_dict()["rows"], str(result), True


def launch(arguments: argparse.Namespace) -> Outcome:
    """Starts a program as one process for each GPU of this host, and ends all together.

    Ends this process with the exit code of those that it starts.
    """
    named = {name: getattr(arguments, name) for name in ("nodes", "node", "address", "port")}
    hosts = _launch.hosts(named, os.environ)
    devices, cpu = arguments.devices, arguments.cpu
    gpus = None if cpu else _launch.gpus_here(os.environ)
    count = _launch.processes_here(arguments.processes, devices, gpus, cpu)
    if not arguments.is_module and not os.path.isfile(arguments.program):
        raise ValueError(f"{arguments.program} is no file here. Pass -m before it to run a module.")
    program = ["-m"] * arguments.is_module + [arguments.program, *arguments.arguments]
    environments = _launch.environments(os.environ, hosts, count, devices, cpu)
    what = _launch.number_of(devices, "emulated CPU device" if cpu else "GPU")
    meet = f"{_launch.number_of(count, 'process')} of {what} {'each meet' * (count > 1) or 'meets'}"
    print(f"zerojax: {meet} at {hosts.address}:{hosts.port}", file=sys.stderr, flush=True)
    command = [sys.executable, *program]
    sys.exit(_launch.launch(command, environments, arguments.logs, arguments.grace))


def state_bytes(params: float, devices: int, stage: int, widths: Sequence[float]) -> float:
    """Returns the bytes of each device by the ZeRO paper's formula."""
    groups = groups_of(stage, ("data",))
    sharded = zip(widths, (groups.params, groups.grads, groups.opt_state), strict=True)
    return sum(params * width / (devices if axes else 1) for width, axes in sharded)


# -- what commands share


def _flags(arguments: argparse.Namespace, names: Collection[str]) -> str:
    """Returns the flags of these names that the user has typed."""
    typed = {name: getattr(arguments, name) for name in sorted(names)}
    off = {name for name, value in typed.items() if value is False} - {"regather"}
    typed = [name for name, value in typed.items() if value not in (None, [])]
    flags = (f"--{'no-' * (name in off)}{name}".replace("_", "-") for name in typed)
    return ", ".join(flags).replace("--settings", "--set")


def _options(arguments: argparse.Namespace, function: Callable[..., object]) -> dict[str, PyTree]:
    """Returns the arguments of a function that flags name. Tells XLA of a slow network before it
    compiles for the first time."""

    def named(names: Iterable[str]) -> dict[str, PyTree]:
        values = {name: getattr(arguments, name, None) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    jax.config.update("jax_platforms", "cpu")  # nothing runs; other backends only take time
    taken = inspect.signature(function).parameters.values()
    options = named(one.name for one in taken if one.kind is one.KEYWORD_ONLY)
    gpu = _known.parse_count(each_once(arguments.gpus)[0])[1]  # of several, the first
    if arguments.master and arguments.split:
        raise ValueError("--master and --split say how masters are kept. Pass one of them.")
    dtypes = named(("compute", "gather", "reduce", "moments"))
    if arguments.master or arguments.split:
        master = "split" if arguments.split else "float32"
        dtypes = {"compute": gpu.half, "param": gpu.half, "master": master} | dtypes
    if dtypes:
        options["precision"] = Precision(**dtypes)
    if how := named(field.name for field in dataclasses.fields(Schedule)):
        orders = each_once(how.pop("order", MICROBATCHES))
        schedules = [Schedule(order=order, **how) for order in orders]
        options["schedule"] = schedules if len(schedules) > 1 else schedules[0]
    if rates := _rates(arguments, gpu):
        options["rates"] = rates
    if _network.is_misjudged(dataclasses.replace(gpu, given_rates=rates)):
        _network.tell(os.environ)
    return options


def _rates(arguments: argparse.Namespace, gpu: Gpu) -> Rates | None:
    """Returns the GPU's rates with those of other links, where any is named."""
    links = {"network": arguments.network, "host": arguments.host_link}
    named = {name: speed * GB for name, speed in links.items() if speed is not None}
    return _tools.rates_of(gpu.name, **named) if named else None


def _model(arguments: argparse.Namespace) -> Ingredients:
    for name, value in arguments.settings:
        if value == LARGEST:
            raise ValueError(
                f"only zerojax study finds the largest model: zerojax study {arguments.model} "
                f"--gpus {arguments.gpus} --rows 4 --set {name}={LARGEST}."
            )
    model = _named(arguments, arguments.model)
    if not isinstance(model, Gpt):
        return model
    counts = each_once(arguments.accumulate or 1)
    if odd := [count for count in counts if count > 0 and arguments.rows % count]:
        raise ValueError(
            f"--rows {arguments.rows} of each GPU do not divide into --accumulate {odd[0]} "
            f"microbatches. Pass --rows {odd[0]}, or a multiple of it."
        )
    chooses, remats = getattr(arguments, "choose", False), getattr(arguments, "remat", None)
    remats = remats or (_presets.REMATS if chooses else ("full",))
    count, gpu = _known.parse_count(arguments.gpus)
    preset = _presets.on(model, gpu)
    options = ForecastOptions(**_options(arguments, ForecastOptions))
    named = preset.losses(remats), preset.make_state, preset.batch(count), None
    share = Workload.of(*named, arguments.gpus, options).share
    return *named[:2], preset.batch(arguments.rows * count // share), None


def _models_of(arguments: argparse.Namespace) -> dict[str, PyTree]:
    """Returns the models of a study by name; presets with other fields are named with these."""
    fields = [f"{k}={v}" if v != LARGEST else k for k, v in arguments.settings]
    searched = [name for name, value in arguments.settings if value == LARGEST]
    if len(searched) > 1:
        raise ValueError(f"--set has the largest {' and '.join(searched)}. Name one of them.")

    def of(name: str, *number: int) -> PyTree:
        own = _named(arguments, name, **dict(zip(searched, number, strict=True)))
        # One with a key is checked later.
        return own[:3] if isinstance(own, tuple) and own[3] is None else own

    models: dict[str, PyTree] = {}
    for name in arguments.models:
        named = name if ":" in name and not searched else " ".join([name, *fields])
        models[named] = functools.partial(of, name) if searched else of(name)
    return models


def _named(arguments: argparse.Namespace, name: str, **fields: object) -> Gpt | Ingredients:
    """Returns what a function of the user's returns, or a preset."""
    fields = dict(arguments.settings) | fields
    if ":" in name:
        return _of_function(name, fields)
    if arguments.compute is not None:
        raise ValueError(
            f"--compute is for module:function, and {name!r} computes in the 16 bits of the GPU. "
            "Leave it out."
        )
    return _presets.preset(name, **fields)


def _of_function(name: str, arguments: Mapping[str, object]) -> Ingredients:
    """Calls module:function, or file.py:function."""
    module, _, function = name.rpartition(":")
    folder = os.getcwd()
    if module.endswith(".py"):  # as Python runs a script: it can import the files beside it
        path = pathlib.Path(module).absolute()
        folder, module = str(path.parent), path.stem
        if not path.exists():
            raise ValueError(f"there is no file {path}. Name one seen from this directory.")
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
