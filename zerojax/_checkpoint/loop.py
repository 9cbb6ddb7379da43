"""The checkpoints of a training loop: when to save, what to keep, where to continue."""

import collections
import contextlib
import dataclasses
import json
import math
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import SupportsFloat

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_managers import PolicyCheckpointInfo, PreservationContext

from zerojax._checkpoint import extras as _extras, files as _files, save as _save
from zerojax._checkpoint.extras import Extras
from zerojax._plan.padding import padded_shapes
from zerojax._plan.plan import Plan, check_plan
from zerojax._run import agreement as _agreement, processes as _processes
from zerojax._state import refusals as _refusals
from zerojax._types import PyTree, is_key
from zerojax._warn import warn

AHEAD = 2  # steps that several processes may have given to their devices
METRICS = "metrics"  # Orbax's name of the item of a step, and of the file in it
STEPS = ocp.path.step.standard_name_format()


class CompleteSteps(ocp.path.step.NameFormat):
    """Orbax's steps, without directories that have no checkpoint, such as an empty one."""

    def build_name(self, step: int) -> str:
        return STEPS.build_name(step)

    def find_all(self, base_path: epath.PathLike) -> Iterator[ocp.path.step.Metadata]:
        return (step for step in STEPS.find_all(base_path) if _files.is_complete(step.path))

    def find_step(self, base_path: epath.PathLike, step: int) -> ocp.path.step.Metadata:
        return STEPS.find_step(base_path, step)


class Manager(ocp.CheckpointManager):
    """Orbax's manager, which counts complete checkpoints only, and bears damaged metrics.

    It is its own preservation policy: it keeps the newest, the best, and what may be the best.
    Orbax's `BestN` would keep for ever, or never, each step that was saved without metrics.
    """

    def __init__(
        self, directory: epath.Path, keep: int | None, best: str | None, mode: str, background: bool
    ) -> None:
        self.keep, self.best, self.sign = keep, best, 1 if mode == "max" else -1
        self.unranked: set[int] = set()  # steps whose metrics cannot be read
        self.handler = _save.Handler()
        # JAX's own barrier waits for a lost process, too, where the run goes on without it.
        barrier = _agreement.wait_for_all if _processes.may_lose_processes() else None
        options = ocp.CheckpointManagerOptions(
            cleanup_tmp_directories=True,
            enable_async_checkpointing=background,
            async_options=ocp.AsyncOptions(barrier_sync_fn=barrier),
            step_name_format=CompleteSteps(),
            best_fn=None if best is None else self.rank,
            best_mode="max",
            preservation_policy=self,
        )
        super().__init__(directory, item_handlers=self.handler, options=options)

    def metrics(self, step: int) -> dict[str, float] | None:
        """Returns the metric that a step was saved with; None without one, or if it is damaged."""
        directory = self.directory / str(step)
        file = directory / METRICS / METRICS
        if self.best is None or step in self.unranked or not file.parent.exists():
            return None
        try:
            metrics = json.loads(_files.read(file))
            if not isinstance(metrics, dict):
                raise TypeError("no dict of metrics")
            return {self.best: float(metrics[self.best])} if self.best in metrics else None
        except (OSError, ValueError, TypeError, OverflowError, RecursionError) as error:
            self.unranked.add(step)
            warn(
                f"{file} cannot be read ({error}): step {step} has no rank, and is kept until "
                f"you remove {directory}."
            )
            return None

    def rank(self, metrics: Mapping[str, float]) -> float:
        """Returns a number that is higher for better metrics; NaN is the worst there is."""
        value = self.sign * metrics[str(self.best)]
        return -math.inf if math.isnan(value) else value

    def best_of(self, metrics: Mapping[int, Mapping[str, float] | None]) -> int | None:
        """Returns the step with the best metric, the newest of equals."""
        ranks = {step: self.rank(values) for step, values in metrics.items() if values is not None}
        return max(ranks, key=lambda step: (ranks[step], step), default=None)

    def should_preserve(
        self, checkpoints: Sequence[PolicyCheckpointInfo], *, context: PreservationContext
    ) -> list[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        best = self.best_of({checkpoint.step: checkpoint.metrics for checkpoint in checkpoints})
        newest = steps if self.keep is None else steps[-self.keep :]
        return [step in newest or step == best or step in self.unranked for step in steps]


class Preempted(SystemExit):
    """Raised by `Checkpoints.save` once the state is saved after a SIGTERM.

    Uncaught, it ends the program as the signal would have, with status 143.
    """

    def __init__(self, step: int) -> None:
        super().__init__(128 + signal.SIGTERM)
        self.step = step

    def __str__(self) -> str:
        return f"ended by SIGTERM; step {self.step} is saved"


class Checkpoints:
    """The checkpoints of a loop: one every so many steps, written while the next steps run.

    Use it as a context manager, in every process: leaving it saves the last step, whatever `every`
    is, and waits until it is written; where an error ends the loop, no more is saved. Without one,
    each `save` waits, since a write cannot continue once Python exits, and `close()` saves the last
    step. A second writer to the directory is refused. After a SIGTERM, the next `save` saves at any
    step, waits, and raises `Preempted`, which ends the program.

    Arguments:
        directory: gets a directory for each saved step; `zerojax.restore` and Orbax open them.
        every: `save` saves at multiples of this many steps.
        keep: how many of the newest to keep; None keeps all.
        best: a name among the `metrics=` given to `save`; its best checkpoint is kept as well
            (NaN is worst),
        mode: where best is the "min" or the "max".
        background: write while the loop continues, from a copy in host memory that `save` makes.

    Example:
        >>> import tempfile
        >>> state = zerojax.shard_train_state({"params": {"w": jnp.ones((64, 16))}}, stage=3)
        >>> with zerojax.Checkpoints(tempfile.mkdtemp(), every=10, keep=2) as checkpoints:
        ...     state, saved = checkpoints.resume(state)  # the newest; here, nothing yet
        ...     for n in range(saved.step or 0, 40):
        ...         done = checkpoints.save(n + 1, state)
        ...     checkpoints.wait()
        ...     print(checkpoints.steps())
        [30, 40]
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        every: int = 1,
        keep: int | None = 3,
        best: str | None = None,
        mode: str = "min",
        background: bool = True,
    ) -> None:
        _check_options(every, keep, best, mode, background)
        self.directory = _save.absolute(directory)
        _save.agree("Checkpoints", self.directory, every=every, keep=keep, best=best, mode=mode)
        self._every, self._entered, self._checked = every, False, False
        self._last: tuple | None = None  # what `save` was given for a step that was not due
        self._signalled = threading.Event()
        self._given: collections.deque[jax.Array] = collections.deque()  # one of each step
        with contextlib.ExitStack() as stack:
            stack.enter_context(_files.only_writer(self.directory, self.directory / ".lock"))
            self._manager = Manager(self.directory, keep, best, mode, background)
            stack.callback(self._manager.close)
            stack.enter_context(_processes.noting_sigterm(self._signalled))
            self._earlier = self.latest()  # of another run, until it is resumed
            # One that nobody closes frees its lock with the last reference to it, or at exit.
            self._finish = weakref.finalize(self, stack.pop_all().close)

    def __enter__(self) -> "Checkpoints":
        self._entered = True
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            self._last = None
        self.close()

    def close(self) -> None:
        """Saves the last step, as the end of a `with` block does, and lets another writer in."""
        try:
            if self._last is not None:
                self._save_last(*self._last)
        finally:
            self._last = None
            self._finish()

    def wait(self) -> None:
        """Waits until what was saved is complete; raises what went wrong in the background."""
        with self._cleaned_up():
            self._manager.wait_until_finished()

    def busy(self) -> bool:
        """Whether a checkpoint is being written in the background."""
        return self._manager.is_saving_in_progress()

    def steps(self) -> list[int]:
        """Returns the steps that have complete checkpoints."""
        return sorted(step.step for step in CompleteSteps().find_all(self.directory))

    def latest(self) -> int | None:
        """Returns the newest step that has a complete checkpoint."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """Returns the step whose `best=` metric is best, of those kept."""
        return self._manager.best_of({step: self._manager.metrics(step) for step in self.steps()})

    def path(self, step: int) -> str:
        """Returns the path of a step, for `zerojax.restore` and `read_extras`."""
        return os.fspath(self.directory / str(step))

    def resume(
        self,
        like: PyTree,
        make_state: Callable[[], PyTree] | None = None,
        *,
        step: int | None = None,
        data: bool = True,
        keep: str | None = None,
        ignore: str | None = None,
        cast: bool = False,
    ) -> tuple[PyTree, Extras]:
        """Returns the state and extras of the newest checkpoint, or of `step`.

        It waits for what is being written in the background. `like`, `keep`, `ignore` and `cast`
        are as in `zerojax.restore`, `data` as in `read_extras`. Where nothing was saved
        yet, a state is returned as it is, and for a plan `make_state` makes one:
        `resume(plan, make_state)` never needs memory for two states.
        """
        _save.check_like(like)
        self.wait()
        self._earlier = None
        step = max(self._manager.all_steps(), default=None) if step is None else step
        _save.agree("Checkpoints.resume", self.directory, step=step)
        if step is not None:
            path = self.path(step)
            state = _save.restore(path, like, keep=keep, ignore=ignore, cast=cast)
            extras = _save.read_extras(path, data=data)
            if extras.step is None:  # another program, or a plain `zerojax.save`, did not say
                if others := _files.other_items(path):  # that an Orbax manager saved
                    warn(
                        f"{path} is not zerojax's: its state is read, and {', '.join(others)} "
                        "beside it is not. Take that up yourself, with Orbax, and go on from "
                        f"saved.step, {step}."
                    )
                extras = dataclasses.replace(extras, step=step)
            return state, extras
        if isinstance(like, Plan) and make_state is not None:
            return like.place(make_state), Extras()
        shapes = (isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(like))
        if isinstance(like, Plan) or any(shapes):
            raise ValueError(
                f"{self.directory} has no complete checkpoint, and like= is no state to start "
                "from. Pass what makes one too: resume(plan, make_state)."
            )
        return like, Extras()

    def save(
        self,
        step: int,
        state: PyTree,
        *,
        rng: PyTree = None,
        data: object = None,
        metadata: PyTree = None,
        metrics: Mapping[str, SupportsFloat] | None = None,
        force: bool = False,
        plan: Plan | None = None,
    ) -> bool:
        """Saves where `step` is a multiple of `every`, with `force=True`, or after a SIGTERM.

        Call it after each step: the last one is saved in any case, as the `with` block ends. It
        returns whether it saved, as soon as the next step may donate `state`. `rng`, `data`,
        `metadata` and `plan` are as in `zerojax.save`.
        """
        step = _extras.step_number(step)
        if plan is not None:
            check_plan(plan, "plan=")
        if not self._finish.alive:
            raise ValueError(
                f"step {step} cannot be saved: these Checkpoints of {self.directory} are closed. "
                "Save inside of their with block."
            )
        if jax.distributed.is_initialized():  # all processes agree on the step
            self._hold_back(state)
            preempted = self._manager.reached_preemption(step)
        else:
            preempted = self._signalled.is_set()
        due = force or preempted or step % self._every == 0
        if due or not self._checked:  # a mistake is told of at the first step
            _save.check_leaves(state)
            self._checked = True
        data = getattr(data, "get_state", lambda: data)()  # before the next batch
        item = (step, state, plan, metrics, rng, data, metadata)
        self._last = None if due else item
        if due:
            self._write(*item, asked=not preempted)
        if preempted or not self._entered:
            self.wait()
        if preempted:
            _processes.log(f"zerojax: after a SIGTERM, step {step} is saved in {self.directory}")
            raise Preempted(step)
        return due

    def _write(
        self,
        step: int,
        state: PyTree,
        plan: Plan | None,
        metrics: Mapping[str, SupportsFloat] | None,
        *extras: PyTree,
        asked: bool,
    ) -> None:
        """Begins to write a step; one that was not `asked` for may be there, or have no metrics."""
        shapes = padded_shapes(state, plan)
        _save.agree("Checkpoints.save", self.directory, state, step=step, shapes=shapes)
        self.wait()
        is_there = step in self._manager.all_steps() or step in self.steps()
        if is_there and not asked:
            return
        self._check_free(step, is_there)
        best, metrics, ranked = self._manager.best, metrics or {}, None
        if best is not None and best in metrics:
            ranked = {best: float(metrics[best])}
        elif best is not None and (asked or metrics):
            raise ValueError(
                f"best={best!r} is not among the metrics {sorted(metrics)}. Pass "
                f"metrics={{{best!r}: ...}} to save."
            )
        custom = _extras.pack(step, *extras)
        args = _save.save_args(self._manager.handler, state, custom, shapes)
        with self._cleaned_up():
            self._manager.save(step, args=args, metrics=ranked, force=True)

    def _check_free(self, step: int, is_there: bool) -> None:
        path = self.directory / str(step)
        if is_there:
            raise ValueError(
                f"step {step} is saved in {self.directory} already, and nothing is overwritten. "
                "Continue from the newest with resume(), or give this run a directory of its own."
            )
        if self._earlier is not None and step <= self._earlier:
            raise ValueError(
                f"step {step} cannot be saved: {self.directory} has an earlier run, up to step "
                f"{self._earlier}, that was not resumed, and keep= would remove its checkpoints "
                "for those of this one. Continue it with resume(), or give this run a directory "
                "of its own."
            )
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ValueError(
                f"{path} is no checkpoint, and nothing is overwritten. Remove it, or give this run "
                "a directory of its own."
            )

    def _save_last(self, step: int, state: PyTree, *rest: PyTree) -> None:
        """Saves the last step at the end of the loop, which was none of `every`."""
        if any(map(_refusals.is_gone, jax.tree.leaves((state, rest)))):
            warn(
                f"the last steps are not saved in {self.directory}: the state of step {step}, "
                "which save was given last, or its rng, was donated since. Call save after each "
                "step."
            )
            return
        _save.check_leaves(state)
        self._write(step, state, *rest, asked=False)

    def _hold_back(self, state: PyTree) -> None:
        """Keeps a process close to its devices: after a SIGTERM to one, all save after the step
        that the furthest has given to its own, and JAX lets it give 32."""
        arrays = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array) and not is_key(x)]
        mine = [array for array in arrays if array.sharding.addressable_devices]
        if not mine:
            return
        smallest = min(mine, key=lambda array: array.size).addressable_data(0)
        self._given.append(jnp.copy(smallest))  # the next step may donate the state
        if len(self._given) > AHEAD:
            jax.block_until_ready(self._given.popleft())

    @contextlib.contextmanager
    def _cleaned_up(self) -> Iterator[None]:
        """Removes what a write in its block leaves where that fails."""
        try:
            yield
        except Exception:  # not Ctrl-C, which ends the waiting and not the write
            _files.remove(_files.unfinished(self.directory))
            self._manager.reload()  # or Orbax counts what it failed to write as written
            raise


def _check_options(
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
