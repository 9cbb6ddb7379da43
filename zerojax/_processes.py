"""Several processes: finding each other, speaking once, and failing together."""

import atexit
import contextlib
import faulthandler
import functools
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax

from zerojax import _compat

FAILED = "zerojax/failed"  # under which a process that raised says so to the others
GRACE = 5.0  # seconds after which C code ends a process whose threads do not run


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: int | Sequence[int] | None = None,
    heartbeat_timeout_seconds: int = 100,
) -> int:
    """Joins the processes of one run; call it first, and in each of them.

    Without arguments it reads Slurm, Open MPI and Kubernetes as `jax.distributed` does, and the
    variables `MASTER_ADDR`, `MASTER_PORT` (a free one of process 0's host), `WORLD_SIZE` and
    `RANK`; with a `LOCAL_WORLD_SIZE` above 1, a process takes only the device `LOCAL_RANK`. So it
    can be started by hand and by `torchrun --no-python`, whose next port it takes.
    Where there is none of these it leaves one process with all its devices, and says so.

    An uncaught exception in one process ends that one at once, and the others within seconds.

    Arguments:
        coordinator_address, num_processes, process_id, local_device_ids: as in
            `jax.distributed.initialize`.
        heartbeat_timeout_seconds: how long after one process dies the others end too.

    Returns:
        The number of processes.

    Example:
        >>> processes = zerojax.initialize()  # doctest: +SKIP
        zerojax: 4 processes, 16 devices
        >>> rows = zerojax.process_slice(256)  # of the global batch, those to load here
    """
    if jax.distributed.is_initialized():  # by the program itself
        _end_together()
        return jax.process_count()
    given: dict[str, Any] = {
        "coordinator_address": coordinator_address,
        "num_processes": num_processes,
        "process_id": process_id,
        "local_device_ids": local_device_ids,
    }
    explicit = any(value is not None for value in given.values())
    if not explicit and "WORLD_SIZE" in os.environ:
        given = _from_environment(os.environ)
        explicit = True
    try:
        jax.distributed.initialize(**given, heartbeat_timeout_seconds=heartbeat_timeout_seconds)
    except ValueError as error:
        if explicit or not _compat.is_about_cluster(error):
            raise
    count = jax.process_count()
    _end_together()
    log(f"zerojax: {count} process{'es' * (count > 1)}, {jax.device_count()} devices")
    return count


@functools.cache  # once
def _end_together() -> None:
    """After an uncaught exception this process ends at once, and the others soon.

    At exit JAX waits for what runs on the devices and then for all other processes, which wait
    for this one in a collective.
    """
    if jax.process_count() == 1:
        return
    failed, over, before = threading.Event(), threading.Event(), sys.excepthook
    # How often each asks the first process: no more than a hundred times a second in all.
    seconds = max(1.0, jax.process_count() / 100)

    def tell(kind: Any, error: Any, trace: Any) -> None:
        failed.set()
        before(kind, error, trace)
        store, me = _compat.shared_store(), jax.process_index()
        if store is not None:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # keeps what the first told
                store.key_value_set(FAILED, f"process {me} raised {kind.__name__}: {error}")
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                first = store.key_value_try_get(FAILED)
                if not first.startswith(f"process {me} "):
                    say(f"before that, {first}")

    def listen() -> None:
        while not over.wait(seconds) and (store := _compat.shared_store()) is not None:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # nobody told yet
                text = store.key_value_try_get(FAILED)
                if not failed.is_set():
                    say(f"{text}\nProcess {jax.process_index()} ends with it.")
                if (
                    not failed.wait(max(GRACE, 2 * seconds)) and not over.is_set()
                ):  # nor ends by itself
                    os._exit(1)
                return

    def say(text: str) -> None:
        print(f"zerojax: {text}", file=sys.__stderr__ or sys.stderr, flush=True)

    def leave() -> None:  # after what was registered later, before what JAX has
        over.set()
        listener.join(2)
        if failed.is_set():
            if jax.process_index() == 0:
                time.sleep(2 * seconds)  # the others read of it from this process
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    sys.excepthook = tell
    listener = threading.Thread(target=listen, name="zerojax-listener", daemon=True)
    listener.start()
    atexit.register(leave)


def log(*values: Any) -> None:
    """Prints on process 0 alone: what a run has to say, it says once.

    Example:
        >>> zerojax.log("step", 10)
        step 10
    """
    if jax.process_index() == 0:
        print(*values, flush=True)


class Watchdog:
    """Ends the process, saying where it stood, when `alive` was not called for `seconds`.

    A process that hangs makes the others wait in a collective; each ends by its own watchdog.
    `seconds` must cover the longest step, the first one's compilation and a save included.

    Example:
        >>> with zerojax.Watchdog(600) as watchdog:
        ...     for n in range(3):
        ...         watchdog.alive(n)
    """

    def __init__(self, seconds: float) -> None:
        if not isinstance(seconds, int | float) or not 0 < seconds < threading.TIMEOUT_MAX - GRACE:
            raise ValueError(f"Watchdog({seconds!r}): give a positive number of seconds.")
        self.seconds = seconds
        self._done = threading.Event()
        self._last: tuple[float, Any] = (time.monotonic(), None)

    def __enter__(self) -> "Watchdog":
        self._done.clear()
        self.alive()
        threading.Thread(target=self._watch, name="zerojax-watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        faulthandler.cancel_dump_traceback_later()

    def alive(self, step: Any = None) -> None:
        """Starts the time anew; `step` is named in the message."""
        self._last = (time.monotonic(), step)
        faulthandler.dump_traceback_later(
            self.seconds + GRACE, exit=True, file=sys.__stderr__ or sys.stderr
        )

    def _watch(self) -> None:
        while not self._done.wait(max(0.01, self._last[0] + self.seconds - time.monotonic())):
            since, step = self._last
            if time.monotonic() - since >= self.seconds:
                self._end(step)

    def _end(self, step: Any) -> None:
        after = "" if step is None else f" after step {step}"
        stream = sys.__stderr__ or sys.stderr
        print(
            f"zerojax: process {jax.process_index()} of {jax.process_count()} was not alive for "
            f"{self.seconds:g} s{after}. It, or one that it waits for, hangs. Its threads:",
            file=stream,
            flush=True,
        )
        faulthandler.dump_traceback(file=stream)
        os._exit(1)


def _from_environment(env: Any) -> dict[str, Any]:
    needed = ["MASTER_ADDR", "MASTER_PORT", "RANK"]
    needed += ["LOCAL_RANK"] if int(env.get("LOCAL_WORLD_SIZE", 1)) > 1 else []
    missing = [name for name in needed if name not in env]
    if missing:
        raise ValueError(
            f"WORLD_SIZE={env['WORLD_SIZE']} is set and {missing[0]} is not. Set MASTER_ADDR, "
            "MASTER_PORT, WORLD_SIZE and RANK in each process, or pass the arguments."
        )
    shared = int(env.get("LOCAL_WORLD_SIZE", 1)) > 1
    # torchrun says so where its own store listens on the port
    port = int(env["MASTER_PORT"]) + (env.get("TORCHELASTIC_USE_AGENT_STORE") == "True")
    return {
        "coordinator_address": f"{env['MASTER_ADDR']}:{port}",
        "num_processes": int(env["WORLD_SIZE"]),
        "process_id": int(env["RANK"]),
        "local_device_ids": [int(env["LOCAL_RANK"])] if shared else None,
    }
