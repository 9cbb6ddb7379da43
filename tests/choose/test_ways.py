"""The ways to train, and what the formula says of them."""

import dataclasses

import pytest

import zerojax
from zerojax._choose import ways as _ways
from zerojax._choose.ways import AMSP, GPU, HSDP, Facts, Way
from zerojax._hlo import known as _known

LINK, NETWORK = 400.0, 10.0  # bytes/s
RATES = dataclasses.replace(
    _known.GPUS["H100"].rates, link=LINK, network=NETWORK, memory=1e9, host=5.0
)
WEIGHTS, GRADS, LOCAL = 800.0, 400.0, 8


def facts(devices=64, compute=100.0, **changes):
    return dataclasses.replace(
        Facts(
            rates=RATES, devices=devices, local=LOCAL, parameters=1600.0,
            compute={"": compute, "small": compute}, kept={"": 640.0, "small": 64.0},
            workspace={"": 320.0, "small": 320.0}, weights={"": WEIGHTS, "small": WEIGHTS / 2},
            gathered=50.0, gradients=GRADS,
        ),
        **changes,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("way", "inside", "between"),
    [
        # The table of docs/groups.md: in the node, to other nodes; with M = 4 microbatches.
        (Way(accumulate=4), 4 * (2 * WEIGHTS + GRADS), 4 * (2 * WEIGHTS + GRADS) / LOCAL),
        (Way(accumulate=4, order="layers"), 2 * WEIGHTS + GRADS, (2 * WEIGHTS + GRADS) / LOCAL),
        (Way(accumulate=4, groups=HSDP), 4 * (2 * WEIGHTS + GRADS), 2 * GRADS / LOCAL),
        (Way(accumulate=4, groups=AMSP), 4 * (2 * WEIGHTS + GRADS), (GRADS + WEIGHTS) / LOCAL),
        (Way(accumulate=4, regather=GPU), 4 * (2 * WEIGHTS + GRADS), (WEIGHTS + 4 * GRADS) / LOCAL),
        (Way(stage=0), 2 * GRADS, 2 * GRADS / LOCAL),
        (Way(stage=1, accumulate=4), GRADS + 1600, (GRADS + 1600) / LOCAL),
        (Way(stage=2, accumulate=4), 4 * GRADS + 1600, (4 * GRADS + 1600) / LOCAL),
    ],
)
def test_bytes_sent_are_those_of_the_guide(way, inside, between):
    forward, backward = facts().sent(way)
    assert forward[0] + backward[0] == pytest.approx(inside)
    assert forward[1] + backward[1] == pytest.approx(between)
    alone = facts(devices=8).sent(way)
    assert alone[0][1] == alone[1][1] == 0, "nothing leaves one host"


def test_codes_send_their_share():
    sent = facts().sent(Way(gather="int8", reduce="int4", regather=GPU))
    code = (1 + 4 / 256) / 2
    assert sent[0] == pytest.approx((WEIGHTS * code, WEIGHTS * code / LOCAL))
    # Inside the node gradients are exact.
    quarter = (0.5 + 4 / 256) / 2
    assert sent[1] == pytest.approx((WEIGHTS * code + GRADS, GRADS * quarter / LOCAL))


def test_what_hides_costs_nothing_and_the_rest_all_of_it():
    assert facts(compute=100.0).seconds(Way(), {}) == 100.0
    # Forward takes 10 seconds of the network, backward 15; 3 and 7 of compute hide all but 3%.
    found = facts(compute=10.0).seconds(Way(), {})
    assert found == pytest.approx(10 + (10 - 0.97 * 3) + (15 - 0.97 * 7))
    faster = facts(compute=10.0).seconds(Way(regather=GPU), {})
    assert faster == pytest.approx(10.1 + (10 - 0.97 * 0.3 * 10.1))  # 5 of backward hide
    assert facts(compute=10.0).seconds(Way(gather="int8"), {}) < found


def test_each_loss_has_its_own_gathers():
    assert facts().sent(Way("small"))[0][0] == WEIGHTS / 2 == facts().sent(Way())[0][0] / 2


def test_groups_send_over_both_links_at_once_and_wait_for_chains():
    # Inside a node 2 and 3 seconds; to others 10 in forward and 5 in backward, or 10 in backward.
    amsp, hsdp = (facts(compute=10.0).seconds(Way(groups=how), {}) for how in (AMSP, HSDP))
    assert amsp == pytest.approx(10.7 + (10 - 0.97 * 0.3 * 10.7))
    assert hsdp == pytest.approx(10.7 + (10 - 0.97 * 0.7 * 10.7))


def test_state_in_host_memory_is_copied():
    there = {"params": 0, "opt_state": 400}
    assert facts().seconds(Way(), there) == pytest.approx(100 + 1.4 * 400 / 5 - 40)
    both = {"params": 100, "opt_state": 400}
    assert facts().seconds(Way(accumulate=2), both) == pytest.approx(
        facts().seconds(Way(accumulate=2), {}) + 1.4 * (400 + 5 * 100) / 5 - 40
    )


def test_memory_shrinks_with_microbatches_but_not_what_all_of_them_keep():
    peak = facts().peak
    assert peak(Way(), 1000) == 1000 + 50 + 320 + 640
    assert peak(Way(accumulate=4), 1000) == 1000 + 50 + 80 + 160
    assert peak(Way(accumulate=4, order="layers"), 1000) == 1000 + 50 + 80 + 640
    assert peak(Way("small"), 1000) == 1000 + 50 + 320 + 64
    assert peak(Way(regather=GPU), 1000) == 1000 + 50 + 320 + 640 + WEIGHTS / LOCAL
    assert peak(Way(groups=AMSP), 1000) == 1000 + 50 + 320 + 640 + WEIGHTS / LOCAL
    assert peak(Way(groups=HSDP), 1000) == 1000 + 50 + 320 + 640


@pytest.mark.parametrize(
    ("way", "keeps"),
    [
        (Way(), True), (Way(stage=0), True), (Way(stage=2), False), (Way(stage=1), False),
        (Way(groups=AMSP), False), (Way(groups=AMSP, accumulate=2), True),
        (Way(groups=HSDP), True), (Way(offload=("opt_state",)), False),
        (Way(offload=("opt_state",), accumulate=2), True),
    ],
)  # fmt: skip
def test_gradients_wait_for_what_is_not_updated_in_backward(way, keeps):
    assert way.keeps_gradients == keeps


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


def test_codes_are_added_to_the_precision():
    given = zerojax.Precision(compute="bfloat16", reduce="float32")
    assert Way().precision(given) is given and Way().precision(None) is None
    coded = Way(gather="int8").precision(given)
    assert (coded.compute, coded.reduce) == ("bfloat16", "float32")
    assert coded.gather == zerojax.Blocks("int8")
    assert Way(gather="int8", reduce="int4").precision(None).reduce == zerojax.Blocks("int4")
    assert Way(gather="int8").placement == Way().placement, "codes place nothing"
