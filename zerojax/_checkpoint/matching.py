"""Which leaf of a checkpoint goes where: by name, and strictly."""

import functools
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Sharding, SingleDeviceSharding

from zerojax._plan import move as _move
from zerojax._state import state as _state
from zerojax._state.state import Leaf

SHOWN = 5  # paths that a message names before it counts the rest


class Saved(NamedTuple):
    """A leaf of a checkpoint."""

    shape: tuple[int, ...]
    dtype: Any
    scalar: bool  # a Python number, which has no width of its own


def saved_leaves(tree: Any) -> dict[str, Saved]:
    """By the names that `zerojax.plan` shows."""
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_metadata)[0]
    return {
        _state.path_name(path): Saved(
            tuple(getattr(leaf, "shape", ())),
            leaf.dtype,
            isinstance(leaf, ocp.metadata.ScalarMetadata),
        )
        for path, leaf in leaves
    }


def match(
    leaves: list[Leaf],
    saved: dict[str, Saved],
    path: Any,
    *,
    keep: str | None,
    ignore: str | None,
    cast: bool,
) -> dict[str, Any]:
    """By name, the leaf of `like` that a saved leaf becomes; an error where the trees differ."""
    kept = [leaf for leaf in leaves if _finds(keep, leaf.name, "keep=")]
    for leaf in kept:
        if isinstance(leaf.value, jax.ShapeDtypeStruct):
            raise ValueError(
                f"keep={keep!r} keeps {leaf.name}, and like= has no value for it, only a shape. "
                "Give a placed state as like=."
            )
    wanted = [leaf for leaf in leaves if leaf not in kept]
    names = {leaf.name for leaf in leaves}
    missing = [leaf.name for leaf in wanted if leaf.name not in saved]
    extra = [n for n in saved if n not in names and not _finds(ignore, n, "ignore=")]
    both = [(leaf, saved[leaf.name]) for leaf in wanted if leaf.name in saved]
    structs = {leaf.name: stored_struct(leaf.value) for leaf, _ in both}
    reshaped = [
        f"{leaf.name}: {list(found.shape)} saved, {list(structs[leaf.name].shape)} wanted"
        for leaf, found in both
        if structs[leaf.name].shape != found.shape
    ]
    retyped = [
        f"{leaf.name}: {found.dtype} saved, {structs[leaf.name].dtype} wanted"
        for leaf, found in both
        if not _same_type(found, structs[leaf.name].dtype, cast)
    ]
    problems = [
        _problem(missing, "not in the checkpoint", "keep=<path regex> keeps like='s own value"),
        _problem(extra, "only in the checkpoint", "ignore=<path regex> leaves them behind"),
        _problem(reshaped, "of another shape", "keep=<path regex> keeps like='s own value"),
        _problem(retyped, "of another dtype", "cast=True casts floats to like='s"),
    ]
    found = [problem for problem in problems if problem]
    if found:
        raise ValueError(f"{path} does not fit like=. " + " ".join(found))
    return {leaf.name: leaf.value for leaf, _ in both}


def read(handler: Any, directory: Any, tree: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    """The wanted leaves of the checkpoint `tree`, each where its `like` lives.

    In groups no larger than the largest leaf: what a group was read into is free again, and
    used again, before the next is read.
    """
    done: dict[str, Any] = {}
    for group in _groups(wanted):
        leaves = _read_group(handler, directory, tree, group)
        done |= {name: laundered(leaves.pop(name), like) for name, like in group.items()}
    return done


def _groups(wanted: dict[str, Any]) -> Iterator[dict[str, Any]]:
    sizes = {name: nbytes(like) for name, like in wanted.items()}
    group: dict[str, Any] = {}
    room = most = max(sizes.values(), default=0)
    for name, like in wanted.items():
        if group and sizes[name] > room:
            yield group
            group, room = {}, most
        group[name] = like
        room -= sizes[name]
    if group:
        yield group


def _read_group(
    handler: Any, directory: Any, tree: Any, group: dict[str, Any]
) -> dict[str, jax.Array]:
    def target(path: tuple, _: Any) -> Any:
        like = group.get(_state.path_name(path))
        return ocp.PLACEHOLDER if like is None else stored_struct(like)

    def restore_args(path: tuple, _: Any) -> Any:
        like = group.get(_state.path_name(path))
        if like is None:
            return ocp.RestoreArgs()
        struct, place = stored_struct(like), sharding_of(like)
        return ocp.ArrayRestoreArgs(
            restore_type=jax.Array, dtype=struct.dtype, sharding=place, global_shape=struct.shape
        )

    over_leaves = functools.partial(jax.tree_util.tree_map_with_path, is_leaf=_is_metadata)
    args = ocp.args.PyTreeRestore(over_leaves(target, tree), over_leaves(restore_args, tree))
    leaves = _state.named_leaves(handler.restore(directory, args=args))
    return {leaf.name: leaf.value for leaf in leaves if leaf.name in group}


def laundered(value: jax.Array, like: Any) -> jax.Array:
    """`value` in memory that a jitted program allocated, as a step's own output is.

    What a file was read into belongs to the reader: it cannot be donated, and a resumed run
    would hold more than a fresh one. One leaf at a time, so that only one exists twice.
    """
    if _move.is_key(like) and not _move.is_key(value):
        value = jax.random.wrap_key_data(value, impl=jax.random.key_impl(like))
    copied = _move.copied(value, sharding_of(like))
    jax.block_until_ready(copied)
    value.delete()  # now, whoever else still holds it
    return copied


def made_empty(like: Any) -> jax.Array:
    """An array without elements, which no checkpoint holds."""
    struct = stored_struct(like)
    return laundered(jax.device_put(np.zeros(struct.shape, struct.dtype), sharding_of(like)), like)


def stored_struct(value: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype as stored; of a PRNG key, those of its words."""
    struct = _state.shape_dtype(value)
    return jax.eval_shape(jax.random.key_data, struct) if _move.is_key(struct) else struct


def nbytes(value: Any) -> int:
    struct = stored_struct(value)
    return struct.size * struct.dtype.itemsize


def sharding_of(value: Any) -> Sharding:
    given = getattr(value, "sharding", None)
    return given if given is not None else SingleDeviceSharding(jax.local_devices()[0])


def _same_type(saved: Saved, dtype: Any, cast: bool) -> bool:
    if saved.dtype == dtype:
        return True
    if saved.scalar:
        return jnp.dtype(saved.dtype).kind == dtype.kind
    return cast and all(jnp.issubdtype(d, jnp.floating) for d in (saved.dtype, dtype))


def _problem(names: list[str], what: str, remedy: str) -> str:
    if not names:
        return ""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"Leaves {what}: {'; '.join(names[:SHOWN])}{more} ({remedy})."


def _finds(pattern: str | None, name: str, option: str) -> bool:
    if pattern is None:
        return False
    try:
        return re.search(pattern, name) is not None
    except re.error as error:
        raise ValueError(
            f"{option}{pattern!r} is no regular expression ({error}). Escape its special "
            "characters."
        ) from None


def _is_metadata(node: Any) -> bool:
    return isinstance(node, ocp.metadata.value.Metadata)
