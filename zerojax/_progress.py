"""Says what work goes on, to whoever watches a terminal or reads a log."""

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
Say = Callable[[str, int, threading.Event], None]
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
def _beside(on_a_terminal: Say, in_a_log: Say, text: str) -> Iterator[None]:
    """Runs one of two functions beside the work, with a descriptor of standard error."""
    if not text or sys.stderr is None or sys.stderr is not sys.__stderr__:
        yield
        return
    say = on_a_terminal if sys.stderr.isatty() else in_a_log
    done = threading.Event()
    stderr = os.dup(2)  # the compiler's goes elsewhere meanwhile
    sayer = threading.Thread(target=say, args=(text, stderr, done), daemon=True)
    sayer.start()
    try:
        yield
    finally:
        done.set()
        sayer.join()
        os.close(stderr)


def _count(doing: str, terminal: int, done: threading.Event) -> None:
    started, shown = time.monotonic(), False
    while not done.wait(ON_A_TERMINAL):
        os.write(terminal, f"{WIPE}{doing} ... {time.monotonic() - started:.0f} s".encode())
        shown = True
    if shown:
        os.write(terminal, WIPE.encode())


def _note(doing: str, log: int, done: threading.Event) -> None:
    passed = 0.0
    while not done.wait(max(passed, IN_A_LOG)):
        passed += max(passed, IN_A_LOG)
        os.write(log, f"zerojax: {doing} ... {passed:.0f} s\n".encode())


def _hint(hint: str, out: int, done: threading.Event) -> None:
    """Writes a line, on a terminal in the place of the one that counts, which goes on below."""
    if not done.wait(IN_A_LOG):
        os.write(out, f"{WIPE if os.isatty(out) else ''}zerojax: {hint}\n".encode())


# Says how many seconds some work has taken, if it takes long. A line on a terminal counts them, and
# is wiped. A log gets a line after 10 seconds, after 20, after 40. Notebooks and tests replace
# stderr, to show it or to judge it: they get none.
working = functools.partial(_beside, _count, _note)
# Says once what would make some work shorter, if it takes long.
hinting = functools.partial(_beside, _hint, _hint)
