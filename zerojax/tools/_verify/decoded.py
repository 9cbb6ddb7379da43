"""The numbers that an optimizer's state of 8 bits stands for, in float32, to compare two states.

Gain: a master is compared as precisely as it is kept, and not as a bfloat16 weight, which is 500
times less. Costs 40 lines, and one more copy of masters and moments on the device that replays.
"""

from collections.abc import Mapping
from typing import TypeAlias

import jax
import numpy as np

from zerojax._plan import encodings as _encodings, roles as _roles
from zerojax._plan.padding import unpadded
from zerojax._plan.plan import Plan
from zerojax._plan.roles import AS_MOMENT, AS_WEIGHT, CORRECTION, SCALES
from zerojax._state import state as _state
from zerojax._types import PyTree

# How far apart two numbers may be that were rounded at random: two steps between corrections; two
# neighbouring codes, and numbers below the smallest one of their block, all relative.
MASTERS_APART = 2 * _encodings.STEP * 2.0**-23
MOMENTS_APART, LEAST_CODE = 1 / 4, 2.0**-15

# Masters and moments that a state keeps in two leaves, as a table of comparisons names them: the
# names of their leaves, by role.
InTwoLeaves: TypeAlias = dict[str, Mapping[str, str]]


def numbers_of(plan: Plan) -> InTwoLeaves:
    numbers: InTwoLeaves = {}
    _, roles = _roles.names_of(leaf.path for leaf in plan.leaves)
    for parts in roles.values():
        if CORRECTION in parts:
            numbers[f"{parts[AS_WEIGHT]} (master)"] = parts
        elif SCALES in parts:
            numbers[f"{parts[AS_MOMENT]} (decoded)"] = parts
    return numbers


def by_name(state: PyTree, plan: Plan, numbers: InTwoLeaves) -> dict[str, jax.Array]:
    """Returns the leaves of a state, which may be padded, and these numbers without padding. A
    number is missing if one of its leaves is, or has another shape."""
    values = {leaf.name: leaf.value for leaf in _state.leaves_of(state)}
    shapes = {leaf.path: (leaf.shape, leaf.padded_shape) for leaf in plan.leaves}
    decoded = {}
    for path, parts in numbers.items():
        if all(np.shape(values.get(name)) in shapes[name] for name in parts.values()):
            whole = {name: np.asarray(values[name]) for name in parts.values()}
            logical: PyTree = {k: unpadded(whole[n], shapes[n][0]) for k, n in parts.items()}
            decoded[path] = _roles.number_of(logical)
    return values | decoded


def apart(parts: Mapping[str, str], wanted: np.ndarray) -> np.ndarray:
    """Returns how far rounding at random may put each element of a number from these."""
    size = np.abs(np.nan_to_num(wanted))
    if CORRECTION in parts:
        return MASTERS_APART * size
    return MOMENTS_APART * size + LEAST_CODE * np.max(size, axis=-1, keepdims=True, initial=0)
