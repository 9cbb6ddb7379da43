"""The commands of the command line and their flags."""

import argparse
import ast
import math
import operator
import pathlib
import re
from collections.abc import Callable, Mapping

import zerojax
from zerojax import aot
from zerojax._loss.layered import ORDERS
from zerojax._table import explained
from zerojax.tools._audit import report as _report
from zerojax.tools._forecast import (
    memory_table as _memory_table,
    model as _model,
    presets as _presets,
    result as _result,
)
from zerojax.tools._forecast.memory_table import STAGES

SUMMARY = (
    "ZeRO for JAX: forecast, study, audit, doctor, table. Tables fit the terminal, or COLUMNS."
)
REMAT = ("full",)
PAPER_PARAMS, PAPER_DEVICES = (7.5e9, 128e9, 1e12), (1, 4, 16, 64, 256, 1024)
ORDER = "microbatches (one after another) or layers (layer by layer)"
Command = Callable[[argparse.Namespace], int]
# A command, what it does, and a function that adds its arguments to its parser.
Described = tuple[Command, str, Callable[[argparse.ArgumentParser], None]]


def parser(
    forecast: Command, audit: Command, doctor: Command, table: Command, *others: Described
) -> argparse.ArgumentParser:
    """Returns the parser of the command line, which sets `run` to one of these functions."""
    parser = argparse.ArgumentParser(prog="zerojax", description=SUMMARY)
    parser.add_argument("--version", action="version", version=zerojax.__version__)
    commands = parser.add_subparsers(required=True, metavar="command")

    for run, text, add_arguments in (
        (forecast, "forecasts memory, traffic and speed of a step, by compiling it", _forecasts),
        (audit, "lists what a compiled program sends and holds; checks its contract", _audits),
        (doctor, "checks what on this machine helps or hurts", lambda _: None),
        (table, "prints the ZeRO paper's memory table, or yours", _tables),
        *others,
    ):
        command = commands.add_parser(run.__name__, help=text, description=text)
        command.add_argument("--json", action="store_true", help="print JSON")
        command.set_defaults(run=run)
        add_arguments(command)
    return parser


class _Explain(argparse.Action):
    """Prints a sentence for each column of a command's table (`const`), and exits: none of the
    other arguments is read."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(explained(self.const or {}))
        print(f"\nNothing was run. For the table itself: {parser.prog} without --explain.")
        parser.exit()


def explains(parser: argparse.ArgumentParser, columns: Mapping[str, str]) -> None:
    text = "say what each column of the table is, and do nothing else"
    parser.add_argument("--explain", action=_Explain, nargs=0, const=columns, help=text)
    parser.set_defaults(hint=f"The columns: {parser.prog} --explain")


def _forecasts(parser: argparse.ArgumentParser) -> None:
    explains(parser, _result.EXPLAINED)
    sizes = ", ".join(_presets.PRESETS)
    parser.add_argument(
        "model", help=f"a model by size ({sizes}), module:function or file.py:function"
    )
    _gpu_arguments(parser)
    _machine_arguments(parser)
    parser.add_argument("--stages", type=int, nargs="+", choices=STAGES)
    parser.add_argument("--accumulate", type=int, nargs="+", default=[1])
    order_argument(parser, nargs="+")
    parser.add_argument(
        "--remat", nargs="+", help="of a preset: none, dots, full (default), or kept names: qkv+up"
    )
    text = "find the fastest way that fits, and print the Python for it"
    parser.add_argument("--choose", action="store_true", help=text)
    parser.add_argument("--tokens", type=int, help="of a step, if not all of the batch's")


def _machine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=nodes, help="8x8: hosts x GPUs of each, for --per-host")
    link_arguments(parser)
    parser.add_argument(
        "--groups", type=groups, help="params=gpu,grads=gpu,opt_state=gpu+node: axes node and gpu"
    )


def link_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--network", type=rate, help="GB/s of one GPU's network card: 12.5")
    text = "GB/s between a GPU and its host's memory, in each direction: 25"
    parser.add_argument("--host-link", type=rate, help=text)
    parser.add_argument("--master", action="store_true", help="bf16 parameters, fp32 master copies")


def _audits(parser: argparse.ArgumentParser) -> None:
    explains(parser, _report.EXPLAINED)
    text = "a file of HLO text, a preset, module:function or file.py:function"
    parser.add_argument("model", metavar="program", help=text)
    parser.set_defaults(remat=REMAT, choose=False)
    _gpu_arguments(parser)
    _machine_arguments(parser)
    parser.add_argument("--gpu", help="whose speed to model for HLO text, such as H100")
    parser.add_argument("--stage", type=int, default=3, choices=STAGES)
    parser.add_argument("--accumulate", type=int, default=1)
    order_argument(parser)
    parser.add_argument("--max-peak-bytes", type=size)
    parser.add_argument("--min-overlap", type=float)
    parser.add_argument("--plot", metavar="FILE", help="write the timeline as a picture")


def order_argument(
    parser: argparse.ArgumentParser, nargs: str | None = None, default: str | None = ORDERS[0]
) -> None:
    options = {"default": default, "choices": ORDERS, "metavar": "ORDER", "help": ORDER}
    parser.add_argument("--order", nargs=nargs, **options)


def _tables(parser: argparse.ArgumentParser) -> None:
    explains(parser, _memory_table.EXPLAINED)
    parser.add_argument("--params", type=size, nargs="+", default=list(PAPER_PARAMS))
    parser.add_argument("--devices", type=int, nargs="+", default=list(PAPER_DEVICES))
    parser.add_argument("--stages", type=int, nargs="+", default=list(STAGES), choices=STAGES)
    parser.add_argument("--param-bytes", type=float, default=2)
    parser.add_argument("--grad-bytes", type=float, default=2)
    parser.add_argument("--optimizer-bytes", type=float, default=12)


def size(text: str) -> float:
    """Parses '7.5b' or '7.5e9' as 7.5e9."""
    units = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
    unit = units.get(text[-1:].lower())
    return float(text[:-1]) * unit if unit else float(text)


def nodes(text: str) -> tuple[int, int]:
    """Parses '8x4', eight hosts of four GPUs each."""
    found = re.fullmatch(r"([1-9]\d{0,8})x([1-9]\d{0,8})", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not hosts x GPUs of each, such as 8x8")
    return int(found[1]), int(found[2])


def groups(text: str) -> dict[str, tuple[str, ...]]:
    """Parses 'params=gpu,opt_state=gpu+node'; 'params=' names no axes."""
    found = [part.partition("=") for part in text.split(",")]
    kinds = {kind for kind, _, _ in found}
    if not all(sign for _, sign, _ in found) or len(kinds) < len(found):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not kind=axis+axis for each of some kinds, such as "
            "params=gpu,grads=gpu,opt_state=gpu+node"
        )
    return {kind: tuple(filter(None, axes.split("+"))) for kind, _, axes in found}


def setting(text: str) -> _model.Setting:
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


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be positive")
    return int(text)


def _gpu_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", default="8xH100", help="such as 64xH100 (default %(default)s)")
    parser.add_argument("--rows", type=positive, default=4, help="of a preset: sequences per GPU")
    step_arguments(parser)


def step_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"Needs no GPU, but a compiler for GPUs:\n\n{aot.install_command()}"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter  # the command stays one line
    text = "an argument of the function, or a field of its config or of a preset; repeatable"
    parser.add_argument(
        "--set",
        action="append",
        type=setting,
        default=[],
        dest="settings",
        metavar="NAME=VALUE",
        help=text,
    )
    text = "the function's arguments as .json, or a .py file whose get_config() returns its one"
    parser.add_argument("--config", type=pathlib.Path, metavar="FILE", help=text)
    text = "compile anew, and keep nothing of it for the next time"
    parser.add_argument("--no-cache", action="store_false", dest="cache", help=text)
    parser.add_argument("--per-host", type=int, default=8)
    text = "what the loss calls the axis of all GPUs, if not data; or those of hosts, their GPUs"
    parser.add_argument("--axis", type=axis, metavar="NAME[,NAME]", help=text)
    text = "replicate leaves that the GPUs do not divide, instead of padding them"
    parser.add_argument("--no-pad", action="store_false", dest="pad", help=text)
    names = operator.methodcaller("split", ",")
    parser.add_argument("--offload", type=names, help="what rests in host memory: opt_state,params")
    parser.add_argument("--activations", type=names, help="where layers keep them: host")
    parser.add_argument("--update", help="of parameters: backward, after or auto")
    text = "weights in backward: true, over all GPUs; false, not at all; gpu, inside hosts"
    parser.add_argument("--regather", type=regather, help=text)
    text = "dtype that module:function computes in: bfloat16 (default: as its loss does)"
    parser.add_argument("--compute", metavar="DTYPE", help=text)
    text = "as codes of few bits: int8 or float8_e4m3fn"
    parser.add_argument("--gather", metavar="CODES", help=f"weights travel {text}")
    text = "dtype that gradients are summed in, or codes between hosts: int8, int4, float8_e4m3fn"
    parser.add_argument("--reduce", metavar="DTYPE", help=text)
