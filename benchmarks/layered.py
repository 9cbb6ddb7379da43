"""Microbatches one after another, layer by layer, and as one batch, by the speed of network cards.

python benchmarks/layered.py           # prints the rows
python benchmarks/layered.py --json    # stores them too
"""

import os
import pathlib

import figures  # before JAX: it says what JAX may look for
import groups
import results

import zerojax
from zerojax.tools._forecast import network as _network

CARDS = (*groups.CARDS, 3.125)  # GB/s of each GPU's network card
MICROBATCHES = 8
ROWS = {  # the options of a step, and the rows of a GPU that it takes at once
    "accumulate=8": {"accumulate": MICROBATCHES},
    'accumulate=8, order="layers"': {
        "accumulate": MICROBATCHES,
        "schedule": zerojax.Schedule(order="layers"),
    },
    'accumulate=8, order="layers", activations="host"': {
        "accumulate": MICROBATCHES,
        "schedule": zerojax.Schedule(order="layers", activations="host"),
    },
    "one batch of 32 rows": {},
}
STORED = pathlib.Path(__file__).parent / "layered.json"


def measured(options):
    """Compiles a step on flat ZeRO-3 and replays it for each speed of the network."""
    mesh = zerojax.aot.mesh(figures.GPUS, (groups.NODES, groups.PER_NODE), ("node", "gpu"))
    precision = zerojax.Precision(compute="bfloat16")
    flat = groups.GROUPS["flat"]
    plan = zerojax.plan(figures.MODEL.make_state, mesh=mesh, groups=flat, precision=precision)
    step = zerojax.train_step(figures.MODEL.loss, plan=plan, **options)
    batch = figures.MODEL.batch(figures.ROWS_PER_GPU * plan.size * MICROBATCHES)
    program = step.lower(plan.abstract(), zerojax.aot.batch(batch, plan)).compile()
    return groups.replayed(program, plan, step.recipe.options.rounds, CARDS)


if __name__ == "__main__":
    _network.tell(os.environ)
    results.main(__doc__, STORED, ROWS, figures.versions(), measured)
