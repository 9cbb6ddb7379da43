"""Which parameters are experts, and the mesh axis over which they stay apart:
`_passes/experts.py` computes with them."""

import dataclasses
from collections.abc import Mapping, Sequence

from jax.sharding import Mesh, PartitionSpec

from zerojax._state.state import finds


@dataclasses.dataclass(frozen=True)
class Experts:
    """Parameters whose paths match `pattern` stay apart over the mesh axis `axis`."""

    axis: str
    pattern: str

    def matches(self, path: str) -> bool:
        return finds(self.pattern, path, f"experts= over {self.axis!r}: ")

    def base(
        self, path: str, shape: Sequence[int], base: PartitionSpec, layers: int
    ) -> PartitionSpec:
        """Returns the spec of a parameter whose experts are apart, and which ZeRO may shard more.

        The first dimension after those that count layers counts experts.
        """
        entries = [*base, *[None] * (len(shape) - len(base))]
        if layers >= len(shape) or entries[layers] is not None:
            where = "has" if layers >= len(shape) else f"has, beside {base},"
            raise ValueError(
                f"experts= matches {path} {tuple(shape)}, which {where} no dimension that counts "
                f"experts, the first after {layers} that count layers. Pass a pattern that leaves "
                "it out, or say which parameters are stacks of layers: stacked="
            )
        entries[layers] = self.axis
        return PartitionSpec(*entries)

    def check(
        self, path: str, shape: Sequence[int], spec: PartitionSpec, mesh: Mesh, pad: bool
    ) -> None:
        """Raises where there are too few experts for the devices of the axis."""
        if self.axis not in tuple(spec):
            return
        dim, devices = tuple(spec).index(self.axis), mesh.shape[self.axis]
        what = f"experts= splits the {shape[dim]} experts of {path} {tuple(shape)} over"
        if shape[dim] < devices:
            raise ValueError(
                f"{what} {self.axis!r}, which has {devices} devices. Pass a mesh where that axis "
                "has fewer, or a pattern that leaves the parameter out. If dimension "
                f"{dim} counts no experts, but layers, say so: stacked="
            )
        if shape[dim] % devices and not pad:
            raise ValueError(
                f"{what} {devices} devices, which do not divide them. Leave out pad=False, or pass "
                f"a mesh whose axis {self.axis!r} divides them."
            )


def as_experts(experts: object) -> Experts | None:
    """Returns the `Experts` that `experts=` stands for."""
    if experts is None or isinstance(experts, Experts):
        return experts
    pairs = [*experts.items()] if isinstance(experts, Mapping) else []
    if len(pairs) == 1 and all(isinstance(each, str) for each in pairs[0]):
        return Experts(*pairs[0])
    raise TypeError(
        f"experts={experts!r} must map one axis of the mesh to one pattern of paths. Pass "
        "experts={'expert': 'experts'} and mesh=zerojax.mesh(data=4, expert=2), say."
    )
