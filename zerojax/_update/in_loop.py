"""Parameters that are updated in the loop over layers that has their gradients."""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import jax
from jax import Array, lax

from zerojax import _compat
from zerojax._kernel.arrays import Layer, Unchanged, sliced, written
from zerojax._kernel.travel import Held

T = TypeVar("T")
Stacks = list[tuple[Array, ...]]  # of each parameter: it, and what is updated with it


class InLoop(Unchanged):
    """Those among the stacks that a loop scans, by their positions.

    The loop carries their stacks, reads the parameters from there, and writes each layer back.
    """

    def __init__(self, xs: Sequence[Any]) -> None:
        held = {k: x for k, x in enumerate(xs) if isinstance(x, Held)}
        self.updating = {k: x.updating for k, x in held.items() if x.updating is not None}

    @property
    def stacks(self) -> Stacks:
        return [updating.stacks for updating in self.updating.values()]

    def as_updated(self, xs: Sequence[Any], stacks: Stacks) -> list[Any]:
        """Returns what the loop scans, its parameters as they are by now."""
        found = list(xs)
        for k, (param, *_) in zip(self.updating, stacks, strict=True):
            found[k] = Held(found[k].shard, rest=param)
        return found

    def fetched(self, stacks: Stacks, at: Layer) -> list[list[Array]]:
        """Returns one layer of all stacks, on the devices."""
        return [[_compat.fetched(sliced(stack, at.of(stack))) for stack in one] for one in stacks]

    def read_first(self, read: T, stacks: Stacks) -> tuple[T, Stacks]:
        """Has what is read of parameters in host memory be read before they are written.

        XLA would copy their stacks there in each iteration.
        """
        if not any(_compat.is_on_host(param) for param, *_ in stacks):
            return read, stacks
        return lax.optimization_barrier((read, stacks))

    def tied(self, layers: list[list[Array]], left: T) -> tuple[list[list[Array]], T]:
        """Has what comes from host memory arrive with a weight's gradient, which nobody waits for.

        XLA would have all compute of an iteration wait for it. The last gradient here is the first
        that backward has, so that updating and writing back hide behind the others. (Where copies
        take longer than compute, half of them would better come with later ones, so that they meet
        those on the way back: 7.5B on 8 H100s, JAX 0.12, all with the first: 553 ms at 50 GB/s, 778
        at 25, 1369 at 12.5; each with the gradient of its own weight: 591, 719, 1053.)
        """
        if not any(_compat.is_on_host(stack) for one in self.stacks for stack in one):
            return layers, left
        grads, treedef = jax.tree.flatten(left)
        layers, grads[-1] = lax.optimization_barrier((layers, grads[-1]))
        return layers, treedef.unflatten(grads)

    def updated(
        self, stacks: Stacks, layers: list[list[Array]], grads: Sequence[Any], at: Layer
    ) -> Stacks:
        """Updates a layer, which was fetched, and writes it into the stacks."""
        found = []
        for (k, updating), one, old in zip(self.updating.items(), stacks, layers, strict=True):
            new = updating.apply(grads[k].shard, old, updating.given)
            found.append(tuple(_put(*pair, at) for pair in zip(one, new, strict=True)))
        return found

    def left(self, grads: Sequence[Any]) -> list[Any]:
        """Returns the gradients that are still to be stacked, None where one was used."""
        return [None if k in self.updating else grad for k, grad in enumerate(grads)]

    def gradients(self, grads: Sequence[Any], stacks: Stacks) -> list[Any]:
        """Returns the gradients of what the loop scans: the new stacks, for those it updated."""
        found, none = list(grads), cast(Array, None)
        for (k, updating), new in zip(self.updating.items(), stacks, strict=True):
            # JAX knows no gradient of what is only given.
            given = (none,) * len(updating.given)
            found[k] = Held(none, updating=dataclasses.replace(updating, stacks=new, given=given))
        return found


def _put(stack: Array, layer: Array, at: Layer) -> Array:
    layer = layer.astype(stack.dtype)
    stored = _compat.stored(layer) if _compat.is_on_host(stack) else layer
    return written(stack, stored, at.of(stack))
