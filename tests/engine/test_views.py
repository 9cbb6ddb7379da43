"""Stacks that are sliced, reshaped, split or cast are still gathered layer by layer."""

import pytest

from tests.collectives import collectives
from tests.engine.losses import BATCH, DIM, PROGRAMS, sharded_grad


@pytest.mark.parametrize(
    ("name", "depths", "dtypes"),
    [
        ("two_encoders", {1}, {"float32"}),
        ("wider_before_the_scan", {1}, {"bfloat16"}),
        ("plain_scan", {1}, {"float32"}),
        ("groups_of_layers", {2}, {"float32"}),
        ("halves", {1}, {"float32"}),
        ("split_and_flipped", {1}, {"float32"}),
        ("python_loop", {0}, {"float32"}),
        ("unstacked", {0}, {"bfloat16", "float32"}),
    ],
)
def test_stacks_are_gathered_layer_by_layer(name, depths, dtypes):
    grad, params = sharded_grad(PROGRAMS[name], 3)
    found = list(collectives(grad.trace(params, BATCH).jaxpr))
    assert {c.depth for c in found if c.kind == "all-gather"} == depths
    assert max(c.elements for c in found if c.kind == "all-gather") == DIM * DIM
    assert {c.dtype for c in found if c.kind != "all-reduce"} == dtypes
