"""Says what work goes on, to whoever watches a terminal or reads a log."""

import contextlib
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO, TypeVar

from zerojax import _compat

T = TypeVar("T")
R = TypeVar("R")
ON_A_TERMINAL, IN_A_LOG = 1.0, 10.0  # seconds that nobody asks about
WIPE = "\r\x1b[K"
_TURN = threading.Lock()  # one line at a time


def progress(items: Sequence[T], doing: Callable[[T], str], run: Callable[[T], R]) -> list[R]:
    """Runs each item; a line says what happens to it, and how long the rest may take.

    This is no generator: one that an error leaves would stay open as long as the traceback, and go
    on counting.
    """
    started, results = time.monotonic(), []
    for number, item in enumerate(items, start=1):
        left = (time.monotonic() - started) / max(number - 1, 1) * (len(items) - number + 1)
        rest = f", about {left:.0f} s left" if number > 1 else ""
        with working(doing(item) + (f" ({number}/{len(items)}{rest})" if len(items) > 1 else "")):
            results.append(run(item))
    return results


@contextlib.contextmanager
def working(doing: str, in_lines: bool = False) -> Iterator[None]:
    """Says how many seconds some work has taken, if it takes long, in process 0. A line on a
    terminal counts them, and is wiped. A log gets a line after 10 seconds, after 30, after 90, and
    one at the end. Notebooks and tests replace stderr, to show it or to judge it: they get none.

    What is not asked for, such as a step's compilation, is said in lines, also in notebooks.
    """
    out, is_own, done = sys.stderr, sys.stderr is sys.__stderr__, threading.Event()
    is_silent = _compat.run_of_processes().process_id > 0 or not (is_own or in_lines)
    # So is work inside other work.
    if out is None or is_silent or not _TURN.acquire(blocking=False):
        yield
        return
    counts = not in_lines and out.isatty()
    try:
        with _of_our_own(out) if is_own else contextlib.nullcontext(out) as out:
            sayer = threading.Thread(target=_say, args=(doing, out, counts, done), daemon=True)
            sayer.start()
            try:
                yield
            finally:
                done.set()
                sayer.join()
    finally:
        _TURN.release()


def _of_our_own(out: TextIO) -> TextIO:
    """Returns stderr as a file that keeps nothing back: the compiler's goes elsewhere meanwhile."""
    return io.TextIOWrapper(open(os.dup(2), "wb", 0), out.encoding, write_through=True)


def _say(doing: str, out: TextIO, counts: bool, done: threading.Event) -> None:
    started, passed = time.monotonic(), 0.0
    with contextlib.suppress(OSError, ValueError):  # a full disk, a pipe or file that was closed
        while not done.wait(ON_A_TERMINAL if counts else max(2 * passed, IN_A_LOG)):
            passed = time.monotonic() - started
            line = f"{doing} ... {passed:.0f} s"
            print(f"{WIPE}{line}" if counts else f"zerojax: {line}\n", end="", file=out, flush=True)
        if passed:
            line = f"zerojax: {doing} ... done in {time.monotonic() - started:.0f} s\n"
            print(WIPE if counts else line, end="", file=out, flush=True)
