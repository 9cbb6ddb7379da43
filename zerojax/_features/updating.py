"""How a loss takes a parameter that backward updates, and returns it updated."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax

from zerojax._features.in_backward import LayerUpdate, Updating
from zerojax._kernel import travel as _travel
from zerojax._kernel.device import Param, scaled
from zerojax._kernel.travel import Held, Route
from zerojax._plan.encodings import as_float
from zerojax._types import PyTree, wide


def stacks_of(
    param: Param, update: LayerUpdate, value: Array, state: Sequence[Array]
) -> tuple[Array, ...]:
    """Returns what the loss is differentiated by: the parameter, the state that is updated with it,
    and zeros in place of sums over each layer's gradient, first that of the squares."""
    zeros = [jnp.zeros(len(value), wide(param.grad_dtype))] * (1 + len(update.sums))
    return value, *map(as_float, state), *zeros


def taken_apart(
    update: LayerUpdate, stacks: Sequence[Array]
) -> tuple[list[Array], Array, list[Array]]:
    """Returns the new ones of these stacks, the sum of squares and the other sums."""
    count = len(update.stacks)
    squares, *others = map(jnp.sum, stacks[count:])
    return list(stacks[:count]), squares, others


def updated_input(
    param: Param,
    update: LayerUpdate,
    stacks: PyTree,
    given: Sequence[Array],
    remaining: float,
    reached: set[str],
) -> Held:
    """Returns the parameter as the engine takes it.

    Its update reads `given`, multiplies the gradient by `remaining`, and notes in `reached` that
    backward came to it.
    """
    leaf = param.leaf

    def apply(grad: Array, layers: list[Array], given: Sequence[Array]) -> list[Array]:
        reached.add(leaf.path)
        rest, *others = layers[: len(update.stacks)]
        grad = scaled(grad[None], remaining)
        squares = jnp.sum(jnp.square(grad.astype(wide(grad.dtype))))
        # In one fusion with a sum, XLA would not write the new layers into their stacks.
        summed, grad = grad, lax.optimization_barrier(grad)
        with jax.named_scope("optimizer"):
            others = [_own_part(param, rest), *others]
        sums = update.added(summed, others, given)
        new, *others = update.apply(grad, others, given)
        if leaf.rest.on_device != leaf.update:  # it rests whole
            cut = leaf.cut(Route(leaf.update.axes), dtype=param.compute_dtype)
            new = _travel.gathered(new, cut)
        return [new, *others, squares[None], *(each[None] for each in sums)]

    return Held(param.unread, stacks[0], stacks[1:], Updating(tuple(given), apply))


def _own_part(param: Param, layer: Array) -> Array:
    """Returns the shard that this device updates of a layer as it rests."""
    place = param.leaf.update
    if param.leaf.rest.on_device == place or place.dim is None:
        return layer
    size = param.update_shape[place.dim]
    start = lax.axis_index(place.axes) * size
    return lax.dynamic_slice_in_dim(layer, start, size, place.dim)
