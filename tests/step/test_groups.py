"""Groups: parameters, gradients and optimizer state, each sharded over its own mesh axes."""

import collections
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from tests import audits
from tests.collectives import collectives
from tests.conftest import FUSED_AS_USERS, mostly_slow
from tests.models import MODELS, OPTIMIZERS
from tests.reference import assert_close, assert_equal_bits, make_state, reference_run
from zerojax._plan.placement import Groups
from zerojax._plan.show import groups_text

STEPS = 3
BOTH = ("gpu", "node")  # of a spec: the axis of a node's GPUs is the major one
LEVELS = ((), ("gpu",), BOTH)
CHAINS = [
    Groups(*(LEVELS[level] for level in levels))
    for levels in itertools.combinations_with_replacement(range(3), 3)
]
HSDP, AMSP = Groups(("gpu",), ("gpu",), ("gpu",)), Groups(("gpu",), ("gpu",), BOTH)


def named(groups):
    return "-".join(
        "+".join(axes) or "none" for axes in (groups.params, groups.grads, groups.opt_state)
    )


def as_option(groups):
    return {"params": groups.params, "grads": groups.grads, "opt_state": groups.opt_state}


@functools.cache
def reference(model, optimizer, accumulate):
    return reference_run(MODELS[model](True), OPTIMIZERS[optimizer](), STEPS, 1, accumulate)


def run(model, optimizer, groups, mesh, accumulate=1, **options):
    made = MODELS[model](True)
    tx = OPTIMIZERS[optimizer]()
    state = zerojax.shard_train_state(make_state(made, tx), mesh=mesh, groups=groups, **options)
    step = zerojax.train_step(made.loss, accumulate=accumulate)
    batch = zerojax.shard_batch(made.batch, mesh, axis=mesh.axis_names)
    losses = []
    for _ in range(STEPS):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert step._cache_size() == 1, "compiled more than once"
    return state, losses


def check(model, optimizer, groups, mesh, accumulate=1):
    wanted, wanted_losses, _ = reference(model, optimizer, accumulate)
    state, losses = run(model, optimizer, as_option(groups), mesh, accumulate)
    assert losses == pytest.approx(wanted_losses, rel=1e-5)
    assert_close(state.params, wanted.params, what="params")
    assert_close(state.opt_state, wanted.opt_state, 2e-5, what="opt_state")
    over = lambda axes: P(None, axes if len(axes) > 1 else axes[0]) if axes else P()
    # What a step shards rests where it is updated.
    resting = groups.opt_state if groups.params else ()
    assert state.params["blocks"]["up"].sharding.spec == over(resting)
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.shape == (3, 32, 128)]
    assert moments and all(x.sharding.spec == over(groups.opt_state) for x in moments)


@pytest.mark.parametrize(
    ("groups", "accumulate"),
    mostly_slow(itertools.product(CHAINS, (1, 4)), lambda *case: case in ((HSDP, 4), (AMSP, 1))),
    ids=lambda value: named(value) if isinstance(value, Groups) else str(value),
)
def test_every_chain_gives_one_devices_numbers(groups, accumulate):
    check("gpt", "adamw", groups, zerojax.mesh(node=2, gpu=4), accumulate)


@pytest.mark.parametrize(
    ("optimizer", "groups"),
    mostly_slow(
        itertools.product(("muon", "clip_schedule"), (HSDP, AMSP)),
        lambda *case: case in (("muon", AMSP), ("clip_schedule", HSDP)),
    ),
    ids=lambda value: named(value) if isinstance(value, Groups) else str(value),
)
def test_whole_matrix_and_global_norm_optimizers_are_exact(optimizer, groups):
    check("gpt", optimizer, groups, zerojax.mesh(node=4, gpu=2))


@pytest.mark.parametrize("accumulate", mostly_slow((1, 4), lambda accumulate: accumulate > 1))
def test_three_levels(accumulate):
    mesh = zerojax.mesh(rack=2, node=2, gpu=2)
    groups = Groups(("gpu",), ("gpu", "node"), ("gpu", "node", "rack"))
    check("gpt", "adamw", groups, mesh, accumulate)


FLAT, IN_NODE = Groups(BOTH, BOTH, BOTH), Groups(("gpu",), BOTH, BOTH)


@pytest.mark.parametrize(
    ("accumulate", "prefetch"),
    mostly_slow(itertools.product((1, 4), (0, 1)), lambda *case: case == (1, 1)),
)
def test_weights_that_stay_in_the_node_are_those_of_flat_zero(accumulate, prefetch):
    """The same bits on the way to other GPUs, in two hops or in one."""
    mesh, made = zerojax.mesh(node=2, gpu=4), MODELS["gpt"](True)
    states = []
    for groups in (FLAT, IN_NODE):
        tx = OPTIMIZERS["adamw"]()
        state = zerojax.shard_train_state(make_state(made, tx), mesh=mesh, groups=as_option(groups))
        options = {"prefetch": prefetch, "compiler_options": FUSED_AS_USERS}
        step = zerojax.train_step(made.loss, accumulate=accumulate, **options)
        states.append(step(state, made.batch)[0])
    assert_equal_bits(states[1].params, states[0].params)


DIM, LAYERS = 64, 3


def layers(params, batch, cast="float32", **options):
    """The output of a plain loop over two stacked weights."""

    def layer(x, p):
        p = jax.tree.map(lambda w: w.astype(cast), p)
        return jnp.tanh(x @ p["w"] + x @ p["x"]), None

    return jax.lax.scan(layer, batch.astype(cast), params, **options)[0]


def step_of(groups, run=layers, tx=None, **options):
    """A step of that loop with the state and the batch that it takes."""
    weights = jnp.ones((LAYERS, DIM, DIM)) / DIM
    params, tx = {"w": weights, "x": weights}, tx or optax.sgd(0.1)
    state = {"params": params, "opt_state": tx.init(params)}
    mesh = zerojax.mesh(node=2, gpu=4)
    plan = zerojax.plan(state, mesh=mesh, groups=as_option(groups), tx=tx)
    loss = lambda params, batch: jnp.mean(run(params, batch).astype("float32") ** 2)
    step = zerojax.train_step(loss, tx=tx, plan=plan, **{"prefetch": 0, **options})
    return step, plan.place(state), zerojax.shard_batch(jnp.ones((64, DIM)), plan=plan)


def large_collectives(*args, **options):
    step, state, batch = step_of(*args, **options)
    found = collectives(jax.make_jaxpr(step)(state, batch))
    return [c for c in found if c.elements >= DIM * DIM // 8]


def weights_of(groups, accumulate=1):
    """The collectives on the weights by axes, and how often a step runs each."""
    times = collections.Counter()
    for c in large_collectives(groups, accumulate=accumulate):
        key = (c.kind, frozenset(c.axes), c.depth, c.elements // (DIM * DIM))
        times[key] += c.times
    return dict(times)


def times_by_axes(*args, **options):
    times = collections.Counter()
    for c in large_collectives(*args, **options):
        times[c.kind, *c.axes] += c.times
    return dict(times)


def test_hsdp_gathers_within_a_node_and_sums_shards_between_nodes():
    gpu, node = frozenset({"gpu"}), frozenset({"node"})
    found = set(weights_of(HSDP))
    assert found == {
        ("all-gather", gpu, 1, 1),
        ("reduce-scatter", gpu, 1, 1),
        ("all-reduce", node, 1, 0),  # of a quarter of a layer
    }


def test_with_microbatches_what_crosses_nodes_waits_for_the_last():
    gpu, node = frozenset({"gpu"}), frozenset({"node"})
    assert set(weights_of(HSDP, accumulate=4)) == {
        ("all-gather", gpu, 2, 1),
        ("reduce-scatter", gpu, 2, 1),
        ("all-reduce", node, 0, 0),  # of a quarter of three layers
    }
    assert weights_of(AMSP, accumulate=4) == {
        ("all-gather", node, 0, 0): 2,  # of both weights, before the first
        ("all-gather", gpu, 2, 1): 2 * 3 * 2 * 4,
        ("reduce-scatter", gpu, 2, 1): 2 * 3 * 4,
        ("reduce-scatter", node, 0, 0): 2,
    }


@pytest.mark.parametrize("prefetch", [0, 1])
def test_forward_brings_each_layer_into_the_node_and_backward_finds_it_there(prefetch):
    assert times_by_axes(AMSP, prefetch=prefetch) == {
        # Prefetched two layers ahead, the last layer is brought twice.
        ("all-gather", "node"): 2 * (3 + prefetch),
        ("all-gather", "gpu"): 2 * (3 + 3 - prefetch),  # prefetched, the last layer is still there
        ("reduce-scatter", "gpu"): 2 * 3,
        ("reduce-scatter", "node"): 2 * 3,
    }


@pytest.mark.parametrize(
    ("policy", "gathers"), [(None, 3), (jax.checkpoint_policies.dots_saveable, 2)]
)
def test_a_remat_of_all_layers_crosses_the_network_once(policy, gathers):
    """Its backward runs the loop again, but for what forward brought into the node."""
    found = times_by_axes(AMSP, run=jax.checkpoint(layers, policy=policy))
    assert found["all-gather", "node"] == 2 * 3
    assert found["all-gather", "gpu"] == 2 * 3 * gathers


def test_what_the_loss_casts_crosses_the_network_in_that_dtype():
    """Also before microbatches, outside of the loss."""
    run = functools.partial(layers, cast="bfloat16")
    for accumulate in (1, 2):
        found = large_collectives(AMSP, run=run, accumulate=accumulate)
        gathers = {(c.axes, c.dtype) for c in found if c.kind == "all-gather"}
        assert gathers == {(("node",), "bfloat16"), (("gpu",), "bfloat16")}


def test_frozen_weights_stay_in_the_node():
    labels = {"w": "frozen", "x": "trained"}
    tx = optax.multi_transform({"frozen": optax.set_to_zero(), "trained": optax.sgd(0.1)}, labels)
    _, state, _ = step_of(AMSP, tx=tx)
    assert state["params"]["w"].sharding.spec == P(None, "gpu")
    assert state["params"]["x"].sharding.spec == P(None, BOTH)
    assert times_by_axes(AMSP, tx=tx)["all-gather", "node"] == 3, "of x, in forward"


def test_an_unrolled_loop_gathers_again_in_backward():
    """XLA would merge forward's and backward's gathers, and keep full weights."""
    run = functools.partial(layers, unroll=LAYERS)
    gathered = {}
    for groups in (HSDP, AMSP):
        report = zerojax.audit(*step_of(groups, run=run))
        found = [t for t in report.traffic if t.kind == "all-gather" and t.axes == ("gpu",)]
        gathered[groups] = sum(t.wire_bytes * t.trips for t in found)
    assert gathered[AMSP] == gathered[HSDP] > 0


@pytest.mark.parametrize("groups", [HSDP, AMSP], ids=named)
def test_parts_taken_by_hand_are_gathered_as_in_a_step(groups):
    step, state, batch = step_of(groups)
    plan = step.recipe.plan

    def grads(params, batch):
        def loss(parts):
            layer = lambda x, p: (jnp.tanh(x @ p["w"] + x @ p["x"]), None)
            return jnp.mean(zerojax.scan(layer, batch, parts, prefetch=0)[0] ** 2) / plan.size

        found = jax.grad(loss)(zerojax.shards(params, plan))
        return {name: part.data for name, part in found.items()}

    specs = zerojax.param_specs(plan)
    run = jax.jit(
        jax.shard_map(
            grads,
            mesh=plan.mesh,
            in_specs=(specs, P(plan.batch_axes)),
            out_specs=specs,
            check_vma=False,
        )
    )
    params = state["params"]
    gathers = [c for c in collectives(run.trace(params, batch).jaxpr) if c.kind == "all-gather"]
    assert collections.Counter(axes for c in gathers for axes in [c.axes] * c.times) == {
        ("gpu",): 2 * (3 + 3),
        **({("node",): 2 * 3} if groups == AMSP else {}),
    }
    loss = lambda params, batch: jnp.mean(layers(params, batch) ** 2)
    assert_close(run(params, batch), jax.grad(loss)(zerojax.gather_params(params), batch), 1e-5)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"params": ("gpu", "node"), "grads": "gpu"}, r"grads.*needs.*'node'"),
        ({"grads": ("gpu", "node"), "opt_state": "gpu"}, r"opt_state.*needs.*'node'"),
        ({"params": "tpu"}, r"no axis 'tpu'. Name one of those, or pass a mesh that has it"),
        ({"opt_state": "gpu"}, r"^stage 3 shards grads .* or groups= grads over fewer axes"),
        ({"params": None}, r"params over None. Name an axis.*\(\) replicates"),
        ({"optimizer": "gpu"}, r"'optimizer'. Name one of params, grads, opt_state"),
        ("gpu", r"groups='gpu' is not a mapping. Pass for example {'params': 'gpu'}"),
        ({"grads": 8}, r"grads over 8. Name an axis of the mesh"),
        ({"grads": ["gpu", 8]}, r"grads over \['gpu', 8\]. Name an axis of the mesh"),
    ],
)
def test_groups_that_are_not_nested_or_no_groups_are_refused(groups, message):
    with pytest.raises((ValueError, TypeError), match=message):
        zerojax.plan(
            {"params": {"w": jnp.ones((64, 64))}}, mesh=zerojax.mesh(node=2, gpu=4), groups=groups
        )


def test_a_stage_is_the_default_row():
    mesh, state = (
        zerojax.mesh(node=2, gpu=4),
        {"params": {"w": jnp.ones((64, 64))}, "opt_state": ()},
    )
    plan = zerojax.plan(
        state, stage=2, mesh=mesh, groups={"opt_state": ("gpu", "node"), "grads": "gpu"}
    )
    assert plan.groups == Groups((), ("gpu",), BOTH) and plan.stage == 2
    assert zerojax.plan(state, mesh=mesh, groups={"params": "gpu"}).groups == Groups(
        ("gpu",), BOTH, BOTH
    )


def test_the_bytes_of_a_device_are_those_of_its_groups():
    params = {"w": jnp.ones((64, 64))}
    state = {"params": params, "opt_state": optax.adam(1e-3).init(params)}
    made = zerojax.plan(
        state, mesh=zerojax.mesh(node=2, gpu=4), groups=as_option(AMSP), tx=optax.adam(1e-3)
    )
    assert made.bytes_per_device()["params"] == 64 * 64 * 4 // 8, "where it is updated"
    assert made.bytes_per_device()["opt_state"] == 2 * 64 * 64 * 4 // 8 + 4
    assert made.gradient_bytes() == 64 * 64 * 4 // 4


def test_an_override_over_fewer_axes_is_a_leaf_with_another_group():
    mesh = zerojax.mesh(node=2, gpu=4)
    params = {"w": jnp.ones((64, 64)), "v": jnp.ones((64, 64))}
    plan = zerojax.plan(
        {"params": params, "opt_state": ()},
        mesh=mesh,
        axis=("node", "gpu"),
        overrides={"v$": P(None, "gpu")},
    )
    leaves = {leaf.path: leaf for leaf in plan.leaves}
    assert leaves["params/w"].rest.spec == P(("gpu", "node"))
    assert leaves["params/v"].rest.spec == P(None, "gpu") and leaves["params/v"].update.axes == (
        "gpu",
    )
    placed = plan.place({"params": params, "opt_state": ()})["params"]

    def loss(p, batch):
        return jnp.mean((jnp.tanh(batch @ p["w"]) @ p["v"]) ** 2)

    batch = jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)) / 8, jnp.float32)
    value, grads = zerojax.value_and_grad(loss, plan)(placed, batch)
    wanted, wanted_grads = jax.value_and_grad(loss)(params, batch)
    assert float(value) == pytest.approx(float(wanted), rel=1e-6)
    assert_close(grads, wanted_grads, 1e-6)


def test_a_mesh_of_levels_has_the_devices_of_a_host_next_to_each_other():
    mesh = zerojax.mesh(node=2, gpu=4)
    assert dict(mesh.shape) == {"node": 2, "gpu": 4}
    assert [d.id for d in mesh.devices[0]] == [0, 1, 2, 3]
    assert dict(zerojax.mesh(node=-1, gpu=2).shape) == {"node": 4, "gpu": 2}
    with pytest.raises(ValueError, match=r"3 x 2.*8 devices"):
        zerojax.mesh(node=3, gpu=2)


CROSSED = [
    None,
    HSDP,
    AMSP,
    Groups((), ("gpu",), BOTH),
    Groups(("gpu",), BOTH, BOTH),
]


def options_of(groups):
    """For `shard_train_state`: with the groups, or (None) flat over the usual one axis."""
    if groups is None:
        return {}
    return {"mesh": zerojax.mesh(node=2, gpu=4), "groups": as_option(groups)}


def named_or_flat(groups):
    return "flat" if groups is None else named(groups)


@pytest.mark.parametrize(
    "groups", mostly_slow(CROSSED, lambda groups: groups in (None, AMSP)), ids=named_or_flat
)
def test_checkpoints_cross_between_groupings(groups, tmp_path):
    made = MODELS["gpt"](True)
    state = zerojax.shard_train_state(make_state(made, optax.adam(1e-3)), **options_of(groups))
    zerojax.save(tmp_path / "saved", state)
    for other in CROSSED:
        if other == groups:
            continue
        like = zerojax.shard_train_state(
            make_state(
                dataclasses.replace(made, params=jax.tree.map(jnp.zeros_like, made.params)),
                optax.adam(1e-3),
            ),
            **options_of(other),
        )
        restored = zerojax.restore(tmp_path / "saved", like=like)
        assert_equal_bits(restored.params, made.params)
        for leaf, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(like), strict=True):
            assert leaf.sharding == wanted.sharding


@pytest.mark.parametrize(
    ("groups", "accumulate"),
    mostly_slow(
        itertools.product((HSDP, AMSP, Groups((), ("gpu",), BOTH)), (1, 2)),
        lambda groups, accumulate: accumulate == 1 + (groups == AMSP),
    ),
    ids=lambda value: named(value) if isinstance(value, Groups) else str(value),
)
def test_audit_and_verify_know_groups(groups, accumulate):
    mesh = zerojax.mesh(node=2, gpu=4)
    state = zerojax.shard_train_state(audits.make_state(), mesh=mesh, groups=as_option(groups))
    step = zerojax.train_step(audits.loss, accumulate=accumulate)
    batch = jax.random.randint(jax.random.key(0), (64,), 0, 256)
    batch = zerojax.shard_batch(batch, mesh, axis=mesh.axis_names)
    report = zerojax.audit(step, state, batch)
    report.check()
    stage = 3 if groups.params else 2
    assert str(report).startswith(f"ZeRO stage {stage}, {groups_text(groups)}, 8 devices (cpu)\n")
    stack = [t for t in report.traffic if "params/layers/w" in t.paths]
    gathered = {frozenset(t.axes) for t in stack if t.kind == "all-gather" and t.loops}
    far = frozenset(groups.opt_state) - frozenset(groups.params)
    far = frozenset() if groups.params and accumulate > 1 else far  # before the microbatches
    assert gathered == {axes for axes in (frozenset(groups.params), far) if axes}
    assert zerojax.verify(step, state, batch).ok


@pytest.mark.parametrize(
    ("groups", "accumulate"), [(AMSP, 1), (AMSP, 2), (Groups((), (), BOTH), 1)]
)
def test_weights_that_cross_the_network_twice_break_the_contract(groups, accumulate):
    report = zerojax.audit(*step_of(groups, accumulate=accumulate))
    report.check()
    twice = [
        dataclasses.replace(t, trips=2 * t.trips)
        if t.kind == "all-gather" and t.axes != ("gpu",)
        else t
        for t in report.traffic
    ]
    over = " over node" if groups == AMSP else ""
    with pytest.raises(AssertionError, match=f"/w is gathered 2 times a step{over}; .* at most 1"):
        dataclasses.replace(report, traffic=tuple(twice)).check()


def test_a_step_over_other_groups_breaks_the_contract():
    mesh = zerojax.mesh(node=2, gpu=4)
    flat = zerojax.plan(audits.make_state, mesh=mesh, axis=("gpu", "node"))
    hsdp = zerojax.plan(audits.make_state, mesh=mesh, groups=as_option(HSDP))
    batch = zerojax.aot.batch(jax.ShapeDtypeStruct((256,), jnp.int32), hsdp)
    step = zerojax.train_step(audits.loss, plan=flat)
    report = zerojax.audit(step.lower(flat.abstract(), batch).compile(), plan=hsdp)
    with pytest.raises(AssertionError, match=r"params/layers/w reaches.*not as the plan shards it"):
        report.check()


def test_nnx_models_take_groups():
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.inner, self.outer = nnx.Linear(64, 128, rngs=rngs), nnx.Linear(128, 64, rngs=rngs)

        def __call__(self, x):
            return self.outer(jnp.tanh(self.inner(x)))

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    mesh = zerojax.mesh(node=2, gpu=4)
    zerojax.nnx.shard(model, optimizer, mesh=mesh, groups=as_option(HSDP))
    assert model.inner.kernel[...].sharding.spec == P("gpu")


@pytest.mark.gpu_code
def test_bytes_by_level_on_two_hosts_of_four_gpus():
    """HSDP sends only a quarter of each gradient between hosts, twice over; AMSP the same bytes,
    in one reduce-scatter and one all-gather."""
    mesh = zerojax.aot.mesh("8xH100", (2, 4), ("node", "gpu"), per_host=4)
    sent = {}
    for groups in (HSDP, AMSP):
        plan = zerojax.plan(audits.make_state, mesh=mesh, groups=as_option(groups))
        step = zerojax.train_step(audits.loss, plan=plan)
        batch = zerojax.aot.batch(jax.ShapeDtypeStruct((256,), jnp.int32), plan)
        report = zerojax.audit(step, plan.abstract(), batch)
        assert report.check().findings() == []
        sent[groups] = report.network_bytes
    elements = sum(x.size for x in jax.tree.leaves(audits.make_state().params))
    width = 2  # of what the loss casts to bfloat16, all but a few norms
    assert sent[HSDP] == pytest.approx(2 * elements / 4 * width / 2, rel=0.05)
    # A loop that prefetches brings its last layer into the node twice.
    layer = (
        sum(x.size for x in jax.tree.leaves(audits.make_state().params["layers"])) / audits.LAYERS
    )
    again = layer / 4 * width / 2
    assert sent[AMSP] == pytest.approx(2 * elements / 4 * width / 2 + again, rel=0.01)
