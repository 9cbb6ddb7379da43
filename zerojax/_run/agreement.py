"""Lets the processes of a run compare what they are about to do, and fail together."""

import collections
import contextlib
import hashlib
import json
import platform
import sys
import zlib
from collections.abc import Callable, Sequence
from itertools import zip_longest

import jax
import jaxlib
from jax.sharding import Mesh

from zerojax import _compat

PATIENCE = 30  # seconds after which a process says which process it waits for
MOST_SHOWN = 5  # differences; the rest are counted
MOST_CHARACTERS = 160  # characters of each

BEATS = "zerojax/alive/"  # a key for each process, in runs that survive lost processes
LOST = 60  # seconds without a beat
GONE = "lost"

_meetings: collections.Counter[str] = collections.Counter()  # so far, by channel


def beat(count: int) -> None:
    """Tells the others that this process is alive: JAX does not do so in elastic runs."""
    run = _compat.run_of_processes()
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        run.client.key_value_set(f"{BEATS}{run.process_id}", str(count), allow_overwrite=True)


def new_run() -> None:
    """Resets the counts, like the other processes of a new run."""
    _meetings.clear()


def agree(
    call: str, items: Callable[[], dict[str, str]], mesh: Mesh | None = None, remedy: str = ""
) -> None:
    """Raises in every process, and names the difference, if the `items` of one differ.

    The processes that have devices of `mesh`, by default all, call it at the same points of their
    program. A single process does nothing.
    """
    if not jax.distributed.is_initialized():
        return
    devices = jax.devices() if mesh is None else mesh.devices.flat
    members = sorted({device.process_index for device in devices})
    if len(members) == 1 or jax.process_index() not in members:
        return
    if difference := _difference_between(members, call, {**versions(), **items()}):
        raise ValueError(difference + remedy)


def _difference_between(members: Sequence[int], call: str, said: dict[str, str]) -> str:
    """Compares once: the first process reads all digests, and the texts of one that differs.

    It uses the store of `jax.distributed`, not the devices: collectives hang or fail exactly when
    processes disagree.
    """
    # Each kind of call counts its own meetings, because another thread may place batches.
    channel = f"zerojax/{call}/{zlib.crc32(repr(members).encode())}"
    before, now = (f"{channel}/{_meetings[channel] + n}" for n in (0, 1))
    _meetings[channel] += 1
    store, me, first = _compat.shared_store(), jax.process_index(), members[0]
    digest = hashlib.sha256(json.dumps(said).encode()).hexdigest()
    store.key_value_set(f"{now}/digest/{me}", digest)
    if me == first:
        try:
            digests = {one: _read(f"{now}/digest/{one}", one, call) for one in members}
        except jax.errors.JaxRuntimeError:
            store.key_value_set(f"{now}/other", GONE)
            raise
        store.key_value_delete(before)  # all have read it
        others = [one for one in members if digests[one] != digest]
        store.key_value_set(f"{now}/other", str(others[0] if others else me))
    answer = _read(f"{now}/other", first, call)
    if answer == GONE:
        raise jax.errors.JaxRuntimeError(f"{call}: the run has lost a process")
    other = int(answer)
    if other == first:
        return ""
    if me == other:
        store.key_value_set(f"{now}/said", json.dumps(said))
    if me == first:
        theirs = json.loads(_read(f"{now}/said", other, call))
        store.key_value_set(f"{now}/difference", _message(call, me, other, said, theirs))
    return _read(f"{now}/difference", first, call)


def told(call: str, text: str, mesh: Mesh) -> dict[int, str]:
    """Returns what each process that has devices of `mesh` says, in all of them.

    As in `agree`, they call it at the same points of their program.
    """
    me = jax.process_index()
    members = sorted({device.process_index for device in mesh.devices.flat})
    if len(members) == 1:
        return {me: text}
    channel = f"zerojax/{call}/{zlib.crc32(repr(members).encode())}"
    before, now = (f"{channel}/{_meetings[channel] + n}" for n in (0, 1))
    _meetings[channel] += 1
    store = _compat.shared_store()
    store.key_value_set(f"{now}/{me}", text)
    said = {one: _read(f"{now}/{one}", one, call) for one in members}
    store.key_value_delete(f"{before}/{me}")  # all that are here have read it
    return said


def _read(key: str, process: int, call: str) -> str:
    """Returns the value that `process` writes, whenever that is: it may still load its data.

    It raises when the process no longer says that it is alive.
    """
    waited, quiet, beat = 0, 0, None
    while True:
        try:
            return _compat.shared_store().blocking_key_value_get(key, PATIENCE * 1000)
        except jax.errors.JaxRuntimeError as error:
            last, beat = beat, _beat_of(process)
            quiet = quiet + PATIENCE if beat is not None and beat == last else 0
            waited += PATIENCE
            if _compat.TIMEOUT not in str(error) or quiet >= LOST:
                raise
        print(
            f"zerojax: process {_compat.run_of_processes().process_id} has waited {waited} s in "
            f"{call} for process {process}, or for one that this one waits for.",
            file=sys.stderr,
            flush=True,
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


def _beat_of(process: int) -> str | None:
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # it has no beat yet
        return _compat.shared_store().key_value_try_get(f"{BEATS}{process}")
    return None


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
    names = words or differ
    lines = [_difference(name, ours.get(name), theirs.get(name), a, b) for name in names]
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
