"""The layer loop that prefetches: in both directions, a layer's weights are all-gathered while the
layer before it computes.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from zerojax import _compat
from zerojax._collectives import Held
from zerojax._engine.layers import Layers, as_read
from zerojax._engine.residuals import Saved
from zerojax._engine.vary import Gradient, Value, add
from zerojax._engine.xla_options import LARGEST_COLLECTIVE
from zerojax._jaxpr import nbytes
from zerojax._update.in_loop import (
    Index,
    InLoop,
    Layer,
    Stacks,
    empty_stacks,
    fetched_layer,
    layer_of,
    resting_layer_of,
    with_layer,
)
from zerojax._wire.codecs import Parts, Quantized

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
#
# Where a gather has a far hop h(i), forward makes that one layer earlier still:
#
#     forward     h(0) h(1) g(0) | h(2) g(1) f(0) | h(3) g(2) f(1) | ...
#
# In the same part as g(i) it would have to end before g(i) starts, and compute would wait for it:
# 557 ms of a 7.5B step instead of 538, at 25 GB/s between nodes. The last part of the loop makes
# h(L-1) again, for nothing: an end outside of the loop would copy all that it keeps for backward.
#
# [Note: what ends an iteration of backward] XLA's scheduler walks a loop's body from its end, and
# starts a collective once what it has passed takes as long as the collective. Where it does not
# know times, a matmul counts as 1 and a collective as 5000; but each small kernel that casts a
# gradient, or writes it into its stack, as 1000. Between the end of r(i+1) and that of g(i-1), six
# of them passed for enough to hide g(i-1), which then ran in the open: 1433 ms of a 7.5B step on 64
# A100s instead of 1400. So gradients go on only when both have ended, and nothing but the layer's
# own compute is left for them to start behind.


LayerSource = tuple[
    list[Value | None], list[Parts]
]  # what the weights of a layer are gathered from


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

        def iteration(carry: list, arrived: list, at: Index) -> tuple[list, tuple[list, Saved]]:
            layer = [*consts, *carry, *layer_of(xs, self.index(at))]
            outs, saved = self.body.forward(layer, self.body.unpacked(arrived), wanted)
            return outs[:num_carry], (outs[num_carry:], saved)

        early = int(self.goes_far_early(inputs))

        def step(state: tuple[list, list, list, list, Index], at: Index) -> tuple[Any, Any]:
            carry, arrived, waiting, stacks, carried = state
            shards = further = self.shards_at(inputs, self.layer(at + 1, carried + 1))
            if early:
                further = self.shards_at(inputs, self.layer(jnp.minimum(at + 2, last)))
            in_node, *waiting = [*waiting, self.in_node(inputs, further)]
            ahead = self.arrived(inputs, shards, in_node)
            carry, (ys, saved) = iteration(carry, arrived, at)
            stacks = with_layer(stacks, in_node, self.index(at + 1))
            return (carry, ahead, waiting, stacks, carried + 1), (ys, self.keeping.put(saved))

        shards = [self.shards_at(inputs, self.layer(at)) for at in range(1 + early)]
        in_node, *waiting = [self.in_node(inputs, each) for each in shards]
        stacks = with_layer(empty_stacks(in_node, last + 1), in_node, self.index(0))
        start = (carry, self.arrived(inputs, shards[0], in_node), waiting, stacks, 0)
        (carry, arrived, _, in_node, _), (ys, saved) = self.iterate(step, start, last)
        carry, (last_ys, last_saved) = iteration(carry, arrived, last)
        ys = [jnp.concatenate([y, one[None]]) for y, one in zip(ys, last_ys, strict=True)]
        ys = [jnp.flip(y, 0) for y in ys] if self.loop.reverse else ys
        # Within an outer loop, weights kept here would be kept for each of its iterations.
        last_weights = [] if self.how.in_loop else arrived
        return [*carry, *ys], ((saved, last_saved, last_weights), in_node)

    def backward(
        self, inputs: Sequence[Value], saved: Any, in_node: list[Parts], cts: Sequence[Any]
    ) -> list[Gradient]:
        """Each iteration reduce-scatters the previous layer's gradients, updates it if that is done
        here, and all-gathers the next layer's weights, while it computes its own layer."""
        return _Backward(self, inputs, saved, in_node, cts).run()

    def iterate(self, step: Any, init: Any, count: int) -> tuple[Any, Any]:
        return lax.scan(step, init, jnp.arange(count), unroll=self.loop.unroll)

    def layer(self, at: Index, carried: Index | None = None) -> Layer:
        """Returns the layer of an iteration, which may be carried by a loop too."""
        return self.turn(self.index(at), self.index(at if carried is None else carried))

    def turn(self, i: Index, counted: Index) -> Layer:
        return Layer(i, counted, self.how.counted)

    def goes_far_early(self, inputs: Sequence[Value]) -> bool:
        """Whether weights make their far hops two layers ahead.

        From host memory they come in the order of the loop's counter: see `Layer`.
        """
        far = any(shard.cut.wire.gather.far for shard in self.loop.split.gathers.values())
        return far and not any(map(_compat.is_on_host, jax.tree.leaves(inputs)))

    def shards_at(self, inputs: Sequence[Value], at: Layer) -> list[Value | None]:
        _, _, xs = self.parts(inputs)
        # Only shards are gathered; the others stand in their places.
        return fetched_layer([x if isinstance(x, Held) else None for x in xs], at)


class _Backward:
    """Backward of one loop. An iteration is that of forward, so it counts down."""

    def __init__(
        self,
        layers: PrefetchedLayers,
        inputs: Sequence[Value],
        saved: Any,
        in_node: list[Parts],
        cts: Sequence[Any],
    ) -> None:
        self.layers, self.body, self.index = layers, layers.body, layers.index
        self.in_node, (self.kept, self.last_kept, self.last_weights) = in_node, saved
        self.consts, self.carry, self.xs = layers.parts(inputs)
        self.in_loop, self.inputs = InLoop(self.xs), as_read(inputs)
        self.d_carry, self.d_ys = layers.d_outs(cts)
        self.last = layers.loop.length - 1
        cuts = [shard.cut for shard in layers.loop.split.gathers.values()]
        # Nothing waits for what goes as codes: it is a chain of two messages with compute between.
        coded = any(isinstance(cut.wire.reduce.codec, Quantized) for cut in cuts)
        in_pieces = nbytes([*layers.loop.split.gathers]) > LARGEST_COLLECTIVE
        self.in_turn = layers.how.in_turn and in_pieces and not coded

    def run(self) -> list[Gradient]:
        """Returns the gradients of the inputs."""
        last, stacks = self.last, self.in_loop.stacks
        grads = self.d_carry, self.layers.d_consts(self.consts, self.last_kept.wanted)
        ahead = self.arrived(self.source_at(stacks, self.layers.layer(last - 1)))
        source = self.source_at(stacks, self.layers.layer(last))
        arrived = self.last_weights or self.arrived(source)
        grads, left = self.unreduced(grads, arrived, self.last_kept, last)
        types = jax.eval_shape(lambda left: self.in_loop.left(self.reduced(left, last)), left)
        start = (grads, ahead, left, empty_stacks(types, last + 1), stacks, 0)
        state, _ = self.layers.iterate(self.step, start, last - 1)
        grads, arrived, left, d_stacks, stacks, _ = state
        for at in (1, 0):
            layer = self.layers.layer(at)
            old, done = self.in_loop.fetched(stacks, layer), self.reduced(left, at)
            d_stacks = self.stacked(d_stacks, done, at)
            stacks = self.in_loop.updated(stacks, old, done, layer)
            if at:
                kept = self.layers.keeping.back(layer_of(self.kept, 0))
                grads, left = self.unreduced(grads, arrived, kept, 0)
        d_carry, d_consts = grads
        return [*d_consts, *d_carry, *self.in_loop.gradients(d_stacks, stacks)]

    def step(self, state: tuple, count: Array) -> tuple[tuple, None]:
        """Computes a layer, and disposes of the one before it."""
        grads, before, (d_xs, d_gathered), d_stacks, stacks, carried = state
        at = self.last - 1 - count
        layer = self.layers.layer(at + 1, self.last - carried)
        ahead = self.layers.layer(at - 1, self.last - 2 - carried)
        source, stacks = self.in_loop.read_first(self.source_at(stacks, ahead), stacks)
        old = self.in_loop.fetched(stacks, layer)
        arrived, sums = self.ordered(source, self.body.summed(d_gathered))
        done = self.added(d_xs, sums, at + 1)
        d_stacks = self.stacked(d_stacks, done, at + 1)
        kept = resting_layer_of(self.kept, self.layers.turn(at, self.last - 1 - carried))
        grads, left = self.unreduced(grads, before, self.layers.keeping.back(kept), at)
        old, left = self.in_loop.tied(old, left)
        stacks = self.in_loop.updated(stacks, old, done, layer)
        return (grads, arrived, left, d_stacks, stacks, carried + 1), None

    def source_at(self, stacks: Stacks, at: Layer) -> LayerSource:
        """Returns what one layer's weights are gathered from, some updated by now."""
        xs = self.in_loop.as_updated(self.xs, stacks)
        shards = self.layers.shards_at([*self.consts, *self.carry, *xs], at)
        return shards, layer_of(self.in_node, at.i)

    def ordered(
        self, source: LayerSource, sums: list[Array | None]
    ) -> tuple[list[Parts], list[Array | None]]:
        """Returns the next weights as they arrive, and sums of gradients to go on with.

        In turn, each weight waits for its own gradient, whose memory it then takes: with 10^12
        parameters, where a layer goes out in several pieces, 57 GiB instead of 68. If all waited
        for all, no gather could start before the last reduce-scatter ends: 16.7 s instead of 14.8.
        A layer in one piece has nothing to run beside if it waits: see the note on what ends an
        iteration.
        """
        if not self.in_turn:
            return lax.optimization_barrier((self.arrived(source), sums))
        shards, in_node, sums = list(source[0]), list(source[1]), list(sums)
        first = len(self.inputs) - len(shards)
        for i, shard in enumerate(self.body.split.gathers.values()):
            at = self.body.split.invars.index(shard.root) - first
            if at >= 0:  # else it is a constant of the loop
                tied = lax.optimization_barrier((shards[at], in_node[i], sums[i]))
                shards[at], in_node[i], sums[i] = tied
        return self.arrived((shards, in_node)), sums

    def arrived(self, source: LayerSource) -> list[Parts]:
        return self.layers.arrived(self.inputs, *source)

    def unreduced(
        self, grads: tuple[list, list], arrived: list[Parts], saved: Saved, at: Index
    ) -> tuple[tuple[list, list], tuple[list, list]]:
        """Returns the gradients of carry and constants after one layer's backward, and what is
        left to reduce: the gradients of its shards and of its gathered weights."""
        d_carry, d_consts = grads
        d_layer = [*d_carry, *layer_of(self.d_ys, self.index(at))]
        gathered = self.body.unpacked(arrived)
        d_inputs, d_gathered = self.body.unreduced(self.layer_at(at), gathered, saved, d_layer)
        more, d_carry, d_xs = self.layers.parts(d_inputs)
        return (d_carry, list(map(add, d_consts, more))), (d_xs, d_gathered)

    def reduced(self, left: tuple[list, list], at: Index) -> list[Gradient]:
        """Returns one layer's gradients, reduce-scattered."""
        d_xs, d_gathered = left
        return self.added(d_xs, self.body.summed(d_gathered), at)

    def added(self, d_xs: list, sums: list[Array | None], at: Index) -> list[Gradient]:
        """Returns one layer's gradients, from what was reduced and what did not need to be."""
        nothing = [None] * (len(self.inputs) - len(d_xs))
        return self.body.added(self.layer_at(at), [*nothing, *d_xs], sums)[len(nothing) :]

    def stacked(self, d_stacks: list, done: list[Gradient], at: Index) -> list:
        """Writes one layer's gradients into their stacks."""
        return with_layer(d_stacks, self.in_loop.left(done), self.index(at))

    def layer_at(self, at: Index) -> list[Any]:
        """Returns the inputs of one layer's body; its carry is lost, so as types."""
        consts, _, xs = self.layers.parts(self.inputs)
        types = self.layers.carry_types(self.inputs)
        return [*consts, *types, *layer_of(xs, self.index(at))]
