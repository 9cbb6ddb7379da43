"""Losses with experts as their users write them, each for one device: `CASES` has them by name."""

from tests.support.experts import dropless
from tests.support.experts.table import CASES, KEPT, Case, Row

__all__ = ["CASES", "KEPT", "Case", "Row", "dropless"]
