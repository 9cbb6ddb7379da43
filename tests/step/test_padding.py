"""Any shape on any number of devices: padded at rest, with one device's numbers at every stage."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh, PartitionSpec as P

import zerojax
from tests.collectives import collectives
from tests.conftest import make_mesh, mostly_slow, stages
from tests.models import OPTIMIZERS, odd_gpt
from tests.reference import assert_close, make_state, reference_run

STEPS = 3
DEVICES = (1, 2, 3, 5, 6, 7, 8)
STAGES = (1, 2, 3)


@functools.cache
def reference(optimizer, rows):
    return reference_run(odd_gpt(rows), OPTIMIZERS[optimizer](), STEPS)


def placed(made, optimizer, stage, devices, **options):
    state = make_state(made, OPTIMIZERS[optimizer]())
    return zerojax.shard_train_state(state, stage, **{"mesh": make_mesh(devices), **options})


def logical_and_rest(tree, plan, kind):
    """The part of each leaf that is no padding, and the largest number in the padding."""
    leaves, treedef = jax.tree.flatten(tree)
    shapes = [leaf.shape for leaf in plan.leaves if leaf.kind == kind]
    parts, most = [], 0.0
    for value, shape in zip(map(np.asarray, leaves), shapes, strict=True):
        part = value[tuple(map(slice, shape))]
        parts.append(part)
        outside = value.copy()
        outside[tuple(map(slice, shape))] = 0
        most = max(most, float(np.abs(outside).max(initial=0)))
    return treedef.unflatten(parts), most


def check(optimizer, stage, accumulate, devices, **options):
    rows = 2 * devices * accumulate
    # Under a `jax.checkpoint`, padded weights are used in place (`_engine/padded.py`).
    made = odd_gpt(rows, remat=accumulate > 1 or "groups" in options or optimizer == "muon")
    wanted, wanted_losses, _ = reference(optimizer, rows)
    state = placed(made, optimizer, stage, devices, **options)
    plan = state.tx.plan
    assert plan.pads == (devices > 1)
    step = zerojax.train_step(made.loss, accumulate=accumulate)
    losses = []
    for _ in range(STEPS):
        state, metrics = step(state, made.batch)
        losses.append(float(metrics["loss"]))
    assert step._cache_size() == 1, "compiled more than once"
    assert losses == pytest.approx(wanted_losses, rel=1e-5)
    for name, kind, tolerance in (("params", "params", 1e-5), ("opt_state", "opt_state", 2e-5)):
        values, padding = logical_and_rest(getattr(state, name), plan, kind)
        assert_close(values, getattr(wanted, name), tolerance, what=name)
        assert padding == 0


@pytest.mark.parametrize(
    ("optimizer", "stage", "devices"),
    mostly_slow(
        itertools.product(OPTIMIZERS, STAGES, DEVICES),
        lambda *case: case == ("muon", 3, 6),
    ),
)
def test_odd_shapes_match_one_device(optimizer, stage, devices):
    check(optimizer, stage, 1, devices)


@pytest.mark.parametrize(
    ("optimizer", "stage", "devices"),
    mostly_slow(
        itertools.product(("adamw", "muon"), STAGES, DEVICES),
        lambda *case: case == ("adamw", 2, 3),
    ),
)
def test_odd_shapes_match_one_device_over_microbatches(optimizer, stage, devices):
    check(optimizer, stage, 2, devices)


GPU, BOTH = "gpu", ("gpu", "node")
GROUPS = {
    "HSDP": {"params": GPU, "grads": GPU, "opt_state": GPU},
    "AMSP": {"params": GPU, "grads": GPU, "opt_state": BOTH},
    "params": {"params": GPU, "grads": BOTH, "opt_state": BOTH},
    "grads": {"params": (), "grads": GPU, "opt_state": BOTH},
}


def levels(node, gpu):
    devices = np.array(jax.devices()[: node * gpu]).reshape(node, gpu)
    return Mesh(devices, ("node", "gpu"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize(
    ("groups", "accumulate", "sizes"),
    mostly_slow(
        itertools.product(GROUPS, (1, 2), ((2, 3), (3, 2), (2, 4))),
        lambda groups, accumulate, sizes: (groups, accumulate, sizes) == ("AMSP", 1, (2, 3)),
    ),
)
def test_odd_shapes_in_groups_match_one_device(groups, accumulate, sizes):
    mesh = levels(*sizes)
    check("muon", 3, accumulate, mesh.size, mesh=mesh, groups=GROUPS[groups])


def test_shards_of_all_groups_nest():
    """One padding in all placements: a device's part of an outer group is in its inner one."""
    made = odd_gpt(12)
    mesh = levels(2, 3)
    plan = placed(made, "adamw", 3, 6, mesh=mesh, groups=GROUPS["AMSP"]).tx.plan
    leaf = {leaf.path: leaf for leaf in plan.params}["params/embed"]
    assert (leaf.near.axes, leaf.rest.axes) == (("gpu",), ("gpu", "node"))
    assert leaf.near.padding == leaf.grad.padding == leaf.update.padding == 1
    hsdp = placed(made, "adamw", 3, 6, mesh=mesh, groups=GROUPS["HSDP"]).tx.plan
    (table,) = (leaf for leaf in hsdp.params if leaf.path == "params/blocks/qkv")
    assert table.update.padding == 0, "111 is 3 x 37: the GPUs of a node divide it"


@pytest.mark.parametrize("width", [pytest.param(768, marks=pytest.mark.slow), 24])
def test_steps_with_the_embedding_of_gpt2_match_one_device(width):
    table = np.asarray(jax.random.normal(jax.random.key(0), (50257, width))) / width**0.5
    tokens = np.arange(7 * 3).reshape(7, 3) * 2393

    def loss(params, tokens):
        found = params["embed"][tokens]
        logits = found[:, 0] @ params["embed"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1]).mean()

    tx = optax.sgd(1.0, momentum=0.9)
    wanted = TrainState.create(apply_fn=None, params={"embed": table}, tx=tx)
    state = zerojax.shard_train_state(wanted, mesh=make_mesh(7))
    for leaf in jax.tree.leaves((state.params, state.opt_state)):
        assert leaf.shape == (50260, width) and leaf.sharding.spec == P("data")
    step, grad = zerojax.train_step(loss), jax.jit(jax.grad(loss))
    for _ in range(2):
        wanted = wanted.apply_gradients(grads=grad(wanted.params, tokens))
        state, _ = step(state, tokens)
    change = np.asarray(state.params["embed"])[:50257] - table
    assert_close(change, wanted.params["embed"] - table)
    (momentum,) = jax.tree.leaves(state.opt_state)
    assert_close(np.asarray(momentum)[:50257], jax.tree.leaves(wanted.opt_state)[0])
    assert not np.asarray(momentum)[50257:].any()


@pytest.mark.parametrize("stage", stages(1, 3))
def test_nothing_is_all_reduced_where_every_leaf_is_padded(stage):
    made = odd_gpt(12)
    for pad in (True, False):
        state = placed(made, "adamw", stage, 6, pad=pad)
        found = list(collectives(zerojax.train_step(made.loss).trace(state, made.batch).jaxpr))
        summed = sum(c.moved for c in found if c.kind == "all-reduce") // 2
        sharded = [leaf for leaf in state.tx.plan.params if leaf.dim is not None]
        small = sum(np.prod(leaf.shape, dtype=int) for leaf in state.tx.plan.params) - sum(
            np.prod(leaf.shape, dtype=int) for leaf in sharded
        )
        assert small <= summed < small + 10, "gradients of what is small, the loss, and the like"
        assert bool(sharded) == pad
        padded = sum(np.prod(leaf.update.padded(leaf.shape)) for leaf in sharded)
        scattered = sum(c.moved for c in found if c.kind == "reduce-scatter")
        gathered = sum(c.moved for c in found if c.kind == "all-gather")
        assert scattered == padded and gathered == (2 if stage == 3 else 1) * padded


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adafactor", "lamb", "momentum"])
def test_dropping_padding_and_adding_it_moves_nothing(optimizer):
    """From rest to the update's shapes and back, XLA has no collective for a parameter."""
    made = odd_gpt(12)
    state = placed(made, optimizer, 3, 6)
    plan = state.tx.plan
    there_and_back = jax.jit(lambda state: plan.constrain(plan.scatter(state)), donate_argnums=0)
    text = there_and_back.lower(state).compile().as_text()
    assert not any(name in text for name in ("all-gather", "all-to-all", "collective-permute"))
    again = there_and_back(jax.tree.map(jnp.copy, state))
    jax.tree.map(np.testing.assert_array_equal, again, state)
    assert [x.sharding for x in jax.tree.leaves(again)] == plan.shardings


def test_garbage_in_the_padding_does_not_stay():
    made = odd_gpt(12)
    state = placed(made, "adamw", 3, 6)
    plan = state.tx.plan
    spoilt = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), out_shardings=None)(state)
    clean = jax.jit(plan.constrain)(spoilt)
    _, padding = logical_and_rest(clean.params, plan, "params")
    assert padding == 0
    _, padding = logical_and_rest(spoilt.params, plan, "params")
    assert padding == 1


def test_every_leaf_rests_padded_along_the_dimension_of_least_padding():
    state = placed(odd_gpt(12), "adamw", 3, 6)
    shapes = {leaf.path: (leaf.shape, leaf.padded_shape) for leaf in state.tx.plan.params}
    assert shapes == {
        "params/blocks/down": ((3, 149, 37), (3, 150, 37)),
        "params/blocks/norm1": ((3, 37), (3, 37)),  # smaller than min_shard_size
        "params/blocks/norm2": ((3, 37), (3, 37)),
        "params/blocks/proj": ((3, 37, 37), (3, 42, 37)),  # the major one of two alike
        "params/blocks/qkv": ((3, 37, 111), (3, 37, 114)),
        "params/blocks/up": ((3, 37, 149), (3, 37, 150)),
        "params/embed": ((131, 37), (132, 37)),
        "params/norm": ((37,), (37,)),
        "params/pos": ((13, 37), (13, 42)),
    }
    for leaf in state.tx.plan.leaves:
        if leaf.update.dim is not None:
            part = leaf.update.padded(leaf.shape)[leaf.update.dim] // 6
            assert leaf.update.padding < 6 and part == -(-leaf.shape[leaf.update.dim] // 6)


def test_factored_moments_are_padded_as_their_parameters():
    params = {"w": jnp.ones((257, 40))}
    state = {"params": params, "opt_state": optax.adafactor(1e-2, min_dim_size_to_factor=8)}
    state["opt_state"] = state["opt_state"].init(params)
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=8)
    plan = zerojax.plan(state, stage=1, mesh=make_mesh(6), tx=tx)
    found = {
        leaf.path.split("/")[-2]: (leaf.shape, leaf.padded_shape, leaf.spec)
        for leaf in plan.leaves
        if "/v_" in leaf.path
    }
    assert found == {
        "v_row": ((40,), (40,), P()),
        "v_col": ((257,), (258,), P("data")),
    }
