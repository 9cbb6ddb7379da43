"""Says what work goes on, to whoever watches a terminal or reads a log."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
ON_A_TERMINAL, IN_A_LOG = 1.0, 10.0  # seconds that nobody asks about
WIPE = "\r\x1b[K"


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
def working(doing: str) -> Iterator[None]:
    """Says how many seconds some work has taken, if it takes long. A line on a terminal counts
    them, and is wiped. A log gets a line after 10 seconds, after 20, after 40. Notebooks and tests
    replace stderr, to show it or to judge it: they get none."""
    if sys.stderr is None or sys.stderr is not sys.__stderr__:
        yield
        return
    done = threading.Event()
    stderr = os.dup(2)  # the compiler's goes elsewhere meanwhile
    say = (doing, stderr, sys.stderr.isatty(), done)
    sayer = threading.Thread(target=_say, args=say, daemon=True)
    sayer.start()
    try:
        yield
    finally:
        done.set()
        sayer.join()
        os.close(stderr)


def _say(doing: str, out: int, is_terminal: bool, done: threading.Event) -> None:
    started, passed = time.monotonic(), 0.0
    while not done.wait(ON_A_TERMINAL if is_terminal else max(passed, IN_A_LOG)):
        passed = time.monotonic() - started
        line = f"{doing} ... {passed:.0f} s"
        os.write(out, (f"{WIPE}{line}" if is_terminal else f"zerojax: {line}\n").encode())
    if passed and is_terminal:
        os.write(out, WIPE.encode())
