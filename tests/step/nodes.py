"""A loop over two stacked weights on 2 nodes of 4 GPUs, and what crosses which links."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zerojax
from tests.support.collectives import collectives
from tests.support.schedules import train_step

LAYERS, DIM = 4, 64
AXES = ("node", "gpu")
LEVELS = AXES[::-1]  # of a spec: shards begin at the fast axis
HSDP = {"params": "gpu", "grads": "gpu", "opt_state": "gpu"}
AMSP = {"params": "gpu", "grads": "gpu", "opt_state": LEVELS}
SGD = optax.sgd(0.1)
DRAW = np.random.default_rng(0)
PARAMS = {name: DRAW.normal(size=(LAYERS, DIM, DIM)).astype("f") / 16 for name in ("w", "x")}
BATCH = DRAW.normal(size=(64, DIM)).astype("f")


def layer(x, p):
    p = jax.tree.map(lambda w: w.astype(x.dtype), p)
    return jnp.tanh(x @ p["w"] + x @ p["x"]), None


def loss(params, batch, wrap=lambda f: f, dtype="float32", **options):
    loop = wrap(lambda params, x: jax.lax.scan(layer, x, params, **options)[0])
    return jnp.mean(loop(params, batch.astype(dtype)).astype("float32") ** 2)


def planned(tx=SGD, **placing):
    placing = {"mesh": zerojax.mesh(node=2, gpu=4), "tx": tx, **placing}
    axis = {} if "groups" in placing else {"axis": AXES}
    return zerojax.plan({"params": PARAMS, "opt_state": tx.init(PARAMS)}, **axis | placing)


def traced(plan, loss=loss, tx=SGD, **options):
    """The jaxpr of a step."""
    step = train_step(loss, tx=tx, plan=plan, **options)
    return step.trace(plan.abstract(), BATCH).jaxpr


def crossings(jaxpr):
    """How often a step runs each collective on weights; by its kind, its axes, and how many layers
    of a weight it makes or reduces."""
    times = collections.Counter()
    for c in collectives(jaxpr):
        if (size := c.elements / DIM**2) >= 1 / 8:
            times[c.kind, c.axes, size] += c.times
    return dict(times)


def gathers(jaxpr):
    """How often a step gathers weights over which axes."""
    times = collections.Counter()
    for (kind, axes, _), count in crossings(jaxpr).items():
        times[axes] += count if kind == "all-gather" else 0
    return dict(+times)
