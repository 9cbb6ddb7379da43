"""The checkpoints of a training loop: when to save, what to keep, where to continue."""

import collections
import contextlib
import dataclasses
import math
import os
import signal
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, SupportsFloat

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_managers import PolicyCheckpointInfo

from zerojax._checkpoint import extras as _extras, files as _files, save as _save
from zerojax._checkpoint.extras import Extras
from zerojax._plan.layout import check_plan
from zerojax._plan.padding import padded_shapes
from zerojax._plan.plan import Plan
from zerojax._run import agreement as _agreement, processes as _processes
from zerojax._state import refusals as _refusals
from zerojax._types import PyTree, is_key
from zerojax._warn import warn

AHEAD = 2  # how many steps one of several processes may run ahead of its devices
STEPS = ocp.path.step.standard_name_format()


def complete_steps(directory: epath.PathLike) -> Iterator[ocp.path.step.Metadata]:
    """Yields Orbax's steps, without directories that hold no checkpoint, such as an empty one."""
    return (step for step in STEPS.find_all(directory) if _files.is_complete(step.path))


def best_of(steps: Iterable[int], ranks: Mapping[int, float | None]) -> int | None:
    """Returns the step that ranks highest, the newest of equals."""
    ranked = [(rank, step) for step in steps if (rank := ranks.get(step)) is not None]
    return max(ranked, default=(None, None))[1]


def manager_of(
    directory: epath.Path,
    handler: _save.Handler,
    keep: int | None,
    ranks: Mapping[int, float | None],
    background: bool,
) -> ocp.CheckpointManager:
    """Returns Orbax's manager, which counts complete checkpoints only.

    It keeps the newest, the one that ranks best, and those whose rank is None. Orbax's `BestN`
    would keep each step that was saved without metrics for ever, or never.
    """

    def should_preserve(checkpoints: Sequence[PolicyCheckpointInfo], **_: object) -> list[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        newest = steps if keep is None else steps[-keep:]
        kept = {best_of(steps, ranks), *(step for step in ranks if ranks[step] is None)}
        return [step in newest or step in kept for step in steps]

    policy: Any = types.SimpleNamespace(should_preserve=should_preserve)
    names: Any = types.SimpleNamespace(
        build_name=STEPS.build_name, find_all=complete_steps, find_step=STEPS.find_step
    )
    # JAX's own barrier also waits for lost processes, without which an elastic run goes on.
    barrier = _agreement.wait_for_all if _processes.may_lose_processes() else None
    options = ocp.CheckpointManagerOptions(
        cleanup_tmp_directories=True,
        enable_async_checkpointing=background,
        async_options=ocp.AsyncOptions(barrier_sync_fn=barrier),
        step_name_format=names,
        preservation_policy=policy,
    )
    return ocp.CheckpointManager(directory, item_handlers=handler, options=options)


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
    """The checkpoints of a loop: one every `every` steps, written while the next steps run.

    Use it as a context manager, in every process. The end of the block saves the last step,
    whatever `every` is, and waits until it is written; if an error ends the loop, it saves nothing.
    Without a `with` block, each `save` waits, because a write cannot continue once Python exits,
    and `close()` saves the last step. A second writer to the directory is refused, and a run next
    to an earlier one that it did not `resume`. After a SIGTERM, the next `save` saves at any step,
    waits, and raises `Preempted`, which ends the program.

    Arguments:
        directory: contains a directory for each saved step; `zerojax.restore` and Orbax open them.
        every: `save` saves at multiples of this many steps.
        keep: how many of the newest checkpoints to keep; None keeps all.
        best: one of the `metrics=` of `save`; the checkpoint with its best value is kept as well.
            NaN is worst.
        mode: whether the best value is the "min" or the "max".
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
        counts = [every] if keep is None else [every, keep]
        are_counts = all(isinstance(n, int | np.integer) and n is not True for n in counts)
        known = isinstance(best, str | None) and isinstance(background, bool)
        if not (known and mode in ("min", "max") and are_counts and min(counts) >= 1):
            raise ValueError(
                f"Checkpoints({every=}, {keep=}, {best=}, {mode=}, {background=}): every and keep "
                "must be positive integers (keep=None keeps all); best must be the name of one of "
                "save's metrics=, or None; mode 'min' or 'max'; background True or False."
            )
        self.directory = _save.absolute(directory)
        _save.agree("Checkpoints", self.directory, every=every, keep=keep, best=best, mode=mode)
        self._every, self._keep = every, keep
        self._best, self._sign = best, 1 if mode == "max" else -1
        self._entered = self._checked = False
        self._last: tuple | None = None  # a step that was not due, with what belongs to it
        self._signalled = threading.Event()
        self._ahead: collections.deque[jax.Array] = collections.deque()  # an array of each step
        self._handler = _save.Handler()
        # Of the steps that were saved with the metric `best`; None if it cannot be read.
        self._ranks: dict[int, float | None] = {}
        with contextlib.ExitStack() as stack:
            stack.enter_context(_files.only_writer(self.directory, self.directory / ".lock"))
            for times in self.directory.glob(f"*/{_files.WRITTEN_LATER}"):  # Orbax reads them
                _files.check_regular(times, _files.MOST_READ)
            if best is not None:
                self._rank_saved(best)
            self._manager = manager_of(self.directory, self._handler, keep, self._ranks, background)
            stack.callback(self._manager.close)
            stack.enter_context(_processes.noting_sigterm(self._signalled))
            self._earlier = self.latest()  # of another run, until it is resumed
            # If nobody calls close(), the lock is freed with the last reference, or at exit.
            self._finish = weakref.finalize(self, stack.pop_all().close)

    def __enter__(self) -> "Checkpoints":
        self._entered = True
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            self._last = None
        self.close()

    def close(self) -> None:
        """Saves the last step, like the end of a `with` block, and lets another writer in."""
        try:
            if self._last is not None:
                self._save_last(self._last)
        finally:
            self._last = None
            self._finish()

    def wait(self) -> None:
        """Waits until all checkpoints are complete; raises the errors of background writes."""
        with _save.ONE_THREAD, self._cleaned_up():
            self._manager.wait_until_finished()

    def busy(self) -> bool:
        """Whether a checkpoint is being written in the background."""
        return self._manager.is_saving_in_progress()

    def steps(self) -> list[int]:
        """Returns the steps that have complete checkpoints."""
        return sorted(step.step for step in complete_steps(self.directory))

    def latest(self) -> int | None:
        """Returns the newest step that has a complete checkpoint."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """Returns the kept step with the best value of the `best=` metric."""
        return best_of(self.steps(), self._ranks)

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

        It waits for background writes. `like`, `keep`, `ignore` and `cast` are as in
        `zerojax.restore`, `data` as in `read_extras`. If there is no checkpoint yet, it returns a
        state unchanged; for a plan, `make_state` makes one, so that `resume(plan, make_state)`
        never needs memory for two states.
        """
        _save.check_like(like)
        self.wait()
        step = max(self._manager.all_steps(), default=None) if step is None else step
        _save.agree("Checkpoints.resume", self.directory, step=step)
        if step is not None:
            path = self.directory / str(step)
            state = _save.restore(path, like, keep=keep, ignore=ignore, cast=cast)
            extras = _save.read_extras(path, data=data)
            self._earlier = None
            if extras.step is None:  # saved by another program, or by `zerojax.save` without step=
                tree = _files.tree_in(path)
                items = [entry.name for entry in path.iterdir() if entry.is_dir() and entry != tree]
                if items and tree != path:
                    warn(
                        f"zerojax did not write {path}: it reads the state, but not "
                        f"{', '.join(sorted(items))} beside it. Read these with Orbax, and "
                        f"continue from saved.step, {step}."
                    )
                extras = dataclasses.replace(extras, step=step)
            return state, extras
        if isinstance(like, Plan) and make_state is not None:
            return like.place(make_state), Extras()
        shapes = (isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(like))
        if isinstance(like, Plan) or any(shapes):
            raise ValueError(
                f"{self.directory} has no complete checkpoint, and like= has no values to start "
                "from. Pass a function that makes the state, too: resume(plan, make_state)."
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
        """Saves if `step` is a multiple of `every`, with `force=True`, or after a SIGTERM.

        Call it after each step: the end of the `with` block saves the last one in any case. It
        returns whether it saved, as soon as the next step may donate `state`. `rng`, `data`,
        `metadata` and `plan` are as in `zerojax.save`.
        """
        step = _extras.step_number(step)
        if plan is not None:
            check_plan(plan, "plan=")
        if not self._finish.alive:
            raise ValueError(
                f"step {step} cannot be saved: these Checkpoints of {self.directory} are closed. "
                "Save inside their with block."
            )
        if jax.distributed.is_initialized():  # all processes agree on the step
            self._hold_back(state)
            preempted = self._manager.reached_preemption(step)
        else:
            preempted = self._signalled.is_set()
        due = force or preempted or step % self._every == 0
        if due or not self._checked:  # the first step reports a mistake
            self._check_resumed(step)
            _save.check_leaves(state)
            self._checked = True
        data = getattr(data, "get_state", lambda: data)()  # before it yields the next batch
        item = (step, state, plan, metrics, rng, data, metadata)
        self._last = None if due else item
        if due:
            with _save.ONE_THREAD:
                self._write(item, asked=not preempted)
        if preempted or not self._entered:
            self.wait()
        if preempted:
            _processes.log(f"zerojax: after a SIGTERM, step {step} is saved in {self.directory}")
            raise Preempted(step)
        return due

    def _write(self, item: tuple, asked: bool) -> None:
        """Begins to write a step. One that was not `asked` for may exist, or have no metrics."""
        step, state, plan, metrics, *extras = item
        shapes, best, metrics = padded_shapes(state, plan), self._best, metrics or {}
        ranking = {name: float(metrics[name]) for name in metrics if name == best}
        shared, own = _extras.encoded(step, *extras, metrics=ranking)
        options = {**shared, "shapes": shapes}
        _save.agree("Checkpoints.save", self.directory, state, _save.OWN_DATA, **options)
        self.wait()
        is_there = step in self._manager.all_steps() or step in self.steps()
        if is_there and not asked:
            return
        path = self.directory / str(step)
        if is_there or path.is_file() or any(path.glob("*")):
            raise ValueError(
                f"{path} exists, and nothing is overwritten. Continue from the newest checkpoint "
                "with resume(), remove this one, or give this run its own directory."
            )
        if best is not None and best not in metrics and (asked or metrics):
            raise ValueError(
                f"best={best!r} is not among the metrics {sorted(metrics)}. Pass "
                f"metrics={{{best!r}: ...}} to save."
            )
        args = _save.save_args(self._handler, state, _extras.pack(shared, own), shapes)
        self._rank(step, ranking.get(best))
        with self._cleaned_up():
            self._manager.save(step, args=args, force=True)

    def _rank_saved(self, best: str) -> None:
        for step in self.steps():
            path = self.directory / str(step)
            try:
                self._rank(step, _extras.saved_metric(path, best))
            except (*_files.DAMAGE, OSError, OverflowError) as error:
                self._ranks[step] = None
                warn(
                    f"{best!r} of {path} cannot be read ({error}): step {step} has no rank, and is "
                    "kept until you remove it."
                )

    def _rank(self, step: int, metric: float | None) -> None:
        """Notes a number that is higher for a better step, and lowest for NaN."""
        if metric is not None:
            self._ranks[step] = -math.inf if math.isnan(metric) else self._sign * metric

    def _check_resumed(self, step: int) -> None:
        """Raises before `keep=` removes a checkpoint of an earlier run that is not continued."""
        if self._earlier is not None and (self._keep is not None or step <= self._earlier):
            raise ValueError(
                f"step {step} cannot be saved: {self.directory} has an earlier run, up to step "
                f"{self._earlier}, that was not resumed. Checkpoints of this one would replace its "
                "(keep=), or be among them. Continue it with resume(), give this run its own "
                "directory, or keep all: keep=None, for later steps."
            )

    def _save_last(self, item: tuple) -> None:
        """Saves the last step, which was not a multiple of `every`, at the end of the loop."""
        if any(map(_refusals.is_gone, jax.tree.leaves(item))):
            warn(
                f"the last steps are not saved in {self.directory}: the state of step {item[0]}, "
                "the last that you passed to save, or its rng, was donated since. Call save after "
                "each step."
            )
            return
        _save.check_leaves(item[1])
        with _save.ONE_THREAD:
            self._write(item, asked=False)

    def _hold_back(self, state: PyTree) -> None:
        """Waits until the devices are at most AHEAD steps behind.

        After a SIGTERM to one process, all save after the step that the furthest process has
        dispatched, and JAX lets it dispatch 32.
        """
        arrays = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array) and not is_key(x)]
        mine = [array for array in arrays if array.sharding.addressable_devices]
        if not mine:
            return
        smallest = min(mine, key=lambda array: array.size).addressable_data(0)
        self._ahead.append(jnp.copy(smallest))  # the next step may donate the state
        if len(self._ahead) > AHEAD:
            jax.block_until_ready(self._ahead.popleft())

    @contextlib.contextmanager
    def _cleaned_up(self) -> Iterator[None]:
        """Removes the files of a write in its block that fails."""
        try:
            yield
        except Exception:  # Ctrl-C ends only the waiting, not the write
            _files.remove(_files.unfinished(self.directory))
            self._manager.reload()  # or Orbax counts the failed step as written
            raise
