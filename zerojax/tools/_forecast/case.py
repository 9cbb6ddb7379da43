"""What one way to train costs, and how forecasts of several print and plot."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from zerojax import _figures
from zerojax._figures import Figure, PlotAxes
from zerojax._plan import offload as _offload
from zerojax._plan.show import ACTIVATIONS, COLOURS, GRADS, TITLES
from zerojax._state.state import OPT_STATE, PARAMS
from zerojax._step.step_options import LAYERS, MICROBATCHES
from zerojax._table import Cell, Printed, Table, human_bytes, human_time
from zerojax.tools._audit.report import Report
from zerojax.tools._forecast import network as _network
from zerojax.tools._hlo import gpus as _known
from zerojax.tools._hlo.gpus import Gpu

GIB, MS = 2**30, 1e-3
WAITING = "#b2ab8c"
ASKED = ("gpus", "stage", "model", "asked", "settings", "key")  # what each case of a study has
DERIVED = ("fits", "spare", "rows", "wire_bytes", "examples_per_second", "tokens_per_second")
DERIVED += ("tflops", "mfu")


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to train on some GPUs: what was asked, and what the compiled step costs.

    - A study has several models (`model`), and asks for so many rows on each GPU (`asked`).
      `settings` are what else its steps are made with; `key` is a digest of all that the numbers
      depend on. `failed` is the reason why there are none.
    - Bytes and `flops`, which the model needs in a step, are those of a GPU. `formula` is the state
      by the plan alone, with gradients in the parameters' dtypes, and with the parameters that
      groups keep in a node during the step. `peak` is the compiler's peak memory; `gradients` and
      `activations` (with the gathered weights) are parts of it. `on_host` is what rests in host
      memory, `pinned` that of all GPUs of a host.
    - Times are modelled seconds of one step; in `waited_seconds` it waits for the host's memory.
    - `matmuls` are the dtypes that the step computes in; `wide_matmuls` says how many are in
      float32 beside narrower ones, and where most of these are, or that the GPU lacks the model's.
    """

    gpus: str
    stage: int
    accumulate: int = 1
    order: str = MICROBATCHES
    variant: str = ""
    groups: str = ""
    model: str = ""
    asked: int | str = ""
    settings: str = ""
    key: str = ""
    failed: str = ""
    examples: int = 0
    tokens: int | None = None
    parameters: int = 0
    optimizer: int = 0
    gradients: int = 0
    activations: int = 0
    formula: int = 0
    peak: int = 0
    usable: int = 0
    on_host: int = 0
    pinned: int = 0
    matmuls: tuple[str, ...] = ()
    wide_matmuls: str = ""
    link_bytes: float = 0.0
    network_bytes: float = 0.0
    flops: float = 0.0
    compute_seconds: float = 0.0
    exposed_seconds: float = 0.0
    waited_seconds: float = 0.0
    step_seconds: float = 0.0
    compile_seconds: float = 0.0
    report: Report | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def count(self) -> int:
        return _known.parse_count(self.gpus)[0]

    @property
    def kind(self) -> Gpu:
        return _known.parse_count(self.gpus)[1]

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
    def wire_bytes(self) -> float:
        return self.link_bytes + self.network_bytes

    @property
    def examples_per_second(self) -> float:
        return self._each_second(self.examples)

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.tokens is None else self._each_second(self.tokens)

    @property
    def tflops(self) -> float:
        """What a GPU does of the FLOPs that the model needs, in 1e12 a second."""
        return self._each_second(self.flops) / 1e12

    @property
    def mfu(self) -> float:
        return self._each_second(self.flops) / self.kind.flops

    def _each_second(self, count: float) -> float:
        return count / self.step_seconds if self.step_seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Returns all but the report, as JSON has it."""
        named = {field.name: getattr(self, field.name) for field in STORED}
        return named | {name: getattr(self, name) for name in DERIVED}

    @classmethod
    def of_dict(cls, stored: dict[str, Any]) -> "Case":
        """The reverse; raises KeyError or TypeError where something is missing."""
        fields = [f.name for f in STORED if f.name in stored or f.name in ASKED]
        named: dict[str, Any] = {name: stored[name] for name in fields}
        named["matmuls"] = tuple(named.get("matmuls", ()))
        return cls(**named)


STORED = [field for field in dataclasses.fields(Case) if field.name != "report"]


def _of(field: str) -> Callable[[Case], Cell]:
    return lambda case: getattr(case, field)


def _in_layers(case: Case) -> str:
    return ", layers" if case.order == LAYERS and case.accumulate > 1 else ""


class Column(NamedTuple):
    """What a case has in a column, a sentence about it, and how a number is printed."""

    value: Callable[[Case], Cell]
    about: str
    form: Callable[[float], str] = str


def _bytes(field: str, about: str) -> Column:
    return Column(_of(field), about, human_bytes)


def _time(field: str, about: str) -> Column:
    return Column(_of(field), about, human_time)


ON_HOST, HOST_WAIT = "on the host", "waits for it"  # columns of what is offloaded
STAGE = "0 shards nothing, 1 the optimizer state, 2 also gradients, 3 also parameters."
CASE_COLUMNS = {
    "stage": Column(_of("stage"), f"The ZeRO stage: {STAGE}"),
    "accumulate": Column(
        lambda case: f"{case.accumulate}{_in_layers(case)}",
        "Microbatches of a step; 'layers' where all of them pass a layer before the next one.",
    ),
    "remat": Column(
        lambda case: case.variant or "-",
        "What backward computes again (of a preset: full, dots or none), or the name of the loss.",
    ),
    "params": _bytes("parameters", "Memory of the parameters between steps."),
    "optimizer": _bytes("optimizer", "Memory of the optimizer state between steps."),
    "grads": _bytes("gradients", "Gradients that are in memory at the peak."),
    "activations": _bytes("activations", "Activations and gathered weights at the peak."),
    "formula": _bytes("formula", "The state and its gradients by the plan, as the paper counts."),
    "peak": _bytes("peak", "The most memory that the step needs at a time, by the compiler."),
    "fits": Column(_of("fits"), "Whether the peak is within the memory that is usable."),
    "spare": _bytes("spare", "The usable memory that is left at the peak."),
    ON_HOST: _bytes("on_host", "State and activations in the memory of the host."),
    "sent, host": _bytes("link_bytes", "What a GPU sends in a step to others of its host."),
    "sent, network": _bytes("network_bytes", "What a GPU sends in a step to other hosts."),
    "step": _time("step_seconds", "The time of a step, modelled by replaying XLA's schedule."),
    "exposed": _time(
        "exposed_seconds",
        "The part of the step in which the GPU waits for communication; in the table of --choose "
        "also for copies from and to the host's memory.",
    ),
    HOST_WAIT: _time("waited_seconds", "The part of the step in which the GPU waits for copies."),
    "tokens/s": Column(
        _of("tokens_per_second"), "The tokens of all GPUs together in a second.", "{:,.0f}".format
    ),
    "MFU": Column(
        _of("mfu"),
        "The FLOPs that the model needs, without what is computed again, of those of the GPUs.",
        "{:.1%}".format,
    ),
}
CASE_EXPLAINED = {title: column.about for title, column in CASE_COLUMNS.items()}


def case_table(columns: Mapping[str, Column], cases: Sequence[Case], **options: Any) -> Table:
    """Makes a row for each case."""
    rows = [[column.value(case) for column in columns.values()] for case in cases]
    formats = {title: column.form for title, column in columns.items() if column.form is not str}
    return Table(list(columns), rows, formats=formats, **options)


@dataclasses.dataclass(frozen=True, repr=False)
class Forecast(Printed):
    """The result of `zerojax.forecast`: print or `plot` it. `best` is the fastest case that fits,
    or None. `settings` are what all cases have in common and is no default."""

    gpus: str
    gpu: Gpu
    cases: tuple[Case, ...]
    settings: tuple[str, ...] = ()

    @property
    def best(self) -> Case | None:
        fit = (case for case in self.cases if case.fits)
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
        draw_memory(memory, self.cases, self.gpu.usable)
        _draw_times(times, self.cases)
        memory.set_yticks(range(len(self.cases)), list(map(_case_name, self.cases)))
        memory.invert_yaxis()
        for axes in (memory, times):
            axes.spines[["top", "right"]].set_visible(False)
            axes.margins(x=0.12)
        title = "; ".join([f"one training step on {self.gpus}, compiled", *self._groups()])
        _figures.titled(figure, title, 4)
        return _figures.finished(figure, path)

    def table(self) -> Table:
        offloads = any(case.on_host for case in self.cases)
        shown = {k: v for k, v in CASE_COLUMNS.items() if offloads or k not in (ON_HOST, HOST_WAIT)}
        title, right = [self._title()], ("stage", "accumulate")
        options = {"title": title, "notes": [self._advice()], "right": right}
        return case_table(shown, self.cases, flexible=("remat",), keys=3, **options)

    def _title(self) -> str:
        usable = human_bytes(self.gpu.usable)
        return "; ".join(
            [
                f"{self.gpus}, {usable} usable of {human_bytes(self.gpu.memory)} each",
                *matmuls_of(self.cases),
                *self._groups(),
                *self.settings,
                "bytes per GPU, grads and activations at the peak",
                "times modelled",
                "MFU of dense FLOP/s in 16 bits",
            ]
        )

    def _groups(self) -> list[str]:
        return list(dict.fromkeys(case.groups for case in self.cases if case.groups))

    def _advice(self) -> str:
        best = self.best
        if best is None:
            least = min(self.cases, key=lambda case: case.peak)
            return (
                f"Nothing fits. The least is {human_bytes(least.peak)} at stage {least.stage}: use "
                "more GPUs, more microbatches (accumulate), more rematerialization, or the host's "
                "memory (offload='opt_state')."
            )
        how = f"stage={best.stage}" + (f", accumulate={best.accumulate}" * (best.accumulate > 1))
        how += f", order={best.order!r}" * bool(_in_layers(best))
        how += f", {best.groups}" * bool(best.groups)
        remat = f", remat {best.variant!r}" if best.variant else ""
        fastest = (
            f"Fastest that fits: {how}{remat}, {human_time(best.step_seconds)} a step, "
            f"{human_bytes(best.spare)} to spare."
        )
        network = [_network.advice(self.gpu, os.environ)] if best.network_bytes else []
        return " ".join([fastest, *filter(None, network), *_offload.told_of_pool(best.pinned)])


def matmuls_of(cases: Sequence[Case]) -> list[str]:
    """Names the dtypes that each case computes in, mostly one."""
    dtypes = dict.fromkeys(" and ".join(case.matmuls) for case in cases if case.matmuls)
    wide = next((case.wide_matmuls for case in cases if case.wide_matmuls), "")
    more = f" ({wide})" if wide else ""
    return [f"matmuls in {' or '.join(dtypes)}{more}"] if dtypes else []


# -- its figure


def draw_memory(
    axes: PlotAxes,
    cases: Sequence[Case],
    usable: int,
    colours: Mapping[str, str] = COLOURS,
    ink: str = "black",
) -> None:
    """Draws bars stacked up to the peak; bytes of no other kind count as activations."""
    uses = {
        PARAMS: [case.parameters for case in cases],
        OPT_STATE: [case.optimizer for case in cases],
        GRADS: [case.gradients for case in cases],
    }
    uses[ACTIVATIONS] = [
        case.peak - sum(use[row] for use in uses.values()) for row, case in enumerate(cases)
    ]
    left = [0.0] * len(cases)
    for use, nbytes in uses.items():
        if not any(nbytes):
            continue
        widths = [count / GIB for count in nbytes]
        style = {"color": colours[use], "edgecolor": "white", "linewidth": 0.5}
        axes.barh(range(len(cases)), widths, left=left, label=TITLES[use], **style)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for row, case in enumerate(cases):
        note = "" if case.fits else ", does not fit"
        _write(axes, left[row], row, f"{case.peak / GIB:.1f}{note}")
    if max(left) * 2 > usable / GIB:
        axes.axvline(usable / GIB, color=ink, linestyle="--", linewidth=1)
        axes.set_xlabel(f"GiB per GPU at the peak; line: {usable / GIB:.0f} usable")
    else:
        axes.set_xlabel(f"GiB per GPU at the peak, of {usable / GIB:.0f} usable")


def _draw_times(axes: PlotAxes, cases: Sequence[Case]) -> None:
    compute = [case.compute_seconds / MS for case in cases]
    exposed = [case.exposed_seconds / MS for case in cases]
    rows = range(len(cases))
    axes.barh(rows, compute, color="0.75", label="compute")
    if any(exposed):
        label = "exposed communication"
        axes.barh(rows, exposed, left=compute, color=_figures.EXPOSED, label=label)
    if any(case.on_host for case in cases):
        left = [a + b for a, b in zip(compute, exposed, strict=True)]
        waited = [case.waited_seconds / MS for case in cases]
        axes.barh(rows, waited, left=left, color=WAITING, label="waiting for the host")
    for row, case in enumerate(cases):
        _write(axes, case.step_seconds / MS, row, f"{case.step_seconds / MS:,.0f}")
    axes.set_xlabel("ms per step, modelled")


def _write(axes: PlotAxes, end: float, row: int, text: str) -> None:
    """Writes beside a bar that ends there."""
    axes.text(end, row, f" {text}", va="center", fontsize=_figures.SMALL)


def _case_name(case: Case) -> str:
    accumulated = f"x{case.accumulate}{_in_layers(case)}" if case.accumulate > 1 else ""
    return ", ".join(filter(None, (f"stage {case.stage}", accumulated, case.variant)))
