"""Loops that prefetch: what they gather ahead, reduce behind, and keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from tests.conftest import make_mesh
from tests.engine.losses import (
    BATCH,
    DIM,
    LAYERS,
    PARAMS,
    dense,
    each,
    end,
    kept_by_loops,
    scan,
    traced,
)  # fmt: skip
from tests.support.collectives import collectives, scans_of
from tests.support.reference import assert_close
from tests.support.schedules import value_and_grad

LAYER = sum(x[0].size for x in jax.tree.leaves(PARAMS["a"]))


@pytest.mark.parametrize("name", ["plain_scan", "reverse_unrolled_scan", "remat_in_the_middle"])
def test_loops_gather_one_layer_ahead_and_reduce_one_behind(name):
    jaxpr = traced(name, prefetch=1)
    gathers = [c for c in collectives(jaxpr) if c.kind == "all-gather"]
    # Each direction's first outside of its loop; backward begins with forward's last layer.
    assert sum(c.elements for c in gathers if c.depth == 0) == 2 * LAYER
    assert sum(c.moved for c in gathers) == (2 * LAYERS - 1) * LAYER
    scatters = [c for c in collectives(jaxpr) if c.kind == "reduce-scatter"]
    assert sum(c.moved for c in scatters) == LAYERS * LAYER
    assert sum(c.elements for c in scatters if c.depth == 1) == LAYER
    _, backward = (loop.params["jaxpr"].jaxpr for loop in scans_of(jaxpr))
    reduced = [e.invars[0] for e in backward.eqns if e.primitive.name == "reduce_scatter"]
    assert len(reduced) == 2 and set(reduced) <= set(backward.invars), "of the iteration before"


# -- what forward reads last

HEADED = {
    "layers": PARAMS["a"], "scale": np.ones(DIM, "f"), "head": PARAMS["c"]["w"][0],
    "down": PARAMS["c"]["v"][0],
}  # fmt: skip


def head(p, batch):
    x = scan(dense, batch["x"], p["layers"])
    return end((x * p["scale"]) @ p["head"])


def tied_head(p, batch):
    x = scan(dense, p["head"].T[batch["t"]], p["layers"])
    return end((x * p["scale"]) @ p["head"])


def two_heads(p, batch):
    """Together larger than the largest weight: the second one stays."""
    return end(scan(dense, batch["x"], p["layers"]) @ p["head"] @ p["down"])


def head_and_a_penalty(p, batch):
    return head(p, batch) + 1e-3 * sum(jnp.sum(x**2) for x in jax.tree.leaves(p))


def small_layers_after_the_head(p, batch):
    """Only the last layer stays, however large the head is."""
    x = (batch["x"] @ p["head"])[:, :DIM]
    for i in range(LAYERS):
        x = dense(x, jax.tree.map(lambda a: a[i], p["layers"]))
    return end(x)


def computed_head(p, batch):
    """Its sine would stay too."""
    return end(scan(dense, batch["x"], p["layers"]) @ jnp.sin(p["head"]))


def frozen_head(p, batch):
    return head({**p, "head": jax.lax.stop_gradient(p["head"])}, batch)


# How often forward uses the head or the second one, and how many of both backward has anyway.
HEADS = {
    head: (1, 1), tied_head: (1, 1), two_heads: (2, 1), head_and_a_penalty: (2, 1),
    small_layers_after_the_head: (1, 0), frozen_head: (1, 1), computed_head: (1, 0),
}  # fmt: skip


def test_prefetching_backward_starts_with_what_forward_read_last():
    plan = zerojax.plan({"params": HEADED}, stage=3, mesh=make_mesh(), stacked="layers/")
    for loss, (used, kept) in HEADS.items():
        for prefetch in (0, 1):
            grad = value_and_grad(loss, plan, prefetch=prefetch)
            found = collectives(jax.make_jaxpr(grad)(plan.abstract()["params"], BATCH))
            heads = [c for c in found if c.kind == "all-gather" and c.elements == 2 * DIM * DIM]
            assert len(heads) == 2 * used - kept * prefetch, loss.__name__
    grads = {loss: value_and_grad(loss, plan, prefetch=1) for loss in HEADS}
    values = each(grads, plan.place({"params": HEADED})["params"], BATCH)
    wanted = each({loss: jax.value_and_grad(loss) for loss in HEADS}, HEADED, BATCH)
    for loss in HEADS:
        assert_close(values[loss], wanted[loss], 1e-6, what=loss.__name__)


# -- short loops, and loops in loops

SHORT = {
    f"{length}{way}": jax.tree.map(lambda a: a[:length], PARAMS["a"])
    for length in (1, 2, 3)
    for way in ("forth", "back")
}


def short_loops(p, x):
    for name, layers in p.items():
        scale = jnp.arange(1.0, int(name[0]) + 1)  # an ordinary scanned input beside the weights
        body = lambda x, layer: (dense(x, layer[0]) * layer[1], x.mean(1))
        x, means = jax.lax.scan(body, x, (layers, scale), reverse="back" in name)
        x = x + (means * scale[:, None]).sum(0)[:, None]
    return end(x)


def test_prefetch_in_short_loops():
    plan = zerojax.plan({"params": SHORT}, stage=3, mesh=make_mesh(), stacked=".")
    grad = jax.jit(value_and_grad(short_loops, plan, prefetch=1))
    got = grad(plan.place({"params": SHORT})["params"], BATCH["x"])
    assert_close(got, jax.jit(jax.value_and_grad(short_loops))(SHORT, BATCH["x"]), 1e-6)


def test_prefetch_keeps_no_weights_of_nested_loops():
    grouped = jax.tree.map(lambda a: np.stack([a] * LAYERS), PARAMS["a"])
    loss = lambda p, b: end(scan(lambda x, g: scan(dense, x, g), b["x"], p))
    specs = dict.fromkeys("wb", jax.sharding.PartitionSpec(None, None, "data"))
    plan = zerojax.plan({"params": grouped}, mesh=make_mesh(), stacked=".", overrides=specs)
    grad = jax.jit(value_and_grad(loss, plan, prefetch=1))
    traced = grad.trace(plan.place({"params": grouped})["params"], BATCH)
    loops, kept = kept_by_loops(traced.jaxpr, least=DIM * DIM)
    assert loops >= 4, "two nested ones of forward, two of backward"
    assert kept == []
    got = traced.lower().compile()(plan.place({"params": grouped})["params"], BATCH)
    assert_close(got[1], jax.jit(jax.grad(loss))(grouped, BATCH), 1e-6)
