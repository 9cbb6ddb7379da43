"""The tables of docs/paper.md: the ZeRO paper's numbers beside some of the rows of `paper.py`.

Each function takes the stored rows by name, and returns a header and rows of cells.
"""

import paper_numbers

# The pictures have all of figures 2 to 8.
SIZES_IN_FIGURE_2 = ("1.5b", "60b", "170b")
GPUS_IN_FIGURE_3 = (64, 400)
NAMES_IN_FIGURES_6_TO_8 = ("C3", "C4", "C5")  # C1 and C2 are the programs of C3 and C4
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


def figure_2(rows):
    cells = []
    for name, row in _named(rows, "figure 2").items():
        size, stage = name.split(", ")
        if stage == "stage 2" and size in SIZES_IN_FIGURE_2:
            alone = rows.get(f"figure 2, {size}, stage 3")
            tensor = row["settings"]["tensor"]
            each = [str(row["compiled"]["rows"] / tensor).removesuffix(".0"), _speed(row)]
            cells.append([size.upper(), str(tensor), *each, *_alone(alone)])
    header = ["model", "MP", "sequences of a GPU", "TFLOP/s"]
    return [*header, "P<sub>os+g+p</sub>, no MP: sequences", "TFLOP/s"], cells


def figure_3(rows):
    cells = []
    for gpus in GPUS_IN_FIGURE_3:
        batch = paper_numbers.FIGURE_3_BATCH[gpus]
        same, more, alone = (
            rows.get(f"figure 3, {gpus}, {how}")
            for how in ("stage 2", "stage 2, largest batch", "stage 3, largest batch")
        )
        cells.append(
            [
                str(gpus),
                str(batch * gpus // 16),
                _read_off(paper_numbers.FIGURE_3_READ_OFF.get(gpus)),
            ]
            + [_speed(same), _batch(more), _speed(more), _batch(alone), _speed(alone)]
        )
    header = ["GPUs", "batch", "paper", "zerojax", "largest batch, MP 16", "zerojax"]
    return [*header, "P<sub>os+g+p</sub>, no MP: largest batch", "zerojax"], cells


def figures_6_to_8(rows):
    cells = []
    for name in NAMES_IN_FIGURES_6_TO_8:
        what = paper_numbers.NAMES[name]
        largest = rows.get(f"figure 6, {name}")
        at = [
            cell
            for size in ("40b", "100b")
            for cell in (
                _read_off(paper_numbers.FIGURE_7_READ_OFF.get((size, name))),
                _peak(rows.get(f"figure 7, {size}, {name}")),
            )
        ]
        speed = _speed(rows.get(f"figure 8, {name}"))
        more = rows.get(f"figure 8, {name}, largest batch")
        cells.append(
            [f"{name}: {what}", f"{paper_numbers.FIGURE_6[name]}B", _billions(largest), *at]
            + [str(paper_numbers.FIGURE_8_BATCH[name]), speed, _sequences(more), _speed(more)]
        )
    header = ["", "6: largest, paper", "zerojax", "7: GB at 40B, paper", "zerojax"]
    header += ["at 100B, paper", "zerojax"]
    return [*header, "8: sequences", "TFLOP/s", "most sequences", "TFLOP/s"], cells


def _named(rows, prefix):
    return {
        name.removeprefix(f"{prefix}, "): row
        for name, row in rows.items()
        if name.startswith(f"{prefix}, ")
    }


def _read_off(between):
    low, high = between or (None, None)
    if low == 0:
        return f"below {high}"
    return "—" if low is None else str(low) if low == high else f"{low} to {high}"


def _count(billions):
    return f"{billions / 1000:g}T" if billions >= 500 else f"{billions:g}B"


def _of(billions, theory):
    if billions is None:
        return "—"
    shown = f"{billions:g}B" if billions < 100 else f"{billions:.0f}B"
    return f"{shown}, {billions / theory:.0%}"


def _billions(row):
    return f"{row['billions']:.0f}B" if row else "—"


def _speed(row):
    return "—" if row is None else f"{row['tflops']:.0f}" if row["fits"] else "does not fit"


def _peak(row):
    return f"{row['peak_gb']:.1f}" if row else "—"


def _batch(row):
    return str(row["batch"]) if row else "—"


def _sequences(row):
    return str(row["compiled"]["rows"]) if row else "—"


def _alone(row):
    return [_sequences(row), _speed(row)]


TABLES = {
    "paper_figure_1": figure_1,
    "paper_table_2": table_2,
    "paper_figure_2": figure_2,
    "paper_figure_3": figure_3,
    "paper_figures_6_to_8": figures_6_to_8,
}
