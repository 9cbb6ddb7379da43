"""Draws the README's picture of memory by stage, and those of docs/groups.md and docs/axes.md.

python docs/pictures/make.py           # all; compiles a 7.5B step for 64 H100s, in minutes
python docs/pictures/make.py groups    # all but that one, in seconds
"""

import itertools
import os
import pathlib
import sys
from collections.abc import Callable

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import matplotlib

matplotlib.use("svg")

import jax
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

import zerojax
from zerojax import _figures
from zerojax._kernel.places import KINDS
from zerojax._plan.show import COLOURS, TITLES
from zerojax.tools._forecast import case as _case, presets as _presets
from zerojax.tools._forecast.case import Forecast

jax.config.update("jax_num_cpu_devices", 8)

HERE = pathlib.Path(__file__).parent
MODEL = _presets.preset("7.5b")
GPUS, ROWS = "64xH100", 4 * 64
MICROBATCHES = 2  # the sums of their gradients are replicated up to stage 1, then sharded
# On dark pages the darkest shade would vanish. The order stays, from light to dark.
DARK = {"params": "#e8f1fa", "grads": "#8fc1e3", "opt_state": "#4a90cf", "activations": "#2b5580"}
NAMES = {0: "stage 0\nreplicated", 1: "stage 1\noptimizer state", 2: "stage 2\n+ gradients",
         3: "stage 3\n+ parameters"}  # fmt: skip

NODE, BOTH = ("gpu",), ("gpu", "node")
GROUPS = {
    "flat ZeRO-3: all over both nodes": (BOTH, BOTH, BOTH),
    "HSDP: all over the GPUs of a node": (NODE, NODE, NODE),
    "AMSP: parameters and gradients over the GPUs of a node, optimizer state over both nodes":
        (NODE, NODE, BOTH),
}  # fmt: skip
# Which tokens of device `home` the device `here` has, of 16 tokens and 4 heads on four devices:
# before something mixes tokens, and for it.
TOKENS, HEADS = 16, 4
HAS = dict[str, Callable[[int, int, int, int], bool]]  # of here, home, head, token
SENT: dict[str, HAS] = {
    "attention, keys and values gathered: queries stay": {
        "queries": lambda here, home, head, token: here == home,
        "keys, values": lambda here, home, head, token: True,
    },
    "attention, tokens exchanged for heads, and back": {
        "before, after": lambda here, home, head, token: here == home,
        "in attention": lambda here, home, head, token: here == head,
    },
    "a shift or a convolution reads tokens of neighbours": {
        "before": lambda here, home, head, token: here == home,
        "for it": lambda here, home, head, token: here * 4 - 2 < token <= here * 4 + 3,
    },
}
BOX, GAP, ROW = 0.9, 0.5, 0.72  # the width of an array, between nodes, the height of an array
LIGHT_INK, DARK_INK = "#1f2328", "#e6edf3"


def style(ink: str) -> dict[str, object]:
    return {"text.color": ink, "axes.edgecolor": ink, "xtick.color": ink, "ytick.color": ink,
            "axes.labelcolor": ink, "svg.hashsalt": "zerojax", "font.size": 10}  # fmt: skip


def draw(forecast: Forecast, name: str, ink: str, colours: dict[str, str]) -> None:
    with plt.rc_context(style(ink)):
        figure, axes = plt.subplots(figsize=(_figures.INCHES, 2.9), layout="constrained")
        _case.draw_memory(axes, forecast.cases, forecast.gpu.usable, colours, ink)
        axes.set_yticks(range(4), [NAMES[case.stage] for case in forecast.cases], fontsize=9)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8.5)
        figure.savefig(HERE / f"{name}.svg", transparent=True, metadata={"Date": None})


def draw_groups(name: str, ink: str, colours: dict[str, str]) -> None:
    """Draws the part of each array on each of 2 x 4 devices, with a panel for each grouping."""
    mesh = zerojax.mesh(node=2, gpu=4)
    with plt.rc_context(style(ink)):
        figure, panels = plt.subplots(3, figsize=(_figures.INCHES, 4.9), layout="constrained")
        for axes, (title, groups) in zip(panels, GROUPS.items(), strict=True):
            axes.set_title(title, fontsize=9.5, loc="left")
            shares = [draw_row(axes, mesh, *row, ink, colours) for row in enumerate(groups)]
            axes.set_yticks(range(3), [TITLES[kind] for kind in KINDS], fontsize=9)
            middles = [place(n) + BOX / 2 for n in range(8)]
            axes.set_xticks(middles, [f"gpu {n % 4}" for n in range(8)])
            axes.set_xlim(-0.1, place(8) + 0.3)
            axes.set_ylim(2.6, -0.6)
            axes.tick_params(length=0, labelsize=8.5)
            axes.spines[:].set_visible(False)
            for row, share in enumerate(shares):
                axes.text(place(8) - GAP + 0.05, row, f"1/{share} each", va="center", fontsize=9)
        for axes in panels[:-1]:
            axes.set_xticks([])
        for node in range(2):
            middle = (middles[4 * node] + middles[4 * node + 3]) / 2
            panels[-1].text(middle, 3.45, f"node {node}", ha="center", fontsize=9.5)
        figure.savefig(HERE / f"{name}.svg", transparent=True, metadata={"Date": None})


def place(device: int) -> float:
    """Returns the left end of a device's column."""
    return device + GAP * (device // 4)


def draw_row(
    axes: _figures.PlotAxes, mesh: jax.sharding.Mesh, row: int, over: tuple[str, ...], ink: str,
    colours: dict[str, str],
) -> int:  # fmt: skip
    """Draws one kind of array, and returns the number of its shards."""
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(over))
    parts = spec.devices_indices_map((8,))
    for number, device in enumerate(mesh.devices.flat):
        start, stop, _ = parts[device][0].indices(8)
        left, top = place(number), row - ROW / 2
        shard = (left + BOX * start / 8, top), BOX * (stop - start) / 8, ROW
        axes.add_patch(Rectangle(*shard, facecolor=colours[KINDS[row]], linewidth=0))
        outline = {"fill": False, "edgecolor": ink, "linewidth": 0.5}
        axes.add_patch(Rectangle((left, top), BOX, ROW, **outline))
    return len(set(parts.values()))


def draw_axes(name: str, ink: str, colours: dict[str, str]) -> None:
    """Draws which tokens each of four devices has, in the colour of the device that computes them,
    with a panel for each way to send them."""
    shades = list(colours.values())[:4]
    width, height = BOX / TOKENS, ROW / HEADS
    with plt.rc_context(style(ink)):
        figure, panels = plt.subplots(3, figsize=(_figures.INCHES, 4.2), layout="constrained")
        for axes, (title, rows) in zip(panels, SENT.items(), strict=True):
            axes.set_title(title, fontsize=9.5, loc="left")
            axes.set_yticks(range(2), list(rows), fontsize=9)
            axes.set_xticks([])
            axes.set_xlim(-0.05, 4.15)
            axes.set_ylim(1.5, -0.5)
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
            each = itertools.product(enumerate(rows.values()), range(4), range(4), range(HEADS))
            for (row, has), here, home, head in each:
                tokens = range(home * 4, home * 4 + 4)
                there = [token for token in tokens if has(here, home, head, token)]
                if not there:
                    continue
                corner = 1.05 * here + width * there[0], row - ROW / 2 + height * head
                look = {"facecolor": shades[home], "edgecolor": ink, "linewidth": 0.3}
                axes.add_patch(Rectangle(corner, width * len(there), height, **look))
            for row, here in itertools.product(range(2), range(4)):
                outline = {"fill": False, "edgecolor": ink, "linewidth": 0.5}
                axes.add_patch(Rectangle((1.05 * here, row - ROW / 2), BOX, ROW, **outline))
        middles = [1.05 * n + BOX / 2 for n in range(4)]
        panels[-1].set_xticks(middles, [f"device {n}" for n in range(4)], fontsize=9)
        figure.savefig(HERE / f"{name}.svg", transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    draw_axes("axes_light", LIGHT_INK, COLOURS)
    draw_axes("axes_dark", DARK_INK, DARK)
    draw_groups("groups_light", LIGHT_INK, COLOURS)
    draw_groups("groups_dark", DARK_INK, DARK)
    if sys.argv[1:] == ["groups"]:
        sys.exit()
    forecast = zerojax.forecast(
        MODEL.loss, MODEL.make_state, MODEL.batch(ROWS), gpus=GPUS, accumulate=MICROBATCHES
    )
    print(forecast)
    draw(forecast, "stages_light", LIGHT_INK, COLOURS)
    draw(forecast, "stages_dark", DARK_INK, DARK)
