"""Weights and gradients that travel as codes: how far off gradients are, and what is sent."""

import collections

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import zerojax
from tests.step import nodes
from tests.step.nodes import AXES, BATCH, LAYERS, LEVELS, PARAMS
from tests.support import audits
from tests.support.collectives import collectives
from tests.support.reference import assert_equal_bits
from tests.support.schedules import train_step, value_and_grad

GPU, NODE = ("gpu",), ("node",)
INT8 = {"gather": "int8", "reduce": "int8"}
GRADS = jax.device_get(jax.jit(jax.grad(nodes.loss))(PARAMS, BATCH))
WITHIN = {"params": "gpu", "grads": "gpu"}


def planned(precision, **options):
    return nodes.planned(precision=zerojax.Precision(**precision), **options)


def off(grads):
    """The relative error of the worst gradient."""
    norm = lambda x: np.linalg.norm(np.asarray(x, np.float64))
    return max(norm(grads[name] - want) / norm(want) for name, want in GRADS.items())


def grads_of(plan, params=PARAMS, **options):
    return jax.jit(value_and_grad(nodes.loss, plan, **options))(params, BATCH)[1]


@pytest.mark.parametrize(
    ("precision", "most", "options"),
    [
        ({"gather": "int8"}, 3e-2, {"prefetch": 0}),
        ({"gather": "float8_e4m3fn"}, 1e-1, {"prefetch": 1, "regather": "gpu"}),
        ({"reduce": "int8"}, 1e-2, {"regather": False}),
        ({"reduce": "float8_e4m3fn"}, 4e-2, {"prefetch": 1}),
        ({"reduce": "int4"}, 0.2, {"prefetch": 1, "regather": "gpu"}),
        (INT8, 3e-2, {"accumulate": 4, "regather": "gpu"}),
        (INT8, 3e-2, {"accumulate": 4, "regather": "gpu", "order": "layers"}),
    ],
)
def test_gradients_are_as_far_off_as_the_codes_say(precision, most, options):
    assert most / 10 < off(grads_of(planned(precision), **options)) < most


def test_how_weights_are_gathered_changes_no_bit():
    """Blocks lie within shards, so that codes are the same over one axis or two, kept or not."""
    ways = ({"prefetch": 0}, {"prefetch": 1, "regather": "gpu"})
    assert_equal_bits(*(grads_of(planned(INT8), **options) for options in ways))


@pytest.mark.parametrize(
    ("sizes", "axes"),
    [
        ({"node": 2, "gpu": 4}, ((), "node", ("node", "gpu"))),
        ({"rack": 2, "node": 2, "gpu": 2}, ((), ("gpu", "rack"), ("rack", "node", "gpu"))),
    ],
)
def test_shards_that_begin_at_the_slow_axis_get_their_own_updates(sizes, axes):
    groups = dict(zip(("params", "grads", "opt_state"), axes, strict=True))
    plan = planned({"reduce": "int8"}, mesh=zerojax.mesh(**sizes), groups=groups)
    assert 1e-3 < off(grads_of(plan)) < 2e-2


def test_a_tensor_axis_stays_as_it_is():
    mesh = zerojax.mesh(node=2, gpu=2, tensor=2)
    w = jax.device_put(PARAMS["w"], NamedSharding(mesh, P(None, None, "tensor")))
    state = {"params": PARAMS | {"w": w}, "opt_state": ()}
    plan = zerojax.plan(state, mesh=mesh, axis=AXES, precision=zerojax.Precision(**INT8))
    grads = grads_of(plan, state["params"], regather="gpu")
    assert grads["w"].sharding.spec == P(None, LEVELS, "tensor")
    assert off(jax.device_get(grads)) < 3e-2


# -- what is sent


def sent(precision, accumulate=1, order="microbatches", regather=True, prefetch=0, **placing):
    """How often a step sends weights, gradients and their scales: by kind, axes and dtype."""
    options = {"accumulate": accumulate, "order": order, "regather": regather}
    jaxpr = nodes.traced(planned(precision, **placing), prefetch=prefetch, **options)
    times = collections.Counter()
    for c in collectives(jaxpr):
        times[c.kind, c.axes, c.dtype] += c.times * (c.elements > 1)
    return dict(+times)


GATHERS = 2 * LAYERS - 1  # of a weight: prefetching, backward has the last layer from forward
WEIGHTS, SCALES = ("all-gather", LEVELS, "int8"), ("all-gather", LEVELS, "float32")
EXACT = SCALES  # or weights in the dtype that they have
SUMS = ("reduce-scatter", GPU, "float32")
MESSAGES = ("all-to-all", NODE, "int8")


@pytest.mark.parametrize(
    ("precision", "options", "times"),
    [
        # Gradients of both weights cross nodes in one message.
        (INT8, {}, {WEIGHTS: 2 * GATHERS, SCALES: 2 * GATHERS, SUMS: 2 * LAYERS, MESSAGES: LAYERS}),
        # Weights that rest whole are used as they are, and gathered exactly once they are updated.
        (INT8, {"stage": 2}, {EXACT: 2 * LAYERS, SUMS: 2 * LAYERS, MESSAGES: LAYERS}),
        # By path: w with its scales, and x.
        ({"gather": {"w": "int8"}}, {"stage": 3}, {WEIGHTS: GATHERS, SCALES: 2 * GATHERS}),
        ({"gather": {"w": None, "": "int8"}}, {}, {WEIGHTS: GATHERS, SCALES: 2 * GATHERS}),
    ],
)
def test_what_is_sent_as_codes(precision, options, times):
    found = sent(precision, prefetch=1, **options)
    exact = ("reduce-scatter", LEVELS, "float32")
    assert {key: n for key, n in found.items() if key != exact} == times
    assert (exact in found) == ("reduce" not in precision)


def test_over_one_axis_gradients_are_codes_all_the_way():
    times = sent({"reduce": "int8"}, mesh=zerojax.mesh(data=8), axis="data")
    assert [key for key in times if key[2] == "int8"] == [("all-to-all", ("data",), "int8")]


def test_microbatches_share_what_crossed_nodes_as_codes():
    times = sent(INT8, accumulate=4, regather="gpu")
    assert times["all-gather", NODE, "int8"] == 2, "of both weights, once a step"
    assert ("all-gather", GPU, "int8") not in times
    times = sent(INT8, accumulate=4, regather="gpu", order="layers")
    assert times["all-gather", NODE, "int8"] == 2 * LAYERS
    assert times[MESSAGES] == LAYERS


@pytest.mark.parametrize("groups", [WITHIN, WITHIN | {"params": ()}, {"params": "gpu"}])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_inside_a_node_gradients_travel_as_they_are(groups, accumulate):
    times = sent({"reduce": "int8"}, accumulate=accumulate, groups=groups)
    assert {axes for kind, axes, _ in times if kind == "all-to-all"} == {NODE}
    assert SUMS in times


def test_the_plan_says_what_travels_as_codes():
    def ends(precision, **options):
        lines = str(planned(precision, **options)).splitlines()
        return [line.split("  ")[-1].strip() for line in lines if line.startswith("params/")]

    assert ends({"gather": "int8", "reduce": "int4"}) == ["weight int8, gradient int4"] * 2
    assert ends({"gather": {"w": "int8", "": "bfloat16"}}) == ["weight int8", "weight bfloat16"]
    assert ends({"gather": {"w": "int8"}}) == ["weight int8", "weight exactly"]
    assert ends(INT8, stage=2) == ["gradient int8"] * 2
    assert "sent as" not in str(planned({}))


# -- compiled for GPUs


def step_on_gpus(where, shape, axes, **precision):
    options = {"axis": axes, "precision": zerojax.Precision(**precision)}
    plan = zerojax.plan(audits.make_state, mesh=zerojax.aot.mesh(where, shape, axes), **options)
    step = train_step(audits.loss, plan=plan, prefetch=1)
    return step, plan.abstract(), audits.tokens(plan)


@pytest.mark.gpu_code
def test_codes_and_scales_ride_in_one_collective_that_compute_hides():
    args = step_on_gpus("16xH100", (2, 8), AXES, **INT8, compute="bfloat16")
    report = zerojax.audit(*args).check()
    in_loops = [one for one in report.traffic if one.loops]
    assert all(one.asynchronous for one in in_loops)
    gathers = [one for one in in_loops if one.kind == "all-gather"]
    assert {tuple(sorted(part.dtype for part in one.parts)) for one in gathers} == {
        ("bf16", "f32", "s8")
    }
    messages = [one for one in in_loops if "gradients_as_codes" in one.scope]
    assert {(one.kind, one.axes) for one in messages} == {("all-to-all", NODE)}


@pytest.mark.gpu_code
def test_one_axis_over_several_hosts_is_refused():
    message = r"over 'data', 16 devices on 2 hosts, each .* zerojax\.mesh\(node=2, gpu=8\), axis="
    step, *args = step_on_gpus("16xH100", (16,), ("data",), reduce="int8")
    with pytest.raises(ValueError, match=message):
        step.lower(*args)
