"""The arguments of a loss besides its parameters: what is split, folded or passed on."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax import _mesh
from zerojax._state import path_name

BATCH, KEY, WHOLE = "batch", "key", "whole"


def roles(args: Sequence[Any]) -> list[str]:
    """For each leaf of the arguments: split along the batch, a key, or the same everywhere."""
    found = []
    for position, arg in enumerate(args):
        leaves = jax.tree.leaves(arg)
        # An old-style key is a pair of uint32; only a lone one after the batch can be meant.
        raw_key = position > 0 and len(leaves) == 1 and _is_raw_key(leaves[0])
        for leaf in leaves:
            if raw_key or jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
                found.append(KEY)
            else:
                found.append(BATCH if jnp.ndim(leaf) else WHOLE)
    return found


def check(args: Sequence[Any], roles: Sequence[str], plan: Any, accumulate: int) -> None:
    """Raises where the batch cannot be split over devices and microbatches."""
    leaves = jax.tree_util.tree_flatten_with_path(tuple(args))[0]
    split = [(_name(p), v) for (p, v), role in zip(leaves, roles, strict=True) if role == BATCH]
    if not split:
        return
    first_name, first = split[0]
    for name, value in split:
        if value.shape[0] != first.shape[0]:
            raise ValueError(
                f"batch leaves disagree on their leading dimension: {first_name} has "
                f"{first.shape[0]} and {name} has {value.shape[0]}. Give every leaf one row for "
                "each example; let the loss close over what is no part of the batch."
            )
    check_divides(first_name, first.shape[0], plan.size, accumulate)


def check_divides(name: str, rows: int, size: int, accumulate: int = 1) -> None:
    ways = size * accumulate
    if rows == 0 or rows % ways:
        over = f"{size} devices" + (f" x {accumulate} microbatches" if accumulate > 1 else "")
        below, above = rows // ways * ways, -(-max(rows, 1) // ways) * ways
        use = f"{below} or {above}" if below else f"{above}"
        raise ValueError(
            f"{name} has a leading dimension of {rows}, which does not divide over {over}. Use "
            f"{use} examples, or pad and mask the rest with zerojax.mean(values, where=mask)."
        )


def local_shape(value: Any, role: str, ways: int) -> jax.ShapeDtypeStruct:
    """What one device sees of a leaf in one microbatch."""
    shape = jnp.shape(value)
    if role == BATCH:
        shape = (shape[0] // ways, *shape[1:])
    return jax.ShapeDtypeStruct(shape, jnp.result_type(value))


def folded(key: Any, index: Any) -> Any:
    return jax.random.fold_in(key, index)


def per_example(
    aux: Any, values: Sequence[Any], roles: Sequence[str], ways: int, aux_at: Callable[[int], Any]
) -> Any:
    """Which aux leaves have a row for each example, in the structure of `aux`.

    Those whose first dimension is as long as the batch are suspects; tracing the loss once
    more at another batch size tells. Without suspects nothing is traced.
    """
    rows = [v.shape[0] for v, role in zip(values, roles, strict=True) if role == BATCH]
    local = rows[0] // ways if rows else 0

    def suspect(leaf: Any) -> bool:
        return bool(leaf.shape) and leaf.shape[0] == local and bool(rows)

    if not any(suspect(leaf) for leaf in jax.tree.leaves(aux)):
        return jax.tree.map(lambda _: False, aux)
    if ways == 1:
        return jax.tree.map(suspect, aux)
    other = aux_at(1)
    return jax.tree.map(lambda a, b: suspect(a) and b.shape[:1] == (rows[0],), aux, other)


def shard_batch(
    batch: Any, mesh: Mesh | None = None, *, axis: str | Sequence[str] | None = None
) -> Any:
    """Puts a host batch on the devices, split along its first dimension.

    `train_step` takes host batches too; placing the next batch early overlaps its transfer
    with the running step. Scalars and PRNG keys go to every device.

    Example:
        >>> batch = zerojax.shard_batch({"x": np.ones((8, 3))})
        >>> print(batch["x"].sharding.spec)
        PartitionSpec('data',)
    """
    mesh, axes = _mesh.resolve(mesh, axis)
    if jax.process_count() > 1:
        raise ValueError(
            f"shard_batch places a batch that one process holds whole, and this run has "
            f"{jax.process_count()} processes. Build the global batch from each process's part "
            "with jax.make_array_from_process_local_data."
        )
    flat, treedef = jax.tree_util.tree_flatten_with_path(batch)
    found = roles((batch,))
    size = _mesh.axes_size(mesh, axes)
    entry = axes[0] if len(axes) == 1 else axes
    split = [(_name(p), jnp.shape(v)[0]) for (p, v), r in zip(flat, found, strict=True) if r == BATCH]
    for name, rows in split:
        if rows != split[0][1]:
            raise ValueError(
                f"batch leaves disagree on their leading dimension: {split[0][0]} has "
                f"{split[0][1]} and {name} has {rows}. Give every leaf one row for each example."
            )
        check_divides(name, rows, size)
    placed = []
    for (_, value), role in zip(flat, found, strict=True):
        spec = PartitionSpec(entry) if role == BATCH else PartitionSpec()
        array = value if isinstance(value, jax.Array) else np.asarray(value)
        placed.append(jax.device_put(array, NamedSharding(mesh, spec)))
    return treedef.unflatten(placed)


def _name(path: tuple) -> str:
    name = path_name(path[1:] if path and hasattr(path[0], "idx") else path)
    return f"batch leaf {name}" if name else "the batch"


def _is_raw_key(value: Any) -> bool:
    return jnp.shape(value) == (2,) and jnp.result_type(value) == jnp.uint32
