"""The text of HLO modules: types, groups, where values come from, and damage that is told."""

import inspect
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import zerojax
from tests.conftest import make_mesh
from tests.hlo.modules import audited, module
from tests.support.stored import stored
from zerojax.tools._hlo.module import Module, arrays_of


def sent(array="f32[8]", how="collective-permute", groups="channel_id=1", per_host=8):
    entry = f"\n  %a = {array} parameter(0)\n  ROOT %out = {array} {how}(%a), {groups}\n"
    (one,) = audited(module(entry, devices=8), per_host=per_host).traffic
    return one


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("bf16[4,256]{1,0}", [2048]),
        ("f32[]", [4]),
        ("pred[3]", [3]),
        ("s4[8]{0}", [4]),
        ("u32[2]", [8]),
        ("f8e4m3fn[16]", [16]),
        ("c64[2]", [16]),
        ("token[]", [0]),
        ("f64[0,4]", [0]),
        ("(f32[2]{0}, (bf16[4]{0:E(16)}, s32[]), /*index=3*/u8[1])", [8, 8, 4, 1]),
        ("f32[<=8,2]", [64]),
    ],
)
def test_sizes_of_types(text, sizes):
    assert [part.nbytes for part in sent(text).parts] == sizes


@pytest.mark.parametrize(
    ("text", "members", "axes"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", (0, 1, 2, 3), None),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", (0, 4), None),
        ("replica_groups={}", range(8), None),
        ("replica_groups=[2,4]<=[8]", (0, 1, 2, 3), None),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", (0, 4), None),
        ("replica_groups=[2,4]<=[2,2,2]T(1,0,2)", (0, 1, 4, 5), None),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", (0, 1, 2, 3), ("b",)),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", (0, 4), ("a",)),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}", (0, 1, 4, 5), ("a", "c")),
        ("source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,4}}", (0, 1, 2, 3), None),
        ("source_target_pairs={{0,4},{4,0},{1,5},{5,1}}", (0, 4), None),
        ("channel_id=1", range(8), None),
    ],
)
def test_groups(text, members, axes):
    """Which devices take part shows by how many of them stand on the first one's host."""
    for per_host in (1, 2, 4, 8):
        found = sent(groups=text, per_host=per_host)
        assert (found.group, found.axes) == (len(members), axes)
        assert found.on_host == sum(member < per_host for member in members)


def test_of_a_permute_the_hops_between_hosts_are_counted_and_the_slowest_is_timed():
    pairs = lambda by: ",".join(f"{{{i},{(i + by) % 8}}}" for i in range(8))
    hops = {by: f"source_target_pairs={{{pairs(by)}}}" for by in (1, 4)}
    for by, per_host, share in ((1, 4, 1 / 4), (1, 2, 1 / 2), (1, 8, 0), (4, 4, 1), (4, 8, 0)):
        found = sent(groups=hops[by], per_host=per_host)
        assert found.network_bytes == share * found.wire_bytes, (by, per_host)
    assert sent(groups=hops[1], per_host=4).seconds == sent(groups=hops[4], per_host=4).seconds


def test_gathers_that_xla_joined_are_traced_one_by_one():
    entry = """
  %a = f32[64,1024]{1,0} parameter(0), metadata={op_name="state.params['a']"}
  %b = f32[32,1024]{1,0} parameter(1), metadata={op_name="state.params['b']"}
  %both = (f32[1024,1024]{1,0}, f32[512,1024]{1,0}) all-gather(%a, %b), dimensions={0}
  %full = f32[512,1024]{1,0} get-tuple-element(%both), index=1
  %again = f32[512,16384]{1,0} all-gather(%full), replica_groups={}, dimensions={1}
  ROOT %r = f32[] constant(0)
"""
    joined, again = zerojax.audit(module(entry)).traffic
    assert [part.paths for part in joined.parts] == [("params/a",), ("params/b",)]
    assert again.paths == ("params/b",)


def test_gradients_that_xla_joined_in_one_array_are_traced_through_its_slices():
    """So XLA:GPU sums between nodes what was reduced in each."""
    entry = """
  %a = f32[64,1024]{1,0} parameter(0), metadata={op_name="state.params['a']"}
  %b = f32[32,1024]{1,0} parameter(1), metadata={op_name="state.params['b']"}
  %rows = f32[512,1024]{1,0} parameter(2), metadata={op_name="batch"}
  %in_a = f32[64,1024]{1,0} reduce-scatter(%rows), replica_groups={}, dimensions={0}
  %in_b = f32[32,1024]{1,0} reduce-scatter(%rows), replica_groups={}, dimensions={0}
  %flat_a = f32[65536]{0} bitcast(%in_a)
  %flat_b = f32[32768]{0} bitcast(%in_b)
  %joined = f32[98304]{0} concatenate(%flat_a, %flat_b), dimensions={0}
  %start = ((f32[98304]{0}), f32[98304]{0}) all-reduce-start(%joined), replica_groups={}
  %sum = f32[98304]{0} all-reduce-done(%start)
  %cut_a = f32[65536]{0} slice(%sum), slice={[0:65536]}
  %cut_b = f32[32768]{0} slice(%sum), slice={[65536:98304]}
  %of_a = f32[64,1024]{1,0} bitcast(%cut_a)
  %of_b = f32[32,1024]{1,0} bitcast(%cut_b)
  %new_a = f32[64,1024]{1,0} subtract(%a, %of_a)
  %new_b = f32[32,1024]{1,0} subtract(%b, %of_b)
  ROOT %r = (f32[64,1024]{1,0}, f32[32,1024]{1,0}) tuple(%new_a, %new_b)
"""
    updates = "input_output_alias={ {0}: (0, {}, may-alias), {1}: (1, {}, may-alias) }, num_"
    found = zerojax.audit(module(entry).replace("num_", updates)).traffic
    paths = {one.name: one.paths for one in found}
    both = "params/a", "params/b"
    assert paths == {"in_a": both[:1], "in_b": both[1:], "start": both}


def test_a_collective_comes_from_the_innermost_line_outside_of_libraries():
    """Flax's BatchNorm reduces its statistics in a file of Flax."""
    layer = nn.BatchNorm(use_running_average=False, axis_name="data")
    x = jax.ShapeDtypeStruct((4, 16), jnp.float32)

    def normalised(variables, x):
        return layer.apply(variables, x, mutable=["batch_stats"])[0]

    specs = PartitionSpec(), PartitionSpec("data")
    mapped = jax.shard_map(normalised, mesh=make_mesh(2), in_specs=specs, out_specs=specs[1])
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    found = zerojax.audit(jax.jit(mapped).lower(variables, x).compile()).traffic
    line = inspect.getsourcelines(normalised)[1] + 1
    assert {one.source for one in found} == {f"{__file__}:{line}"}


# -- damaged text


def without(text, line):
    kept = [one for one in text.splitlines() if line not in one]
    assert len(kept) < len(text.splitlines())
    return "\n".join(kept)


NESTED = "nested-16xH100-jax0.12"
DAMAGES = {
    "cut off early": (lambda t: t[: len(t) // 2], "'%fused_com': it is no instruction"),
    "half a line": (
        lambda t: t.replace("copy(%get", "copy", 1)[:-200] + "\n}",
        r"line \d+, '%copy.*': its parentheses do not close",
    ),
    "a missing value": (lambda t: without(t, "%bitcast.5.0 = "), "uses bitcast.5.0, which is now"),
    "a missing computation": (
        lambda t: t.replace("%fused_compare.1 (", "%other (", 1),
        "calls fused_compare.1, which is nowhere",
    ),
    "no opcode": (lambda t: t.replace(" copy(", " (", 1), r"line \d+, .*: it has no opcode"),
    "two roots": (lambda t: t.replace("\n  %", "\n  ROOT %", 1), "it is a second ROOT"),
    "a fusion of nothing": (lambda t: t.replace(" calls=", " x=", 1), "not say what it calls"),
    "a loop without a body": (lambda t: t.replace(" body=", " x=", 1), "not say what it calls"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_text_is_told_in_a_line(damage):
    change, message = DAMAGES[damage]
    report = zerojax.audit(change(stored(NESTED)))
    assert re.search(message, report.unread) and "\n" not in report.unread
    with pytest.raises(AssertionError, match=message):
        report.check()


@pytest.mark.parametrize("text", ["", "Dear compiler,"])
def test_what_is_no_program_is_refused_in_a_line(text):
    message = rf"starts with '{text}' and not with 'HloModule'. Pass compiled\.as_text"
    with pytest.raises(ValueError, match=message) as caught:
        zerojax.audit(text)
    assert "\n" not in str(caught.value)


def test_a_type_is_read_once():
    """Layers that are alike repeat theirs."""
    arrays_of.cache_clear()
    parts = Module(stored(NESTED)).computations.values()
    types = [one.type for part in parts for one in part.values()]
    assert arrays_of.cache_info().misses == len({*types}) < len(types) / 5


def test_computations_may_stand_in_any_order():
    header, *parts = re.split(r"\n\n(?=%|ENTRY)", stored(NESTED))
    found = [str(zerojax.audit("\n\n".join([header, *order]))) for order in (parts, parts[::-1])]
    assert parts[-1].startswith("ENTRY") and found[0] == found[1]
