"""Lets the processes of a run find each other, print once, and fail together."""

import atexit
import contextlib
import faulthandler
import functools
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax

from zerojax import _compat
from zerojax._declared import checked
from zerojax._run import agreement as _agreement, programs as _programs
from zerojax._warn import warn

FAILED = "zerojax/failed"  # the key under which a process that raised tells the others
LEFT = "zerojax/left"  # and one whose program has ended
_AGAIN: dict[str, Any] = {}  # arguments with which a process joins a later run
NO_LOSS = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT")  # errors of XLA that no lost process causes
SIZES_OF_RUN = ("WORLD_SIZE", "JAX_NUM_PROCESSES", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
OF_CPUS = "JAX_NUM_CPU_DEVICES"  # JAX emulates as many where there is no GPU
OF_MTLS = "JAX_MTLS_"  # how the variables begin by which JAX encrypts
GRACE = 5.0  # seconds after which C code ends a process whose threads do not run
LONELY = 30.0  # seconds after another's end at which a process says that it goes on
SILENT = 30  # seconds; an elastic run takes no process for lost that is silent for less
LEAVING = 240  # seconds to wait for the end of the others; JAX waits 300 more
PREEMPTED = 128 + signal.SIGTERM  # the status of a process that has saved, as others may yet
# Seconds from `sys.exit(1)` to the end of the program; after more, somebody has caught it.
EXITING = 1.0


@checked
def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: int | Sequence[int] | None = None,
    heartbeat_timeout_seconds: int = 100,
    elastic: bool = False,
    **options: Any,
) -> int:
    """Joins the processes of one run; call it first, and in each of them.

    Without arguments it reads Slurm, Open MPI and Kubernetes like `jax.distributed`, and the
    variables `MASTER_ADDR`, `MASTER_PORT` (a free one on the host of process 0), `WORLD_SIZE` and
    `RANK`; with a `LOCAL_WORLD_SIZE` above 1, a process takes only the device `LOCAL_RANK`, or
    those of `JAX_LOCAL_DEVICE_IDS`. So you can start a run with `zerojax launch`, by hand, or with
    `torchrun --no-python`, whose next port it takes. It reads `JAX_COORDINATOR_ADDRESS`,
    `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID` too. If none of these is set, there is one process with
    all its devices, and the message says so.

    An uncaught exception ends its process at once, and the others within seconds.

    Arguments:
        coordinator_address, num_processes, process_id, local_device_ids: as in
            `jax.distributed.initialize`.
        heartbeat_timeout_seconds: how long after one process dies the others end too.
        elastic: the others continue without it, if `zerojax.run.elastic` runs the training.
        options: others of `jax.distributed.initialize`, such as `mtls_cert_file`, `mtls_key_file`
            and `mtls_ca_file`.

    Returns:
        The number of processes.

    Example:
        >>> processes = zerojax.initialize()  # doctest: +SKIP
        zerojax: 4 processes, 16 devices
        >>> rows = zerojax.run.process_slice(256)  # of the global batch, those to load here
    """
    if jax.distributed.is_initialized():  # by the program itself
        _end_together()
        return jax.process_count()
    _check_known(options)
    if elastic:
        jax.config.update("jax_enable_recoverability", True)
    options |= {"heartbeat_timeout_seconds": heartbeat_timeout_seconds}
    _AGAIN.update(options, local_device_ids=local_device_ids)
    named = {"coordinator_address": coordinator_address, "num_processes": num_processes}
    named |= {"process_id": process_id, "local_device_ids": local_device_ids}
    run: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    run = run or _from_environment(os.environ)
    try:
        jax.distributed.initialize(**run, **options)
    except ValueError as error:
        if run or not _compat.said(error, _compat.NO_CLUSTER):
            raise
    count = jax.process_count()
    _end_together()
    _programs.keep_together()
    _check_devices(os.environ.get(OF_CPUS))
    log(f"zerojax: {count} process{'es' * (count > 1)}, {jax.device_count()} devices")
    return count


def _check_devices(emulated: str | None) -> None:
    """Warns if the program emulates other numbers of devices than its launcher has it do."""
    count = jax.local_device_count("cpu") if emulated and jax.default_backend() == "cpu" else 0
    if count and str(count) != emulated:
        warn(
            f"this process has {count} emulated devices, and its launcher asks for {emulated} "
            f"({OF_CPUS}). Take jax_num_cpu_devices and the device count of XLA_FLAGS out of the "
            "program, or start it with as many devices."
        )


def not_joined() -> str:
    """Returns a message if this process was started as one of several and has not joined them."""
    for name in SIZES_OF_RUN if jax.process_count() == 1 else ():
        count = os.environ.get(name, "")
        if count.isdecimal() and int(count) > 1 and not jax.distributed.is_initialized():
            return (
                f"{name}={count} says that this is one of {count} processes, but it has not joined "
                "the others: each trains by itself. Call zerojax.initialize() first; if this is a "
                f"single process, unset {name}."
            )
    return ""


@functools.cache
def warn_if_not_joined() -> None:
    """Warns once if this process has not joined the others."""
    if text := not_joined():
        warn(text)


def join_again(address: str, count: int, me: int) -> None:
    """Leaves a run for one of fewer processes, when no device is in use any more."""
    while _SHARED_ENDS:
        _SHARED_ENDS.pop().forget()
    _agreement.new_run()
    run = _compat.run_of_processes()
    service, run.service = run.service, None  # the others still need it to leave
    jax.distributed.shutdown()
    jax.distributed.initialize(address, count, me, **_AGAIN)
    if service is not None:
        service.shutdown()
    _end_together()


def _end_together() -> None:
    """Has an uncaught exception end this process at once, and the others soon."""
    if _compat.run_of_processes().num_processes > 1 and not _SHARED_ENDS:
        _SHARED_ENDS.append(_SharedEnd())


class _SharedEnd:
    """Tells the other processes of an uncaught exception or of `sys.exit(1)`, and listens for
    theirs.

    Without it they would hang: at exit, JAX waits for the programs on the devices and then for the
    other processes, which wait for this one in a collective.
    """

    def __init__(self) -> None:
        self.status, self.exited_at = 1, -float("inf")
        self.exit, sys.exit = sys.exit, self.note_exit
        self.failed, self.over, self.has_left = threading.Event(), threading.Event(), False
        # All processes together ask process 0 at most a hundred times a second.
        self.seconds = max(1.0, _compat.run_of_processes().num_processes / 100)
        self.show, sys.excepthook = sys.excepthook, self.tell
        self.listener = threading.Thread(target=self.listen, name="zerojax-listener", daemon=True)
        self.listener.start()
        atexit.register(self.leave)  # runs before JAX's own exit, which was registered earlier

    def note_exit(self, status: object = None) -> NoReturn:
        """Stands in for `sys.exit`: nothing else says at exit with which status a program ends."""
        if status not in (None, 0, PREEMPTED):
            self.status = status if isinstance(status, int) else 1
            self.exited_at = time.monotonic()
        self.exit(status)  # type: ignore

    def tell(self, kind: type, error: BaseException, trace: Any) -> None:
        self.status = 1  # whatever `sys.exit` somebody has caught before
        self.show(kind, error, trace)
        self.tell_others(": ".join(filter(None, [f"raised {kind.__name__}", str(error)])))

    def tell_others(self, what: str) -> None:
        self.failed.set()
        me = f"process {_compat.run_of_processes().process_id} "
        _agreement.write(FAILED, me + what)
        first = _agreement.read(FAILED)
        if first and not first.startswith(me):
            say(f"before that, {first}")

    def listen(self) -> None:
        beats, alone = itertools.count(), 0.0
        silent = max(SILENT, _AGAIN.get("heartbeat_timeout_seconds", 100)) / self.seconds
        while not self.over.wait(self.seconds) and _compat.shared_store() is not None:
            if may_lose_processes():
                _agreement.beat(next(beats), silent)
            elif alone < LONELY and not self.has_left and (left := _agreement.read(LEFT)):
                alone += self.seconds
                if alone >= LONELY:
                    say(
                        f"the program of {left} has ended, and this one goes on. A step would wait "
                        "for it forever: give all processes as many batches."
                    )
            if text := _agreement.read(FAILED):
                if not self.failed.is_set():
                    say(f"{text}\nProcess {_compat.run_of_processes().process_id} ends with it.")
                if not (self.failed.wait(max(GRACE, 2 * self.seconds)) or self.over.is_set()):
                    os._exit(1)
                return

    def forget(self) -> None:
        """Stops telling and listening."""
        sys.excepthook, sys.exit = self.show, self.exit
        atexit.unregister(self.leave)
        self.over.set()
        self.listener.join(2)

    def leave(self) -> None:
        run = _compat.run_of_processes()
        if not self.failed.is_set():
            if time.monotonic() - self.exited_at < EXITING:
                self.tell_others(f"ended with status {self.status}")
            else:
                _agreement.write(LEFT, f"process {run.process_id}")
                _agreement.note_end()
                with contextlib.suppress(jax.errors.JaxRuntimeError):  # JAX waits on, or aborts
                    self.wait_for_all()
        self.over.set()
        self.listener.join(2)
        if self.failed.is_set():
            if run.process_id == 0:
                time.sleep(2 * self.seconds)  # the others still read the store in this process
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self.status)

    def wait_for_all(self) -> None:
        """Waits until the programs of all have ended, as JAX does next. If one raises meanwhile,
        the listener ends this process, and says why."""
        run, self.has_left = _compat.run_of_processes(), True
        if not may_lose_processes():
            if run.client is not None:
                run.client.wait_at_barrier(LEFT, 1000 * LEAVING)
        elif run.service is not None:
            # JAX does not wait for the others at exit here, and they need process 0 to leave.
            run.client.get_live_nodes(list(range(run.num_processes)))


def may_lose_processes() -> bool:
    """Whether the run continues when it loses a process."""
    return bool(jax.config.values["jax_enable_recoverability"])


def may_be_of_a_loss(error: BaseException) -> bool:
    """Whether a lost process may have caused an error, in a run that can continue without it."""
    causes = [each for each in chain(error) if _compat.is_of_runtime(each)]
    return may_lose_processes() and not all(str(each).startswith(NO_LOSS) for each in causes)


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yields an error, and all that led to it."""
    todo: list[BaseException | None] = [error]
    seen: list[BaseException] = []
    while todo:
        if (one := todo.pop()) is not None and one not in seen:
            seen.append(one)
            todo += [one.__cause__, one.__context__]
            yield one


_SHARED_ENDS: list[_SharedEnd] = []  # at most one


def say(text: str) -> None:
    print(f"zerojax: {text}", file=sys.__stderr__ or sys.stderr, flush=True)


def log(*values: object) -> None:
    """Prints only in process 0, so that a run says everything once.

    Example:
        >>> zerojax.run.log("step", 10)
        step 10
    """
    if jax.process_index() == 0:
        print(*values, flush=True)


@contextlib.contextmanager
def noting_sigterm(signalled: threading.Event) -> Iterator[None]:
    """Sets an event on SIGTERM. With jax.distributed, JAX itself tells all processes."""
    in_main = threading.current_thread() is threading.main_thread()
    if jax.distributed.is_initialized() or not in_main:
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: signalled.set())
    try:
        yield
    finally:
        # The garbage collector may run this in a thread that cannot set signal handlers.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


class Watchdog:
    """Ends the process and prints its threads if nothing calls `alive` for `seconds`.

    A process that hangs makes the others wait in a collective; each is ended by its own watchdog.
    `seconds` must cover the longest step, including the first one's compilation and a save.

    Example:
        >>> with zerojax.run.Watchdog(600) as watchdog:
        ...     for n in range(3):
        ...         watchdog.alive(n)
    """

    def __init__(self, seconds: float) -> None:
        if not isinstance(seconds, int | float) or not 0 < seconds < threading.TIMEOUT_MAX - GRACE:
            raise ValueError(f"Watchdog({seconds!r}): pass a positive number of seconds.")
        self.seconds = seconds
        self._over = threading.Event()
        self._last: tuple[float, object] = (0.0, None)  # when `alive` was called, with which step

    def __enter__(self) -> "Watchdog":
        self.alive()
        self._over = threading.Event()
        threading.Thread(target=self._watch, args=(self._over,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        faulthandler.cancel_dump_traceback_later()

    def alive(self, step: object = None) -> None:
        """Restarts the clock; the message names `step`."""
        self._last = (time.monotonic(), step)
        # C code ends the process if Python's threads hang, too.
        stderr = sys.__stderr__ or sys.stderr
        faulthandler.dump_traceback_later(self.seconds + GRACE, exit=True, file=stderr)

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(max(0.01, self._last[0] + self.seconds - time.monotonic())):
            since, step = self._last
            if time.monotonic() - since < self.seconds:
                continue
            after = "" if step is None else f" after step {step}"
            say(
                f"process {jax.process_index()} of {jax.process_count()} was not alive for "
                f"{self.seconds:g} s{after}. This process hangs, or one that it waits for. Its "
                "threads:"
            )
            faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr)
            sys.stdout.flush()
            os._exit(1)


def _check_known(options: Iterable[str]) -> None:
    """Raises for options that JAX does not have, so that nobody takes a run for encrypted."""
    names = [name for name in os.environ if name.startswith(OF_MTLS)]
    asked = {name: f"{name}=" for name in options}
    asked |= {name.removeprefix("JAX_").lower(): f"the variable {name}" for name in names}
    for name in sorted(asked.keys() - _compat.distributed_options()):
        raise ValueError(
            f"zerojax.initialize: jax.distributed.initialize of JAX {jax.__version__} has no "
            f"{name}. Leave out {asked[name]}, or install a JAX that has it."
        )


def _from_environment(env: Mapping[str, str]) -> dict[str, Any]:
    """Returns the arguments of `jax.distributed.initialize` from the variables of torchrun, or from
    those that JAX has names for."""
    if "WORLD_SIZE" in env:
        shared = int(env.get("LOCAL_WORLD_SIZE", 1)) > 1 and "JAX_LOCAL_DEVICE_IDS" not in env
        needed = ["MASTER_ADDR", "MASTER_PORT", "RANK", *(["LOCAL_RANK"] if shared else [])]
        _check_set(env, "WORLD_SIZE", needed)
        # torchrun sets this if its own store listens on the port.
        port = int(env["MASTER_PORT"]) + (env.get("TORCHELASTIC_USE_AGENT_STORE") == "True")
        return {
            "coordinator_address": f"{env['MASTER_ADDR']}:{port}",
            "num_processes": int(env["WORLD_SIZE"]),
            "process_id": int(env["RANK"]),
            "local_device_ids": [int(env["LOCAL_RANK"])] if shared else None,
        }
    if "JAX_NUM_PROCESSES" in env:
        _check_set(env, "JAX_NUM_PROCESSES", ["JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_ID"])
        count, me = int(env["JAX_NUM_PROCESSES"]), int(env["JAX_PROCESS_ID"])
        return {"num_processes": count, "process_id": me}  # JAX itself reads the address
    return {}


def _check_set(env: Mapping[str, str], count: str, needed: Sequence[str]) -> None:
    if missing := [name for name in needed if name not in env]:
        raise ValueError(
            f"{count}={env[count]} is set, but {missing[0]} is not. Set {', '.join(needed)} and "
            f"{count} in each process, or pass the arguments."
        )
