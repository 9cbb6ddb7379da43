"""Which parameters can be updated in backward, proved; and that a device's part is the whole's."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.update.test_parts import ZOO
from tests.update.updates import as_numbers, is_stack, update_of, values_of
from zerojax._update.in_backward import Input, layer_updates

STACKS = {"blocks/w", "blocks/up", "blocks/norm"}
NORM = "reduce_sum mixes layers"
GLOBAL = "the update reads something of all gradients, which is known after backward"
TOGETHER = "the update reads it with other leaves"
OTHER = "the optimizer's update of one layer is not the update of a stack"
NONE = {  # why a stack is updated after backward
    "adafactor": NORM, "lamb": NORM, "lars": NORM, "prodigy": "reshape mixes layers",
    "clip_schedule": GLOBAL, "multi_steps": TOGETHER, "if_finite": TOGETHER, "novograd": TOGETHER,
    "adaptive_clip": OTHER,
}  # fmt: skip
DIM, PARTS = 1, 8  # the sharded dimension of stacks, and into how many parts


def inputs_of(shapes, dim=DIM):
    """The inputs of an update: gradients, parameters, optimizer state, each stack sharded."""

    def one(i, shape):
        shards = is_stack(shape)
        part = tuple(n // PARTS if shards and d == dim else n for d, n in enumerate(shape.shape))
        sharded = dim if shards else None
        if i < num:
            return Input(shape, shards, sharded, part, param=num + i)
        return Input(shape, shards, sharded, part, is_updated=shards)

    num = 4
    return [one(i, shape) for i, shape in enumerate(shapes)], num


def found_for(tx):
    function, shapes, _, names = update_of(tx)
    inputs, num = inputs_of(shapes)
    found, why = layer_updates(function, inputs, num)
    name = lambda grad: names[grad].removeprefix("0/")
    return (
        function,
        shapes,
        inputs,
        {name(k): u for k, u in found.items()},
        {name(k): reason for k, reason in why.items()},
    )


@pytest.mark.parametrize("name", ZOO)
def test_what_is_proved(name):
    *_, found, why = found_for(ZOO[name]())
    if name == "muon":  # to optax a stack of norms is one matrix, and those of matrices are Adam's
        assert set(found) == STACKS - {"blocks/norm"} and set(why) == {"blocks/norm"}
    elif name in NONE:
        assert not found and set(why) == STACKS and set(why.values()) == {NONE[name]}
    else:
        assert set(found) == STACKS and not why


@pytest.mark.parametrize("name", sorted(ZOO.keys() - NONE.keys()))
def test_a_part_of_a_layer_gets_the_numbers_of_the_whole(name):
    function, shapes, inputs, found, _ = found_for(ZOO[name]())
    values = values_of(shapes)
    wanted = as_numbers(function(values))
    layer, device = 1, 3

    def part(value, one):
        if not one.stacked:
            return value
        size = one.part[DIM]
        return value[layer : layer + 1, device * size : (device + 1) * size]

    for update in found.values():
        mine = [part(v, one) for v, one in zip(values, inputs, strict=True)]
        given = [mine[at] for at in update.given]
        new = update(mine[update.grad], [mine[at] for at in update.stacks], given)
        for at, got in zip(update.stacks, new, strict=True):
            want = part(wanted[at - 4], inputs[at])
            np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-7)


def test_a_copy_of_the_last_gradient_is_among_what_is_updated():
    """It reads nothing of the state (Adan's)."""
    *_, found, _ = found_for(ZOO["adan"]())
    assert {len(update.stacks) for update in found.values()} == {5}


def transformation(change):
    """An optimizer whose state is a trace of its updates."""

    def update(updates, state, params=None):
        state = jax.tree.map(change, updates, state)
        return state, state

    return optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), update)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda g, s: s + g / g.shape[1], "div mixes shards"),
        (lambda g, s: s + jnp.flip(g, 1), "rev mixes shards"),
        (lambda g, s: s + g.mean(1, keepdims=True), "reduce_sum mixes shards"),
        (lambda g, s: s + g * (g.shape[1] > 2), OTHER),
    ],
)
def test_what_mixes_the_parts_of_a_layer(change, reason):
    *_, found, why = found_for(transformation(change))
    if reason == OTHER:  # `norm` has one element on a device
        assert "blocks/norm" in why
    else:
        assert not found and set(why.values()) == {reason}


def test_an_update_that_reads_another_gradient():
    def update(updates, state, params=None):
        state = jax.tree.map(lambda s, g: s + g, state, updates)
        blocks = state["blocks"]
        return state | {"blocks": {**blocks, "w": blocks["w"] + updates["embed"][0, 0]}}, state

    tx = optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), update)
    *_, found, why = found_for(tx)
    assert set(found) == {"blocks/up", "blocks/norm"}
    assert why == {"blocks/w": TOGETHER}


def test_an_update_whose_gradient_other_leaves_need():
    """Updated in backward, it would have no gradient left for them."""

    def update(updates, state, params=None):
        trace, largest = state
        trace = jax.tree.map(jnp.add, trace, updates)
        return trace, (trace, jnp.maximum(largest, jnp.max(updates["blocks"]["w"])))

    zeros = lambda p: (jax.tree.map(jnp.zeros_like, p), jnp.zeros(()))
    *_, found, why = found_for(optax.GradientTransformation(zeros, update))
    assert set(found) == {"blocks/up", "blocks/norm"}
    assert why == {"blocks/w": "the update of other leaves reads its gradient"}


def test_an_update_that_names_devices():
    mesh = jax.sharding.AbstractMesh((1,), ("x",))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    tx = transformation(lambda g, s: jax.lax.with_sharding_constraint(s + g, spec))
    *_, found, why = found_for(tx)
    assert not found and set(why.values()) == {"the update names devices"}
