"""The layer loop with weights that travel while the layer before computes, both ways.

Each turn starts the gather of the next layer's weights and computes with those that came with
the loop's carry. The ends stand outside of the loops: nothing is gathered that nobody uses, and
backward starts with the weights that forward ended with.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax._engine.body import Saved
from zerojax._engine.layers import Array, Layers
from zerojax._engine.vary import add


class PrefetchedLayers(Layers):
    """For loops of at least two turns."""

    def forward_saving(
        self, inputs: Sequence[Any], wanted: Sequence[bool]
    ) -> tuple[list[Array], Any]:
        """Besides the outputs: residuals of all layers but the last, of the last, its weights."""
        consts, carry, xs = self.parts(inputs)
        num_carry, last = self.loop.num_carry, self.loop.length - 1
        wanted = self.wanted_inside(wanted)

        def turn(carry: list, gathered: list, at: Any) -> tuple[list, tuple[list, Saved]]:
            layer = [*consts, *carry, *layer_of(xs, self.index(at))]
            outs, saved = self.body.forward(layer, gathered, wanted)
            return outs[:num_carry], (outs[num_carry:], saved)

        def step(state: tuple[list, list], at: Any) -> tuple[Any, Any]:
            carry, gathered = state
            ahead = self.weights_at(inputs, at + 1)
            carry, kept = turn(carry, gathered, at)
            return (carry, ahead), kept

        start = (carry, self.weights_at(inputs, 0))
        (carry, gathered), (ys, saved) = self.turns(step, start, last)
        carry, (last_ys, last_saved) = turn(carry, gathered, last)
        ys = [jnp.concatenate([y, one[None]]) for y, one in zip(ys, last_ys, strict=True)]
        ys = [jnp.flip(y, 0) for y in ys] if self.loop.reverse else ys
        # Within an outer loop, weights kept here would be kept for each of its turns.
        return [*carry, *ys], (saved, last_saved, [] if self.how.in_loop else gathered)

    def backward(self, inputs: Sequence[Any], saved: Any, cts: Sequence[Any]) -> list[Any]:
        """Each turn reduce-scatters what the turn before left: its gradients travel, as the
        next layer's weights do, beside this layer's compute."""
        kept, last_kept, gathered = saved
        inputs, cts = self.tied(inputs, cts)
        consts, _, xs = self.parts(inputs)
        d_carry, d_ys = self.d_outs(cts)
        types, last = self.carry_types(inputs), self.loop.length - 1
        layer_at = lambda at: [*consts, *types, *layer_of(xs, self.index(at))]  # noqa: E731

        def turn(grads: tuple[list, list], gathered: list, saved: Saved, at: Any) -> Any:
            d_carry, d_consts = grads
            d_layer = [*d_carry, *layer_of(d_ys, self.index(at))]
            d_inputs, d_gathered = self.body.unreduced(layer_at(at), gathered, saved, d_layer)
            more, d_carry, d_xs = self.parts(d_inputs)
            return (d_carry, list(map(add, d_consts, more))), (d_xs, d_gathered)

        def reduced(left: tuple[list, list], at: Any) -> list:
            d_xs, d_gathered = left
            nothing = [None] * (len(inputs) - len(xs))
            return self.body.reduced(layer_at(at), [*nothing, *d_xs], d_gathered)[len(nothing) :]

        def step(state: tuple, turns: Any) -> tuple[tuple, None]:
            grads, gathered, left, stacks = state
            at = last - 1 - turns
            done, shards = reduced(left, at + 1), self.shards_at(inputs, at - 1)
            if self.how.wire.in_turn:  # the gradients' memory goes before the weights need theirs
                shards, done = lax.optimization_barrier((shards, done))
            ahead = self.gathered(inputs, shards)
            stacks = with_layer(stacks, done, self.index(at + 1))
            grads, left = turn(grads, gathered, layer_of(kept, at), at)
            return (grads, ahead, left, stacks), None

        grads = (d_carry, self.d_consts(consts, last_kept.wanted))
        ahead = self.weights_at(inputs, last - 1)
        grads, left = turn(grads, gathered or self.weights_at(inputs, last), last_kept, last)
        types_of_d_xs = jax.eval_shape(lambda left: reduced(left, last), left)
        stacks = jax.tree.map(lambda d: jnp.zeros((last + 1, *d.shape), d.dtype), types_of_d_xs)
        (grads, gathered, left, stacks), _ = self.turns(
            step, (grads, ahead, left, stacks), last - 1
        )
        stacks = with_layer(stacks, reduced(left, 1), self.index(1))
        (d_carry, d_consts), left = turn(grads, gathered, layer_of(kept, 0), 0)
        return [*d_consts, *d_carry, *with_layer(stacks, reduced(left, 0), self.index(0))]

    def turns(self, step: Any, init: Any, count: int) -> tuple[Any, Any]:
        return lax.scan(step, init, jnp.arange(count), unroll=self.loop.unroll)

    def index(self, turn: Any) -> Any:
        """Where in the stack the layer of a turn is."""
        return self.loop.length - 1 - turn if self.loop.reverse else turn

    def weights_at(self, inputs: Sequence[Any], turn: Any) -> list[Array]:
        return self.gathered(inputs, self.shards_at(inputs, turn))

    def shards_at(self, inputs: Sequence[Any], turn: Any) -> list[Any]:
        _, _, xs = self.parts(inputs)
        # Only shards are gathered; the others stand in their places.
        shards = [x if isinstance(x, tuple) else None for x in xs]
        return layer_of(shards, self.index(turn))


def layer_of(stacks: Any, index: Any) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), stacks)


def with_layer(stacks: Any, layer: Any, index: Any) -> Any:
    """In place, where a loop carries the stacks."""
    return jax.tree.map(
        lambda stack, one: lax.dynamic_update_index_in_dim(stack, one, index, 0), stacks, layer
    )
