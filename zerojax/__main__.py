"""The command line: python -m zerojax forecast | audit | doctor | table.

It exits with 0 where all is well, with 1 where something does not fit or breaks its contract, and
with 2 on bad input.
"""

import argparse
import dataclasses
import importlib
import json
import math
import operator
import os
import pathlib
import re
import signal
import sys
import traceback
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax

import zerojax
from zerojax import _figures, aot
from zerojax._audit.report import check_limits
from zerojax._forecast import doctor as _doctor, presets as _presets
from zerojax._forecast.forecast import Loss, working
from zerojax._forecast.memory_table import STAGES
from zerojax._hlo import gpus as _gpus
from zerojax._plan.precision import Precision
from zerojax._text import fitted, paragraphs, text_table
from zerojax._types import PyTree

SUMMARY = "ZeRO for JAX: forecast, audit, doctor, table. Tables fit the terminal, or COLUMNS."
OK, NOT_OK, BAD_INPUT = 0, 1, 2
REMAT = ("full",)
GB = 1e9
PAPER_PARAMS, PAPER_DEVICES = (7.5e9, 128e9, 1e12), (1, 4, 16, 64, 256, 1024)
LIBRARIES = ("site-packages", f"{os.sep}zerojax{os.sep}", "<frozen", f"lib{os.sep}python")
Model = tuple[Loss | Mapping[str, Loss], Callable[[], PyTree], PyTree, PyTree]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `zerojax ... | head` is no error
    if not os.path.exists("/proc/driver/nvidia"):
        # Otherwise a plugin that is only here to compile with complains that there is no GPU.
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    try:
        with fitted():
            return arguments.run(arguments)
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # of a user's module or of the compiler, in a line
        if os.environ.get("ZEROJAX_TRACEBACK"):
            raise
        print(f"zerojax: {described(error, vars(arguments))}", file=sys.stderr)
        return BAD_INPUT


def described(error: Exception, flags: Container[str] = ()) -> str:
    """Describes an error in one line, with its type and place if it is not of this package."""
    text = " ".join(str(error).split())[:600]
    frames = traceback.extract_tb(error.__traceback__)
    ours = pathlib.Path(__file__).parent
    if not frames or ours in pathlib.Path(frames[-1].filename).parents:
        return as_typed(text, flags) or type(error).__name__
    theirs = [f for f in frames if not any(part in f.filename for part in LIBRARIES)]
    where = f" ({theirs[-1].filename}:{theirs[-1].lineno})" if theirs else ""
    return f"{type(error).__name__}: {text}{where}. For the traceback, set ZEROJAX_TRACEBACK=1."


def as_typed(text: str, flags: Container[str]) -> str:
    """Respells arguments of Python calls, per_host=7, for the command line: --per-host 7."""

    def flag(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        value = " " if found[2] and found.string[found.end() :][:1].strip(".,: ") else ""
        return f"--{name.replace('_', '-')}{value}" if name in flags else found[0]

    return re.sub(r"^(\w+)(?= must)|\b(\w+)=", flag, text)


# -- commands


def forecast(arguments: argparse.Namespace) -> int:
    jax.config.update("jax_platforms", "cpu")  # nothing runs; other backends only take time
    losses, make_state, batch, rng = _model(arguments)
    half = _gpus.parse_count(arguments.gpus)[1].half
    precision = Precision(compute=half, param=half, master="float32") if arguments.master else None
    names = ("gpus", "stages", "accumulate", "tokens", "groups", "pad", "offload")
    options = _given(arguments, *names, "update", "activations")
    options |= {"per_host": _per_host(arguments), "rates": _rates(arguments)}
    found = zerojax.forecast(losses, make_state, batch, rng=rng, precision=precision, **options)
    _show(arguments, found.to_dict(), str(found))
    return OK if found.best else NOT_OK


def _per_host(arguments: argparse.Namespace) -> int:
    """Returns the GPUs of a host, which `--nodes` names together with the hosts."""
    if arguments.nodes is None:
        return arguments.per_host
    (hosts, local), (count, gpu) = arguments.nodes, _gpus.parse_count(arguments.gpus)
    if hosts * local != count:
        raise ValueError(
            f"--nodes {hosts}x{local} are {hosts * local} GPUs, and --gpus {arguments.gpus} are "
            f"{count}. Pass --gpus {hosts * local}x{gpu.name}."
        )
    return local


def _rates(arguments: argparse.Namespace) -> zerojax.Rates | None:
    """Returns the GPU's rates with those of other links, where any is named."""
    links = {"network": arguments.network, "host": arguments.host_link}
    given = {name: speed * GB for name, speed in links.items() if speed is not None}
    if "host" in given:  # what is named is what each GPU has
        given["host_memory"] = math.inf
    _, gpu = _gpus.parse_count(arguments.gpus)
    return dataclasses.replace(gpu.rates, **given) if given else None


def audit(arguments: argparse.Namespace) -> int:
    check_limits(arguments.max_peak_bytes, arguments.min_overlap)
    if arguments.plot:
        _figures.check_picture(arguments.plot)
    path = pathlib.Path(arguments.model)
    if path.exists() or arguments.model.endswith((".hlo", ".txt")):
        report = zerojax.audit(
            _hlo_text(path), **_given(arguments, "gpu", "per_host", "accumulate")
        )
    else:
        report = _audited(arguments)
    if arguments.plot:
        report.plot(arguments.plot)
    found = report.findings(**_given(arguments, "max_peak_bytes", "min_overlap"))
    broken = paragraphs([f"broken: {as_typed(line, vars(arguments))}" for line in found])
    text = f"{report}\n\n{broken}".rstrip()
    _show(arguments, report.to_dict() | {"findings": found}, text)
    return NOT_OK if found else OK


def _audited(arguments: argparse.Namespace) -> zerojax.Report:
    """Audits a model, given as module:function or as a preset, compiled for GPUs."""
    jax.config.update("jax_platforms", "cpu")
    losses, make_state, batch, rng = _model(arguments)
    mesh = zerojax.aot.mesh(arguments.gpus, per_host=arguments.per_host)
    placed = {"stage": arguments.stage, "pad": arguments.pad, "offload": arguments.offload}
    plan = zerojax.plan(make_state, mesh=mesh, **placed)
    loss = losses if callable(losses) else next(iter(losses.values()))
    options = _given(arguments, "accumulate", "activations")
    step = zerojax.train_step(loss, update=arguments.update or "auto", **options)
    with working(f"compiling stage {arguments.stage} for {arguments.gpus}"):
        batch = zerojax.aot.batch(batch, plan)
        return zerojax.audit(step, plan.abstract(), batch, rng, plan=plan, gpu=arguments.gpu)


def _hlo_text(path: pathlib.Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not text"
        raise ValueError(
            f"{path} cannot be read as HLO ({why}). Give a file with what compiled.as_text() "
            "returns, a preset, or module:function."
        ) from None


def doctor(arguments: argparse.Namespace) -> int:
    checks = _doctor.doctor()
    rows = [("", "", ""), *((check.status, check.name, check.text) for check in checks)]
    body = "\n".join(text_table(rows, flexible=(2,)).splitlines()[2:])
    found = [vars(check) for check in checks]
    _show(arguments, found, body)
    return NOT_OK if any(check.status == "fail" for check in checks) else OK


def table(arguments: argparse.Namespace) -> int:
    """Prints the paper's Table 1 by default; its Figure 1 is a row of it: 7.5B on 64 devices."""
    widths = _given(arguments, "param_bytes", "grad_bytes", "optimizer_bytes")
    found = zerojax.memory_table(**_given(arguments, "params", "devices", "stages"), **widths)
    _show(arguments, found.to_dict(), str(found))
    return OK


# -- what commands share


def _given(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in names}


def _model(arguments: argparse.Namespace) -> Model:
    """Returns loss or losses, make_state, batch and rng, of a preset or of the user's function."""
    if ":" not in arguments.model:
        count, gpu = _gpus.parse_count(arguments.gpus)
        preset = _presets.preset(arguments.model, gpu)
        batch = preset.batch(arguments.rows * count)
        return preset.losses(arguments.remat), preset.make_state, batch, None
    module, _, function = arguments.model.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ValueError(
            f"{arguments.model} cannot be imported: {error}. Give module:function, seen from this "
            "directory, where function() returns (loss_fn, make_state, batch) or, with a key, "
            "(loss_fn, make_state, batch, rng)."
        ) from None
    made = found()
    if not isinstance(made, tuple) or len(made) not in (3, 4):
        size = f" of {len(made)}" if isinstance(made, tuple) else ""
        raise ValueError(
            f"{arguments.model} returned {type(made).__name__}{size}. Return (loss_fn, make_state, "
            "batch) or (loss_fn, make_state, batch, rng)."
        )
    loss, make_state, batch, *rng = made
    return loss, make_state, batch, rng[0] if rng else None


def _show(arguments: argparse.Namespace, data: object, text: str) -> None:
    if arguments.json:
        text = json.dumps(data, indent=1, default=str)
    elif sys.stdout.isatty():
        text = styled(text)
    print(text)


def styled(text: str) -> str:
    """Adds a terminal's styles: headings, the lines over rules, are bold; what is broken is red."""
    text = re.sub(r"^.+$(?=\n-[- ]*$)", "\x1b[1m\\g<0>\x1b[0m", text, flags=re.MULTILINE)
    # With the indented lines in which it goes on.
    broken = r"^(broken:|warning:|fail|Nothing fits).*(\n  .*)*"
    return re.sub(broken, "\x1b[31m\\g<0>\x1b[0m", text, flags=re.MULTILINE)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="zerojax", description=SUMMARY)
    parser.add_argument("--version", action="version", version=zerojax.__version__)
    commands = parser.add_subparsers(required=True, metavar="command")

    for run, text, add_arguments in (
        (forecast, "forecasts memory, traffic and speed of a step, by compiling it", _forecasts),
        (audit, "lists what a compiled program sends and holds; checks its contract", _audits),
        (doctor, "checks what on this machine helps or hurts", lambda _: None),
        (table, "prints the ZeRO paper's memory table, or yours", _tables),
    ):
        command = commands.add_parser(run.__name__, help=text, description=text)
        command.add_argument("--json", action="store_true", help="print JSON")
        command.set_defaults(run=run)
        add_arguments(command)
    return parser


def _forecasts(parser: argparse.ArgumentParser) -> None:
    sizes = ", ".join(_presets.PRESETS)
    parser.add_argument("model", help=f"a model by size ({sizes}), or module:function")
    _gpu_arguments(parser)
    parser.add_argument("--nodes", type=nodes, help="8x8: hosts x GPUs of each, for --per-host")
    parser.add_argument("--network", type=rate, help="GB/s of one GPU's network card: 12.5")
    text = "GB/s between a GPU and its host's memory, in each direction: 25"
    parser.add_argument("--host-link", type=rate, help=text)
    parser.add_argument(
        "--groups", type=groups, help="params=gpu,grads=gpu,opt_state=gpu+node: axes node and gpu"
    )
    parser.add_argument("--stages", type=int, nargs="+", choices=STAGES)
    parser.add_argument("--accumulate", type=int, nargs="+", default=[1])
    parser.add_argument(
        "--remat", nargs="+", default=REMAT, choices=_presets.REMATS, help="of a preset: full"
    )
    parser.add_argument("--tokens", type=int, help="of a step, if not all of the batch's")
    parser.add_argument("--master", action="store_true", help="bf16 parameters, fp32 master copies")


def _audits(parser: argparse.ArgumentParser) -> None:
    text = "a file of HLO text, a preset, or module:function"
    parser.add_argument("model", metavar="program", help=text)
    parser.set_defaults(remat=REMAT)
    _gpu_arguments(parser)
    parser.add_argument("--gpu", help="whose speed to model for HLO text, such as H100")
    parser.add_argument("--stage", type=int, default=3, choices=STAGES)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--max-peak-bytes", type=size)
    parser.add_argument("--min-overlap", type=float)
    parser.add_argument("--plot", metavar="FILE", help="write the timeline as a picture")


def _tables(parser: argparse.ArgumentParser) -> None:
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
        raise argparse.ArgumentTypeError(f"{text!r} is not kind=axis+axis for each of some kinds")
    return {kind: tuple(filter(None, axes.split("+"))) for kind, _, axes in found}


def rate(text: str) -> float:
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be positive")
    return float(text)


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be positive")
    return int(text)


def _gpu_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"Needs no GPU, but a compiler for GPUs:\n\n{aot.install_command()}"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter  # the command stays one line
    parser.add_argument("--gpus", default="8xH100", help="such as 64xH100 (default %(default)s)")
    parser.add_argument("--per-host", type=int, default=8)
    text = "replicate leaves that the GPUs do not divide, instead of padding them"
    parser.add_argument("--no-pad", action="store_false", dest="pad", help=text)
    names = operator.methodcaller("split", ",")
    parser.add_argument("--offload", type=names, help="what rests in host memory: opt_state,params")
    parser.add_argument("--activations", type=names, help="where layers keep them: host")
    parser.add_argument("--update", help="of parameters: backward, after or auto")
    parser.add_argument("--rows", type=positive, default=4, help="of a preset: sequences per GPU")


if __name__ == "__main__":
    sys.exit(main())
