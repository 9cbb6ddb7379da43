"""Loops over stacked weights: one layer is gathered at a time."""

import flax.linen as nn
import jax
import jax.numpy as jnp

import zerojax
from tests.collectives import collectives
from tests.conftest import make_mesh
from tests.engine.losses import BATCH, DIM, LAYERS, end
from tests.reference import assert_close


def test_linen_scan_is_a_layer_loop():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return jnp.tanh(nn.Dense(DIM)(x)), None

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            scanned = nn.scan(
                nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True},
                length=LAYERS,
            )  # fmt: skip
            return scanned()(x, None)[0]

    model = Stack()
    params = model.init(jax.random.key(0), BATCH["x"])
    loss = lambda p, batch: end(model.apply(p, batch["x"]))
    plan = zerojax.plan({"params": params}, stage=3, mesh=make_mesh(), min_shard_size=1)
    assert {leaf.dim for leaf in plan.params} == {1}
    grad = jax.jit(zerojax.value_and_grad(loss, plan))
    placed = plan.place({"params": params})["params"]
    assert_close(grad(placed, BATCH)[1], jax.grad(loss)(params, BATCH), 1e-6)
    found = list(collectives(grad.trace(placed, BATCH).jaxpr))
    assert {c.depth for c in found if c.kind != "all-reduce"} == {1}
