"""The picture of a study: for each model, what GPUs do by their number."""

from collections.abc import Sequence

from zerojax import _figures
from zerojax._figures import Axes, Figure
from zerojax.tools._forecast.case import Case

LARGEST = "largest"  # as many rows as fit
STAGE_COLOURS = (
    "#7f7f7f",
    "#d1495b",
    "#edae49",
    "#00798c",
)  # which differ in grey too
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
    title = "one training step, compiled; times modelled"
    _figures.titled(figure, title, 2, handles=_handles(axes), fontsize=POINTS)
    return _figures.finished(figure, path)


def _draw_panel(axes: Axes, cases: Sequence[Case], what: str, asked: Sequence[int | str]) -> None:
    lines: dict[tuple[int, int | str], list[Case]] = {}
    for case in cases:
        lines.setdefault((case.stage, case.asked), []).append(case)
    for (stage, rows), line in lines.items():
        if what == MOST_ROWS and rows != LARGEST:
            continue
        fitting = sorted((one for one in line if one.fits), key=lambda one: one.count)
        style = {"color": STAGE_COLOURS[stage], "marker": MARKERS[asked.index(rows) % len(MARKERS)]}
        # Without microbatches stages 1 and 2 are one line: the thinner one lies on the other.
        style |= {"linestyle": "-" if rows == LARGEST else "--", "linewidth": 3.2 - 0.6 * stage}
        label = f"stage {stage}, {rows} rows"
        counts = [one.count for one in fitting]
        axes.plot(counts, [_value(one, what) for one in fitting], label=label, **style)
        _draw_missing(axes, [one for one in line if not one.failed and not one.fits])
    if what == ALL:
        _draw_proportion(axes, [one for one in cases if one.fits])
    _scale(axes, sorted({case.count for case in cases}))


def _value(case: Case, what: str) -> float:
    return {EACH: case.tflops, ALL: case.tflops * case.count / 1e3, MOST_ROWS: case.rows}[what]


def _draw_missing(axes: Axes, cases: Sequence[Case]) -> None:
    """Marks, at the bottom, where a step does not fit."""
    for case in cases:
        style = {
            "color": STAGE_COLOURS[case.stage],
            "marker": "x",
            "linestyle": "",
            "clip_on": False,
        }
        axes.plot([case.count], [0], label=MISSING, **style)


def _draw_proportion(axes: Axes, cases: Sequence[Case]) -> None:
    """Draws what all would do if each did what the best of the fewest GPUs does."""
    counts = sorted({case.count for case in cases})
    if len(counts) > 1:
        few = max(_value(case, EACH) for case in cases if case.count == counts[0])
        total = [few * count / 1e3 for count in counts]
        axes.plot(counts, total, color="black", linestyle=":", label=PROPORTION)


def _scale(axes: Axes, counts: Sequence[int]) -> None:
    """Counts GPUs in powers, and names those that there are."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, list(map(str, counts)))
    axes.minorticks_off()
    values = [value for line in axes.lines for value in line.get_ydata()]
    axes.set_ylim(0, 1.1 * max(values, default=0) or 1)
    axes.margins(x=0.08)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", linewidth=0.4)


def _handles(axes: Sequence[Axes]) -> list[object]:
    """Returns one line for each label, of all panels."""
    handles: dict[str, object] = {}
    for panel in axes:
        lines, labels = panel.get_legend_handles_labels()
        for line, label in zip(lines, labels, strict=True):
            handles.setdefault(label, line)
    return list(handles.values())
