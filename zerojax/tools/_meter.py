"""The meter of a training loop: logs its steps, and shows a progress bar."""

import contextlib
import functools
import importlib
import importlib.util
import math
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, SupportsFloat

import jax

from zerojax import _compat, _table
from zerojax._declared import checked
from zerojax._state import state as _state
from zerojax._types import Device, PyTree
from zerojax.tools._forecast.mfu import peak_flops

Values = dict[str, float]
RATE = "_per_second"
NOTICED = 0.01  # of an interval: a compile that takes more hides the speed of its steps
_COMPILES: list[float] = []  # seconds of each


def _note(event: str, duration_secs: float, **_: object) -> None:
    if event.endswith("/backend_compile_duration"):
        _COMPILES.append(duration_secs)


jax.monitoring.register_event_duration_secs_listener(_note)


class Meter:
    """Counts a loop's steps, and logs their metrics, speed and memory at intervals.

    It logs floats by name. The scalars of a step's metrics come first (`loss`, `grad_norm`,
    `aux/accuracy`). The steps since the last log give `step_seconds`, by `per_step`
    `tokens_per_second` and the like, and by `flops` the `mfu`, on GPUs that zerojax knows;
    evaluation and saves between steps count. `memory_bytes` is the peak of process 0's first
    device, on CPUs the bytes of its live arrays. The first step compiles, so its log has no speed;
    later ones with a compile, as of an evaluation, have `compile_seconds` in its place.

    Metrics are read once the next step runs, so that devices never wait for the log. Of several
    processes, only process 0 reads, logs and shows.

    Arguments:
        steps: the number of steps of the whole run.
        start: the number of steps in the checkpoint that the run resumes.
        per_step: what a step takes from the data, over all devices, such as {"tokens": 8192}.
        flops: those that a step needs, from `zerojax.tools.step_flops`; `mfu` is of its devices.
        every: logs the first step, multiples of `every`, and the last.
        on_log: called with the number of steps done and the dict of floats of each log.
        bar: shows a progress bar of tqdm; the default does so if tqdm is installed and stderr is no
            file, as it is under Slurm, and else prints a line for each log. False does neither.

    Example:
        >>> logged = []
        >>> on_log = lambda step, values: logged.append((step, values["loss"]))
        >>> meter = zerojax.tools.Meter(25, per_step={"tokens": 4096}, on_log=on_log, bar=False)
        >>> for n in meter:
        ...     meter.update({"loss": jnp.float32(n)})  # of state, metrics = step(state, batch)
        >>> logged
        [(1, 0.0), (10, 9.0), (20, 19.0), (25, 24.0)]
    """

    @checked
    def __init__(
        self,
        steps: int,
        *,
        start: int = 0,
        per_step: Mapping[str, float] | None = None,
        flops: float = 0.0,
        every: int = 10,
        on_log: Callable[[int, Values], object] | None = None,
        bar: bool | None = None,
    ) -> None:
        if steps < 0 or start < 0 or every < 1:
            raise ValueError(
                f"Meter({steps!r}, {start=}, {every=}): steps and start count from 0, every from 1."
            )
        has_tqdm = importlib.util.find_spec("tqdm") is not None
        if bar and not has_tqdm:
            raise ModuleNotFoundError(
                "Meter(bar=True) needs tqdm: pip install tqdm, or leave bar= out for lines of text."
            )
        self.steps, self.done = steps, start
        self._start, self._every = start, every
        self._per_step, self._flops = dict(per_step or {}), flops
        self._on_log = on_log or (lambda step, values: None)
        self._speaks = jax.process_index() == 0
        self._prints = bar is not False
        self._wants_bar = has_tqdm and (not _is_file(sys.stderr) if bar is None else bar)
        self._bar: Any = None  # of tqdm, while the loop runs
        # A step to log, when the devices got it, and its metrics, which they may not have yet.
        self._due: tuple[int, float, PyTree] | None = None
        # The last step that was logged, when the devices got it, when it was read, and how many
        # programs were compiled by then.
        self._last: tuple[int, float, float, int] | None = None

    def __iter__(self) -> Iterator[int]:
        """Yields the steps that are left, counted from 0 as `range` does."""
        bar: Any = contextlib.nullcontext()
        if self._speaks and self._wants_bar:
            tqdm = importlib.import_module("tqdm").tqdm
            bar = tqdm(desc="training", total=self.steps, initial=self._start, unit="step")
            bar.set_postfix_str("compiling the step")
        with bar as self._bar:
            try:
                yield from range(self._start, self.steps)
            finally:  # a loop that breaks, or is preempted, runs no next step
                self._read()
                self._bar = None

    def update(self, metrics: PyTree) -> None:
        """Counts a step. Call it once for each, with its metrics as they come out of the step."""
        self.done += 1
        if not self._speaks:
            return
        started = time.perf_counter()
        self._read()
        if self.done in (self._start + 1, self.steps) or self.done % self._every == 0:
            self._due = self.done, started, metrics
        if self.done == self.steps:  # the devices have nothing else to do
            self._read()
        if self._bar is not None:
            self._bar.update()

    def log(self, values: Mapping[str, SupportsFloat]) -> None:
        """Logs values of your own, such as a validation loss, after the steps that are done."""
        if not self._speaks:
            return
        floats = {name: float(value) for name, value in values.items()}
        if self._prints:
            write = functools.partial(print, flush=True) if self._bar is None else self._bar.write
            write(f"step {self.done}: {_shown(floats, ' ')}")
        self._on_log(self.done, floats)

    def _read(self) -> None:
        """Logs the step that is due, if there is one; waits until it is done."""
        if self._due is None:
            return
        (step, started, metrics), self._due = self._due, None
        waits = not all(map(_compat.is_ready, jax.tree.leaves(metrics)))
        values = _scalars(metrics)
        now = time.perf_counter()
        if self._last is not None:
            before, its_start, its_end, programs = self._last
            # A step is read after the next one is started; the last is read at once. Where devices
            # are faster than the loop, that would leave a step out.
            at_once = step == self.done and not waits
            passed = started - its_start if at_once else now - its_end
            seconds = passed / (step - before)
            compiled = sum(_COMPILES[programs:])
            speed = {"step_seconds": seconds}
            speed |= {f"{unit}{RATE}": count / seconds for unit, count in self._per_step.items()}
            if self._flops and (peak := peak_flops(_devices(metrics))):
                speed["mfu"] = self._flops / seconds / peak
            values |= {"compile_seconds": compiled} if compiled > NOTICED * passed else speed
        self._last = step, started, now, len(_COMPILES)
        values["memory_bytes"] = device_bytes()
        if self._bar is not None:
            self._bar.set_postfix_str(_shown(values, "="), refresh=False)
        elif self._prints:
            print(f"step {step} of {self.steps}: {_shown(values, ' ')}", flush=True)
        self._on_log(step, values)


def _devices(metrics: PyTree) -> list[Device] | None:
    """Returns the devices of a step, which all have its metrics; None if these are not arrays."""
    arrays = [leaf for leaf in jax.tree.leaves(metrics) if isinstance(leaf, jax.Array)]
    return list({device for array in arrays for device in array.sharding.device_set}) or None


def _scalars(metrics: PyTree) -> Values:
    """Returns the numbers among the metrics, by their paths."""
    leaves = _state.leaves_with_paths(metrics)
    numbers = [leaf for leaf in leaves if jax.numpy.ndim(leaf.value) == 0]
    floats = map(float, jax.device_get([leaf.value for leaf in numbers]))
    pairs = zip((leaf.name for leaf in numbers), floats, strict=True)
    return dict(sorted(pairs, key=lambda pair: pair[0] != "loss"))  # which comes first


def _shown(values: Mapping[str, float], between: str) -> str:
    """Formats values for people: 'loss=2.301, step=12.3 ms, tokens/s=8,192, MFU=41.2%'."""

    def pair(name: str, value: float) -> tuple[str, str]:
        if name == "mfu":
            return "MFU", f"{value:.1%}"
        if name.endswith("_bytes"):
            return name.removesuffix("_bytes"), _table.human_bytes(value)
        if name.endswith("_seconds"):
            return name.removesuffix("_seconds"), _table.human_time(value)
        if name.endswith(RATE):
            return f"{name.removesuffix(RATE)}/s", f"{value:,.0f}"
        return name.replace("_", " "), f"{value:.4g}"

    return ", ".join(between.join(pair(name, value)) for name, value in values.items())


def device_bytes() -> int:
    """Returns the peak memory of this process's first device; on CPUs, its live arrays.

    CPUs do not report a peak. Between steps only the state is live, which a stage shards; state in
    host memory does not count, as on GPUs.
    """
    device = jax.local_devices()[0]
    stats = device.memory_stats()
    if stats:
        return stats["peak_bytes_in_use"]
    kind = device.default_memory().kind
    here = [array for array in jax.live_arrays() if device in array.sharding.device_set]
    arrays = [array for array in here if array.sharding.memory_kind in (None, kind)]
    return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in arrays)


def _is_file(stream: Any) -> bool:
    """Whether it is a file on a disk, where a bar is one line that never ends."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # none, or one without a number
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    return False
