"""A replay of a module's schedule: compute, collectives, and copies to and from the host, each in
order.

A collective costs the bytes it sends over its group's bandwidth, and the hops of its rings. Those
that XLA's schedule has in flight together take turns on the links that both use, inside hosts or
between them. A `-done` waits for its collective: that is exposed communication. Copies run in one
lane for each direction. A loop runs as often as XLA knows that it does.
"""

import dataclasses
from collections import Counter

from zerojax.tools._hlo import groups as _groups, module as _module, transfers as _transfers
from zerojax.tools._hlo.cost import CostModel, Matmul
from zerojax.tools._hlo.gpus import Rates, network_share
from zerojax.tools._hlo.module import Instruction, Module
from zerojax.tools._hlo.transfers import Transfer

LINKS: tuple[str, ...] = ("inside hosts", "between hosts")
REDUCING = ("reduce-scatter", "all-reduce")


@dataclasses.dataclass
class Collective:
    """A collective instruction, with all the runs that the loops around it give it."""

    instruction: Instruction
    computation: str
    arrays: list[_module.Array]  # its operands
    group: _groups.Group
    wire: float  # bytes that each device sends in one run
    network: float  # those that leave its host
    links: tuple[str, ...]  # that it uses
    trips: int
    loops: tuple[str, ...]  # the `while` instructions around it, outermost first
    seconds: float = 0.0  # of one run
    exposed: float = 0.0  # of one run
    between: float = 0.0  # compute between start and done, of one run

    @property
    def kind(self) -> str:
        return collective_kind(self.instruction)

    @property
    def asynchronous(self) -> bool:
        return self.instruction.opcode.endswith("-start")


@dataclasses.dataclass(frozen=True)
class Span:
    """A piece of the timeline; in a loop, of its first iteration."""

    start: float
    end: float
    name: str
    stream: str  # "compute", "collectives", "waiting" or the way of a copy
    trips: int
    kind: str = ""  # of a collective; newer JAX names instructions freely


@dataclasses.dataclass
class Replay:
    """The result of a replay. Times are seconds of one step."""

    step: float = 0.0
    compute: float = 0.0
    exposed: float = 0.0
    waited: float = 0.0  # for copies to and from the host
    collectives: list[Collective] = dataclasses.field(default_factory=list)
    transfers: list[Transfer] = dataclasses.field(default_factory=list)
    matmuls: list[Matmul] = dataclasses.field(default_factory=list)  # with all their runs
    spans: list[Span] = dataclasses.field(default_factory=list)
    unknown_loops: list[str] = dataclasses.field(default_factory=list)

    @property
    def flops_by_dtype(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for one in self.matmuls:
            found[one.dtype] += one.flops
        return found

    @property
    def flops(self) -> float:
        return float(sum(one.flops for one in self.matmuls))

    def add(self, part: "Replay") -> None:
        """Adds what happened inside a called computation, except for its time."""
        self.exposed += part.exposed
        self.waited += part.waited
        self.collectives += part.collectives
        self.transfers += part.transfers
        self.spans += part.spans
        self.unknown_loops += part.unknown_loops
        self.matmuls += part.matmuls


def replay(module: Module, rates: Rates, per_host: int = 8) -> Replay:
    """Replays a step."""
    player = _Player(module, rates, per_host)
    player.result.step, player.result.compute = player.run(module.entry, 1, (), 0.0)
    return player.result


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


def collective_kind(instruction: Instruction) -> str:
    """Returns 'all-gather', say, for asynchronous halves too; '' for other instructions."""
    return instruction.base if instruction.base in _module.COLLECTIVES else ""


@dataclasses.dataclass
class _Lanes:
    """The copies of one run of a computation."""

    free: dict[str, float] = dataclasses.field(default_factory=dict)  # when each way is
    ends: dict[str, tuple[float, Transfer]] = dataclasses.field(default_factory=dict)


class _Player:
    def __init__(self, module: Module, rates: Rates, per_host: int) -> None:
        self.module, self.rates, self.per_host = module, rates, per_host
        self.cost, self.result = CostModel(module, rates), Replay()

    def run(
        self, name: str, trips: int, loops: tuple[str, ...], origin: float
    ) -> tuple[float, float]:
        """Runs a computation once, from `origin` on; returns (elapsed, compute) seconds."""
        now = compute = 0.0  # what compute has reached, and how much of it there was
        free: dict[str, float] = dict.fromkeys(LINKS, 0.0)
        pending: dict[str, tuple[float, float, Collective]] = {}
        lanes = _Lanes()
        for instruction in self.module.computations[name].values():
            kind = collective_kind(instruction)
            if kind and instruction.opcode.endswith("-done"):
                end, computed, collective = pending.pop(instruction.operands[0])
                collective.between = compute - computed
                now = self.wait(collective, now, end, origin)
            elif kind:
                collective = self.collective(name, instruction, kind, trips, loops)
                start = max(now, *(free[link] for link in collective.links))
                end = start + collective.seconds
                free.update(dict.fromkeys(collective.links, end))
                when = (origin + start, origin + end)
                self.draw(Span(*when, instruction.name, "collectives", trips, kind))
                if collective.asynchronous:
                    pending[instruction.name] = (end, compute, collective)
                else:
                    now = self.wait(collective, now, end, origin)
            elif (after := self.copy(name, instruction, trips, now, origin, lanes)) is not None:
                now = after
            elif instruction.opcode == "while":
                elapsed, inside = self.loop(instruction, trips, loops, origin + now)
                now, compute = now + elapsed, compute + inside
            elif instruction.opcode in ("call", "conditional") and instruction.called:
                elapsed, inside = self.slowest(instruction.called, trips, loops, origin + now)
                now, compute = now + elapsed, compute + inside
            else:
                seconds = self.compute(name, instruction, trips, origin + now)
                now, compute = now + seconds, compute + seconds
        return now, compute

    def slowest(
        self, names: list[str], trips: int, loops: tuple[str, ...], origin: float
    ) -> tuple[float, float]:
        """Runs all branches and counts the slowest: which one a step takes is unknown."""
        before, tried = self.result, []
        for name in names:
            self.result = Replay()
            tried.append((*self.run(name, trips, loops, origin), self.result))
        elapsed, compute, chosen = max(tried, key=lambda one: one[0])
        self.result = before
        before.add(chosen)
        return elapsed, compute

    def loop(
        self, instruction: Instruction, trips: int, loops: tuple[str, ...], origin: float
    ) -> tuple[float, float]:
        count = instruction.trip_count
        if count is None:
            self.result.unknown_loops.append(instruction.name)
            count = 1
        around = (*loops, instruction.name)
        elapsed, compute = self.run(instruction.body, trips * count, around, origin)
        return elapsed * count, compute * count

    def compute(self, name: str, instruction: Instruction, trips: int, at: float) -> float:
        seconds = self.cost.seconds(name, instruction)
        found = self.cost.matmuls(name, instruction)
        self.result.matmuls += [one._replace(flops=one.flops * trips) for one in found]
        self.draw(Span(at, at + seconds, instruction.name, "compute", trips))
        return seconds

    def collective(
        self, name: str, instruction: Instruction, kind: str, trips: int, loops: tuple[str, ...]
    ) -> Collective:
        instructions = self.module.computations[name]
        arrays = [array for o in instruction.operands for array in instructions[o].arrays]
        group = _groups.group_of(instruction, self.module.devices)
        size, on_host = len(group.members), group.on_host(self.per_host)
        wire = wire_bytes(kind, sum(a.nbytes for a in arrays), size)
        network = wire * network_share(kind, size, on_host)
        links = LINKS[on_host == 1 < size : 1 if on_host == size else None]
        found = Collective(instruction, name, arrays, group, wire, network, links, trips, loops)
        found.seconds = self.rates.seconds(kind, wire, size, on_host)
        self.result.collectives.append(found)
        return found

    def wait(self, collective: Collective, now: float, end: float, origin: float) -> float:
        waited = max(0.0, end - now)
        collective.exposed = waited
        self.result.exposed += waited * collective.trips
        name, trips = collective.instruction.name, collective.trips
        self.draw(Span(origin + now, origin + end, name, "waiting", trips))
        return max(now, end)

    def copy(
        self,
        name: str,
        instruction: Instruction,
        trips: int,
        now: float,
        origin: float,
        lanes: _Lanes,
    ) -> float | None:
        """Returns when the schedule goes on after a copy to or from the host; None for anything
        else."""
        if not self.module.uses_host:
            return None
        if instruction.opcode.endswith("-done") and instruction.operands[0] in lanes.ends:
            end, transfer = lanes.ends.pop(instruction.operands[0])
        elif transfer := _transfers.transfer_of(self.module, name, instruction):
            transfer.trips = trips
            rate = self.rates.to_host(min(self.per_host, self.module.devices))
            transfer.seconds = transfer.nbytes / rate + self.rates.host_latency
            start = max(now, lanes.free.get(transfer.way, 0.0))
            lanes.free[transfer.way] = end = start + transfer.seconds
            self.result.transfers.append(transfer)
            self.draw(Span(origin + start, origin + end, instruction.name, transfer.way, trips))
            if transfer.asynchronous:
                lanes.ends[instruction.name] = end, transfer
                return now
        else:
            return None
        transfer.waited = max(0.0, end - now)
        self.result.waited += transfer.waited * trips
        self.draw(Span(origin + now, origin + end, instruction.name, "waiting", trips))
        return max(now, end)

    def draw(self, span: Span) -> None:
        if span.end > span.start:
            self.result.spans.append(span)
