"""Lets the processes of a run compare what they are about to do, and fail together.

[Note: how calls are compared]
Every call that communicates has a number, in the order in which a process makes them. A call that
nobody has compared yet (a save, the first call of a step) compares all that it depends on before it
moves a byte: `agree`. That takes 1.3 ms on one host, an eighth of a step of 10 ms. So a call that
repeats one only notes a line under its number: `Known`, in 1 us. Twice a second a thread
sends the last lines to the first process, which compares them; `agree` compares them too. Processes
whose lines differ raise in their next call; one that waits for its devices by then, or does not
call again, is ended.
"""

import atexit
import collections
import contextlib
import functools
import hashlib
import json
import os
import platform
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, TypeAlias

import jax
import jaxlib
from jax.sharding import Mesh

from zerojax import _compat

PATIENCE = 30  # seconds after which a process says which process it waits for
MOST_SHOWN = 5  # differences; the rest are counted
MOST_CHARACTERS = 160  # characters of each
EVERY = 0.5  # seconds between two comparisons of lines
REMEMBERED, SENT_LINES = 512, 64  # lines; an asynchronous step is at most some 30 calls ahead
TIME_TO_RAISE = 5.0  # seconds after which a process that does not is ended
IN_ORDER = " Each makes the same calls in the same order, as many steps and evaluations as others."

BEATS = "zerojax/alive/"  # a key for each process, in runs that survive lost processes
ENDED = "zerojax/ended/"  # a key for each process whose program has ended
GONE = "lost"

_meetings: collections.Counter[str] = collections.Counter()  # so far, by channel
# By the key of a process: what it said last, and how many beats of this process ago.
_heard: dict[str, tuple[str, int]] = {}
_lost: set[str] = set()  # the keys of those that are silent


def beat(count: int, most: float) -> None:
    """Tells the others that this process is alive, and notes who has not done so for `most` calls:
    JAX does neither in elastic runs. Calls count, not seconds: this process may have been stopped.
    """
    run = _compat.run_of_processes()
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        run.client.key_value_set(f"{BEATS}{run.process_id}", str(count), allow_overwrite=True)
        for key, said in run.client.key_value_dir_get(BEATS):
            last, ago = _heard.get(key, (said, 0))
            _heard[key] = said, ago + 1 if said == last else 0
            (_lost.add if _heard[key][1] > most else _lost.discard)(key)


def read(key: str) -> str | None:
    """Returns what a process of this run has told the others under a key, if one has."""
    if (store := _compat.shared_store()) is not None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            return store.key_value_try_get(key)
    return None


def write(key: str, text: str) -> None:
    """Tells the others something, unless one has told it before."""
    if (store := _compat.shared_store()) is not None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            store.key_value_set(key, text)


def new_run() -> None:
    """Resets the counts, like the other processes of a new run."""
    for of_run in (_meetings, _heard, _lost, _COMMON):
        of_run.clear()


def note_end() -> None:
    """Tells the others that the program of this process has ended: no call of theirs meets it."""
    write(f"{ENDED}{_compat.run_of_processes().process_id}", "")
    for calls in _COMMON.values():
        with contextlib.suppress(ValueError):  # it ends with this difference
            calls.add("the end of its program")


class _Calls:
    """The last calls that this process makes together with the other `members`."""

    def __init__(self, members: Sequence[int]) -> None:
        self.members = members
        self.key = f"zerojax/calls/{zlib.crc32(repr(members).encode())}"
        # The number of each, a digest of the lines up to it, and its line.
        self.lines: collections.deque[tuple[int, int, str]] = collections.deque(maxlen=REMEMBERED)
        self.lock, self.sent, self.met = threading.Lock(), 0, ""
        self.difference, self.raised = "", threading.Event()

    def add(self, line: str) -> int:
        """Notes a call; returns its number. Raises if a process has made another one before."""
        self.check()
        shown = line.replace("\n", " ")[:MOST_CHARACTERS]
        with self.lock:
            number, digest, _ = self.lines[-1] if self.lines else (0, 0, "")
            self.lines.append((number + 1, zlib.crc32(line.encode(), digest), shown))
        return number + 1

    def check(self) -> None:
        if self.difference:
            self.raised.set()
            raise ValueError(self.difference) from None

    def written(self, count: int) -> str:
        with self.lock:
            return "\n".join(f"{n} {digest} {line}" for n, digest, line in [*self.lines][-count:])

    def exchange(self, store: Any) -> None:
        """Sends the last lines to the first process, which compares those of all."""
        me = _compat.run_of_processes().process_id
        if self.lines and (number := self.lines[-1][0]) != self.sent:
            store.key_value_set(
                f"{self.key}/of/{me}", self.written(SENT_LINES), allow_overwrite=True
            )
            self.sent = number
        if me == self.members[0] and not self.difference:
            ours = _lines(self.written(REMEMBERED))
            for key, text in store.key_value_dir_get(f"{self.key}/of/"):
                other = int(key.rpartition("/")[2])
                if difference := _first_difference(me, other, ours, _lines(text)):
                    store.key_value_set(f"{self.key}/difference", difference)
                    break
        self.difference = store.key_value_try_get(f"{self.key}/difference")
        if not self.raised.wait(1):  # it waits for its devices, and these for others
            print(f"zerojax: {self.difference}", file=sys.stderr, flush=True)
            if not self.raised.wait(TIME_TO_RAISE):
                os._exit(1)


_COMMON: dict[tuple[int, ...], _Calls] = {}  # by the processes that make them together
_OVER = threading.Event()
# Notes a call that all processes have compared, and make again: `_Calls.add`.
Known: TypeAlias = Callable[[], int]


def check_order() -> None:
    """Raises if other processes have made other calls, which may be why one of this one failed."""
    for calls in _COMMON.values():
        until = time.monotonic() + 3 * EVERY
        while not calls.difference and time.monotonic() < until:
            time.sleep(EVERY / 5)
        calls.check()


def agree(
    call: str,
    items: Callable[[], dict[str, str]],
    mesh: Mesh | None = None,
    remedy: str = "",
    ordered: bool = True,
    name: str = "",
) -> Known | None:
    """Raises in every process, and names the difference, if the `items` of one differ.

    The processes that have devices of `mesh`, by default all, call it at the same points of their
    program. A single process does nothing. A call that does not communicate is not `ordered`:
    another thread may place batches. `name` tells calls of one kind apart.
    """
    if not jax.distributed.is_initialized():
        return None
    members = _members(mesh)
    if len(members) == 1 or jax.process_index() not in members:
        return None
    said = {"the call": call + name, **versions()}
    if not ordered:
        keys, calls, known = _meeting(call, members), None, None
    else:
        calls = _COMMON.setdefault(members, _Calls(members))
        if _THREAD.ident is None:
            _THREAD.start()
        number = calls.add(call)
        said["the calls before"] = calls.written(SENT_LINES)
        keys = calls.met, f"{calls.key}/{number}"
        line = f"{call} of call {number}{name}"
        calls.met, known = keys[1], functools.partial(calls.add, line)
    if difference := _difference_between(members, call, {**said, **items()}, *keys, calls):
        if calls is not None:
            calls.raised.set()
        raise ValueError(difference + remedy)
    return known


def _meeting(call: str, members: Sequence[int]) -> tuple[str, str]:
    """Returns the keys of the last meeting of these processes in a call, and of the next one."""
    channel = f"zerojax/{call}/{zlib.crc32(repr(members).encode())}"
    _meetings[channel] += 1
    return f"{channel}/{_meetings[channel] - 1}", f"{channel}/{_meetings[channel]}"


@_compat.device_cache
def _members(mesh: Mesh | None) -> tuple[int, ...]:
    devices = jax.devices() if mesh is None else mesh.devices.flat
    return tuple(sorted({device.process_index for device in devices}))


def _compare_lines() -> None:
    """Compares the calls of the processes, until this one ends."""
    while not _OVER.wait(max(EVERY, _compat.run_of_processes().num_processes / 200)):
        store = _compat.shared_store()
        for calls in [*_COMMON.values()]:
            # There is no difference to get, or no run; lost processes are the listener's affair.
            with contextlib.suppress(jax.errors.JaxRuntimeError, AttributeError):
                calls.exchange(store)


_THREAD = threading.Thread(target=_compare_lines, name="zerojax-calls", daemon=True)
atexit.register(_OVER.set)


def _lines(text: str) -> dict[int, tuple[str, str]]:
    parts = (line.split(" ", 2) for line in text.split("\n") if line)
    return {int(number): (digest, call) for number, digest, call in parts}


def _first_difference(
    a: int, b: int, ours: dict[int, tuple[str, str]], theirs: dict[int, tuple[str, str]]
) -> str:
    common = sorted(ours.keys() & theirs.keys())
    number = next((n for n in common if ours[n][0] != theirs[n][0]), None)
    if number is None:
        return ""
    name = f"call {number}" + " or one before it" * (number == common[0] > 1)
    lines = {name: ours[number][1]}, {name: theirs[number][1]}
    return _message("the order of calls", a, b, *lines) + IN_ORDER


def _difference_between(
    members: Sequence[int],
    call: str,
    said: dict[str, str],
    before: str,
    now: str,
    calls: _Calls | None,
) -> str:
    """Compares once: the first process reads all digests, and the texts of one that differs.

    It uses the store of `jax.distributed`, not the devices: collectives hang or fail exactly when
    processes disagree.
    """
    store, me, first = _compat.shared_store(), jax.process_index(), members[0]
    digest = hashlib.sha256(json.dumps(said).encode()).hexdigest()
    store.key_value_set(f"{now}/digest/{me}", digest)
    if me == first:
        try:
            digests = {one: _read(f"{now}/digest/{one}", one, call, calls) for one in members}
        except jax.errors.JaxRuntimeError:
            store.key_value_set(f"{now}/other", GONE)
            raise
        if before:
            store.key_value_delete(before)  # all have read it
        others = [one for one in members if digests[one] != digest]
        store.key_value_set(f"{now}/other", str(others[0] if others else me))
    answer = _read(f"{now}/other", first, call, calls)
    if answer == GONE:
        raise jax.errors.JaxRuntimeError(f"{call}: the run has lost a process")
    other = int(answer)
    if other == first:
        return ""
    if me == other:
        store.key_value_set(f"{now}/said", json.dumps(said))
    if me == first:
        theirs = json.loads(_read(f"{now}/said", other, call, calls))
        store.key_value_set(f"{now}/difference", _message(call, me, other, said, theirs))
    return _read(f"{now}/difference", first, call, calls)


def told(call: str, text: str, mesh: Mesh) -> dict[int, str]:
    """Returns what each process that has devices of `mesh` says, in all of them.

    As in `agree`, they call it at the same points of their program.
    """
    me, members, store = jax.process_index(), _members(mesh), _compat.shared_store()
    if len(members) == 1:
        return {me: text}
    before, now = _meeting(call, members)
    store.key_value_set(f"{now}/{me}", text)
    said = {one: _read(f"{now}/{one}", one, call) for one in members}
    store.key_value_delete(f"{before}/{me}")  # all that are here have read it
    return said


def _read(key: str, process: int, call: str, calls: _Calls | None = None) -> str:
    """Returns the value that `process` writes, whenever that is: it may still load its data.

    It raises when the process is lost, has ended its program, or has made another call.
    """
    waited = 0
    while True:
        is_lost, has_ended = f"{BEATS}{process}" in _lost, read(f"{ENDED}{process}") is not None
        try:
            return _compat.shared_store().blocking_key_value_get(key, 1000)
        except jax.errors.JaxRuntimeError as error:
            if is_lost or not _compat.said(error, _compat.TIMEOUT):
                raise
        if calls is not None:
            calls.check()
        waited += 1
        if has_ended and waited > 2 * EVERY + 1:  # in numbered calls, their order says more
            raise ValueError(
                f"{call}: process {process} has ended its program, and this one would wait for it "
                "for ever." + IN_ORDER
            )
        if waited % PATIENCE == 0:
            _check_ahead(process, call)
            print(
                f"zerojax: process {_compat.run_of_processes().process_id} has waited {waited} s "
                f"in {call} for process {process}, or for one that this one waits for.",
                file=sys.stderr,
                flush=True,
            )


def _check_ahead(process: int, call: str) -> None:
    """Raises if a process that this one waits for goes on with calls that both make."""
    for calls in _COMMON.values():
        lines = _lines(read(f"{calls.key}/of/{process}") or "")  # it may have made none
        if max(lines, default=0) > (calls.lines[-1][0] if calls.lines else 0):
            raise ValueError(
                f"{call}: process {process} goes on, to {lines[max(lines)][1]}, without what this "
                f"process waits in: a batch of another shape, say.{IN_ORDER}"
            )


def wait_for_all(*, key: str, **_: object) -> None:
    """Waits until all processes are here, for Orbax; raises when one is no longer alive."""
    run, here = _compat.run_of_processes(), f"zerojax/here/{key}"
    _meetings[here] += 1  # Orbax uses a key again
    now = f"{here}/{_meetings[here]}"
    run.client.key_value_set(f"{now}/{run.process_id}", "")
    for process in range(run.num_processes):
        _read(f"{now}/{process}", process, "a save")
    if _meetings[here] > 1:  # all are here, so all have read the one before
        run.client.key_value_delete(f"{here}/{_meetings[here] - 1}/{run.process_id}")


def versions() -> dict[str, str]:
    import zerojax

    return {
        "the version of Python": platform.python_version(),
        "the version of JAX": jax.__version__,
        "the version of jaxlib": jaxlib.__version__,
        "the version of zerojax": zerojax.__version__,
    }


def _message(call: str, a: int, b: int, ours: dict[str, str], theirs: dict[str, str]) -> str:
    differ = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    # Texts of many lines (a program, all leaves of a state) differ because options of one line do.
    words = [name for name in differ if "\n" not in ours.get(name, "") + theirs.get(name, "")]
    lines = [_difference(name, ours.get(name), theirs.get(name), a, b) for name in words or differ]
    if len(lines) > MOST_SHOWN:
        lines[MOST_SHOWN:] = [f"and {len(lines) - MOST_SHOWN} more"]
    shown = "".join(f"\n  {line}" for line in lines)
    return (
        f"{call}: the processes disagree, and would compute wrong numbers or wait for each other "
        f"for ever. Processes {a} and {b} differ in{shown}\n"
        "Start all with the same program, arguments, data and versions."
    )


def _difference(name: str, ours: str | None, theirs: str | None, a: int, b: int) -> str:
    """Shows the first line that differs, from shortly before the difference."""
    pairs = zip_longest((ours or "nothing").split("\n"), (theirs or "nothing").split("\n"))
    pair = next((x or "nothing", y or "nothing") for x, y in pairs if x != y)
    first = next(i for i, (x, y) in enumerate(zip_longest(*pair)) if x != y)
    alike = max(0, first - MOST_CHARACTERS // 2)
    x, y = ("..." * (alike > 0) + text[alike : alike + MOST_CHARACTERS].strip() for text in pair)
    return f"{name}: {x} in process {a}, {y} in process {b}"
