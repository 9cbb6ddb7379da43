"""A forecast as a picture: the memory of each case against what fits, and the time of a step."""

from collections.abc import Mapping, Sequence

from zerojax import _figures
from zerojax._figures import Axes, Figure
from zerojax._forecast.case import Case
from zerojax._plan.show import ACTIVATIONS, COLOURS, GRADS, TITLES
from zerojax._state.state import OPT_STATE, PARAMS

GIB, MS = 2**30, 1e-3


def plot(cases: Sequence[Case], usable: int, gpus: str, path: str | None) -> Figure:
    """Draws a row for each case: bars of memory on the left, of time on the right."""
    figure, (memory, times) = _figures.panels(1.6 + 0.38 * len(cases), 3, 2)
    draw_memory(memory, cases, usable)
    _draw_times(times, cases)
    memory.set_yticks(range(len(cases)), list(map(_case_name, cases)))
    memory.invert_yaxis()
    for axes in (memory, times):
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.12)
    _figures.titled(figure, f"one training step on {gpus}, compiled", 4)
    return _figures.finished(figure, path)


def draw_memory(
    axes: Axes,
    cases: Sequence[Case],
    usable: int,
    colours: Mapping[str, str] = COLOURS,
    ink: str = "black",
) -> None:
    """Draws bars stacked up to the peak; bytes of no other kind count as activations."""
    uses = {
        PARAMS: [case.parameters for case in cases],
        OPT_STATE: [case.optimizer for case in cases],
        GRADS: [case.gradients for case in cases],
    }
    uses[ACTIVATIONS] = [
        case.peak - sum(use[row] for use in uses.values()) for row, case in enumerate(cases)
    ]
    left = [0.0] * len(cases)
    for use, nbytes in uses.items():
        widths = [count / GIB for count in nbytes]
        style = {"color": colours[use], "edgecolor": "white", "linewidth": 0.5}
        axes.barh(range(len(cases)), widths, left=left, label=TITLES[use], **style)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for row, case in enumerate(cases):
        note = "" if case.fits else ", does not fit"
        _write(axes, left[row], row, f"{case.peak / GIB:.1f}{note}")
    if max(left) * 2 > usable / GIB:
        axes.axvline(usable / GIB, color=ink, linestyle="--", linewidth=1)
        axes.set_xlabel(f"GiB per GPU at the peak; line: {usable / GIB:.0f} usable")
    else:
        axes.set_xlabel(f"GiB per GPU at the peak, of {usable / GIB:.0f} usable")


def _draw_times(axes: Axes, cases: Sequence[Case]) -> None:
    compute = [case.compute_seconds / MS for case in cases]
    exposed = [case.exposed_seconds / MS for case in cases]
    rows = range(len(cases))
    axes.barh(rows, compute, color="0.75", label="compute")
    label = "waiting for communication"
    axes.barh(rows, exposed, left=compute, color=_figures.EXPOSED, label=label)
    for row, case in enumerate(cases):
        _write(axes, case.step_seconds / MS, row, f"{case.step_seconds / MS:,.0f}")
    axes.set_xlabel("ms per step, modelled")


def _write(axes: Axes, end: float, row: int, text: str) -> None:
    """Writes beside a bar that ends there."""
    axes.text(end, row, f" {text}", va="center", fontsize=_figures.SMALL)


def _case_name(case: Case) -> str:
    accumulated = f"x{case.accumulate}" if case.accumulate > 1 else ""
    return ", ".join(filter(None, (f"stage {case.stage}", accumulated, case.variant)))
