"""What a derivative keeps for backward, less the arrays that backward has anyway."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import register_dataclass

from zerojax import _compat
from zerojax._types import TreeDef, is_key

LEAST_MOVED = 2**16  # bytes of an array that would save nothing elsewhere, and be slow to send


@functools.partial(
    register_dataclass, data_fields=["arrays"], meta_fields=["treedef", "slots", "wanted", "moved"]
)
@dataclasses.dataclass(frozen=True)
class Saved:
    """A vjp function without the arrays that backward has anyway: slot k is known array k.

    `wanted` says for which inputs a gradient was wanted, `moved` which arrays a `Keeping` has put
    elsewhere.
    """

    arrays: list[Array]
    treedef: TreeDef
    slots: tuple[int | None, ...]
    wanted: tuple[bool, ...]
    moved: tuple[bool, ...] = ()


def strip(vjp: Callable, known: Sequence[Array | None], wanted: Sequence[bool]) -> Saved:
    """Returns `vjp` without the arrays in `known`.

    [Note: residuals by identity] The function that `jax.vjp` returns is a pytree of residuals. One
    that is an input of the differentiated function comes out as the very object that went in, so
    `id` tells it from an equal value computed there. That is JAX's habit, not its promise; where
    it were broken, full weights would be kept and nothing else would show it. Hence
    `Body.check_stripped`.
    """
    index = {id(array): k for k, array in enumerate(known) if array is not None}
    leaves, treedef = jax.tree.flatten(vjp)
    slots = tuple(index.get(id(leaf)) for leaf in leaves)
    arrays = [x for x, k in zip(leaves, slots, strict=True) if k is None]
    return Saved(arrays, treedef, slots, tuple(wanted))


def restore(saved: Saved, known: Sequence[Array | None]) -> Callable:
    """Returns the vjp function that was stripped."""
    arrays = iter(saved.arrays)
    leaves = [next(arrays) if k is None else known[k] for k in saved.slots]
    return saved.treedef.unflatten(leaves)


@dataclasses.dataclass(frozen=True)
class Keeping:
    """Where what a loop keeps of each layer rests until backward: on the devices, as it is;
    with `host`, in host memory; in parts over mesh axes, `over`; or in parts there."""

    host: bool = False
    over: tuple[str, ...] = ()

    def put(self, saved: Saved) -> Saved:
        """Puts one layer's arrays where they rest, but for small ones."""
        moved = tuple(self.moves(x) for x in saved.arrays)
        arrays = [self._sent(x) if m else x for x, m in zip(saved.arrays, moved, strict=True)]
        return dataclasses.replace(saved, arrays=arrays, moved=moved)

    def back(self, saved: Saved) -> Saved:
        """Brings them back."""
        pairs = zip(saved.arrays, saved.moved, strict=True)
        return dataclasses.replace(saved, arrays=[self._brought(x) if m else x for x, m in pairs])

    def moves(self, value: Array) -> bool:
        # What a policy of the user's has sent to host memory is there already.
        may = not is_key(value) and not _compat.is_on_host(value) and value.nbytes >= LEAST_MOVED
        return may and (self.host or self._dim(value) is not None)

    def _dim(self, value: Array) -> int | None:
        """Returns the first dimension that the axes divide, the batch's last of all."""
        sizes = jax.sharding.get_abstract_mesh().shape
        parts = math.prod(sizes[axis] for axis in self.over)
        dims = [*range(1, value.ndim), 0] if parts > 1 else []
        return next((dim for dim in dims if value.shape[dim] % parts == 0), None)

    def _sent(self, value: Array) -> Array:
        if (dim := self._dim(value)) is not None:
            # Whole first: else XLA would split it where the layer computes with it too, and gather
            # weights over these axes instead.
            value = _over(_over(value, dim, None), dim, self.over)
        return _compat.stored(value) if self.host else value

    def _brought(self, value: Array) -> Array:
        value = _compat.fetched(value)
        return value if (dim := self._dim(value)) is None else _over(value, dim, None)


AS_IT_IS = Keeping()


def _over(value: Array, dim: int, axes: tuple[str, ...] | None) -> Array:
    """Constrains how one dimension is sharded, and leaves the others open."""
    entries: list = [PartitionSpec.UNCONSTRAINED] * value.ndim
    entries[dim] = axes
    sharding = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec(*entries))
    return jax.lax.with_sharding_constraint(value, sharding)
