"""Losses of sequences as their users write them, each for one device: `CASES` has them by name."""

from tests.support.sequences import attention, encoders, gpts, losses, mixers, recurrent, threads
from tests.support.sequences.table import CASES, GATHERS, SPLIT, UNEVEN, Case, Row

__all__ = [
    "CASES",
    "GATHERS",
    "SPLIT",
    "UNEVEN",
    "Case",
    "Row",
    "attention",
    "encoders",
    "gpts",
    "losses",
    "mixers",
    "recurrent",
    "threads",
]
