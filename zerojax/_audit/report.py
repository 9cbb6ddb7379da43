"""What an audit found: every collective, every byte, and how to look at them."""

import dataclasses
import math
from typing import Any

from zerojax._audit import contract as _contract, timeline as _timeline
from zerojax._audit.measured import Measured
from zerojax._audit.traffic import Traffic
from zerojax._text import html_table, human_bytes, human_time, text_table

ROWS = 40  # of the printed table; to_dict has them all


class Report(Measured):
    """Made by `zerojax.audit`. Print it; `check()` it; `to_dict()` and `plot()` it.

    Times are modelled, and None where no GPU is known to model (`gpu`).
    """

    def findings(
        self, *, max_peak_bytes: float | None = None, min_overlap: float | None = None
    ) -> list[str]:
        """What breaks the stage's contract, a line each; empty where nothing does."""
        check_limits(max_peak_bytes, min_overlap)
        return _contract.findings(self, max_peak_bytes, min_overlap)

    def check(
        self, *, max_peak_bytes: float | None = None, min_overlap: float | None = None
    ) -> "Report":
        """Raises `AssertionError` with all findings where the stage's contract is broken.

        Arguments:
            max_peak_bytes: the most memory per device.
            min_overlap: the least share of the modelled step that is compute.
        """
        found = self.findings(max_peak_bytes=max_peak_bytes, min_overlap=min_overlap)
        if found:
            stage = "" if self.plan is None else f" of stage {self.plan.stage}"
            lines = "\n".join(f"  - {line}" for line in found)
            raise AssertionError(f"the compiled program breaks the contract{stage}:\n{lines}")
        return self

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain Python values."""
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
            "wire_bytes_by_kind": self.totals,
            "memory": memory | {"peak": self.memory.peak, "temporary": self.memory.temporary},
            "not_donated": list(self.not_donated),
            "placement": [list(pair) for pair in self.placement],
            "kept": [list(pair) for pair in self.kept],
            "warnings": list(self.warnings),
            "unknown_loops": list(self.replay.unknown_loops),
            "traffic": traffic,
        }

    def plot(self, path: str | None = None) -> Any:
        """The timeline of compute and collectives, as a matplotlib figure; saved to `path`."""
        return _timeline.plot(self, path)

    def __str__(self) -> str:
        rows, below = self._traffic_rows()
        return "\n".join([*self._summary(), "", text_table(rows, frozenset({2, 3, 4})), *below])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows, below = self._traffic_rows()
        return html_table(self._summary(), rows, below=below)

    def _summary(self) -> list[str]:
        memory = self.memory
        stage = f"ZeRO stage {self.plan.stage}, " if self.plan else ""
        lines = [
            f"{stage}{self.devices} devices ({self.gpu.name if self.gpu else self.backend})",
            f"memory per device  {human_bytes(memory.peak)} when fullest: {self._memory_text()}",
            "sent per device    "
            + human_bytes(self.wire_bytes)
            + "".join(f", {kind} {human_bytes(sent)}" for kind, sent in self.totals.items()),
        ]
        if self.gpu:
            lines.append(
                f"modelled step      {human_time(self.replay.step)}: compute "
                f"{human_time(self.replay.compute)}, exposed communication "
                f"{human_time(self.replay.exposed)} (overlap {self.overlap or 0:.3f})"
            )
        if self.replay.unknown_loops:
            names = ", ".join(self.replay.unknown_loops[:3])
            lines.append(f"loops of unknown length are counted once: {names}")
        return [*lines, *(f"warning: {text}" for text in self.warnings)]

    def _memory_text(self) -> str:
        memory = self.memory
        uses = {
            "parameters": memory.parameters,
            "optimizer": memory.optimizer,
            "gradients": memory.gradients,
            "gathered weights": memory.gathered,
            "activations": memory.activations,
            "batch": memory.batch,
            "rest": memory.other_state + memory.outputs,
        }
        parts = ", ".join(f"{use} {human_bytes(nbytes)}" for use, nbytes in uses.items())
        return f"{parts}; donated and reused {human_bytes(memory.donated)}"

    def _traffic_rows(self) -> tuple[list[tuple[str, ...]], list[str]]:
        """The largest collectives as a table, and a line on those left out."""
        header = ("collective", "dtype", "sent", "times", "loops", "group", "when", "serves")
        if self.gpu:
            header = (*header[:7], "between", "exposed", header[7])
        largest = sorted(self.traffic, key=lambda t: -t.total_bytes)
        left = len(largest) - ROWS
        below = [f"... and {left} smaller ones"] if left > 0 else []
        return [header, *(self._row(one) for one in largest[:ROWS])], below

    def _row(self, one: Traffic) -> tuple[str, ...]:
        group = "x".join(one.axes) if one.axes else str(one.group)
        when = "async" if one.asynchronous else "sync"
        dtypes = ",".join(one.dtypes)
        row = (
            one.kind,
            dtypes,
            human_bytes(one.wire_bytes),
            str(one.trips),
            str(len(one.loops)),
            group,
            when,
        )
        if self.gpu:
            row = (*row, human_time(one.between), human_time(one.exposed))
        return (*row, one.serves)


def check_limits(max_peak_bytes: Any, min_overlap: Any) -> None:
    """Raises for limits that say nothing."""
    for name, value, most in (
        ("max_peak_bytes", max_peak_bytes, math.inf),
        ("min_overlap", min_overlap, 1),
    ):
        if value is not None and not (isinstance(value, int | float) and 0 <= value <= most):
            below = " between 0 and 1, a share of the step" if most == 1 else " of bytes"
            raise ValueError(f"{name}={value!r} must be a number{below}.")
