"""Programs of other libraries. None knows of zerojax."""

import functools
from collections.abc import Callable

from tests.foreign import flax_sources, libraries, packages, texts, turns
from tests.foreign.program import Program, Turns

LIGHT: dict[str, Callable[[], Program]] = libraries.LIGHT
HEAVY: dict[str, Callable[[], Program]] = libraries.HEAVY
PACKAGES: dict[str, Callable[[], Program]] = packages.PROGRAMS
PORTED: dict[str, Callable[[], Program]] = flax_sources.PROGRAMS | texts.PROGRAMS
TURNS: dict[str, Callable[[], Turns]] = turns.PROGRAMS


@functools.cache
def program(name: str) -> Program:
    return (LIGHT | HEAVY | PACKAGES | PORTED)[name]()
