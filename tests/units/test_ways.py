"""The ways to train that `choose` ranks, and what its formula says of them."""

import dataclasses

import pytest

import zerojax
from zerojax.tools._choose import ways as _ways
from zerojax.tools._choose.ways import AMSP, GPU, HSDP, Facts, Way

LINK, NETWORK = 400.0, 10.0  # bytes/s
RATES = zerojax.rates_of("H100")
RATES = dataclasses.replace(RATES, link=LINK, network=NETWORK, memory=1e9, host=5.0)
WEIGHTS, GRADS, LOCAL = 800.0, 400.0, 8


def facts(devices=64, compute=100.0):
    return Facts(
        rates=RATES,
        devices=devices,
        local=LOCAL,
        parameters=1600.0,
        compute={"": compute, "small": compute},
        kept={"": 640.0, "small": 64.0},
        workspace={"": 320.0, "small": 320.0},
        weights={"": WEIGHTS, "small": WEIGHTS / 2},
        gathered=50.0,
        gradients=GRADS,
    )


CODE, QUARTER = (1 + 4 / 256) / 2, (0.5 + 4 / 256) / 2  # of 16 bits, with a share of a scale
BOTH = 2 * WEIGHTS + GRADS


@pytest.mark.parametrize(
    ("way", "inside", "between"),
    [
        # The table of docs/groups.md: in the node, to other nodes; with M = 4 microbatches.
        (Way(accumulate=4), 4 * BOTH, 4 * BOTH / LOCAL),
        (Way("small"), BOTH - WEIGHTS, (BOTH - WEIGHTS) / LOCAL),
        (Way(accumulate=4, order="layers"), BOTH, BOTH / LOCAL),
        (Way(accumulate=4, groups=HSDP), 4 * BOTH, 2 * GRADS / LOCAL),
        (Way(accumulate=4, groups=AMSP), 4 * BOTH, (GRADS + WEIGHTS) / LOCAL),
        (Way(accumulate=4, regather=GPU), 4 * BOTH, (WEIGHTS + 4 * GRADS) / LOCAL),
        (Way(stage=0), 2 * GRADS, 2 * GRADS / LOCAL),
        (Way(stage=1, accumulate=4), GRADS + 1600, (GRADS + 1600) / LOCAL),
        (Way(stage=2, accumulate=4), 4 * GRADS + 1600, (4 * GRADS + 1600) / LOCAL),
        (  # Inside the node gradients are exact.
            Way(gather="int8", reduce="int4", regather=GPU),
            2 * WEIGHTS * CODE + GRADS,
            (WEIGHTS * CODE + GRADS * QUARTER) / LOCAL,
        ),
    ],
    ids=str,
)
def test_bytes_sent_are_those_of_the_guide(way, inside, between):
    forward, backward = facts().sent(way)
    assert forward[0] + backward[0] == pytest.approx(inside)
    assert forward[1] + backward[1] == pytest.approx(between)
    alone = facts(devices=8).sent(way)
    assert alone[0][1] == alone[1][1] == 0, "nothing leaves one host"


@pytest.mark.parametrize(
    ("way", "compute", "on_host", "seconds"),
    [
        (Way(), 100.0, {}, 100.0),
        # Forward takes 10 seconds of the network, backward 15; 3 and 7 of compute hide all but 3%.
        (Way(), 10.0, {}, 10 + (10 - 0.97 * 3) + (15 - 0.97 * 7)),
        (Way(regather=GPU), 10.0, {}, 10.1 + (10 - 0.97 * 0.3 * 10.1)),  # 5 of backward hide
        # Inside a node 2 and 3 seconds; to others 10 in forward and 5 in backward, or 10 in it.
        (Way(groups=AMSP), 10.0, {}, 10.7 + (10 - 0.97 * 0.3 * 10.7)),
        (Way(groups=HSDP), 10.0, {}, 10.7 + (10 - 0.97 * 0.7 * 10.7)),
        (Way(), 100.0, {"params": 0, "opt_state": 400}, 100 + 1.4 * 400 / 5 - 40),
        (Way(accumulate=2), 100.0, {"params": 100}, 100 + 1.4 * 5 * 100 / 5 - 40),
    ],
    ids=str,
)
def test_what_hides_costs_nothing_and_the_rest_all_of_it(way, compute, on_host, seconds):
    assert facts(compute=compute).seconds(way, on_host) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("way", "more"),
    [
        (Way(), 320 + 640),
        (Way(accumulate=4), 80 + 160),
        (Way(accumulate=4, order="layers"), 80 + 640),  # what all microbatches keep
        (Way("small"), 320 + 64),
        (Way(regather=GPU), 320 + 640 + WEIGHTS / LOCAL),
        (Way(groups=AMSP), 320 + 640 + WEIGHTS / LOCAL),
        (Way(groups=HSDP), 320 + 640),
    ],
    ids=str,
)
def test_memory_shrinks_with_microbatches(way, more):
    assert facts().peak(way, 1000) == 1000 + 50 + more


def test_gradients_wait_for_what_is_not_updated_in_backward():
    waits = Way(), Way(stage=0), Way(groups=HSDP), Way(groups=AMSP, accumulate=2)
    waits += (Way(offload=("opt_state",), accumulate=2),)
    at_once = Way(stage=1), Way(stage=2), Way(groups=AMSP), Way(offload=("opt_state",))
    assert [way.keeps_gradients for way in (*waits, *at_once)] == [True] * 5 + [False] * 4


def test_ways_are_valid_and_each_is_there_once():
    found = list(_ways.ways(["a", "b"], [1, 4], several_hosts=True, lossy=True))
    assert len(found) == len(set(found))
    assert {way.variant for way in found} == {"a", "b"}
    assert all(way.stage == 3 for way in found if way.offload or way.groups or not way.is_exact)
    assert all(way.accumulate > 1 for way in found if way.order == "layers")
    assert not any(way.reduce and not way.gather for way in found)
    exact = list(_ways.ways(["a", "b"], [1, 4], several_hosts=True, lossy=False))
    assert exact == [way for way in found if way.is_exact]
    alone = list(_ways.ways(["a"], [1], several_hosts=False, lossy=True))
    assert not any(way.names_levels or not way.is_exact for way in alone)
