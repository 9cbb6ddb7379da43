"""Copies to and from the host, read off schedules written by hand, and their times."""

import dataclasses

import pytest

from tests.hlo.modules import RATES, module
from zerojax._hlo import schedule as _schedule
from zerojax._hlo.transfers import IN_HOST, TO_DEVICE, TO_HOST

LAYER = 256 * 256 * 4
# 1 GB/s to the host, in each direction, and 2 us to start.
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


ENTRY = f"""
  %a = {STACK} parameter(0)
  %i = s32[] parameter(1)
  %n = {ONE} parameter(2)
  %get = (({STACK}, s32[], s32[]), {ONE}, u32[]) fusion-start(%a, %i, %i), kind=kLoop, calls=%read
  %put = (({STACK}, {ONE}, s32[], s32[]), {STACK}, u32[]) fusion-start(%a, %n, %i, %i), calls=%write
  %got = {ONE} fusion-done(%get)
  %done = {STACK} fusion-done(%put)
  ROOT %out = ({ONE}, {STACK}) tuple(%got, %done)
"""


def test_slices_of_host_memory_travel_both_ways_at_once():
    replayed = _schedule.replay(module(ENTRY, sliced()), HOST)
    found = [(one.way, one.nbytes, one.by_engine, one.asynchronous) for one in replayed.transfers]
    assert found == [(TO_DEVICE, LAYER, True, True), (TO_HOST, LAYER, True, True)]
    assert replayed.step == pytest.approx(COPY)
    assert replayed.waited == pytest.approx(COPY) and replayed.exposed == 0
    assert [one.waited for one in replayed.transfers] == pytest.approx([COPY, 0])
    assert replayed.compute == 0
    assert {span.stream for span in replayed.spans} == {TO_DEVICE, TO_HOST, "waiting"}


@pytest.mark.parametrize(
    ("devices", "per_host", "speed"),
    [(1, 8, 1), (8, 1, 1), (8, 4, 0.4), (8, 8, 0.2), (16, 8, 0.2), (4, 8, 0.4)],
)
def test_the_gpus_of_a_host_share_its_memory(devices, per_host, speed):
    """Of 3.2 GB/s, read and written at once; no GPU's link has more than 1."""
    rates = dataclasses.replace(HOST, host_memory=3.2e9)
    replayed = _schedule.replay(module(ENTRY, sliced(), devices), rates, per_host)
    assert replayed.step == pytest.approx(LAYER / (speed * 1e9) + 2e-6)


def test_one_way_is_one_lane():
    entry = ENTRY.replace(
        "  %got =", f"  %more = (({STACK}, s32[], s32[]), {ONE}, u32[]) fusion-start(%a, %i, %i), "
        f"calls=%read\n  %late = {ONE} fusion-done(%more)\n  %got =",
    )  # fmt: skip
    replayed = _schedule.replay(module(entry, sliced()), HOST)
    assert replayed.step == pytest.approx(2 * COPY)
    assert [one.way for one in replayed.transfers] == [TO_DEVICE, TO_HOST, TO_DEVICE]


def test_a_slice_without_an_address_is_a_kernels():
    replayed = _schedule.replay(module(ENTRY, sliced(config="")), HOST)
    assert [one.by_engine for one in replayed.transfers] == [False, False]


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
    replayed = _schedule.replay(module(entry), HOST)
    found = [(one.way, one.nbytes, one.asynchronous) for one in replayed.transfers]
    whole = 8 * LAYER
    assert found == [(TO_DEVICE, whole, True), (TO_HOST, whole, False), (IN_HOST, whole, False)]
    assert replayed.waited == pytest.approx(3 * (whole / 1e9 + 2e-6))


def test_loops_repeat_them():
    body = f"""{sliced()}
%body (p: (s32[], f32[8,256,256])) -> (s32[], f32[8,256,256]) {{
  %p = (s32[], {STACK}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %a = {STACK} get-tuple-element(%p), index=1
  %get = (({STACK}, s32[], s32[]), {ONE}, u32[]) fusion-start(%a, %i, %i), kind=kLoop, calls=%read
  %got = {ONE} fusion-done(%get)
  ROOT %next = (s32[], {STACK}) tuple(%i, %a)
}}

%cond (p: (s32[], f32[8,256,256])) -> pred[] {{
  %p = (s32[], {STACK}) parameter(0)
  ROOT %yes = pred[] constant(true)
}}
"""
    entry = f"""
  %a = (s32[], {STACK}) parameter(0)
  ROOT %loop = (s32[], {STACK}) while(%a), condition=%cond, body=%body, backend_config={{"known_trip_count":{{"n":"8"}}}}
"""  # noqa: E501
    replayed = _schedule.replay(module(entry, body), HOST)
    (one,) = replayed.transfers
    assert (one.trips, one.total_bytes) == (8, 8 * LAYER)
    assert replayed.waited == pytest.approx(8 * COPY) == replayed.step
