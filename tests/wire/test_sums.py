"""Sums of gradients: each shard gets its own part, in the dtype that they are told to travel in."""

import itertools

import jax
import numpy as np
import pytest

import zerojax
from tests.conftest import make_mesh
from tests.support.collectives import collectives

LEVELS = {"rack": 2, "node": 2, "gpu": 2}
SHAPE = 253, 74  # rests padded, as 256 rows
EACH = np.random.default_rng(0).normal(size=(8, *SHAPE)).astype(np.float32)


def loss(weight, each):
    """Its gradient is the mean of `each`."""
    return (weight * each).sum() / len(each)


def plan(mesh, **options):
    return zerojax.plan((np.zeros(SHAPE, np.float32), ()), mesh=mesh, **options)


def test_whatever_axes_codes_cross_each_shard_gets_its_own_part():
    """Groups within one another, from any axis on. A part that lands elsewhere is off by 140%."""
    mesh = zerojax.mesh(**LEVELS)
    orders = [axes for n in (2, 3) for axes in itertools.permutations(LEVELS, n)]
    codes = zerojax.Precision(reduce=zerojax.QuantizedWire("int8", block=64))
    groups = [{"params": axes[0], "grads": axes[:2], "opt_state": axes} for axes in orders]
    plans = [plan(mesh, groups=each, precision=codes) for each in groups]
    grads = [zerojax.value_and_grad(loss, each) for each in plans]
    weights = [each.place((np.zeros(SHAPE, np.float32), ()))[0] for each in plans]
    run = jax.jit(
        lambda weights: [grad(w, EACH)[1] for grad, w in zip(grads, weights, strict=True)]
    )
    wanted = EACH.mean(0)
    for axes, grad in zip(orders, run(weights), strict=True):
        assert grad.shape == (256, 74) and not np.any(grad[253:]), axes
        off = np.linalg.norm(grad[:253] - wanted) / np.linalg.norm(wanted)
        assert 1e-4 < off < 2e-2, (axes, off)


@pytest.mark.parametrize(
    ("precision", "gathered", "reduced"),
    [
        ({}, "float32", "float32"),
        ({"reduce": "bfloat16"}, "float32", "bfloat16"),
        ({"gather": "bfloat16"}, "bfloat16", "float32"),
        ({"compute": "bfloat16"}, "bfloat16", "bfloat16"),
        ({"compute": "bfloat16", "reduce": "float32"}, "bfloat16", "float32"),
    ],
    ids=str,
)
def test_weights_and_gradients_travel_in_the_dtypes_that_they_are_told(
    precision, gathered, reduced
):
    of_two = plan(make_mesh(2), precision=zerojax.Precision(**precision))
    for accumulate in (1, 2):
        grad = zerojax.value_and_grad(loss, of_two, accumulate=accumulate)
        jaxpr = jax.make_jaxpr(grad)(np.zeros(SHAPE, np.float32), EACH)
        travelling = {(c.kind, c.dtype) for c in collectives(jaxpr) if c.elements > 1}
        assert travelling == {("all-gather", gathered), ("reduce-scatter", reduced)}
