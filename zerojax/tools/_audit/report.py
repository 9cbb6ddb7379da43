"""The report of an audit: its findings, its table, its picture."""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator

import jax.numpy as jnp

from zerojax._figures import Figure
from zerojax._plan.show import groups_text
from zerojax._table import Row, html_table, human_bytes, human_time, paragraphs, text_table
from zerojax._update import offload as _offload
from zerojax.tools._audit import contract as _contract, timeline as _timeline, trace as _trace
from zerojax.tools._audit.measured import Measured, Traffic
from zerojax.tools._hlo.transfers import TO_DEVICE, TO_HOST

ROWS = 40  # of the printed table; to_dict has them all
# What a collective has in each column, and a sentence about it.
COLUMNS: dict[str, tuple[Callable[[Traffic], str], str]] = {
    "collective": (lambda one: one.kind, "The kind of collective that XLA compiled."),
    "dtype": (lambda one: ",".join(one.dtypes), "The dtypes in which arrays travel."),
    "sent": (
        lambda one: human_bytes(one.wire_bytes),
        "The bytes that a device sends each time that the collective runs.",
    ),
    "times": (lambda one: str(one.trips), "How often it runs in a step."),
    "loops": (lambda one: str(len(one.loops)), "How many loops it is in, one inside the other."),
    "group": (
        lambda one: " x ".join(one.axes) if one.axes else str(one.group),
        "The mesh axes over which devices take part, or how many devices do.",
    ),
    "when": (
        lambda one: "async" if one.asynchronous else "sync",
        "Whether it may run beside compute (async), or compute waits for it (sync).",
    ),
    "between": (
        lambda one: human_time(one.between),
        "The compute, modelled, that is scheduled between its start and its end.",
    ),
    "exposed": (
        lambda one: human_time(one.exposed),
        "The time, modelled, that the device waits for it each time that it runs.",
    ),
    "serves": (
        lambda one: one.serves,
        "The parameters that it moves, or else the line of your code that it comes from.",
    ),
}
EXPLAINED = {title: sentence for title, (_, sentence) in COLUMNS.items()}
ON_CPUS = (
    "Gathered weights and the order of collectives are those of CPU code; "
    "zerojax.aot.mesh('8xH100') compiles for GPUs."
)
TIMES = ("between", "exposed")  # of a GPU whose speed is known
# What needs less memory, below stage 3 and at it.
LESS_MEMORY = (
    "a higher stage, jax.checkpoint around layers, or accumulate=",
    "jax.checkpoint around layers, accumulate=, the host's memory (offload=), or more devices",
)


class Report(Measured):
    """The result of `zerojax.audit`: print it, `check()` it, `to_dict()` or `plot()` it, or
    `compare()` it with a trace.

    - `memory`: bytes of a device. `peak` is the sum of `state` (`parameters`, `optimizer` and
      `other_state`), `temporary` (`gathered` weights, `gradients` and `activations`), `batch` and
      `outputs`. `donated` is what outputs reuse, `on_host` what rests in host memory.
    - `traffic`: the collectives, each with its `kind`, `paths` (of the parameters that it moves),
      `trips` (how often it runs in a step), `total_bytes` and `exposed` seconds.
    - `wire_bytes` and, of those, `network_bytes`, which a device sends to other hosts in a step.
    - `step_seconds`, `exposed_seconds` and `overlap`, the share of the step that is compute. Times
      are modelled, and None where no GPU is known to model (`gpu`).
    """

    def findings(
        self, *, max_peak_bytes: float | None = None, min_overlap: float | None = None
    ) -> list[str]:
        """Returns what breaks the stage's contract or these limits, a line each."""
        check_limits(max_peak_bytes, min_overlap)
        return [*self._findings, *_over_limits(self, max_peak_bytes, min_overlap)]

    @functools.cached_property
    def _findings(self) -> list[str]:
        return _contract.findings(self)

    def check(
        self, *, max_peak_bytes: float | None = None, min_overlap: float | None = None
    ) -> "Report":
        """Raises an `AssertionError` with all findings if the contract or a limit is broken.

        Arguments:
            max_peak_bytes: the most memory per device.
            min_overlap: the least share of the modelled step that is compute.
        """
        found = self.findings(max_peak_bytes=max_peak_bytes, min_overlap=min_overlap)
        if found:
            stage = "" if self.plan is None else f" of stage {self.plan.stage}"
            broken = [f"the contract{stage}"] * bool(self._findings)
            broken += ["the limits of this check"] * (len(found) > len(self._findings))
            lines = "\n".join(f"  - {line}" for line in found)
            what = " and ".join(broken)
            raise AssertionError(f"the compiled program breaks {what}:\n{lines}")
        return self

    def to_dict(self) -> dict[str, object]:
        """Returns everything as plain Python values."""
        traffic = [
            dataclasses.asdict(t) | {"total_bytes": t.total_bytes, "serves": t.serves}
            for t in self.traffic
        ]
        memory = dataclasses.asdict(self.memory)
        return {
            "devices": self.devices,
            "gpu": self.gpu.name if self.gpu else None,
            "backend": self.backend,
            "stage": self.plan.stage if self.plan else None,
            "step_seconds": self.step_seconds,
            "compute_seconds": self.replay.compute if self.gpu else None,
            "exposed_seconds": self.exposed_seconds,
            "overlap": self.overlap,
            "matmul_flops": self.replay.flops,
            "wire_bytes": self.wire_bytes,
            "network_bytes": self.network_bytes,
            "wire_bytes_by_kind": self.totals,
            "bytes_to_device": self.host_bytes(TO_DEVICE),
            "bytes_to_host": self.host_bytes(TO_HOST),
            "host_wait_seconds": self.replay.waited if self.gpu else None,
            "memory": memory | {"peak": self.memory.peak, "temporary": self.memory.temporary},
            "not_donated": list(self.not_donated),
            "placement": [list(pair) for pair in self.placement],
            "kept": [list(pair) for pair in self.kept],
            "warnings": list(self.warnings),
            "unknown_loops": list(self.replay.unknown_loops),
            "traffic": traffic,
        }

    def plot(self, path: str | None = None) -> Figure:
        """Draws the timeline of compute and collectives with matplotlib; saves it to `path`."""
        return _timeline.plot(self, path)

    def compare(self, trace: str | os.PathLike) -> _trace.Comparison:
        """Returns the modelled step beside those in a trace of the same step.

        Print it; `to_dict()` has it in seconds.

        Arguments:
            trace: what was passed to `jax.profiler.trace`, or an `.xplane.pb` in it.
        """
        return _trace.compare(self, trace)

    def __str__(self) -> str:
        rows = self._rows()
        at = {title: column for column, title in enumerate(rows[0])}
        table = text_table(
            rows,
            right=[at[title] for title in ("sent", "times", "loops", *TIMES) if title in at],
            flexible=(at["serves"],),
            optional=[at[title] for title in ("loops", "between", "group") if title in at],
        )
        return "\n".join(
            [paragraphs(self._summary()), "", table, *map(_paragraph, self._left_out())]
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table(self._summary(), self._rows(), below=self._left_out())

    def _summary(self) -> list[str]:
        memory = self.memory
        stage = f"ZeRO stage {self.plan.stage}, " if self.plan else ""
        if self.plan is not None and self.plan.is_grouped:
            stage += f"{groups_text(self.plan.groups)}, "
        lines = [
            f"{stage}{self.devices} devices ({self.gpu.name if self.gpu else self.backend})",
            f"memory per device  {memory.on_device}",
            "sent per device    "
            + human_bytes(self.wire_bytes)
            + "".join(f", {kind} {human_bytes(sent)}" for kind, sent in self.totals.items())
            + (f"; {human_bytes(self.network_bytes)} between hosts" if self.network_bytes else ""),
        ]
        if memory.on_host or memory.host_kept:
            kept = human_bytes(memory.host_kept)
            ways = (f"{human_bytes(self.host_bytes(way))} {way}" for way in (TO_DEVICE, TO_HOST))
            lines.append(
                f"host memory        {human_bytes(memory.on_host)} of each device's state"
                f"{f', {kept} kept for backward' if memory.host_kept else ''}; copied in a step: "
                f"{', '.join(ways)}"
            )
            lines += _offload.told_of_pool(self.pinned)
        elif self.backend == "cpu" and self.plan is not None and self.plan.offloads:
            lines.append("host memory        is counted as the device's: CPUs have one memory")
        if self.gpu:
            waits = f", waiting for the host {human_time(self.replay.waited)}"
            lines.append(
                f"modelled step      {human_time(self.replay.step)}: compute "
                f"{human_time(self.replay.compute)}, exposed communication "
                f"{human_time(self.replay.exposed)}{waits if self.replay.transfers else ''} "
                f"(overlap {self.overlap or 0:.3f}{self.caveat and f'; {self.caveat}'})"
            )
        if self.wide_matmuls:
            lines.append(f"matmuls            in {' and '.join(self.matmuls)}: {self.wide_matmuls}")
        if self.replay.unknown_loops:
            names = ", ".join(self.replay.unknown_loops[:3])
            lines.append(f"loops of unknown length are counted once: {names}")
        lines += [f"warning: {text}" for text in self.warnings]
        return lines if self.plan is None else [*lines, self._verdict(self.plan.stage)]

    def _verdict(self, stage: int) -> str:
        """Says whether the stage's contract holds."""
        count = len(self._findings)
        if not count:
            return f"keeps the contract of stage {stage}"
        if _contract.UNNAMED in self._findings:
            return f"the contract of stage {stage} cannot be checked: report.check() says why"
        ways = "1 way" if count == 1 else f"{count} ways"
        return f"breaks the contract of stage {stage} in {ways}: report.check()"

    def _rows(self) -> list[Row]:
        """Makes the rows of the largest collectives, below the heading."""
        largest = sorted(self.traffic, key=lambda t: -t.total_bytes)[:ROWS]
        shown = {k: v for k, v in COLUMNS.items() if self.gpu or k not in TIMES}
        return [tuple(shown), *(tuple(cell(one) for cell, _ in shown.values()) for one in largest)]

    def _left_out(self) -> list[str]:
        left = len(self.traffic) - ROWS
        lines = [f"... and {left} smaller ones"] if left > 0 else []
        if self.backend == "cpu" and self.traffic:
            lines.append(ON_CPUS)
        precision = self.plan and self.plan.precision
        narrow = precision and (precision.compute or precision.param)
        if self.backend == "cpu" and narrow and jnp.finfo(narrow).bits < 32:
            lines.append(f"CPUs send {jnp.dtype(narrow).name} as f32; GPUs do not.")
        return lines


def _paragraph(line: str) -> str:
    return paragraphs([line])


def check_limits(max_peak_bytes: object, min_overlap: object) -> None:
    """Raises for limits that limit nothing."""
    for name, value, most in (
        ("max_peak_bytes", max_peak_bytes, math.inf),
        ("min_overlap", min_overlap, 1),
    ):
        if value is not None and not (isinstance(value, int | float) and 0 <= value <= most):
            below = " between 0 and 1, a share of the step" if most == 1 else " of bytes"
            raise ValueError(f"{name}={value!r} must be a number{below}.")


def _over_limits(
    report: Measured, max_peak_bytes: float | None, min_overlap: float | None
) -> Iterator[str]:
    """Finds where a step exceeds the limits that a user gave."""
    peak, at_most = report.memory.peak, report.plan is not None and report.plan.stage == 3
    if max_peak_bytes is not None and peak > max_peak_bytes:
        yield (
            f"the peak is {human_bytes(peak)} per device, above max_peak_bytes="
            f"{human_bytes(max_peak_bytes)}. Use {LESS_MEMORY[at_most]}."
        )
    if min_overlap is not None and report.overlap is None:
        yield "min_overlap= needs modelled times. Pass gpu='H100' to audit, or compile for GPUs."
    elif min_overlap is not None and report.overlap is not None and report.overlap < min_overlap:
        yield (
            f"compute is {report.overlap:.3f} of the modelled step, below min_overlap="
            f"{min_overlap}: {human_time(report.replay.exposed)} of communication are exposed. "
            "Use prefetch=1, or more tokens per device."
        )
