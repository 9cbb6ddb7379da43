"""The report of an audit: its findings, its table, its picture."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import jax.numpy as jnp

from zerojax import _figures
from zerojax._figures import Figure
from zerojax._plan import offload as _offload
from zerojax._plan.show import groups_text
from zerojax._table import Printed, Table, grouped, human_bytes, human_time
from zerojax.tools._audit import contract as _contract
from zerojax.tools._audit.measurement import OF_OPTIMIZER, Measurement
from zerojax.tools._hlo.timeline import IN_HOST, TO_DEVICE, TO_HOST, Sent, Span

LARGEST_SHOWN = 40  # of the printed table; to_dict has them all
TRAFFIC_EXPLAINED = {
    "collective": "The kind of collective that XLA compiled.",
    "dtype": "The dtypes in which arrays travel.",
    "sent": "The bytes that a device sends each time that the collective runs.",
    "times": "How often it runs in a step.",
    "loops": "How many loops it is in, one inside the other.",
    "group": "The mesh axes over which devices take part, or how many devices do.",
    "when": "Whether it may run beside compute (async), or compute waits for it (sync).",
    "between": "The compute, modelled, that is scheduled between its start and its end.",
    "exposed": "The time, modelled, that the device waits for it each time that it runs.",
    "serves": "The parameters that it moves, or else what your loss sends, and its line there.",
}
CELLS: dict[str, Callable[[Sent], str]] = {
    "collective": lambda one: one.kind,
    "dtype": lambda one: ",".join(one.dtypes),
    "sent": lambda one: human_bytes(one.wire_bytes),
    "times": lambda one: str(one.trips),
    "loops": lambda one: str(len(one.loops)),
    "group": lambda one: " x ".join(one.axes) if one.axes else str(one.group),
    "when": lambda one: "async" if one.asynchronous else "sync",
    "between": lambda one: human_time(one.between),
    "exposed": lambda one: human_time(one.exposed),
    "serves": lambda one: one.serves,
}
TIME_COLUMNS = ("between", "exposed")  # for a GPU whose speed is known
FIGURES = ("step_seconds", "exposed_seconds", "overlap", "wire_bytes", "network_bytes")
NO_TIMES = "zerojax knows no speeds of TPUs"
ON_CPUS = (
    "Gathered weights and the order of collectives are those of CPU code; "
    "zerojax.aot.mesh('8xH100') compiles for GPUs."
)
# Ways to need less memory, below stage 3 and at it.
LESS_MEMORY = (
    "a higher stage, jax.checkpoint around layers, or accumulate=",
    "jax.checkpoint around layers, accumulate=, the host's memory (offload=), or more devices",
)
# Readable in grey too: each is darker than the one before.
TIMELINE_COLOURS = {
    "compute": "#a6cee3",
    "all-gather": "#4f9bd0",
    "reduce-scatter": "#1b4f80",
    "all-reduce": "#6a3d9a",
    TO_DEVICE: "#b2ab8c",
    TO_HOST: "#7d7660",
    "other": "#777777",
    "exposed": _figures.EXPOSED,
}
# Of the schedule's streams; those below are of programs that have copies.
LANES = {"compute": 2, "collectives": 1, "exposed": 0, TO_DEVICE: -1, TO_HOST: -2}
LABEL = 0.04  # half of a loop's label in a timeline, as a share of the timeline's width


class Report(Printed, Measurement):
    """The result of `zerojax.audit`: print it, `check()` it, `to_dict()` or `plot()` it.

    - `memory`: bytes of a device. `peak` is the sum of `state` (`parameters`, `optimizer` and
      `other_state`), `temporary` (`gathered` weights, `gradients` and `activations`), `batch` and
      `outputs`. `donated` is what outputs reuse, `on_host` what stays in host memory.
    - `traffic`: the collectives, each with its `kind`, `paths` (of the parameters that it moves),
      `sends` (the share that the loss itself sends), `trips` (how often it runs in a step),
      `total_bytes` and `exposed` seconds. `loss_totals` adds up what the loss sends.
    - `wire_bytes` and, of those, `network_bytes`, which a device sends to other hosts in a step.
    - `step_seconds`, `exposed_seconds` and `overlap`, the share of the step that is compute. Times
      are modelled, and None where no GPU is known to model (`gpu`).
    - `unread`: the line of the program that zerojax cannot read, if there is one. What depends on
      it is None then, and `check()` raises.
    """

    def findings(
        self, *, max_peak_bytes: float | None = None, min_overlap: float | None = None
    ) -> list[str]:
        """Returns what breaks the stage's promises or these limits, a line each."""
        check_limits(max_peak_bytes, min_overlap)
        return [*self._findings, *_over_limits(self, max_peak_bytes, min_overlap)]

    @functools.cached_property
    def _findings(self) -> list[str]:
        return _contract.findings(self)

    def check(
        self, *, max_peak_bytes: float | None = None, min_overlap: float | None = None
    ) -> "Report":
        """Raises an `AssertionError` with all findings if a promise or a limit is broken.

        Arguments:
            max_peak_bytes: the most memory per device.
            min_overlap: the least share of the modelled step that is compute.
        """
        findings = self.findings(max_peak_bytes=max_peak_bytes, min_overlap=min_overlap)
        if findings:
            stage = "a stage" if self.plan is None else f"stage {self.plan.stage}"
            broken = [f"what {stage} promises"] * bool(self._findings)
            broken += ["the limits of this check"] * (len(findings) > len(self._findings))
            lines = "".join(f"\n  - {line}" for line in findings)
            says = f"the compiled program breaks {' and '.join(broken)}"
            says = f"what {stage} promises cannot be checked" if self.unread else says
            raise AssertionError(f"{says}:{lines}")
        return self

    def to_dict(self) -> dict[str, object]:
        """Returns everything as plain Python values."""
        memory, traffic = self.memory, []
        for one in self.traffic:
            fields = dataclasses.asdict(dataclasses.replace(one, instruction=None))
            del fields["instruction"], fields["members"], fields["by_engine"]
            names = ("group", "total_bytes", "sends", "serves")
            derived = {name: getattr(one, name) for name in names}
            traffic.append(fields | derived)
        values = vars(self).items()
        plain: dict[str, object] = {k: v for k, v in values if isinstance(v, str | int | tuple)}
        return plain | {
            **{name: getattr(self, name) for name in FIGURES},
            "gpu": self.gpu.name if self.gpu else None,
            "stage": self.plan.stage if self.plan else None,
            "compute_seconds": self.modelled(self.replay.compute),
            "matmul_flops": None if self.unread or self.backend == "tpu" else self.replay.flops,
            "wire_bytes_by_kind": None if self.unread else self.totals,
            "wire_bytes_of_loss": None if self.unread else self.loss_totals,
            "unread": self.unread,
            "bytes_to_device": self.host_bytes(TO_DEVICE),
            "bytes_to_host": self.host_bytes(TO_HOST),
            "host_wait_seconds": self.modelled(self.replay.waited),
            "memory": dataclasses.asdict(memory)
            | {"peak": memory.peak, "temporary": memory.temporary},
            "unknown_loops": self.replay.unknown_loops,
            "traffic": traffic,
        }

    def plot(self, path: str | None = None) -> Figure:
        """Draws the timeline of compute and collectives with matplotlib; saves it to `path`."""
        lacks = self.unread
        if self.gpu is None:
            lacks = (
                f"the program was compiled for {self.backend}. Pass gpu='H100' to audit, or "
                "compile on zerojax.aot.mesh('8xH100')."
            )
        if self.backend == "tpu":
            lacks = f"{NO_TIMES}. print(report) has the rest."
        if lacks or self.gpu is None:
            raise ValueError(f"there are no times to plot: {lacks}")
        figure, axes = _figures.panels(2.8)
        spans = drawn_once([span for span in self.replay.spans if span.stream != IN_HOST])
        lanes = {name: at for name, at in LANES.items() if at >= 0 or self.replay.transfers}
        end = 1e3 * max(span.end for span in spans)
        known = {what: what for what in TIMELINE_COLOURS}
        drawn = grouped(spans, lambda span: known.get(span.kind or span.stream, "other"))
        for what in (what for what in TIMELINE_COLOURS if what in drawn):
            bars = [(1e3 * span.start, 1e3 * (span.end - span.start)) for span in drawn[what]]
            place = (lanes[drawn[what][0].stream] - 0.4, 0.8)
            # Collectives may follow one another at once: a white line tells them apart.
            line = {"edgecolor": "white", "linewidth": 0 if what == "compute" else 0.3}
            axes.broken_barh(bars, place, facecolor=TIMELINE_COLOURS[what], label=what, **line)
        for trips, group in itertools.groupby(spans, key=lambda span: span.trips):
            if trips > 1:  # a line over the loop's body
                inside = list(group)
                first, last = 1e3 * inside[0].start, 1e3 * max(span.end for span in inside)
                axes.plot([first, last], [2.55, 2.55], color="black", linewidth=1)
                middle = max((first + last) / 2, LABEL * end)  # not across the axis
                axes.text(middle, 2.6, f"x {trips}", ha="center", va="bottom")
        axes.set_yticks(list(lanes.values()), list(lanes))
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
        looped = any(span.trips > 1 for span in spans)
        axes.set_xlabel("ms, each loop drawn once (x: how often it runs)" if looped else "ms")
        caveat = self.caveat and f"\n({self.caveat})"
        waits = f", {human_time(self.replay.waited)} waiting for the host"
        waits *= bool(self.replay.transfers)
        axes.set_title(
            f"modelled step {human_time(self.replay.step)} on {self.devices} x {self.gpu.name}, "
            f"{human_time(self.replay.exposed)} exposed{waits}{caveat}"
        )
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(0, end)
        axes.set_ylim(min(lanes.values()) - 0.6, 2.9)
        return _figures.finished(figure, path)

    def table(self) -> Table:
        largest = sorted(self.traffic, key=lambda one: -one.total_bytes)[:LARGEST_SHOWN]
        timed = self.step_seconds is not None
        shown = [title for title in CELLS if timed or title not in TIME_COLUMNS]
        return Table(
            shown,
            [[CELLS[title](one) for title in shown] for one in largest],
            title=[*self._summary(), ""],
            notes=self._notes(),
            right=("sent", "times", "loops", *TIME_COLUMNS),
            flexible=("serves",),
            optional=("loops", "between", "group"),
        )

    def _summary(self) -> list[str]:
        memory, replay, plan = self.memory, self.replay, self.plan
        stage = f"ZeRO stage {plan.stage}, " if plan else ""
        stage += f"{groups_text(plan.groups)}, " if plan and plan._is_grouped else ""
        totals = {} if self.unread else self.totals
        kinds = "".join(f", {kind} {human_bytes(sent)}" for kind, sent in totals.items())
        between = f"; {human_bytes(self.network_bytes)} between hosts" * bool(self.network_bytes)
        on = self.gpu.name if self.gpu else self.backend.replace("tpu", "TPUs")
        lines = [
            f"{stage}{self.devices} devices ({on})",
            f"memory per device  {memory.on_device}",
            f"sent per device    {human_bytes(self.wire_bytes)}{kinds}{between}",
        ]
        if by_loss := [f"{what} {human_bytes(sent)}" for what, sent in self.loss_totals.items()]:
            lines.append(f"of that, sent by   {', '.join(by_loss)}")
        if memory.on_host or memory.host_kept:
            kept = f", {human_bytes(memory.host_kept)} kept for backward" * bool(memory.host_kept)
            ways = [f"{human_bytes(self.host_bytes(way))} {way}" for way in (TO_DEVICE, TO_HOST)]
            lines.append(
                f"host memory        {human_bytes(memory.on_host)} of each device's state{kept}; "
                f"copied in a step: {', '.join(ways)}"
            )
            lines += _offload.told_of_pool(self.pinned)
        elif self.backend == "cpu" and plan is not None and plan._offloads:
            lines.append("host memory        is counted as the device's: CPUs have one memory")
        if self.step_seconds is not None:
            waits = f", waiting for the host {human_time(replay.waited)}" * bool(replay.transfers)
            lines.append(
                f"modelled step      {human_time(replay.step)}: compute "
                f"{human_time(replay.compute)}, exposed communication "
                f"{human_time(replay.exposed)}{waits} "
                f"(overlap {self.overlap or 0:.3f}{self.caveat and f'; {self.caveat}'})"
            )
        if self.backend == "tpu":
            lines.append(f"modelled step      none: {NO_TIMES}")
        wide = self.wide_matmuls and f"in {' and '.join(self.matmuls)}: {self.wide_matmuls}"
        lines += [f"matmuls            {text}" for text in (wide, self.lacks) if text]
        if names := ", ".join(replay.unknown_loops[:3]):
            lines.append(f"loops of unknown length are counted once: {names}")
        lines += [f"layers             {text}" for text in self.layers]
        lines += [f"warning: {text}" for text in (*self.warnings, self.unread) if text]
        return lines if plan is None else [*lines, self._verdict(plan.stage)]

    def _verdict(self, stage: int) -> str:
        """Says whether the stage's promises hold."""
        count = len(self._findings)
        if self.unread or _contract.UNNAMED in self._findings:
            return f"what stage {stage} promises cannot be checked: report.check() says why"
        breaks = f"breaks what stage {stage} promises in {count} place{'s' * (count > 1)}"
        return f"{breaks}: report.check()" if count else f"keeps what stage {stage} promises"

    def _notes(self) -> list[str]:
        left = len(self.traffic) - LARGEST_SHOWN
        lines = [f"... and {left} smaller ones"] if left > 0 else []
        update = [one for one in self.traffic if OF_OPTIMIZER.search(one.scope)]
        sent = sum(x.total_bytes for x in update if x.kind in ("all-gather", "all-reduce"))
        if self.plan and 2 * sent > sum(leaf.nbytes for leaf in self.plan.params):
            lines.append(
                f"The optimizer sends {human_bytes(sent)} to multiply whole matrices: "
                "zerojax.manual.by_matrix(tx) runs each on the device that owns it."
            )
        if self.backend == "cpu" and self.traffic:
            lines.append(ON_CPUS)
        precision = self.plan and self.plan.precision
        narrow = precision and (precision.compute or precision.param)
        if self.backend == "cpu" and narrow and jnp.finfo(narrow).bits < 32:
            lines.append(f"CPUs send {jnp.dtype(narrow).name} as f32; GPUs do not.")
        return lines


def check_limits(max_peak_bytes: object, min_overlap: object) -> None:
    """Raises for limits that limit nothing."""
    limits = {"max_peak_bytes": (max_peak_bytes, math.inf), "min_overlap": (min_overlap, 1)}
    for name, (value, most) in limits.items():
        if value is not None and not (isinstance(value, int | float) and 0 <= value <= most):
            below = " between 0 and 1, a share of the step" if most == 1 else " of bytes"
            raise ValueError(f"{name}={value!r} must be a number{below}.")


def _over_limits(
    report: Measurement, max_peak_bytes: float | None, min_overlap: float | None
) -> Iterator[str]:
    """Finds where a step exceeds the limits that a user gave."""
    peak, at_most = report.memory.peak, report.plan is not None and report.plan.stage == 3
    if peak is None and max_peak_bytes is not None:
        yield f"the peak, to hold against max_peak_bytes={human_bytes(max_peak_bytes)}, is unknown."
    elif peak is not None and max_peak_bytes is not None and peak > max_peak_bytes:
        yield (
            f"the peak is {human_bytes(peak)} per device, above max_peak_bytes="
            f"{human_bytes(max_peak_bytes)}. Use {LESS_MEMORY[at_most]}."
        )
    if min_overlap is not None and report.backend == "tpu":
        yield f"min_overlap= needs modelled times, and {NO_TIMES}. Leave it out."
    elif min_overlap is not None and report.overlap is None and not report.unread:
        yield "min_overlap= needs modelled times. Pass gpu='H100' to audit, or compile for GPUs."
    elif min_overlap is not None and report.overlap is not None and report.overlap < min_overlap:
        yield (
            f"compute is {report.overlap:.3f} of the modelled step, below min_overlap="
            f"{min_overlap}: {human_time(report.replay.exposed)} of communication are exposed. "
            "Use Schedule(prefetch=True), or more tokens per device."
        )


# -- the picture


def drawn_once(spans: Sequence[Span]) -> list[Span]:
    """Moves spans together, so that the later iterations of a loop take no room."""
    moved, end, gap = [], 0.0, 0.0
    for span in sorted(spans, key=lambda s: s.start):
        gap += max(0.0, span.start - gap - end)
        moved.append(dataclasses.replace(span, start=span.start - gap, end=span.end - gap))
        end = max(end, span.end - gap)
    return moved
