"""Reads a state that was saved with another `Precision` than that of `like=`.

Gain: fp32 Adam, bfloat16 with masters and state of 8 bits open as each other. Costs 200 lines. One
leaf at a time exists in both forms, on shards.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from zerojax._axis_types import with_auto_axes
from zerojax._checkpoint import matching as _matching
from zerojax._plan import encodings as _encodings
from zerojax._plan.padding import Shape, padded, unpadded
from zerojax._plan.roles import CORRECTION, MASTER, SCALES
from zerojax._state.state import OPT_STATE, PARAMS, Leaf
from zerojax._types import PyTree

# The fields of the states that wrap an optimizer's, as names in files.
WRAPPERS = {
    frozenset({MASTER, "inner"}): MASTER,
    frozenset({MASTER}): MASTER,  # an optimizer without state, such as plain SGD
    frozenset({"count", CORRECTION, "inner"}): CORRECTION,
    frozenset({"count", CORRECTION}): CORRECTION,
    frozenset({"count", "inner"}): "narrow",
    frozenset({"count", "inner", SCALES}): SCALES,
}
PARTS = {PARAMS: PARAMS, "0": PARAMS, OPT_STATE: OPT_STATE, "1": OPT_STATE}
AS_WEIGHT, AS_MOMENT, UPDATES = "weight", "moment", "count"

Read = Callable[[dict[str, PyTree]], dict[str, Array]]


@dataclasses.dataclass(frozen=True)
class WrappedNames:
    """The names of a state's leaves: for a leaf of an unwrapped state, the name of each role.

    `wrappers` are the kinds of states that wrap the optimizer's, the outer one first.
    """

    wrappers: tuple[str, ...]
    roles: Mapping[str, Mapping[str, str]]

    @property
    def all(self) -> dict[str, tuple[str, str]]:
        """The unwrapped name and the role of each name."""
        return {
            name: (own, role) for own, names in self.roles.items() for role, name in names.items()
        }


def names_of(names: Iterable[str]) -> WrappedNames:
    """Returns the roles of names, which are those of a whole state."""
    roles: dict[str, dict[str, str]] = collections.defaultdict(dict)
    inside: dict[str, str] = {}  # names within the optimizer state, without what wraps it
    params = root = ""
    for name in names:
        part, _, rest = name.partition("/")
        if PARTS.get(part) == OPT_STATE:
            inside[name], root = rest, part
            continue
        params = part if PARTS.get(part) == PARAMS else params
        roles[name][AS_WEIGHT] = name
    wrappers = []
    while kind := WRAPPERS.get(frozenset(rest.partition("/")[0] for rest in inside.values())):
        wrappers.append(kind)
        outer, inside = inside, {}
        for name, rest in outer.items():
            field, _, rest = rest.partition("/")
            if field == "inner":
                inside[name] = rest
            elif field == UPDATES:
                roles[f"{kind}/{UPDATES}"][UPDATES] = name
            elif field == SCALES:
                roles[f"{root}/{rest}"][SCALES] = name
            else:
                roles[f"{params}/{rest}"][field] = name
    for name, rest in inside.items():
        roles[f"{root}/{rest}"][AS_MOMENT] = name
    return WrappedNames(tuple(wrappers), roles)


class Conversion:
    """How leaves of `like` come from those of a checkpoint that wraps its optimizer otherwise."""

    def __init__(self, leaves: Sequence[Leaf], saved: Mapping[str, jax.ShapeDtypeStruct]) -> None:
        self.saved = saved
        self.like = {leaf.name: leaf.value for leaf in leaves}
        self.wanted, self.theirs = names_of(self.like), names_of(saved)

    @property
    def is_needed(self) -> bool:
        return self.wanted.wrappers != self.theirs.wrappers

    def as_wanted(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the saved leaves as if they had been saved like `like`, and those left over."""
        found, used = {}, set()
        for own, names in self.wanted.roles.items():
            for role, name in names.items():
                dtype = _matching.stored_struct(self.like[name]).dtype
                sources = self.sources(own)
                if role == UPDATES and not sources:
                    found[name] = jax.ShapeDtypeStruct((), dtype)
                if not sources:
                    continue
                used |= {*self.theirs.roles[own].values()}
                if not self.is_changed(own):
                    found[name] = self.saved[self.theirs.roles[own][role]]
                    continue
                shape = self.saved[next(iter(sources.values()))].shape
                shape = _encodings.scale_shape(shape) if role == SCALES else shape
                found[name] = jax.ShapeDtypeStruct(shape, dtype)
        counts = {name for name, (_, role) in self.theirs.all.items() if role == UPDATES}
        return found | {name: self.saved[name] for name in self.saved.keys() - used - counts}

    def check_whole(self, matched: Container[str], keep: str | None) -> None:
        """Raises if what `match` has found is only a part of a number: a weight without its master,
        from which the next step would restore the old one, or codes without their scales."""
        for roles in self.wanted.roles.values():
            names = [name for role, name in roles.items() if role != UPDATES]
            kept = [name for name in names if name not in matched]
            if kept and len(kept) < len(names):
                (read, *_) = (name for name in names if name in matched)
                raise ValueError(
                    f"keep={keep!r} keeps {kept[0]} and not {read}, which are one number: the next "
                    "step would compute with a part of the old one. Keep both, or none: "
                    f"keep='{OPT_STATE}/inner' keeps the optimizer's own state, and masters are "
                    "then made of the weights that are read."
                )

    def sources(self, own: str) -> dict[str, str]:
        """Returns the saved names that make up a leaf, by their roles; first that of its shape."""
        names = self.theirs.roles.get(own, {})
        if MASTER in names:
            return {MASTER: names[MASTER]}
        order = (AS_WEIGHT, AS_MOMENT, CORRECTION, SCALES, UPDATES)
        return {role: names[role] for role in order if role in names}

    def is_changed(self, own: str) -> bool:
        """Whether a leaf has other roles than it was saved with, or other dtypes."""
        mine, theirs = self.wanted.roles[own], self.theirs.roles.get(own, {})
        if {*mine} != {*theirs}:
            return True
        if {*mine} != {AS_MOMENT}:
            return False
        dtypes = _matching.stored_struct(self.like[mine[AS_MOMENT]]), self.saved[theirs[AS_MOMENT]]
        ours, saved = (each.dtype for each in dtypes)
        return ours != saved and all(jnp.issubdtype(x, jnp.floating) for x in (ours, saved))

    def read(self, matched: Mapping[str, PyTree], read: Read) -> dict[str, Array]:
        """Reads the leaves of `like` that `match` has found in `as_wanted()`."""
        done: dict[str, Array] = {}
        whole: dict[str, tuple[str, str]] = {}
        items: dict[str, list[str]] = collections.defaultdict(list)
        for name in matched:
            own, role = self.wanted.all[name]
            if self.is_changed(own):
                items[own].append(name)
            else:
                whole[self.theirs.roles[own][role]] = name, own
        values = read({theirs: matched[name] for theirs, (name, _) in whole.items()})
        done |= {whole[theirs][0]: value for theirs, value in values.items()}
        for own, names in items.items():
            done |= self.converted(own, {name: matched[name] for name in names}, read)
        return done

    def place(self, own: str) -> jax.ShapeDtypeStruct:
        """Returns the part of a leaf, in device memory, of which a device has least."""

        def size(struct: jax.ShapeDtypeStruct) -> int:
            return math.prod(struct.sharding.shard_shape(struct.shape))

        names = (name for role, name in self.wanted.roles[own].items() if role != SCALES)
        least = min((_matching.stored_struct(self.like[name]) for name in names), key=size)
        return least.update(sharding=_on_device(least.sharding))

    def converted(self, own: str, likes: Mapping[str, PyTree], read: Read) -> dict[str, Array]:
        """Reads one leaf and returns its parts."""
        roles = {name: self.wanted.all[name][1] for name in likes}
        sources = self.sources(own)
        if not sources:  # a count of updates that were not counted
            zero = jnp.zeros((), jnp.int32)
            return {name: _matching.laundered(zero, like) for name, like in likes.items()}
        logical = self.saved[next(iter(sources.values()))].shape
        structs = {name: _matching.stored_struct(like) for name, like in likes.items()}
        place = self.place(own)
        target = {}
        for role, name in sources.items():
            saved, sharding, shape = self.saved[name], place.sharding, place.shape
            if role == SCALES:
                shape = *shape[:-1], saved.shape[-1]
                sharding = _without_last(sharding, len(shape))
            target[name] = jax.ShapeDtypeStruct(shape, saved.dtype, sharding=sharding)
        values = read(target)
        given = {role: values[name] for role, name in sources.items()}
        made = functools.partial(
            _made, logical=logical, wanted=tuple((roles[n], structs[n].dtype) for n in likes)
        )
        shapes = [structs[name].shape for name in likes]

        def run(given: dict[str, Array]) -> list[Array]:
            return [padded(value, shape) for value, shape in zip(made(given), shapes, strict=True)]

        places = [_on_device(structs[name].sharding) for name in likes]
        new = jax.jit(run, out_shardings=places)(given)
        return {n: _matching.laundered(x, likes[n]) for n, x in zip(likes, new, strict=True)}


def _made(
    given: Mapping[str, Array], logical: Shape, wanted: Sequence[tuple[str, Any]]
) -> list[Array]:
    """Returns the parts of a leaf that are wanted, of the parts that it was saved as."""
    given = {
        role: unpadded(x, (*logical[:-1], x.shape[-1]) if role == SCALES else logical)
        for role, x in given.items()
    }
    value = next(given[role] for role in (MASTER, AS_WEIGHT, AS_MOMENT, UPDATES) if role in given)
    if CORRECTION in given:
        value = _encodings.joined(value, given[CORRECTION])
    elif SCALES in given:
        value = _encodings.decoded(value, given[SCALES])

    def part(role: str, dtype: Any) -> Array:
        if role == CORRECTION:
            return _encodings.split(value)[1]
        if role == SCALES:
            return _encodings.encoded(value)[1]
        codes = role == AS_MOMENT and dtype == jnp.int8 and value.dtype != jnp.int8
        return _encodings.encoded(value)[0] if codes else value.astype(dtype)

    return [part(*each) for each in wanted]


def _on_device(sharding: Sharding) -> Sharding:
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return sharding
    return NamedSharding(with_auto_axes(sharding.mesh), sharding.spec)


def _without_last(sharding: Sharding, rank: int) -> Sharding:
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[: rank - 1]))
