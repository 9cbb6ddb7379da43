"""What became of a run's time: steps that counted, steps done again, saves, starts, and gaps."""

import contextlib
import dataclasses
import json
import math
import os
import time
from collections.abc import Iterator, Sequence

import jax
from etils import epath

from zerojax import _table
from zerojax._checkpoint import checkpoint as _checkpoint, files as _files
from zerojax._warn import warn

FILE = "goodput.json"  # beside the checkpoints
RARELY = 100  # writing it takes at most this part of the time, where nothing was saved

MEANING = {
    "productive": "steps that the state has gone through, with evaluation and waiting for data",
    "redone": "steps done again: those after the checkpoint that a later start resumed from",
    "starting": "from Checkpoints to the end of the first step: restoring, compiling",
    "saving": "waiting for saves",
    "down": "from the last sign of life of a run that was interrupted to the next start",
}


@dataclasses.dataclass
class Start:
    """What one start of the program did, in seconds and steps; times are since the epoch, and tell
    only how much passes between two starts, as a clock may be set while a program runs."""

    began: float
    alive: float  # when it was last heard of
    resumed: int = 0  # the step it started from
    step: int = 0  # the last it has done
    starting: float = 0.0
    stepping: float = 0.0
    saving: float = 0.0
    ended: bool = False  # as its loop meant it to

    @property
    def has_stepped(self) -> bool:
        """Whether it has done a step; else it says nothing of where it resumed from."""
        return self.step > self.resumed

    def kept(self, until: int) -> float:
        """Returns the seconds of its steps up to `until`, each of them as long as their mean."""
        if until >= self.step:  # all of them, and what else the loop has done
            return self.stepping
        first = self.resumed + 1  # which is a part of starting
        return self.stepping * max(until - first, 0) / max(self.step - first, 1)


class Goodput:
    """How much of a run's time went into steps that counted, over all of its starts.

    `zerojax.Checkpoints` keeps the times in a small file beside the checkpoints, as long as `save`
    is called after each step; nothing else is needed. All are those of process 0, in seconds:

    - `productive`: steps that the state has gone through. What the loop does between them and
      after the last counts, as evaluation or waiting for data.
    - `redone`: steps that were done after the checkpoint that a later start resumed from.
    - `starting`: from the making of `Checkpoints` to the end of the first call of the step, which
      restores and compiles.
    - `saving`: the time that the loop waited for saves.
    - `down`: from the last that was heard of a start that was interrupted to the next one.

    Arguments:
        directory: that of `zerojax.Checkpoints`, of a run that has ended or is still going on.

    Example:
        >>> import tempfile
        >>> state = {"params": {"w": jnp.ones((64, 16))}}
        >>> with zerojax.Checkpoints(tempfile.mkdtemp(), every=5) as checkpoints:
        ...     for n in range(10):
        ...         done = checkpoints.save(n + 1, state)
        >>> goodput = zerojax.Goodput(checkpoints.directory)
        >>> goodput.starts, goodput.steps, goodput.to_dict()["redone"]
        (1, 10, 0.0)
    """

    def __init__(self, directory: str | os.PathLike) -> None:
        file = _checkpoint.absolute(directory) / FILE
        if not file.exists():
            raise ValueError(
                f"there is no {file}. Give the directory of zerojax.Checkpoints whose save was "
                "called after a step."
            )
        self._history = _read(file)

    @property
    def starts(self) -> int:
        """How often the run was started."""
        return len(self._history)

    @property
    def steps(self) -> int:
        """The step that the run has reached."""
        return next((start.step for start in self._history[::-1] if start.has_stepped), 0)

    @property
    def seconds(self) -> float:
        """The time that is accounted for."""
        return sum(self._times().values())

    @property
    def goodput(self) -> float:
        """The share of the time that was productive."""
        return self._times()["productive"] / (self.seconds or 1.0)

    def to_dict(self) -> dict[str, float]:
        """Returns the seconds of each kind, `goodput` as a share, `starts` and `steps`: floats, for
        logs."""
        counts = {"goodput": self.goodput, "starts": self.starts, "steps": self.steps}
        return {name: float(value) for name, value in (self._times() | counts).items()}

    def __str__(self) -> str:
        table = _table.text_table(self._rows(), right=(1, 2), flexible=(3,))
        return f"{self._summary()}\n\n{table}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return _table.html_table([self._summary()], self._rows())

    def _summary(self) -> str:
        starts = "1 start" if self.starts == 1 else f"{self.starts} starts"
        total = _duration(self.seconds)
        return f"goodput {self.goodput:.1%}: {self.steps} steps in {total}, {starts}"

    def _rows(self) -> list[_table.Row]:
        total = self.seconds or 1.0
        times = self._times().items()
        rows = [(name, _duration(t), f"{t / total:.1%}", MEANING[name]) for name, t in times]
        return [("time", "in all", "share", "what it is"), *rows]

    def _times(self) -> dict[str, float]:
        return _times(self._history)


def _times(history: Sequence[Start]) -> dict[str, float]:
    """Sums up the times of all starts."""
    times = dict.fromkeys(MEANING, 0.0)
    for at, start in enumerate(history):
        later = history[at + 1 :]
        # A step counts if no later start went back behind it.
        resumed = (one.resumed for one in later if one.has_stepped)
        kept = start.kept(min(resumed, default=start.step))
        times["productive"] += kept
        times["redone"] += start.stepping - kept
        times["starting"] += start.starting
        times["saving"] += start.saving
        if later and not start.ended:
            times["down"] += max(later[0].began - start.alive, 0.0)
    return times


class Clock:
    """Keeps the times of a start of the program, for `Goodput`; a part of `Checkpoints`."""

    def __init__(self, directory: epath.Path) -> None:
        self.file = directory / FILE
        now = time.time()
        self.start, self.before = Start(began=now, alive=now), _history_at(self.file)
        self.began, self.meant, self.write_at = False, False, 0.0
        self.until = time.monotonic()  # what has passed is noted

    def begin(self) -> None:
        """Notes that a loop begins: it is a start even if it ends before its first step."""
        self.began = True
        self._write()

    def step_done(self, step: int) -> None:
        """Notes that the loop has done a step; what went before the first was the start."""
        self.began = True
        first = not self.start.has_stepped
        self._passed("starting" if first else "stepping")
        self.start.resumed = step - 1 if first else min(self.start.resumed, step - 1)
        self.start.step = step
        self._write()

    def saved(self) -> None:
        """Notes that the loop waited for a save until now."""
        self._passed("saving")
        self.write_at = 0.0
        self._write()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Notes that the loop waits for a save in its block; before the first step, it starts."""
        if not self.start.has_stepped:
            yield
            return
        self._passed("stepping")
        try:
            yield
        finally:
            self._passed("saving")
            self._write()

    def closing(self, *, meant: bool) -> None:
        """Notes that the loop is over: as it was meant to, or it was cut off."""
        self.meant = meant
        if self.start.has_stepped and meant:  # what came after the last save is no saving
            self._passed("stepping")

    def ended(self) -> None:
        """Notes that nothing more will be saved; since `closing`, the last save was waited for."""
        self.write_at = 0.0
        if not self.began:
            return
        if not self.meant:  # what passed since it was last heard of is time that it was down
            self._write()
        elif self.start.has_stepped:
            self.start.ended = True
            self.saved()
        else:  # it only looked at the checkpoints, and was no start
            self._put(self.before)

    def _passed(self, kind: str) -> None:
        now = time.monotonic()
        setattr(self.start, kind, getattr(self.start, kind) + now - self.until)
        self.until, self.start.alive = now, time.time()

    def _write(self) -> None:
        """Writes the file, so rarely that it costs nothing: file systems may be slow."""
        began = time.monotonic()
        if began < self.write_at:
            return
        self._put((*self.before, self.start))
        self.write_at = began + RARELY * (time.monotonic() - began)

    def _put(self, history: Sequence[Start]) -> None:
        """Replaces the file, or removes it where there is nothing to say."""
        if jax.process_index() > 0:
            return
        new = self.file.parent / f".{FILE}.new"
        try:
            if not history:
                return self.file.unlink(missing_ok=True)
            new.write_text(json.dumps([dataclasses.asdict(start) for start in history]))
            new.replace(self.file)  # at once, for one who reads it, or if the program ends here
        except OSError as error:
            warn(f"{self.file} cannot be written ({error}).")


def _history_at(file: epath.Path) -> list[Start]:
    """Returns the starts before this one. Training goes on without them if the file is damaged."""
    if jax.process_index() > 0 or not file.exists():
        return []
    try:
        return _read(file)
    except (ValueError, OSError) as error:
        warn(f"{error} Its times are left out of this run's.")
        return []


def _read(file: epath.Path) -> list[Start]:
    try:
        history = [Start(**start) for start in json.loads(_files.read(file))]
        if not math.isfinite(sum(map(sum, map(dataclasses.astuple, history)))) or not history:
            raise ValueError("it says nothing of any start")
        return history
    except _files.DAMAGE as error:
        raise ValueError(f"{file} is damaged ({error}). Remove it.") from error


def _duration(seconds: float) -> str:
    """Formats 12.34 as '12.3 s', and 5025 as '1:23:45'."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
