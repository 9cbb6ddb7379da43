"""The replay of a schedule on two streams, against times computed by hand."""

import pytest

import zerojax
from zerojax._audit.timeline import drawn_once
from zerojax._hlo import (
    groups as _groups,
    liveness as _liveness,
    module as _module,
    schedule as _schedule,
)
from zerojax._hlo.cost import CostModel
from zerojax._hlo.module import Instruction

# Round numbers: 100 TFLOP/s, 1 TB/s of memory, 100 GB/s in a host, 10 GB/s of one card, 1 us.
RATES = zerojax.Rates(flops=1e14, memory=1e12, link=1e11, network=1e10, latency=1e-6)
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


def module(entry, before="", devices=16):
    header = f"HloModule tiny, is_scheduled=true, num_partitions={devices}\n"
    return _module.Module(f"{header}{before}\nENTRY %main (a: f32[64,1024]) -> f32[] {{{entry}}}\n")


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
    assert found.wire == 3 * MATRIX / 16 * 15 + 2 * 4 * 15 / 16


def test_on_one_host_the_matmul_hides_it():
    fast = zerojax.Rates(flops=1e14, memory=1e12, link=4e11, network=1e10, latency=1e-6)
    found = _schedule.replay(loop(3), fast, per_host=16)
    assert found.collectives[0].seconds == pytest.approx(MATRIX / 16 * 15 / 4e11 + US)
    assert found.collectives[0].exposed == 0
    assert found.step == pytest.approx(3 * (DOT + ADD) + 2 * 4 * 15 / 16 / 4e11 + US)


def test_a_loop_of_unknown_length_counts_once():
    found = _schedule.replay(loop(None), RATES)
    assert found.unknown_loops == ["loop"]
    assert found.step == pytest.approx(GATHER + ADD + SCALAR)


@pytest.mark.parametrize(
    ("group", "on_host", "bandwidth"),
    # within a host over its links; across hosts, as many cards as members stand on one
    [(8, 8, 1e11), (16, 8, 8e10), (2, 1, 1e10), (64, 4, 4e10), (32, 16, 1e11)],
)
def test_bandwidth_of_a_group(group, on_host, bandwidth):
    assert RATES.bandwidth(group, on_host) == bandwidth


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


# -- what one instruction costs

SLICE = """
%sliced (stack: f32[8,256,256], i: s32[]) -> f32[256,256] {
  %stack = f32[8,256,256]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %one = f32[1,256,256]{2,1,0} dynamic-slice(%stack, %i, %zero, %zero), dynamic_slice_sizes={1,256,256}
  ROOT %flat = f32[256,256]{1,0} bitcast(%one)
}

%updated (stack: f32[8,256,256], new: f32[1,256,256], i: s32[]) -> f32[8,256,256] {
  %stack = f32[8,256,256]{2,1,0} parameter(0)
  %new = f32[1,256,256]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %put = f32[8,256,256]{2,1,0} dynamic-update-slice(%stack, %new, %i, %zero, %zero)
}
"""  # noqa: E501
ARGUMENTS = """
  %a = f32[8,256,256]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %n = f32[1,256,256]{2,1,0} parameter(2)
"""
LAYER = 256 * 256 * 4


@pytest.mark.parametrize(
    ("instruction", "touched"),
    [
        # The index is 4 bytes more.
        ("f32[256,256]{1,0} fusion(%a, %i), kind=kLoop, calls=%sliced", 2 * LAYER + 4),
        ("f32[8,256,256]{2,1,0} fusion(%a, %n, %i), kind=kLoop, calls=%updated", 2 * LAYER + 4),
        ("f32[1,256,256]{2,1,0} dynamic-slice(%a, %i, %i, %i)", 2 * LAYER),
        ("f32[8,256,256]{2,1,0} dynamic-update-slice(%a, %n, %i, %i, %i)", 2 * LAYER),
        ("f32[8,256,256]{2,1,0} negate(%a)", 16 * LAYER),
        ("f32[2048,256]{1,0} bitcast(%a)", 0),
        (
            "((f32[8,256,256]{2,1,0}, s32[]), f32[256,256]{1,0}, u32[]) fusion-start(%a, %i), "
            "kind=kLoop, calls=%sliced",
            2 * LAYER + 4,
        ),
    ],
)
def test_bytes_touched(instruction, touched):
    made = module(f"{ARGUMENTS}  ROOT %out = {instruction}\n", SLICE)
    found = CostModel(made, RATES).touched("main", made.root("main"))
    assert found == pytest.approx(touched, abs=4)


@pytest.mark.parametrize(
    ("instruction", "flops"),
    [
        (
            "f32[8,256,256]{2,1,0} dot(%a, %a), lhs_batch_dims={0}, lhs_contracting_dims={2}",
            2 * 8 * 256**3,
        ),
        (
            '(f32[256,256]{1,0}, s8[64]{0}) custom-call(%n, %n), custom_call_target="__cublas$gemm"'
            ', backend_config={"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"]}}',
            2 * 256 * 256 * 256,
        ),
        # 3 x 3 kernels from 16 to 32 features: each output element takes 9 * 16 products.
        (
            "f32[4,8,8,32]{3,2,1,0} convolution(%x, %k), window={size=3x3}, "
            "dim_labels=b01f_01io->b01f",
            2 * 4 * 8 * 8 * 32 * 9 * 16,
        ),
        ("f32[8,256,256]{2,1,0} add(%a, %a)", 0),
    ],
)
def test_flops_of_an_instruction(instruction, flops):
    more = "  %x = f32[4,8,8,16]{3,2,1,0} parameter(3)\n  %k = f32[3,3,16,32]{3,2,1,0} parameter(4)"
    made = module(f"{ARGUMENTS}{more}\n  ROOT %out = {instruction}\n")
    assert CostModel(made, RATES).flops("main", made.root("main")) == flops


# -- what lives at the fullest moment


def test_buffers_of_asynchronous_fusions_and_copies():
    """The result of a start is one buffer, whichever place it has in the start's type."""
    made = module(
        f"""{ARGUMENTS}
  %s = ((f32[8,256,256]{{2,1,0}}, s32[]), f32[256,256]{{1,0}}, u32[]) fusion-start(%a, %i), kind=kLoop, calls=%sliced
  %slice = f32[256,256]{{1,0}} fusion-done(%s)
  %c = (f32[256,256]{{1,0}}, f32[256,256]{{1,0}}, u32[]) copy-start(%slice)
  %copied = f32[256,256]{{1,0}} copy-done(%c)
  %pair = (f32[256,256]{{1,0}}, f32[256,256]{{1,0}}) tuple(%copied, %slice)
  %second = f32[256,256]{{1,0}} get-tuple-element(%pair), index=1
  ROOT %loss = f32[] reduce(%second, %copied), to_apply=%sliced
""",  # noqa: E501
        SLICE,
    )
    live = {(b.name, b.index): b.nbytes for b in _liveness.peak(made)}
    assert {key: size for key, size in live.items() if size > 8} == {
        ("s", 2): LAYER, ("c", 0): LAYER,
    }  # fmt: skip


def test_the_timeline_leaves_no_room_for_later_runs_of_a_loop():
    spans = [
        _schedule.Span(0.0, 1.0, "a", "compute", 4),
        _schedule.Span(4.0, 5.0, "b", "compute", 1),
        _schedule.Span(4.5, 6.0, "all-gather", "collectives", 1),
    ]
    moved = [(s.start, s.end) for s in drawn_once(spans)]
    assert moved == [(0.0, 1.0), (1.0, 2.0), (1.5, 3.0)]


def test_permutations_group_those_who_exchange():
    text = "source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,4}}"
    permute = Instruction("p", "f32[8]", "collective-permute", "%x", text)
    assert _groups.group_of(permute, 8).members == (0, 1, 2, 3)
