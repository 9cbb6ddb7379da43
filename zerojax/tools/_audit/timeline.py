"""An audit as a picture: compute above, collectives below, in the order in which they run."""

import dataclasses
import itertools
from collections.abc import Sequence

from zerojax import _figures
from zerojax._figures import Axes, Figure
from zerojax._table import human_time
from zerojax.tools._audit.measured import Measured
from zerojax.tools._hlo.schedule import Span
from zerojax.tools._hlo.transfers import IN_HOST, TO_DEVICE, TO_HOST

# Readable in grey too: each is darker than the one before.
COLOURS = {
    "compute": "#a6cee3",
    "all-gather": "#4f9bd0",
    "reduce-scatter": "#1b4f80",
    "all-reduce": "#6a3d9a",
    TO_DEVICE: "#b2ab8c",
    TO_HOST: "#7d7660",
    "other": "#777777",
    "exposed": _figures.EXPOSED,
}
LANES = {"compute": 2, "collectives": 1, "waiting": 0}  # of the schedule's streams
COPIES = {TO_DEVICE: -1, TO_HOST: -2}  # lanes of programs that have them


def plot(report: Measured, path: str | None) -> Figure:
    """Draws the modelled step; raises for a report without times."""
    if report.gpu is None:
        raise ValueError(
            "there are no times to plot: the program was compiled for "
            f"{report.backend}. Pass gpu='H100' to audit, or compile on zerojax.aot.mesh('8xH100')."
        )
    figure, axes = _figures.panels(2.8)
    spans = drawn_once([span for span in report.replay.spans if span.stream != IN_HOST])
    order = list(COLOURS)
    lanes = LANES | (COPIES if report.replay.transfers else {})
    by_what = sorted(spans, key=lambda span: order.index(_what(span)))
    for what, group in itertools.groupby(by_what, key=_what):
        drawn = list(group)
        bars = [(1e3 * s.start, 1e3 * (s.end - s.start)) for s in drawn]
        place = (lanes[drawn[0].stream] - 0.4, 0.8)
        # Collectives may follow one another at once: a white line tells them apart.
        line = {"edgecolor": "white", "linewidth": 0 if what == "compute" else 0.3}
        axes.broken_barh(bars, place, facecolor=COLOURS[what], label=what, **line)
    _mark_loops(spans, axes)
    axes.set_yticks(list(lanes.values()), [_shown(stream) for stream in lanes])
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    looped = any(span.trips > 1 for span in spans)
    axes.set_xlabel("ms, each loop drawn once (x: how often it runs)" if looped else "ms")
    caveat = report.caveat
    axes.set_title(
        f"modelled step {human_time(report.replay.step)} on {report.devices} x {report.gpu.name}, "
        f"{human_time(report.replay.exposed)} exposed" + (caveat and f"\n({caveat})")
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(0, _extent(spans)[1])
    axes.set_ylim(min(lanes.values()) - 0.6, 2.9)
    return _figures.finished(figure, path)


def drawn_once(spans: Sequence[Span]) -> list[Span]:
    """Moves spans together, so that the later iterations of a loop take no room."""
    moved, end, gap = [], 0.0, 0.0
    for span in sorted(spans, key=lambda s: s.start):
        gap += max(0.0, span.start - gap - end)
        moved.append(dataclasses.replace(span, start=span.start - gap, end=span.end - gap))
        end = max(end, span.end - gap)
    return moved


def _extent(spans: Sequence[Span]) -> tuple[float, float]:
    return 1e3 * min(s.start for s in spans), 1e3 * max(s.end for s in spans)


def _mark_loops(spans: Sequence[Span], axes: Axes) -> None:
    """Draws a line over each loop's body, and how often it runs."""
    for trips, group in itertools.groupby(spans, key=lambda s: s.trips):
        if trips > 1:
            first, last = _extent(list(group))
            axes.plot([first, last], [2.55, 2.55], color="black", linewidth=1)
            axes.text((first + last) / 2, 2.6, f"x {trips}", ha="center", va="bottom")


def _what(span: Span) -> str:
    """Returns the key of a span's colour."""
    if span.stream == "collectives":
        return span.kind if span.kind in COLOURS else "other"
    return _shown(span.stream)


def _shown(stream: str) -> str:
    return "exposed" if stream == "waiting" else stream
