"""Continues a run with the remaining processes when others are lost, without a restart."""

import gc
import socket
import time
import traceback
import weakref
from collections.abc import Callable
from concurrent import futures
from typing import TypeVar

from jax.extend import backend

from zerojax import _compat
from zerojax._declared import checked
from zerojax._run import agreement as _agreement, processes as _processes

Result = TypeVar("Result")
RAISED, DONE = "failed", "done"
MEETING = 60_000  # milliseconds for the first process to name an address
COLLECTIONS = 4  # as in JAX itself: objects that one frees let the next free more


@checked
def elastic(train: Callable[[], Result], *, at_least: int = 1) -> Result:
    """Runs `train`, and runs it again with the remaining processes whenever some are lost.

    Call it in every process, after `zerojax.initialize(elastic=True)`. When a process ends or its
    host fails, the collectives of the others fail. They release their devices, find each other
    again, number themselves from 0 without gaps, and call `train` again. It makes its mesh, plan
    and state over `jax.devices()`, which are fewer now, and continues from the newest checkpoint.
    So `train` must make all of its arrays itself; arrays from outside are lost, and keep their
    memory.

    It raises other errors, and errors after which all processes are still there. All processes end
    with process 0, through which they find each other.

    Arguments:
        train: the training, from its mesh to its end.
        at_least: with fewer processes than this, it raises instead of continuing.

    Returns:
        The result of `train`.

    Example:
        >>> processes = zerojax.initialize(elastic=True)  # doctest: +SKIP
        >>> def train():
        ...     state = zerojax.shard_train_state({"params": {"w": jnp.ones((64, 16))}}, stage=3)
        ...     return len(jax.devices())  # with zerojax.Checkpoints, from the newest
        >>> print(zerojax.run.elastic(train))
        8
    """
    if not isinstance(at_least, int) or at_least < 1:
        raise ValueError(f"elastic(at_least={at_least!r}): pass a number of processes, 1 or more.")
    run = _compat.run_of_processes()
    if run.num_processes > 1 and not _processes.may_lose_processes():
        raise RuntimeError(
            "elastic: this run ends with the first process that it loses. Start it with "
            "zerojax.initialize(elastic=True), before anything asks for devices."
        )
    while True:
        outcome = _attempt(train)
        if run.num_processes == 1:
            return outcome.result()
        clients = [weakref.ref(client) for client in backend.backends().values()]
        if failure := outcome.exception():
            # This frees all arrays and closes the connections to other processes. Their collectives
            # then fail too: they may wait for this process, not for the lost one.
            for error in _processes.chain(failure):
                traceback.clear_frames(error.__traceback__)
            forget_devices(clients)
        # All live processes meet, and say whether one of them failed.
        key = "zerojax/elastic/{}".format
        said = RAISED if failure else DONE
        run.client.key_value_set(key(run.process_id), said, allow_overwrite=True)
        left = sorted(run.client.get_live_nodes(list(range(run.num_processes))))
        one_failed = any(run.client.key_value_try_get(key(n)) == RAISED for n in left)
        # All are here, or all were done, or one ended with its own error.
        if len(left) == run.num_processes or not one_failed or _agreement.read(_processes.FAILED):
            return outcome.result()
        if len(left) < at_least:
            raise RuntimeError(
                f"elastic: {len(left)} of {run.num_processes} processes are left, but "
                f"at_least={at_least}."
            ) from failure
        del failure, outcome
        _join_again(left, clients)


def _attempt(train: Callable[[], Result]) -> futures.Future[Result]:
    outcome = futures.Future()
    try:
        outcome.set_result(train())
    except Exception as error:
        if not _processes.may_be_of_a_loss(error):
            raise
        outcome.set_exception(error)
    return outcome


def forget_devices(clients: list[weakref.ref]) -> None:
    """Ends the backend. Its clients keep their connections and memory while anything holds one of
    its devices."""
    for cached in _compat.caches_of_a_run():
        cached.cache_clear()
    backend.clear_backends()
    for seconds in range(COLLECTIONS):
        gc.collect()
        if all(client() is None for client in clients):
            return
        time.sleep(seconds)  # the thread of a save may still end
    _processes.say(
        "elastic: something outside train() holds arrays or devices. Their memory stays taken, "
        "and other processes may wait for ever. Make all of them inside."
    )


def _join_again(left: list[int], clients: list[weakref.ref]) -> None:
    """Starts a run of the remaining processes, with its own address and store."""
    run, key = _compat.run_of_processes(), "zerojax/elastic/address"
    me, count = run.process_id, run.num_processes
    if me == left[0]:
        host = run.coordinator_address.rpartition(":")[0]
        with socket.socket() as free:
            free.bind(("", 0))
            run.client.key_value_set(key, f"{host}:{free.getsockname()[1]}")
    address = run.client.blocking_key_value_get(key, MEETING)
    forget_devices(clients)
    _processes.join_again(address, len(left), left.index(me))
    lost = ", ".join(str(number) for number in range(count) if number not in left)
    _processes.log(f"zerojax: lost process {lost} of {count}, and continues with {len(left)}")
