"""Two tutorials of Flax nnx: the cells of their pages, from the source of the installed Flax."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from tests.foreign.flax_examples import text_of
from tests.foreign.program import ROWS, Edit, edited, normal, ported, random

STEPS = 2
Lines = tuple[int, int]


class Tutorial(NamedTuple):
    """A step with what it takes, and the losses of the authors' own where they can be compared."""

    step: Any
    args: Sequence[Any]
    losses: list[float] | None
    lines: Lines


def page(
    path: str, first: str, last: str, *edits: Edit, size: Edit = ("", "")
) -> tuple[Any, Any, Lines]:
    """What its cells define, from the one with `first` to the one with `last`, and with `edits`.

    `size` replaces that of the model, in both.
    """
    cells = re.findall(r"```(?:python|{code-cell} ipython3)\n(.*?)```", text_of(path), re.DOTALL)
    start, end = (next(n for n, cell in enumerate(cells) if x in cell) for x in (first, last))
    text = "import jax, jax.numpy as jnp, optax, zerojax.nnx\nfrom flax import nnx\n"
    text += "".join(cells[start : end + 1])
    return ported(path, edited(text, [size] if size[0] else []), edits)


def digits() -> Tutorial:
    """Dropout is switched off, as devices draw other numbers; the statistics are of all rows."""
    theirs, ours, lines = page(
        "docs_nnx/mnist_tutorial.md",
        "class CNN",
        "def loss_fn",
        ("nnx.BatchNorm(32, rngs", 'nnx.BatchNorm(32, axis_name="data", rngs'),
        ("nnx.BatchNorm(64, rngs", 'nnx.BatchNorm(64, axis_name="data", rngs'),
        ("y = model(jnp.ones((1, 28, 28, 1)), nnx.Rngs(0))\ny\n", ""),  # no mesh, no axis
        ("wrt=nnx.Param\n)\n", "wrt=nnx.Param\n)\nzerojax.nnx.shard(model, optimizer, stage=3)\n"),
        (
            "@nnx.jit\ndef train_step(model: CNN, optimizer: nnx.Optimizer, "
            "metrics: nnx.MultiMetric, rngs: nnx.Rngs, batch):\n...\n"
            "  optimizer.update(model, grads)  # In-place updates.\n",
            "train_step = zerojax.nnx.train_step(loss_fn)\n",
        ),
    )
    for part in (theirs, ours):
        part.model.dropout1.rate = part.model.dropout2.rate = 0.0
    batch = {
        "image": normal(ROWS, 28, 28, 1),
        "label": random.integers(0, 10, ROWS).astype(np.int32),
    }
    losses = []
    for _ in range(STEPS):
        theirs.metrics.reset()
        theirs.train_step(theirs.model, theirs.optimizer, theirs.metrics, nnx.Rngs(0), batch)
        losses.append(float(theirs.metrics.compute()["loss"]))
    args = (ours.model, ours.optimizer, batch, nnx.Rngs(0))
    return Tutorial(ours.train_step, args, losses, lines)


def diffusion() -> Tutorial:
    """Times and noise are drawn in the loss, on each device others."""
    _, ours, lines = page(
        "docs_nnx/examples/digits_diffusion_model.md",
        "class UNet",
        "def train_step",
        (
            "        eps=1e-8\n    )\n))\n",
            "        eps=1e-8\n    )\n))\nzerojax.nnx.shard(model, optimizer, stage=3)\n",
        ),
        (
            "@nnx.jit\ndef train_step(model, data, rngs, optimizer):\n...\n    return loss\n",
            "train_step = zerojax.nnx.train_step(loss_fn)\n",
        ),
        size=("UNet(1, 1, 64, rngs=rngs)", "UNet(1, 1, 8, rngs=rngs)"),
    )
    args = (ours.model, ours.optimizer, normal(ROWS, 8, 8, 1), nnx.Rngs(0))
    return Tutorial(ours.train_step, args, None, lines)


TUTORIALS: dict[str, Callable[[], Tutorial]] = {"nnx_mnist": digits, "nnx_diffusion": diffusion}
