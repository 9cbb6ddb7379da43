"""Decides which saved leaf goes where, by name and strictly, and reads it there."""

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import zip_longest

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from zerojax._axis_types import with_auto_axes
from zerojax._checkpoint import files as _files
from zerojax._plan import encodings as _encodings, move as _move, roles as _roles
from zerojax._plan.padding import padded, unpadded
from zerojax._plan.roles import AS_MOMENT, MASTER, PARTS, SCALES, UPDATES
from zerojax._state import state as _state
from zerojax._state.packed import TOP_LEVELS
from zerojax._state.state import OPT_STATE, Leaf
from zerojax._table import few
from zerojax._types import PyTree, Shape, is_key

PATHS_SHOWN = 5  # paths that a message names before it counts the rest
# An optimizer may have no state, or no wrapper around it.
MAY_BE_EMPTY = (_state.OPT_STATE, f"{_state.OPT_STATE}/inner")
HOW_TO_KEEP = "keep=<path regex> keeps like='s own value"
PADDED = (
    "; or the difference is padding, and a tuple or dict does not carry its plan: pass the plan as "
    "like=, and as plan= to the call that saves it"
)
WRAPPED = (
    "; or it was saved without Precision(master=) or Precision(moments=): restore it without them, "
    "and place the restored state by shard_train_state(state, precision=)"
)
OTHER_PARTS = (
    "Most leaves differ, as if another model was saved: give this run its own directory. To take "
    "over the weights of another model, use zerojax.checkpoint.export_safetensors and "
    "import_safetensors(names=)."
)
OF_NNX = (
    "It was saved from Flax nnx objects: read it for nnx.update with like=nnx.state(model), or "
    "[nnx.state(model), nnx.state(optimizer)] if both were saved."
)
ON_ONE_SIDE = (
    "; or weights are quantized on one side only: make like= with zerojax.quantize if those of "
    "the checkpoint are, and without if they are not. import_safetensors quantizes weights, and "
    "zerojax.manual.dequantize decodes them"
)
BARE = "; or it was saved with Precision(master=) or Precision(moments=): place like= with the same"


def saved_leaves(tree: PyTree) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the leaves of a checkpoint's tree by the names that `zerojax.plan` shows.

    The type of a Python number is weak: it has no width.
    """
    structs = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_metadata)[0]:
        shape = tuple(getattr(leaf, "shape", ()))
        is_number = isinstance(leaf, ocp.metadata.ScalarMetadata)
        struct = jax.ShapeDtypeStruct(shape, leaf.dtype, weak_type=is_number)
        structs[_state.path_name(path)] = struct
    return structs


def match(
    leaves: list[Leaf],
    saved: dict[str, jax.ShapeDtypeStruct],
    path: object,
    shapes: Mapping[str, Shape],
    *,
    keep: str | None,
    ignore: str | None,
    cast: bool,
    theirs: Mapping[str, str] | None = None,
    left_over: Sequence[str] = (),
    empty: Iterable[str] = (),
) -> dict[str, PyTree]:
    """Returns, by name, the leaf of `like` that a saved leaf becomes; raises where trees differ.

    `shapes` are the logical shapes of padded leaves, which files hold without padding. `theirs` are
    the names in the files, where they differ, and `left_over` those that become no leaf. `empty`
    leaves of `like` have no elements, and are not among `leaves`.
    """
    if not isinstance(cast, bool):
        raise TypeError(f"cast={cast!r} must be True or False.")
    finds(ignore, "", "ignore=")  # raises for a wrong pattern
    names = {leaf.name for leaf in leaves}
    wanted = {leaf.name: leaf.value for leaf in leaves if not is_kept(leaf, keep)}
    is_used = len(wanted) < len(leaves) or any(finds(keep, name, "keep=") for name in empty)
    if keep is not None and not is_used and keep.strip("^/$") not in MAY_BE_EMPTY:
        raise ValueError(
            f"keep={keep!r} matches no leaf of like=. {_state.paths_like(keep, sorted(names))}"
        )
    missing = [name for name in wanted if name not in saved]
    extra = [*(name for name in saved if name not in names), *left_over]
    extra = [name for name in extra if not finds(ignore, name, "ignore=")]
    both = {name: value for name, value in wanted.items() if name in saved}
    reshaped, retyped, is_padded = [], [], False
    for name, value in both.items():
        struct, have = stored_struct(value), saved[name]
        shape = shapes.get(name, struct.shape)
        if have.shape != shape:
            reshaped.append(f"{name}: {list(have.shape)} saved, {list(shape)} wanted")
            # Padding is a difference in one dimension.
            is_padded |= sum(a != b for a, b in zip_longest(have.shape, shape)) == 1
        are_floats = all(jnp.issubdtype(x.dtype, jnp.floating) for x in (have, struct))
        fits = have.dtype == struct.dtype or (cast and are_floats)
        if not (have.dtype.kind == struct.dtype.kind if have.weak_type else fits):
            retyped.append(f"{name}: {have.dtype} saved, {struct.dtype} wanted")
    wrapped, bare = _is_inside(missing, saved), _is_inside(extra, names)
    coded = _is_coded(missing, saved) or _is_coded(extra, names)
    of_nnx = bool(extra) and not both and all(name.endswith("/value") for name in extra)
    is_same = wrapped or bare or coded or of_nnx
    is_other = 2 * len(missing + reshaped) > len(wanted) and not is_same
    missing = [f"{n} (as {theirs[n]})" if theirs and theirs.get(n, n) != n else n for n in missing]
    hints = WRAPPED * wrapped + BARE * bare + ON_ONE_SIDE * coded
    problems = [
        _problem(missing, "not in the checkpoint", HOW_TO_KEEP + hints),
        _problem(extra, "only in the checkpoint", "ignore=<path regex> leaves them behind"),
        _problem(reshaped, "of another shape", HOW_TO_KEEP + PADDED * is_padded),
        _problem(retyped, "of another dtype", "cast=True casts floats to like='s"),
        OTHER_PARTS * is_other,
        OF_NNX * of_nnx,
    ]
    if any(problems):
        raise ValueError(f"{path} does not fit like=. " + " ".join(filter(None, problems)))
    return both


def _is_inside(names: Iterable[str], others: Container[str]) -> bool:
    """Whether some names are the others with the `inner/` that a wrapping optimizer adds."""
    return any("/inner/" in n and n.replace("/inner/", "/", 1) in others for n in names)


def _is_coded(names: Iterable[str], others: Container[str]) -> bool:
    """Whether some names are the others with the name of the codes that a weight rests as."""
    parts = (name.rpartition("/") for name in names)
    return any(kind in TOP_LEVELS and weight in others for weight, _, kind in parts)


def is_kept(leaf: Leaf, keep: str | None) -> bool:
    """Whether `like` keeps its own value of a leaf."""
    kept = finds(keep, leaf.name, "keep=")
    if kept and isinstance(leaf.value, jax.ShapeDtypeStruct):
        raise ValueError(
            f"keep={keep!r} keeps {leaf.name}, but like= has only its shape. Pass a placed state "
            "as like=."
        )
    return kept


def filled(like: PyTree, values: dict[str, jax.Array]) -> PyTree:
    """Returns `like` with these values at their names; its other leaves stay."""
    leaves = [values.get(leaf.name, leaf.value) for leaf in _state.leaves_with_paths(like)]
    return jax.tree.structure(like).unflatten(leaves)


def read(
    handler: ocp.PyTreeCheckpointHandler, path: epath.Path, tree: PyTree, wanted: dict[str, PyTree]
) -> dict[str, jax.Array]:
    """Reads the wanted leaves of the checkpoint `tree`, each into the placement of its `like`.

    It reads groups no larger than the largest leaf: each frees its memory before the next is read.
    """
    done: dict[str, jax.Array] = {}
    sizes = {name: nbytes(like) for name, like in wanted.items()}
    for names in _files.grouped(sizes, sizes.__getitem__, max(sizes.values(), default=0)):
        structs = {name: stored_struct(wanted[name]) for name in names}
        targets = jax.tree_util.tree_map_with_path(
            lambda at, _, group=structs: group.get(_state.path_name(at), ocp.PLACEHOLDER),
            tree,
            is_leaf=_is_metadata,
        )
        # Not strict: padded leaves get zeros at their end. `match` has compared the shapes.
        restore_args = ocp.checkpoint_utils.construct_restore_args(targets, strict=False)
        args = ocp.args.PyTreeRestore(targets, restore_args)
        with _files.naming(", ".join(names), path):
            leaves = _state.named_leaves(handler.restore(path, args=args))
        values = {leaf.name: leaf.value for leaf in leaves if leaf.name in structs}
        del leaves
        done |= {name: laundered(values.pop(name), wanted[name]) for name in names}
    return done


def laundered(value: jax.Array, like: PyTree) -> jax.Array:
    """Moves `value` to memory that a jitted program allocated, like a step's own output.

    The memory that a file was read into belongs to the reader: a step could not donate it, and a
    resumed run would need more memory than a fresh one. Only one leaf at a time exists twice.
    """
    if is_key(like) and not is_key(value):
        value = jax.random.wrap_key_data(value, impl=jax.random.key_impl(like))
    copied = _move.copied(value, stored_struct(like).sharding)
    jax.block_until_ready(copied)
    value.delete()  # now, even if something still refers to it
    return copied


def stored_struct(value: PyTree) -> jax.ShapeDtypeStruct:
    """Returns shape, dtype and sharding as stored: for a PRNG key, those of its words."""
    struct = _state.shape_dtype(value)
    struct = jax.eval_shape(jax.random.key_data, struct) if is_key(struct) else struct
    sharding = getattr(value, "sharding", None)
    if sharding is None or isinstance(
        getattr(sharding, "mesh", None), jax.sharding.AbstractMesh
    ):  # a type
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)


def nbytes(value: PyTree) -> int:
    return _files.nbytes(stored_struct(value))


def _problem(names: list[str], what: str, remedy: str) -> str:
    return f"Leaves {what}: {few(names, PATHS_SHOWN, '; ')} ({remedy})." if names else ""


def finds(pattern: str | None, name: str, option: str) -> bool:
    """Whether the pattern of `option`, if any, matches a name."""
    return pattern is not None and _state.finds(pattern, name, option)


def _is_metadata(node: object) -> bool:
    return isinstance(node, ocp.metadata.value.Metadata)


# -- leaves of another precision

Read = Callable[[dict[str, PyTree]], dict[str, Array]]


class Conversion:
    """How leaves of `like` come from those of a checkpoint that was saved with another `Precision`.

    Gain: fp32 Adam, bfloat16 with masters and state of 8 bits open as each other. Costs 95 lines.
    One leaf at a time exists in both forms, on shards.

    An owner is the name of an unwrapped leaf, whose parts both may have.
    """

    def __init__(self, leaves: Sequence[Leaf], saved: Mapping[str, jax.ShapeDtypeStruct]) -> None:
        self.saved = saved
        self.like = {leaf.name: stored_struct(leaf.value) for leaf in leaves}
        wrappers, self.wanted = _roles.names_of(self.like)
        of_saved, self.theirs = _roles.names_of(saved)
        self.is_needed = wrappers != of_saved

    def as_wanted(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the saved leaves as if they had been saved like `like`, and those left over."""
        structs = {}
        for owner, names in self.wanted.items():
            sources = self.sources(owner)
            for role, name in names.items():
                if self.is_same(owner):
                    structs[name] = self.saved[sources[role]]
                elif sources or role == UPDATES:
                    shape = next((self.saved[source].shape for source in sources.values()), ())
                    shape = _encodings.scale_shape(shape) if role == SCALES else shape
                    structs[name] = jax.ShapeDtypeStruct(shape, self.like[name].dtype)
        left = [names for owner, names in self.theirs.items() if owner not in self.wanted]
        names = [name for names in left for role, name in names.items() if role != UPDATES]
        return structs | {name: self.saved[name] for name in names}

    def check_whole(self, matched: Container[str], keep: str | None) -> None:
        """Raises if what `match` has found is only a part of a number: a weight without its master,
        from which the next step would restore the old one, or codes without their scales."""
        for roles in self.wanted.values():
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
        names = self.theirs.get(owner, {})
        is_copied = MASTER in names and not self.is_same(owner)
        return {role: names[role] for role in ([MASTER] if is_copied else PARTS) if role in names}

    def is_same(self, owner: str) -> bool:
        """Whether a leaf has the roles that it was saved with, and dtypes that need no encoding."""
        mine, theirs = self.wanted[owner], self.theirs.get(owner, {})
        if mine.keys() != theirs.keys() or mine.keys() != {AS_MOMENT}:
            return mine.keys() == theirs.keys()
        dtypes = {self.like[mine[AS_MOMENT]].dtype, self.saved[theirs[AS_MOMENT]].dtype}
        return len(dtypes) == 1 or not all(jnp.issubdtype(x, jnp.floating) for x in dtypes)

    def read(self, matched: Mapping[str, PyTree], read: Read) -> dict[str, Array]:
        """Reads the leaves of `like` that `match` has found in `as_wanted()`."""
        sources, values = dict[str, str](), {}
        for owner, names in self.wanted.items():
            roles = {name: role for role, name in names.items() if name in matched}
            if self.is_same(owner):
                sources |= {n: self.theirs[owner][role] for n, role in roles.items()}
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
        likes = [self.like[n] for role, n in self.wanted[owner].items() if role != SCALES]
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
        return {name: laundered(part, matched[name]) for name, part in parts.items()}


def _on_device(sharding: Sharding) -> Sharding:
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return sharding
    return NamedSharding(with_auto_axes(sharding.mesh), sharding.spec)
