"""`study`: how models scale, by a forecast of each stage on each number of GPUs."""

import bisect
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TypeAlias

import jax
import numpy as np

from zerojax import _figures, aot
from zerojax._declared import option, takes
from zerojax._figures import Figure, PlotAxes
from zerojax._progress import progress
from zerojax._run import programs as _programs
from zerojax._state.hints import layer_dims
from zerojax._state.state import get_params, leaves_with_paths, path_name
from zerojax._table import Column, Printed, Table, grouped, human_bytes
from zerojax._types import Number, PyTree
from zerojax.tools._forecast import cache as _cache, presets as _presets
from zerojax.tools._forecast.case import CASE_COLUMNS, Case
from zerojax.tools._forecast.forecast import (
    STAGES,
    LossFn,
    NnxStep,
    Workload,
    WorkOptions,
    each_once,
)
from zerojax.tools._forecast.presets import Gpt

LARGEST, SIZE = "largest", "size"  # as many rows as fit, or layers; the column of these
GROWS = 1.01  # how much more counts as growth of the throughput of each GPU
DOUBLINGS = 14
FIRST = 4  # rows of each microbatch, or a model's number: the search for the largest begins there
# Every number of rows up to 16, then eight between powers of two.
ROW_STEPS = [*range(1, 8), *(step << k for k in range(DOUBLINGS) for step in range(8, 16))]
NUMBERS = range(1, 2**14)
OWN = "(loss_fn, make_state, batch), with a function batch(rows) that returns a global batch"
# A preset or its name; a loss, or a step of nnx, make_state, and a function of the rows of a global
# batch; or a function that returns one of these for a number, such as that of the layers.
Own: TypeAlias = tuple[LossFn | NnxStep, Callable[[], PyTree], Callable[[int], PyTree]]
Given: TypeAlias = str | Gpt | Own | Callable[[int], Gpt | Own]


def _number(value: float) -> str:
    """Formats a number with three digits, or all those before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _throughput(case: Case) -> float | str:
    return case.tflops if case.fits else "failed" if case.failed else "no room"


def _if_it_fits(attribute: str) -> Callable[[Case], Number]:
    return lambda case: getattr(case, attribute) if case.fits else None


STUDY_COLUMNS: dict[str, Column] = {
    "model": ("model", str, "The model: a preset, or one of your own."),
    SIZE: (
        lambda case: f"{case.size}: {case.n_params / 1e9:.3g}B" if case.size else None,
        str,
        "The largest number that fits, as of layers, and the billions of parameters with it.",
    ),
    "GPUs": ("gpus", str, "How many of which GPU."),
    "stage": CASE_COLUMNS["stage"],
    "rows": (
        lambda case: f"max {case.rows or ''}".rstrip() if case.asked == LARGEST else case.asked,
        str,
        "Rows of the batch on each GPU, such as sequences; 'max': all that fit.",
    ),
    "peak": (lambda case: case.peak or None, *CASE_COLUMNS["peak"][1:]),
    "TFLOP/s": (_throughput, _number, "The FLOPs that the model needs, as each GPU does them."),
    "MFU": (_if_it_fits("mfu"), *CASE_COLUMNS["MFU"][1:]),
    "tokens/s": (_if_it_fits("tokens_per_second"), *CASE_COLUMNS["tokens/s"][1:]),
    "exposed": (
        lambda case: case.stalled_seconds / case.step_seconds if case.fits else None,
        "{:.0%}".format,
        "The part of the step in which a GPU waits, for communication or for the host's memory.",
    ),
}


@dataclasses.dataclass(frozen=True, repr=False)
class Study(Printed):
    """The result of `zerojax.tools.study`: print or `plot` it. `cases` are in the order that you
    asked for: by model, then by GPUs, stages and rows."""

    cases: tuple[Case, ...]

    @property
    def super_linear(self) -> list[tuple[Case, Case]]:
        """The models and stages where each GPU does more among more GPUs, with the largest rows:
        their cases on the fewest GPUs and on the most."""
        fit = [case for case in self.cases if case.asked == LARGEST and case.fits]
        fit.sort(key=attrgetter("count"))
        lines = grouped(fit, attrgetter("model", "gpu.name", "stage"))
        ends = [(line[0], line[-1]) for _, line in sorted(lines.items())]
        return [(first, last) for first, last in ends if last.tflops > GROWS * first.tflops]

    def best(self, model: str) -> Case | None:
        """The case of a model in which each GPU does most, of the largest model where a study
        finds that; None where none fits."""
        fit = (case for case in self.cases if case.model == model and case.fits)
        return max(fit, key=attrgetter("size", "tflops"), default=None)

    def to_dict(self) -> dict[str, object]:
        return {"cases": [case.to_dict() for case in self.cases]}

    def plot(self, path: str | None = None) -> Figure:
        """Draws with matplotlib, for each model, how throughput changes with the number of GPUs;
        saves the figure to `path`. It is narrow, to be read on a phone."""
        groups = grouped(self.cases, attrgetter("model", "gpu.name"))
        asked = dict.fromkeys(case.asked for case in self.cases)
        markers = dict(zip(asked, itertools.cycle("osD^vP")))
        shown = [EACH, MOST_ROWS] if LARGEST in markers else [EACH]
        count = len(groups) * len(shown)
        figure, axes = _figures.pyplot().subplots(
            count, figsize=(_figures.PHONE, HEIGHT * count + 1), squeeze=False, layout="constrained"
        )
        panels, drawn = list(axes.flat), itertools.product(groups, shown)
        for panel, ((model, kind), what) in zip(panels, drawn, strict=True):
            _draw_panel(panel, groups[model, kind], what, markers)
            panel.set_title(f"{model}, {what}", fontsize=POINTS, loc="left")
            panel.set_xlabel(f"{kind}s" * (what == shown[-1]))
        # One line for each label, of all panels.
        handles = {line.get_label(): line for panel in panels[::-1] for line in panel.lines[::-1]}
        title = "one training step, compiled; times modelled"
        _figures.titled(figure, title, 2, handles=[*handles.values()][::-1], fontsize=POINTS)
        return _figures.finished(figure, path)

    def table(self) -> Table:
        settings = dict.fromkeys(case.settings for case in self.cases if case.settings)
        about = "one training step; bytes, rows, TFLOP/s and MFU of each GPU; times modelled"
        wide = [f"matmuls: {case.wide_matmuls}" for case in self.cases if case.wide_matmuls]
        lacks = dict.fromkeys(case.lacks for case in self.cases if case.lacks)
        has_sizes = any(case.size for case in self.cases)
        return Table.of(
            {k: v for k, v in STUDY_COLUMNS.items() if has_sizes or k != SIZE},
            self.cases,
            title=["; ".join([about, *settings, *wide[:1]]), *lacks],
            notes=list(self._advice()),
            right=list(STUDY_COLUMNS)[3:],
            optional=["exposed"],
            keys=4,
        )

    def _advice(self) -> Iterator[str]:
        for case in self.cases:
            if case.failed:
                name = _named(case.model, case.gpus, case.stage, case.asked)
                yield f"Failed: {name}: {case.failed}"
        for model in dict.fromkeys(case.model for case in self.cases):
            compiled = [case for case in self.cases if case.model == model and not case.failed]
            if best := self.best(model):
                size = f"{best.size}, {best.n_params / 1e9:.3g} billion parameters, "
                yield (
                    f"Best for {model}: {size * bool(best.size)}{_number(best.tflops)} TFLOP/s of "
                    f"each GPU, at stage {best.stage} on {best.gpus} with {best.rows} rows."
                )
            elif compiled:
                least = human_bytes(min(case.peak for case in compiled))
                yield (
                    f"{model} fits nowhere. The least is {least}: use more GPUs, a higher stage, "
                    "fewer rows, or the host's memory (offload=)."
                )
        for first, last in self.super_linear:
            yield (
                f"Super-linear: {first.model} at stage {first.stage}. From {first.count} to "
                f"{last.count} {first.gpu.name}s, each GPU does {_number(first.tflops)} and then "
                f"{_number(last.tflops)} TFLOP/s, with {first.rows} and then {last.rows} rows."
            )


def _named(model: str, gpus: str, stage: int, rows: int | str) -> str:
    return f"{model} on {gpus}, stage {stage}, {rows} rows"


def _rows(rows: object) -> object:
    for count in each_once(rows):
        if count != LARGEST and (not isinstance(count, int) or count < 1):
            raise ValueError(f"rows={count!r} must be positive, or {LARGEST!r}: rows of each GPU.")
    return rows


def _stages(stages: object) -> object:
    if odd := [stage for stage in each_once(stages) if stage not in STAGES]:
        raise ValueError(f"stages={odd[0]!r} is none of {STAGES}.")
    return stages


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
        check=_rows,
    )
    remat: str = option(
        "full",
        """what presets compute again in backward: "full", "dots" or "none"; or what they keep,
        such as "qkv+up".""",
    )
    cache: bool = option(
        True,
        """keep the compiled programs in the user's cache, as the command line does: a study that
        was stopped, or has more GPUs now, compiles only what it lacks.""",
    )


@takes(StudyOptions)
def study(models: str | Sequence[str] | Mapping[str, Given], options: StudyOptions) -> Study:
    """Forecasts models on several numbers of GPUs, at several stages, with several batches.

    Print the result, or `plot` it: how the throughput of each GPU changes with their number. With
    the "largest" rows, what a stage frees of a GPU's memory goes into its batch.

    Arguments:
        models: presets by name, or a dict of models of your own: a name for each, and `(loss_fn,
            make_state, batch)`, where `batch(rows)` returns a global batch of so many rows. Of Flax
            nnx, the first two are a loss or a step of `zerojax.nnx.train_step`, and a function that
            returns a model and its optimizer. Of a function in their place, `model(number)`, a
            study finds the largest number that fits, with the `rows` that you name: of layers, say.
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
    if not isinstance(models, Mapping):
        models = {name: name for name in each_once(models)}
    if not models:
        raise ValueError("no models. Name one or several presets, or pass a dict of your own.")
    sizes, stages, rows = map(each_once, (options.gpus, options.stages, options.rows))
    if not (sizes and stages and rows):
        raise ValueError(f"nothing to try: gpus={sizes}, stages={stages}, rows={rows}.")
    if LARGEST in rows and (sized := [name for name, one in models.items() if callable(one)]):
        raise ValueError(
            f"of {sized[0]!r} a study finds the largest number that fits, with rows that you name. "
            "Pass the rows of each GPU, such as rows=4."
        )
    kinds = {options.gpu_of(size).name for size in sizes}
    if options.rates is not None and len(kinds) > 1:
        raise ValueError(
            f"these are the rates of one GPU, and gpus= names {', '.join(sorted(kinds))}. Make a "
            "study of each."
        )
    work = functools.cache(lambda name, *where: _work(name, models[name], options, *where))
    for name, size in itertools.product(models, sizes):
        work(name, size, 1)  # raises before anything compiles
    aot._check_packages()

    @functools.cache
    def compiled(name: str, gpus: str, stage: int, rows: int, *number: int) -> Case:
        one = work(name, gpus, rows, *number)
        case = one.case("", stage, one.options.accumulate, one.options.schedule)
        if case.unread:
            raise ValueError(case.unread)
        examples = rows * case.count // case.share
        return dataclasses.replace(case, examples=examples, report=None, size=sum(number))

    def cell(name: str, gpus: str, stage: int, rows: int | str) -> Case:
        """Returns a case, with the reason why it has no numbers if it has none."""
        of_rows = functools.partial(compiled, name, gpus, stage)
        try:
            if rows == LARGEST:
                case = largest(of_rows, ROW_STEPS, work(name, gpus, 1).options.accumulate)
            elif callable(models[name]):
                case = largest(functools.partial(of_rows, rows), NUMBERS)
            else:
                case = of_rows(rows)
        except Exception as error:  # the others go on
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            case = Case(gpus, stage, failed=kind + " ".join(str(error).split())[:400])
        one = work(name, gpus, 1, *filter(None, [case.size]))
        settings = [f"remat {options.remat}"] if isinstance(_made(name, models[name]), Gpt) else []
        settings += one.settings(one.own.keys() & {"mutable"})
        return dataclasses.replace(case, model=name, asked=rows, settings=", ".join(settings))

    cells = list(itertools.product(models, sizes, stages, rows))
    with _cache.kept(_programs.folder() if options.cache else None, lines=False):
        cases = progress(cells, lambda at: f"compiling {_named(*at)}", lambda at: cell(*at))
    return Study(tuple(cases))


def _made(name: str, model: PyTree, number: int = FIRST) -> Gpt | Own:
    """Returns a model, of a function the one with a number; looks up a preset."""
    model = model(number) if callable(model) else model
    model = _presets.preset(model) if isinstance(model, str) else model
    is_own = isinstance(model, tuple) and len(model) == 3 and all(map(callable, model))
    if not is_own and not isinstance(model, Gpt):
        raise ValueError(f"the model {name!r} is neither a preset nor {OWN}.")
    return model


def _work(
    name: str, model: Given, options: StudyOptions, gpus: str, rows: int, *number: int
) -> Workload:
    """Returns a model with so many rows on each GPU, in whose 16 bits a preset computes."""
    made = _made(name, model, *number)
    if isinstance(made, Gpt):
        preset = _presets.on(made, options.gpu_of(gpus))
        made = preset.losses([options.remat])[options.remat], preset.make_state, preset.batch
    loss, make_state, make_batch = made
    count = Case(gpus, 0).count
    work = Workload.of(loss, make_state, make_batch(count), None, gpus, options)
    if number and options.stacked is None:
        next_one = dataclasses.replace(options, stacked=()), gpus, 1, number[0] + 1
        stacked = _unseen_stacks(work, _work(name, model, *next_one))
        work = dataclasses.replace(work, options=dataclasses.replace(work.options, stacked=stacked))
    batch = make_batch(examples := rows * count // work.share)
    if (examples,) not in {np.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}:
        raise ValueError(
            f"the batch({examples}) of {name!r} has no array of {examples} rows. It must return "
            "the global batch of so many rows, or its shapes."
        )
    return dataclasses.replace(work, batch=batch)


def _unseen_stacks(*works: Workload) -> str | None:
    """Returns a pattern of all stacks of a model, if a plan would not see each that the next larger
    one has more of: many layers look like a dimension of a weight."""
    trees = [get_params(one.state) for one in works]
    seen = layer_dims(trees[0], None)
    few, many = ({x.path: x.value.shape for x in leaves_with_paths(tree)} for tree in trees)
    grown = {path: shape for path, shape in few.items() if shape != many.get(path, shape)}
    are_stacks = all(shape[1:] == many[path][1:] for path, shape in grown.items())
    if grown.keys() <= seen.keys() or not are_stacks or max(map(len, grown.values())) < 3:
        return None
    return f"^({'|'.join(re.escape(path_name(path)) for path in grown | seen)})$"


# -- the largest rows, or the largest model


def largest(case_of: Callable[[int], Case], steps: Sequence[int], least: int = 0) -> Case:
    """Returns the case of the largest step that fits; of the first if none does. Steps count rows,
    in multiples of `least`, or without it what a model has of something.

    The highest step known to fit and the lowest known not to close in on each other. Tried next is
    the step that would fill the GPU if memory grew evenly.
    """
    tried: dict[int, Case] = {}
    fits, fails, at = -1, len(steps), FIRST - 1
    while fails - fits > 1:
        at = min(max(at, fits + 1), fails - 1)
        case = tried[steps[at]] = case_of(steps[at] * (least or 1))
        fits, fails = (at, fails) if case.fits else (fits, at)
        at = bisect.bisect_right(steps, _filling(tried, bool(least))) - 1
    return tried[steps[max(fits, 0)]]


def _filling(tried: dict[int, Case], keeps_state: bool) -> float:
    """Returns the step that would fill the GPU, by a line through what was tried, and through the
    state without rows: the part of it that crosses the limit, or else the last one."""
    case = next(iter(tried.values()))
    peaks = {step: tried[step].peak for step in sorted(tried)}
    points = [*({0: keeps_state * (case.parameters + case.optimizer)} | peaks).items()]
    beyond = (at for at, (_, peak) in enumerate(points) if at and peak > case.usable)
    end = next(beyond, len(points) - 1)
    (few, less), (many, more) = points[end - 1], points[end]
    slope = (more - less) / (many - few)
    if slope <= 0 and not keeps_state:
        raise ValueError(
            f"with {many} it needs no more memory than with {few}: {human_bytes(more)}. Name a "
            "number that adds parameters, such as that of the layers."
        )
    return few + (case.usable - less) / slope if slope > 0 else math.inf


# -- its picture

STAGE_COLOURS = ("#7f7f7f", "#d1495b", "#edae49", "#00798c")  # which differ in grey too
HEIGHT, POINTS = 1.9, 9  # inches of a panel, points
EACH, MOST_ROWS = "TFLOP/s of each GPU", "rows on each GPU"


def _draw_panel(
    axes: PlotAxes, cases: Sequence[Case], what: str, markers: Mapping[int | str, str]
) -> None:
    """Draws a line for each stage and rows, and marks at the bottom where a step does not fit."""
    shown = [case for case in cases if what == EACH or case.asked == LARGEST]
    shown.sort(key=attrgetter("count"))
    for (stage, rows), line in grouped(shown, attrgetter("stage", "asked")).items():
        fitting = {
            case.count: case.tflops if what == EACH else case.rows for case in line if case.fits
        }
        # Without microbatches stages 1 and 2 are one line: the thinner one lies on the other.
        style = {"marker": markers[rows], "linewidth": 3.2 - 0.6 * stage}
        style |= {"color": STAGE_COLOURS[stage], "linestyle": "-" if rows == LARGEST else "--"}
        label = f"stage {stage}, {rows} rows"
        axes.plot([*fitting], [*fitting.values()], label=label, **style)
        if missing := [case.count for case in line if not case.failed and not case.fits]:
            style |= {"marker": "x", "linestyle": "", "clip_on": False}
            axes.plot(missing, [0] * len(missing), label="does not fit", **style)
    # GPUs in powers of two, with the numbers that a study has.
    axes.set_xscale("log", base=2)
    counts = sorted({case.count for case in cases})
    axes.set_xticks(counts, list(map(str, counts)))
    axes.minorticks_off()
    axes.set_ylim(0, 1.1 * max(max(line.get_ydata(), default=0) for line in axes.lines) or 1)
    axes.margins(x=0.08)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", linewidth=0.4)
