"""A line on a terminal that says what long work is at; nothing where nobody watches."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
PATIENCE = 1.0  # seconds that need no explanation
WIPE = "\r\x1b[K"


def progress(items: Sequence[T], doing: Callable[[T], str]) -> Iterator[T]:
    """The items, each with a line that says what is done to it, how many there are, and how long
    the rest may take."""
    started = time.monotonic()
    for number, item in enumerate(items, start=1):
        left = (time.monotonic() - started) / max(number - 1, 1) * (len(items) - number + 1)
        rest = f", about {left:.0f} s left" if number > 1 else ""
        with working(doing(item) + (f" ({number}/{len(items)}{rest})" if len(items) > 1 else "")):
            yield item


@contextlib.contextmanager
def working(doing: str) -> Iterator[None]:
    """A line that counts the seconds of what is done inside, where it takes more than one."""
    if not sys.stderr.isatty():
        yield
        return
    done = threading.Event()
    terminal = os.dup(2)  # the compiler's standard error goes elsewhere meanwhile
    counter = threading.Thread(target=_count, args=(doing, terminal, done), daemon=True)
    counter.start()
    try:
        yield
    finally:
        done.set()
        counter.join()
        os.close(terminal)


def _count(doing: str, terminal: int, done: threading.Event) -> None:
    started, shown = time.monotonic(), False
    while not done.wait(PATIENCE):
        line = f"{WIPE}{doing} ... {time.monotonic() - started:.0f} s"
        os.write(terminal, line.encode())
        shown = True
    if shown:
        os.write(terminal, WIPE.encode())
