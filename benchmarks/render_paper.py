"""The tables of docs/paper.md: the ZeRO paper's numbers beside some of the rows of `paper.py`. The
pictures have the others.

Each function takes the stored rows by name, and returns a header and rows of cells.
"""

import paper_numbers

STAGES = ("DP", "P<sub>os</sub>", "P<sub>os+g</sub>", "P<sub>os+g+p</sub>")


def figure_1(rows):
    ours = dict(
        zip([cell[:3] for cell in paper_numbers.CELLS], rows["table 1"]["bytes"], strict=False)
    )
    ours[7.5e9, 64, 0] = rows["table 1"]["bytes"][-1]
    cells = [
        [STAGES[stage], f"{printed:g}", f"{ours[7.5e9, 64, stage] / 1e9:.3f}"]
        for stage, printed in paper_numbers.FIGURE_1.items()
    ]
    return ["GB of each device", "paper", "XLA"], cells


def table_2(rows):
    cells = []
    for degree in (min(paper_numbers.THEORY), max(paper_numbers.THEORY)):
        theory = paper_numbers.THEORY[degree]
        for stage, billions in enumerate(theory):
            row = rows.get(f"table 2, MP {degree}, stage {stage}")
            printed = paper_numbers.MEASURED[degree][stage : stage + 1]
            cells.append(
                [str(degree) if stage == 0 else "", str(64 * degree) if stage == 0 else ""]
                + [STAGES[stage], _count(billions)]
                + [_of(printed[0] if printed else None, billions)]
                + [_of(row and row["billions"], billions)]
            )
    return ["MP", "GPUs", "sharded", "theory", "paper, measured", "XLA's peak"], cells


def _count(billions):
    return f"{billions / 1000:g}T" if billions >= 500 else f"{billions:g}B"


def _of(billions, theory):
    if billions is None:
        return "—"
    shown = f"{billions:g}B" if billions < 100 else f"{billions:.0f}B"
    return f"{shown}, {billions / theory:.0%}"


TABLES = {
    "paper_figure_1": figure_1,
    "paper_table_2": table_2,
}
