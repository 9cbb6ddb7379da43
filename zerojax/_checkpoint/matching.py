"""Decides which saved leaf goes where, by name and strictly, and reads it there."""

from collections.abc import Container, Iterable, Mapping
from itertools import zip_longest
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import SingleDeviceSharding

from zerojax._checkpoint import files as _files
from zerojax._declared import switch
from zerojax._plan import move as _move
from zerojax._plan.padding import Shape
from zerojax._state import state as _state
from zerojax._state.state import Leaf
from zerojax._types import PyTree, is_key

PATHS_SHOWN = 5  # paths that a message names before it counts the rest
HOW_TO_KEEP = "keep=<path regex> keeps like='s own value"
PADDED = (
    "; or padding makes the difference, and a tuple or dict does not carry its plan: pass that as "
    "like=, and to what saved it as plan="
)
WRAPPED = (
    "; or it was saved without Precision(master=) or Precision(moments=): restore it so, and place "
    "what is restored by shard_train_state(state, precision=)"
)
CAST = "cast=True casts floats to like='s"
OTHER_PARTS = (
    "Most leaves differ, as those of another model do: give this run a directory of its own; "
    "weights of one come over by zerojax.checkpoint.export_safetensors and "
    "import_safetensors(names=)."
)
OF_NNX = (
    "It was saved from Flax nnx objects: like=nnx.state(model), or [nnx.state(model), "
    "nnx.state(optimizer)] where both were saved, reads it for nnx.update."
)
BARE = "; or it was saved with Precision(master=) or Precision(moments=): place like= with the same"


class SavedLeaf(NamedTuple):
    """A leaf of a checkpoint."""

    shape: tuple[int, ...]
    dtype: jax.typing.DTypeLike
    scalar: bool  # a Python number, which has no width of its own


def saved_leaves(tree: PyTree) -> dict[str, SavedLeaf]:
    """Returns the leaves of a checkpoint's tree by the names that `zerojax.plan` shows."""
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_metadata)[0]
    return {
        _state.path_name(path): SavedLeaf(
            tuple(getattr(leaf, "shape", ())),
            leaf.dtype,
            isinstance(leaf, ocp.metadata.ScalarMetadata),
        )
        for path, leaf in leaves
    }


def match(
    leaves: list[Leaf],
    saved: dict[str, SavedLeaf],
    path: object,
    shapes: Mapping[str, Shape],
    *,
    keep: str | None,
    ignore: str | None,
    cast: bool,
    theirs: Mapping[str, str] | None = None,
) -> dict[str, PyTree]:
    """Returns, by name, the leaf of `like` that a saved leaf becomes; raises where trees differ.

    `shapes` are the logical ones of leaves that are padded, and that files hold without padding.
    `theirs` are the names in the files, where they are others.
    """
    switch("cast")(cast)
    if ignore is not None:
        _state.finds(ignore, "", "ignore=")  # raises where it is no pattern
    names = {leaf.name for leaf in leaves}
    wanted = {leaf.name: leaf.value for leaf in leaves if not is_kept(leaf, keep)}
    missing = [name for name in wanted if name not in saved]
    extra = [n for n in saved if n not in names and not finds(ignore, n, "ignore=")]
    both = {name: value for name, value in wanted.items() if name in saved}
    reshaped, retyped, is_padded = [], [], False
    for name, value in both.items():
        struct, have = stored_struct(value), saved[name]
        shape = shapes.get(name, struct.shape)
        if have.shape != shape:
            reshaped.append(f"{name}: {list(have.shape)} saved, {list(shape)} wanted")
            # In one dimension, as where one of them is padded.
            is_padded |= sum(a != b for a, b in zip_longest(have.shape, shape)) == 1
        if not _same_type(have, struct.dtype, cast):
            retyped.append(f"{name}: {have.dtype} saved, {struct.dtype} wanted")
    wrapped, bare = _is_inside(missing, saved), _is_inside(extra, names)
    of_nnx = bool(extra) and not both and all(name.endswith("/value") for name in extra)
    is_other = 2 * len(missing + reshaped) > len(wanted) and not (wrapped or bare or of_nnx)
    missing = [f"{n} (as {theirs[n]})" if theirs and n in theirs else n for n in missing]
    problems = [
        _problem(missing, "not in the checkpoint", HOW_TO_KEEP + WRAPPED * wrapped + BARE * bare),
        _problem(extra, "only in the checkpoint", "ignore=<path regex> leaves them behind"),
        _problem(reshaped, "of another shape", HOW_TO_KEEP + PADDED * is_padded),
        _problem(retyped, "of another dtype", CAST),
        OTHER_PARTS * is_other,
        OF_NNX * of_nnx,
    ]
    if any(problems):
        raise ValueError(f"{path} does not fit like=. " + " ".join(filter(None, problems)))
    return both


def _is_inside(names: Iterable[str], others: Container[str]) -> bool:
    """Whether an optimizer's state is another's that a wrapper calls its inner state."""
    return any("/inner/" in n and n.replace("/inner/", "/", 1) in others for n in names)


def is_kept(leaf: Leaf, keep: str | None) -> bool:
    """Whether `like` keeps its own value of a leaf."""
    kept = finds(keep, leaf.name, "keep=")
    if kept and isinstance(leaf.value, jax.ShapeDtypeStruct):
        raise ValueError(
            f"keep={keep!r} keeps {leaf.name}, and like= has no value for it, only a shape. "
            "Give a placed state as like=."
        )
    return kept


def filled(like: PyTree, values: dict[str, jax.Array]) -> PyTree:
    """Returns `like` with these values at their names, and its other leaves as they are."""
    leaves = [values.get(leaf.name, leaf.value) for leaf in _state.leaves_with_paths(like)]
    return jax.tree.structure(like).unflatten(leaves)


def read(
    handler: ocp.PyTreeCheckpointHandler,
    directory: epath.Path,
    tree: PyTree,
    wanted: dict[str, PyTree],
) -> dict[str, jax.Array]:
    """Reads the wanted leaves of the checkpoint `tree`, each to where its `like` lives.

    The groups are no larger than the largest leaf: the memory that one was read into is freed, and
    used again, before the next is read.
    """
    done: dict[str, jax.Array] = {}
    sizes = {name: nbytes(like) for name, like in wanted.items()}
    for names in _files.grouped(sizes, sizes.__getitem__, max(sizes.values(), default=0)):
        structs = {name: stored_struct(wanted[name]) for name in names}
        targets = jax.tree_util.tree_map_with_path(
            lambda path, _, group=structs: group.get(_state.path_name(path), ocp.PLACEHOLDER),
            tree,
            is_leaf=_is_metadata,
        )
        # Not strict: leaves that rest padded get zeros at their end. `match` compares the shapes.
        restore_args = ocp.checkpoint_utils.construct_restore_args(targets, strict=False)
        args = ocp.args.PyTreeRestore(targets, restore_args)
        with _files.naming(", ".join(names), directory):
            leaves = _state.named_leaves(handler.restore(directory, args=args))
        values = {leaf.name: leaf.value for leaf in leaves if leaf.name in structs}
        del leaves
        done |= {name: laundered(values.pop(name), wanted[name]) for name in names}
    return done


def laundered(value: jax.Array, like: PyTree) -> jax.Array:
    """Moves `value` to memory that a jitted program allocated, as a step's own output is.

    The memory that a file was read into belongs to the reader: it cannot be donated, and a resumed
    run would need more than a fresh one. One leaf moves at a time, so that only one exists twice.
    """
    if is_key(like) and not is_key(value):
        value = jax.random.wrap_key_data(value, impl=jax.random.key_impl(like))
    copied = _move.copied(value, stored_struct(like).sharding)
    jax.block_until_ready(copied)
    value.delete()  # now, whoever else still refers to it
    return copied


def made_empty(like: PyTree) -> jax.Array:
    """Makes an array without elements, which no checkpoint has."""
    struct = stored_struct(like)
    return laundered(jnp.zeros(struct.shape, struct.dtype, device=struct.sharding), like)


def stored_struct(value: PyTree) -> jax.ShapeDtypeStruct:
    """Returns shape, dtype and sharding as stored: for a PRNG key, those of its words."""
    struct = _state.shape_dtype(value)
    struct = jax.eval_shape(jax.random.key_data, struct) if is_key(struct) else struct
    sharding = getattr(value, "sharding", None)
    if sharding is None:
        sharding = SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)


def nbytes(value: PyTree) -> int:
    struct = stored_struct(value)
    return struct.size * struct.dtype.itemsize


def _same_type(saved: SavedLeaf, dtype: np.dtype, cast: bool) -> bool:
    if saved.dtype == dtype:
        return True
    if saved.scalar:
        return jnp.dtype(saved.dtype).kind == dtype.kind
    return cast and all(jnp.issubdtype(d, jnp.floating) for d in (saved.dtype, dtype))


def _problem(names: list[str], what: str, remedy: str) -> str:
    if not names:
        return ""
    more = f" and {len(names) - PATHS_SHOWN} more" if len(names) > PATHS_SHOWN else ""
    return f"Leaves {what}: {'; '.join(names[:PATHS_SHOWN])}{more} ({remedy})."


def finds(pattern: str | None, name: str, option: str) -> bool:
    """Whether the pattern of `option`, if there is one, finds a name."""
    return pattern is not None and _state.finds(pattern, name, option)


def _is_metadata(node: object) -> bool:
    return isinstance(node, ocp.metadata.value.Metadata)
