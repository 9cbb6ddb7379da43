"""Loops that prefetch: what they gather ahead, reduce behind, and keep."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from tests.collectives import collectives, scans_of
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
from tests.reference import assert_close
from zerojax import _compat
from zerojax._engine import prefetch as _prefetch, xla_options as _xla_options

LAYER = sum(x[0].size for x in jax.tree.leaves(PARAMS["a"]))


@pytest.mark.parametrize("name", ["plain_scan", "reverse_unrolled_scan", "remat_in_the_middle"])
def test_prefetch_gathers_one_layer_ahead_in_both_directions(name):
    jaxpr = traced(name, prefetch=1)
    gathers = [c for c in collectives(jaxpr) if c.kind == "all-gather"]
    # Each direction's first outside of its loop; backward begins with forward's last layer.
    assert sum(c.elements for c in gathers if c.depth == 0) == 2 * LAYER
    assert sum(c.moved for c in gathers) == (2 * LAYERS - 1) * LAYER
    loops = list(scans_of(jaxpr))
    assert len(loops) == 2
    for loop in loops:
        body = loop.params["jaxpr"].jaxpr
        made = {}
        for eqn in body.eqns:
            waits = eqn.primitive.name == "optimization_barrier"
            names = map(made.get, eqn.invars) if waits else [eqn.primitive.name] * len(eqn.outvars)
            made |= zip(eqn.outvars, names, strict=True)
        carried = body.outvars[: sum(_compat.scan_counts(loop.params)[1:])]
        # In forward the gather may still be wrapped in its custom derivative.
        assert sum(made.get(v) in ("all_gather", "custom_vjp_call") for v in carried) == 2


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("name", ["plain_scan", "remat_in_the_middle", "reverse_unrolled_scan"])
def test_prefetching_loops_scatter_what_the_iteration_before_left(name, in_turn, monkeypatch):
    monkeypatch.setattr(_xla_options, "knows_wires", lambda mesh: True)
    if in_turn:  # as where a layer is larger than the largest collective
        monkeypatch.setattr(_prefetch, "LARGEST", 0)
    jaxpr = traced.__wrapped__(name, prefetch=1)
    scatters = [c for c in collectives(jaxpr) if c.kind == "reduce-scatter"]
    assert sum(c.moved for c in scatters) == LAYERS * LAYER
    assert sum(c.elements for c in scatters if c.depth == 1) == LAYER
    _, backward = scans_of(jaxpr)
    body = backward.params["jaxpr"].jaxpr
    reduced = [e.invars[0] for e in body.eqns if e.primitive.name == "reduce_scatter"]
    assert len(reduced) == 2 and set(reduced) <= set(body.invars)
    # The next layer's weights may have to wait for that, each for its own gradient, and take its
    # memory.
    made = {v: eqn.primitive.name for eqn in body.eqns for v in eqn.outvars}
    ties = [e for e in body.eqns if e.primitive.name == "optimization_barrier"]
    shapes = [[v.aval.shape for v in e.invars] for e in ties if len(e.invars) == 2]
    assert [x for x, y in shapes if x == y] == [x for x, _ in shapes]
    assert len(shapes) == 2 * in_turn
    # A gather may still be wrapped in its custom derivative.
    names = ("all_gather", "custom_vjp_call")
    gathers = [e for e in body.eqns if e.primitive.name in names]
    assert len(gathers) == 2
    for gather in gathers:
        assert (made[gather.invars[0]] == "optimization_barrier") == in_turn


# -- what forward reads last

HEADED = {
    "layers": PARAMS["a"], "scale": np.ones(DIM, "f"), "head": PARAMS["c"]["w"][0],
    "down": PARAMS["c"]["v"][0], "bias": np.linspace(-1, 1, 2 * DIM, dtype="f"),
}  # fmt: skip


def head(p, batch):
    x = scan(dense, batch["x"], p["layers"])
    return end((x * p["scale"]) @ p["head"])


def tied_head(p, batch):
    x = scan(dense, p["head"].T[batch["t"]], p["layers"])
    return end((x * p["scale"]) @ p["head"])


def head_after_remats(p, batch):
    x = batch["x"]
    for i in range(LAYERS):
        x = jax.checkpoint(dense)(x, jax.tree.map(lambda a: a[i], p["layers"]))
    return end((x * p["scale"]) @ p["head"])


def two_heads(p, batch):
    """Together larger than the largest weight: the second one stays."""
    return end(scan(dense, batch["x"], p["layers"]) @ p["head"] @ p["down"])


def head_with_a_bias(p, batch):
    return end(scan(dense, batch["x"], p["layers"]) @ p["head"] + p["bias"])


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


def head_before_the_loop(p, batch):
    x = (batch["x"] * p["scale"]) @ p["head"] @ p["down"]
    return end(scan(dense, x, p["layers"]))


# How often forward uses the head or the second one, and how many of both backward has anyway.
HEADS = {
    head: (1, 1), tied_head: (1, 1), head_after_remats: (1, 1), two_heads: (2, 1),
    head_before_the_loop: (2, 0), head_with_a_bias: (1, 1), head_and_a_penalty: (2, 1),
    small_layers_after_the_head: (1, 0), frozen_head: (1, 1), computed_head: (1, 0),
}  # fmt: skip


@functools.cache
def headed():
    return zerojax.plan({"params": HEADED}, stage=3, mesh=make_mesh(), stacked="layers/")


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("loss", HEADS)
def test_prefetching_backward_starts_with_what_forward_read_last(loss, prefetch):
    grad = zerojax.value_and_grad(loss, headed(), prefetch=prefetch)
    found = collectives(jax.make_jaxpr(grad)(headed().abstract()["params"], BATCH))
    of_heads = [c for c in found if c.kind == "all-gather" and c.elements == 2 * DIM * DIM]
    used, kept = HEADS[loss]
    assert len(of_heads) == 2 * used - kept * prefetch


def test_gradients_with_what_forward_read_last():
    grads = {loss: zerojax.value_and_grad(loss, headed(), prefetch=1) for loss in HEADS}
    found = each(grads, headed().place({"params": HEADED})["params"], BATCH)
    wanted = each({loss: jax.value_and_grad(loss) for loss in HEADS}, HEADED, BATCH)
    for loss in HEADS:
        assert_close(found[loss], wanted[loss], 1e-6, what=loss.__name__)


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
    grad = jax.jit(zerojax.value_and_grad(short_loops, plan, prefetch=1))
    got = grad(plan.place({"params": SHORT})["params"], BATCH["x"])
    assert_close(got, jax.jit(jax.value_and_grad(short_loops))(SHORT, BATCH["x"]), 1e-6)


def test_prefetch_keeps_no_weights_of_nested_loops():
    grouped = jax.tree.map(lambda a: np.stack([a] * LAYERS), PARAMS["a"])
    loss = lambda p, b: end(scan(lambda x, g: scan(dense, x, g), b["x"], p))
    specs = dict.fromkeys("wb", jax.sharding.PartitionSpec(None, None, "data"))
    plan = zerojax.plan({"params": grouped}, mesh=make_mesh(), stacked=".", overrides=specs)
    grad = jax.jit(zerojax.value_and_grad(loss, plan, prefetch=1))
    traced = grad.trace(plan.place({"params": grouped})["params"], BATCH)
    loops, kept = kept_by_loops(traced.jaxpr, least=DIM * DIM)
    assert loops >= 4, "two nested ones of forward, two of backward"
    assert kept == []
    got = traced.lower().compile()(plan.place({"params": grouped})["params"], BATCH)
    assert_close(got[1], jax.jit(jax.grad(loss))(grouped, BATCH), 1e-6)


@pytest.mark.parametrize("value", [2, -1, "yes", None])
def test_bad_prefetch(value):
    with pytest.raises(ValueError, match=r"prefetch must be 0, 1 or 'auto'"):
        zerojax.train_step(end, prefetch=value)


@pytest.mark.gpu_code
@pytest.mark.parametrize("shared", [1, 7], ids=["in_turn", "some_of_one_input"])
def test_gathers_of_backward_start_ahead_of_matmuls_where_xla_knows_no_times(shared):
    """Many small weights: XLA takes what casts and stacks their gradients for long, and what would
    cut apart those that it computes together."""

    def loss(p, batch):
        x, _ = jax.lax.scan(jax.checkpoint(layer), batch, p)
        return end(x.astype(jnp.float32))

    def layer(x, p):
        first, *others = [w.astype(x.dtype) for w in p.values()]
        x = jnp.tanh(x @ first) * math.prod(jnp.tanh(x @ w) for w in others[: shared - 1])
        for w in others[shared - 1 :]:
            x = jnp.tanh(x @ w)
        return x, None

    params = {f"w{i}": jax.ShapeDtypeStruct((8, 256, 256), jnp.float32) for i in range(8)}
    state = {"params": params, "opt_state": jax.eval_shape(optax.sgd(0.1).init, params)}
    plan = zerojax.plan(state, mesh=zerojax.aot.mesh("16xA100-80GB"))
    batch = zerojax.aot.batch(jax.ShapeDtypeStruct((16 * 64, 256), jnp.bfloat16), plan)
    step = zerojax.train_step(loss, tx=optax.sgd(0.1), plan=plan)
    program = step.lower(plan.abstract(), batch).compile()
    found = zerojax.audit(program).replay.collectives
    (backward,) = {c.loops for c in found if c.kind == "reduce-scatter" and c.loops}
    gathers = [c for c in found if c.kind == "all-gather" and c.loops == backward]
    one, other = sorted(c.between for c in gathers)  # an iteration has two layers
    # Behind small kernels alone, one would have 4% of the compute of the other, or 18%.
    assert one > other / 3
