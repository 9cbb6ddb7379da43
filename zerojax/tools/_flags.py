"""The commands of the command line and their flags: each flag is said once, by its name."""

import argparse
import ast
import dataclasses
import math
import operator
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import zerojax
from zerojax import aot
from zerojax._table import explained
from zerojax.tools._audit import report as _report
from zerojax.tools._forecast import case as _case, presets as _presets, study as _study
from zerojax.tools._forecast.forecast import STAGES, WorkOptions
from zerojax.tools._forecast.picture import LARGEST

SUMMARY = "ZeRO for JAX: forecast, study, audit, table. Tables fit the terminal, or COLUMNS."
PRESET_SIZES = ", ".join(_presets.PRESETS)
OWN_MODEL = "module:function or file.py:function"
SHARDED = "nothing", "optimizer state", "optimizer state and gradients", "all"
TABLE_EXPLAINED = {
    "parameters": "The parameters of the model, in billions.",
    "devices": "How many devices share the training state.",
}
for stage, what in zip(STAGES, SHARDED, strict=True):
    sentence = f"The training state of each device, in GB of 1e9 bytes. Sharded: {what}."
    TABLE_EXPLAINED[f"stage {stage}, GB"] = sentence


def size(text: str) -> float:
    """Parses '7.5b' or '7.5e9' as 7.5e9."""
    units = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
    unit = units.get(text[-1:].lower())
    return float(text[:-1]) * unit if unit else float(text)


def nodes(text: str) -> tuple[int, int]:
    """Parses '8x4', eight hosts of four GPUs each."""
    match = re.fullmatch(r"([1-9]\d{0,8})x([1-9]\d{0,8})", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not hosts x GPUs of each, such as 8x8")
    return int(match[1]), int(match[2])


def groups(text: str) -> dict[str, tuple[str, ...]]:
    """Parses 'params=gpu,opt_state=gpu+node'; 'params=' names no axes."""
    parts = [part.partition("=") for part in text.split(",")]
    kinds = {kind for kind, _, _ in parts}
    if not all(sign for _, sign, _ in parts) or len(kinds) < len(parts):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not kind=axis+axis for each of some kinds, such as "
            "params=gpu,grads=gpu,opt_state=gpu+node"
        )
    return {kind: tuple(filter(None, axes.split("+"))) for kind, _, axes in parts}


def setting(text: str) -> tuple[str, object]:
    """Parses 'layers=12' as ('layers', 12); what is no literal of Python is a string."""
    name, sign, value = text.partition("=")
    if not sign or not all(part.isidentifier() for part in name.split(".")):
        raise argparse.ArgumentTypeError(f"{text!r} is not name=value")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def regather(text: str) -> bool | tuple[str, ...]:
    """Parses 'true', 'false', or the names of mesh axes."""
    if not all(text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not true, false, or an axis such as gpu")
    return {"true": True, "false": False}.get(text.lower(), tuple(text.split(",")))


def axis(text: str) -> str | tuple[str, ...]:
    """Parses 'batch', the name of a mesh axis, or 'host,card', those of two."""
    one, *others = text.split(",")
    return (one, *others) if others else one


def rate(text: str) -> float:
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be positive")
    return float(text)


def rows(text: str) -> int | str:
    if text != LARGEST and int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be positive")
    return text if text == LARGEST else int(text)


def _flag(text: str = "", **options: Any) -> dict[str, Any]:
    return options | ({"help": text} if text else {})


_several, _stage = {"nargs": "+"}, {"type": int, "choices": STAGES}
_comma, _off = {"type": operator.methodcaller("split", ",")}, {"action": "store_false"}
_file = {"type": pathlib.Path, "metavar": "FILE"}
_set = {"action": "append", "dest": "settings", "default": [], "metavar": "NAME=VALUE"}
_codes = "int8 or float8_e4m3fn"
# By name; a command has some, with changes of its own.
FLAGS = {
    "gpus": _flag("such as 64xH100 (default %(default)s)", default="8xH100"),
    "rows": _flag("of a preset: sequences per GPU", type=rows, default=4),
    "per-host": _flag(type=int, default=aot.PER_HOST),
    "nodes": _flag("8x8: hosts x GPUs of each, for --per-host", type=nodes),
    "network": _flag("GB/s of one GPU's network card: 12.5", type=rate),
    "host-link": _flag("GB/s between a GPU and its host's memory, each way: 25", type=rate),
    "set": _flag("an argument of the function, or a field; repeatable", type=setting, **_set),
    "config": _flag("the arguments as .json, or a .py file with a get_config()", **_file),
    "no-cache": _flag("compile anew, and keep nothing for the next time", dest="cache", **_off),
    "axis": _flag("what the loss calls the axis of all GPUs, or of hosts, GPUs", type=axis),
    "groups": _flag("params=gpu,grads=gpu,opt_state=gpu+node: axes node, gpu", type=groups),
    "no-pad": _flag("replicate what the GPUs do not divide; no padding", dest="pad", **_off),
    "offload": _flag("what rests in host memory: opt_state,params", **_comma),
    "activations": _flag("where layers keep them: host", **_comma),
    "regather": _flag("weights in backward: true; false; gpu, inside hosts only", type=regather),
    "master": _flag("bf16 parameters, fp32 master copies", action="store_true"),
    "compute": _flag("dtype that module:function computes in: bfloat16", metavar="DTYPE"),
    "gather": _flag(f"weights travel quantized: {_codes}", metavar="CODES"),
    "reduce": _flag(f"gradients: dtype of sums; between hosts int4, {_codes}", metavar="DTYPE"),
    "stages": _flag(**_stage, **_several),
    "remat": _flag("of presets: none, dots, full (default), or what is kept: qkv+up"),
    "plot": _flag("write a picture", metavar="FILE"),
}
STEP_FLAGS = ("gpus", "per-host", "network", "host-link", "set", "config", "no-cache", "axis")
STEP_FLAGS += ("no-pad", "offload", "activations", "regather", "master", "compute", "gather")
STEP_FLAGS += ("reduce",)
for _field in dataclasses.fields(WorkOptions):  # those whose declaration has a flag
    if _field.init and (_keywords := _field.metadata["flag"]):
        _text = _field.metadata["text"].partition(". ")[0]
        _name = _field.name.replace("_", "-")
        FLAGS[_name] = _flag(_text, metavar=_field.name.upper(), **_keywords)
        STEP_FLAGS += (_name,)
HOST_FLAGS = ("rows", "nodes", "groups")


class Command(NamedTuple):
    """What a command does, the columns of its table, its argument if it has one, its flags of those
    above, and changes of these and others."""

    about: str
    columns: Mapping[str, str]
    argument: Mapping[str, Any]
    flags: Sequence[str]
    changes: Mapping[str, Mapping[str, Any]]


COMMANDS = {
    "forecast": Command(
        "forecasts memory, traffic and speed of a step, by compiling it",
        _case.CASE_EXPLAINED,
        _flag(f"a model by size ({PRESET_SIZES}), {OWN_MODEL}", dest="model"),
        (*STEP_FLAGS, *HOST_FLAGS, "stages", "remat"),
        dict.fromkeys(("accumulate", "order", "remat"), _several)
        | {
            "choose": _flag("find the fastest way that fits, and its Python", action="store_true"),
            "tokens": _flag("of a step, if not all of the batch's", type=int),
        },
    ),
    "study": Command(
        "forecasts models on several numbers of GPUs: how throughput scales",
        _study.STUDY_EXPLAINED,
        _flag(
            f"by size ({PRESET_SIZES}), or {OWN_MODEL}", dest="models", metavar="model", **_several
        ),
        (*STEP_FLAGS, "rows", "stages", "remat", "plot"),
        {
            "gpus": _flag("such as 64xH100 128xH100", required=True, default=None, **_several),
            "stages": _flag(default=[1, 2, 3]),
            "rows": _flag("of each GPU: numbers, or largest (default)", default=None, **_several),
            "out": _flag("keep results in this JSON, and do only what is missing", **_file),
        },
    ),
    "audit": Command(
        "lists what a compiled program sends and holds; checks its contract",
        _report.TRAFFIC_EXPLAINED,
        _flag(f"a file of HLO text, a preset, {OWN_MODEL}", dest="model", metavar="program"),
        (*STEP_FLAGS, *HOST_FLAGS, "plot"),
        {
            "gpu": _flag("whose speed to model for HLO text, such as H100"),
            "stage": _flag(dest="stages", default=3, **_stage),
            "max-peak-bytes": _flag(type=size),
            "min-overlap": _flag(type=float),
        },
    ),
    "table": Command(
        "prints the ZeRO paper's memory table, or yours",
        TABLE_EXPLAINED,
        {},
        ("stages",),
        {
            "params": _flag(type=size, default=[7.5e9, 128e9, 1e12], **_several),
            "devices": _flag(type=int, default=[1, 4, 16, 64, 256, 1024], **_several),
            "stages": _flag(default=list(STAGES)),
            "param-bytes": _flag(type=float, default=2),
            "grad-bytes": _flag(type=float, default=2),
            "optimizer-bytes": _flag(type=float, default=12),
        },
    ),
}


class _Explain(argparse.Action):
    """Prints a sentence for each column of a command's table (`const`), and exits: none of the
    other arguments is read."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(explained(self.const or {}))
        print(f"\nNothing was run. For the table itself: {parser.prog} without --explain.")
        parser.exit()


def parser(runs: Mapping[str, Callable[[argparse.Namespace], int]]) -> argparse.ArgumentParser:
    """Returns the parser of the command line, which sets `run` to the function of a command."""
    parser = argparse.ArgumentParser(prog="zerojax", description=SUMMARY)
    parser.add_argument("--version", action="version", version=zerojax.__version__)
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, run in runs.items():
        about, columns, argument, flags, changes = COMMANDS[name]
        command = commands.add_parser(name, help=about, description=about)
        hint = f"The columns: {command.prog} --explain"
        command.set_defaults(run=run, hint=hint)
        text = "say what each column of the table is, and do nothing else"
        command.add_argument("--explain", action=_Explain, nargs=0, const=columns, help=text)
        command.add_argument("--json", action="store_true", help="print JSON")
        if argument:
            named = {key: value for key, value in argument.items() if key != "dest"}
            command.add_argument(argument["dest"], **named)
            command.epilog = f"Needs no GPU, but a compiler for GPUs:\n\n{aot.install_command()}"
            command.formatter_class = argparse.RawDescriptionHelpFormatter  # the line stays whole
        for flag in dict.fromkeys((*flags, *changes)):
            options = {**FLAGS.get(flag, {}), **changes.get(flag, {})}
            command.add_argument(f"--{flag}", **options)
    return parser
