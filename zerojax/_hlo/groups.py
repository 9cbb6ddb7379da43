"""The devices of a collective, read from XLA's three notations of `replica_groups`."""

import dataclasses
import itertools
import math
import re

from zerojax._hlo.module import Instruction


@dataclasses.dataclass(frozen=True)
class Group:
    """The first of the groups of devices between which a collective runs."""

    members: tuple[int, ...]
    axes: tuple[str, ...] | None = None  # of the mesh, where the module names them

    def on_host(self, per_host: int) -> int:
        """Counts the members that share the first member's host."""
        return sum(m // per_host == self.members[0] // per_host for m in self.members)


def group_of(instruction: Instruction, devices: int) -> Group:
    """Reads the group of a collective; without `replica_groups` it spans all `devices`."""
    text = instruction.attributes
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", text):
        return _mesh_group(found[1], found[2])
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape = [int(x) for x in found[3].split(",")]
        order = [int(x) for x in found[4].split(",")] if found[4] else range(len(shape))
        return Group(tuple(_iota(shape, order)[: int(found[2])]))
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", text):
        return Group(tuple(int(x) for x in found[1].split(",")))
    if found := re.search(r"source_target_pairs=\{([\d,{}]*)\}", text):
        return Group(_connected(re.findall(r"(\d+),(\d+)", found[1])))
    return Group(tuple(range(devices)))


def _connected(pairs: list[tuple[str, str]]) -> tuple[int, ...]:
    """Returns the devices that exchange with the first one, directly or through others."""
    links = [{int(a), int(b)} for a, b in pairs]
    members = set(links[0]) if links else {0}
    while grown := [link for link in links if link & members and not link <= members]:
        members.update(*grown)
    return tuple(sorted(members))


def _mesh_group(sizes: str, used: str) -> Group:
    """Returns the first device's group over the mesh axes in `used`."""
    mesh = [(name, int(size)) for name, size in re.findall(r"'([^']+)'=(\d+)", sizes)]
    axes = tuple(re.findall(r"'([^']+)'", used))
    members, stride = [0], 1
    for name, size in reversed(mesh):
        if name in axes:
            members = [m + stride * j for j in range(size) for m in members]
        stride *= size
    return Group(tuple(members), axes)


def _iota(shape: list[int], order: list[int] | range) -> list[int]:
    """Returns 0, 1, 2, ... as an array of `shape`, transposed by `order` and flattened."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    indices = itertools.product(*(range(shape[axis]) for axis in order))
    return [sum(i * strides[a] for i, a in zip(index, order, strict=True)) for index in indices]
