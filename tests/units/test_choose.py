"""The ways to train that `choose` looks at, and the bytes that each sends."""

import pytest

from zerojax.tools._forecast import ways as _ways
from zerojax.tools._forecast.ways import AMSP, GPU_AXIS, HSDP, WayToTrain as Way

WEIGHTS, GRADS, PARAMETERS = 800.0, 400.0, 1600.0
CODE, QUARTER = (1 + 4 / 256) / 2, (0.5 + 4 / 256) / 2  # of 16 bits, with a share of a scale
BOTH = 2 * WEIGHTS + GRADS


@pytest.mark.parametrize(
    ("way", "inside", "between"),
    [
        # In the node, to other nodes (as docs/groups.md has it); with M = 4 microbatches.
        (Way(accumulate=4), 4 * BOTH, 4 * BOTH),
        (Way(accumulate=4, order="layers"), BOTH, BOTH),
        (Way(accumulate=4, groups=HSDP), 4 * BOTH, 2 * GRADS),
        (Way(accumulate=4, groups=AMSP), 4 * BOTH, GRADS + WEIGHTS),
        (Way(accumulate=4, regather=GPU_AXIS), 4 * BOTH, WEIGHTS + 4 * GRADS),
        (Way(stage=0), 2 * GRADS, 2 * GRADS),
        (Way(stage=1, accumulate=4), GRADS + 1600, GRADS + 1600),
        (Way(stage=2, accumulate=4), 4 * GRADS + 1600, 4 * GRADS + 1600),
        (  # Inside the node gradients are exact.
            Way(gather="int8", reduce="int4", regather=GPU_AXIS),
            2 * WEIGHTS * CODE + GRADS,
            WEIGHTS * CODE + GRADS * QUARTER,
        ),
    ],
    ids=str,
)
def test_bytes_sent_are_those_of_the_guide(way, inside, between):
    assert _ways.sent(way, WEIGHTS, GRADS, PARAMETERS) == pytest.approx((inside, between))


@pytest.mark.parametrize(
    ("mesh", "rest", "most", "apart", "gathered"),
    [
        ({"data": 16, "expert": 4}, "data", 8, [(32, 2), (8, 8)], {"data": 64}),
        ({"data": 4, "expert": 16}, "data", 8, [(32, 2), (16, 4), (8, 8)], {"data": 64}),
        ({"data": 3, "expert": 2}, "data", 6, [], {"data": 6}),
        ({"expert": 8}, "data", 8, [(4, 2), (2, 4)], {"data": 8}),
    ],
)
def test_experts_are_apart_over_what_divides_them_and_the_devices(
    mesh, rest, most, apart, gathered
):
    *others, last = map(dict, _ways.with_experts(mesh, rest, "expert", 16, most))
    assert [dict(one["mesh"]) for one in others] == [{"data": n, "expert": k} for n, k in apart]
    assert (dict(last["mesh"]), last["experts"]) == (gathered, None)


def test_other_axes_keep_their_sizes_and_places():
    mesh = {"replica": 2, "data": 2, "expert": 2, "tensor": 2}
    four, gathered = map(dict, _ways.with_experts(mesh, "data", "expert", 12, 4))
    assert four["mesh"] == (("replica", 2), ("data", 1), ("expert", 4), ("tensor", 2))
    assert gathered["mesh"] == (("replica", 2), ("data", 4), ("tensor", 2))
