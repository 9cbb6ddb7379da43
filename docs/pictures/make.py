"""Draws the README's picture: a 7.5B step compiled for 64 H100s, memory by stage. Minutes.

python docs/pictures/make.py
"""

import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt

import zerojax
from zerojax import _figures
from zerojax._forecast import presets as _presets, result as _result
from zerojax._forecast.forecast import Forecast
from zerojax._plan.show import COLOURS

HERE = pathlib.Path(__file__).parent
MODEL = _presets.preset("7.5b")
GPUS, ROWS = "64xH100", 4 * 64
MICROBATCHES = 2  # their gradients are summed: replicated up to stage 1, sharded from stage 2 on
# On dark pages the darkest shade would vanish: the same order, from light to dark.
DARK = {"params": "#e8f1fa", "grads": "#8fc1e3", "opt_state": "#4a90cf", "activations": "#2b5580"}
NAMES = {0: "stage 0\nreplicated", 1: "stage 1\noptimizer state", 2: "stage 2\n+ gradients",
         3: "stage 3\n+ parameters"}  # fmt: skip


def draw(forecast: Forecast, name: str, ink: str, colours: dict[str, str]) -> None:
    style = {"text.color": ink, "axes.edgecolor": ink, "xtick.color": ink, "ytick.color": ink,
             "axes.labelcolor": ink, "svg.hashsalt": "zerojax", "font.size": 10}  # fmt: skip
    with plt.rc_context(style):
        figure, axes = plt.subplots(figsize=(_figures.WIDTH, 2.9), layout="constrained")
        _result.draw_memory(axes, forecast.cases, forecast.gpu.usable, colours, ink)
        axes.set_yticks(range(4), [NAMES[case.stage] for case in forecast.cases], fontsize=9)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8.5)
        figure.savefig(HERE / f"{name}.svg", transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    forecast = zerojax.forecast(
        MODEL.loss, MODEL.make_state, MODEL.batch(ROWS), gpus=GPUS, accumulate=MICROBATCHES
    )
    print(forecast)
    draw(forecast, "stages_light", "#1f2328", COLOURS)
    draw(forecast, "stages_dark", "#e6edf3", DARK)
