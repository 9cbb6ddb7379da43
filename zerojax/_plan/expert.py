"""Which parameters are experts, and the mesh axis over which they stay apart:
`_passes/experts.py` computes with them."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
from jax.core import Tracer
from jax.sharding import Mesh, PartitionSpec

from zerojax import _compat
from zerojax._state.state import finds
from zerojax._types import PyTree
from zerojax._warn import warn

WINDOW = 20  # steps that must overflow, each of them, before a warning


@dataclasses.dataclass(frozen=True)
class Experts:
    """How experts stay apart over a mesh axis. The loss is written for all of them.

    Arguments:
        axis: the mesh axis. It splits rows of the batch, too.
        pattern: a regex of the paths of the parameters of experts.
        room: for rows sorted by expert, how many each device has room for, from each other, in
            equal shares. More of them take another round: none is dropped.

    Example:
        >>> params = {"experts": jnp.ones((8, 64, 32))}
        >>> experts = zerojax.Experts("expert", "experts", room=1.5)
        >>> mesh = zerojax.mesh(data=4, expert=2)
        >>> print(zerojax.plan({"params": params}, mesh=mesh, experts=experts).leaves[0].spec)
        P('expert', 'data')
    """

    axis: str
    pattern: str
    room: float = 1.25

    def __post_init__(self) -> None:
        if not isinstance(self.axis, str) or not isinstance(self.pattern, str):
            raise TypeError(
                f"Experts(axis={self.axis!r}, pattern={self.pattern!r}) must name an axis of the "
                "mesh and a pattern of paths. Pass Experts('expert', 'experts'), say."
            )
        is_number = isinstance(self.room, int | float) and not isinstance(self.room, bool)
        if not is_number or not 0 < self.room < math.inf:
            raise ValueError(
                f"Experts(room={self.room!r}) must be a positive number of equal shares. Pass "
                "1.25, or the largest `expert_load` among the metrics of a step."
            )

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
        "experts={'expert': 'experts'} and mesh=zerojax.mesh(data=4, expert=2), say, or a "
        "zerojax.Experts."
    )


# The loads and overflows of up to `WINDOW` steps; None where a warning was.
_RECENT: dict[Experts, list[tuple[jax.Array, jax.Array]] | None] = {}


def watch(experts: Experts, metrics: Mapping[str, PyTree]) -> None:
    """Warns once if rows overflow in every step. It reads only what is computed: no step waits."""
    recent = _RECENT.setdefault(experts, [])
    load, overflows = map(metrics.get, ("expert_load", "expert_overflows"))
    if recent is None or load is None or overflows is None or isinstance(load, Tracer):
        return
    if len(recent) < WINDOW:
        recent.append((load, overflows))
    pairs = [*recent]  # other threads run steps, too
    values = [value for pair in pairs for value in pair]
    if any(value.is_deleted() for value in values):  # users may donate metrics
        recent.clear()
    elif len(pairs) >= WINDOW and all(map(_compat.is_ready, values)):
        recent.clear()
        loads, counts = zip(*jax.device_get(pairs), strict=True)
        room = math.ceil(100 * float(max(loads)) - 1e-3) / 100  # of float32
        if min(counts) > 0 and room > experts.room:
            _RECENT[experts] = None
            warn(
                f"experts over {experts.axis!r}: rows overflowed their rooms in each of the last "
                f"{WINDOW} steps, which costs a further round each time. room={room:g} would hold "
                f"them: experts=zerojax.Experts({experts.axis!r}, {experts.pattern!r}, "
                f"room={room:g}). Or balance the router."
            )
