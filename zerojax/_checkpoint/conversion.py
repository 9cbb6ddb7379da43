"""Reads a state that was saved with another `Precision` than that of `like=`.

Gain: fp32 Adam, bfloat16 with masters and state of 8 bits open as each other. Costs 110 lines. One
leaf at a time exists in both forms, on shards.
"""

import math
from collections.abc import Callable, Container, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from zerojax._axis_types import with_auto_axes
from zerojax._checkpoint import matching as _matching
from zerojax._plan import encodings as _encodings, roles as _roles
from zerojax._plan.padding import padded, unpadded
from zerojax._plan.roles import AS_MOMENT, MASTER, PARTS, SCALES, UPDATES
from zerojax._state.state import OPT_STATE, Leaf
from zerojax._types import PyTree

Read = Callable[[dict[str, PyTree]], dict[str, Array]]


class Conversion:
    """How leaves of `like` come from those of a checkpoint that wraps its optimizer otherwise.

    An owner is the name of an unwrapped leaf, whose parts both may have.
    """

    def __init__(self, leaves: Sequence[Leaf], saved: Mapping[str, jax.ShapeDtypeStruct]) -> None:
        self.saved = saved
        self.like = {leaf.name: leaf.value for leaf in leaves}
        self.wanted, self.theirs = _roles.names_of(self.like), _roles.names_of(saved)

    @property
    def is_needed(self) -> bool:
        return self.wanted.wrappers != self.theirs.wrappers

    def as_wanted(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the saved leaves as if they had been saved like `like`, and those left over."""
        structs = {}
        for owner, names in self.wanted.roles.items():
            sources, is_same = self.sources(owner), self.is_same(owner)
            for role, name in names.items():
                dtype = _matching.stored_struct(self.like[name]).dtype
                if is_same:
                    structs[name] = self.saved[sources[role]]
                elif sources or role == UPDATES:
                    shape = next((self.saved[source].shape for source in sources.values()), ())
                    shape = _encodings.scale_shape(shape) if role == SCALES else shape
                    structs[name] = jax.ShapeDtypeStruct(shape, dtype)
        return structs | {
            name: self.saved[name]
            for owner, names in self.theirs.roles.items()
            for role, name in names.items()
            if role != UPDATES and owner not in self.wanted.roles
        }

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

    def sources(self, owner: str) -> dict[str, str]:
        """Returns the saved names that make up a leaf, by their roles; first that of its shape."""
        names = self.theirs.roles.get(owner, {})
        is_copied = MASTER in names and not self.is_same(owner)
        return {role: names[role] for role in ([MASTER] if is_copied else PARTS) if role in names}

    def is_same(self, owner: str) -> bool:
        """Whether a leaf has the roles that it was saved with, and dtypes that need no encoding."""
        mine, theirs = self.wanted.roles[owner], self.theirs.roles.get(owner, {})
        if mine.keys() != theirs.keys() or mine.keys() != {AS_MOMENT}:
            return mine.keys() == theirs.keys()
        like, saved = self.like[mine[AS_MOMENT]], self.saved[theirs[AS_MOMENT]]
        dtypes = {_matching.stored_struct(like).dtype, saved.dtype}
        return len(dtypes) == 1 or not all(jnp.issubdtype(x, jnp.floating) for x in dtypes)

    def read(self, matched: Mapping[str, PyTree], read: Read) -> dict[str, Array]:
        """Reads the leaves of `like` that `match` has found in `as_wanted()`."""
        whole, parts = dict[str, str](), {}
        for owner, names in self.wanted.roles.items():
            names = {role: name for role, name in names.items() if name in matched}
            if self.is_same(owner):
                whole |= {self.theirs.roles[owner][role]: name for role, name in names.items()}
            elif names:
                parts[owner] = {name: role for role, name in names.items()}
        read_whole = read({source: matched[name] for source, name in whole.items()})
        values = {whole[source]: value for source, value in read_whole.items()}
        for owner, roles in parts.items():
            values |= self.converted(owner, roles, {name: matched[name] for name in roles}, read)
        return values

    def place(self, owner: str) -> jax.ShapeDtypeStruct:
        """Returns the part of a leaf, in device memory, of which a device has least."""

        def size(struct: jax.ShapeDtypeStruct) -> int:
            return math.prod(struct.sharding.shard_shape(struct.shape))

        names = (name for role, name in self.wanted.roles[owner].items() if role != SCALES)
        least = min((_matching.stored_struct(self.like[name]) for name in names), key=size)
        return least.update(sharding=_on_device(least.sharding))

    def converted(
        self, owner: str, roles: Mapping[str, str], likes: Mapping[str, PyTree], read: Read
    ) -> dict[str, Array]:
        """Reads one leaf and returns its parts, of which `roles` and `likes` say what they are."""
        structs = {name: _matching.stored_struct(like) for name, like in likes.items()}
        saved = {role: (name, self.saved[name]) for role, name in self.sources(owner).items()}
        place, target = self.place(owner), {}
        for role, (name, struct) in saved.items():
            target[name] = place.update(dtype=struct.dtype)
            if role == SCALES:  # whole along the last dimension
                shape, sharding = (*place.shape[:-1], struct.shape[-1]), place.sharding
                if isinstance(sharding, NamedSharding):
                    spec = PartitionSpec(*sharding.spec[: len(shape) - 1])
                    sharding = NamedSharding(sharding.mesh, spec)
                target[name] = jax.ShapeDtypeStruct(shape, struct.dtype, sharding=sharding)

        def run(values: Mapping[str, Array]) -> list[Array]:
            # A count of updates that were not counted has no source.
            number = jnp.zeros((), jnp.int32)
            if saved:
                parts = {role: unpadded(values[n], x.shape) for role, (n, x) in saved.items()}
                number = _roles.number_of(parts)
            parts = (_roles.part_of(number, roles[n], x.dtype) for n, x in structs.items())
            return [padded(part, x.shape) for part, x in zip(parts, structs.values(), strict=True)]

        places = [_on_device(struct.sharding) for struct in structs.values()]
        parts = jax.jit(run, out_shardings=places)(read(target) if target else {})
        return {n: _matching.laundered(x, likes[n]) for n, x in zip(likes, parts, strict=True)}


def _on_device(sharding: Sharding) -> Sharding:
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return sharding
    return NamedSharding(with_auto_axes(sharding.mesh), sharding.spec)
