"""The arguments of a loss besides its parameters: what is split, folded or passed on."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax import _mesh, _move, _refusals, _spec
from zerojax._state import path_name

BATCH, KEY, WHOLE = "batch", "key", "whole"


def roles(args: Sequence[Any]) -> list[str]:
    """For each leaf of the arguments: split along the batch, a key, or the same everywhere.

    A key has no dimensions; an array of keys is one for each example. Old-style keys, pairs of
    uint32, are taken for keys everywhere but in the batch itself, the first argument.
    """

    def role(leaf: Any, in_batch: bool) -> str:
        is_key = jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
        if (is_key and not jnp.ndim(leaf)) or (not in_batch and _is_raw_key(leaf)):
            return KEY
        return BATCH if jnp.ndim(leaf) else WHOLE

    return [role(leaf, i == 0) for i, arg in enumerate(args) for leaf in jax.tree.leaves(arg)]


def check(args: Sequence[Any], roles: Sequence[str], size: int, accumulate: int = 1) -> None:
    """Raises where the batch cannot be split over devices and microbatches."""
    leaves = jax.tree_util.tree_flatten_with_path(tuple(args))[0]
    split = [(_name(p), v) for (p, v), role in zip(leaves, roles, strict=True) if role == BATCH]
    if not split:
        return
    first_name, first = split[0]
    for name, value in split:
        if jnp.shape(value)[0] != jnp.shape(first)[0]:
            raise ValueError(
                f"batch leaves disagree on their leading dimension: {first_name} has "
                f"{jnp.shape(first)[0]} and {name} has {jnp.shape(value)[0]}. Give every leaf one "
                "row for each example; let the loss close over what is no part of the batch, and "
                "make keys with jax.random.key."
            )
    check_divides(first_name, jnp.shape(first)[0], size, accumulate)


def check_divides(name: str, rows: int, size: int, accumulate: int) -> None:
    ways = size * accumulate
    if rows == 0 or rows % ways:
        over = f"{size} devices" + (f" x {accumulate} microbatches" if accumulate > 1 else "")
        below, above = rows // ways * ways, -(-max(rows, 1) // ways) * ways
        use = f"{below} or {above}" if below else f"{above}"
        raise ValueError(
            f"{name} has a leading dimension of {rows}, which does not divide over {over}. Use "
            f"{use} examples, or pad and mask the rest with zerojax.mean(values, where=mask)."
        )


def part_shape(value: Any, role: str, ways: int) -> jax.ShapeDtypeStruct:
    """What a loss sees of a leaf when the batch is split so many ways."""
    shape = jnp.shape(value)
    if role == BATCH:
        shape = (shape[0] // ways, *shape[1:])
    return jax.ShapeDtypeStruct(shape, jnp.result_type(value))


def rows(values: Sequence[Any], roles: Sequence[str]) -> int:
    """The number of examples in the batch; 0 without one."""
    found = [v.shape[0] for v, role in zip(values, roles, strict=True) if role == BATCH]
    return found[0] if found else 0


def per_example(aux: Any, rows: int, ways: int, whole_aux: Callable[[], Any]) -> Any:
    """Which aux leaves have a row for each example, in the structure of `aux`.

    Those whose first dimension is as long as a part of the batch are suspects; tracing the loss
    once more on the whole batch tells. Without suspects nothing is traced.
    """

    def suspect(leaf: Any) -> bool:
        return bool(rows and leaf.shape) and leaf.shape[0] == rows // ways

    suspects = jax.tree.map(suspect, aux)
    if ways == 1 or not any(jax.tree.leaves(suspects)):
        return suspects
    return jax.tree.map(lambda s, leaf: s and leaf.shape[0] == rows, suspects, whole_aux())


def shard_batch(
    batch: Any, mesh: Mesh | None = None, *, axis: str | Sequence[str] | None = None
) -> Any:
    """Puts a host batch on the devices, split along its first dimension.

    `train_step` takes host batches too; placing the next batch early overlaps its transfer
    with the running step. Scalars and PRNG keys go to every device.

    In several processes each gives its own rows, as `zerojax.process_slice` counts them, and
    the batch is all of them.

    Example:
        >>> batch = zerojax.shard_batch({"x": np.ones((8, 3))})
        >>> print(batch["x"].addressable_shards[0].data.shape)
        (1, 3)
    """
    _refusals.check_values(batch, "batch")
    mesh, axes = _mesh.resolve(mesh, axis)
    found = roles((batch,))
    split = NamedSharding(mesh, _spec.normal(PartitionSpec(axes)))
    whole = NamedSharding(mesh, PartitionSpec())
    check((batch,), found, len(_local_parts(split, _mesh.axes_size(mesh, axes))))
    leaves, treedef = jax.tree.flatten(batch)
    placed = [
        _from_this_process(value, split) if role == BATCH else _move.moved(value, whole)
        for value, role in zip(leaves, found, strict=True)
    ]
    return treedef.unflatten(placed)


def process_slice(
    rows: int, mesh: Mesh | None = None, *, axis: str | Sequence[str] | None = None
) -> slice:
    """Which of the `rows` of a batch over all processes this one is to load.

    Example:
        >>> print(zerojax.process_slice(32))  # of one process: all
        slice(0, 32, None)
    """
    mesh, axes = _mesh.resolve(mesh, axis)
    size = _mesh.axes_size(mesh, axes)
    if not isinstance(rows, int | np.integer) or rows < 1 or rows % size:
        raise ValueError(
            f"a batch of {rows!r} rows does not divide over {size} devices. Use a multiple of "
            f"{size}."
        )
    split = NamedSharding(mesh, _spec.normal(PartitionSpec(axes)))
    parts = _local_parts(split, size)
    first, last = min(parts), max(parts)
    if last - first + 1 != len(parts):
        raise ValueError(
            f"this process has the parts {sorted(parts)} of the batch, which are not one slice. "
            "Order the mesh so that a process's devices follow one another along the ZeRO axis."
        )
    return slice(first * rows // size, (last + 1) * rows // size)


def _local_parts(split: NamedSharding, size: int) -> set[int]:
    """Of the batch's `size` parts, those on devices of this process."""
    slices = split.addressable_devices_indices_map((size,)).values()
    return {index[0].indices(size)[0] for index in slices if index is not None}


def _from_this_process(value: Any, split: NamedSharding) -> jax.Array:
    placed = isinstance(value, jax.Array) and not value.is_fully_addressable
    if placed or split.is_fully_addressable:
        return jax.device_put(value, split)
    return jax.make_array_from_process_local_data(split, np.asarray(value))


def _name(path: tuple) -> str:
    argument, *inside = path
    name = path_name(tuple(inside))
    if argument.idx == 0:
        return f"batch leaf {name}" if name else "the batch"
    of = f"leaf {name} of " if name else ""
    return f"{of}argument {argument.idx + 2} of the loss"  # which takes parameters and batch first


def _is_raw_key(value: Any) -> bool:
    return jnp.shape(value) == (2,) and jnp.result_type(value) == jnp.uint32
