"""Stacks of layers: known by shape, by name or by metadata, and never sharded along layers."""

import flax.linen as nn
import pytest

from tests.support.shapes import params_plan, shape

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
def test_the_dimension_that_is_sharded(params, dims, options):
    plan = params_plan(params, min_shard_size=1, **options)
    assert {leaf.path.removeprefix("params/"): leaf.dim for leaf in plan.leaves} == dims
