"""A line on a terminal that says how far long work is; nothing where nobody watches."""

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
PATIENCE = 1.0  # seconds that need no explanation


def progress(items: Sequence[T], doing: str) -> Iterator[T]:
    """The items; on a terminal, once a second has passed, with a line that counts them."""
    started, shown = time.monotonic(), False
    for number, item in enumerate(items, start=1):
        elapsed = time.monotonic() - started
        if sys.stderr.isatty() and (elapsed > PATIENCE or number == 1 < len(items)):
            left = elapsed / max(number - 1, 1) * (len(items) - number + 1)
            eta = f", {left:.0f} s left" if number > 1 else ""
            print(
                f"\r\x1b[K{doing} {number}/{len(items)}{eta}", end="", file=sys.stderr, flush=True
            )
            shown = True
        yield item
    if shown:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
