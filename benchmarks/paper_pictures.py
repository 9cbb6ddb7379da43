"""Draws the pictures of docs/paper.md from the rows that benchmarks/paper.py stored.

python benchmarks/paper_pictures.py
"""

import json
import math
import pathlib

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import paper_numbers
import results

HERE = pathlib.Path(__file__).parent
PICTURES, STORED = HERE.parent / "docs" / "pictures", HERE / "paper.json"
ROWS = {row["row"]: row for row in json.loads(STORED.read_text())["rows"]}
WIDTH = 4.6  # inches: a phone shows this without scaling
PAPER, OURS, FURTHER = "#8c8c8c", "#14375e", "#d0722b"
STAGES = {0: "#8c8c8c", 1: "#8fc1e3", 2: "#2f78b7", 3: "#14375e"}
SHARDED = ("DP", "$P_{os}$", "$P_{os+g}$", "$P_{os+g+p}$")
BESIDE = 0.38  # the width of each of two bars


def stored(name, what):
    """Returns a number of a row, or nan, which draws nothing, if it is missing or does not fit."""
    row = ROWS.get(name)
    return row[what] if row and (row["fits"] or what == "peak_gb") else math.nan


def figure_1(axes):
    axes.set_title("Figure 1: GB of each GPU, 7.5B on 64")
    found = dict(
        zip((cell[:3] for cell in paper_numbers.CELLS), ROWS["table 1"]["bytes"], strict=False)
    )
    found[7.5e9, 64, 0] = ROWS["table 1"]["bytes"][-1]
    pairs = [(gb, found[7.5e9, 64, stage] / 1e9) for stage, gb in paper_numbers.FIGURE_1.items()]
    bars(axes, SHARDED, pairs)
    for colour, label in ((PAPER, "paper"), (OURS, "zerojax and XLA")):
        axes.bar([0], [0], color=colour, label=label)
    axes.legend(loc="upper right", frameon=False, fontsize=8)


def bars(axes, names, pairs, digits=1):
    """Draws the paper's number and ours for each name, side by side; None leaves a gap."""
    for at, pair in enumerate(pairs):
        for side, (value, colour) in enumerate(zip(pair, (PAPER, OURS), strict=True)):
            if value is not None:
                x = at + (side - 0.5) * BESIDE
                axes.bar(x, value, BESIDE, color=colour)
                axes.text(x, value, f"{value:.{digits}f}", ha="center", va="bottom", fontsize=7.5)
    of_bars(axes, names)


def of_bars(axes, names):
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.margins(y=0.14)
    axes.set_ylim(bottom=0)


def table_2(axes):
    axes.set_title("Table 2: largest model, in billions (lines: theory)")
    degrees = list(paper_numbers.THEORY)
    for stage, colour in STAGES.items():
        theory = [paper_numbers.THEORY[degree][stage] for degree in degrees]
        axes.plot(degrees, theory, color=colour, linewidth=1)
        ours = [stored(f"table 2, MP {degree}, stage {stage}", "billions") for degree in degrees]
        axes.plot(degrees, ours, "o", color=colour, markersize=6)
        if stage < 2:
            measured = [paper_numbers.MEASURED[degree][stage] for degree in degrees]
            axes.plot(degrees, measured, "D", color=colour, markersize=5, markerfacecolor="white")
        axes.annotate(SHARDED[stage], (17.5, theory[-1]), va="center", fontsize=8.5)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(degrees, [f"{d}\n{64 * d}" for d in degrees])
    axes.set_xlabel("degree of model parallelism, GPUs")
    axes.set_xlim(0.85, 38)
    axes.set_yticks([1, 10, 100, 1000], ["1", "10", "100", "1000"])
    axes.plot(
        [], [], "D", color="black", markersize=5, markerfacecolor="white", label="paper, measured"
    )
    axes.plot([], [], "o", color="black", label="zerojax, XLA's peak")
    axes.legend(loc="upper left", frameon=False, fontsize=8)


def figure_6(axes):
    axes.set_title("Figure 6: largest model, 400 GPUs, in billions")
    pairs = [(paper_numbers.FIGURE_6[n], stored(f"figure 6, {n}", "billions")) for n in names()]
    bars(axes, names(), pairs, digits=0)


def figure_7(axes):
    axes.set_title("Figure 7: GB of each GPU, 400 GPUs")
    for offset, (size, hatch) in enumerate((("40b", ""), ("100b", "//"))):
        for at, name in enumerate(names()):
            peak = stored(f"figure 7, {size}, {name}", "peak_gb")
            x = at + (offset - 0.5) * BESIDE
            colour = {"color": OURS} if not hatch else {"facecolor": "white", "edgecolor": OURS}
            axes.bar(x, peak, BESIDE, hatch=hatch, **colour, label=f"{size.upper()}" * (at == 0))
            if not math.isnan(peak):
                axes.text(x, peak, f"{peak:.0f}", ha="center", va="bottom", fontsize=7.5)
    for (_, name), (gb, _) in paper_numbers.FIGURE_7_READ_OFF.items():
        axes.plot(
            [names().index(name) - BESIDE],
            [gb],
            "D",
            color=PAPER,
            markersize=6,
            markeredgecolor="white",
        )
    axes.plot([], [], "D", color=PAPER, label="paper, 40B")
    axes.axhline(31.4, color="black", linewidth=0.8, linestyle=":")
    of_bars(axes, names())
    axes.legend(loc="upper right", frameon=False, fontsize=8)


def names():
    return list(paper_numbers.STAGES)


def figure_2(axes):
    axes.set_title("Figure 2: TFLOP/s of a GPU, 400 GPUs")
    axes.axhline(paper_numbers.FIGURE_2_TFLOPS, color=PAPER, label="paper, 8B to 100B: over 38")
    for stage, colour in ((2, OURS), (3, FURTHER)):
        found = {
            n: r for n, r in ROWS.items() if n.startswith("figure 2") and n.endswith(str(stage))
        }
        points = [(row["billions"], row["tflops"]) for row in found.values() if row["fits"]]
        label = ("$P_{os+g}$, MP 16 from 20B on", "$P_{os+g+p}$, no MP")[stage == 3]
        x, y = zip(*points, strict=True) if points else ((), ())
        axes.plot(x, y, "o-", color=colour, linewidth=1, label=label)
    axes.set_xscale("log")
    axes.set_xticks([1.5, 8, 20, 40, 80, 170], ["1.5B", "8B", "20B", "40B", "80B", "170B"])
    axes.minorticks_off()
    speed(axes)


def speed(axes):
    axes.set_ylim(0, 82)
    axes.legend(loc="lower right", frameon=False, fontsize=8)


def figure_3(axes):
    axes.set_title("Figure 3: TFLOP/s of a GPU, 60B, by GPUs")
    gpus = list(paper_numbers.FIGURE_3_BATCH)
    read = paper_numbers.FIGURE_3_READ_OFF.items()
    axes.plot([n for n, _ in read], [sum(b) / 2 for _, b in read], "D:", color=PAPER, label="paper")
    lines = {
        "the paper's batch, MP 16": ("stage 2", OURS, "-"),
        "largest batch, MP 16": ("stage 2, largest batch", OURS, "--"),
        "largest batch, $P_{os+g+p}$, no MP": ("stage 3, largest batch", FURTHER, "--"),
    }
    for label, (how, colour, line) in lines.items():
        values = [stored(f"figure 3, {n}, {how}", "tflops") for n in gpus]
        axes.plot(gpus, values, "o", linestyle=line, color=colour, linewidth=1, label=label)
    axes.set_xticks(gpus)
    axes.set_ylim(0, 120)
    axes.legend(loc="upper left", frameon=False, fontsize=8)


def figure_4(axes):
    axes.set_title("Figure 4: TFLOP/s of a GPU, 128 GPUs, no MP")
    sizes = [*paper_numbers.FIGURE_4_BASELINES, *paper_numbers.FIGURE_4_BATCH]
    for at, name in enumerate(sizes):
        stage = 0 if name in paper_numbers.FIGURE_4_BASELINES else 2
        ours = stored(f"figure 4, {name}, stage {stage}", "tflops")
        axes.plot(at, ours, "s" if stage == 0 else "o", color=OURS)
        axes.plot(at, stored(f"figure 4, {name}, stage 3", "tflops"), "o", color=FURTHER)
        if name in paper_numbers.FIGURE_4_READ_OFF:
            low, high = paper_numbers.FIGURE_4_READ_OFF[name]
            axes.bar(at, max(high - low, 1), 0.7, bottom=low, color=PAPER, alpha=0.5)
    axes.bar([0], [0], color=PAPER, alpha=0.5, label="paper, read off its chart")
    for mark, colour, label in (
        ("s", OURS, "DP"),
        ("o", OURS, "$P_{os+g}$"),
        ("o", FURTHER, "$P_{os+g+p}$"),
    ):
        axes.plot([], [], mark, color=colour, label=label)
    axes.set_xticks(range(len(sizes)), [name.upper() for name in sizes], rotation=45, fontsize=8)
    speed(axes)
    axes.legend(loc="lower center", frameon=False, fontsize=8, ncols=2)


def figure_8(axes):
    axes.set_title("Figure 8: TFLOP/s of a GPU, 60B, 128 GPUs")
    for side, how, colour in ((-0.5, "", OURS), (0.5, ", largest batch", FURTHER)):
        for at, name in enumerate(names()):
            if row := ROWS.get(f"figure 8, {name}{how}"):
                x, y = at + side * BESIDE, row["tflops"] * row["fits"]
                axes.bar(x, y, BESIDE, color=colour)
                said = row["compiled"]["rows"] if row["fits"] else "too\nlarge"
                axes.text(x, y, said, ha="center", va="bottom", fontsize=7.5)
        label = how.removeprefix(", ") or "the paper's batch"
        axes.bar([0], [0], color=colour, label=f"{label} (sequences on top)")
    of_bars(axes, names())
    axes.set_ylim(0, 95)
    axes.legend(loc="upper left", frameon=False, fontsize=8)


def draw(name, *figures, heights):
    style = {"font.size": 9, "axes.titlesize": 10, "axes.spines.top": False}
    with plt.rc_context(style | {"axes.spines.right": False}):
        picture, panels = plt.subplots(
            len(figures), figsize=(WIDTH, sum(heights)), height_ratios=heights, layout="constrained"
        )
        picture.get_layout_engine().set(h_pad=0.1)
        for axes, figure in zip(panels, figures, strict=True):
            figure(axes)
        source = {"Source": results.digest(STORED), "Software": None}
        picture.savefig(PICTURES / f"{name}.png", dpi=150, metadata=source)


if __name__ == "__main__":
    memory, fast = (figure_1, table_2, figure_6, figure_7), (figure_2, figure_3, figure_4, figure_8)
    draw("paper_memory", *memory, heights=(2.2, 3.6, 2.2, 2.4))
    draw("paper_speed", *fast, heights=(2.8, 2.8, 2.8, 2.6))
