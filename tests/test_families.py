"""Every family of models, at every stage: values, placement, collectives."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import zerojax
import zerojax.nnx
from tests.collectives import collectives
from tests.conftest import mostly_slow
from tests.families import BATCH, FAMILIES, LAYERS, Run, family_of, one_device, tx
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


VARIANTS = {"linen_remat", "linen_scan", "nnx_remat", "haiku"}


@pytest.mark.parametrize(
    ("name", "stage"),
    mostly_slow(
        [(name, stage) for name in FAMILIES for stage in STAGES],
        lambda name, stage: name == "plain" or (stage == 3 and name not in VARIANTS),
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
    assert all(leaf.dim is not None for leaf in plan.params if leaf.nbytes > 4 * SMALL) or (
        plan.stage == 0
    )
    placed = jax.tree.leaves(state)
    for value, leaf in zip(placed, plan.leaves, strict=True):
        assert value.addressable_shards[0].data.nbytes == leaf.bytes_per_device(plan.mesh)
        large = leaf.kind in ("params", "opt_state") and leaf.nbytes > 4 * SMALL
        cut = plan.stage >= {"params": 3, "opt_state": 1}.get(leaf.kind, 4)
        if large:
            assert ("data" in jax.tree.leaves(tuple(value.sharding.spec))) == cut, leaf.path


def check_traffic(found, plan, scans):
    """The ZeRO paper's, with the layers of a loop gathered and reduced inside of it; of what
    lies along a `tensor` axis, each device its own part."""
    part = lambda leaf: NamedSharding(
        plan.mesh, P(*leaf.update.others(len(leaf.shape)))
    ).shard_shape(leaf.shape)
    size = lambda leaves: sum(int(np.prod(part(leaf))) for leaf in leaves)
    cut = [leaf for leaf in plan.params if leaf.dim is not None]
    whole = [leaf for leaf in plan.params if leaf.dim is None]
    moved = lambda kind: sum(c.moved for c in found if c.kind == kind)
    assert moved("all-gather") == {0: 0, 1: 1, 2: 1, 3: 2}[plan.stage] * size(cut)
    assert moved("reduce-scatter") == size(cut)
    assert 0 <= moved("all-reduce") - 2 * size(whole) < SMALL
    if plan.stage == 3 and scans:
        in_loop = [c for c in found if c.depth == 1]
        assert {c.times for c in in_loop} == {LAYERS}
        stacks = size(leaf for leaf in cut if leaf.stacked)
        gathered = sum(c.moved for c in in_loop if c.kind == "all-gather")
        assert gathered == 2 * stacks > size(cut)


@pytest.mark.parametrize("stage", mostly_slow(STAGES, lambda stage: stage == 3))
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


def test_equinox_keeps_what_is_no_array():
    eqx = pytest.importorskip("equinox", reason="the Equinox tests need equinox")

    class Model(eqx.Module):
        linear: eqx.nn.Linear
        activation: object
        table: np.ndarray
        key: jax.Array
        order: jax.Array
        keep: jax.Array
        name: str = "model"

        def __call__(self, x):
            x = self.activation(self.linear(x * self.table))[self.order]
            x = jnp.where(self.keep, x, 0.0)  # wants its arrays to be of the same mesh
            return x + jax.random.uniform(self.key)

    key = jax.random.key(0)
    model = Model(
        eqx.nn.Linear(16, 16, key=key), jnp.tanh, np.ones(16, np.float32), key,
        jnp.arange(16)[::-1], jnp.arange(16) > 1,
    )  # fmt: skip
    seen = []

    def loss(model, batch):
        seen.append(type(model))
        assert model.activation is jnp.tanh and model.name == "model"
        return jnp.mean(jax.vmap(model)(batch) ** 2)

    state = zerojax.shard_train_state(zerojax.ModuleState.create(model, tx()), stage=3)
    assert [leaf.path for leaf in state.tx.plan.params] == [
        "params/linear/weight",
        "params/linear/bias",
    ]
    step = zerojax.train_step(loss)
    batch = jax.random.normal(key, (16, 16))
    zerojax.verify(step, state, batch).raise_if_wrong()
    new, _ = step(state, batch)
    trained = new.model
    assert set(seen) == {Model} and isinstance(trained, Model)
    assert trained.activation is jnp.tanh
    np.testing.assert_array_equal(trained.order, model.order)
    assert trained.linear.weight.sharding.spec == P("data")
    opt_state = tx().init(eqx.filter(model, eqx.is_inexact_array))
    grads = eqx.filter_grad(loss)(model, batch)
    updates, _ = tx().update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
    assert_close(trained.linear.weight, eqx.apply_updates(model, updates).linear.weight, 1e-5)
    evaluated = zerojax.eval_step(loss)(new, batch)["loss"]
    assert float(evaluated) == pytest.approx(float(loss(trained, batch)), rel=1e-5)


def test_modules_of_a_haiku_stack_are_one_stack():
    """Eight layers of norms alone would be taken for a matrix, and cut along the layers."""
    shapes = {
        "stack/norm": {"scale": (8, 256), "offset": (8, 256)},
        "stack/linear": {"w": (8, 256, 256)},
        "head": {"w": (256, 256)},
    }
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    plan = zerojax.plan({"params": params, "opt_state": ()})
    assert {leaf.path: leaf.dim for leaf in plan.params} == {
        "params/head/w": 0, "params/stack/linear/w": 1, "params/stack/norm/offset": 1,
        "params/stack/norm/scale": 1,
    }  # fmt: skip


def test_the_guide_lists_the_families():
    page = (pathlib.Path(__file__).parents[1] / "docs" / "models.md").read_text()
    rows = re.findall(r"^\| (\w+): .*\| ✓ \| (.*?) \|", page, flags=re.MULTILINE)
    assert [name for name, _ in rows] == list(FAMILIES)
    at_first_use = {name for name, gathered in rows if "first use" in gathered}
    assert at_first_use == {"linen", "nnx", "haiku"}
