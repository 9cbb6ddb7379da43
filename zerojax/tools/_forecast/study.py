"""`study`: how models scale, by a forecast of each stage on each number of GPUs, kept in a file."""

import bisect
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from zerojax import _fingerprint, aot
from zerojax._declared import Options, option, takes
from zerojax._figures import Figure
from zerojax._plan import planner as _planner
from zerojax._progress import progress
from zerojax._step.step import train_step
from zerojax._table import Cell, Printed, Table, human_bytes
from zerojax.tools._forecast import cache as _cache, picture as _picture, presets as _presets
from zerojax.tools._forecast.case import CASE_COLUMNS, Case, Column, case_table
from zerojax.tools._forecast.forecast import (
    STAGES,
    Workload,
    WorkOptions,
    axis_names,
    changed_options,
    each_once,
    gpu_of,
    names_levels,
)
from zerojax.tools._forecast.models import (
    Given,
    Model,
    checked_models,
    is_of_nnx,
    parts_of_nnx,
)
from zerojax.tools._forecast.picture import LARGEST
from zerojax.tools._forecast.presets import Gpt
from zerojax.tools._hlo.gpus import Gpu, Rates

MARK, FORMAT = "zerojax_study", 1
GROWS = 1.01  # what counts as more throughput of each GPU
DOUBLINGS = 14
FIRST_ROWS = 4  # of each microbatch, that are tried first


def _number(value: float) -> str:
    """Formats a number with three digits, or all those before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _if_it_fits(value: Callable[[Case], Cell]) -> Callable[[Case], Cell]:
    return lambda case: value(case) if case.fits else None


STUDY_COLUMNS = {
    "model": Column(lambda case: case.model, "The model: a preset, or one of your own."),
    "GPUs": Column(lambda case: case.gpus, "How many of which GPU."),
    "stage": CASE_COLUMNS["stage"],
    "rows": Column(
        lambda case: f"max {case.rows or ''}".rstrip() if case.asked == LARGEST else case.asked,
        "Rows of the batch, such as sequences, on each GPU; 'max': the most that fit.",
    ),
    "peak": CASE_COLUMNS["peak"]._replace(value=lambda case: None if case.failed else case.peak),
    "TFLOP/s": Column(
        lambda case: case.tflops if case.fits else "failed" if case.failed else "no room",
        "What each GPU does of the FLOPs that the model needs, without what is computed again.",
        _number,
    ),
    **{
        name: CASE_COLUMNS[name]._replace(value=_if_it_fits(CASE_COLUMNS[name].value))
        for name in ("MFU", "tokens/s")
    },
    "exposed": Column(
        _if_it_fits(lambda case: (case.exposed_seconds + case.waited_seconds) / case.step_seconds),
        "The part of the step in which a GPU waits, for communication or for the host's memory.",
        "{:.0%}".format,
    ),
}
STUDY_EXPLAINED = {title: column.about for title, column in STUDY_COLUMNS.items()}


@dataclasses.dataclass(frozen=True, repr=False)
class Study(Printed):
    """The result of `zerojax.tools.study`: print or `plot` it. `cases` are those of forecasts, in
    the order that was asked for: by model, then by GPUs, stages and rows."""

    cases: tuple[Case, ...]

    @property
    def super_linear(self) -> list[tuple[Case, Case]]:
        """The models and stages of which more GPUs do more each, with the largest rows: on the
        fewest GPUs and on the most."""
        lines: dict[tuple, list[Case]] = {}
        for case in sorted(self.cases, key=lambda case: case.count):
            if case.asked == LARGEST and case.fits:
                lines.setdefault((case.model, case.kind.name, case.stage), []).append(case)
        ends = [(line[0], line[-1]) for _, line in sorted(lines.items())]
        return [(first, last) for first, last in ends if last.tflops > GROWS * first.tflops]

    def best(self, model: str) -> Case | None:
        """The case in which each GPU does most for a model; None where none fits."""
        fit = (case for case in self.cases if case.model == model and case.fits)
        return max(fit, key=lambda case: case.tflops, default=None)

    def to_dict(self) -> dict[str, Any]:
        growing = [_growth(*ends) for ends in self.super_linear]
        return {"cases": [case.to_dict() for case in self.cases], "super_linear": growing}

    def plot(self, path: str | None = None) -> Figure:
        """Draws with matplotlib, for each model, how throughput changes with the number of GPUs;
        saves the figure to `path`. It is narrow, to be read on a phone."""
        return _picture.draw(self.cases, path)

    def table(self) -> Table:
        options = {
            "title": [self._title()],
            "notes": list(self._advice()),
            "right": list(STUDY_COLUMNS)[2:],
        }
        return case_table(STUDY_COLUMNS, self.cases, optional=["exposed"], keys=4, **options)

    def _title(self) -> str:
        settings = dict.fromkeys(case.settings for case in self.cases if case.settings)
        about = ["one training step; bytes, rows, TFLOP/s and MFU of each GPU; times modelled"]
        wide = next((case.wide_matmuls for case in self.cases if case.wide_matmuls), "")
        return "; ".join([*about, *settings, *([f"matmuls: {wide}"] if wide else [])])

    def _advice(self) -> Iterator[str]:
        yield from (f"Failed: {_named(case)}: {case.failed}" for case in self.cases if case.failed)
        for model in dict.fromkeys(case.model for case in self.cases):
            compiled = [case for case in self.cases if case.model == model and not case.failed]
            if best := self.best(model):
                yield (
                    f"Most of each GPU for {model}: {_number(best.tflops)} TFLOP/s, at stage "
                    f"{best.stage} on {best.gpus} with {best.rows} rows."
                )
            elif compiled:
                least = human_bytes(min(case.peak for case in compiled))
                yield (
                    f"Nothing fits of {model}. The least is {least}: use more GPUs, a higher "
                    "stage, fewer rows, or the host's memory (offload=)."
                )
        yield from (_growth(*ends) for ends in self.super_linear)


def _named(case: Case) -> str:
    return f"{case.model} on {case.gpus}, stage {case.stage}, {case.asked} rows"


def _growth(first: Case, last: Case) -> str:
    few, many, kind = first.count, last.count, first.kind
    return (
        f"Super-linear: {first.model} at stage {first.stage}. From {few} to {many} {kind.name}s, "
        f"each GPU does {_number(first.tflops)} and then {_number(last.tflops)} TFLOP/s, with "
        f"{first.rows} and then {last.rows} rows."
    )


def _cases_of(rows: Any) -> Any:
    for count in each_once(rows):
        if count != LARGEST and (not isinstance(count, int) or count < 1):
            raise ValueError(f"rows={count!r} must be positive, or {LARGEST!r}: rows of each GPU.")
    return rows


def _stages(stages: Any) -> Any:
    if odd := [stage for stage in each_once(stages) if stage not in STAGES]:
        raise ValueError(f"stages={odd[0]!r} is none of {STAGES}.")
    return stages


def _one_count(count: object) -> object:
    if count is not None and (not isinstance(count, int) or count < 1):
        raise ValueError(f"accumulate={count!r} must be one positive number of microbatches.")
    return count


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyOptions(WorkOptions):
    """What `study` tries."""

    gpus: str | Sequence[str] = dataclasses.field(
        metadata={"text": 'such as "64xH100", one or several.'}
    )
    stages: int | Sequence[int] = option((1, 2, 3), "one or several.", check=_stages)
    rows: int | str | Sequence[int | str] = option(
        LARGEST,
        """of each GPU, one or several numbers, or "largest": as many as fit, all numbers up to 16,
        and eight between two powers of two.""",
        check=_cases_of,
    )
    out: str | os.PathLike[str] | None = option(
        None,
        """a file of JSON, to which each result is written at once. A later call finds there what
        has been done, and adds what has not, or what it no longer matches.""",
    )
    remat: str = option(
        "full",
        """what presets compute again in backward: "full", "dots" or "none"; or what they keep,
        such as "qkv+up".""",
    )
    cache: bool = option(
        True,
        "keep the programs that are compiled, as the command line does, in the user's cache.",
    )
    accumulate: int | None = option(  # type: ignore[reportIncompatibleVariableOverride]
        None, "microbatches of a step; by default 1, or those of a step of nnx.", check=_one_count
    )

    def __post_init__(self) -> None:
        Options.__post_init__(self)  # the steps check what holds for one with its own options

    def of_steps(self) -> dict[str, Any]:
        """Returns what steps are made with, where that is not as by default."""
        own = {field.name for field in dataclasses.fields(WorkOptions)} - {"rates"}
        return {name: value for name, value in changed_options(self).items() if name in own}


@takes(StudyOptions)
def study(models: str | Sequence[str] | Mapping[str, Given], options: StudyOptions) -> Study:
    """Forecasts models on several numbers of GPUs, at several stages, with several batches.

    Print the result, or `plot` it: how the throughput of each GPU changes with their number. With
    the "largest" rows, what a stage frees of a GPU's memory goes into its batch.

    Arguments:
        models: presets by name, or a dict of models of your own: a name for each, and `(loss_fn,
            make_state, batch)`, where `batch(rows)` returns a global batch of so many rows. A step
            of `zerojax.nnx.train_step` and the function that makes its model and optimizer stand in
            for the first two.
        {options}

    Example:
        >>> def make_state():
        ...     params = {"w": jnp.zeros((4, 512, 512))}
        ...     return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
        >>> def loss_fn(params, batch):
        ...     return jnp.mean(jax.lax.scan(lambda x, w: (x @ w, None), batch, params["w"])[0])
        >>> def batch(rows):
        ...     return jax.ShapeDtypeStruct((rows, 512), jnp.float32)
        >>> models = {"mine": (loss_fn, make_state, batch)}
        >>> gpus = ["8xH100", "16xH100"]
        >>> study = zerojax.tools.study(models, gpus=gpus, stages=3, rows=256)
        >>> [(case.gpus, case.fits) for case in study.cases]
        [('8xH100', True), ('16xH100', True)]
    """
    models = checked_models(models)
    sizes, stages, rows = map(each_once, (options.gpus, options.stages, options.rows))
    _check_grid(sizes, stages, rows, options.rates)
    run = _Grid(models, options)
    asked = [run.asked(*way) for way in itertools.product(models, sizes, stages, rows)]
    path = None if options.out is None else pathlib.Path(options.out)
    kept = {} if path is None else {_place(case): case for case in _read(path)}
    missing = [case for case in asked if not _is_done(case, kept)]
    if missing:
        aot.check_packages()

    def compiled(case: Case) -> None:
        kept.pop(_place(case), None)  # the newest are last
        kept[_place(case)] = run.compiled(case)
        if path is not None:
            _write(path, kept.values())

    with _cache.kept(_cache.folder() if options.cache else None):
        progress(missing, lambda case: f"compiling {_named(case)}", compiled)
    return Study(tuple(kept[_place(case)] for case in asked))


def _check_grid(
    gpus: Sequence[str], stages: Sequence[int], rows: Sequence[int | str], rates: Rates | None
) -> None:
    if not (gpus and stages and rows):
        raise ValueError(f"nothing to try: gpus={gpus}, stages={stages}, rows={rows}.")
    kinds = {gpu_of(size, rates).name for size in gpus}
    if rates is not None and len(kinds) > 1:
        raise ValueError(
            f"these are the rates of one GPU, and gpus= names {', '.join(sorted(kinds))}. Make a "
            "study of each."
        )


# -- its cases


def _digest(model: Model) -> str:
    """Digests the step of one device: the model, its loss, its optimizer and their numbers."""
    options = WorkOptions(**model.options)
    axes = axis_names(options.axis, names_levels(options))
    device = np.array(jax.devices()[:1]).reshape((1,) * len(axes))
    mesh = Mesh(device, axes, axis_types=(AxisType.Auto,) * len(axes))
    tx, mutable = options.tx, options.mutable
    plan = _planner.plan(model.make_state, stage=0, mesh=mesh, axis=axes, tx=tx)
    step = train_step(model.loss, plan=plan, tx=tx, mutable=mutable)
    args = [plan.abstract(), aot.batch(model.batch(1), plan)]
    args += [] if model.rng is None else [aot.batch(model.rng, plan)]
    program = _fingerprint.of_program(step.without_options.trace(*args).jaxpr)
    return hashlib.sha256(f"{_fingerprint.of_shapes(args)}\n{program}".encode()).hexdigest()


def _settings(model: Model, gpu: Gpu) -> str:
    """Says what else than usual a model's steps are made with."""
    hidden = {"tx", *(["mutable"] if "mutable" in model.own else [])}
    options = changed_options(WorkOptions(**model.options))
    changed = [f"{k}={v!r}" for k, v in options.items() if k not in hidden]
    speed = [f"network cards of {gpu.rates.network / 1e9:g} GB/s"] if gpu.given_rates else []
    return ", ".join([*([f"remat {model.remat}"] if model.remat else []), *changed, *speed])


@dataclasses.dataclass
class _Grid:
    """Compiles the cases of a study, each number of rows once."""

    models: Mapping[str, Given]
    options: StudyOptions

    def __post_init__(self) -> None:
        self.rates, self.changed = self.options.rates, self.options.of_steps()
        self.model = functools.cache(self._model)
        self.case = functools.cache(self._case)
        self.digest = functools.cache(_digest)

    def _model(self, name: str, kind: Gpu) -> Model:
        """Returns a model that computes in the 16 bits of a kind of GPU, if it is a preset.

        The fields that the loss of a step of nnx updates are its own, whatever the study is told.
        """
        one, remat = self.models[name], self.options.remat
        if not isinstance(one, tuple):
            assert isinstance(one, Gpt), "names are looked up"
            preset = _presets.on(one, kind)
            loss = preset.losses([remat])[remat]
            return Model(name, loss, preset.make_state, preset.batch, self.changed, {}, remat)
        if not is_of_nnx(one[0]):
            return Model(name, *one, self.changed, {})
        loss, make_state, rng, own = parts_of_nnx(*one[:2], None)
        options = own | self.changed | {k: v for k, v in own.items() if k == "mutable"}
        return Model(name, loss, make_state, one[2], options, own, rng=rng)

    def asked(self, name: str, gpus: str, stage: int, rows: int | str) -> Case:
        """Returns a case without numbers, with the digest of all that they depend on."""
        gpu = gpu_of(gpus, self.rates)
        model = self.model(name, gpu)
        flags = os.environ.get("XLA_FLAGS", "")
        parts = [self.digest(model), repr(gpu), self.options.per_host, flags, _cache.versions()]
        key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
        settings = _settings(model, gpu)
        return Case(gpus, stage, model=name, asked=rows, settings=settings, key=key)

    def compiled(self, asked: Case) -> Case:
        """Returns the case with its numbers, or with the reason why there are none."""
        of_rows = functools.partial(self.case, asked.model, asked.gpus, asked.stage)
        try:
            if asked.asked == LARGEST:
                model = self.model(asked.model, gpu_of(asked.gpus, self.rates))
                case = largest(of_rows, model.options.get("accumulate", 1))
            else:
                case = of_rows(int(asked.asked))
        except Exception as error:  # of one of many: the others go on
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            text = " ".join(str(error).split())[:400]
            return dataclasses.replace(asked, failed=kind + text)
        names = ("model", "asked", "settings", "key")
        return dataclasses.replace(case, **{name: getattr(asked, name) for name in names})

    def _case(self, name: str, gpus: str, stage: int, rows: int) -> Case:
        """Compiles a step with so many rows on each GPU."""
        gpu = gpu_of(gpus, self.rates)
        model = self.model(name, gpu)
        options, examples = WorkOptions(**model.options), rows * Case(gpus, stage).count
        work = Workload(model.make_state, model.batch(examples), model.rng, gpus, gpu, options)
        case = work.case("", model.loss, stage, options.accumulate, options.order)
        return dataclasses.replace(case, examples=examples, report=None)


# -- the largest rows


def ladder(least: int) -> list[int]:
    """Returns the rows to choose from: every number up to 16, then eight between powers of two."""
    steps = [*range(1, 8), *(step << k for k in range(DOUBLINGS) for step in range(8, 16))]
    return [least * step for step in steps]


def largest(of_rows: Callable[[int], Case], least: int) -> Case:
    """Returns the case of the most rows that fit, a multiple of `least`; of `least` if none do.

    The most rows known to fit and the fewest known not to close in on each other. Tried next are
    those that would fill the GPU if memory grew evenly with the rows.
    """
    steps, tried = ladder(least), dict[int, Case]()
    fits, fails, at = -1, len(steps), FIRST_ROWS - 1
    while fails - fits > 1:
        at = min(max(at, fits + 1), fails - 1)
        case = tried[steps[at]] = of_rows(steps[at])
        fits, fails = (at, fails) if case.fits else (fits, at)
        at = bisect.bisect_right(steps, _filling(tried)) - 1
    return tried[steps[max(fits, 0)]]


def _filling(tried: dict[int, Case]) -> float:
    """Returns the rows that would fill the GPU, by a line through the most that fit and the fewest
    that do not; while all or none fit, through the last two that do, or the state without rows."""
    known = sorted(tried.items())
    fit, not_fit = ([one for one in known if one[1].fits is fits] for fits in (True, False))
    nearest = [*fit[-1:], *not_fit[:1]] if not_fit else fit[-2:]
    state = nearest[0][1].parameters + nearest[0][1].optimizer
    points = [(0, state), *((rows, case.peak) for rows, case in nearest)]
    (few, less), (many, more) = points[-2:]
    slope = (more - less) / (many - few)
    return few + (nearest[0][1].usable - less) / slope if slope > 0 else math.inf


# -- its file


def _place(case: Case) -> tuple[object, ...]:
    """Returns what was asked: a later case of the same place replaces an earlier one."""
    return case.model, case.gpus, case.stage, case.asked, case.settings


def _is_done(asked: Case, kept: Mapping[tuple, Case]) -> bool:
    """Whether there are numbers, and nothing that they depend on has changed since."""
    case = kept.get(_place(asked))
    return case is not None and case.key == asked.key and not case.failed


def _read(path: pathlib.Path) -> list[Case]:
    if (path.exists() and not path.is_file()) or not path.absolute().parent.is_dir():
        raise ValueError(
            f"out={str(path)!r} cannot be written: name a file in a folder that exists."
        )
    if not path.exists():
        return []
    try:
        data: Any = json.loads(path.read_text())
        if data[MARK] == FORMAT:
            return [Case.of_dict(case) for case in data["cases"]]
        why = f"its format is {data[MARK]!r}, not {FORMAT}"
    except OSError as error:
        raise ValueError(f"out={str(path)!r} cannot be read: {error.strerror}.") from None
    except (KeyError, TypeError) as error:
        why = f"{error} is missing or wrong"
    except UnicodeDecodeError:
        why = "it is no text"
    except json.JSONDecodeError as error:
        why = f"it is no JSON: {error}"
    raise ValueError(
        f"out={str(path)!r} is no file of a study, or a damaged one ({why}). Name another file, or "
        "remove this one."
    )


def _write(path: pathlib.Path, cases: Iterable[Case]) -> None:
    """Writes all of a file or nothing."""
    data = {MARK: FORMAT, "cases": [case.to_dict() for case in cases]}
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(json.dumps(data, indent=1) + "\n")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
