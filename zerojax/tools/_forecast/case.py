"""What one way to train costs, and how forecasts of several print and plot."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

from zerojax import _figures
from zerojax._figures import Figure, PlotAxes
from zerojax._plan import offload as _offload
from zerojax._plan.show import ACTIVATIONS, COLOURS, GRADS, TITLES
from zerojax._state.state import OPT_STATE, PARAMS
from zerojax._step.schedule import LAYERS, Schedule, unordered
from zerojax._table import Printed, Table, human_bytes, human_time, total
from zerojax._types import Number
from zerojax.tools._audit.report import Report
from zerojax.tools._forecast import network as _network
from zerojax.tools._hlo import gpus as _known
from zerojax.tools._hlo.gpus import Gpu

GIB, MS = 2**30, 1e-3
WAITING = "#b2ab8c"
DERIVED = ("fits", "spare", "rows", "wire_bytes", "examples_per_second", "tokens_per_second")
DERIVED += ("order", "tflops", "mfu", "unread")


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to train on some GPUs: what you asked for, and what the compiled step costs.

    - A study has several models (`model`), and asks for some rows on each GPU (`asked`). `settings`
      names the other options of its steps. `failed` says why a case has no numbers.
    - Bytes and `flops`, which the model needs in a step, are those of a GPU. `formula` is the state
      by the plan, with gradients in the dtypes of the parameters, and with the parameters that
      groups keep in a node during the step. `peak` is the compiler's peak memory; `gradients` and
      `activations` (with the gathered weights) are parts of it. `on_host` rests in host memory,
      `pinned` in that of a host, for all of its GPUs.
    - Times are modelled seconds of one step; in `waited_seconds` it waits for the host's memory.
    - Figures of a program that zerojax could not read are None; `unread` says why.
    - `matmuls` are the dtypes that the step multiplies in; `wide_matmuls` says how many FLOPs are
      in float32 beside narrower ones and where most of these are. `lacks` says what the step runs
      in where the GPU lacks the dtype that it asks for.
    """

    gpus: str
    stage: int
    accumulate: int = 1
    variant: str = ""
    schedule: Schedule = dataclasses.field(default_factory=Schedule)
    model: str = ""
    asked: int | str = ""
    settings: str = ""
    failed: str = ""
    examples: int = 0
    tokens: int | None = None
    parameters: int = 0
    optimizer: int = 0
    gradients: Number = 0
    activations: Number = 0
    formula: int = 0
    peak: int = 0
    usable: int = 0
    on_host: int = 0
    pinned: int = 0
    matmuls: tuple[str, ...] = ()
    wide_matmuls: str = ""
    lacks: str = ""
    link_bytes: Number = 0.0
    network_bytes: Number = 0.0
    flops: float = 0.0
    compute_seconds: Number = 0.0
    exposed_seconds: Number = 0.0
    waited_seconds: Number = 0.0
    step_seconds: Number = 0.0
    report: Report | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def count(self) -> int:
        return _known.parse_count(self.gpus)[0]

    @property
    def kind(self) -> Gpu:
        return _known.parse_count(self.gpus)[1]

    @property
    def unread(self) -> str:
        return self.report.unread if self.report else ""

    @property
    def fits(self) -> bool:
        return not self.failed and self.peak <= self.usable

    @property
    def spare(self) -> int:
        return self.usable - self.peak

    @property
    def rows(self) -> int:
        """Rows of the batch on each GPU."""
        return self.examples // self.count

    @property
    def wire_bytes(self) -> Number:
        return total(self.link_bytes, self.network_bytes)

    @property
    def stalled_seconds(self) -> Number:
        """The time in which compute waits, for communication and for the host."""
        return total(self.exposed_seconds, self.waited_seconds)

    @property
    def examples_per_second(self) -> Number:
        return self._each_second(self.examples)

    @property
    def tokens_per_second(self) -> Number:
        return None if self.tokens is None else self._each_second(self.tokens)

    @property
    def tflops(self) -> Number:
        """The FLOPs that the model needs, as each GPU does them, in 1e12 a second."""
        return self._each_second(self.flops / 1e12)

    @property
    def mfu(self) -> Number:
        return self._each_second(self.flops / self.kind.flops)

    @property
    def order(self) -> str:
        return self.schedule.order

    @property
    def in_layers(self) -> str:
        return ", layers" if self.order == LAYERS and self.accumulate > 1 else ""

    def _each_second(self, count: float) -> Number:
        return self.step_seconds and count / self.step_seconds  # 0 of what was not compiled

    def to_dict(self) -> dict[str, Any]:
        """Returns all but the report, as JSON has it."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "report"]
        values = {name: getattr(self, name) for name in (*names, *DERIVED)}
        return values | {"schedule": str(self.schedule)}


ON_HOST, HOST_WAIT = "on the host", "waits for it"  # columns of offloaded steps
SCHEDULE = "schedule"
STAGE = "Stage 0 shards nothing, 1 the optimizer state, 2 also gradients, 3 also parameters."


def _bytes(field: str, about: str) -> tuple:
    return attrgetter(field), human_bytes, about


def _time(field: str, about: str) -> tuple:
    return attrgetter(field), human_time, about


# By title: a function of a case, the format of numbers, and a sentence.
CASE_COLUMNS: dict[str, tuple] = {
    "stage": (attrgetter("stage"), str, STAGE),
    "accumulate": (
        lambda case: f"{case.accumulate}{case.in_layers}",
        str,
        "Microbatches of a step; 'layers' where all of them pass a layer before the next one.",
    ),
    "remat": (
        lambda case: case.variant or "-",
        str,
        "How much backward recomputes (of a preset: full, dots or none), or the name of the loss.",
    ),
    SCHEDULE: (
        lambda case: unordered(case.schedule),
        str,
        "The schedule, where several are tried.",
    ),
    "params": _bytes("parameters", "Memory of the parameters between steps."),
    "optimizer": _bytes("optimizer", "Memory of the optimizer state between steps."),
    "grads": _bytes("gradients", "Gradients that are in memory at the peak."),
    "activations": _bytes("activations", "Activations and gathered weights at the peak."),
    "formula": _bytes("formula", "The state and its gradients by the plan, as the paper counts."),
    "peak": _bytes("peak", "The most memory that the step needs at a time, by the compiler."),
    "fits": (attrgetter("fits"), str, "Whether the peak is within the memory that is usable."),
    "spare": _bytes("spare", "The usable memory that is left at the peak."),
    ON_HOST: _bytes("on_host", "State and activations in the memory of the host."),
    "sent, host": _bytes("link_bytes", "Bytes that a GPU sends in a step inside its host."),
    "sent, network": _bytes("network_bytes", "Bytes that a GPU sends in a step to other hosts."),
    "step": _time("step_seconds", "The time of a step, modelled by replaying XLA's schedule."),
    "exposed": _time(
        "exposed_seconds",
        "The part of the step in which the GPU waits for communication; in the table of --choose "
        "also for copies from and to the host's memory.",
    ),
    HOST_WAIT: _time("waited_seconds", "The part of the step in which the GPU waits for copies."),
    "tokens/s": (
        attrgetter("tokens_per_second"),
        "{:,.0f}".format,
        "The tokens of all GPUs together in a second.",
    ),
    "MFU": (
        attrgetter("mfu"),
        "{:.1%}".format,
        "The FLOPs that the model needs, without recomputation, as a share of the GPUs' peak.",
    ),
}


@dataclasses.dataclass(frozen=True, repr=False)
class Forecast(Printed):
    """The result of `zerojax.forecast`: print or `plot` it. `best` is the fastest case that fits,
    or None. `settings` are the options that all cases share, other than the defaults."""

    gpus: str
    gpu: Gpu
    cases: tuple[Case, ...]
    settings: tuple[str, ...] = ()

    @property
    def best(self) -> Case | None:
        fit = [case for case in self.cases if case.fits and case.step_seconds is not None]
        return min(fit, key=lambda case: case.step_seconds, default=None)

    def to_dict(self) -> dict[str, object]:
        return {
            "gpus": self.gpus,
            "settings": list(self.settings),
            "usable_bytes": self.gpu.usable,
            "cases": [case.to_dict() for case in self.cases],
            "best": None if self.best is None else self.cases.index(self.best),
        }

    def plot(self, path: str | None = None) -> Figure:
        """Draws memory and step time of each case with matplotlib; saves the figure to `path`."""
        figure, (memory, times) = _figures.panels(1.6 + 0.38 * len(self.cases), 3, 2)
        _draw_memory(memory, self.cases, self.gpu.usable)
        for note in memory.texts:  # which the line of what is usable may cross
            note.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0})
        _draw_times(times, self.cases)
        memory.set_yticks(range(len(self.cases)), list(map(_label, self.cases)))
        memory.invert_yaxis()
        for axes in (memory, times):
            axes.spines[["top", "right"]].set_visible(False)
            axes.margins(x=0.12)
        title = "; ".join([f"one training step on {self.gpus}, compiled", *self.settings])
        _figures.titled(figure, title, 4)
        return _figures.finished(figure, path)

    def table(self) -> Table:
        hidden = () if any(case.on_host for case in self.cases) else (ON_HOST, HOST_WAIT)
        hidden += () if len({unordered(case.schedule) for case in self.cases}) > 1 else (SCHEDULE,)
        unread = dict.fromkeys(case.unread for case in self.cases if case.unread)
        title = [
            f"{self.gpus}, {human_bytes(self.gpu.usable)} usable of "
            f"{human_bytes(self.gpu.memory)} each",
            *matmuls_of(self.cases),
            *self.settings,
            "bytes per GPU, grads and activations at the peak",
            "times modelled",
            "MFU of dense FLOP/s in 16 bits",
        ]
        return Table.of(
            {k: v for k, v in CASE_COLUMNS.items() if k not in hidden},
            self.cases,
            title=["; ".join(title), *lacking(self.cases)],
            notes=[*unread, self._advice()],
            right=("stage", "accumulate"),
            flexible=("remat", SCHEDULE),
            keys=3,
        )

    def _advice(self) -> str:
        best = self.best
        if best is None and any(case.fits for case in self.cases):
            return "The fastest that fits is unknown."
        if best is None:
            least = min(self.cases, key=lambda case: case.peak)
            return (
                f"Nothing fits. The least is {human_bytes(least.peak)} at stage {least.stage}: use "
                "more GPUs, more microbatches (accumulate), more rematerialization, or the host's "
                "memory (offload='opt_state')."
            )
        how = [
            f"stage={best.stage}",
            f"accumulate={best.accumulate}" if best.accumulate > 1 else "",
            f"schedule={best.schedule}" if best.schedule != Schedule() else "",
            f"remat {best.variant!r}" if best.variant else "",
            f"{human_time(best.step_seconds)} a step",
            f"{human_bytes(best.spare)} to spare.",
        ]
        fastest = f"Fastest that fits: {', '.join(filter(None, how))}"
        return " ".join([fastest, *told_to_hosts(self.gpu, [best])])


def _label(case: Case) -> str:
    """Names a case of a picture: 'stage 3, x2, full'."""
    rounds = f"x{case.accumulate}{case.in_layers}" if case.accumulate > 1 else ""
    return ", ".join(filter(None, (f"stage {case.stage}", rounds, case.variant)))


def matmuls_of(cases: Sequence[Case]) -> list[str]:
    """Names the dtypes that each case multiplies in, mostly one."""
    dtypes = dict.fromkeys(" and ".join(case.matmuls) for case in cases if case.matmuls)
    wide = next((f" ({case.wide_matmuls})" for case in cases if case.wide_matmuls), "")
    return [f"matmuls in {' or '.join(dtypes)}{wide}"] if dtypes else []


def lacking(cases: Sequence[Case]) -> list[str]:
    """Says once what the GPU lacks, for a line of its own below the first of a table."""
    return list(dict.fromkeys(case.lacks for case in cases if case.lacks))


def told_to_hosts(gpu: Gpu, cases: Sequence[Case]) -> list[str]:
    """Says which environment variables hosts need: for a slow network, for memory to pin."""
    advice = _network.advice(gpu, os.environ) if any(case.network_bytes for case in cases) else ""
    pinned = max((case.pinned for case in cases), default=0)
    return [*filter(None, [advice]), *_offload.told_of_pool(pinned)]


# -- the picture of a forecast


def _draw_memory(axes: PlotAxes, cases: Sequence[Case], usable: int) -> None:
    """Draws bars stacked up to the peak; bytes of no other kind count as activations."""
    fields = {PARAMS: "parameters", OPT_STATE: "optimizer", GRADS: "gradients"}
    uses = {use: [getattr(case, field) or 0 for case in cases] for use, field in fields.items()}
    named = [sum(nbytes) for nbytes in zip(*uses.values(), strict=True)]
    uses[ACTIVATIONS] = [case.peak - known for case, known in zip(cases, named, strict=True)]
    parts = {TITLES[use]: (COLOURS[use], nbytes) for use, nbytes in uses.items()}
    notes = [f"{case.peak / GIB:.1f}{'' if case.fits else ', does not fit'}" for case in cases]
    _draw_bars(axes, parts, GIB, notes)
    if is_near := 2 * max(case.peak for case in cases) > usable:
        axes.axvline(usable / GIB, color="black", linestyle="--", linewidth=1)
    share = f"{'; line:' if is_near else ', of'} {usable / GIB:.0f} usable"
    axes.set_xlabel(f"GiB per GPU at the peak{share}")


def _draw_times(axes: PlotAxes, cases: Sequence[Case]) -> None:
    parts = {
        "compute": ("0.75", [case.compute_seconds or 0 for case in cases]),
        "exposed communication": (_figures.EXPOSED, [case.exposed_seconds or 0 for case in cases]),
        "waiting for the host": (WAITING, [case.waited_seconds or 0 for case in cases]),
    }
    steps = [case.step_seconds for case in cases]
    _draw_bars(axes, parts, MS, ["-" if step is None else f"{step / MS:,.0f}" for step in steps])
    axes.set_xlabel("ms per step, modelled")


def _draw_bars(
    axes: PlotAxes, parts: Mapping[str, tuple], unit: float, notes: Sequence[str]
) -> None:
    """Draws a bar for each case, of parts with a colour one after the other, and a note beside."""
    ends = [0.0] * len(notes)
    for label, (colour, values) in parts.items():
        widths = [value / unit for value in values]
        if any(widths):
            style = {"color": colour, "edgecolor": "white", "linewidth": 0.5}
            axes.barh(range(len(notes)), widths, left=ends, label=label, **style)
            ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for row, (end, note) in enumerate(zip(ends, notes, strict=True)):
        axes.text(end, row, f" {note}", va="center", fontsize=_figures.SMALL)
