"""A replay of a module's schedule: compute, collectives, and copies to and from the host, each in
order.

A collective costs the bytes it sends over its group's bandwidth, and the hops of its rings. Those
that XLA's schedule has in flight together take turns on the links that both use, inside hosts or
between them. A `-done` waits for its collective: that is exposed communication. Copies run in one
lane for each direction: the GPU's copy engines make those of whole arrays, and of slices that XLA
can address from the host; a kernel makes the others. A loop runs as often as XLA knows it does.
"""

import collections
import dataclasses
import math
import re
from collections import Counter

import numpy as np

from zerojax._table import few, in_runs, shortened, summed
from zerojax.tools._hlo import flow as _flow
from zerojax.tools._hlo.cost import CostModel, Matmul
from zerojax.tools._hlo.gpus import Rates, network_share
from zerojax.tools._hlo.module import Array, Instruction, Module

LINKS: tuple[str, ...] = ("inside hosts", "between hosts")
TO_DEVICE, TO_HOST, IN_HOST = "to the device", "to the host", "in host memory"
NOTEBOOK = re.compile(r".*[/\\]ipykernel_\d+[/\\]\d+\.py:")  # files that nobody can open
LONGEST_NAME = 60
ADDRESSED = "dynamic_slice_config"  # XLA writes it on a slice that it can address itself


@dataclasses.dataclass
class Sent:
    """A collective, or a copy between memories, with all the runs that the loops around it give it.
    Bytes are those of a device, times are seconds of one run.

    `between` is the compute scheduled between its start and done, `exposed` the time that the
    program waits for it.
    """

    instruction: Instruction
    name: str
    kind: str  # of a collective, such as "all-gather"; of a copy its way, such as `TO_HOST`
    wire_bytes: float  # of one run
    asynchronous: bool
    trips: int = 1
    loops: tuple[str, ...] = ()  # the `while` instructions around it, outermost first
    scope: str = ""
    seconds: float = 0.0
    between: float = 0.0
    exposed: float = 0.0
    # Of a collective: its operands; the first of the groups of devices, with how many of them are
    # on the first one's host; the mesh axes that groups span, where they are known; those of its
    # bytes that go between hosts; its line in the user's code.
    parts: tuple[Array, ...] = ()
    members: tuple[int, ...] = ()
    on_host: int = 0
    axes: tuple[str, ...] | None = None
    network_bytes: float = 0.0
    source: str | None = None
    # Of an all-reduce by XLA:TPU: for each operand, the kind of collective that it stands for.
    stands_for: tuple[str, ...] = ()
    by_engine: bool = False  # of a copy

    @property
    def group(self) -> int:
        return len(self.members)

    @property
    def lanes(self) -> tuple[str, ...]:
        """The links that it uses."""
        if not self.members:
            return (self.kind,)
        inside = self.on_host == self.group
        return LINKS[self.on_host == 1 < self.group : 1 if inside else None]

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(sorted({part.dtype for part in self.parts}))

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(path for part in self.parts for path in part.paths))

    @property
    def sends(self) -> dict[str, float]:
        """The share of its bytes that the loss sends, by what it is."""
        nbytes = sum(part.nbytes for part in self.parts) or 1
        return dict(summed((x.sends, x.nbytes / nbytes) for x in self.parts if x.sends))

    @property
    def is_of_loss(self) -> bool:
        return bool(self.parts) and all(part.sends for part in self.parts)

    @property
    def total_bytes(self) -> float:
        return self.wire_bytes * self.trips

    @property
    def serves(self) -> str:
        """What the loss sends, and the parameters that it moves, where they are known; else its
        place in the user's code."""
        if self.is_of_loss or not self.paths:
            (text,) = shortened([place_of(self.source, self.scope)], LONGEST_NAME)
        else:
            first, *others = in_runs(self.paths)
            text = few(shortened([first, *others[:1]], LONGEST_NAME) + others[1:], 2)
        return ": ".join([*self.sends, text])


def place_of(source: str | None, scope: str) -> str:
    """Returns a place in the user's code: its line, else JAX's scope."""
    return NOTEBOOK.sub("cell line ", source or scope)


@dataclasses.dataclass(frozen=True)
class Span:
    """A piece of the timeline; in a loop, of its first iteration."""

    start: float
    end: float
    name: str
    stream: str  # "compute", "collectives", "exposed" or the way of a copy
    trips: int
    kind: str = ""  # of a collective; newer JAX names instructions freely


@dataclasses.dataclass
class Replay:
    """The result of a replay. Times are seconds of one step."""

    step: float = 0.0
    compute: float = 0.0
    collectives: list[Sent] = dataclasses.field(default_factory=list)
    transfers: list[Sent] = dataclasses.field(default_factory=list)
    matmuls: list[Matmul] = dataclasses.field(default_factory=list)  # with all their runs
    spans: list[Span] = dataclasses.field(default_factory=list)
    unknown_loops: list[str] = dataclasses.field(default_factory=list)

    @property
    def exposed(self) -> float:
        return float(sum(one.exposed * one.trips for one in self.collectives))

    @property
    def waited(self) -> float:
        """The time that the step waits for copies to and from the host."""
        return float(sum(one.exposed * one.trips for one in self.transfers))

    @property
    def flops_by_dtype(self) -> Counter[str]:
        return summed((dtype, count) for _, dtype, count in self.matmuls)

    @property
    def flops(self) -> float:
        return float(self.flops_by_dtype.total())


def replay(module: Module, rates: Rates, per_host: int = 8) -> Replay:
    """Replays a step."""
    player = _Player(module, rates, per_host)
    player.result.step, player.result.compute = player.run(module.entry, (), 0.0)
    return player.result


Loops = tuple[Instruction, ...]  # the `while` instructions around a computation


def _trips(loops: Loops) -> int:
    return math.prod(1 if loop.trip_count is None else loop.trip_count for loop in loops)


class _Player:
    def __init__(self, module: Module, rates: Rates, per_host: int) -> None:
        self.module, self.rates, self.per_host = module, rates, per_host
        self.cost, self.result = CostModel(module, rates), Replay()

    def run(self, name: str, loops: Loops, origin: float) -> tuple[float, float]:
        """Runs a computation once, from `origin` on; returns (elapsed, compute) seconds."""
        trips = _trips(loops)
        now = compute = 0.0  # what compute has reached, and how much of it there was
        free: dict[str, float] = collections.defaultdict(float)  # when each lane is
        pending: dict[Instruction, tuple[Sent, float, float]] = {}
        for instruction in self.module.computations[name].values():
            opcode = instruction.opcode
            if opcode.endswith("-done") and instruction.operands[0] in pending:
                one, end, computed = pending.pop(instruction.operands[0])
                one.between = compute - computed
                now = self.wait(one, now, end, origin)
            elif one := self.sent(instruction, trips, loops):
                start = max(now, *(free[lane] for lane in one.lanes))
                end = start + one.seconds
                free |= dict.fromkeys(one.lanes, end)
                stream, kind = ("collectives", one.kind) if one.members else (one.kind, "")
                self.draw(Span(origin + start, origin + end, one.name, stream, trips, kind))
                if one.asynchronous:
                    pending[instruction] = one, end, compute
                else:
                    now = self.wait(one, now, end, origin)
            elif opcode in ("while", "call", "conditional") and instruction.called:
                run = self.loop if opcode == "while" else self.slowest
                elapsed, inside = run(instruction, loops, origin + now)
                now, compute = now + elapsed, compute + inside
            else:
                seconds = self.cost.seconds(instruction)
                matmuls = self.cost.matmuls(instruction)
                self.result.matmuls += [(of, dtype, trips * flops) for of, dtype, flops in matmuls]
                at = origin + now
                self.draw(Span(at, at + seconds, instruction.name, "compute", trips))
                now, compute = now + seconds, compute + seconds
        return now, compute

    def loop(self, instruction: Instruction, loops: Loops, origin: float) -> tuple[float, float]:
        if instruction.trip_count is None:
            self.result.unknown_loops.append(instruction.name)
        elapsed, compute = self.run(instruction.body, (*loops, instruction), origin)
        count = _trips((instruction,))
        return elapsed * count, compute * count

    def slowest(self, instruction: Instruction, loops: Loops, origin: float) -> tuple[float, float]:
        """Runs all branches and counts the slowest: which one a step takes is unknown."""
        before, branches = self.result, []
        for name in instruction.called:
            self.result = Replay()
            branches.append((*self.run(name, loops, origin), self.result))
        elapsed, compute, chosen = max(branches, key=lambda branch: branch[0])
        self.result = before
        for field in ("collectives", "transfers", "matmuls", "spans", "unknown_loops"):
            getattr(before, field).extend(getattr(chosen, field))
        return elapsed, compute

    def sent(self, instruction: Instruction, trips: int, loops: Loops) -> Sent | None:
        """Returns the collective or the copy that an instruction is, if it is one."""
        kind = instruction.collective
        starts = instruction.opcode.endswith("-start")
        if instruction.fuses and (fused := self.module.fused_collective(instruction)):
            starts = self.module.starts(instruction)
            instruction, kind = fused, fused.collective
            if kind == "all-reduce":  # in one with the slice that is read of its sum
                kind = _flow.stands_for(self.module, fused, 0, group=self.module.devices)
        if kind:
            # A ragged exchange sends its first operand; the others are its result's room and sizes.
            sent = instruction.operands[: 1 if kind == "ragged-all-to-all" else None]
            arrays = [array for operand in sent for array in operand.arrays]
            members, axes = group_of(instruction, self.module.devices)
            size = len(members)
            on_host = sum(m // self.per_host == members[0] // self.per_host for m in members)
            nbytes = wire_bytes(kind, sum(array.nbytes for array in arrays), size)
            one = Sent(instruction, instruction.name, kind, nbytes, starts)
            one.seconds = self.rates.seconds(kind, nbytes, size, on_host)
            hops = [len({m // self.per_host for m in pair}) - 1 for pair in _pairs(instruction)]
            share = sum(hops) / len(hops) if hops else network_share(kind, size, on_host)
            one.network_bytes = nbytes * share
            one.parts, one.members, one.on_host, one.axes = tuple(arrays), members, on_host, axes
            self.result.collectives.append(one)
        elif self.module.uses_host and (copied := copy_of(self.module, instruction)):
            kind, nbytes, by_engine = copied
            one = Sent(instruction, instruction.name, kind, nbytes, starts, by_engine=by_engine)
            rate = self.rates.to_host(min(self.per_host, self.module.devices))
            one.seconds = nbytes / rate + self.rates.host_latency
            self.result.transfers.append(one)
        else:
            return None
        one.trips, one.loops = trips, tuple(loop.name for loop in loops)
        one.scope = instruction.op_name
        return one

    def wait(self, one: Sent, now: float, end: float, origin: float) -> float:
        one.exposed = max(0.0, end - now)
        self.draw(Span(origin + now, origin + end, one.name, "exposed", one.trips))
        return max(now, end)

    def draw(self, span: Span) -> None:
        if span.end > span.start:
            self.result.spans.append(span)


# -- collectives


def wire_bytes(kind: str, nbytes: float, group: int) -> float:
    """Returns the bytes that each device sends for a collective with operands of `nbytes`."""
    if group <= 1:
        return 0.0
    if kind == "all-gather":
        return nbytes * (group - 1)
    if kind == "all-reduce":
        return 2 * nbytes * (group - 1) / group
    if kind in ("reduce-scatter", "all-to-all", "ragged-all-to-all"):
        return nbytes * (group - 1) / group
    return nbytes


def group_of(
    instruction: Instruction, devices: int
) -> tuple[tuple[int, ...], tuple[str, ...] | None]:
    """Returns the first of the groups of devices between which a collective runs, and the axes of
    the mesh that it spans, where the module names them.

    XLA has three notations of `replica_groups`; without, a collective spans all `devices`.
    """
    text = instruction.attributes
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", text):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", match[1])}
        axes = tuple(re.findall(r"'([^']+)'", match[2]))
        first = tuple(slice(None) if name in axes else 0 for name in sizes)
        return tuple(_numbered([*sizes.values()])[first].ravel().tolist()), axes
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape = [int(x) for x in match[3].split(",")]
        order = [int(x) for x in match[4].split(",")] if match[4] else range(len(shape))
        members = _numbered(shape).transpose(order).ravel().tolist()
        return tuple(members[: int(match[2])]), None
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", text):
        return tuple(int(x) for x in match[1].split(",")), None
    if "source_target_pairs={" in text:
        # Those that exchange with the first one, directly or through others.
        pairs = _pairs(instruction)
        connected = {*pairs[0]} if pairs else {0}
        while grown := [pair for pair in pairs if pair & connected and not pair <= connected]:
            connected.update(*grown)
        return tuple(sorted(connected)), None
    return tuple(range(devices)), None


def _pairs(instruction: Instruction) -> list[set[int]]:
    """Returns the devices between which a permute sends, two by two."""
    text = instruction.attribute(r"source_target_pairs=\{([\d,{}]*)\}") or ""
    return [{int(a), int(b)} for a, b in re.findall(r"(\d+),(\d+)", text)]


def _numbered(shape: list[int]) -> np.ndarray:
    return np.arange(math.prod(shape)).reshape(shape)


# -- copies


def copy_of(module: Module, instruction: Instruction) -> tuple[str, float, bool] | None:
    """Returns the copy that an instruction makes, as `_piece`; None for one that makes none."""
    copies = [instruction]
    if instruction.fuses:
        inside = module.computations[instruction.called[0]].values()
        copies = [one for one in inside if one.base != "copy"]
    if not (pieces := [piece for piece in map(_piece, copies) if piece]):
        return None
    ways, nbytes, by_engine = zip(*pieces, strict=True)
    return ways[0], sum(nbytes), all(by_engine)


def _piece(one: Instruction) -> tuple[str, float, bool] | None:
    """Returns the way and the bytes of a copy or slice between memories, and whether the copy
    engines make it; None where both ends are in the device's memory."""
    if one.opcode.endswith("-done"):
        return None
    result = one.arrays[one.first_result]
    if one.base in ("copy", "dynamic-slice", "slice"):
        source, moved = one.operands[0].arrays[0], result
    elif one.base == "dynamic-update-slice":
        source = moved = one.operands[1].arrays[0]
    else:
        return None
    before, after = source.on_host, result.on_host
    if not before and not after:
        return None
    way = (IN_HOST if after else TO_DEVICE) if before else TO_HOST
    by_engine = one.base == "copy" or one.opcode.endswith("-start") or ADDRESSED in one.attributes
    return way, moved.nbytes, by_engine
