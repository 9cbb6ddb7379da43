"""The command line: python -m zerojax forecast | study | audit | doctor | table.

It exits with 0 where all is well, with 1 where something does not fit or breaks its contract, and
with 2 on bad input.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import signal
import sys
import traceback
from collections.abc import Container, Sequence
from typing import Any

import jax

import zerojax
from zerojax import _figures
from zerojax._loss.layered import ORDERS
from zerojax._plan.precision import Precision
from zerojax._progress import hinting, working
from zerojax._table import Table, fitted, paragraphs
from zerojax.tools._audit.report import check_limits
from zerojax.tools._forecast import (
    cache as _cache,
    doctor as _doctor,
    flags as _flags,
    model as _models,
    network as _network,
    presets as _presets,
)
from zerojax.tools._forecast.forecast import mesh_of, names_levels, unrolled
from zerojax.tools._forecast.memory_table import each_once
from zerojax.tools._forecast.model import Model
from zerojax.tools._forecast.steps import functional
from zerojax.tools._hlo import known as _known
from zerojax.tools._hlo.gpus import Gpu
from zerojax.tools._study import flags as _study_flags
from zerojax.tools._study.models import Given

OK, NOT_OK, BAD_INPUT = 0, 1, 2
GB = 1e9
DECIDED = ["stages", "groups", "offload", "accumulate", "order", "regather", "gather", "reduce"]
DECIDED += ["update", "activations"]  # by --choose
OF_MODELS = {"--set": "settings", "--config": "config", "--groups": "groups", "--nodes": "nodes"}
OF_MODELS |= {"--master": "master", "--compute": "compute", "--axis": "axis"}
LIBRARIES = ("site-packages", f"{os.sep}zerojax{os.sep}", "<frozen", f"lib{os.sep}python")


def main(argv: Sequence[str] | None = None) -> int:
    with fitted():
        described = study, _study_flags.TEXT, _study_flags.arguments
        parser = _flags.parser(forecast, audit, doctor, table, described)
        return _run(parser.parse_args(argv))


def _run(arguments: argparse.Namespace) -> int:
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `zerojax ... | head` is no error
    if not os.path.exists("/proc/driver/nvidia"):
        # Otherwise a plugin that is only here to compile with complains that there is no GPU.
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    try:
        with _cache.kept(_cache.folder() if getattr(arguments, "cache", False) else None):
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
    """Respells arguments, per_host=7, as flags, --per-host 7, but for those inside of calls."""

    def flag(found: re.Match[str]) -> str:
        name = found[1] or found[2] or ""
        value = " " if found[2] and found.string[found.end() :][:1].strip(".,: ") else ""
        return f"--{name.replace('_', '-')}{value}" if name in flags else found[0]

    return re.sub(r"\w\([^()]*\)|^(\w+)(?= must)|\b(\w+)=", flag, text)


# -- commands


def forecast(arguments: argparse.Namespace) -> int:
    jax.config.update("jax_platforms", "cpu")  # nothing runs; other backends only take time
    losses, make_state, batch, rng = _model(arguments)
    names = ("gpus", "stages", "accumulate", "order", "tokens", "groups", "pad", "offload")
    options = _given(arguments, *names, "regather", "update", "activations", "axis")
    options |= {"per_host": _per_host(arguments), "rates": _rates(arguments)}
    options["precision"] = _precision(arguments, arguments.master)
    _tell_of_network(arguments, options["rates"])
    if arguments.choose:
        return _chosen(arguments, (losses, make_state, batch, rng), options)
    found = zerojax.forecast(losses, make_state, batch, rng=rng, **options)
    _show(arguments, found.to_dict(), str(found))
    return OK if found.best else NOT_OK


def _chosen(arguments: argparse.Namespace, model: Model, options: dict[str, Any]) -> int:
    """Prints the fastest way to train the model."""
    losses, make_state, batch, rng = model
    unset = (None, [1], ORDERS[0])
    if named := [name for name in DECIDED if getattr(arguments, name) not in unset]:
        flags = ", ".join(f"--{name}" for name in named)
        raise ValueError(f"--choose decides {flags} itself. Leave out one or the other.")
    names = ("gpus", "tokens", "precision", "rates", "per_host", "axis")
    given = {name: options[name] for name in names}
    found = zerojax.choose(losses, make_state, batch, rng=rng, **given)
    _show(arguments, found.to_dict(), str(found))
    return OK if found.best or found.best_with_codes else NOT_OK


def study(arguments: argparse.Namespace) -> int:
    if arguments.plot:
        _figures.check_picture(arguments.plot)
    jax.config.update("jax_platforms", "cpu")
    names = ("gpus", "stages", "rows", "out", "remat", "per_host", "cache", "accumulate", "order")
    names += ("pad", "offload", "regather", "update", "activations", "axis")
    options: dict[str, Any] = _given(arguments, *names) | {"rates": _rates(arguments)}
    options["precision"] = _precision(arguments, arguments.master)
    _tell_of_network(arguments, options["rates"])
    given = {name: value for name, value in options.items() if value is not None}
    found = zerojax.study(_models_of(arguments), **given)
    if arguments.plot:
        found.plot(arguments.plot)
    _show(arguments, found.to_dict(), str(found))
    whole = not any(cell.failed for cell in found.cells)
    return OK if whole and any(cell.fitting for cell in found.cells) else NOT_OK


def _models_of(arguments: argparse.Namespace) -> dict[str, Given]:
    """Returns the models of a study by name; presets with other fields are named with these."""
    found: dict[str, Given] = {}
    for name in arguments.models:
        if ":" in name:
            made = _models.of_function(name, arguments.config, arguments.settings)
            found[name] = made[:3] if made[3] is None else made  # type: ignore  # checked later
        else:
            _refuse_own(arguments, name)
            changed = _models.changed_preset(name, arguments.settings)
            found[" ".join([name, *(f"{k}={v}" for k, v in arguments.settings)])] = changed
    return found


def _tell_of_network(arguments: argparse.Namespace, rates: zerojax.Rates | None) -> None:
    """Tells XLA of a slow network, before anything compiles."""
    if _network.is_misjudged(dataclasses.replace(_gpu(arguments), given_rates=rates)):
        _network.tell(os.environ)


def _gpu(arguments: argparse.Namespace) -> Gpu:
    """Returns the kind of GPU that is named, of several the first."""
    return _known.parse_count(
        arguments.gpus[0] if isinstance(arguments.gpus, list) else arguments.gpus
    )[1]


def _precision(arguments: argparse.Namespace, master: bool = False) -> Precision | None:
    """Returns the precision that flags name: dtypes, codes on the wire, narrow parameters."""
    half = _gpu(arguments).half
    named = {"compute": half, "param": half, "master": "float32"} if master else {}
    given = _given(arguments, "compute", "gather", "reduce")
    named |= {name: value for name, value in given.items() if value is not None}
    return Precision(**named) if named else None


def _per_host(arguments: argparse.Namespace) -> int:
    """Returns the GPUs of a host, which `--nodes` names together with the hosts."""
    if arguments.nodes is None:
        return arguments.per_host
    (hosts, local), (count, gpu) = arguments.nodes, _known.parse_count(arguments.gpus)
    if hosts * local != count:
        raise ValueError(
            f"--nodes {hosts}x{local} are {hosts * local} GPUs, and --gpus {arguments.gpus} are "
            f"{count}. Pass --gpus {hosts * local}x{gpu.name}."
        )
    return local


def _rates(arguments: argparse.Namespace, gpu: Gpu | None = None) -> zerojax.Rates | None:
    """Returns the GPU's rates with those of other links, where any is named."""
    links = {"network": arguments.network, "host": arguments.host_link}
    given = {name: speed * GB for name, speed in links.items() if speed is not None}
    return zerojax.rates_of((gpu or _gpu(arguments)).name, **given) if given else None


def audit(arguments: argparse.Namespace) -> int:
    check_limits(arguments.max_peak_bytes, arguments.min_overlap)
    if arguments.plot:
        _figures.check_picture(arguments.plot)
    path = pathlib.Path(arguments.model)
    if path.exists() or arguments.model.endswith((".hlo", ".txt")):
        report = _audited_text(path, arguments)
    else:
        report = _audited(arguments)
    if arguments.plot:
        report.plot(arguments.plot)
    found = report.findings(**_given(arguments, "max_peak_bytes", "min_overlap"))
    broken = paragraphs([f"broken: {as_typed(line, vars(arguments))}" for line in found])
    text = f"{report}\n\n{broken}".rstrip()
    _show(arguments, report.to_dict() | {"findings": found}, text)
    return NOT_OK if found else OK


def _audited_text(path: pathlib.Path, arguments: argparse.Namespace) -> zerojax.Report:
    """Audits a file of HLO, compiled by whomever."""
    if named := [flag for flag, name in OF_MODELS.items() if getattr(arguments, name)]:
        raise ValueError(f"{path} is compiled already. Leave out {', '.join(named)}.")
    if arguments.gpu is None and _rates(arguments):
        raise ValueError("links are those of a GPU. Name it, as in --gpu H100.")
    given = _given(arguments, "per_host", "accumulate")
    return zerojax.audit(_hlo_text(path), gpu=_audited_gpu(arguments), **given)


def _audited(arguments: argparse.Namespace) -> zerojax.Report:
    """Audits a model, given as module:function or as a preset, compiled for GPUs."""
    jax.config.update("jax_platforms", "cpu")
    losses, make_state, batch, rng = _model(arguments)
    losses, make_state, rng = functional(losses, make_state, rng)
    options = _given(arguments, "accumulate", "order", "activations", "update", "regather")
    loss, options, placed = _models.ingredients(losses, arguments.stage, options)
    placed |= _given(arguments, "pad", "offload", "groups")
    precision = _precision(arguments, arguments.master) or placed.pop("precision")
    placed |= {"precision": precision}
    levels = names_levels(options | placed)
    mesh = mesh_of(arguments.gpus, _per_host(arguments), levels, arguments.axis)
    _tell_of_network(arguments, _rates(arguments))
    placed |= {"mesh": mesh, "axis": mesh.axis_names}
    plan = zerojax.plan(make_state, **placed)
    step = zerojax.train_step(loss, plan=plan, **options)
    doing = f"compiling stage {plan.stage} for {arguments.gpus}"
    with working(doing), hinting(unrolled(plan)):
        batch = zerojax.aot.batch(batch, plan, batch_specs=options.get("batch_specs"))
        made = _cache.compiled(step, plan.abstract(), batch, rng, plan)
        gpu = _audited_gpu(arguments)
        return zerojax.audit(made, plan.abstract(), batch, rng, plan=plan, gpu=gpu)


def _audited_gpu(arguments: argparse.Namespace) -> Gpu | None:
    """Returns the GPU whose speed is modelled, if one or its links are named."""
    named = None if arguments.gpu is None else _known.named(arguments.gpu)
    rates = _rates(arguments, named)
    return dataclasses.replace(named or _gpu(arguments), given_rates=rates) if rates else named


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
    header = "status", "name", "text"
    rows = [(check.status, check.name, check.text) for check in checks]
    body = str(Table(header, rows, flexible=header[2:], whole=header[2:]))
    found = [vars(check) for check in checks]
    _show(arguments, found, "\n".join(body.splitlines()[2:]))
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
    name, settings = arguments.model, arguments.settings
    if ":" in name:
        return _models.of_function(name, arguments.config, settings)
    _refuse_own(arguments, name)
    if odd := [count for count in each_once(arguments.accumulate) if arguments.rows % count]:
        raise ValueError(
            f"--rows {arguments.rows} of each GPU do not divide into --accumulate {odd[0]} "
            f"microbatches. Pass --rows {odd[0]}, or a multiple of it."
        )
    remats = arguments.remat or (_presets.REMATS if arguments.choose else _flags.REMAT)
    return _models.of_preset(name, arguments.gpus, arguments.rows, remats, settings)


def _refuse_own(arguments: argparse.Namespace, name: str) -> None:
    """Raises where a preset is given what is for models of the user's."""
    if arguments.config is not None:
        raise ValueError(f"--config is for module:function, and {name!r} is none.")
    if arguments.compute is not None:
        raise ValueError(
            f"--compute is for module:function, and {name!r} computes in the 16 bits of the GPU. "
            "Leave it out."
        )


def _show(arguments: argparse.Namespace, data: object, text: str) -> None:
    if arguments.json:
        text = json.dumps(data, indent=1, default=str)
    elif sys.stdout.isatty():
        hint = getattr(arguments, "hint", "")
        text = styled(f"{text}\n\n{hint}".rstrip())
    print(text)


def styled(text: str) -> str:
    """Adds a terminal's styles: headings, the lines over rules, are bold; what is broken is red."""
    text = re.sub(r"^.+$(?=\n-[- ]*$)", "\x1b[1m\\g<0>\x1b[0m", text, flags=re.MULTILINE)
    # With the indented lines in which it goes on.
    broken = r"^(broken:|warning:|fail|Nothing fits).*(\n  .*)*"
    return re.sub(broken, "\x1b[31m\\g<0>\x1b[0m", text, flags=re.MULTILINE)


if __name__ == "__main__":
    sys.exit(main())
