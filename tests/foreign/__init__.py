"""Programs of other libraries. None knows of zerojax."""

import functools
from collections.abc import Callable

from tests.foreign import flax_sources, libraries, texts
from tests.foreign.program import Program

LIGHT: dict[str, Callable[[], Program]] = libraries.LIGHT
HEAVY: dict[str, Callable[[], Program]] = libraries.HEAVY
PORTED: dict[str, Callable[[], Program]] = flax_sources.PROGRAMS | texts.PROGRAMS


@functools.cache
def program(name: str) -> Program:
    return (LIGHT | HEAVY | PORTED)[name]()
