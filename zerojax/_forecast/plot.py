"""A forecast as a picture: the memory of each case against what fits, and the time of a step."""

from collections.abc import Mapping, Sequence
from typing import Any

from zerojax._figures import WIDTH, finished, pyplot
from zerojax._forecast.case import Case
from zerojax._plan.show import ACTIVATIONS, COLOURS, GRADS, TITLES
from zerojax._state.state import OPT_STATE, PARAMS

GIB, MS = 2**30, 1e-3
EXPOSED = "#8b1a1a"  # as in the timeline of an audit


def plot(cases: Sequence[Case], usable: int, gpus: str, path: str | None) -> Any:
    """Bars of memory left, of time right, a row for each case."""
    figure, (memory, times) = pyplot().subplots(
        1,
        2,
        figsize=(WIDTH, 1.6 + 0.38 * len(cases)),
        width_ratios=(3, 2),
        sharey=True,
        layout="constrained",
    )
    draw_memory(memory, cases, usable)
    draw_times(times, cases)
    memory.set_yticks(range(len(cases)), list(map(case_name, cases)))
    memory.invert_yaxis()
    for axes in (memory, times):
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.12)
    figure.suptitle(f"one training step on {gpus}, compiled", fontsize=10)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return finished(figure, path)


def draw_memory(
    axes: Any,
    cases: Sequence[Case],
    usable: int,
    colours: Mapping[str, str] = COLOURS,
    ink: str = "black",
) -> None:
    """Stacked to the peak: what is none of the others counts as activations."""
    uses = {
        PARAMS: [case.parameters for case in cases],
        OPT_STATE: [case.optimizer for case in cases],
        GRADS: [case.gradients for case in cases],
    }
    uses[ACTIVATIONS] = [
        case.peak - sum(use[row] for use in uses.values()) for row, case in enumerate(cases)
    ]
    left = [0.0] * len(cases)
    for use, held in uses.items():
        widths = [nbytes / GIB for nbytes in held]
        axes.barh(
            range(len(cases)),
            widths,
            left=left,
            color=colours[use],
            label=TITLES[use],
            edgecolor="white",
            linewidth=0.5,
        )
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for row, case in enumerate(cases):
        note = "" if case.fits else ", does not fit"
        axes.text(left[row], row, f" {case.peak / GIB:.1f}{note}", va="center", fontsize=8)
    if max(left) * 2 > usable / GIB:
        axes.axvline(usable / GIB, color=ink, linestyle="--", linewidth=1)
        axes.set_xlabel(f"GiB per GPU when fullest; line: {usable / GIB:.0f} usable")
    else:
        axes.set_xlabel(f"GiB per GPU when fullest, of {usable / GIB:.0f} usable")


def draw_times(axes: Any, cases: Sequence[Case]) -> None:
    compute = [case.compute_seconds / MS for case in cases]
    exposed = [case.exposed_seconds / MS for case in cases]
    rows = range(len(cases))
    axes.barh(rows, compute, color="0.75", label="compute")
    axes.barh(rows, exposed, left=compute, color=EXPOSED, label="waiting for communication")
    for row, case in enumerate(cases):
        axes.text(
            case.step_seconds / MS, row, f" {case.step_seconds / MS:,.0f}", va="center", fontsize=8
        )
    axes.set_xlabel("ms a step, modelled")


def case_name(case: Case) -> str:
    parts = [f"stage {case.stage}"]
    if case.accumulate > 1:
        parts.append(f"x{case.accumulate}")
    if case.variant:
        parts.append(case.variant)
    return ", ".join(parts)
