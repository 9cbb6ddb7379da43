"""`regather=` by axis: backward gathers within a node what forward brought there."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from tests import audits, steps
from tests.collectives import collectives, scans_of
from tests.reference import assert_close
from zerojax._hlo.groups import group_of
from zerojax._hlo.lineage import NONE, Lineage
from zerojax._hlo.module import Module

AXES = ("node", "gpu")
LAYERS, DIM = 4, 64


def layer(x, p):
    return jnp.tanh(x @ p["w"] + x @ p["x"]), None


def loss(params, batch):
    return jnp.mean(jax.lax.scan(layer, batch, params)[0] ** 2)


WEIGHTS = np.ones((LAYERS, DIM, DIM), "f") / DIM
PARAMS, TX = {"w": WEIGHTS, "x": WEIGHTS}, optax.sgd(0.1)
STATE = {"params": PARAMS, "opt_state": TX.init(PARAMS)}
BATCH = np.ones((64, DIM), "f")


def traced(regather, **options):
    """The jaxpr of a step over two stacked weights."""
    plan = zerojax.plan(STATE, mesh=zerojax.mesh(node=2, gpu=4), axis=AXES, tx=TX)
    step = zerojax.train_step(loss, tx=TX, plan=plan, regather=regather, **options)
    return step.trace(plan.abstract(), BATCH).jaxpr


def gathers_by_axes(jaxpr):
    times = collections.Counter()
    for c in collectives(jaxpr):
        times[c.axes] += c.times if c.kind == "all-gather" else 0
    return dict(+times)


@pytest.mark.parametrize(("prefetch", "last"), [(0, 0), (1, 1)])
def test_forward_crosses_nodes_and_backward_does_not(prefetch, last):
    assert gathers_by_axes(traced(True, prefetch=prefetch)) == {
        ("gpu", "node"): 2 * (2 * LAYERS - last)  # prefetched, the last layer is still there
    }
    assert gathers_by_axes(traced("gpu", prefetch=prefetch)) == {
        ("node",): 2 * (LAYERS + last),  # prefetched, the last layer crosses twice
        ("gpu",): 2 * (2 * LAYERS - last),
    }
    assert gathers_by_axes(traced(("gpu", "node"))) == gathers_by_axes(traced(True))


def test_microbatches_cross_nodes_once_a_step():
    assert gathers_by_axes(traced("gpu", accumulate=4, prefetch=0)) == {
        ("node",): 2,  # of all layers together
        ("gpu",): 2 * 2 * LAYERS * 4,
    }


def test_what_crosses_nodes_is_two_layers_ahead_of_its_use():
    forward, _ = scans_of(traced("gpu", prefetch=1))
    made = {}
    for eqn in forward.params["jaxpr"].jaxpr.eqns:
        made |= dict.fromkeys(eqn.outvars, eqn)
    near = [e for e in made.values() if e.params.get("axis_name") == ("gpu",)]
    far = [e for e in made.values() if e.params.get("axis_name") == ("node",)]
    assert len(near) == len(far) == 2
    # No collective of an iteration waits for another: what is gathered within the node was carried.
    assert all(e.invars[0] not in made for e in near)


def test_a_step_knows_the_memory_of_what_it_keeps():
    """`tests/test_steps.py` has it keep its contract and give one device's numbers."""
    row = steps.row("regather")
    stack = next(leaf for leaf in row.report.plan.params if leaf.path == "params/layers/w")
    assert stack.rest.axes == ("gpu", "node") and stack.near.axes == ("gpu",)
    assert row.report.plan.kept_bytes() == sum(leaf.nbytes // 2 for leaf in row.plan.params)
    assert row.plan.kept_bytes() == 0
    crossing = {t.axes for t in row.report.traffic if t.kind == "all-gather"}
    assert crossing >= {("node",), ("gpu",)}


@pytest.mark.gpu_code
def test_backward_gathers_what_has_arrived():
    """ZeRO++'s streams could read secondary shards that were still on their way. Here they are
    values of a program: each gather within a node reads an array that one between nodes has made,
    and no schedule can start it before that one's end."""
    mesh = zerojax.aot.mesh("16xH100", (2, 8), AXES)
    plan = zerojax.plan(audits.make_state, mesh=mesh, axis=AXES)
    step = zerojax.train_step(audits.loss, plan=plan, regather="gpu")
    text = step.lower(plan.abstract(), audits.tokens(plan)).compile().as_text()
    module = Module(text)

    def crosses(instruction):
        """Whether a gather is between nodes (True) or within one (False); None for others."""
        if instruction.base != "all-gather" or instruction.opcode.endswith("-done"):
            return None
        group = group_of(instruction, module.devices)
        # Indices of tokens go to all devices at once, over both axes.
        on_host = group.on_host(8) if len(group.members) < 16 else None
        return {1: True, 8: False}.get(on_host)

    def arrives(instruction):
        return [frozenset(["far"])] * len(instruction.operands) if crosses(instruction) else []

    lineage = Lineage(module, [NONE] * len(module.parameters), arrives)
    near = 0
    for name, instructions in module.computations.items():
        order = list(instructions)
        for at, each in enumerate(instructions.values()):
            if crosses(each) is False:
                near += 1
                for operand in each.operands:
                    assert "far" in frozenset().union(*lineage.values[name, operand])
                    assert order.index(operand) < at
                    assert not instructions[operand].opcode.endswith("-start")
    assert near >= 2  # in forward and in backward


def by_hand(regather):
    """Gradients of the loss with parts taken by hand, and the gathers."""
    plan = zerojax.plan(STATE, mesh=zerojax.mesh(node=2, gpu=4), axis=AXES)
    params = plan.place(STATE)["params"]

    def grads(params, batch):
        def loss(parts):
            return jnp.mean(zerojax.scan(layer, batch, parts, regather=regather)[0] ** 2) / 8

        found = jax.grad(loss)(zerojax.shards(params, plan))
        return {name: part.data for name, part in found.items()}

    specs = zerojax.param_specs(plan)
    mapped = jax.shard_map(
        grads,
        mesh=plan.mesh,
        in_specs=(specs, P(plan.batch_axes)),
        out_specs=specs,
        check_vma=False,
    )
    run = jax.jit(mapped)
    return run(params, BATCH), gathers_by_axes(run.trace(params, BATCH).jaxpr)


def test_parts_taken_by_hand_may_be_kept_within_a_node():
    grads, times = by_hand("gpu")
    assert_close(grads, jax.jit(jax.grad(loss))(PARAMS, BATCH), 1e-5)
    assert times == {("node",): 2 * LAYERS, ("gpu",): 2 * 2 * LAYERS}


@pytest.mark.parametrize(
    ("regather", "message"),
    [
        (
            "tensor",
            r"names 'tensor', and the batch is split over \('node', 'gpu'\)\. Name",
        ),
        ("node", r"over \('gpu',\) first, .* Name the first of these: regather='gpu'"),
        (("gpu", "bogus"), r"names 'bogus', and the batch is split over"),
    ],
)
def test_axes_that_backward_cannot_gather_over_are_refused(regather, message):
    with pytest.raises(ValueError, match=message):
        traced(regather)


def test_by_hand_too():
    with pytest.raises(ValueError, match=r"from the fastest axis on\. .*: regather='gpu'"):
        by_hand("node")
    with pytest.raises(ValueError, match=r"names 'bogus', and .* is gathered over"):
        by_hand(("gpu", "bogus"))


def test_axes_are_checked_where_nothing_is_gathered_and_where_groups_leave_one():
    params = {"w": np.ones((64, 64), "f")}
    mesh = zerojax.mesh(node=2, gpu=4)
    plan = zerojax.plan({"params": params}, stage=1, mesh=mesh, axis=AXES)
    with pytest.raises(ValueError, match=r"names 'bogus'"):
        plan.regathering(("bogus",))
    assert plan.regathering(("gpu",)) == plan
    plan = zerojax.plan({"params": params}, mesh=mesh, groups={"params": "gpu"})
    assert plan.regathering(("gpu",)) == plan
    with pytest.raises(ValueError, match=r"Name the first of these: regather='gpu'"):
        plan.regathering(("node",))


@pytest.mark.parametrize("regather", [(), 1, None, ["gpu", 2]])
def test_what_is_no_name_is_refused(regather):
    with pytest.raises(TypeError, match=r"must be True or False, or name the mesh axes over which"):
        zerojax.train_step(loss, regather=regather)
