"""Decides which checkpoints of a loop count, which of them is best, and which are kept."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import SupportsFloat

import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_managers import PolicyCheckpointInfo, PreservationContext

from zerojax._checkpoint import files as _files, save as _save
from zerojax._run import agreement as _agreement, processes as _processes
from zerojax._warn import warn

METRICS = "metrics"  # Orbax's name of the item of a step, and of the file in it
STEPS = ocp.path.step.standard_name_format()


def check_options(
    every: object, keep: object, best: object, mode: object, background: object
) -> None:
    def positive(count: object) -> bool:
        is_integer = isinstance(count, int | np.integer)
        return is_integer and not isinstance(count, bool) and int(count) >= 1

    known = isinstance(best, str | None) and mode in ("min", "max") and isinstance(background, bool)
    if not known or not positive(every) or not (keep is None or positive(keep)):
        raise ValueError(
            f"Checkpoints({every=}, {keep=}, {best=}, {mode=}, {background=}): every and keep are "
            "positive (keep=None keeps all), and integers; best is the name of one of the metrics= "
            "given to save, or None; mode is 'min' or 'max'; background is True or False."
        )


class CompleteSteps(ocp.path.step.NameFormat):
    """Orbax's steps, without directories that have no checkpoint, such as an empty one."""

    def build_name(self, step: int) -> str:
        return STEPS.build_name(step)

    def find_all(self, base_path: epath.PathLike) -> Iterator[ocp.path.step.Metadata]:
        found = STEPS.find_all(base_path)
        return (step for step in found if _files.is_complete(step.path))

    def find_step(self, base_path: epath.PathLike, step: int) -> ocp.path.step.Metadata:
        return STEPS.find_step(base_path, step)


@dataclasses.dataclass(frozen=True)
class Ranking:
    """Orbax's preservation policy: the newest, the best, and what may have been the best."""

    keep: int | None
    best: str | None
    mode: str
    unreadable: set[int] = dataclasses.field(default_factory=set)

    def ranked(self, metrics: Mapping[str, SupportsFloat] | None) -> dict[str, float] | None:
        """Returns what is saved of the metrics: the one that ranks."""
        if self.best is None:
            return None
        metrics = metrics or {}
        if self.best not in metrics:
            raise ValueError(
                f"best={self.best!r} is not among the metrics {sorted(metrics)}. Pass "
                f"metrics={{{self.best!r}: ...}} to save."
            )
        return {self.best: float(metrics[self.best])}

    def read(self, step: int, path: epath.Path) -> dict[str, float] | None:
        """Returns the metric that a step was saved with; None without one, or if it is damaged."""
        if self.best is None or step in self.unreadable or not (path / METRICS).exists():
            return None
        file = path / METRICS / METRICS
        try:
            metrics = json.loads(_files.read(file))
            if not isinstance(metrics, dict):
                raise TypeError("no dict of metrics")
            return {self.best: float(metrics[self.best])} if self.best in metrics else None
        except (OSError, ValueError, TypeError, OverflowError, RecursionError) as error:
            self.unreadable.add(step)
            warn(
                f"{file} cannot be read ({error}): step {step} has no rank, and is kept until "
                f"you remove {path}."
            )
            return None

    def best_of(self, metrics: Mapping[int, dict[str, float] | None]) -> int | None:
        """Returns the step with the best metric, the newest of equals."""
        ranks = {n: self.rank(found) for n, found in metrics.items() if found is not None}
        return max(ranks, key=lambda step: (ranks[step], step), default=None)

    def rank(self, metrics: Mapping[str, float]) -> float:
        """Returns a number that is higher for better metrics; NaN is the worst there is."""
        value = metrics[str(self.best)]
        if math.isnan(value):
            return -math.inf
        return -value if self.mode == "min" else value

    def should_preserve(
        self, checkpoints: Sequence[PolicyCheckpointInfo], *, context: PreservationContext
    ) -> list[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        best = self.best_of({checkpoint.step: checkpoint.metrics for checkpoint in checkpoints})
        newest = steps if self.keep is None else steps[-self.keep :]
        return [step in newest or step == best or step in self.unreadable for step in steps]


class Manager(ocp.CheckpointManager):
    """Orbax's manager, which counts complete checkpoints only and bears damaged metrics."""

    def __init__(self, directory: epath.Path, ranking: Ranking, *, background: bool) -> None:
        self._ranking = ranking
        options = ocp.CheckpointManagerOptions(
            cleanup_tmp_directories=True,
            enable_async_checkpointing=background,
            async_options=ocp.AsyncOptions(barrier_sync_fn=_barrier()),
            step_name_format=CompleteSteps(),
            best_fn=None if ranking.best is None else ranking.rank,
            best_mode="max",
            preservation_policy=ranking,
        )
        super().__init__(directory, item_handlers=_save.Handler(), options=options)

    def metrics(self, step: int) -> dict[str, float] | None:
        return self._ranking.read(step, self.directory / str(step))


def _barrier() -> Callable[..., None] | None:
    """Returns what writes wait by for all processes. JAX's own barrier waits for a lost one, too,
    where the run goes on without it."""
    return _agreement.wait_for_all if _processes.may_lose_processes() else None
