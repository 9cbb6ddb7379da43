"""Fills up a batch whose number of examples the devices do not divide, and makes its mask."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from zerojax._declared import checked
from zerojax._loss import batch as _batch
from zerojax._state import refusals as _refusals
from zerojax._types import PyTree


@checked
def pad_batch(
    batch: PyTree,
    like: PyTree = None,
    *,
    to: int | None = None,
    accumulate: int = 1,
    batch_specs: PyTree = None,
) -> tuple[PyTree, np.ndarray]:
    """Fills a batch up to a number of examples that the devices divide; returns it and a mask.

    The mask, a numpy array, is True for each real example and False for each that was filled in.
    Put it into the batch, and average with `zerojax.mean(values, where=mask)` in the loss: the
    loss and its gradients are then exactly those of the real examples. The others repeat these,
    from the first one on: zeros could make a logarithm or a division infinite, and gradients NaN
    in spite of the mask. Layers that do not see the mask count them, such as BatchNorm in training.

    Leaves without examples, such as scalars, stay as they are, and so does a batch that needs no
    padding. Numpy arrays stay numpy arrays.

    Arguments:
        like: as in `zerojax.shard_batch`.
        to: the number of examples to fill up to; default, the next one that the devices divide.
            With the number of a full batch, the last batch runs the program that is compiled
            already. Several processes need it: pass the number that a process has of a full batch,
            even where it has fewer examples of the last one, or none (then they are zeros).
        accumulate: the step's number of microbatches, so that all get equally many examples.
        batch_specs: as in `zerojax.train_step`, for leaves that have no examples, or have them
            along another dimension.

    Example:
        >>> rows = np.arange(1.0, 6)
        >>> padded, mask = zerojax.pad_batch(rows)
        >>> print(padded, mask.sum(), zerojax.mean(padded, where=mask))
        [1. 2. 3. 4. 5. 1. 2. 3.] 5 3.0
    """
    _refusals.check_values(batch, "batch")
    splits = _batch.splits_of(like)
    roles = _batch.roles((batch,), batch_specs, splits)
    name, examples = _batch.counted((batch,), roles)
    if not name:
        raise ValueError(
            "the batch has no leaf with examples to pad. Pass at least one array whose first "
            "dimension counts them, or say with batch_specs= which dimension does."
        )
    leaves, treedef = jax.tree.flatten(batch)
    arrays = [v for v in leaves if isinstance(v, Array) and not isinstance(v, Tracer)]
    if not all(array.is_fully_addressable for array in arrays):
        raise ValueError(
            "the batch is already on the devices of several processes. Pad what one process has "
            "loaded, and pass that to zerojax.shard_batch."
        )
    if to is None and (splits.mesh.is_multi_process or not examples):
        raise ValueError(
            f"{name} has {examples} examples in this process, which does not tell how many the "
            "padded batch must have: other processes may have more or fewer. Pass to=, the number "
            "that a process has of a full batch."
        )
    _batch.check_accumulate(accumulate)
    size = len(_batch.local_parts(splits))
    ways = size * accumulate
    least = max(1, -(-examples // ways)) * ways
    rows = least if to is None else to
    if not isinstance(rows, int | np.integer) or rows < least or rows % ways:
        raise ValueError(
            f"to={to!r} must be an integer that divides over "
            f"{_batch.parts_text(size, accumulate)}, and at least the {examples} examples that "
            f"{name} has. Use to={least} or a larger multiple of {ways}."
        )
    source = np.arange(rows) % max(examples, 1)

    def padded(value: ArrayLike, role: _batch.Role) -> ArrayLike:
        if role.kind != _batch.BATCH or examples == rows:
            return value
        array = value if isinstance(value, Array) else np.asarray(value)
        if examples:
            return array[(*[slice(None)] * role.dim, source)]
        shape = (*array.shape[: role.dim], rows, *array.shape[role.dim + 1 :])
        return (jnp if isinstance(array, Array) else np).zeros(shape, array.dtype)

    return treedef.unflatten(map(padded, leaves, roles)), np.arange(rows) < examples
