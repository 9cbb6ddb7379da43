"""What one way to train costs, and how forecasts of several print and plot."""

import dataclasses
import os
from collections.abc import Mapping, Sequence

import numpy as np

from zerojax import _figures
from zerojax._figures import Figure, PlotAxes
from zerojax._plan import offload as _offload
from zerojax._plan.show import ACTIVATIONS, COLOURS, GRADS, TITLES
from zerojax._state.state import OPT_STATE, PARAMS
from zerojax._step.schedule import LAYERS, Schedule, unordered
from zerojax._table import Column, Printed, Table, human_bytes, human_time, total
from zerojax._types import Number
from zerojax.tools._audit.report import Report
from zerojax.tools._forecast import network as _network
from zerojax.tools._hlo import gpus as _known
from zerojax.tools._hlo.gpus import Gpu

GIB, MS = 2**30, 1e-3
# The parts of a step's time, and their colours.
TIMES = {
    "compute": "0.75",
    "exposed communication": _figures.EXPOSED,
    "waiting for the host": "#b2ab8c",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to train on some GPUs: what you asked for, and what the compiled step costs.

    - A study has several models (`model`), and asks for some rows on each GPU (`asked`). `size` is
      the number that it finds of a model, which has `n_params` parameters. `settings` names the
      other options of its steps. `failed` says why a case has no numbers. `share` GPUs share each
      row.
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
    size: int = 0
    n_params: int = 0
    settings: str = ""
    failed: str = ""
    unread: str = ""
    share: int = 1
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
    def fits(self) -> bool:
        return not self.failed and self.peak <= self.usable

    @property
    def spare(self) -> int:
        return self.usable - self.peak

    @property
    def rows(self) -> int:
        """Rows of the batch on each GPU, or on those that share them."""
        return self.examples * self.share // self.count

    @property
    def wire_bytes(self) -> Number:
        return total(self.link_bytes, self.network_bytes)

    @property
    def stalled_seconds(self) -> Number:
        """The time in which compute waits, for communication and for the host."""
        return total(self.exposed_seconds, self.waited_seconds)

    @property
    def examples_per_second(self) -> Number:
        return self.each_second(self.examples)

    @property
    def tokens_per_second(self) -> Number:
        return None if self.tokens is None else self.each_second(self.tokens)

    @property
    def tflops(self) -> Number:
        """The FLOPs that the model needs, as each GPU does them, in 1e12 a second."""
        return self.each_second(self.flops / 1e12)

    @property
    def mfu(self) -> Number:
        return self.each_second(self.flops / self.gpu.flops)

    @property
    def order(self) -> str:
        return self.schedule.order

    @property
    def gpu(self) -> Gpu:
        return _known.parse_count(self.gpus)[1]

    @property
    def rounds(self) -> str:
        """Its microbatches, and whether all of them pass a layer before the next one."""
        in_layers = self.order == LAYERS and self.accumulate > 1
        return f"{self.accumulate}{', layers' * in_layers}"

    def each_second(self, count: float) -> Number:
        return self.step_seconds and count / self.step_seconds  # 0 of what was not compiled

    def to_dict(self) -> dict[str, object]:
        """Returns all but the report, as JSON has it."""
        fields = [field.name for field in dataclasses.fields(self)]
        derived = [name for name, value in vars(Case).items() if isinstance(value, property)]
        names = (name for name in (*fields, *derived) if name not in ("report", "gpu"))
        values: dict[str, object] = {name: getattr(self, name) for name in names}
        return values | {"schedule": str(self.schedule)}


ON_HOST, HOST_WAIT = "on the host", "waits for it"  # columns of offloaded steps
SCHEDULE = "schedule"
STAGE = "Stage 0 shards nothing, 1 the optimizer state, 2 also gradients, 3 also parameters."
# By title: an attribute of a case or a function of it, the format of numbers, and a sentence.
CASE_COLUMNS: dict[str, Column] = {
    "stage": ("stage", str, STAGE),
    "accumulate": ("rounds", str, "Microbatches; 'layers': all pass a layer before the next one."),
    "remat": (lambda case: case.variant or "-", str, "What backward recomputes, or the loss."),
    SCHEDULE: (lambda case: str(unordered(case.schedule)), str, "The schedule, of several."),
    "params": ("parameters", human_bytes, "Memory of the parameters between steps."),
    "optimizer": ("optimizer", human_bytes, "Memory of the optimizer state between steps."),
    "grads": ("gradients", human_bytes, "Gradients that are in memory at the peak."),
    "activations": ("activations", human_bytes, "Activations and gathered weights at the peak."),
    "formula": ("formula", human_bytes, "State and gradients by the plan, as the paper counts."),
    "peak": ("peak", human_bytes, "The most memory that the step needs, by the compiler."),
    "fits": ("fits", str, "Whether the peak is within the memory that is usable."),
    "spare": ("spare", human_bytes, "The usable memory that is left at the peak."),
    ON_HOST: ("on_host", human_bytes, "State and activations in the memory of the host."),
    "sent, host": ("link_bytes", human_bytes, "Bytes that a GPU sends in a step inside its host."),
    "sent, network": ("network_bytes", human_bytes, "Bytes that it sends to other hosts."),
    "step": ("step_seconds", human_time, "The time of a step, modelled by XLA's schedule."),
    "exposed": (
        "exposed_seconds",
        human_time,
        "Its part in which the GPU waits for communication; with --choose also for the host.",
    ),
    HOST_WAIT: ("waited_seconds", human_time, "Its part in which the GPU waits for copies."),
    "tokens/s": ("tokens_per_second", "{:,.0f}".format, "Tokens of all GPUs in a second."),
    "MFU": ("mfu", "{:.1%}".format, "The FLOPs that the model needs, as a share of the peak."),
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
        cases, usable = self.cases, self.gpu.usable
        figure, (memory, times) = _figures.panels(1.6 + 0.38 * len(cases), 3, 2)
        sizes = [[c.parameters, c.optimizer, c.gradients or 0, c.peak] for c in cases]
        sizes = np.array([[*known, peak - sum(known)] for *known, peak in sizes]) / GIB
        kinds = {TITLES[kind]: COLOURS[kind] for kind in (PARAMS, OPT_STATE, GRADS, ACTIVATIONS)}
        peaks = [f"{c.peak / GIB:.1f}{'' if c.fits else ', does not fit'}" for c in cases]
        _draw_bars(memory, kinds, sizes, peaks)
        for note in memory.texts:  # which the line of what is usable may cross
            note.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0})
        if is_near := 2 * sizes.sum(1).max() > usable / GIB:
            memory.axvline(usable / GIB, color="black", linestyle="--", linewidth=1)
        share = f"{'; line:' if is_near else ', of'} {usable / GIB:.0f} usable"
        memory.set_xlabel(f"GiB per GPU at the peak{share}")
        seconds = [[c.compute_seconds, c.exposed_seconds, c.waited_seconds] for c in cases]
        steps = ["-" if c.step_seconds is None else f"{c.step_seconds / MS:,.0f}" for c in cases]
        _draw_bars(times, TIMES, np.nan_to_num(np.array(seconds, float) / MS), steps)
        times.set_xlabel("ms per step, modelled")
        ways = [(f"stage {c.stage}", f"x{c.rounds}" * (c.accumulate > 1), c.variant) for c in cases]
        memory.set_yticks(range(len(cases)), [", ".join(filter(None, way)) for way in ways])
        memory.invert_yaxis()
        title = "; ".join([f"one training step on {self.gpus}, compiled", *self.settings])
        _figures.titled(figure, title, 4)
        return _figures.finished(figure, path)

    def table(self) -> Table:
        hidden = () if any(case.on_host for case in self.cases) else (ON_HOST, HOST_WAIT)
        hidden += () if len({unordered(case.schedule) for case in self.cases}) > 1 else (SCHEDULE,)
        memory = f"{human_bytes(self.gpu.usable)} usable of {human_bytes(self.gpu.memory)} each"
        about = [*self.settings, "bytes per GPU, grads and activations at the peak"]
        return Table.of(
            {k: v for k, v in CASE_COLUMNS.items() if k not in hidden},
            self.cases,
            title=titled(f"{self.gpus}, {memory}", self.cases, *about),
            notes=[*unread(self.cases), self._advice()],
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
            f"accumulate={best.accumulate}" * (best.accumulate > 1),
            f"schedule={best.schedule}" * (best.schedule != Schedule()),
            f"remat {best.variant!r}" * bool(best.variant),
            f"{human_time(best.step_seconds)} a step",
            f"{human_bytes(best.spare)} to spare.",
        ]
        fastest = f"Fastest that fits: {', '.join(filter(None, how))}"
        return " ".join([fastest, *told_to_hosts(self.gpu, [best])])


# -- what results of forecasts say of their cases


def titled(first: str, cases: Sequence[Case], *about: str) -> list[str]:
    """Returns the lines above a table: what its cases share, their dtypes, what the GPU lacks."""
    dtypes = dict.fromkeys(" and ".join(case.matmuls) for case in cases if case.matmuls)
    wide = next((f" ({case.wide_matmuls})" for case in cases if case.wide_matmuls), "")
    matmuls = [f"matmuls in {' or '.join(dtypes)}{wide}"] if dtypes else []
    title = [first, *matmuls, *about, "times modelled", "MFU of dense FLOP/s in 16 bits"]
    return ["; ".join(title), *dict.fromkeys(case.lacks for case in cases if case.lacks)]


def unread(cases: Sequence[Case]) -> list[str]:
    """Says once which programs could not be read."""
    return list(dict.fromkeys(case.unread for case in cases if case.unread))


def told_to_hosts(gpu: Gpu, cases: Sequence[Case]) -> list[str]:
    """Says which environment variables hosts need: for a slow network, for memory to pin."""
    advice = _network.advice(gpu, os.environ) if any(case.network_bytes for case in cases) else ""
    pinned = max((case.pinned for case in cases), default=0)
    return [*filter(None, [advice]), *_offload.told_of_pool(pinned)]


def _draw_bars(
    axes: PlotAxes, colours: Mapping[str, str], lengths: np.ndarray, notes: Sequence[str]
) -> None:
    """Draws a bar for each case, of parts with a colour one after the other, and a note beside."""
    style, ends = {"edgecolor": "white", "linewidth": 0.5}, lengths.cumsum(1)
    for part, (label, colour) in enumerate(colours.items()):
        if (widths := lengths[:, part]).any():
            starts = ends[:, part] - widths
            axes.barh(range(len(notes)), widths, left=starts, label=label, color=colour, **style)
    for row, note in enumerate(notes):
        axes.text(ends[row, -1], row, f" {note}", va="center", fontsize=_figures.SMALL)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12)
