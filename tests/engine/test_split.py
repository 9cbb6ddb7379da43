"""Values that come from weights alone: frozen weights, and stacks sharded along their layers."""

import re

import jax
import jax.numpy as jnp
import pytest

import zerojax
from tests.collectives import collectives
from tests.conftest import make_mesh
from tests.engine.losses import (
    BATCH,
    DIM,
    PARAMS,
    end,
    frozen_inside,
    frozen_where_used_once,
    scan,
    sharded_grad,
)
from tests.reference import assert_close


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_what_is_frozen_is_gathered_by_layers_and_not_reduced(stage, prefetch):
    grad, params = sharded_grad(frozen_where_used_once, stage, prefetch=prefetch)
    found = list(collectives(grad.trace(params, BATCH).jaxpr))
    reduced = [c for c in found if c.kind == "reduce-scatter"]
    assert sum(c.moved for c in reduced) == sum(x.size for x in jax.tree.leaves(PARAMS["c"]))
    if stage == 3:
        frozen = [c for c in found if c.kind == "all-gather" and c.depth == 2]
        assert max(c.elements for c in frozen) == DIM * DIM
        # What is frozen and not in a loop: once each way.
        assert sum(c.elements == DIM * DIM for c in found if c.depth == 0) == 2

    grad, params = sharded_grad(frozen_inside, stage, prefetch=prefetch)
    found = list(collectives(grad.trace(params, BATCH).jaxpr))
    assert sum(c.moved for c in found if c.kind == "reduce-scatter") == PARAMS["a"]["b"].size


def named_in(warned):
    """The remedy, as printed."""
    return re.search(r"stacked='([^']*)'", str(warned[0].message))[1]


def test_stack_sharded_along_its_layers_is_gathered_at_once_with_a_warning():
    params = {"w": jnp.ones((8, DIM, DIM)) / DIM}  # one leaf alone: not known for a stack
    loss = lambda p, batch: end(scan(lambda x, w: x @ w, batch["x"], p["w"]))
    plan = zerojax.plan({"params": params}, stage=3, mesh=make_mesh())
    assert plan.leaves[0].dim == 0
    placed = plan.place({"params": params})["params"]
    with pytest.warns(UserWarning, match=r"^params/w, a stack of shape") as warned:
        _, grads = zerojax.value_and_grad(loss, plan)(placed, BATCH)
    assert warned[0].filename == __file__
    assert_close(grads, jax.grad(loss)(params, BATCH), 1e-6)
    named = zerojax.plan({"params": params}, stage=3, mesh=make_mesh(), stacked=named_in(warned))
    assert named.leaves[0].dim == 1
    _, grads = zerojax.value_and_grad(loss, named)(named.place({"params": params})["params"], BATCH)
    assert_close(grads, jax.grad(loss)(params, BATCH), 1e-6)
