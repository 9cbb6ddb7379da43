"""The rule for one leaf: its sharded dimension, its padding, and the reason where it has none."""

import math
import re

import flax.linen as nn
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from tests.conftest import make_mesh
from tests.support.models import gpt_params
from tests.support.shapes import params_plan, shape, specs

TOO_MUCH = r"padding any dimension of \(3, 3, 3, 3, 3\) to a multiple of 8 would make it more than"


@pytest.mark.parametrize(
    ("dims", "spec", "padded", "options"),
    [
        # The first that divides, before any that is padded.
        ((16, 24), P("data"), (16, 24), {}),
        ((3, 64), P(None, "data"), (3, 64), {}),
        ((2, 2, 64), P(None, None, "data"), (2, 2, 64), {}),
        ((1001, 16), P(None, "data"), (1001, 16), {}),
        # That of least padding.
        ((50257, 3), P("data"), (50264, 3), {}),
        ((3, 9, 1001), P(None, None, "data"), (3, 9, 1008), {}),
        ((13, 13), P("data"), (16, 13), {}),
        # Never the first of a stack.
        ((8, 16), P(None, "data"), (8, 16), {"stacked": "w$"}),
        ((7, 9, 1001), P(None, None, "data"), (7, 9, 1008), {"stacked": "params/w"}),
        ((5, 30, 3), P(None, "data"), (5, 32, 3), {"stacked": "w"}),
        # The one that an override names.
        ((16, 16), P(None, "data"), (16, 16), {"overrides": {"w$": P(None, "data")}}),
        ((16, 30), P(None, "data"), (16, 32), {"overrides": {"w": P(None, "data")}}),
    ],
)
def test_the_dimension_that_is_sharded(dims, spec, padded, options):
    plan = params_plan({"w": shape(*dims)}, **options)
    (leaf,) = plan.leaves
    assert (leaf.spec, leaf.padded_shape, leaf.reason) == (spec, padded, None)
    assert leaf.bytes_per_device(plan.mesh) == 4 * math.prod(padded) // 8


@pytest.mark.parametrize(
    ("dims", "reason", "options"),
    [
        ((3, 3, 100), r"no dimension of \(3, 3, 100\) divides by 8, and pad=False", {"pad": False}),
        ((3, 3, 3, 3, 3), TOO_MUCH, {}),
        ((4, 4), "smaller than min_shard_size=128", {}),
        ((), "scalar", {}),
        ((64, 64), "overrides=", {"overrides": {"w": P()}}),
        ((256,), "its only dimension counts layers", {"stacked": "w"}),
        ((50, 1, 3), r"padding any .*\(50, 1, 3\) after the layer dimension", {"stacked": "w"}),
    ],
)
def test_why_a_leaf_is_replicated(dims, reason, options):
    (leaf,) = params_plan({"w": shape(*dims)}, **options).leaves
    assert leaf.spec == P() and leaf.padded_shape == dims
    assert re.match(reason, leaf.reason)


@pytest.mark.parametrize("names", [("host", "gpu"), ("gpu", "host")])
def test_an_override_gets_several_axes_in_the_order_of_all_leaves(names):
    mesh, wide = zerojax.mesh(host=2, gpu=2, tensor=2), {"w": shape(16, 8)}
    plan = params_plan(wide, mesh=mesh, axis=("host", "gpu"), overrides={"w": P(names)})
    assert specs(plan) == {"params/w": P(("gpu", "host"))}


@pytest.mark.parametrize("count", [3, 5, 6, 7])
def test_padding_costs_little(count):
    """Of GPT-2, whose vocabulary has 50257 words, no device has 3% more than an even share."""
    make = lambda: gpt_params(layers=12, dim=768, vocab=50257, tokens=1024)
    plan = zerojax.plan(lambda: (make(), ()), mesh=make_mesh(count))
    logical = sum(leaf.nbytes for leaf in plan.leaves)
    assert logical <= count * plan.bytes_per_device()["params"] <= 1.03 * logical


# -- stacks of layers: known by shape, by name or by metadata

BLOCKS = {"w": shape(8, 16, 16), "b": shape(8, 16), "gain": shape(8)}
ODD = {"groups": {"w": shape(4, 8, 15, 7), "b": shape(4, 8, 7)}}


@pytest.mark.parametrize(
    ("params", "dims", "options"),
    [
        (
            {"blocks": BLOCKS, "w": shape(24, 16)},
            {"blocks/w": 1, "blocks/b": 1, "blocks/gain": None, "w": 0},
            {},
        ),
        # One square layer is none.
        ({"kernel": shape(64, 64), "bias": shape(64)}, {"kernel": 0, "bias": 0}, {}),
        # Of loops within loops, neither; of the inner one, where nothing else can be.
        (
            {
                "groups": {"w": shape(4, 8, 16, 24), "b": shape(4, 8, 24)},
                "blocks": {"w": shape(6, 8, 24), "v": shape(6, 8, 16)},
            },
            {"groups/w": 2, "groups/b": 2, "blocks/w": 1, "blocks/v": 1},
            {},
        ),
        (ODD, {"groups/w": 2, "groups/b": 2}, {}),
        (ODD, {"groups/w": 1, "groups/b": 1}, {"pad": False}),
        # Flax's `scan` says so.
        ({"w": nn.Partitioned(shape(8, 16, 16), ("layers", None, None))}, {"w/value": 1}, {}),
        # Haiku's modules of a stack; eight norms alone would be taken for a matrix.
        (
            {
                "stack/norm": {"scale": shape(8, 256), "offset": shape(8, 256)},
                "stack/linear": {"w": shape(8, 256, 256)},
                "head": {"w": shape(256, 256)},
            },
            {"stack/norm/scale": 1, "stack/norm/offset": 1, "stack/linear/w": 1, "head/w": 0},
            {},
        ),
    ],
)
def test_stacks_are_sharded_within_their_layers(params, dims, options):
    plan = params_plan(params, min_shard_size=1, **options)
    assert {leaf.path.removeprefix("params/"): leaf.dim for leaf in plan.leaves} == dims
