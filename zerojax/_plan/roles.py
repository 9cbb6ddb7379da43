"""What the leaves of a state are, whose masters and moments rest in other dtypes: their roles.

A role is a field of the states in `kept.py`, or what the field `inner` keeps. In a state, the types
of its nodes tell. In files, only the names do. The parts of a number are leaves, by their roles.
"""

import collections
from collections.abc import Iterable, Mapping

import jax
import optax
from jax import Array
from jax.typing import DTypeLike

from zerojax._plan import encodings as _encodings
from zerojax._plan.kept import KEEPS_MASTERS, KEEPS_MOMENTS, CodedState
from zerojax._plan.precision import CODES, is_float
from zerojax._state.state import OPT_STATE, PARAMS
from zerojax._types import PyTree

MASTER, CORRECTION, SCALES, UPDATES = "master", "correction", "scales", "count"
CODED, WIDE = "codes", "wide"  # in a state
AS_WEIGHT, AS_MOMENT = "weight", "moment"  # in files
PARTS = MASTER, AS_WEIGHT, AS_MOMENT, UPDATES, CORRECTION, SCALES  # the first has the whole shape
# What names in files the states have; without `inner`, of an optimizer without state.
WRAPPERS = {frozenset(kind._fields): kind for kind in KEEPS_MASTERS + KEEPS_MOMENTS}
WRAPPERS |= {frozenset(kind._fields) - {"inner"}: kind for kind in KEEPS_MASTERS}
FIELDS = {PARAMS: PARAMS, "0": PARAMS, OPT_STATE: OPT_STATE, "1": OPT_STATE}  # of a whole state


def roles_of(tree: PyTree) -> list[str]:
    """Returns, for each leaf, what it is of an optimizer state in 8 bits: one of these roles.

    It is WIDE if it is a float array beside codes, and "" if it is none of these.
    """
    kinds, roles = (*KEEPS_MASTERS, CodedState), list[str]()
    for node in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kinds)):
        fields = node._asdict() if isinstance(node, kinds) else {"": node}
        for field, part in fields.items():
            if field != "inner":
                roles += ["" if field == UPDATES else field] * len(jax.tree.leaves(part))
                continue
            inside, (leaves, treedef) = roles_of(part), jax.tree.flatten(part)
            if isinstance(node, CodedState):
                for k, scale in enumerate(treedef.flatten_up_to(node.scales)):
                    is_wide = is_float(leaves[k]) and leaves[k].shape
                    beside = WIDE if is_wide else ""
                    is_coded = not isinstance(scale, optax.MaskedNode)
                    inside[k] = inside[k] or (CODED if is_coded else beside)
            roles += inside
    return roles


def names_of(names: Iterable[str]) -> tuple[list[type], Mapping[str, Mapping[str, str]]]:
    """Returns the kinds of states that wrap the optimizer's, the outer one first; and, for a leaf
    of the state without these, the name of each role. The names are those of a whole state."""
    roles: dict[str, dict[str, str]] = collections.defaultdict(dict)
    inside: dict[str, str] = {}  # names within the optimizer state, without what wraps it
    params = root = ""
    for name in names:
        part, _, rest = name.partition("/")
        if FIELDS.get(part) == OPT_STATE:
            inside[name], root = rest, part
            continue
        params = part if FIELDS.get(part) == PARAMS else params
        roles[name][AS_WEIGHT] = name
    wrappers = []
    while kind := WRAPPERS.get(frozenset(rest.partition("/")[0] for rest in inside.values())):
        wrappers.append(kind)
        outer, inside = inside, {}
        for name, rest in outer.items():
            field, _, rest = rest.partition("/")
            if field == "inner":
                inside[name] = rest
            else:
                owners = {UPDATES: f"{kind.__name__}/{UPDATES}", SCALES: f"{root}/{rest}"}
                roles[owners.get(field, f"{params}/{rest}")][field] = name
    for name, rest in inside.items():
        roles[f"{root}/{rest}"][AS_MOMENT] = name
    return wrappers, roles


def number_of(parts: Mapping[str, Array]) -> Array:
    """Returns the number that these parts make up."""
    value = next(parts[role] for role in PARTS if role in parts)
    if MASTER in parts:
        return value
    if CORRECTION in parts:
        return _encodings.joined(value, parts[CORRECTION])
    return _encodings.decoded(value, parts[SCALES]) if SCALES in parts else value


def part_of(number: Array, role: str, dtype: DTypeLike) -> Array:
    """Returns the part of a number that has this role, in this dtype."""
    if role == CORRECTION:
        return _encodings.split(number)[1]
    codes = role == SCALES or (dtype == CODES and number.dtype != CODES)
    return _encodings.encoded(number)[role == SCALES] if codes else number.astype(dtype)
