"""Losses of every shape: gradients equal jax.grad's, and no full weight outlives its use."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from tests.conftest import is_here, make_mesh
from tests.engine.losses import (
    BATCH,
    DIM,
    LAYERS,
    PARAMS,
    PROGRAMS,
    dense,
    each,
    end,
    kept_by_loops,
    placed,
    plan_of,
    rows_for,
    scan,
    sharded_grad,
    traced,
)  # fmt: skip
from tests.support.collectives import collectives
from tests.support.reference import assert_close

NARROW = {"wider_before_the_scan", "unstacked"}  # bfloat16 somewhere
# Without prefetching, and with weights that are there already, the engine does the same in another
# order: a loss of each kind tells.
KINDS = ("plain_scan", "constants_with_gradients", "remat_in_the_middle", "tied_everywhere")
KINDS += ("frozen_layers",)
PADDED = ("plain_scan", "remat_nothing", "remat_everything", "groups_under_remat", "frozen_inside")
CASES = {
    (3, 8): [*((name, 1) for name in PROGRAMS), *((name, 0) for name in KINDS)],
    (2, 8): [("plain_scan", 0), ("tied_everywhere", 0)],
    (3, 7): [*((name, 1) for name in PADDED), ("remat_nothing", 0)],
}


@pytest.mark.parametrize(("stage", "devices"), CASES)
def test_gradients_are_those_of_jax_and_their_padding_is_zero(stage, devices):
    batch, plan, cases = rows_for(devices), plan_of(stage, devices), CASES[stage, devices]
    functions = {(n, p): sharded_grad(n, stage, devices, prefetch=p) for n, p in cases}
    found = each(functions, placed(stage, devices), batch)
    for (name, _), (value, grads) in found.items():
        loss, gradients = on_one_device(devices)[name]
        tolerance = 2e-2 if name in NARROW else 1e-6
        assert float(value) == pytest.approx(float(loss), rel=tolerance), name
        assert all(map(is_padded, jax.tree.leaves(grads), plan.params)), name
        logical = jax.tree.map(lambda g, p: g[tuple(map(slice, p.shape))], grads, PARAMS)
        assert_close(logical, gradients, tolerance, what=name)


@functools.cache
def on_one_device(devices):
    """The losses of so many devices' rows and their gradients, by name."""
    names = {name for (_, of), cases in CASES.items() for name, _ in cases if of == devices}
    functions = {name: jax.value_and_grad(PROGRAMS[name]) for name in sorted(names)}
    return each(functions, PARAMS, rows_for(devices))


def is_padded(gradient, leaf):
    """Whether a gradient rests as its parameter does, with zeros for padding."""
    rest = np.array(gradient)
    rest[tuple(map(slice, leaf.shape))] = 0
    return gradient.shape == leaf.padded_shape and not rest.any()


def test_what_a_user_put_into_the_padding_is_in_no_gradient():
    """The gradients of these weights are written over them."""
    grad = jax.jit(sharded_grad("remat_nothing", devices=7, prefetch=0))
    full = jax.tree.map(lambda x: x + 1, placed(devices=7))
    _, grads = grad(full, rows_for(7))
    assert all(map(is_padded, jax.tree.leaves(grads), plan_of(3, 7).params))


# -- gathers and reductions

SEVERAL_GATHERS = {
    "frozen_layers",  # two loops over one stack
    "groups_under_remat",  # a stack made of two is gathered whole
    "frozen_where_used_once",  # what is frozen is not reduced
    "frozen_inside",
    "two_encoders",  # two loops, each under a remat of its own
    "tied_everywhere",
}


def moved(jaxpr, kind):
    return sum(c.moved for c in collectives(jaxpr) if c.kind == kind)


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - SEVERAL_GATHERS))
def test_weights_are_gathered_at_most_twice_and_reduced_once(name, prefetch):
    """What the layer loops and scopes owe: three trips over the wire for each parameter."""
    jaxpr = traced(name, prefetch=prefetch)
    gathered, reduced = moved(jaxpr, "all-gather"), moved(jaxpr, "reduce-scatter")
    assert 0 < reduced <= gathered <= 2 * reduced
    assert reduced <= sum(x.size for x in jax.tree.leaves(PARAMS))
    summed = [c.elements for c in collectives(jaxpr) if c.kind == "all-reduce"]
    assert summed and max(summed) <= DIM  # the loss among them


def test_unrolled_layers_are_gathered_again_in_backward():
    """XLA would merge the two gathers of a weight, and keep it."""
    jaxpr, size = traced("python_loop"), sum(x.size for x in jax.tree.leaves(PARAMS["a"]))
    assert (moved(jaxpr, "all-gather"), moved(jaxpr, "reduce-scatter")) == (2 * size, size)
    text = jax.jit(sharded_grad("python_loop")).lower(placed(), BATCH).compile().as_text()
    # Biases are not needed again, nor the first matrix: nobody asks for the batch's gradient.
    assert text.count(" all-gather(") == 2 * LAYERS + LAYERS - 1


@pytest.mark.parametrize(
    ("name", "depths", "dtypes"),
    [
        ("two_encoders", {1}, {"float32"}),
        ("wider_before_the_scan", {1}, {"bfloat16"}),
        ("groups_of_layers", {2}, {"float32"}),
        ("split_and_flipped", {1}, {"float32"}),
        ("unstacked", {0}, {"bfloat16", "float32"}),
    ],
)
def test_stacks_that_are_cut_or_cast_are_gathered_layer_by_layer(name, depths, dtypes):
    found = list(collectives(traced(name, prefetch=0)))
    assert {c.depth for c in found if c.kind == "all-gather"} == depths
    assert max(c.elements for c in found if c.kind == "all-gather") == DIM * DIM
    assert {c.dtype for c in found if c.kind != "all-reduce"} == dtypes


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_what_is_frozen_is_gathered_by_layers_and_not_reduced(stage, prefetch):
    jaxpr = traced("frozen_where_used_once", stage, prefetch=prefetch)
    size = sum(x.size for x in jax.tree.leaves(PARAMS["c"]))
    assert moved(jaxpr, "reduce-scatter") == size
    if stage == 3:
        found = list(collectives(jaxpr))
        frozen = [c for c in found if c.kind == "all-gather" and c.depth == 2]
        assert max(c.elements for c in frozen) == DIM * DIM
        # What is frozen and not in a loop: once each way.
        assert sum(c.elements == DIM * DIM for c in found if c.depth == 0) == 2
    jaxpr = traced("frozen_inside", stage, prefetch=prefetch)
    assert moved(jaxpr, "reduce-scatter") == PARAMS["a"]["b"].size


# -- what is kept for backward


@pytest.mark.parametrize(
    ("stage", "devices", "prefetch"), [(2, 8, 0), (3, 8, 0), (3, 8, 1), (3, 7, 0), (3, 7, 1)]
)
@pytest.mark.parametrize(
    "name", ["plain_scan", "weight_normalisation", "remat_everything", "remat_all_but_names"]
)
def test_no_loop_keeps_full_weights(name, stage, devices, prefetch):
    """Activations have 2 rows on each device, so a weight is easy to tell."""
    loops, kept = kept_by_loops(traced(name, stage, devices, prefetch=prefetch), DIM * DIM)
    assert loops >= 2, "one of forward, one of backward"
    assert kept == []


@pytest.mark.parametrize("devices", [7, 8])
def test_without_regathering_a_weight_is_gathered_and_kept_once(devices):
    jaxpr = traced("plain_scan", devices=devices, regather=False, prefetch=0)
    assert kept_by_loops(jaxpr, DIM * DIM)[1] == [(LAYERS, DIM, DIM)]
    leaves = [leaf for leaf in plan_of(3, devices).params if leaf.path.startswith("params/a")]
    assert moved(jaxpr, "all-gather") == sum(math.prod(leaf.padded_shape) for leaf in leaves)


# -- side effects, stacks that are not known, parameters that are no real numbers


def test_prints_inside_loops_and_remats_still_happen():
    seen = []

    def loss(params, batch):
        def body(x, layer):
            jax.debug.callback(lambda: seen.append("layer"))
            return dense(x, layer)

        def quiet(x, w, unread):
            jax.debug.callback(lambda: seen.append("remat"))
            return x @ w

        # Its output is not used.
        jax.checkpoint(quiet)(batch["x"], params["shared"], params["table"])
        return end(scan(body, batch["x"], params["a"]))

    jax.block_until_ready(jax.jit(sharded_grad(loss))(placed(), BATCH))
    jax.effects_barrier()
    # How often XLA calls back for each device is its own affair.
    assert seen.count("layer") >= LAYERS and seen.count("remat") >= 1


def test_a_stack_sharded_along_its_layers_is_gathered_at_once_with_a_warning():
    params = {"w": np.ones((8, DIM, DIM), "f") / DIM}  # one leaf alone: not known for a stack
    loss = lambda p, batch: end(scan(lambda x, w: x @ w, batch["x"], p["w"]))
    plan = zerojax.plan({"params": params}, stage=3, mesh=make_mesh())
    assert plan.leaves[0].dim == 0
    grads = jax.jit(lambda p, b: zerojax.value_and_grad(loss, plan)(p, b)[1])
    with pytest.warns(UserWarning, match=r"^params/w, a stack of shape") as warned:
        traced = grads.trace(plan.place({"params": params})["params"], BATCH)
    assert is_here(warned[0], __file__)
    got = traced.lower().compile()(plan.place({"params": params})["params"], BATCH)
    assert_close(got, jax.jit(jax.grad(loss))(params, BATCH), 1e-6)
    named = re.search(r"stacked='([^']*)'", str(warned[0].message))[1]  # the remedy, as printed
    named = zerojax.plan({"params": params}, stage=3, mesh=make_mesh(), stacked=named)
    assert named.leaves[0].dim == 1


def test_complex_parameters_keep_their_imaginary_parts_and_integers_pass_through():
    complex_w = (PARAMS["shared"] + 1j * PARAMS["single"]["w"]).astype("complex64")
    params = {"w": complex_w, "perm": np.arange(DIM)[::-1].astype("int32")}
    loss = lambda p, b: jnp.mean(jnp.abs(b["x"][:, p["perm"]] @ p["w"]) ** 2)
    plan = zerojax.plan({"params": params}, stage=3, mesh=make_mesh(), min_shard_size=1)
    precision = zerojax.Precision(reduce="float32")
    grad = jax.jit(zerojax.value_and_grad(loss, plan, precision=precision))
    _, grads = grad(plan.place({"params": params})["params"], BATCH)
    wanted = jax.jit(jax.grad(loss, allow_int=True))(params, BATCH)
    np.testing.assert_allclose(grads["w"], wanted["w"], atol=1e-6)
    assert grads["perm"].dtype == jnp.int32 and not np.any(grads["perm"])
