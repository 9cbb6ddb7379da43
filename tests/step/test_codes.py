"""Weights and gradients that travel as codes: how far off gradients are, and what is sent."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import zerojax
from tests import audits, steps
from tests.collectives import collectives
from tests.reference import assert_equal_bits

AXES = ("node", "gpu")
ALL, GPU, NODE = ("gpu", "node"), ("gpu",), ("node",)
LAYERS, DIM, ROWS = 3, 256, 64
INT8 = {"gather": "int8", "reduce": "int8"}


def layer(x, p):
    return x + jnp.tanh(x @ p["w"] * p["s"]) @ p["v"], None


def loss(params, batch):
    x = batch @ params["embed"]
    return jnp.mean((jax.lax.scan(jax.checkpoint(layer), x, params["layers"])[0] - 1) ** 2)


def made(dim=DIM):
    draw = np.random.default_rng(0)
    normal = lambda *shape: (draw.normal(size=shape) / np.sqrt(shape[-2])).astype("f")
    stacks = {"w": normal(LAYERS, dim, dim), "v": normal(LAYERS, dim, dim)}
    return {"embed": normal(64, dim), "layers": stacks | {"s": np.ones((LAYERS, dim), "f")}}


PARAMS = made()
BATCH = np.random.default_rng(1).normal(size=(ROWS, 64)).astype("f")


@functools.cache
def exact():
    return jax.device_get(jax.jit(jax.grad(loss))(PARAMS, BATCH))


def planned(precision, params=PARAMS, sizes=None, **options):
    mesh = steps.Row("", sizes or {"node": 2, "gpu": 2}, {}).mesh
    options = options if "groups" in options else {"axis": AXES, **options}
    state = {"params": params, "opt_state": ()}
    return zerojax.plan(state, mesh=mesh, precision=zerojax.Precision(**precision), **options)


def grads_of(plan, **options):
    return jax.device_get(jax.jit(zerojax.value_and_grad(loss, plan, **options))(PARAMS, BATCH)[1])


def off(grads):
    """The relative error of the worst gradient."""
    norm = lambda x: np.linalg.norm(np.asarray(x, np.float64))
    error = jax.tree.map(lambda got, want: norm(got - want) / norm(want), grads, exact())
    return max(jax.tree.leaves(error))


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


SLOW_FIRST = [
    ({"node": 2, "gpu": 2}, ((), "node", ("node", "gpu"))),
    ({"rack": 2, "node": 2, "gpu": 2}, ((), ("gpu", "rack"), ("rack", "node", "gpu"))),
]


@pytest.mark.parametrize(("sizes", "axes"), SLOW_FIRST)
def test_shards_that_begin_at_the_slow_axis_get_their_own_updates(sizes, axes):
    groups = dict(zip(("params", "grads", "opt_state"), axes, strict=True))
    plan = planned({"reduce": "int8"}, sizes=sizes, groups=groups)
    assert 1e-3 < off(grads_of(plan)) < 2e-2


def test_a_tensor_axis_stays_as_it_is():
    sizes = {"node": 2, "gpu": 2, "tensor": 2}
    spec = jax.sharding.NamedSharding(steps.Row("", sizes, {}).mesh, P(None, None, "tensor"))
    w = jax.device_put(PARAMS["layers"]["w"], spec)
    plan = planned(INT8, PARAMS | {"layers": PARAMS["layers"] | {"w": w}}, sizes)
    grads = jax.jit(zerojax.value_and_grad(loss, plan, regather="gpu"))(PARAMS, BATCH)[1]
    assert grads["layers"]["w"].sharding.spec == P(None, ALL, "tensor")
    assert off(jax.device_get(grads)) < 3e-2


def test_parts_taken_by_hand_travel_as_codes():
    plan = planned(INT8)

    def grads(params, batch):
        def total(parts):
            x = batch @ zerojax.gather({"embed": parts["embed"]})["embed"]
            return jnp.mean((zerojax.scan(layer, x, parts["layers"])[0] - 1) ** 2) / plan.size

        parts = jax.grad(total)(zerojax.shards(params, plan))
        return jax.tree.map(lambda leaf: leaf.data, parts, is_leaf=lambda x: hasattr(x, "cut"))

    specs = zerojax.param_specs(plan)
    options = {"in_specs": (specs, P(AXES)), "out_specs": specs, "check_vma": False}
    run = jax.jit(jax.shard_map(grads, mesh=plan.mesh, **options))
    assert 3e-3 < off(jax.device_get(run(PARAMS, BATCH))) < 4e-2


# -- what is sent


def sent(precision, accumulate=1, order="microbatches", regather=True, prefetch=0, **placing):
    """How often a step sends what: by kind, axes and dtype of the collective."""
    plan = planned(precision, **placing)
    options = {"accumulate": accumulate, "order": order, "regather": regather}
    grad = zerojax.value_and_grad(loss, plan, prefetch=prefetch, **options)
    times = collections.Counter()
    for c in collectives(jax.make_jaxpr(grad)(PARAMS, BATCH)):
        if c.elements >= DIM // 2:
            times[c.kind, c.axes, c.dtype] += c.times
    return dict(times)


GATHERS = 2 * LAYERS - 1  # of a weight: prefetching, backward has the last layer from forward


def test_a_layers_gradients_cross_nodes_as_one_message():
    assert sent(INT8, prefetch=1) == {
        ("all-gather", ALL, "int8"): 2 * GATHERS + 2,  # w, v; twice the embedding
        ("all-gather", ALL, "float32"): 2 * GATHERS + GATHERS,  # their scales; s
        ("reduce-scatter", GPU, "float32"): 2 * LAYERS + 1,
        ("reduce-scatter", ALL, "float32"): LAYERS,  # s, exactly
        ("all-to-all", NODE, "int8"): LAYERS + 1,
    }


def test_weights_that_rest_whole_are_used_as_they_are():
    times = sent(INT8, stage=2)
    assert not any(kind == "all-gather" for kind, _, _ in times)
    assert times["all-to-all", NODE, "int8"] == LAYERS + 1


def test_over_one_axis_gradients_are_codes_all_the_way():
    times = sent({"reduce": "int8"}, sizes={"data": 2}, axis="data")
    assert [key for key in times if key[2] == "int8"] == [("all-to-all", ("data",), "int8")]


@pytest.mark.parametrize(
    ("gather", "times"),
    [
        ({"layers/w": "int8"}, (GATHERS, 3 * GATHERS + 2)),  # w; its scales, v, s, the embedding
        ({"embed": None, "": "int8"}, (2 * GATHERS, 3 * GATHERS + 2)),
    ],
)
def test_codes_by_path_are_for_some_weights_alone(gather, times):
    ways = sent({"gather": gather}, prefetch=1)
    assert tuple(ways["all-gather", ALL, dtype] for dtype in ("int8", "float32")) == times


def test_microbatches_share_what_crossed_nodes_as_codes():
    times = sent(INT8, accumulate=4, regather="gpu")
    assert times["all-gather", NODE, "int8"] == 3, "w, v and the embedding, once a step"
    assert ("all-gather", GPU, "int8") not in times
    times = sent(INT8, accumulate=4, regather="gpu", order="layers")
    assert times["all-gather", NODE, "int8"] == 2 * LAYERS + 1
    assert times["all-to-all", NODE, "int8"] == LAYERS + 1


@pytest.mark.parametrize(
    "groups", [{"params": "gpu", "grads": "gpu"}, {"params": (), "grads": "gpu"}, {"params": "gpu"}]
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_inside_a_node_gradients_travel_as_they_are(groups, accumulate):
    times = sent({"reduce": "int8"}, accumulate=accumulate, groups=groups)
    assert {axes for kind, axes, _ in times if kind == "all-to-all"} == {NODE}
    assert ("reduce-scatter", GPU, "float32") in times


# -- what says so


def test_the_plan_says_what_travels_as_codes():
    lines = str(planned({"gather": "int8", "reduce": "int4"})).splitlines()
    lines = {line.split()[0]: line for line in lines if line.startswith("params/")}
    assert lines["params/embed"].endswith("weight int8, gradient int4")
    assert lines["params/layers/s"].endswith("weight exactly, gradient exactly")
    # A shard's last dimension is 248: blocks of 124.
    assert "gradient int8" in str(planned({"reduce": "int8"}, made(31 * 8)))
    assert "sent as" not in str(planned({}))
    whole = str(planned(INT8, stage=2))
    assert "gradient int8" in whole and "weight" not in whole
    by_path = str(planned({"gather": {"layers/w": "int8", "embed": "bfloat16"}})).splitlines()
    ends = {line.split()[0]: line for line in by_path if line.startswith("params/")}
    assert ends["params/layers/w"].endswith("weight int8")
    assert ends["params/layers/v"].endswith("weight exactly")
    assert ends["params/embed"].endswith("weight bfloat16")


def test_verify_finds_what_is_wrong_beside_what_codes_round():
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=optax.adam(1e-3))
    precision = zerojax.Precision(gather={"layers": "int8"}, reduce="int4")
    options = {"mesh": steps.row("regather").mesh, "axis": AXES, "precision": precision}
    state = zerojax.shard_train_state(state, **options)
    wrong = lambda params, batch: loss(params, batch) * jax.lax.axis_index("gpu")
    assert not zerojax.verify(zerojax.train_step(wrong), state, BATCH).ok


# -- compiled for GPUs


def step_on_gpus(where, shape, axes, **precision):
    options = {"axis": axes, "precision": zerojax.Precision(**precision)}
    mesh = zerojax.aot.mesh(where, shape, axes)
    plan = zerojax.plan(audits.make_state, mesh=mesh, **options)
    step = zerojax.train_step(audits.loss, plan=plan, prefetch=1)
    return step, plan.abstract(), audits.tokens(plan)


@pytest.mark.gpu_code
def test_codes_and_scales_ride_in_one_collective_that_compute_hides():
    args = step_on_gpus("16xH100", (2, 8), AXES, **INT8, compute="bfloat16")
    report = zerojax.audit(*args).check()
    in_loops = [one for one in report.traffic if one.loops]
    assert all(one.asynchronous for one in in_loops)
    for one in in_loops:
        if one.kind == "all-gather":
            assert sorted(part.dtype for part in one.parts) == ["bf16", "f32", "s8"]
    messages = [one for one in in_loops if "gradients_as_codes" in one.scope]
    assert {(one.kind, one.axes) for one in messages} == {("all-to-all", NODE)}


@pytest.mark.gpu_code
def test_one_axis_over_several_hosts_is_refused():
    message = r"over 'data', 16 devices on 2 hosts: .* zerojax\.mesh\(node=2, gpu=8\), axis="
    step, *args = step_on_gpus("16xH100", (16,), ("data",), reduce="int8")
    with pytest.raises(ValueError, match=message):
        step.lower(*args)
