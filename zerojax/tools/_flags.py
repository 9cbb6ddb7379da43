"""The commands of the command line and their flags, of which a step's are its declared options."""

import argparse
import ast
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import zerojax
from zerojax import aot
from zerojax._step.schedule import Schedule
from zerojax._table import Table
from zerojax.tools._audit.report import TRAFFIC_EXPLAINED
from zerojax.tools._forecast.case import CASE_COLUMNS, STAGE
from zerojax.tools._forecast.forecast import STAGES, WorkOptions
from zerojax.tools._forecast.presets import PRESETS
from zerojax.tools._forecast.study import STUDY_COLUMNS

SUMMARY = "ZeRO for JAX: forecast, study, audit, table, launch. Tables fit the terminal."
OWN_MODEL = "module:function or file.py:function"
Keywords: TypeAlias = dict[str, Any]  # of argparse
TABLE_EXPLAINED = {
    "parameters": "The parameters of the model, in billions.",
    "devices": "How many devices share the training state.",
    **{f"stage {stage}, GB": f"The state of a device, in 1e9 bytes. {STAGE}" for stage in STAGES},
}


def size(text: str) -> float:
    """Parses '7.5b' or '7.5e9' as 7.5e9."""
    unit = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}.get(text[-1:].lower())
    return float(text[:-1]) * unit if unit else float(text)


def literal(text: str) -> object:
    """Parses a literal of Python; all else is a string."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def names(text: str) -> object:
    """Parses 'gpu+node', of nothing but names, as a tuple, '' as an empty one, else a literal."""
    are_names = re.fullmatch(r"\w+(\+\w+)+|", text)
    return tuple(filter(None, text.split("+"))) if are_names else literal(text)


def value(text: str) -> object:
    """Parses 'params=gpu,opt_state=gpu+node' as a dict of names and tuples, 'data=8' as one of
    numbers, 'host,card' as a tuple, 'true' as True, and all else as a literal."""
    parts = text.split(",")
    if "=" in text:
        pairs = [part.partition("=") for part in parts]
        named = {name: names(text) for name, _, text in pairs}
        if len(named) < len(parts) or not all(sign for _, sign, _ in pairs):
            raise argparse.ArgumentTypeError(f"{text!r} is not name=value+value,name=value")
        return named
    if not all(parts):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty part")
    first, *others = map(literal, parts)
    return (first, *others) if others else {"true": True, "false": False}.get(text.lower(), first)


def setting(text: str) -> tuple[str, object]:
    """Parses 'layers=12' as ('layers', 12)."""
    name, sign, text = text.partition("=")
    if not sign or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{name + sign + text!r} is not name=value")
    return name, literal(text)


def positive(kind: Callable[[str], float], text: str) -> float:
    if not 0 < (number := kind(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be positive")
    return number


def _of_options() -> dict[str, Keywords]:
    """Returns a flag for each option of a step that text can name."""
    metavars = {"groups": "params=gpu,opt_state=gpu+node", "offload": "opt_state,params"}
    metavars |= {"regather": "true|false|gpu", "axis": "batch|host,gpu", "activations": "host"}
    metavars |= {"mesh": "data=8,tensor=8", "experts": "expert=regex"}
    skipped = {"tx", "rates", "precision", "overrides", "batch_specs", "schedule"}
    skipped |= {"compiler_options"}
    flags = {}
    for field in (*dataclasses.fields(WorkOptions), *dataclasses.fields(Schedule)):
        if not field.init or field.name in skipped:
            continue
        keywords: Keywords = field.metadata["flag"] or {"type": value}
        named = "|".join(keywords.get("choices", [field.name.upper()]))
        keywords = {"metavar": metavars.get(field.name, named)} | keywords
        if field.type is bool:
            keywords = {"action": argparse.BooleanOptionalAction}
        text = re.split(r"\.(?: |$)", field.metadata["text"])[0]
        flags[f"--{field.name.replace('_', '-')}"] = keywords | {"help": text.replace("%", "%%")}
    return flags


_several = {"nargs": "+"}
_rate, _stage = {"type": functools.partial(positive, float)}, {"type": int, "choices": STAGES}
_whole, _size = ({"type": functools.partial(positive, kind)} for kind in (int, size))
_switch: Keywords = {"action": "store_true", "default": None}
_set = {"type": setting, "action": "append", "dest": "settings", "metavar": "NAME=VALUE"}
_codes = "int8 or float8_e4m3fn"
OF_STEPS = _of_options() | {
    "--gpus": {"help": "such as 64xH100 (default %(default)s)", "default": "8xH100"},
    "--rows": {"help": "of a preset: per GPU, or per GPUs that share rows", "default": 4, **_whole},
    "--per-host": {"help": "GPUs of a host", "type": int, "default": aot.PER_HOST},
    "--network": {"help": "GB/s of one GPU's network card: 12.5", **_rate},
    "--host-link": {"help": "GB/s of a GPU to its host's memory, one direction: 25", **_rate},
    "--set": {"help": "an argument of the function, or a field; repeatable", "default": [], **_set},
    "--no-cache": {"help": "compile again", "dest": "cache", "action": "store_false"},
    "--master": {"help": "bf16 parameters, fp32 master copies", **_switch},
    "--split": {"help": "bf16 parameters, masters as 8-bit corrections of them", **_switch},
    "--moments": {"help": "the optimizer's moments are kept in: bfloat16 or int8"},
    "--compute": {"help": "dtype that module:function computes in: bfloat16"},
    "--gather": {"help": f"weights travel quantized: {_codes}"},
    "--reduce": {"help": f"gradients: dtype of sums; between hosts int4, {_codes}"},
}
# The names of these flags in the namespace of arguments.
OF_STEP = [how.get("dest", flag[2:].replace("-", "_")) for flag, how in OF_STEPS.items()]
_stages = {"--stages": {**_stage, **_several}}
_remat = {"help": "of presets: none, dots, full (default), or what is kept: qkv+up"}
_plot = {"help": "write a picture", "metavar": "FILE"}
A_PRESET = f"a model by size ({', '.join(PRESETS)})"
# By command: the columns of its table, its argument and its flags.
COLUMNS: dict[str, Mapping[str, str]] = {
    "forecast": {title: about for title, (_, _, about) in CASE_COLUMNS.items()},
    "study": {title: about for title, (_, _, about) in STUDY_COLUMNS.items()},
    "audit": TRAFFIC_EXPLAINED,
    "table": TABLE_EXPLAINED,
}
FLAGS: dict[str, dict[str, Keywords]] = {
    "forecast": {
        "model": {"help": f"{A_PRESET}, {OWN_MODEL}"},
        **OF_STEPS,
        **_stages,
        **{name: OF_STEPS[name] | _several for name in ("--accumulate", "--order")},
        "--remat": _remat | _several,
        "--choose": {"help": "find the fastest options that fit, and their Python", **_switch},
    },
    "study": {
        "models": {"help": f"{A_PRESET}, or {OWN_MODEL}", "metavar": "model", **_several},
        **OF_STEPS,
        "--gpus": {"help": "such as 64xH100 128xH100", "required": True, **_several},
        **_stages,
        "--rows": {"help": "of each GPU: numbers, or largest (default)", "type": value, **_several},
        "--remat": _remat,
        "--set": OF_STEPS["--set"] | {"help": "also layers=largest: the largest model that fits"},
        "--plot": _plot,
    },
    "audit": {
        "model": {"help": f"a file of HLO text, a preset, {OWN_MODEL}", "metavar": "program"},
        **OF_STEPS,
        "--gpu": {"help": "whose speed to model for HLO text, such as H100"},
        "--stage": {"dest": "stages", "default": 3, **_stage},
        "--max-peak-bytes": {"type": size},
        "--min-overlap": {"type": float},
        "--plot": _plot,
    },
    "launch": {
        "-n": {"help": "processes of this host", "dest": "processes", "metavar": "N", **_whole},
        "--devices": {"help": "of each process: 1", "default": 1, **_whole},
        "--cpu": {"help": "rehearse on emulated devices", "action": "store_true"},
        "--nodes": {"help": "hosts of the run, each with as many processes", **_whole},
        "--node": {"help": "the number of this host, from 0", "type": int},
        "--address": {"help": "host 0, as the others reach it"},
        "--port": {"help": "of process 0", "type": int},
        "--logs": {"help": "a file for each process in this folder", "metavar": "FOLDER"},
        "--grace": {"help": "seconds to end in when one fails: 5", "default": 5.0, **_rate},
        "-m": {"help": "run a module", "dest": "is_module", "action": "store_true"},
        "program": {"help": "train.py, or with -m a module"},
        "arguments": {"help": "of the program", "nargs": argparse.REMAINDER},
    },
    "table": {
        "--params": {**_size, "default": [7.5e9, 128e9, 1e12], **_several},
        "--devices": {**_whole, "default": [1, 4, 16, 64, 256, 1024], **_several},
        "--stages": {"default": STAGES, **_stage, **_several},
        "--param-bytes": {"type": float, "default": 2},
        "--grad-bytes": {"type": float, "default": 2},
        "--optimizer-bytes": {"type": float, "default": 12},
    },
}


def parser(runs: Mapping[str, Callable[..., object]]) -> argparse.ArgumentParser:
    """Returns the parser of the command line, which sets `run` to the function of a command, and
    describes it by the first sentence of that one's docstring."""
    parser = argparse.ArgumentParser(prog="zerojax", description=SUMMARY)
    parser.add_argument("--version", action="version", version=zerojax.__version__)
    commands = parser.add_subparsers(required=True, metavar="command")
    # Which leaves texts below flags, and the command in them, as they are.
    style: Keywords = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    style["usage"] = "%(prog)s [options] ..."  # which errors print; --help lists the rest
    for name, run in runs.items():
        about = " ".join((run.__doc__ or "").split()).partition(".")[0]
        command = commands.add_parser(name, help=about, description=about, **style)
        command.set_defaults(run=run, hint=f"The columns: {command.prog} --explain")
        for flag, keywords in FLAGS[name].items():
            command.add_argument(flag, **keywords)
        if name not in COLUMNS:
            continue
        rows, without = list(COLUMNS[name].items()), f"{command.prog} without --explain."
        explained = Table(("column", "what it says"), rows, flexible=["what it says"])
        text = f"{explained}\n\nNothing was run. For the table itself: {without}"
        about = "explain the columns of the table, and exit"
        command.add_argument("--explain", action="version", version=text, help=about)
        command.add_argument("--json", action="store_true", help="print JSON")
        if "--gpus" in FLAGS[name]:
            command.epilog = f"Needs no GPU, but a compiler for GPUs:\n\n{aot._install_command()}"
    return parser
