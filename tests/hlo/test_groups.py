"""The devices that take part in a collective, in each of XLA's notations."""

import pytest

from zerojax._hlo import groups as _groups, module as _module
from zerojax._hlo.module import Instruction


@pytest.mark.parametrize(
    ("text", "members", "axes"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", (0, 1, 2, 3), None),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", (0, 4), None),
        ("replica_groups={}", tuple(range(8)), None),
        ("replica_groups=[2,4]<=[8]", (0, 1, 2, 3), None),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", (0, 4), None),
        ("replica_groups=[2,4]<=[2,2,2]T(1,0,2)", (0, 1, 4, 5), None),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", (0, 1, 2, 3), ("b",)),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", (0, 4), ("a",)),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}", (0, 1, 4, 5), ("a", "c")),
        ("channel_id=1", tuple(range(8)), None),
    ],
)
def test_groups(text, members, axes):
    instruction = _module.Instruction("x", "f32[8]", "all-reduce", "%y", f", {text}, to_apply=%add")
    found = _groups.group_of(instruction, 8)
    assert (found.members, found.axes) == (members, axes)


def test_members_on_the_first_ones_host():
    assert _groups.Group((0, 4, 8, 12)).on_host(8) == 2
    assert _groups.Group(tuple(range(16))).on_host(4) == 4


def test_permutations_group_those_who_exchange():
    text = "source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,4}}"
    permute = Instruction("p", "f32[8]", "collective-permute", "%x", text)
    assert _groups.group_of(permute, 8).members == (0, 1, 2, 3)
