"""Any shape on any number of devices: what is padded, by how much, and what travels for it."""

import functools
import math

import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from tests.conftest import make_mesh
from tests.step.nodes import AMSP, HSDP, LEVELS
from tests.support import steps
from tests.support.collectives import collectives
from tests.support.models import odd_gpt
from tests.support.reference import make_state

model = functools.cache(lambda: odd_gpt(12))
SIX = make_mesh(6)


def planned(mesh=SIX, **options):
    return zerojax.plan(make_state(model(), optax.adamw(1e-3)), mesh=mesh, **options)


def test_moments_are_padded_as_their_parameters():
    params = {"w": jnp.ones((257, 40))}
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=8)
    state = {"params": params, "opt_state": tx.init(params)}
    plan = zerojax.plan(state, stage=1, mesh=SIX, tx=tx)
    leaves = {leaf.path.split("/")[-2]: leaf for leaf in plan.leaves if "/v_" in leaf.path}
    assert {name: (leaf.shape, leaf.padded_shape, leaf.spec) for name, leaf in leaves.items()} == {
        "v_row": ((40,), (40,), P()),
        "v_col": ((257,), (258,), P("data")),
    }


def test_shards_of_all_groups_nest():
    """One padding in all placements: a device's part of an outer group is in its inner one."""
    mesh = steps.row("groups").mesh  # 2 nodes of 3 GPUs
    leaf = {leaf.path: leaf for leaf in planned(mesh, groups=AMSP).params}["params/embed"]
    assert (leaf.near.axes, leaf.rest.axes) == (("gpu",), LEVELS)
    assert leaf.near.padding == leaf.grad.padding == leaf.update.padding == (1, 0)
    leaves = {leaf.path: leaf for leaf in planned(mesh, groups=HSDP).params}
    qkv = leaves["params/blocks/qkv"]
    assert qkv.update.padding == (), "111 is 3 x 37: the GPUs of a node divide it"


@pytest.mark.parametrize(("stage", "pad"), [(1, True), (2, True), (3, True), (3, False)])
def test_nothing_is_all_reduced_where_every_leaf_is_padded(stage, pad):
    plan = planned(stage=stage, pad=pad)
    step = zerojax.train_step(model().loss)
    found = list(collectives(step.trace(plan.abstract(), model().batch).jaxpr))
    moved = lambda kind: sum(c.moved for c in found if c.kind == kind)
    sharded = [leaf for leaf in plan.params if leaf.dim is not None]
    small = sum(math.prod(leaf.shape) for leaf in plan.params if leaf.dim is None)
    assert bool(sharded) == pad
    # Gradients of what is small, the loss, and the like.
    assert small <= moved("all-reduce") // 2 < small + 10
    padded = sum(math.prod(leaf.update.padded(leaf.shape)) for leaf in sharded)
    assert moved("reduce-scatter") == padded
    assert moved("all-gather") == (2 if stage == 3 else 1) * padded
