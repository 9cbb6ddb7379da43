"""What placed states and their steps refuse, and what they say. Nothing compiles."""

import functools

import jax
import jax.numpy as jnp
import pytest

import zerojax
from tests.conftest import make_mesh
from tests.step import nodes, stacks
from tests.step.nodes import AXES
from tests.support import audits
from tests.support.schedules import train_step

FLAT = {"axis": AXES}


def groups(**groups):
    return lambda: nodes.planned(groups=groups)


def nodes_step(placing, **options):
    return lambda: nodes.traced(nodes.planned(**placing), **options)


def regather(names, placing=FLAT):
    return nodes_step(placing, regather=names)


def in_backward(make=stacks.stacks, loss=stacks.loss, devices=2):
    def trace():
        plan = zerojax.plan(make, mesh=make_mesh(devices))
        step = train_step(loss, update="backward")
        step.trace(plan.abstract(), stacks.BATCH)

    return trace


def activations(where):
    def trace():
        plan = zerojax.plan(audits.make_state)
        step = train_step(audits.loss, activations=where)
        step.trace(plan.abstract(), audits.tokens(plan))

    return trace


def constant(params, batch):
    x = stacks.loop(params["embed"][batch], params["blocks"])
    return jnp.mean(jax.lax.stop_gradient(x)) + jnp.mean(params["embed"] ** 2)


in_a_checkpoint = lambda params, batch: jax.checkpoint(stacks.loss)(params, batch)
odd = functools.partial(stacks.stacks, dim=33, layers=4)
WRONG_PATH = {"precision": zerojax.Precision(gather={"params/w2": "int8"})}
NO_PATH = r"Precision\(gather=\) has the path pattern 'params/w2'.* Did you mean params/w"
NO_AXES = r"must be True or False, or name the mesh axes over which"
UNREAD = "its only reader must be a scan over its layers, in no other loop or checkpoint"

REFUSED = [
    (groups(params=("gpu", "node"), grads="gpu"), r"shard grads: add 'node' to groups\['grads'\]"),
    (groups(grads=("gpu", "node"), opt_state="gpu"), r"opt_state: add 'node' to groups\['opt_s"),
    (groups(opt_state="gpu"), r"^stage 3 shards grads .* or shard grads over fewer axes"),
    (groups(params="tpu"), r"no axis 'tpu'. Name one of those, or pass a mesh that has it"),
    (groups(params=None), r"params over None. Name an axis.*\(\) replicates"),
    (groups(optimizer="gpu"), r"'optimizer'. Name one of params, grads, opt_state"),
    (groups(grads=["gpu", 8]), r"grads over \['gpu', 8\]. Name an axis of the mesh"),
    (nodes_step({"groups": "gpu"}), r"groups='gpu' is not a mapping. Pass for example {'params'"),
    (lambda: zerojax.mesh(node=3, gpu=2), r"3 x 2.*8 devices"),
    (regather("tensor"), r"names 'tensor', and the batch is split over \('node', 'gpu'\)\. Name"),
    (regather("node"), r"gathered over \('gpu',\), but .* Pass Schedule\(regather='gpu'\)"),
    (regather("bogus", FLAT | {"stage": 1}), r"names 'bogus'"),
    (regather("node", {"groups": {"params": "gpu"}}), r"Pass Schedule\(regather='gpu'\)"),
    *[(regather(names), NO_AXES) for names in ((), 1, None, ["gpu", 2])],
    (nodes_step(FLAT | WRONG_PATH), NO_PATH),
    (in_backward(loss=in_a_checkpoint), f"params/blocks/w: {UNREAD}"),
    (in_backward(loss=constant), "params/blocks/w: it has no gradient"),
    (in_backward(odd), r"w: it is padded \(pad=False replicates it\).*a norm does not\)\. Pass"),
    (
        lambda: train_step(stacks.loss, update="later"),
        "must be 'backward', 'after' or 'auto', got 'later'",
    ),
    (
        activations("tensor"),
        "activations='tensor' is not known. Pass 'host', or an axis of the mesh over which the "
        "batch is not split: this mesh has none; ",
    ),
    (activations(1), "activations=1 does not say where they are kept. Pass 'host'"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_what_is_refused_is_told(call, message, compiled):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
    assert "jit(step)" not in compiled


def test_axes_that_nothing_is_gathered_over_are_taken():
    """At stage 1, and where groups have parameters gathered within a node alone."""
    for placing in (FLAT | {"stage": 1}, {"groups": {"params": "gpu"}}):
        plan = nodes.planned(**placing)
        usual, named = (nodes.traced(plan, regather=over) for over in (True, "gpu"))
        assert nodes.crossings(usual) == nodes.crossings(named)
