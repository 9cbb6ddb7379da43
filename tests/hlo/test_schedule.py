"""The replay of a schedule on two streams, against times computed by hand."""

import dataclasses

import pytest

import zerojax
from tests.hlo.modules import RATES, module
from zerojax._hlo import (
    schedule as _schedule,
)

MATRIX = 1024 * 1024 * 4  # bytes of a (1024, 1024) in fp32
US = 1e-6

DOT = 2 * 1024**3 / 1e14  # longer than its memory, 3 MATRIX / 1e12
ADD = 3 * MATRIX / 1e12  # reads two, writes one
# 16 devices on hosts of 8: 8 cards of a host carry its 8 members' traffic.
GATHER = MATRIX / 16 * 15 / (8 * 1e10) + US
SCALAR = 2 * 4 * 15 / 16 / (8 * 1e10) + US

LOOP = """
%body (p: (s32[], f32[1024,1024], f32[64,1024])) -> (s32[], f32[1024,1024], f32[64,1024]) {
  %p = (s32[], f32[1024,1024]{1,0}, f32[64,1024]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[1024,1024]{1,0} get-tuple-element(%p), index=1
  %w = f32[64,1024]{1,0} get-tuple-element(%p), index=2
  %gather = (f32[64,1024]{1,0}, f32[1024,1024]{1,0}) all-gather-start(%w), replica_groups=[1,16]<=[16], dimensions={0}
  %dot = f32[1024,1024]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %gathered = f32[1024,1024]{1,0} all-gather-done(%gather)
  %sum = f32[1024,1024]{1,0} add(%dot, %gathered)
  ROOT %next = (s32[], f32[1024,1024]{1,0}, f32[64,1024]{1,0}) tuple(%i, %sum, %w)
}

%cond (p: (s32[], f32[1024,1024], f32[64,1024])) -> pred[] {
  %p = (s32[], f32[1024,1024]{1,0}, f32[64,1024]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}
"""  # noqa: E501


def loop(trips):
    config = f'backend_config={{"known_trip_count":{{"n":"{trips}"}}}}' if trips else ""
    return module(
        f"""
  %a = (s32[], f32[1024,1024]{{1,0}}, f32[64,1024]{{1,0}}) parameter(0)
  %loop = (s32[], f32[1024,1024]{{1,0}}, f32[64,1024]{{1,0}}) while(%a), condition=%cond, body=%body, {config}
  %loss = f32[] constant(1)
  ROOT %mean = f32[] all-reduce(%loss), replica_groups={{}}, to_apply=%cond
""",  # noqa: E501
        LOOP,
    )


def test_a_loop_whose_gather_outlasts_its_matmul():
    found = _schedule.replay(loop(3), RATES)
    gather, mean = found.collectives
    assert gather.seconds == pytest.approx(GATHER) and GATHER > DOT
    assert gather.between == pytest.approx(DOT)
    assert gather.exposed == pytest.approx(GATHER - DOT)
    assert (gather.trips, gather.loops) == (3, ("loop",))
    assert mean.exposed == pytest.approx(SCALAR)
    assert found.compute == pytest.approx(3 * (DOT + ADD))
    assert found.exposed == pytest.approx(3 * (GATHER - DOT) + SCALAR)
    assert found.step == pytest.approx(3 * (GATHER + ADD) + SCALAR)
    assert found.flops == 3 * 2 * 1024**3
    assert gather.wire == MATRIX / 16 * 15
    assert (mean.wire, mean.trips) == (2 * 4 * 15 / 16, 1)


def test_on_one_host_the_matmul_hides_it():
    fast = dataclasses.replace(RATES, link=4e11)
    found = _schedule.replay(loop(3), fast, per_host=16)
    assert found.collectives[0].seconds == pytest.approx(MATRIX / 16 * 15 / 4e11 + US)
    assert found.collectives[0].exposed == 0
    assert found.step == pytest.approx(3 * (DOT + ADD) + 2 * 4 * 15 / 16 / 4e11 + US)


def test_a_loop_of_unknown_length_counts_once():
    found = _schedule.replay(loop(None), RATES)
    assert found.unknown_loops == ["loop"]
    assert found.step == pytest.approx(GATHER + ADD + SCALAR)


@pytest.mark.parametrize(
    ("kind", "wire"),
    [
        ("all-gather", 700), ("all-reduce", 175), ("reduce-scatter", 87.5), ("all-to-all", 87.5),
        ("collective-permute", 100), ("collective-broadcast", 100),
    ],
)  # fmt: skip
def test_wire_bytes(kind, wire):
    assert _schedule.wire_bytes(kind, 100, 8) == wire
    assert _schedule.wire_bytes(kind, 100, 1) == 0


def test_collectives_wait_for_one_another():
    """Two gathers are started; the second runs after the first, and compute waits for both."""
    start = "(f32[64,1024]{1,0}, f32[1024,1024]{1,0}) all-gather-start(%a), dimensions={0}"
    done = "f32[1024,1024]{1,0} all-gather-done"
    found = _schedule.replay(
        module(f"""
  %a = f32[64,1024]{{1,0}} parameter(0)
  %s1 = {start}
  %s2 = {start}
  %d1 = {done}(%s1)
  %dot = f32[1024,1024]{{1,0}} dot(%d1, %d1), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %d2 = {done}(%s2)
  ROOT %sum = f32[1024,1024]{{1,0}} add(%dot, %d2)
"""),
        RATES,
    )
    first, second = found.collectives
    assert first.exposed == pytest.approx(GATHER)
    assert second.between == pytest.approx(DOT)
    assert second.exposed == pytest.approx(2 * GATHER - (GATHER + DOT))
    assert found.step == pytest.approx(2 * GATHER + ADD)
    spans = [(s.name, s.stream) for s in found.spans]
    assert ("s2", "collectives") in spans and ("s2", "waiting") in spans
    assert ("dot", "compute") in spans


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [("[2,8]<=[16]", "[8,2]<=[2,8]T(1,0)", True), ("[1,16]<=[16]", "[2,8]<=[16]", False)],
    ids=["on links of their own", "on the same links"],
)
def test_collectives_in_flight_together_share_links_or_not(first, second, together):
    start = "(f32[64,1024]{1,0}, f32[1024,1024]{1,0}) all-gather-start(%a), dimensions={0}"
    done = "f32[1024,1024]{1,0} all-gather-done"
    found = _schedule.replay(
        module(f"""
  %a = f32[64,1024]{{1,0}} parameter(0)
  %s1 = {start}, replica_groups={first}
  %s2 = {start}, replica_groups={second}
  %d1 = {done}(%s1)
  ROOT %d2 = {done}(%s2)
"""),
        RATES,
    )
    times = [each.seconds for each in found.collectives]
    assert found.step == pytest.approx(max(times) if together else sum(times))
    assert min(times) > US


def test_of_a_conditional_the_slowest_branch_counts_and_its_collectives_are_seen():
    branches = """
%skip (p: f32[64,1024]) -> f32[64,1024] {
  ROOT %p = f32[64,1024]{1,0} parameter(0)
}

%work (q: f32[64,1024]) -> f32[64,1024] {
  %q = f32[64,1024]{1,0} parameter(0)
  ROOT %r = f32[64,1024]{1,0} all-reduce(%q), replica_groups={{0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15}}, to_apply=%skip
}
"""  # noqa: E501
    entry = """
  %a = f32[64,1024]{1,0} parameter(0)
  %which = s32[] constant(1)
  ROOT %c = f32[64,1024]{1,0} conditional(%which, %a, %a), branch_computations={%skip, %work}
"""
    found = _schedule.replay(module(entry, branches), RATES)
    assert [c.kind for c in found.collectives] == ["all-reduce"]
    seconds = 2 * 64 * 1024 * 4 * 15 / 16 / 8e10 + US
    assert found.step == pytest.approx(seconds) and found.exposed == pytest.approx(seconds)
    text = module(entry, branches).text
    (one,) = zerojax.audit(text.replace("%a = f32[64,1024]{1,0} parameter(0)",
                                        '%a = f32[64,1024]{1,0} parameter(0), metadata={op_name='
                                        "\"state.params['w']\"}")).traffic  # fmt: skip
    assert one.paths == ("params/w",)


def test_hops_of_a_ring_take_time():
    slow = dataclasses.replace(RATES, link_hop=1e-6, network_hop=1e-5)
    gather, mean = _schedule.replay(loop(3), slow).collectives
    # 16 GPUs in two hosts: a ring has 14 hops inside them and 1 between, a tree two of 7 and of 1
    assert gather.seconds == pytest.approx(GATHER + 14e-6 + 1e-5)
    assert mean.seconds == pytest.approx(SCALAR + 14e-6 + 2e-5)
