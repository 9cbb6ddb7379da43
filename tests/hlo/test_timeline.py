"""The replay of a schedule on two streams, against times computed by hand."""

import dataclasses

import pytest

from tests.hlo.modules import ARGUMENTS, LAYER, RATES, SLICE, audited, module

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
    found = audited(loop(3))
    gather, mean = found.traffic
    assert gather.seconds == pytest.approx(GATHER) and GATHER > DOT
    assert gather.between == pytest.approx(DOT)
    assert gather.exposed == pytest.approx(GATHER - DOT)
    assert (gather.trips, gather.loops) == (3, ("loop",))
    assert mean.exposed == pytest.approx(SCALAR)
    assert found.replay.compute == pytest.approx(3 * (DOT + ADD))
    assert found.exposed_seconds == pytest.approx(3 * (GATHER - DOT) + SCALAR)
    assert found.step_seconds == pytest.approx(3 * (GATHER + ADD) + SCALAR)
    assert found.overlap == pytest.approx(found.replay.compute / found.step_seconds)
    assert found.replay.flops == 3 * 2 * 1024**3
    assert gather.wire_bytes == MATRIX / 16 * 15
    assert gather.network_bytes == gather.wire_bytes / 8
    assert (mean.wire_bytes, mean.trips) == (2 * 4 * 15 / 16, 1)
    unknown = audited(loop(None))  # counts once
    assert unknown.replay.unknown_loops == ["loop"]
    assert unknown.step_seconds == pytest.approx(GATHER + ADD + SCALAR)


@pytest.mark.parametrize(
    ("kind", "wire"),
    [
        ("all-gather", 700),
        ("all-reduce", 175),
        ("reduce-scatter", 87.5),
        ("all-to-all", 87.5),
        ("ragged-all-to-all", 87.5),
        ("collective-permute", 100),
        ("collective-broadcast", 100),
    ],
)
def test_wire_bytes(kind, wire):
    for devices, sent in ((8, wire), (1, 0)):
        operands = "%a, %a, %i, %i, %i, %i" if kind.startswith("ragged") else "%a"
        entry = f"""
  %a = f32[25]{{0}} parameter(0)
  %i = s64[8]{{0}} parameter(1)
  ROOT %out = f32[25]{{0}} {kind}({operands})
"""
        (one,) = audited(module(entry, devices=devices)).traffic
        assert one.wire_bytes == sent, devices


START = "(f32[64,1024]{1,0}, f32[1024,1024]{1,0}) all-gather-start(%a), dimensions={0}"
DONE = "f32[1024,1024]{1,0} all-gather-done"


def test_collectives_wait_for_one_another():
    """Two gathers are started; the second runs after the first, and compute waits for both."""
    found = audited(
        module(f"""
  %a = f32[64,1024]{{1,0}} parameter(0)
  %s1 = {START}
  %s2 = {START}
  %d1 = {DONE}(%s1)
  %dot = f32[1024,1024]{{1,0}} dot(%d1, %d1), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %d2 = {DONE}(%s2)
  ROOT %sum = f32[1024,1024]{{1,0}} add(%dot, %d2)
""")
    )
    first, second = found.traffic
    assert first.exposed == pytest.approx(GATHER)
    assert second.between == pytest.approx(DOT)
    assert second.exposed == pytest.approx(2 * GATHER - (GATHER + DOT))
    assert found.step_seconds == pytest.approx(2 * GATHER + ADD)
    spans = {(span.name, span.stream) for span in found.replay.spans}
    assert {("s2", "collectives"), ("s2", "exposed"), ("dot", "compute")} <= spans


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [("[2,8]<=[16]", "[8,2]<=[2,8]T(1,0)", True), ("[1,16]<=[16]", "[2,8]<=[16]", False)],
    ids=["on links of their own", "on the same links"],
)
def test_collectives_in_flight_together_share_links_or_not(first, second, together):
    found = audited(
        module(f"""
  %a = f32[64,1024]{{1,0}} parameter(0)
  %s1 = {START}, replica_groups={first}
  %s2 = {START}, replica_groups={second}
  %d1 = {DONE}(%s1)
  ROOT %d2 = {DONE}(%s2)
""")
    )
    times = [each.seconds for each in found.traffic]
    assert found.step_seconds == pytest.approx(max(times) if together else sum(times))
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
  %a = f32[64,1024]{1,0} parameter(0), metadata={op_name="state.params['w']"}
  %which = s32[] constant(1)
  ROOT %c = f32[64,1024]{1,0} conditional(%which, %a, %a), branch_computations={%skip, %work}
"""
    found = audited(module(entry, branches))
    assert [(one.kind, one.paths) for one in found.traffic] == [("all-reduce", ("params/w",))]
    seconds = 2 * 64 * 1024 * 4 * 15 / 16 / 8e10 + US
    assert found.step_seconds == found.exposed_seconds == pytest.approx(seconds)


def test_memory_of_asynchronous_fusions_and_of_what_is_updated_in_place():
    """The result of a start is one buffer, whichever place it has in the start's type."""
    started = f"""{ARGUMENTS}
  %s = ((f32[8,256,256]{{2,1,0}}, s32[]), f32[256,256]{{1,0}}, u32[]) fusion-start(%a, %i), kind=kLoop, calls=%sliced
  %slice = f32[256,256]{{1,0}} fusion-done(%s)
  %c = (f32[256,256]{{1,0}}, f32[256,256]{{1,0}}, u32[]) copy-start(%slice)
  %copied = f32[256,256]{{1,0}} copy-done(%c)
  ROOT %loss = f32[] reduce(%slice, %copied), to_apply=%sliced
"""  # noqa: E501
    updated = f"""{ARGUMENTS}
  %copied = f32[8,256,256]{{2,1,0}} copy(%a)
  %put = f32[8,256,256]{{2,1,0}} fusion(%copied, %n, %i), kind=kLoop, calls=%updated
  ROOT %loss = f32[] reduce(%put, %n), to_apply=%sliced
"""
    for entry, layers in ((started, 2), (updated, 8)):
        memory = audited(module(entry, SLICE)).memory
        assert memory.temporary == pytest.approx(layers * LAYER, abs=16)


# -- copies to the host and back: 1 GB/s in each direction, and 2 us to start

TO_DEVICE, TO_HOST, IN_HOST = "to the device", "to the host", "in host memory"
HOST = dataclasses.replace(RATES, host=1e9, host_latency=2e-6)
COPY = LAYER / 1e9 + 2e-6
STACK, ONE = "f32[8,256,256]{2,1,0:S(5)}", "f32[1,256,256]{2,1,0}"
CONFIG = '"dynamic_slice_config":{"loop_index":"0","byte_offset":"0","byte_stride":"262144"}'


def sliced(config=CONFIG):
    backend = f"backend_config={{{config}}}" if config else ""
    return f"""
%read (p0: f32[8,256,256], p1: s32[], p2: s32[]) -> f32[1,256,256] {{
  %p0 = {STACK} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = s32[] parameter(2)
  ROOT %slice = {ONE} dynamic-slice(%p0, %p1, %p2, %p2), {backend}
}}

%write (p0: f32[8,256,256], p1: f32[1,256,256], p2: s32[], p3: s32[]) -> f32[8,256,256] {{
  %p0 = {STACK} parameter(0)
  %p1 = {ONE} parameter(1)
  %p2 = s32[] parameter(2)
  %p3 = s32[] parameter(3)
  ROOT %put = {STACK} dynamic-update-slice(%p0, %p1, %p2, %p3, %p3), {backend}
}}
"""


READ = f"(({STACK}, s32[], s32[]), {ONE}, u32[]) fusion-start(%a, %i, %i), kind=kLoop, calls=%read"
SLICES = f"""
  %a = {STACK} parameter(0)
  %i = s32[] parameter(1)
  %n = {ONE} parameter(2)
  %get = {READ}
  %put = (({STACK}, {ONE}, s32[], s32[]), {STACK}, u32[]) fusion-start(%a, %n, %i, %i), calls=%write
  %got = {ONE} fusion-done(%get)
  %done = {STACK} fusion-done(%put)
  ROOT %out = ({ONE}, {STACK}) tuple(%got, %done)
"""


def test_slices_of_host_memory_travel_both_ways_at_once():
    found = audited(module(SLICES, sliced()), HOST)
    copies = [(c.kind, c.wire_bytes, c.by_engine, c.asynchronous) for c in found.replay.transfers]
    assert copies == [(TO_DEVICE, LAYER, True, True), (TO_HOST, LAYER, True, True)]
    assert found.step_seconds == found.replay.waited == pytest.approx(COPY)
    assert found.exposed_seconds == found.replay.compute == 0
    assert [one.exposed for one in found.replay.transfers] == pytest.approx([COPY, 0])
    assert {span.stream for span in found.replay.spans} == {TO_DEVICE, TO_HOST, "exposed"}
    told = found.to_dict()
    assert told["bytes_to_device"] == told["bytes_to_host"] == LAYER
    without_address = audited(module(SLICES, sliced(config="")), HOST).replay
    assert [one.by_engine for one in without_address.transfers] == [False, False], "a kernel's"


@pytest.mark.parametrize(
    ("devices", "per_host", "speed"),
    [(1, 8, 1), (8, 1, 1), (8, 4, 0.4), (8, 8, 0.2), (16, 8, 0.2), (4, 8, 0.4)],
)
def test_the_gpus_of_a_host_share_its_memory(devices, per_host, speed):
    """Of 3.2 GB/s, read and written at once; no GPU's link has more than 1."""
    rates = dataclasses.replace(HOST, host_memory=3.2e9)
    found = audited(module(SLICES, sliced(), devices), rates, per_host)
    assert found.step_seconds == pytest.approx(LAYER / (speed * 1e9) + 2e-6)


def test_copies_of_whole_arrays():
    entry = f"""
  %a = {STACK} parameter(0)
  %start = (f32[8,256,256]{{2,1,0}}, {STACK}, u32[]) copy-start(%a)
  %here = f32[8,256,256]{{2,1,0}} copy-done(%start)
  %back = {STACK} copy(%here)
  %twin = {STACK} copy(%a)
  %flat = f32[8,256,256]{{0,1,2}} copy(%here)
  ROOT %out = ({STACK}, {STACK}, f32[8,256,256]{{0,1,2}}) tuple(%back, %twin, %flat)
"""
    replay = audited(module(entry), HOST).replay
    found = [(one.kind, one.wire_bytes, one.asynchronous) for one in replay.transfers]
    whole = 8 * LAYER
    assert found == [(TO_DEVICE, whole, True), (TO_HOST, whole, False), (IN_HOST, whole, False)]
    assert replay.waited == pytest.approx(3 * (whole / 1e9 + 2e-6))
