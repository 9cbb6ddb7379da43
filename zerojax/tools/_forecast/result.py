"""The result of a forecast: its cases as a table and as a figure, and the fastest that fits."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from zerojax import _figures
from zerojax._figures import Axes, Figure
from zerojax._loss.layered import LAYERS
from zerojax._plan.show import ACTIVATIONS, COLOURS, GRADS, TITLES
from zerojax._state.state import OPT_STATE, PARAMS
from zerojax._table import Cell, Printed, Table, human_bytes, human_time
from zerojax._update import offload as _offload
from zerojax.tools._audit.report import Report
from zerojax.tools._forecast import network as _network
from zerojax.tools._hlo.gpus import Gpu

GIB, MS = 2**30, 1e-3
COPIES = "#b2ab8c"


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to train, compiled. Bytes are per GPU, times are modelled seconds of one step.

    `groups` says which arrays are sharded over which axes, where that is not over all of them.
    `formula` is the state by the plan alone, with gradients in the parameters' dtypes, and with the
    parameters that groups keep in a node during the step. `peak` is the compiler's peak memory;
    `gradients` and `activations` (with the gathered weights) are parts of it. `on_host` is what
    rests in host memory, `pinned` that of all GPUs of a host, `waited_seconds` the wait for its
    copies. `matmuls` are the dtypes that the step computes in; `wide_matmuls` says how many are in
    float32 beside narrower ones, and where most of these are, or that the GPU lacks the model's.
    """

    stage: int
    accumulate: int
    order: str
    variant: str
    groups: str
    parameters: int
    optimizer: int
    gradients: int
    activations: int
    formula: int
    peak: int
    fits: bool
    spare: int
    on_host: int
    pinned: int
    matmuls: tuple[str, ...]
    wide_matmuls: str
    link_bytes: float
    network_bytes: float
    compute_seconds: float
    exposed_seconds: float
    waited_seconds: float
    step_seconds: float
    examples_per_second: float
    tokens_per_second: float | None
    mfu: float
    compile_seconds: float
    report: Report = dataclasses.field(repr=False)

    @property
    def wire_bytes(self) -> float:
        return self.link_bytes + self.network_bytes


def _of(field: str) -> Callable[[Case], Cell]:
    return lambda case: getattr(case, field)


def _in_layers(case: Case) -> str:
    return ", layers" if case.order == LAYERS and case.accumulate > 1 else ""


class Column(NamedTuple):
    """What a case has in a column, a sentence about it, and how a number is printed."""

    value: Callable[[Case], Cell]
    about: str
    form: Callable[[float], str] | None = None


ON_HOST, HOST_WAIT = "on the host", "waits for it"  # columns of what is offloaded
COLUMNS = {
    "stage": Column(
        _of("stage"),
        "The ZeRO stage: 0 shards nothing, 1 the optimizer state, 2 also gradients, 3 also "
        "parameters.",
    ),
    "accumulate": Column(
        lambda case: f"{case.accumulate}{_in_layers(case)}",
        "Microbatches of a step; 'layers' where all of them pass a layer before the next one.",
    ),
    "remat": Column(
        lambda case: case.variant or "-",
        "What backward computes again (of a preset: full, dots or none), or the name of the loss.",
    ),
    "params": Column(_of("parameters"), "Memory of the parameters between steps.", human_bytes),
    "optimizer": Column(
        _of("optimizer"), "Memory of the optimizer state between steps.", human_bytes
    ),
    "grads": Column(
        _of("gradients"),
        "Gradients that are in memory when the step is at its peak.",
        human_bytes,
    ),
    "activations": Column(
        _of("activations"),
        "What else is in memory at the peak for a while: activations and gathered weights.",
        human_bytes,
    ),
    "formula": Column(
        _of("formula"),
        "The state and its gradients by the plan alone, as the ZeRO paper counts, without "
        "activations.",
        human_bytes,
    ),
    "peak": Column(
        _of("peak"),
        "The most memory that the step needs at a time, by the compiler.",
        human_bytes,
    ),
    "fits": Column(
        lambda case: "yes" if case.fits else "no",
        "Whether the peak is within the memory that is usable.",
    ),
    "spare": Column(_of("spare"), "The usable memory that is left at the peak.", human_bytes),
    ON_HOST: Column(
        _of("on_host"),
        "What is in the memory of the host: state that rests there, activations that wait there.",
        human_bytes,
    ),
    "sent, host": Column(
        _of("link_bytes"), "What a GPU sends in a step to others of its host.", human_bytes
    ),
    "sent, network": Column(
        _of("network_bytes"), "What a GPU sends in a step to other hosts.", human_bytes
    ),
    "step": Column(
        _of("step_seconds"),
        "The time of a step, modelled by replaying the compiler's schedule at the GPU's rates.",
        human_time,
    ),
    "exposed": Column(
        _of("exposed_seconds"),
        "The part of the step in which the GPU waits for communication; in the table of --choose "
        "also for copies from and to the host's memory.",
        human_time,
    ),
    HOST_WAIT: Column(
        _of("waited_seconds"),
        "The part of the step in which the GPU waits for copies from and to the host's memory.",
        human_time,
    ),
    "tokens/s": Column(
        _of("tokens_per_second"),
        "The tokens that all GPUs together train on in a second.",
        "{:,.0f}".format,
    ),
    "MFU": Column(
        _of("mfu"),
        "Model FLOPs utilization: the FLOPs that the model needs, without what is computed again, "
        "of those that the GPUs could do in the step.",
        "{:.1%}".format,
    ),
}
EXPLAINED = {title: column.about for title, column in COLUMNS.items()}


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
        return min(
            (case for case in self.cases if case.fits), key=lambda c: c.step_seconds, default=None
        )

    def to_dict(self) -> dict[str, object]:
        cases = [vars(case) | {"wire_bytes": case.wire_bytes} for case in self.cases]
        for case in cases:
            del case["report"]
        best = None if self.best is None else self.cases.index(self.best)
        return {
            "gpus": self.gpus,
            "settings": list(self.settings),
            "usable_bytes": self.gpu.usable,
            "cases": cases,
            "best": best,
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
        shown = {k: v for k, v in COLUMNS.items() if offloads or k not in (ON_HOST, HOST_WAIT)}
        return Table(
            list(shown),
            [[column.value(case) for column in shown.values()] for case in self.cases],
            [self._title()],
            [self._advice()],
            formats={title: column.form for title, column in shown.items() if column.form},
            right=("stage", "accumulate"),
            flexible=("remat",),
            keys=3,
        )

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
    found = dict.fromkeys(" and ".join(case.matmuls) for case in cases if case.matmuls)
    wide = next((case.wide_matmuls for case in cases if case.wide_matmuls), "")
    more = f" ({wide})" if wide else ""
    return [f"matmuls in {' or '.join(found)}{more}"] if found else []


# -- its figure


def draw_memory(
    axes: Axes,
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


def _draw_times(axes: Axes, cases: Sequence[Case]) -> None:
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
        axes.barh(rows, waited, left=left, color=COPIES, label="waiting for the host")
    for row, case in enumerate(cases):
        _write(axes, case.step_seconds / MS, row, f"{case.step_seconds / MS:,.0f}")
    axes.set_xlabel("ms per step, modelled")


def _write(axes: Axes, end: float, row: int, text: str) -> None:
    """Writes beside a bar that ends there."""
    axes.text(end, row, f" {text}", va="center", fontsize=_figures.SMALL)


def _case_name(case: Case) -> str:
    accumulated = f"x{case.accumulate}{_in_layers(case)}" if case.accumulate > 1 else ""
    return ", ".join(filter(None, (f"stage {case.stage}", accumulated, case.variant)))
