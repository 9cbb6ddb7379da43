"""The measurements of an audit, as the contract, the timeline and the report read them."""

import collections
import dataclasses
import functools
from collections.abc import Sequence

from zerojax._audit.memory import MemoryUse
from zerojax._audit.traffic import Traffic
from zerojax._hlo.gpus import Gpu
from zerojax._hlo.module import Module
from zerojax._hlo.schedule import Replay
from zerojax._plan.plan import Plan


@dataclasses.dataclass(frozen=True, repr=False)
class Measured:
    """A compiled step: its traffic, memory and modelled schedule.

    Times are modelled, and None where no GPU is known to model (`gpu`).
    """

    module: Module
    traffic: Sequence[Traffic]
    memory: MemoryUse
    replay: Replay
    gpu: Gpu | None
    devices: int
    plan: Plan | None
    accumulate: int
    not_donated: tuple[str, ...]
    placement: tuple[tuple[str, str], ...]  # leaves not sharded as planned: (path, how)
    kept: tuple[tuple[str, str], ...]  # stacks of gathered weights that a loop keeps: (path, array)
    warnings: tuple[str, ...]
    backend: str

    @property
    def step_seconds(self) -> float | None:
        return self.replay.step if self.gpu else None

    @property
    def exposed_seconds(self) -> float | None:
        return self.replay.exposed if self.gpu else None

    @property
    def overlap(self) -> float | None:
        """The share of compute in the step's time: 1 where all communication is hidden."""
        return self.replay.compute / self.replay.step if self.gpu and self.replay.step else None

    @property
    def wire_bytes(self) -> float:
        """The bytes that each device sends in a step."""
        return sum(t.total_bytes for t in self.traffic)

    @functools.cached_property
    def totals(self) -> dict[str, float]:
        """The bytes that each device sends, by kind of collective."""
        sums: dict[str, float] = collections.defaultdict(float)
        for one in self.traffic:
            sums[one.kind] += one.total_bytes
        return dict(sorted(sums.items(), key=lambda item: -item[1]))
