"""An audit as a picture: compute above, collectives below, in the order in which they run."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerojax._report import Report

# Readable in grey too: each is darker than the one before.
COLOURS = {"compute": "#a6cee3", "collectives": "#1f78b4", "waiting": "#b2182b"}
LANES = {"compute": 2, "collectives": 1, "waiting": 0}
LABELS = {"compute": "compute", "collectives": "collectives", "waiting": "exposed"}
MARKED = {"all-gather": "gather", "reduce-scatter": "scatter", "all-reduce": "reduce"}


def plot(report: "Report", path: str | None) -> Any:
    """Draws it with matplotlib, which is not a dependency."""
    if report.gpu is None:
        raise ValueError(
            "there are no times to plot: the program was compiled for "
            f"{report.backend}. Pass gpu='H100' to audit, or compile on zerojax.aot.mesh('8xH100')."
        )
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError:
        raise ModuleNotFoundError("plots need matplotlib. Run: pip install matplotlib") from None
    figure, axes = plt.subplots(figsize=(10, 2.8), layout="constrained")
    for stream, lane in LANES.items():
        spans = [s for s in report.replay.spans if s.stream == stream]
        bars = [(1e3 * s.start, 1e3 * (s.end - s.start)) for s in spans]
        axes.broken_barh(bars, (lane - 0.4, 0.8), color=COLOURS[stream], linewidth=0)
    _mark_loops(report, axes)
    _name_longest(report, axes)
    axes.set_yticks(list(LANES.values()), [LABELS[stream] for stream in LANES])
    axes.set_xlabel("ms; loops are drawn once, their runs stand above")
    axes.set_title(
        f"modelled step {1e3 * report.replay.step:.1f} ms on {report.devices} x {report.gpu.name}, "
        f"{1e3 * report.replay.exposed:.1f} ms exposed"
    )
    axes.spines[["top", "right"]].set_visible(False)
    _, last = _extent(report.replay.spans)
    axes.set_xlim(0, last)
    axes.set_ylim(-0.6, 2.9)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def _extent(spans: list[Any]) -> tuple[float, float]:
    return 1e3 * min(s.start for s in spans), 1e3 * max(s.end for s in spans)


def _mark_loops(report: "Report", axes: Any) -> None:
    """A bracket over each loop's body, with how often it runs."""
    by_trips: list[list[Any]] = []
    for span in sorted(report.replay.spans, key=lambda s: s.start):
        if by_trips and by_trips[-1][-1].trips == span.trips:
            by_trips[-1].append(span)
        else:
            by_trips.append([span])
    for spans in by_trips:
        if spans[0].trips > 1:
            first, last = _extent(spans)
            axes.plot([first, last], [2.55, 2.55], color="black", linewidth=1)
            axes.text((first + last) / 2, 2.6, f"x {spans[0].trips}", ha="center", va="bottom")


def _name_longest(report: "Report", axes: Any) -> None:
    spans = [s for s in report.replay.spans if s.stream == "collectives"]
    widest = max((s.end - s.start for s in spans), default=0.0)
    _, extent = _extent(report.replay.spans)
    for span in spans:
        width = span.end - span.start
        kind = next((short for long, short in MARKED.items() if span.name.startswith(long)), "")
        if width > widest / 3 and 1e3 * width > extent / 20:
            middle = 500 * (span.start + span.end)
            axes.text(middle, 1, kind, ha="center", va="center", color="white", fontsize=8)
