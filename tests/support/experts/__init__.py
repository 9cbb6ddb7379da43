"""Losses with experts as their users write them, each for one device: `CASES` has them by name."""

from tests.support.experts import capacity, dropless, loops, modules
from tests.support.experts.table import CASES, KEPT, Case, Row

__all__ = ["CASES", "KEPT", "Case", "Row", "capacity", "dropless", "loops", "modules"]
