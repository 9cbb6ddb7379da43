"""The picture of a study: for each model, what GPUs do by their number."""

from collections.abc import Sequence

from zerojax import _figures
from zerojax._figures import Figure, PlotAxes
from zerojax.tools._forecast.case import Case

LARGEST = "largest"  # as many rows as fit
STAGE_COLOURS = ("#7f7f7f", "#d1495b", "#edae49", "#00798c")  # which differ in grey too
MARKERS = "osD^vP"  # by rows
HEIGHT, POINTS = 1.9, 9  # inches of a panel, points
EACH, ALL, MOST_ROWS = "TFLOP/s of each GPU", "PFLOP/s of all", "rows on each GPU"
MISSING, PROPORTION = "does not fit", "in proportion"


def draw(cases: Sequence[Case], path: str | None) -> Figure:
    """Draws panels below each other: for each model and kind of GPU what one does, what all do,
    and, where the largest rows were asked for, how many there are."""
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.model, case.kind.name), []).append(case)
    asked = list(dict.fromkeys(case.asked for case in cases))
    shown = [EACH, ALL, *([MOST_ROWS] if LARGEST in asked else [])]
    figure, axes = _figures.column(len(groups) * len(shown), HEIGHT)
    panels = iter(axes)
    for (model, kind), group in groups.items():
        for what in shown:
            panel = next(panels)
            _draw_panel(panel, group, what, asked)
            panel.set_title(f"{model}, {what}", fontsize=POINTS, loc="left")
        panel.set_xlabel(f"{kind}s")
    # One line for each label, of all panels.
    handles = {line.get_label(): line for panel in axes[::-1] for line in panel.lines[::-1]}
    title = "one training step, compiled; times modelled"
    _figures.titled(figure, title, 2, handles=[*handles.values()][::-1], fontsize=POINTS)
    return _figures.finished(figure, path)


def _draw_panel(
    axes: PlotAxes, cases: Sequence[Case], what: str, asked: Sequence[int | str]
) -> None:
    """Draws a line for each stage and rows, and marks at the bottom where a step does not fit."""
    lines: dict[tuple[int, int | str], list[Case]] = {}
    for case in sorted(cases, key=lambda case: case.count):
        if what != MOST_ROWS or case.asked == LARGEST:
            lines.setdefault((case.stage, case.asked), []).append(case)
    for (stage, rows), line in lines.items():
        colour, fitting = STAGE_COLOURS[stage], [case for case in line if case.fits]
        style = {"color": colour, "marker": MARKERS[asked.index(rows) % len(MARKERS)]}
        # Without microbatches stages 1 and 2 are one line: the thinner one lies on the other.
        style |= {"linestyle": "-" if rows == LARGEST else "--", "linewidth": 3.2 - 0.6 * stage}
        values = [_value(case, what) for case in fitting]
        label = f"stage {stage}, {rows} rows"
        axes.plot([case.count for case in fitting], values, label=label, **style)
        if missing := [case.count for case in line if not case.failed and not case.fits]:
            style = {"color": colour, "marker": "x", "linestyle": "", "clip_on": False}
            axes.plot(missing, [0] * len(missing), label=MISSING, **style)
    fitting = [case for case in cases if case.fits]
    counts = sorted({case.count for case in fitting})
    if what == ALL and len(counts) > 1:  # if each did what the best of the fewest GPUs does
        few = max(case.tflops for case in fitting if case.count == counts[0])
        total = [few * count / 1e3 for count in counts]
        axes.plot(counts, total, color="black", linestyle=":", label=PROPORTION)
    _scale(axes, sorted({case.count for case in cases}))


def _value(case: Case, what: str) -> float:
    return {EACH: case.tflops, ALL: case.tflops * case.count / 1e3, MOST_ROWS: case.rows}[what]


def _scale(axes: PlotAxes, counts: Sequence[int]) -> None:
    """Counts GPUs in powers, and names those that there are."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, list(map(str, counts)))
    axes.minorticks_off()
    values = [value for line in axes.lines for value in line.get_ydata()]
    axes.set_ylim(0, 1.1 * max(values, default=0) or 1)
    axes.margins(x=0.08)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", linewidth=0.4)
