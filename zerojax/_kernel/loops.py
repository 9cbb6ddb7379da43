"""A scan over stacked weights that gathers one layer at a time in both directions.

`Layers` gathers a layer when its turn comes, `PrefetchedLayers` while the layer before it computes.
Forward keeps what the derivative of each layer needs, except for the weights. Backward walks the
layers in reverse, gathers each again, and reduce-scatters its gradient inside the loop or updates
the layer with it. See the note in `body.py`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array, lax

from zerojax import _compat
from zerojax._jaxprs import nbytes
from zerojax._kernel.arrays import (
    Changing,
    Gradient,
    Hook,
    Index,
    Layer,
    T,
    Turn,
    Value,
    add,
    as_read,
    by_scanned_index,
    changing,
    empty_stacks,
    fetched_layer,
    layer_of,
    resting_layer_of,
    with_layer,
)
from zerojax._kernel.body import Body, How, Run, Saved, WeightGrads
from zerojax._kernel.pieces import Loop
from zerojax._kernel.travel import Held, Transit
from zerojax._types import PyTree, is_float


class Layers:
    """One scan in three forms: plain, keeping residuals, and backward over them.

    Iteration 0 is the first layer that forward walks, at whichever end of the stack.
    """

    def __init__(self, loop: Loop, how: How, run: Run) -> None:
        self.loop = loop
        self.first_x = loop.num_consts + loop.num_carry
        # Backward has constants and scanned inputs again, but not the values of the carry.
        lost = frozenset(range(loop.num_consts, self.first_x))
        self.how = how
        # Residuals leave the devices only as whole layers. Older XLA cannot match a reversed loop's
        # writes to host memory, so there they stay.
        keeping = None if how.in_loop else how.keeping
        if keeping and keeping.host and loop.reverse and not how.counted():
            keeping = None
        self.put: Callable[[Saved], Saved] = keeping.put if keeping else lambda saved: saved
        self.back: Callable[[Saved], Saved] = keeping.back if keeping else lambda saved: saved
        self.body = Body(loop.split, dataclasses.replace(how, in_loop=True), run, lost=lost)
        # Weights that backward does not gather again; those without a route are there anyway.
        gathers = loop.split.gathers.items()
        self.kept_weights = [v for v, s in gathers if not how.regather and s.cut.gather.axes]

    def parts(self, operands: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
        """Returns constants, carry and scanned operands."""
        first, first_x = self.loop.num_consts, self.first_x
        return list(operands[:first]), list(operands[first:first_x]), list(operands[first_x:])

    def forward(self, inputs: Sequence[Value]) -> list[Array]:
        consts, carry, xs = self.parts(inputs)
        num_carry = self.loop.num_carry

        def step(carry: list, xs: list) -> tuple[list, list]:
            outs = self.body([*consts, *carry, *xs])
            return outs[:num_carry], outs[num_carry:]

        carry, ys = self.scan(step, carry, xs, reverse=self.loop.reverse)
        return [*carry, *ys]

    def forward_saving(
        self, inputs: Sequence[Value], wanted: Sequence[bool]
    ) -> tuple[list[Array], tuple[PyTree, list[Transit]]]:
        """Returns the outputs, and what `backward` needs besides the inputs: the residuals, with
        the full weights to keep, and the weights after their far hops, to gather them from there.
        """
        consts, carry, xs = self.parts(inputs)
        num_carry = self.loop.num_carry
        wanted = self.wanted_inside(wanted)

        def step(carry: list, xs: list) -> tuple[PyTree, PyTree]:
            layer = [*consts, *carry, *xs]
            crossed = self.body.cross(layer)
            gathered = self.body.gather(layer, crossed, {})
            outs, saved = self.body.forward(layer, gathered, wanted)
            full = [gathered[v] for v in self.kept_weights]
            return outs[:num_carry], (outs[num_carry:], ((self.put(saved), full), crossed))

        carry, (ys, kept) = self.scan(step, carry, xs, reverse=self.loop.reverse)
        return [*carry, *ys], kept

    def backward(
        self, inputs: Sequence[Value], saved: PyTree, crossed: list[Transit], cts: list[Gradient]
    ) -> list[Gradient]:
        """Returns the gradients of the inputs."""
        consts, _, xs = self.parts(inputs)
        stacks, hook = self.changed(xs)
        xs = as_read(xs)
        d_carry, d_ys = cts[: self.loop.num_carry], cts[self.loop.num_carry :]
        types: list = self.carry_types(inputs)

        saved, full = saved
        last = self.loop.length - 1

        def step(state: tuple, scanned: tuple) -> tuple[tuple, list]:
            d_carry, d_consts, stacks, count = state
            saved, full, crossed, d_ys, xs, scanned_count = scanned
            layer = self.layer(last, -1, scanned_count, count)
            rest = fetched_layer({k: stack[:1] for k, stack in stacks.items()}, layer)
            inputs = [*consts, *types, *as_read(xs, rest)]
            kept = dict(zip(self.kept_weights, full, strict=True))
            gathered = self.body.gather(inputs, crossed, kept)
            saved = self.back(saved)
            d_inputs = self.body.backward(inputs, gathered, saved, [*d_carry, *d_ys])
            more, d_carry, d_xs = self.parts(d_inputs)
            if hook:
                read, stacks, _ = hook.read(stacks, layer, ())
                stacks, _ = hook.finish(stacks, read, d_xs, layer, ())
            grads = d_carry, list(map(add, d_consts, more))
            return (*grads, stacks, count + 1), unchanged(d_xs, stacks)

        start = (d_carry, self.d_consts(consts, saved.wanted), stacks, 0)
        counts = jnp.arange(last + 1) if self.loop.reverse else jnp.arange(last, -1, -1)
        (d_carry, d_consts, stacks, _), d_xs = self.scan(
            step, start, (saved, full, crossed, d_ys, xs, counts), reverse=not self.loop.reverse
        )
        return [*d_consts, *d_carry, *with_changes(d_xs, stacks)]

    # -- shared by both walks

    def changed(self, xs: Sequence[Value]) -> tuple[Changing, Hook | None]:
        """Returns what backward changes of the scanned inputs, and what changes it."""
        held = changing(xs)
        hook = self.how.updates(held) if self.how.updates and held else None
        return {k: (x.source, *(x.state or ())) for k, x in held.items()}, hook

    def scan(self, step: Turn, init: PyTree, xs: PyTree, *, reverse: bool) -> tuple[PyTree, PyTree]:
        if reverse and any(map(_compat.is_on_host, jax.tree.leaves(xs))) and not self.how.counted():
            step, xs = by_scanned_index(step, xs, self.loop.length)
        return lax.scan(
            step, init, xs, length=self.loop.length, reverse=reverse, unroll=self.loop.unroll
        )

    def layer(self, number: int, sign: int = 1, scanned: Index = 0, carried: Index = 0) -> Layer:
        """Returns the layer of iteration `number` of forward, plus or minus a count."""
        top = self.loop.length - 1 if self.loop.reverse else None
        return Layer(number, sign, scanned, carried, top, self.how.counted)

    def wanted_inside(self, wanted: Sequence[bool]) -> list[bool]:
        """The carry may vary inside the loop even if its first value does not."""
        consts, carry, xs = self.parts(wanted)
        return [*consts, *[True] * len(carry), *xs]

    def d_consts(self, consts: Sequence[Any], wanted: Sequence[bool]) -> list[Gradient]:
        """Returns zeros, to which the loop adds the constants' gradients."""
        pairs = zip(consts, wanted[: len(consts)], strict=True)
        return [jnp.zeros_like(x) if want and is_float(x) else None for x, want in pairs]

    def carry_types(self, inputs: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        _, carry, _ = self.parts(inputs)
        return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in carry]


def unchanged(grads: Sequence[Gradient], stacks: Changing) -> list[Gradient]:
    """Returns the gradients that a loop stacks: not those that its hook took."""
    return [None if k in stacks else grad for k, grad in enumerate(grads)]


def with_changes(grads: Sequence[Gradient], stacks: Changing) -> list[Gradient]:
    """Returns the gradients of the scanned inputs: what those are by now that backward changed."""
    none = cast(Array, None)  # JAX takes it for no gradient
    return [
        Held(none, stacks[k][0], stacks[k][1:]) if k in stacks else grad
        for k, grad in enumerate(grads)
    ]


# [Note: the prefetch schedule] For layers 0 to L-1, with g(i) the all-gather of layer i's weights,
# f(i) and b(i) its compute, and r(i) the reduce-scatter of its gradients:
#
#     forward     g(0) | g(1) f(0) | g(2) f(1) | ... | g(L-1) f(L-2) | f(L-1)
#     backward    g(L-2) b(L-1) | r(L-1) g(L-3) b(L-2) | ... | r(2) g(0) b(1) | r(1) b(0) | r(0)
#
# Operations between two bars are independent, so that the collectives run beside the compute. The
# middle parts are a loop, whose carry holds the gathered weights and the gradients left to reduce.
# The ends stand outside of it. So every gather is used, and b(L-1) starts with the weights that
# f(L-1) ended with.
#
# XLA compiles each end as it does a layer: 40 matmuls stand outside of the loops and 23 inside, and
# a 7.5B step takes 1.4 of the time of data parallelism to compile. (It makes equal kernels once,
# but looks for their fusions and tiles again.) In a loop, each end would send a layer for nothing.
# Without prefetching it is no better: to pipeline the reduce-scatters of backward, XLA takes the
# first iteration out itself.
#
# If the weights of the last K layers stay, these layers have a loop of their own. In backward it
# comes first and gathers nothing: g(L-K-1), with which the next loop begins, runs beside b(L-1).
#
# If a gather has a far hop h(i), forward makes this hop one layer earlier still:
#
#     forward     h(0) h(1) g(0) | h(2) g(1) f(0) | h(3) g(2) f(1) | ...
#
# In the same part as g(i), the hop would have to end before g(i) starts, and compute would wait for
# it: a 7.5B step takes 557 ms instead of 538, at 25 GB/s between nodes. The last part of the loop
# makes h(L-1) again, for nothing: an end outside of the loop would copy all that the loop keeps for
# backward.
#
# [Note: what ends an iteration of backward] XLA's scheduler walks a loop's body from its end, and
# starts a collective once the operations that it has passed take as long as the collective. If it
# does not know times, it counts a matmul as 1 and a collective as 5000, but each small kernel that
# casts a gradient, or writes it into its stack, as 1000. Between the end of r(i+1) and that of
# g(i-1) there were six of them. The scheduler took these for enough to hide g(i-1), which then ran
# exposed: 1433 ms of a 7.5B step on 64 A100s instead of 1400. So an iteration passes gradients on
# only when both have ended. Then the collectives have only the layer's own compute to start behind.


# What a layer's weights are gathered from: `shards_at`, and the weights after their far hops.
LayerSource = tuple[list[Value | None], list[Transit]]


class PrefetchedLayers(Layers):
    """A loop of at least two iterations that gathers one layer ahead, if it will be differentiated.

    (An evaluation gathers each layer in its turn: of the 144 ms of a 7.5B evaluation on 64 H100s,
    11 wait.) The last layer runs after the loop. `ranges` are the iterations of one or two loops
    before it. Backward gathers the weights of the first `regathered` layers again. Those of the
    others stay: of the last layer, and of as many before it as `How.keep_layers` says.
    """

    def __init__(self, loop: Loop, how: How, run: Run) -> None:
        super().__init__(loop, how, run)
        last = loop.length - 1
        # An outer loop would keep these weights for each of its iterations, so there none stay.
        self.regathered = last if how.in_loop else max(0, min(last, loop.length - how.keep_layers))
        self.ranges = [r for r in (range(self.regathered), range(self.regathered, last)) if r]

    def forward_saving(
        self, inputs: Sequence[Value], wanted: Sequence[bool]
    ) -> tuple[list[Array], tuple[PyTree, list[Transit]]]:
        """Returns the outputs, and what backward needs: for each loop, the residuals of its layers
        and the weights that stay; those of the last layer; the result of far hops for each layer.
        """
        consts, carry, xs = self.parts(inputs)
        num_carry, last = self.loop.num_carry, self.loop.length - 1
        wanted = self.wanted_inside(wanted)

        def iteration(carry: list, arrived: list, at: Layer) -> tuple[list, tuple[list, Saved]]:
            layer = [*consts, *carry, *layer_of(xs, at.i)]
            outs, saved = self.body.forward(layer, self.body.full(arrived), wanted)
            return outs[:num_carry], (outs[num_carry:], saved)

        # Far hops two layers ahead. From host memory, layers come in the loop's order: see `Layer`.
        far = any(shard.cut.gather.far for shard in self.loop.split.gathers.values())
        early = int(far and not any(map(_compat.is_on_host, jax.tree.leaves(inputs))))

        def step(keeps: bool, state: tuple, scanned: Array) -> tuple[PyTree, PyTree]:
            carry, arrived, waiting, stacks, count = state
            at = self.layer(0, 1, scanned, count)
            shards = further = self.shards_at(xs, at.after)
            if early:
                further = self.shards_at(xs, self.layer(0, 1, jnp.minimum(scanned + 2, last)))
            crossed, *waiting = [*waiting, self.body.cross(further)]
            ahead = self.body.arrive(shards, crossed)
            carry, (ys, saved) = iteration(carry, arrived, at)
            stacks = with_layer(stacks, crossed, at.after.i)
            kept = self.put(saved), arrived if keeps else []
            return (carry, ahead, waiting, stacks, count + 1), (ys, kept)

        shards = [self.shards_at(xs, self.layer(at)) for at in range(1 + early)]
        crossed, *waiting = [self.body.cross(each) for each in shards]
        stacks = with_layer(empty_stacks(crossed, last + 1), crossed, self.layer(0).i)
        state = (carry, self.body.arrive(shards[0], crossed), waiting, stacks)
        parts, kept = [], []
        for turns in self.ranges:
            turn = functools.partial(step, turns.start == self.regathered)
            (*state, _), (ys, saved) = self.iterate(turn, (*state, turns.start), turns)
            parts, kept = [*parts, ys], [*kept, saved]
        carry, arrived, _, crossed = state
        carry, (last_ys, last_saved) = iteration(carry, arrived, self.layer(last))
        parts.append([y[None] for y in last_ys])
        ys = [jnp.concatenate(same) for same in zip(*parts, strict=True)]
        ys = [jnp.flip(y, 0) for y in ys] if self.loop.reverse else ys
        return [*carry, *ys], ((kept, (last_saved, [] if self.how.in_loop else arrived)), crossed)

    def backward(
        self, inputs: Sequence[Value], saved: PyTree, crossed: list[Transit], cts: list[Gradient]
    ) -> list[Gradient]:
        """While an iteration computes its own layer, it reduce-scatters the gradients of the
        previous one, updates that layer if backward does so, and all-gathers the next layer's
        weights."""
        return _Backward(self, inputs, saved, crossed, cts).run()

    def iterate(self, step: Turn, init: PyTree, turns: range) -> tuple[PyTree, PyTree]:
        at = jnp.arange(turns.start, turns.stop)
        return lax.scan(step, init, at, unroll=self.loop.unroll)

    def shards_at(self, xs: Sequence[Value], at: Layer) -> list[Value | None]:
        """Returns the shards that one layer gathers, and None for each other input of its body."""
        shards = fetched_layer([x if isinstance(x, Held) else None for x in xs], at)
        return [*[None] * self.first_x, *shards]


Left = tuple[list[Gradient], WeightGrads]  # of a layer's shards and gathered weights


class _Carry(NamedTuple):
    """What an iteration of backward passes on to the next, which computes the layer before."""

    grads: tuple[list[Gradient], list[Gradient]]  # of the carry and of the constants
    arrived: list[Transit]  # the weights of the layer whose turn comes
    left: Left  # gradients of the layer that has just been computed, to reduce
    d_stacks: list[Gradient]
    stacks: Changing
    count: Index  # of iterations, as the loop carries it


class _Backward:
    """Backward of one loop. Iterations have the numbers of forward, so they count down."""

    def __init__(
        self,
        layers: PrefetchedLayers,
        inputs: Sequence[Value],
        saved: PyTree,
        crossed: list[Transit],
        cts: list[Gradient],
    ) -> None:
        self.layers, self.body = layers, layers.body
        self.crossed, (self.residuals, (self.last_saved, self.last_weights)) = crossed, saved
        self.consts, _, self.xs = layers.parts(inputs)
        # The carry of an iteration is lost, so it comes as types.
        self.before = [*self.consts, *layers.carry_types(inputs)]
        self.stacks, self.hook = layers.changed(self.xs)
        num_carry = layers.loop.num_carry
        self.d_carry, self.d_ys = cts[:num_carry], cts[num_carry:]
        self.last = layers.loop.length - 1
        cuts = [shard.cut for shard in layers.loop.split.gathers.values()]
        # Nothing waits for quantized gradients: each takes two messages, with compute between them.
        coded = not all(cut.reduce.codec.sums is None for cut in cuts)
        in_pieces = nbytes([*layers.loop.split.gathers]) > layers.how.in_turn_above
        self.in_turn = in_pieces and not coded

    def run(self) -> list[Gradient]:
        """Returns the gradients of the inputs."""
        layer, stacks, regathered = self.layers.layer, self.stacks, self.layers.regathered
        last = layer(self.last)
        grads = self.d_carry, self.layers.d_consts(self.consts, self.last_saved.wanted)
        ahead = (
            self.body.arrive(*self.source_at(stacks, layer(regathered - 1))) if regathered else []
        )
        source = self.source_at(stacks, last)
        arrived = self.last_weights or self.body.arrive(*source)
        grads, left = self.unreduced(grads, arrived, self.last_saved, last)
        types = jax.eval_shape(lambda left: unchanged(self.reduced(left, last), stacks), left)
        state = _Carry(grads, ahead, left, empty_stacks(types, self.layers.loop.length), stacks, 0)
        for turns, kept in zip(reversed(self.layers.ranges), reversed(self.residuals), strict=True):
            counts = range(self.last - turns.stop, self.last - max(turns.start, 1))
            step = functools.partial(self.step, turns.start, kept)
            state, _ = self.layers.iterate(step, state._replace(count=counts.start), counts)
        state = self.finished(state, layer(1))
        saved, weights = layer_of(self.residuals[0], 0)
        saved, weights = self.layers.back(saved), weights or state.arrived
        grads, left = self.unreduced(state.grads, weights, saved, layer(0))
        state = self.finished(state._replace(grads=grads, left=left), layer(0))
        d_carry, d_consts = state.grads
        return [*d_consts, *d_carry, *with_changes(state.d_stacks, state.stacks)]

    def step(self, first: int, kept: PyTree, state: _Carry, count: Array) -> tuple[_Carry, None]:
        """Computes a layer, and finishes the one after it. `kept` belongs to the loop whose
        iterations begin with `first`."""
        at = self.layers.layer(self.last - 1, -1, count, state.count)
        _, stays = kept
        stacks, read, source = state.stacks, (), ()
        if not stays:
            source = self.source_at(stacks, at.before)
        if self.hook:
            read, stacks, source = self.hook.read(stacks, at.after, source)
        d_xs, d_gathered = state.left
        ahead, sums = state.arrived, self.body.summed(d_gathered)
        if source:
            ahead, sums = self.ordered(source, sums)
        d_layer = self.added(d_xs, sums, at.after)
        d_stacks = self.stacked(state.d_stacks, d_layer, at.after)
        saved, weights = resting_layer_of(kept, at.since(first))
        saved, weights = self.layers.back(saved), weights or state.arrived
        grads, left = self.unreduced(state.grads, weights, saved, at)
        if self.hook:
            stacks, left = self.hook.finish(stacks, read, d_layer, at.after, left)
        return _Carry(grads, ahead, left, d_stacks, stacks, state.count + 1), None

    def finished(self, state: _Carry, at: Layer) -> _Carry:
        """Reduces the gradients of a layer after the loop, where nothing runs beside."""
        stacks, read = state.stacks, ()
        if self.hook:
            read, stacks, _ = self.hook.read(stacks, at, ())
        d_layer = self.reduced(state.left, at)
        d_stacks = self.stacked(state.d_stacks, d_layer, at)
        if self.hook:
            stacks, _ = self.hook.finish(stacks, read, d_layer, at, ())
        return state._replace(d_stacks=d_stacks, stacks=stacks)

    def source_at(self, stacks: Changing, at: Layer) -> LayerSource:
        """Returns the sources of one layer's weights, some of them updated by now."""
        shards = self.layers.shards_at(as_read(self.xs, stacks), at)
        return shards, layer_of(self.crossed, at.i)

    def ordered(self, source: LayerSource, sums: WeightGrads) -> tuple[list[Transit], WeightGrads]:
        """Returns the next weights as they arrive, and the sums of gradients, in order.

        With `in_turn`, each weight waits for its own gradient, and then takes the gradient's
        memory. With 10^12 parameters, where a layer goes out in several pieces, a step takes 57 GiB
        instead of 68. If all weights waited for all gradients, no gather could start before the
        last reduce-scatter ends: 16.7 s instead of 14.8. If a layer in one piece waited, it would
        have nothing to run beside: see the note on what ends an iteration.
        """
        if not self.in_turn:
            return lax.optimization_barrier((self.body.arrive(*source), sums))
        shards, crossed, sums = list(source[0]), list(source[1]), dict(sums)
        for i, shard in enumerate(self.body.split.gathers.values()):
            at = self.body.split.invars.index(shard.root)
            mine = {i: sums[i]} if i in sums else {}
            shards[at], crossed[i], mine = lax.optimization_barrier((shards[at], crossed[i], mine))
            sums |= mine
        return self.body.arrive(shards, crossed), sums

    def unreduced(
        self, grads: tuple[list, list], arrived: list[Transit], saved: Saved, at: Layer
    ) -> tuple[tuple[list, list], Left]:
        """Returns the gradients of carry and constants after one layer's backward, and those left
        to reduce: the gradients of its shards and of its gathered weights."""
        d_carry, d_consts = grads
        d_layer = [*d_carry, *layer_of(self.d_ys, at.i)]
        gathered = self.body.full(arrived)
        d_inputs, d_gathered = self.body.unreduced(self.layer_at(at), gathered, saved, d_layer)
        more, d_carry, d_xs = self.layers.parts(d_inputs)
        return (d_carry, list(map(add, d_consts, more))), (d_xs, d_gathered)

    def reduced(self, left: Left, at: Layer) -> list[Gradient]:
        """Returns one layer's gradients, reduce-scattered."""
        d_xs, d_gathered = left
        return self.added(d_xs, self.body.summed(d_gathered), at)

    def added(self, d_xs: list, sums: WeightGrads, at: Layer) -> list[Gradient]:
        """Returns one layer's gradients, from the reduced ones and those without a reduction."""
        nothing = [None] * len(self.before)
        return self.body.added(self.layer_at(at), [*nothing, *d_xs], sums)[len(nothing) :]

    def stacked(self, d_stacks: list, d_layer: list[Gradient], at: Layer) -> list:
        """Writes one layer's gradients into their stacks."""
        return with_layer(d_stacks, unchanged(d_layer, self.stacks), at.i)

    def layer_at(self, at: Layer) -> list[Any]:
        """Returns the inputs of one layer's body."""
        return [*self.before, *layer_of(as_read(self.xs), at.i)]
