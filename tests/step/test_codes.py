"""Weights and gradients that travel as codes: how far off gradients are, and what is sent."""

import collections
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import zerojax
from tests import audits
from tests.collectives import collectives
from tests.conftest import mostly_slow
from tests.models import MODELS
from tests.reference import assert_equal_bits
from zerojax._wire import messages as _messages

AXES = ("node", "gpu")
LAYERS, DIM = 3, 256


def layer(x, p):
    return x + jnp.tanh(x @ p["w"] * p["s"]) @ p["v"], None


def loss(params, batch):
    x = batch @ params["embed"]
    return jnp.mean((jax.lax.scan(jax.checkpoint(layer), x, params["layers"])[0] - 1) ** 2)


def params(dim=DIM):
    keys = jax.random.split(jax.random.key(0), 3)
    normal = lambda key, *shape: jax.random.normal(key, shape) / np.sqrt(shape[-2])
    return {
        "embed": normal(keys[0], 64, dim),
        "layers": {
            "w": normal(keys[1], LAYERS, dim, dim),
            "v": normal(keys[2], LAYERS, dim, dim),
            "s": jnp.ones((LAYERS, dim)),
        },
    }


BATCH = jax.random.normal(jax.random.key(9), (64, 64))


def plan_with(precision, dim=DIM, mesh=None, **options):
    mesh = mesh or zerojax.mesh(node=2, gpu=4)
    state = {"params": params(dim), "opt_state": ()}
    options = {"axis": AXES} | options
    return zerojax.plan(state, mesh=mesh, precision=zerojax.Precision(**precision), **options)


def grads_with(precision, dim=DIM, plan=None, **options):
    plan = plan or plan_with(precision, dim)
    placed = plan.place({"params": params(dim), "opt_state": ()})["params"]
    run = jax.jit(zerojax.value_and_grad(loss, plan, **options))
    return jax.tree.map(np.asarray, plan.logical_grads(run(placed, BATCH)[1]))


def far_off(found, wanted):
    """The relative error of each gradient."""
    norm = lambda tree: jax.tree.map(lambda x: np.linalg.norm(np.asarray(x, np.float64)), tree)
    error = norm(jax.tree.map(np.subtract, found, wanted))
    return jax.tree.leaves(jax.tree.map(np.divide, error, norm(wanted)))


BOUNDS = {
    "gather int8": ({"gather": "int8"}, 3e-2),
    "gather e4m3": ({"gather": "float8_e4m3fn"}, 1e-1),
    "reduce int8": ({"reduce": "int8"}, 1e-2),
    "reduce e4m3": ({"reduce": "float8_e4m3fn"}, 4e-2),
    "reduce int4": ({"reduce": "int4"}, 0.2),
    "both": ({"gather": "int8", "reduce": "int8"}, 3e-2),
}
WAYS = {
    "plain": {"prefetch": 0},
    "prefetched": {"prefetch": 1},
    "kept in the node": {"prefetch": 1, "regather": "gpu"},
    "kept": {"regather": False},
    "microbatches": {"accumulate": 4, "regather": "gpu"},
}


@pytest.mark.parametrize(
    ("codes", "way"),
    mostly_slow(
        itertools.product(BOUNDS, WAYS),
        lambda codes, way: codes == "both" or way == "kept in the node",
    ),
)
def test_gradients_are_as_far_off_as_the_codes_say(codes, way):
    precision, most = BOUNDS[codes]
    found = grads_with(precision, **WAYS[way])
    worst = max(far_off(found, jax.grad(loss)(params(), BATCH)))
    assert most / 10 < worst < most


@pytest.mark.parametrize(
    "codes", mostly_slow(["gather int8", "both"], lambda codes: codes == "both")
)
def test_how_weights_are_gathered_changes_no_bit(codes):
    """Blocks lie within shards, so that codes are the same over one axis or two, kept or not."""
    ways = [grads_with(BOUNDS[codes][0], **WAYS[way]) for way in list(WAYS)[:3]]
    assert_equal_bits(ways[1], ways[0])
    assert_equal_bits(ways[2], ways[0])


@pytest.mark.parametrize("model", mostly_slow(MODELS, lambda model: model in ("gpt", "mlp")))
def test_models_train_with_codes(model):
    made = MODELS[model](True)
    mesh, states = zerojax.mesh(node=2, gpu=4), []
    for precision in ({}, {"gather": "int8", "reduce": "int8"}):
        state = zerojax.shard_train_state(
            TrainState.create(apply_fn=None, params=made.params, tx=optax.sgd(0.1)),
            mesh=mesh,
            axis=AXES,
            precision=zerojax.Precision(**precision),
        )
        states.append(zerojax.train_step(made.loss)(state, made.batch))
    (_, exact), (_, found) = states
    assert float(found["loss"]) == pytest.approx(float(exact["loss"]), rel=2e-2)
    assert float(found["grad_norm"]) == pytest.approx(float(exact["grad_norm"]), rel=0.1)


def test_padded_leaves_travel_as_codes_too():
    dim = 320  # of 8 devices' 40 rows; with 6 they would need padding
    mesh = jax.make_mesh((2, 3), AXES, devices=jax.devices()[:6])
    mesh = zerojax.mesh(node=2, gpu=3, devices=jax.devices()[:6]) if mesh is None else mesh
    state = {"params": params(dim), "opt_state": ()}
    precision = zerojax.Precision(gather="int8", reduce="int8")
    plan = zerojax.plan(state, mesh=_auto(mesh), axis=AXES, precision=precision)
    assert plan.pads
    batch = BATCH[:60]
    placed = plan.place(state)["params"]
    found = jax.jit(zerojax.value_and_grad(loss, plan, prefetch=1))(placed, batch)[1]
    found = jax.tree.map(np.asarray, plan.logical_grads(found))
    assert max(far_off(found, jax.grad(loss)(params(dim), batch))) < 4e-2


def _auto(mesh):
    return jax.sharding.Mesh(
        mesh.devices, mesh.axis_names, axis_types=(jax.sharding.AxisType.Auto,) * 2
    )


def sent_by(precision, stage=3, **options):
    """What a step sends: kind, axes and dtype of each collective, and how often a step runs it."""
    plan = plan_with(precision, stage=stage)
    state = plan.place({"params": params(), "opt_state": ()})
    grads = zerojax.value_and_grad(loss, plan, **options)
    times = collections.Counter()
    for c in collectives(jax.make_jaxpr(grads)(state["params"], BATCH)):
        if c.elements >= DIM:
            times[c.kind, c.axes, c.dtype] += c.times
    return dict(times)


def test_a_layers_gradients_cross_nodes_as_one_message():
    both = sent_by({"gather": "int8", "reduce": "int8"}, prefetch=1)
    gathers = 2 * LAYERS - 1  # of a layer, forward and backward, whose last layer is still there
    assert both == {
        ("all-gather", ("gpu", "node"), "int8"): 2 * gathers + 2,  # w, v; the embedding
        ("all-gather", ("gpu", "node"), "float32"): 2 * gathers + gathers,  # their scales; s
        ("reduce-scatter", ("gpu",), "float32"): 2 * LAYERS + 1,
        ("reduce-scatter", ("gpu", "node"), "float32"): LAYERS,  # s, exactly
        ("all-to-all", ("node",), "int8"): LAYERS + 1,
    }


def test_weights_that_rest_whole_are_used_and_gathered_as_they_are():
    found = sent_by({"gather": "int8", "reduce": "int8"}, stage=2)
    assert not any(kind == "all-gather" for kind, _, _ in found)
    assert found["all-to-all", ("node",), "int8"] == LAYERS + 1
    exact = grads_with({}, plan=plan_with({}, stage=2))
    assert_equal_bits(grads_with({}, plan=plan_with({"gather": "int8"}, stage=2)), exact)


def test_over_one_axis_gradients_are_codes_all_the_way():
    plan = plan_with({"reduce": "int8"}, mesh=zerojax.mesh(data=8), axis="data")
    found = grads_with({}, plan=plan)
    assert max(far_off(found, jax.grad(loss)(params(), BATCH))) < 1e-2
    kinds = collections.Counter(
        (c.kind, c.axes, c.dtype)
        for c in collectives(jax.make_jaxpr(zerojax.value_and_grad(loss, plan))(params(), BATCH))
        if c.dtype == "int8"
    )
    assert set(kinds) == {("all-to-all", ("data",), "int8")}


def test_a_tensor_axis_stays_as_it_is():
    mesh = zerojax.mesh(node=2, gpu=2, tensor=2)
    spec = lambda *names: jax.sharding.NamedSharding(mesh, P(*names))
    given = params()
    given["layers"]["w"] = jax.device_put(given["layers"]["w"], spec(None, None, "tensor"))
    state = {"params": given, "opt_state": ()}
    precision = zerojax.Precision(gather="int8", reduce="int8")
    plan = zerojax.plan(state, mesh=mesh, axis=AXES, precision=precision)
    placed = plan.place(state)["params"]
    assert placed["layers"]["w"].sharding.spec == P(None, ("gpu", "node"), "tensor")
    found = jax.jit(zerojax.value_and_grad(loss, plan, regather="gpu"))(placed, BATCH)[1]
    assert found["layers"]["w"].sharding.spec == P(None, ("gpu", "node"), "tensor")
    assert max(far_off(found, jax.grad(loss)(params(), BATCH))) < 3e-2


def test_the_plan_says_what_travels_as_codes():
    text = str(plan_with({"gather": "int8", "reduce": "int4"}))
    lines = {line.split()[0]: line for line in text.splitlines() if line.startswith("params/")}
    assert lines["params/embed"].endswith("weight int8, gradient int4")
    assert lines["params/layers/s"].endswith("weight exactly, gradient exactly")
    odd = str(plan_with({"reduce": "int8"}, dim=31 * 8))  # a shard's last dimension is 248: 124s
    assert "gradient int8" in odd
    assert "sent as" not in str(plan_with({}))
    whole = str(plan_with({"gather": "int8", "reduce": "int8"}, stage=2))
    assert "gradient int8" in whole and "weight" not in whole


def test_codes_by_path_are_for_some_weights_alone():
    some, every = {"gather": {"layers/w": "int8"}}, {"gather": {"embed": None, "": "int8"}}
    gathers = 2 * LAYERS - 1  # of a layer, forward and backward, whose last layer is still there
    ways = ("all-gather", ("gpu", "node"), "int8"), ("all-gather", ("gpu", "node"), "float32")
    sent = sent_by(some, prefetch=1)
    assert [sent[way] for way in ways] == [gathers, 3 * gathers + 2]  # w; its scales, v, s, embed
    sent = sent_by(every, prefetch=1)
    assert [sent[way] for way in ways] == [2 * gathers, 3 * gathers + 2]
    lines = {line.split()[0]: line for line in str(plan_with(some)).splitlines() if line}
    assert lines["params/layers/w"].endswith("weight int8")
    assert lines["params/layers/v"].endswith("weight exactly")
    plan = plan_with({"gather": {"layers/w": "float8_e4m3fn", "": "bfloat16"}})
    line = next(line for line in str(plan).splitlines() if line.startswith("params/embed"))
    assert line.endswith("weight bfloat16")


@pytest.mark.parametrize(
    "way", mostly_slow(WAYS, lambda way: way in ("kept in the node", "microbatches"))
)
def test_gradients_are_off_by_the_codes_of_the_weights_that_have_them(way):
    found = grads_with({"gather": {"layers/w": "int8"}}, **WAYS[way])
    exact, coded = (grads_with({"gather": x}, **WAYS[way]) for x in (None, "int8"))
    off = max(far_off(found, exact))
    assert 1e-3 < off < max(far_off(coded, exact))
    if way != "microbatches":  # which send float32 inside the node either way
        assert_equal_bits(grads_with({"gather": {"": "int8"}}, **WAYS[way]), coded)
    assert_equal_bits(grads_with({"gather": {"layers/w": None}}, **WAYS[way]), exact)


def test_patterns_of_codes_are_checked_when_a_state_or_a_step_gets_them():
    wrong = r"Precision\(gather=\) has the path pattern 'layers/q'.* Did you mean params/layers/"
    with pytest.raises(ValueError, match=wrong):
        plan_with({"gather": {"layers/q": "int8"}})
    plan = zerojax.plan({"params": params(), "opt_state": ()}, mesh=zerojax.mesh(data=8))
    precision = zerojax.Precision(gather={"layers/q": "int8"})
    with pytest.raises(ValueError, match=wrong):
        zerojax.value_and_grad(loss, plan, precision=precision)(params(), BATCH)


def test_verify_and_audit_know_codes_by_path():
    state = TrainState.create(apply_fn=None, params=params(), tx=optax.adam(1e-3))
    mesh = zerojax.mesh(node=2, gpu=4)
    precision = zerojax.Precision(gather={"layers": "int8"})
    state = zerojax.shard_train_state(state, mesh=mesh, axis=AXES, precision=precision)
    step = zerojax.train_step(loss)
    assert zerojax.verify(step, state, BATCH).ok
    assert zerojax.audit(step, state, BATCH).findings() == []
    wrong = lambda params, batch: loss(params, batch) * jax.lax.axis_index("gpu")
    assert not zerojax.verify(zerojax.train_step(wrong), state, BATCH).ok


def test_frozen_weights_travel_as_codes():
    tx = optax.masked(optax.sgd(0.1), {"embed": True, "layers": False})
    tx = optax.chain(tx, optax.masked(optax.set_to_zero(), {"embed": False, "layers": True}))
    state = TrainState.create(apply_fn=None, params=params(), tx=tx)
    precision = zerojax.Precision(gather="int8", reduce="int8")
    mesh = zerojax.mesh(node=2, gpu=4)
    state = zerojax.shard_train_state(state, mesh=mesh, axis=AXES, precision=precision)
    new, metrics = zerojax.train_step(loss, regather="gpu")(state, BATCH)
    assert_equal_bits(zerojax.gather_params(new.params)["layers"], params()["layers"])
    assert float(metrics["loss"]) == pytest.approx(float(loss(params(), BATCH)), rel=1e-2)


def test_infinite_gradients_are_skipped():
    state = TrainState.create(apply_fn=None, params=params(), tx=optax.sgd(0.1))
    precision = zerojax.Precision(reduce="int8")
    mesh = zerojax.mesh(node=2, gpu=4)
    state = zerojax.shard_train_state(state, mesh=mesh, axis=AXES, precision=precision)
    step = zerojax.train_step(loss, skip_nonfinite=True, donate=False)
    new, metrics = step(state, BATCH.at[5, 5].set(jnp.inf))
    assert metrics["skipped"] == 1
    assert_equal_bits(new.params, state.params)


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        ("gather int8", "gather e4m3", "reduce int8", "reduce int4"),
        lambda name: name in ("gather e4m3", "reduce int4"),
    ),
)
def test_verify_allows_for_the_codes_and_finds_what_is_wrong(name):
    state = TrainState.create(apply_fn=None, params=params(), tx=optax.adam(1e-3))
    mesh, precision = zerojax.mesh(node=2, gpu=4), zerojax.Precision(**BOUNDS[name][0])
    state = zerojax.shard_train_state(state, mesh=mesh, axis=AXES, precision=precision)
    assert zerojax.verify(zerojax.train_step(loss), state, BATCH).ok
    wrong = lambda params, batch: loss(params, batch) * jax.lax.axis_index("gpu")
    assert not zerojax.verify(zerojax.train_step(wrong), state, BATCH).ok


def test_parts_taken_by_hand_travel_as_codes():
    plan = plan_with({"gather": "int8", "reduce": "int8"})

    def grads(given, batch):
        def total(parts):
            parts = parts | zerojax.gather({"embed": parts["embed"]})
            x = batch @ parts["embed"]
            return jnp.mean((zerojax.scan(layer, x, parts["layers"])[0] - 1) ** 2) / 8

        found = jax.grad(total)(zerojax.shards(given, plan))
        return jax.tree.map(lambda leaf: leaf.data, found, is_leaf=lambda x: hasattr(x, "cut"))

    specs = zerojax.param_specs(plan)
    run = jax.shard_map(
        grads, mesh=plan.mesh, in_specs=(specs, P(AXES)), out_specs=specs, check_vma=False
    )
    assert max(far_off(jax.jit(run)(params(), BATCH), jax.grad(loss)(params(), BATCH))) < 4e-2


def step_on_gpus(where, shape, axes, **precision):
    mesh = zerojax.aot.mesh(where, shape, axes)
    plan = zerojax.plan(
        audits.make_state, mesh=mesh, axis=axes, precision=zerojax.Precision(**precision)
    )
    step = zerojax.train_step(audits.loss, plan=plan, prefetch=1)
    return step, plan.abstract(), audits.tokens(plan)


@pytest.mark.gpu_code
def test_codes_and_scales_ride_in_one_collective_that_compute_hides():
    report = zerojax.audit(
        *step_on_gpus("16xH100", (2, 8), AXES, gather="int8", reduce="int8", compute="bfloat16")
    ).check()
    in_loops = [one for one in report.traffic if one.loops]
    assert all(one.asynchronous for one in in_loops)
    for one in in_loops:
        if one.kind == "all-gather":
            assert sorted(part.dtype for part in one.parts) == ["bf16", "f32", "s8"]
    messages = [one for one in in_loops if _messages.SCOPE in one.scope]
    assert {(one.kind, one.axes) for one in messages} == {("all-to-all", ("node",))}


@pytest.mark.gpu_code
def test_one_axis_over_several_hosts_is_refused():
    message = r"over 'data', 16 devices on 2 hosts: .* zerojax\.mesh\(node=2, gpu=8\), axis="
    step, *args = step_on_gpus("16xH100", (16,), ("data",), reduce="int8")
    with pytest.raises(ValueError, match=message):
        step.lower(*args)


def test_layers_before_microbatches_cross_nodes_once_as_codes():
    precision = {"gather": "int8", "reduce": "int8"}
    options = {"accumulate": 4, "order": "layers", "regather": "gpu"}
    found = grads_with(precision, **options)
    assert max(far_off(found, jax.grad(loss)(params(), BATCH))) < 3e-2
    sent = sent_by(precision, **options)
    assert sent["all-to-all", ("node",), "int8"] == LAYERS + 1
    assert sent["all-gather", ("node",), "int8"] == 2 * LAYERS + 1


def test_microbatches_share_weights_that_crossed_nodes_as_codes():
    options = {"accumulate": 4, "regather": "gpu", "prefetch": 0}
    sent = sent_by({"gather": "int8"}, **options)
    gathers = {key: times for key, times in sent.items() if key[0] == "all-gather"}
    assert gathers["all-gather", ("node",), "int8"] == 3  # once a step: w, v, the embedding
    assert not any(axes == ("gpu",) and dtype == "int8" for _, axes, dtype in gathers)
    found = grads_with({"gather": "int8"}, **options)
    once = grads_with({"gather": "int8"}, accumulate=4, prefetch=0)
    assert max(far_off(found, once)) < 1e-6  # coded once, as without


@pytest.mark.parametrize(
    "groups",
    [{"params": "gpu", "grads": "gpu"}, {"params": (), "grads": "gpu"}, {"params": "gpu"}],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_inside_a_node_gradients_travel_as_they_are(groups, accumulate):
    plan = plan_with({"reduce": "int8"}, groups=groups)
    grads = zerojax.value_and_grad(loss, plan, accumulate=accumulate)
    found = collections.Counter()
    for c in collectives(jax.make_jaxpr(grads)(params(), BATCH)):
        if c.kind == "all-to-all":
            found[c.axes] += c.times
    assert set(found) == {("node",)}
    assert (
        max(
            far_off(
                grads_with({}, plan=plan, accumulate=accumulate), jax.grad(loss)(params(), BATCH)
            )
        )
        < 1e-2
    )


def test_codes_where_no_shard_crosses_nodes_are_refused():
    plan = plan_with(
        {"reduce": "int8"}, groups=dict.fromkeys(("params", "grads", "opt_state"), "gpu")
    )
    with pytest.raises(
        ValueError, match=r"groups= shards nothing over \('node',\): .*'params': 'gpu'"
    ):
        grads_with({}, plan=plan)


SLOW_FIRST = {
    "gradients over nodes": ({"node": 2, "gpu": 4}, ((), "node", ("node", "gpu"))),
    "parameters too": ({"node": 2, "gpu": 4}, ("node", "node", ("node", "gpu"))),
    "a fast axis between": (
        {"rack": 2, "node": 2, "gpu": 2},
        ((), ("gpu", "rack"), ("rack", "node", "gpu")),
    ),
}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("case", mostly_slow(SLOW_FIRST, lambda case: case != "parameters too"))
def test_shards_that_begin_at_the_slow_axis_get_their_own_updates(case, accumulate):
    sizes, axes = SLOW_FIRST[case]
    groups = dict(zip(("params", "grads", "opt_state"), axes, strict=True))
    plan = plan_with({"reduce": "int8"}, groups=groups, mesh=zerojax.mesh(**sizes), axis=None)
    found = grads_with({}, plan=plan, accumulate=accumulate)
    assert 1e-3 < max(far_off(found, jax.grad(loss)(params(), BATCH))) < 2e-2
