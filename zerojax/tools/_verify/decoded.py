"""The numbers that an optimizer's state of 8 bits stands for, in float32, to compare two states.

Gain: a master is compared as precisely as it is kept, and not as a bfloat16 weight, which is 500
times less. Costs 70 lines, and one more copy of masters and moments on the device that replays.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import numpy as np

from zerojax._plan import encodings as _encodings, roles as _roles
from zerojax._plan.padding import unpadded
from zerojax._plan.roles import AS_MOMENT, AS_WEIGHT, CORRECTION, SCALES
from zerojax._state import state as _state
from zerojax._state.state import OPT_STATE, PARAMS
from zerojax._types import PyTree, Shape

# How far apart two numbers may be that were rounded at random: two steps between corrections; two
# neighbouring codes, and numbers below the smallest one of their block, all relative.
MASTERS_APART = 2 * _encodings.STEP * 2.0**-23
MOMENTS_APART, LEAST_CODE = 1 / 4, 2.0**-15


class InTwoLeaves(NamedTuple):
    """An array in two leaves, by their roles, and how a table of comparisons names it."""

    path: str
    kind: str
    leaves: Mapping[str, str]

    def of(self, values: Mapping[str, PyTree]) -> jax.Array:
        return _roles.number_of({role: values[name] for role, name in self.leaves.items()})

    def apart(self, wanted: np.ndarray) -> np.ndarray:
        """Returns how far rounding at random may put each element from these."""
        size = np.abs(np.nan_to_num(wanted))
        if self.kind == PARAMS:
            return MASTERS_APART * size
        return MOMENTS_APART * size + LEAST_CODE * np.max(size, axis=-1, keepdims=True, initial=0)


def numbers_in(state: PyTree) -> list[InTwoLeaves]:
    """Returns the masters and moments that a state keeps in two leaves."""
    numbers = []
    for parts in _roles.names_of(leaf.name for leaf in _state.leaves_of(state)).roles.values():
        if CORRECTION in parts:
            numbers.append(InTwoLeaves(f"{parts[AS_WEIGHT]} (master)", PARAMS, parts))
        elif SCALES in parts:
            numbers.append(InTwoLeaves(f"{parts[AS_MOMENT]} (decoded)", OPT_STATE, parts))
    return numbers


def decoded(state: PyTree, numbers: list[InTwoLeaves]) -> list[jax.Array]:
    """Returns these numbers of a state without padding."""
    values = {leaf.name: leaf.value for leaf in _state.leaves_of(state)}
    return [number.of(values) for number in numbers]


def seen(
    state: PyTree, numbers: list[InTwoLeaves], shapes: Mapping[str, tuple[Shape, Shape]]
) -> Iterator[np.ndarray | None]:
    """Yields these numbers of a state whose leaves may rest padded; None where a leaf is missing or
    has another shape. `shapes` are those of leaves without and with padding."""
    values = {leaf.name: leaf.value for leaf in _state.leaves_of(state)}
    for number in numbers:
        if all(np.shape(values.get(name)) in shapes[name] for name in number.leaves.values()):
            found = {
                n: unpadded(np.asarray(values[n]), shapes[n][0]) for n in number.leaves.values()
            }
            yield np.asarray(number.of(found))
        else:
            yield None
