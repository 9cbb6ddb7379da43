"""What a derivative keeps for backward, less the arrays that backward has anyway."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
from jax import Array
from jax.tree_util import register_dataclass

from zerojax._types import TreeDef


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


class Keeping:
    """Where a loop keeps what backward needs of each layer: as it is, on the devices."""

    host = False

    def put(self, saved: Saved) -> Saved:
        """Puts what one layer saved where it rests."""
        return saved

    def back(self, saved: Saved) -> Saved:
        """Brings it back."""
        return saved


AS_IT_IS = Keeping()
