"""The devices of a collective, read from XLA's three notations of `replica_groups`."""

import dataclasses
import math
import re

import numpy as np

from zerojax.tools._hlo.module import Instruction


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
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found[1])}
        axes = tuple(re.findall(r"'([^']+)'", found[2]))
        first = tuple(slice(None) if name in axes else 0 for name in sizes)
        return Group(_flat(_numbered([*sizes.values()])[first]), axes)
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape = [int(x) for x in found[3].split(",")]
        order = [int(x) for x in found[4].split(",")] if found[4] else range(len(shape))
        return Group(_flat(_numbered(shape).transpose(order))[: int(found[2])])
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


def _numbered(shape: list[int]) -> np.ndarray:
    return np.arange(math.prod(shape)).reshape(shape)


def _flat(devices: np.ndarray) -> tuple[int, ...]:
    return tuple(devices.ravel().tolist())
