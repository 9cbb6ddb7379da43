"""Families of models that `tests/test_pairs.py` has not: values, collectives, the contract."""

import math

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import zerojax
from tests.conftest import make_mesh, shared_with_ci
from tests.support.collectives import collectives
from tests.support.families import BATCH, FAMILIES, LAYERS
from tests.support.reference import assert_close

SMALL = 128  # elements: biases and norms that stay whole, losses


@pytest.mark.parametrize("name", shared_with_ci(FAMILIES))
def test_family(name):
    family = FAMILIES[name]()
    mesh = family.mesh or make_mesh(2)
    state = zerojax.shard_train_state(family.make, mesh=mesh)
    plan, batch = state.tx.plan, zerojax.shard_batch(BATCH, like=mesh)
    traced = zerojax.train_step(family.loss).trace(state, batch)
    check_traffic(list(collectives(traced.jaxpr)), plan, family.scans)
    compiled = traced.lower().compile()
    report = zerojax.audit(compiled, plan=plan).check()
    plain = jax.jit(lambda s: s.apply_gradients(grads=jax.grad(family.loss)(s.params, BATCH)))
    wanted = family.make()
    for _ in range(2):
        (state, _), wanted = compiled(state, batch), plain(wanted)
    assert_close(state.params, wanted.params, 1e-4)
    if family.mesh:
        check_tensor_axis(state, report)


def check_traffic(sent, plan, scans):
    """The ZeRO paper's, with the layers of a loop gathered and reduced inside of it; each device
    moves its own part of what is sharded over a `tensor` axis."""

    def size(leaves):
        others = lambda leaf: P(*leaf.update.others(len(leaf.shape)))
        part = lambda leaf: NamedSharding(plan.mesh, others(leaf)).shard_shape(leaf.shape)
        return sum(math.prod(part(leaf)) for leaf in leaves)

    cut = [leaf for leaf in plan.params if leaf.dim is not None]
    whole = [leaf for leaf in plan.params if leaf.dim is None]
    moved = lambda kind: sum(c.moved for c in sent if c.kind == kind)
    assert moved("all-gather") == 2 * size(cut)
    assert moved("reduce-scatter") == size(cut)
    assert 0 < moved("all-reduce") - 2 * size(whole) < SMALL
    if scans:
        in_loop = [c for c in sent if c.depth == 1]
        assert {c.times for c in in_loop} == {LAYERS}
        stacks = size(leaf for leaf in cut if leaf.stacked)
        gathered = sum(c.moved for c in in_loop if c.kind == "all-gather")
        assert gathered == 2 * stacks > 0


def check_tensor_axis(state, report):
    """Megatron's cut of linen's boxes: columns, then rows, one sum over `tensor` a layer."""
    blocks = next(v for k, v in state.params.items() if "Block" in k)
    up, down = (blocks[f"Dense_{i}"]["kernel"].value.sharding.spec for i in (0, 1))
    assert tuple(up) == (None, "data", "tensor")
    assert tuple(down) == (None, "tensor", "data")
    along = {one.axes for one in report.traffic if one.kind == "all-reduce" and one.loops}
    assert ("tensor",) in along
