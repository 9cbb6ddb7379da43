"""What is read in programs for TPUs, on small texts in XLA's own words."""

import pytest

import zerojax
from zerojax.tools._hlo.module import arrays_of

HEADER = "HloModule jit_step, is_scheduled=true, num_partitions=8\n\n"
ADD = """%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[]{:T(128)} parameter(0)
  %b = f32[]{:T(128)} parameter(1)
  ROOT %c = f32[]{:T(128)} add(%a, %b)
}

"""
GROUPS = "replica_groups=mesh['data'=8] {'data'}"
ROWS, ALL = "f32[32,256]{1,0:T(8,128)}", "f32[256,256]{1,0:T(8,128)}"


def audited(text):
    return zerojax.audit(HEADER + ADD + text)


def loop(start=0, end=6, by=2, direction="LT"):
    return f"""%body (p: (s32[], {ALL})) -> (s32[], {ALL}) {{
  %p = (s32[]{{:T(128)}}, {ALL}) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%p), index=0
  %x = {ALL} get-tuple-element(%p), index=1
  %by = s32[]{{:T(128)}} constant({by})
  %next = s32[]{{:T(128)}} add(%i, %by)
  %sum = {ALL} all-reduce(%x), channel_id=1, {GROUPS}, to_apply=%add
  ROOT %both = (s32[]{{:T(128)}}, {ALL}) tuple(%next, %sum)
}}

%goes_on (p: (s32[], {ALL})) -> pred[] {{
  %p = (s32[]{{:T(128)}}, {ALL}) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%p), index=0
  %end = s32[]{{:T(128)}} constant({end})
  ROOT %less = pred[]{{:T(512)}} compare(%i, %end), direction={direction}
}}

ENTRY %main (x: {ALL}) -> {ALL} {{
  %x = {ALL} parameter(0)
  %start = s32[]{{:T(128)}} constant({start})
  %copy = s32[]{{:T(128)S(2)}} copy(%start)
  %both = (s32[]{{:T(128)}}, {ALL}) tuple(%copy, %x)
  %while = (s32[]{{:T(128)}}, {ALL}) while(%both), condition=%goes_on, body=%body
  ROOT %out = {ALL} get-tuple-element(%while), index=1
}}
"""


@pytest.mark.parametrize(
    ("turns", "given"),
    [(3, {}), (3, {"end": 5}), (2, {"start": 2}), (4, {"end": 4, "by": 1}), (0, {"start": 9})],
)
def test_how_long_a_loop_is(turns, given):
    report = audited(loop(**given))
    assert [one.trips for one in report.traffic] == [turns]
    assert report.replay.unknown_loops == []


def test_how_long_a_loop_is_that_does_not_tell():
    for text in (loop(direction="GT"), loop().replace("%next = s32[]{:T(128)} add", "%next = s32[]{:T(128)} multiply")):  # fmt: skip # noqa: E501
        report = audited(text)
        assert report.replay.unknown_loops == ["while"] and report.traffic[0].trips == 1


ASYNC = f"""%start (w: {ROWS}) -> ({ROWS}, {ALL}, u32[]) {{
  %w = {ROWS} parameter(0)
  %gather = {ALL} all-gather(%w), channel_id=7, {GROUPS}, dimensions={{0}}
  ROOT %begin = ({ROWS}, {ALL}, u32[]{{:S(2)}}) custom-call(%gather), custom_call_target="AsyncCollectiveStart"
}}

%beside (w: {ROWS}, x: {ALL}) -> ({ALL}, {ALL}) {{
  %w = {ROWS} parameter(0)
  %x = {ALL} parameter(1)
  %gather.1 = {ALL} all-gather(%w), channel_id=7, {GROUPS}, dimensions={{0}}
  %twice = {ALL} add(%x, %x)
  ROOT %two = ({ALL}, {ALL}) tuple(%twice, %gather.1)
}}

%end (w: {ROWS}, x: {ALL}) -> {ALL} {{
  %w = {ROWS} parameter(0)
  %x = {ALL} parameter(1)
  %gather.2 = {ALL} all-gather(%w), channel_id=7, {GROUPS}, dimensions={{0}}
  ROOT %ends = {ALL} custom-call(%gather.2, %x), custom_call_target="AsyncCollectiveDone"
}}

%scatter (x: {ALL}, i: s32[]) -> {ROWS} {{
  %x = {ALL} parameter(0)
  %i = s32[] parameter(1)
  %reduce = {ALL} all-reduce(%x), channel_id=8, {GROUPS}, to_apply=%add
  ROOT %slice = {ROWS} dynamic-slice(%reduce, %i, %i), dynamic_slice_sizes={{32,256}}
}}

ENTRY %main (w: {ROWS}, i: s32[], x: {ALL}) -> {ROWS} {{
  %w = {ROWS} parameter(0), metadata={{op_name="state.params[\\'w\\']"}}
  %i = s32[] parameter(1)
  %x = {ALL} parameter(2)
  %async = ({ROWS}, {ALL}, u32[]{{:S(2)}}) fusion(%w), kind=kCustom, calls=%start
  %its = {ROWS} get-tuple-element(%async), index=0
  %both = ({ALL}, {ALL}) fusion(%its, %x), kind=kOutput, calls=%beside
  %here = {ALL} get-tuple-element(%both), index=1
  %done = {ALL} fusion(%its, %here), kind=kCustom, calls=%end
  ROOT %all-reduce-scatter = {ROWS} fusion(%done, %i), kind=kCustom, calls=%scatter
}}
"""  # noqa: E501


def test_collectives_in_fusions_count_once():
    report = audited(ASYNC)
    gather, scatter = report.traffic
    assert report.backend == "tpu" and report.step_seconds is None
    rows = 32 * 256 * 4
    assert (gather.kind, gather.wire_bytes, gather.asynchronous) == ("all-gather", 7 * rows, True)
    assert gather.paths == ("params/w",) and gather.group == 8
    assert (scatter.kind, scatter.wire_bytes) == ("reduce-scatter", 7 * rows)
    assert not scatter.asynchronous


REDUCES = f"""ENTRY %main (w: {ROWS}, g: {ALL}, i: s32[]) -> ({ALL}, {ROWS}, {ALL}, {ALL}) {{
  %w = {ROWS} parameter(0)
  %g = {ALL} parameter(1)
  %i = s32[] parameter(2)
  %zero = f32[] constant(0)
  %zeros = {ALL} broadcast(%zero), dimensions={{}}
  %placed = {ALL} dynamic-update-slice(%zeros, %w, %i, %i)
  %half = f32[128,256]{{1,0:T(8,128)}} slice(%g), slice={{[0:128],[0:256]}}
  %stack = {ALL} dynamic-update-slice(%g, %half, %i, %i)
  %all = ({ALL}, {ALL}, {ALL}, {ALL}) all-reduce(%placed, %g, %g, %stack), channel_id=1, {GROUPS}, to_apply=%add
  %full = {ALL} get-tuple-element(%all), index=0
  %sum = {ALL} get-tuple-element(%all), index=1
  %whole = {ALL} get-tuple-element(%all), index=2
  %layers = {ALL} get-tuple-element(%all), index=3
  %narrow = {ALL} copy(%sum)
  %shard = {ROWS} dynamic-slice(%narrow, %i, %i), dynamic_slice_sizes={{32,256}}
  ROOT %out = ({ALL}, {ROWS}, {ALL}, {ALL}) tuple(%full, %shard, %whole, %layers)
}}
"""  # noqa: E501


def test_all_reduces_that_stand_for_other_collectives():
    """Zeros with a shard are a gather, a sum of which a slice is read is a reduce-scatter; a sum
    that is read whole is neither, nor is one of a stack that has a part written into it."""
    kinds = "all-gather", "reduce-scatter", "all-reduce", "all-reduce"
    assert audited(REDUCES).traffic[0].stands_for == kinds
    cpu = zerojax.audit((HEADER + ADD + REDUCES).replace(":T(8,128)", "").replace(":T(128)", ""))
    assert cpu.backend == "cpu" and cpu.traffic[0].stands_for == ()


def test_memories_of_a_tpu():
    hbm, host, vmem, flag = arrays_of(
        "(f32[8,128]{1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)S(5)}, "
        "bf16[8,128]{1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)})"
    )
    assert [one.on_host for one in (hbm, host, vmem, flag)] == [False, True, False, False]
    assert [one.device_bytes for one in (hbm, host, vmem, flag)] == [4096, 0, 0, 0]
    (nccl,) = arrays_of("f32[8,128]{1,0:S(1)}")  # of a GPU, registered with NCCL
    assert nccl.device_bytes == 4096


COPIES = """ENTRY %main (stack: f32[4,8,128], i: s32[]) -> f32[4,8,128] {
  %stack = f32[4,8,128]{2,1,0:T(8,128)S(5)} parameter(0), metadata={op_name="state.params[\\'w\\']"}
  %i = s32[]{:T(128)} parameter(1)
  %in = ((f32[4,8,128]{2,1,0:T(8,128)S(5)}, s32[]{:T(128)}), f32[1,8,128]{2,1,0:T(8,128)}, u32[]{:S(2)}) dynamic-slice-start(%stack, %i), dynamic_slice_sizes={1,8,128}
  %layer = f32[1,8,128]{2,1,0:T(8,128)} dynamic-slice-done(%in)
  %near = (f32[1,8,128]{2,1,0:T(8,128)S(1)}, f32[1,8,128]{2,1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%layer)
  %here = f32[1,8,128]{2,1,0:T(8,128)S(1)} copy-done(%near)
  %out = ((f32[4,8,128]{2,1,0:T(8,128)S(5)}, f32[1,8,128]{2,1,0:T(8,128)}, s32[]{:T(128)}), f32[4,8,128]{2,1,0:T(8,128)S(5)}, u32[]{:S(2)}) dynamic-update-slice-start(%stack, %layer, %i)
  ROOT %new = f32[4,8,128]{2,1,0:T(8,128)S(5)} dynamic-update-slice-done(%out)
}
"""  # noqa: E501


def test_slices_that_travel_between_memories():
    report = audited(COPIES)
    layer = 8 * 128 * 4
    assert report.host_bytes("to the device") == report.host_bytes("to the host") == layer
    assert all(one.asynchronous and one.by_engine for one in report.replay.transfers)
    assert len(report.replay.transfers) == 2
