"""What an audit found: every collective, every byte, and how to look at them."""

import collections
import dataclasses
import functools
import math
import re
from typing import TYPE_CHECKING, Any

from zerojax._audit import contract as _contract, timeline as _timeline
from zerojax._audit.memory import MemoryUse
from zerojax._hlo.gpus import Gpu
from zerojax._hlo.module import Module
from zerojax._hlo.schedule import Replay
from zerojax._plan.plan import Plan
from zerojax._text import html_table, human_bytes, human_time, text_table

if TYPE_CHECKING:
    from collections.abc import Sequence

LONGEST_NAME = 60
NOTEBOOK = re.compile(r".*[/\\]ipykernel_\d+[/\\]\d+\.py:")  # files that nobody can open
ROWS = 40  # of the printed table; to_dict has them all


@dataclasses.dataclass(frozen=True)
class Part:
    """One array of a collective, and the parameters it belongs to where they are known."""

    array: str
    dtype: str
    elements: int
    nbytes: float
    paths: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Traffic:
    """One collective of the compiled program. Bytes are per device; times are seconds of one run.

    `between` is compute scheduled between start and done, `exposed` what the program waits.
    """

    name: str
    kind: str
    parts: tuple[Part, ...]
    wire_bytes: float  # of one run
    trips: int
    loops: tuple[str, ...]
    group: int
    on_host: int
    axes: tuple[str, ...] | None
    asynchronous: bool
    seconds: float
    between: float
    exposed: float
    scope: str
    source: str | None

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(sorted({part.dtype for part in self.parts}))

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(path for part in self.parts for path in part.paths))

    @property
    def total_bytes(self) -> float:
        return self.wire_bytes * self.trips

    @property
    def serves(self) -> str:
        """The parameters it moves where they are known, else where in the code it comes from."""
        if self.paths:
            named = ", ".join(_shortened(path) for path in self.paths[:2])
            return named + (f" and {len(self.paths) - 2} more" if len(self.paths) > 2 else "")
        return _shortened(NOTEBOOK.sub("cell line ", self.source or self.scope))


def _shortened(name: str) -> str:
    """Long names by their ends, which tell more than their beginnings."""
    return name if len(name) <= LONGEST_NAME else f"...{name[3 - LONGEST_NAME :]}"


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """Made by `zerojax.audit`. Print it; `check()` it; `to_dict()` and `plot()` it.

    Times are modelled, and None where no GPU is known to model (`gpu`).
    """

    module: Module
    traffic: "Sequence[Traffic]"
    memory: MemoryUse
    replay: Replay
    gpu: Gpu | None
    devices: int
    plan: Plan | None
    accumulate: int
    not_donated: tuple[str, ...]
    placement: tuple[tuple[str, str], ...]  # leaves that arrive other than planned: (path, how)
    kept: tuple[tuple[str, str], ...]  # stacks of gathered weights that a loop keeps: (path, array)
    warnings: tuple[str, ...]
    backend: str

    @property
    def step_seconds(self) -> float | None:
        return self.replay.step if self.gpu else None

    @property
    def exposed_seconds(self) -> float | None:
        return self.replay.exposed if self.gpu else None

    @property
    def overlap(self) -> float | None:
        """Compute over step time: 1 where all communication hides."""
        return self.replay.compute / self.replay.step if self.gpu and self.replay.step else None

    @property
    def wire_bytes(self) -> float:
        """Sent by each device in a step."""
        return sum(t.total_bytes for t in self.traffic)

    @functools.cached_property
    def totals(self) -> dict[str, float]:
        """Bytes sent by each device, by kind of collective."""
        sums: dict[str, float] = collections.defaultdict(float)
        for one in self.traffic:
            sums[one.kind] += one.total_bytes
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

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
            "parameters": memory.parameters, "optimizer": memory.optimizer,
            "gradients": memory.gradients, "gathered weights": memory.gathered,
            "activations": memory.activations, "batch": memory.batch,
            "rest": memory.other_state + memory.outputs,
        }  # fmt: skip
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
            one.kind, dtypes, human_bytes(one.wire_bytes), str(one.trips), str(len(one.loops)),
            group, when,
        )  # fmt: skip
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
