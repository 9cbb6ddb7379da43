"""Parameters that the optimizer does not update: no gradient, nothing reduced, nothing kept."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from tests.conftest import make_mesh
from tests.step import nodes
from tests.step.nodes import BATCH, LAYERS, LEVELS, PARAMS
from tests.support.collectives import collectives
from tests.support.reference import assert_close, train_state

ADAM = optax.adam(1e-2)
LABELS = {"w": "frozen", "x": "trained"}
SIZE = PARAMS["w"].size


def multi(tx):
    return optax.multi_transform({"frozen": optax.set_to_zero(), "trained": tx}, LABELS)


def selective(tx):
    return optax.selective_transform(tx, freeze_mask={"w": True, "x": False})


def clipped(tx):
    """Clips by the norm of everything, which reads every gradient."""
    return optax.chain(optax.clip_by_global_norm(0.1), selective(tx))


def untraceable(tx):
    def update(grads, state, params=None):
        float(jax.tree.leaves(params)[0].sum())
        return grads, state

    return optax.GradientTransformation(tx.init, update)


@pytest.mark.parametrize(
    ("freeze", "paths"),
    [
        (selective, {"params/w"}),
        (multi, {"params/w"}),
        (clipped, set()),
        pytest.param(untraceable, set(), marks=pytest.mark.filterwarnings("ignore")),
    ],
)
def test_what_is_frozen_is_read_off_the_optimizer(freeze, paths):
    plan = nodes.planned(freeze(ADAM))
    assert {leaf.path for leaf in plan.params if leaf.frozen} == paths


@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_frozen_has_no_moments_and_no_masters(stage):
    precision = zerojax.Precision(param="bfloat16", master="float32")
    state = train_state(PARAMS, selective(ADAM))
    for copies, options in ((2, {}), (3, {"precision": precision})):
        plan = zerojax.plan(state, stage=stage, mesh=make_mesh(2), **options)
        part, counter = 4 * SIZE // (2 if stage else 1), 4
        assert plan.bytes_per_device()["opt_state"] == copies * part + counter
        assert ("frozen: nothing updates it" in str(plan)) == (stage < 3)


@pytest.mark.parametrize(
    ("options", "stage", "prefetch", "gathered"),
    [
        ({}, 3, 0, 2 * 2 * SIZE),
        # Prefetching, backward has the last layer of both from forward.
        ({}, 3, 1, 2 * 2 * SIZE - 2 * SIZE // LAYERS),
        ({"wrap": jax.checkpoint}, 3, 0, 3 * 2 * SIZE),
        ({"unroll": LAYERS}, 3, 0, 2 * 2 * SIZE),
        ({}, 1, 0, SIZE),
        ({}, 0, 0, 0),
    ],
)
def test_gradients_of_frozen_parameters_are_not_reduced(options, stage, prefetch, gathered):
    tx, loss = selective(ADAM), functools.partial(nodes.loss, **options)
    jaxpr = nodes.traced(nodes.planned(tx, stage=stage), loss, tx, prefetch=prefetch)
    found = list(collectives(jaxpr))
    moved = lambda kind: sum(c.moved for c in found if c.kind == kind)
    assert moved("reduce-scatter") == (SIZE if stage else 0)
    assert 0 < moved("all-reduce") - (0 if stage else 2 * SIZE) < 256
    assert moved("all-gather") == gathered


def test_a_compiled_step_has_no_room_for_gradients_of_what_is_frozen():
    """Of the adapters, they are next to nothing."""
    w = np.zeros((LAYERS, 128, 128), "f")
    params = {"w": w, "x": {"a": w[..., :8], "b": w[:, :8]}}

    def loss(params, x):
        layer = lambda x, p: (jnp.tanh(x @ p["w"] + x @ p["x"]["a"] @ p["x"]["b"]), None)
        return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2)

    def temporary(tx):
        state = train_state(params, tx)
        plan = zerojax.plan(state, stage=0, mesh=make_mesh(2))
        compiled = zerojax.train_step(loss).lower(plan.abstract(), w[0, :16]).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(nodes.SGD) - temporary(multi(nodes.SGD)) > 0.9 * w.nbytes


def test_value_and_grad_has_zeros_for_what_is_frozen():
    plan = nodes.planned(selective(ADAM))
    _, grads = zerojax.value_and_grad(nodes.loss, plan)(PARAMS, BATCH)
    assert not np.any(grads["w"]) and grads["w"].sharding.spec[1] == LEVELS
    assert_close(grads["x"], jax.jit(jax.grad(nodes.loss))(PARAMS, BATCH)["x"])
