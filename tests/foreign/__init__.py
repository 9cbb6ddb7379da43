"""Programs of other libraries. None knows of zerojax."""

import functools

from tests.foreign import flax_sources, libraries, packages, texts, turns
from tests.foreign.program import Program

LIGHT, HEAVY, PACKAGES = libraries.LIGHT, libraries.HEAVY, packages.PROGRAMS
PORTED = flax_sources.PROGRAMS | texts.PROGRAMS
TURNS = turns.td3


@functools.cache
def program(name: str) -> Program:
    return (LIGHT | HEAVY | PACKAGES | PORTED)[name]()
