"""Every family of models, at every stage: values, placement, collectives."""

import pathlib
import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import zerojax
import zerojax.nnx
from tests.collectives import collectives
from tests.conftest import mostly_slow, stages
from tests.families import BATCH, FAMILIES, LAYERS, Run, family_of, one_device
from tests.reference import assert_close

STAGES = (0, 1, 2, 3)
QUICK = {"xla_backend_optimization_level": 0}  # compile sooner; values are checked, not speed
SMALL = 256  # elements: biases and norms that stay whole, losses


def sharded(name, stage, steps):
    """The run at a stage, and the jaxpr of its step; at stage 3 its audit finds nothing."""
    family = family_of(name)
    options = {"stage": stage, "mesh": family.mesh}
    losses = []
    if family.objects:
        model, optimizer = zerojax.nnx.shard(*family.make(), **options)
        step = zerojax.nnx.train_step(family.loss, compiler_options=QUICK)
        pure, *args = step.pure(model, optimizer, BATCH)
        jaxpr = pure.trace(*args).jaxpr
        if stage == 3:
            zerojax.audit(pure, *args).check()
        for _ in range(steps):
            losses.append(float(step(model, optimizer, BATCH)["loss"]))
        return Run(losses, zerojax.nnx.state(model, optimizer)), jaxpr
    state = zerojax.shard_train_state(family.make(), **options)
    step = zerojax.train_step(family.loss, compiler_options=QUICK)
    jaxpr = step.trace(state, BATCH).jaxpr
    if stage == 3:
        zerojax.audit(step, state, BATCH).check()
    for _ in range(steps):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    assert step._cache_size() == 1
    return Run(losses, state), jaxpr


VARIANTS = {
    "linen_remat", "linen_scan", "linen_scan_remat", "nnx_remat", "nnx_scan", "nnx_split", "haiku",
    "haiku_stack",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "stage"),
    mostly_slow(
        [(name, stage) for name in FAMILIES for stage in STAGES],
        lambda name, stage: name not in VARIANTS and stage == (1 if name == "plain" else 3),
    ),
)
def test_family(name, stage):
    run, jaxpr = sharded(name, stage, 2)
    check_values(run, one_device(name, 2))
    plan = run.state.tx.plan
    check_placement(run.state, plan)
    check_traffic(list(collectives(jaxpr)), plan, family_of(name).scans)


def check_values(run, wanted):
    np.testing.assert_allclose(run.losses, wanted.losses, rtol=2e-5)
    assert_close(run.state.params, wanted.state.params, 1e-4)


def check_placement(state, plan):
    """Whatever is large is cut, at its stage, and its bytes are those of a part."""
    large = [leaf for leaf in plan.params if leaf.nbytes > 4 * SMALL]
    assert large and (plan.stage == 0 or all(leaf.dim is not None for leaf in large))
    placed = jax.tree.leaves(state)
    for value, leaf in zip(placed, plan.leaves, strict=True):
        assert value.addressable_shards[0].data.nbytes == leaf.bytes_per_device(plan.mesh)
        large = leaf.kind in ("params", "opt_state") and leaf.nbytes > 4 * SMALL
        cut = plan.stage >= {"params": 3, "opt_state": 1}.get(leaf.kind, 4)
        if large:
            assert ("data" in jax.tree.leaves(tuple(value.sharding.spec))) == cut, leaf.path


def check_traffic(found, plan, scans):
    """The ZeRO paper's, with the layers of a loop gathered and reduced inside of it; each device
    moves its own part of what is sharded over a `tensor` axis."""
    part = lambda leaf: NamedSharding(
        plan.mesh, P(*leaf.update.others(len(leaf.shape)))
    ).shard_shape(leaf.shape)
    size = lambda leaves: sum(int(np.prod(part(leaf))) for leaf in leaves)
    cut = [leaf for leaf in plan.params if leaf.dim is not None]
    whole = [leaf for leaf in plan.params if leaf.dim is None]
    moved = lambda kind: sum(c.moved for c in found if c.kind == kind)
    assert moved("all-gather") == {0: 0, 1: 1, 2: 1, 3: 2}[plan.stage] * size(cut)
    assert moved("reduce-scatter") == size(cut)
    assert 0 < moved("all-reduce") - 2 * size(whole) < SMALL
    if plan.stage == 3 and scans:
        in_loop = [c for c in found if c.depth == 1]
        assert {c.times for c in in_loop} == {LAYERS}
        stacks = size(leaf for leaf in cut if leaf.stacked)
        gathered = sum(c.moved for c in in_loop if c.kind == "all-gather")
        assert gathered == 2 * stacks > size(cut)


@pytest.mark.parametrize("stage", stages(3))
def test_tensor_parallel_blocks_keep_their_axis(stage):
    """Megatron's cut of linen's boxes: columns, then rows, one sum over `tensor` a layer."""
    family = family_of("linen_partitioned")
    state = zerojax.shard_train_state(family.make(), stage, mesh=family.mesh)
    blocks = next(v for k, v in state.params.items() if "Block" in k)
    up, down = (blocks[f"Dense_{i}"]["kernel"].value.sharding.spec for i in (0, 1))
    cut = "data" if stage == 3 else None
    assert tuple(up) == (None, cut, "tensor")
    assert tuple(down) == ((None, "tensor", cut) if cut else (None, "tensor"))
    report = zerojax.audit(zerojax.train_step(family.loss), state, BATCH)
    along = {one.axes for one in report.traffic if one.kind == "all-reduce" and one.loops}
    assert ("tensor",) in along
    report.check()


def test_the_guide_lists_the_families():
    page = (pathlib.Path(__file__).parents[1] / "docs" / "models.md").read_text()
    rows = re.findall(r"^\| (\w+): .*\| ✓ \| (.*?) \|", page, flags=re.MULTILINE)
    assert [name for name, _ in rows] == list(FAMILIES)
    at_first_use = {name for name, gathered in rows if "first use" in gathered}
    assert at_first_use == {"linen", "nnx", "haiku"}
