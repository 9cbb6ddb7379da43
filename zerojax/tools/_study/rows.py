"""How many rows a GPU has room for."""

import bisect
import math
from collections.abc import Callable

from zerojax.tools._study.cell import Figures

DOUBLINGS = 14
FIRST = 4  # rows, of each microbatch, that are tried first


def ladder(least: int) -> list[int]:
    """Returns the rows to choose from: every number up to 16, then eight between powers of two."""
    steps = [*range(1, 8), *(step << k for k in range(DOUBLINGS) for step in range(8, 16))]
    return [least * step for step in steps]


def largest(made: Callable[[int], Figures], least: int) -> Figures:
    """Returns the figures of the most rows that fit, a multiple of `least`; of `least` if none do.

    The most rows known to fit and the fewest known not to close in on each other. Tried next are
    those that would fill the GPU if memory grew evenly with the rows.
    """
    steps, tried = ladder(least), dict[int, Figures]()
    fits, fails, at = -1, len(steps), FIRST - 1
    while fails - fits > 1:
        at = min(max(at, fits + 1), fails - 1)
        found = tried[steps[at]] = made(steps[at])
        fits, fails = (at, fails) if found.fits else (fits, at)
        at = bisect.bisect_right(steps, _filling(tried)) - 1
    return tried[steps[max(fits, 0)]]


def _filling(tried: dict[int, Figures]) -> float:
    """Returns the rows that would fill the GPU, by a line through the most that fit and the fewest
    that do not; while all or none fit, through the last two that do, or the state without rows."""
    known = sorted(tried.values(), key=lambda one: one.rows)
    fit, not_fit = [one for one in known if one.fits], [one for one in known if not one.fits]
    near = [*fit[-1:], *not_fit[:1]] if not_fit else fit[-2:]
    points = [(0, near[0].parameters + near[0].optimizer), *((one.rows, one.peak) for one in near)]
    (few, less), (many, more) = points[-2:]
    slope = (more - less) / (many - few)
    return few + (near[0].usable - less) / slope if slope > 0 else math.inf
