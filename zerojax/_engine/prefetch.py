"""The layer loop that prefetches: in both directions, a layer's weights are all-gathered while the
layer before it computes.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from zerojax._collectives import Held, Parts
from zerojax._engine.layers import Layers
from zerojax._engine.residuals import Saved
from zerojax._engine.vary import Gradient, Value, add
from zerojax._types import PyTree

# [Note: the prefetch schedule] For layers 0 to L-1, with g(i) the all-gather of layer i's weights,
# f(i) and b(i) its compute, and r(i) the reduce-scatter of its gradients:
#
#     forward     g(0) | g(1) f(0) | g(2) f(1) | ... | g(L-1) f(L-2) | f(L-1)
#     backward    g(L-2) b(L-1) | r(L-1) g(L-3) b(L-2) | ... | r(2) g(0) b(1) | r(1) b(0) | r(0)
#
# What stands between two bars is independent, so that the collectives run beside the compute. The
# middle parts are a loop, whose carry holds the gathered weights and the gradients left to reduce.
# The ends stand outside of it: no gather is issued whose result is not used, and b(L-1) starts with
# the weights that f(L-1) ended with.


Index = int | Array  # an iteration, or a layer of the stack


class PrefetchedLayers(Layers):
    """A loop of at least two iterations that gathers one layer ahead."""

    def forward_saving(
        self, inputs: Sequence[Value], wanted: Sequence[bool]
    ) -> tuple[list[Array], Any]:
        """Returns the outputs, and what to keep: the residuals of all layers but the last, those of
        the last and its weights; and what far hops returned for each layer."""
        consts, carry, xs = self.parts(inputs)
        num_carry, last = self.loop.num_carry, self.loop.length - 1
        wanted = self.wanted_inside(wanted)

        def iteration(carry: list, gathered: list, at: Index) -> tuple[list, tuple[list, Saved]]:
            layer = [*consts, *carry, *layer_of(xs, self.index(at))]
            outs, saved = self.body.forward(layer, gathered, wanted)
            return outs[:num_carry], (outs[num_carry:], saved)

        def step(state: tuple[list, list, list], at: Index) -> tuple[Any, Any]:
            carry, gathered, stacks = state
            near, ahead = self.brought(inputs, at + 1)
            carry, kept = iteration(carry, gathered, at)
            return (carry, ahead, with_layer(stacks, near, self.index(at + 1))), kept

        near, first = self.brought(inputs, 0)
        stacks = with_layer(empty_stacks(near, last + 1), near, self.index(0))
        (carry, gathered, near), (ys, saved) = self.iterate(step, (carry, first, stacks), last)
        carry, (last_ys, last_saved) = iteration(carry, gathered, last)
        ys = [jnp.concatenate([y, one[None]]) for y, one in zip(ys, last_ys, strict=True)]
        ys = [jnp.flip(y, 0) for y in ys] if self.loop.reverse else ys
        # Within an outer loop, weights kept here would be kept for each of its iterations.
        last_weights = [] if self.how.in_loop else gathered
        return [*carry, *ys], ((saved, last_saved, last_weights), near)

    def backward(
        self, inputs: Sequence[Value], saved: Any, near: list[Parts], cts: Sequence[Any]
    ) -> list[Gradient]:
        """Each iteration reduce-scatters the previous layer's gradients and all-gathers the next
        layer's weights while it computes its own layer."""
        kept, last_kept, gathered = saved
        d_carry, d_ys = self.d_outs(cts)
        last = self.loop.length - 1
        source_at = functools.partial(self.source_at, inputs, near)
        compute = functools.partial(self.unreduced, inputs, d_ys)
        reduced = functools.partial(self.reduced, inputs)

        def step(state: tuple, count: Array) -> tuple[tuple, None]:
            grads, gathered, left, stacks = state
            at = last - 1 - count
            done, (shards, parts) = reduced(left, at + 1), source_at(at - 1)
            if self.how.in_turn:  # frees the gradients' memory before the weights need theirs
                shards, parts, done = lax.optimization_barrier((shards, parts, done))
            ahead = self.gathered(inputs, shards, parts)
            stacks = with_layer(stacks, done, self.index(at + 1))
            grads, left = compute(grads, gathered, layer_of(kept, at), at)
            return (grads, ahead, left, stacks), None

        consts, _, _ = self.parts(inputs)
        grads = (d_carry, self.d_consts(consts, last_kept.wanted))
        ahead = self.gathered(inputs, *source_at(last - 1))
        gathered = gathered or self.gathered(inputs, *source_at(last))
        grads, left = compute(grads, gathered, last_kept, last)
        stacks = empty_stacks(jax.eval_shape(lambda left: reduced(left, last), left), last + 1)
        (grads, gathered, left, stacks), _ = self.iterate(
            step, (grads, ahead, left, stacks), last - 1
        )
        stacks = with_layer(stacks, reduced(left, 1), self.index(1))
        (d_carry, d_consts), left = compute(grads, gathered, layer_of(kept, 0), 0)
        return [*d_consts, *d_carry, *with_layer(stacks, reduced(left, 0), self.index(0))]

    def unreduced(
        self,
        inputs: Sequence[Value],
        d_ys: list[Gradient],
        grads: tuple[list, list],
        gathered: list[Array],
        saved: Saved,
        at: Index,
    ) -> tuple[tuple[list, list], tuple[list, list]]:
        """Returns the gradients of carry and constants after one layer's backward, and what is
        left to reduce: the gradients of its shards and of its gathered weights."""
        d_carry, d_consts = grads
        d_layer = [*d_carry, *layer_of(d_ys, self.index(at))]
        layer = self.layer_at(inputs, at)
        d_inputs, d_gathered = self.body.unreduced(layer, gathered, saved, d_layer)
        more, d_carry, d_xs = self.parts(d_inputs)
        return (d_carry, list(map(add, d_consts, more))), (d_xs, d_gathered)

    def reduced(
        self, inputs: Sequence[Value], left: tuple[list, list], at: Index
    ) -> list[Gradient]:
        """Returns one layer's gradients, reduce-scattered."""
        d_xs, d_gathered = left
        nothing = [None] * (len(inputs) - len(d_xs))
        layer = self.layer_at(inputs, at)
        return self.body.reduced(layer, [*nothing, *d_xs], d_gathered)[len(nothing) :]

    def layer_at(self, inputs: Sequence[Value], at: Index) -> list[Any]:
        """Returns the inputs of one layer's body; its carry is lost, so as types."""
        consts, _, xs = self.parts(inputs)
        return [*consts, *self.carry_types(inputs), *layer_of(xs, self.index(at))]

    def iterate(self, step: Any, init: Any, count: int) -> tuple[Any, Any]:
        return lax.scan(step, init, jnp.arange(count), unroll=self.loop.unroll)

    def index(self, at: Index) -> Index:
        """Returns where in the stack the layer of an iteration is."""
        return self.loop.length - 1 - at if self.loop.reverse else at

    def brought(self, inputs: Sequence[Value], at: Index) -> tuple[list[Parts], list[Array]]:
        """Returns one layer's weights after their far hops, and all-gathered."""
        shards = self.shards_at(inputs, at)
        near = self.near(inputs, shards)
        return near, self.gathered(inputs, shards, near)

    def source_at(
        self, inputs: Sequence[Value], near: list[Parts], at: Index
    ) -> tuple[list[Value | None], list[Parts]]:
        """Returns what backward gathers one layer's weights from."""
        return self.shards_at(inputs, at), layer_of(near, self.index(at))

    def shards_at(self, inputs: Sequence[Value], at: Index) -> list[Value | None]:
        _, _, xs = self.parts(inputs)
        # Only shards are gathered; the others stand in their places.
        shards = [x if isinstance(x, Held) else None for x in xs]
        return layer_of(shards, self.index(at))


def layer_of(stacks: PyTree, index: Index) -> PyTree:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), stacks)


def empty_stacks(layer: PyTree, length: int) -> PyTree:
    """Returns stacks of zeros for so many layers."""
    return jax.tree.map(lambda x: jnp.zeros((length, *x.shape), x.dtype), layer)


def with_layer(stacks: PyTree, layer: PyTree, index: Index) -> PyTree:
    """Writes a layer into its stacks, in place where a loop carries them."""
    return jax.tree.map(
        lambda stack, one: lax.dynamic_update_index_in_dim(stack, one, index, 0), stacks, layer
    )
