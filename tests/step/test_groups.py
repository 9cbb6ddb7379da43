"""Groups: parameters, gradients and optimizer state, each sharded over its own mesh axes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from tests.step import nodes
from tests.step.nodes import AMSP, AXES, DIM, HSDP, LAYERS, LEVELS, SGD
from tests.support import steps
from tests.support.collectives import collectives
from tests.support.reference import assert_close

GPU, NODE = ("gpu",), ("node",)
KINDS = ("all-gather", "reduce-scatter", "all-reduce")
BOTH_WAYS = 2 * 2 * LAYERS  # of each weight each layer, in forward and in backward
SAVEABLE = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
LABELS = {"w": "frozen", "x": "trained"}
ONE_FROZEN = optax.multi_transform({"frozen": optax.set_to_zero(), "trained": SGD}, LABELS)


@pytest.mark.parametrize(
    ("groups", "options", "within", "between"),
    [
        # Gathers and reduce-scatters within a node; gathers, reduce-scatters and sums between them.
        (HSDP, {}, (BOTH_WAYS, 2 * LAYERS), (0, 0, 2 * LAYERS)),
        # What crosses nodes waits for the last microbatch, or comes before the first.
        (HSDP, {"accumulate": 4}, (4 * BOTH_WAYS, 4 * 2 * LAYERS), (0, 0, 2)),
        (AMSP, {"accumulate": 4}, (4 * BOTH_WAYS, 4 * 2 * LAYERS), (2, 2, 0)),
        # Forward brings each layer into the node, and backward has it there.
        (AMSP, {}, (BOTH_WAYS, 2 * LAYERS), (2 * LAYERS, 2 * LAYERS, 0)),
        # Frozen weights stay in the node.
        (AMSP, {"tx": ONE_FROZEN}, (BOTH_WAYS, LAYERS), (LAYERS, LAYERS, 0)),
    ],
)
def test_what_crosses_which_links(groups, options, within, between):
    """Whole layers are sent within a node; between nodes a quarter, of all layers at once where
    microbatches share it."""
    plan = nodes.planned(options.get("tx", SGD), groups=groups)
    quarter = (LAYERS if "accumulate" in options else 1) / 4
    times = {(kind, GPU, 1): n for kind, n in zip(KINDS, within, strict=False)}
    times |= {(kind, NODE, quarter): n for kind, n in zip(KINDS, between, strict=True) if n}
    assert nodes.crossings(nodes.traced(plan, **{"prefetch": 0, **options})) == times


@pytest.mark.parametrize(("wrap", "times"), [(jax.checkpoint, 3), (SAVEABLE, 2)])
def test_a_remat_of_all_layers_crosses_nodes_once(wrap, times):
    """Its backward runs the loop again, but for what forward brought into the node."""
    loss = functools.partial(nodes.loss, wrap=wrap)
    jaxpr = nodes.traced(nodes.planned(groups=AMSP), loss, prefetch=0)
    assert nodes.gathers(jaxpr) == {NODE: 2 * LAYERS, GPU: times * 2 * LAYERS}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_the_loss_casts_crosses_nodes_in_that_dtype(accumulate):
    """Also before microbatches, outside of the loss."""
    loss = functools.partial(nodes.loss, dtype="bfloat16")
    jaxpr = nodes.traced(nodes.planned(groups=AMSP), loss, accumulate=accumulate)
    gathers = {(c.axes, c.dtype) for c in collectives(jaxpr) if c.kind == "all-gather"}
    assert gathers == {(NODE, "bfloat16"), (GPU, "bfloat16")}


def test_a_state_rests_where_it_is_updated():
    tx = optax.adam(1e-3)
    plan = nodes.planned(tx, groups=AMSP)
    weights = 2 * LAYERS * DIM**2 * 4
    assert plan.bytes_per_device()["params"] == weights // 8
    assert plan.bytes_per_device()["opt_state"] == 2 * weights // 8 + 4
    assert plan._gradient_bytes() == weights // 4
    plan = nodes.planned(ONE_FROZEN, groups=AMSP)
    specs = {leaf.path: leaf.spec for leaf in plan.params}
    assert specs == {"params/w": P(None, "gpu"), "params/x": P(None, LEVELS)}


def test_an_override_over_fewer_axes_is_a_leaf_with_another_group():
    draw = np.random.default_rng(0)
    params = {name: draw.normal(size=(16, 16)).astype("f") for name in ("w", "v")}
    state = {"params": params, "opt_state": ()}
    options = {"axis": AXES, "overrides": {"v$": P(None, "gpu")}}
    plan = zerojax.plan(state, mesh=steps.row("regather").mesh, **options)
    specs = {leaf.path: leaf.spec for leaf in plan.params}
    assert specs == {"params/w": P(LEVELS), "params/v": P(None, "gpu")}

    def loss(p, batch):
        return jnp.mean((jnp.tanh(batch @ p["w"]) @ p["v"]) ** 2)

    batch = draw.normal(size=(8, 16)).astype("f")
    _, grads = zerojax.value_and_grad(loss, plan)(plan.place(state)["params"], batch)
    assert_close(grads, jax.jit(jax.grad(loss))(params, batch), 1e-6)


@pytest.mark.parametrize(("row", "over"), [("groups", " over node"), ("stage1", "")])
def test_weights_that_cross_nodes_twice_break_the_contract(row, over):
    report = steps.row(row).report
    twice = [
        dataclasses.replace(t, trips=2 * t.trips) if t.kind == "all-gather" and t.axes != GPU else t
        for t in report.traffic
    ]
    with pytest.raises(AssertionError, match=f"is gathered 2 times a step{over}; .* at most 1"):
        dataclasses.replace(report, traffic=tuple(twice)).check()


def test_a_step_over_other_groups_breaks_the_contract():
    row = steps.row("groups")
    _, state = steps.model_and_state("layers")
    hsdp = zerojax.plan(state, mesh=row.mesh, groups=HSDP)
    with pytest.raises(AssertionError, match=r"params/layers/w reaches.*not as the plan shards it"):
        zerojax.audit(row.compiled, plan=hsdp).check()
