"""What backward gathers again: `regather=` by axis, within a node; `keep_layers=`, fewer layers."""

import pytest

from tests.step import nodes
from tests.step.nodes import AXES, LAYERS, LEVELS
from tests.support import steps
from tests.support.collectives import scans_of

GPU, NODE = ("gpu",), ("node",)
PLAN = nodes.planned(axis=AXES)
LAST = 2  # prefetching, backward has the last layer of both weights from forward


def gathers(regather, **options):
    return nodes.gathers(nodes.traced(PLAN, regather=regather, **options))


@pytest.mark.parametrize(
    ("count", "regather", "times"),
    [
        (2, True, {LEVELS: 2 * (2 * LAYERS - 2)}),
        (LAYERS, True, {LEVELS: 2 * LAYERS}),
        (99, True, {LEVELS: 2 * LAYERS}),
        (3, "gpu", {NODE: 2 * LAYERS + LAST, GPU: 2 * (2 * LAYERS - 3)}),
    ],
)
def test_backward_gathers_fewer_layers_where_weights_stay(count, regather, times):
    assert gathers(regather, keep_layers=count) == times


@pytest.mark.parametrize(
    ("regather", "options", "times"),
    [
        (True, {"prefetch": 0}, {LEVELS: 2 * 2 * LAYERS}),
        (AXES, {"prefetch": 0}, {LEVELS: 2 * 2 * LAYERS}),
        (True, {"prefetch": 1}, {LEVELS: 2 * 2 * LAYERS - LAST}),
        ("gpu", {"prefetch": 0}, {NODE: 2 * LAYERS, GPU: 2 * 2 * LAYERS}),
        # Prefetched, the last layer crosses nodes twice.
        ("gpu", {"prefetch": 1}, {NODE: 2 * LAYERS + LAST, GPU: 2 * 2 * LAYERS - LAST}),
        # Of all layers together, before the first microbatch.
        ("gpu", {"prefetch": 0, "accumulate": 4}, {NODE: 2, GPU: 4 * 2 * 2 * LAYERS}),
    ],
)
def test_forward_crosses_nodes_and_backward_does_not(regather, options, times):
    assert gathers(regather, **options) == times


def test_what_crosses_nodes_is_two_layers_ahead_of_its_use():
    forward, _ = scans_of(nodes.traced(PLAN, regather="gpu", prefetch=1))
    made_by = {}
    for eqn in forward.params["jaxpr"].jaxpr.eqns:
        made_by |= dict.fromkeys(eqn.outvars, eqn)
    near = [e for e in made_by.values() if e.params.get("axis_name") == GPU]
    far = [e for e in made_by.values() if e.params.get("axis_name") == NODE]
    assert len(near) == len(far) == 2
    # No collective of an iteration waits for another: what is gathered within the node was carried.
    assert all(e.invars[0] not in made_by for e in near)


def test_a_step_knows_the_memory_of_what_it_keeps():
    """`tests/test_steps.py` has it keep its contract and give one device's numbers."""
    row = steps.row("regather")
    stack = next(leaf for leaf in row.report.plan.params if leaf.path == "params/layers/w")
    assert stack.rest.axes == LEVELS and stack.near.axes == GPU
    assert row.report.plan._kept_bytes() == sum(leaf.nbytes // 2 for leaf in row.plan.params)
    assert row.plan._kept_bytes() == 0
    crossing = {t.axes for t in row.report.traffic if t.kind == "all-gather"}
    assert crossing >= {NODE, GPU}
