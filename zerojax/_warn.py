"""Warnings that point at the user's line."""

import sys
import warnings

# Packages whose frames are between the user's line and what warns. contextlib runs decorators, and
# threading what a thread does.
BETWEEN = frozenset(
    {"zerojax", "jax", "flax", "orbax", "equinox", "haiku", "optax", "contextlib", "threading"}
)


def warn(text: str) -> None:
    """Warns of what the nearest line outside of these packages calls for."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and _is_between(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def _is_between(module: str) -> bool:
    return module.partition(".")[0] in BETWEEN
