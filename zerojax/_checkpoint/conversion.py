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
        self.like = {leaf.name: _matching.stored_struct(leaf.value) for leaf in leaves}
        self.wanted, self.theirs = _roles.names_of(self.like), _roles.names_of(saved)
        self.is_needed = self.wanted.wrappers != self.theirs.wrappers

    def as_wanted(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the saved leaves as if they had been saved like `like`, and those left over."""
        structs = {}
        for owner, names in self.wanted.roles.items():
            sources = self.sources(owner)
            for role, name in names.items():
                if self.is_same(owner):
                    structs[name] = self.saved[sources[role]]
                elif sources or role == UPDATES:
                    shape = next((self.saved[source].shape for source in sources.values()), ())
                    shape = _encodings.scale_shape(shape) if role == SCALES else shape
                    structs[name] = jax.ShapeDtypeStruct(shape, self.like[name].dtype)
        left = [
            names for owner, names in self.theirs.roles.items() if owner not in self.wanted.roles
        ]
        names = [name for names in left for role, name in names.items() if role != UPDATES]
        return structs | {name: self.saved[name] for name in names}

    def check_whole(self, matched: Container[str], keep: str | None) -> None:
        """Raises if what `match` has found is only a part of a number: a weight without its master,
        from which the next step would restore the old one, or codes without their scales."""
        for roles in self.wanted.roles.values():
            names = [name for role, name in roles.items() if role != UPDATES]
            kept = [name for name in names if name not in matched]
            if kept and len(kept) < len(names):
                read = next(name for name in names if name in matched)
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
        dtypes = {self.like[mine[AS_MOMENT]].dtype, self.saved[theirs[AS_MOMENT]].dtype}
        return len(dtypes) == 1 or not all(jnp.issubdtype(x, jnp.floating) for x in dtypes)

    def read(self, matched: Mapping[str, PyTree], read: Read) -> dict[str, Array]:
        """Reads the leaves of `like` that `match` has found in `as_wanted()`."""
        sources, values = dict[str, str](), {}
        for owner, names in self.wanted.roles.items():
            roles = {name: role for role, name in names.items() if name in matched}
            if self.is_same(owner):
                sources |= {n: self.theirs.roles[owner][role] for n, role in roles.items()}
            elif roles:
                values |= self.converted(owner, roles, matched, read)
        whole = read({source: matched[name] for name, source in sources.items()})
        return values | {name: whole[source] for name, source in sources.items()}

    def converted(
        self, owner: str, roles: Mapping[str, str], matched: Mapping[str, PyTree], read: Read
    ) -> dict[str, Array]:
        """Reads one leaf and returns its parts, of which `roles` says what they are."""
        sources = self.sources(owner)
        # It is read, into device memory, as that of its parts of which a device has least.
        likes = [self.like[n] for role, n in self.wanted.roles[owner].items() if role != SCALES]
        like = min(likes, key=lambda x: math.prod(x.sharding.shard_shape(x.shape)))
        place, target = _on_device(like.sharding), {}
        for role, name in sources.items():
            shape, dtype, sharding = like.shape, self.saved[name].dtype, place
            if role == SCALES:  # whole along the last dimension
                shape = *shape[:-1], self.saved[name].shape[-1]
                if isinstance(place, NamedSharding):
                    sharding = place.update(spec=PartitionSpec(*place.spec[: len(shape) - 1]))
            target[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        def run(values: Mapping[str, Array]) -> dict[str, Array]:
            # A count of updates that were not counted has no source.
            number = jnp.zeros((), jnp.int32)
            if sources:
                parts = {r: unpadded(values[n], self.saved[n].shape) for r, n in sources.items()}
                number = _roles.number_of(parts)
            parts = {n: _roles.part_of(number, r, self.like[n].dtype) for n, r in roles.items()}
            return {name: padded(part, self.like[name].shape) for name, part in parts.items()}

        places = {name: _on_device(self.like[name].sharding) for name in roles}
        parts = jax.jit(run, out_shardings=places)(read(target) if target else {})
        return {name: _matching.laundered(part, matched[name]) for name, part in parts.items()}


def _on_device(sharding: Sharding) -> Sharding:
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return sharding
    return NamedSharding(with_auto_axes(sharding.mesh), sharding.spec)
