"""Warnings that point at the user's line."""

import os
import sys
import warnings

import jax

# Where the files are between the user's line and what warns. contextlib runs decorators, and
# threading what a thread does.
PACKAGES = os.path.dirname(os.path.dirname(jax.__file__))
BETWEEN = (
    os.path.dirname(__file__) + os.sep,
    *(f"{PACKAGES}/{name}/" for name in ("jax", "flax", "orbax", "equinox", "haiku", "optax")),
    *(f"{os.path.dirname(os.__file__)}/{name}." for name in ("contextlib", "threading")),
)


def warn(text: str) -> None:
    """Warns of what the nearest line outside of these files calls for.

    Python 3.11 cannot skip files: there a warning names the line of zerojax that warns.
    """
    if sys.version_info >= (3, 12):
        warnings.warn(text, UserWarning, skip_file_prefixes=BETWEEN)
    else:
        warnings.warn(text, UserWarning, stacklevel=2)
