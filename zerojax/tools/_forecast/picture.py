"""The picture of a study: for each model, what a GPU does by the number of GPUs."""

from collections.abc import Sequence

from zerojax import _figures
from zerojax._figures import Figure, PlotAxes
from zerojax.tools._forecast.case import Case

LARGEST = "largest"  # as many rows as fit
STAGE_COLOURS = ("#7f7f7f", "#d1495b", "#edae49", "#00798c")  # which differ in grey too
MARKERS = "osD^vP"  # by rows
HEIGHT, POINTS = 1.9, 9  # inches of a panel, points
EACH, MOST_ROWS = "TFLOP/s of each GPU", "rows on each GPU"


def draw(cases: Sequence[Case], path: str | None) -> Figure:
    """Draws panels below each other, for each model and kind of GPU: what each GPU does, and the
    largest rows where a study looked for them."""
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.model, case.kind.name), []).append(case)
    asked = list(dict.fromkeys(case.asked for case in cases))
    shown = [EACH, MOST_ROWS] if LARGEST in asked else [EACH]
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
        if what == EACH or case.asked == LARGEST:
            lines.setdefault((case.stage, case.asked), []).append(case)
    for (stage, rows), line in lines.items():
        colour, fitting = STAGE_COLOURS[stage], [case for case in line if case.fits]
        style = {"color": colour, "marker": MARKERS[asked.index(rows) % len(MARKERS)]}
        # Without microbatches stages 1 and 2 are one line: the thinner one lies on the other.
        style |= {"linestyle": "-" if rows == LARGEST else "--", "linewidth": 3.2 - 0.6 * stage}
        values = [case.tflops if what == EACH else case.rows for case in fitting]
        label = f"stage {stage}, {rows} rows"
        axes.plot([case.count for case in fitting], values, label=label, **style)
        if missing := [case.count for case in line if not case.failed and not case.fits]:
            style = {"color": colour, "marker": "x", "linestyle": "", "clip_on": False}
            axes.plot(missing, [0] * len(missing), label="does not fit", **style)
    # GPUs in powers of two, with the numbers that a study has.
    axes.set_xscale("log", base=2)
    counts = sorted({case.count for case in cases})
    axes.set_xticks(counts, list(map(str, counts)))
    axes.minorticks_off()
    drawn = [value for line in axes.lines for value in line.get_ydata()]
    axes.set_ylim(0, 1.1 * max(drawn, default=0) or 1)
    axes.margins(x=0.08)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", linewidth=0.4)
