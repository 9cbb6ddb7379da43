"""A scan over stacked weights, one layer gathered at a time in both directions.

Forward keeps of each layer what its derivative needs, less the weights; backward walks the
layers in reverse, gathers each again and reduce-scatters its gradient inside the loop, or updates
the layer with it. See the note in `body.py`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from zerojax import _compat
from zerojax._collectives import Held, Transit
from zerojax._engine.body import Body, How, Run
from zerojax._engine.ir import Loop
from zerojax._engine.residuals import AS_IT_IS
from zerojax._engine.slices import Index, Layer, by_scanned_index, fetched_layer
from zerojax._engine.vary import Gradient, T, Value, add, float_cotangents, is_float, where


class Layers:
    """One scan in three forms: plain, keeping residuals, and backward over them.

    Iteration 0 is the first layer that forward walks, whichever end of the stack it is.
    """

    def __init__(self, loop: Loop, how: How, run: Run) -> None:
        self.loop = loop
        first_x = loop.num_consts + loop.num_carry
        # Backward has constants and scanned inputs again, but not what the carry was.
        lost = frozenset(range(loop.num_consts, first_x))
        self.how = how
        # Whole layers alone; and of a reversed loop, whose writes older XLA does not find, none.
        unfound = how.keeping.host and loop.reverse and not how.counted()
        self.keeping = AS_IT_IS if how.in_loop or unfound else how.keeping
        self.body = Body(loop.split, dataclasses.replace(how, in_loop=True), run, lost=lost)
        # Weights that backward does not gather again; those that travel nowhere are there anyway.
        gathers = loop.split.gathers.items()
        self.kept = [v for v, s in gathers if not how.regather and s.cut.gather.axes]

    def parts(self, operands: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
        """Returns constants, carry and scanned operands."""
        first_x = self.loop.num_consts + self.loop.num_carry
        carry = slice(self.loop.num_consts, first_x)
        return list(operands[: carry.start]), list(operands[carry]), list(operands[first_x:])

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
    ) -> tuple[list[Array], Any]:
        """Returns the outputs, and what `backward` needs that is not among the inputs: what it
        saved, with full weights that are kept, and what weights are gathered from after their far
        hops."""
        consts, carry, xs = self.parts(inputs)
        num_carry = self.loop.num_carry
        wanted = self.wanted_inside(wanted)

        def step(carry: list, xs: list) -> tuple[Any, Any]:
            crossed = self.cross(inputs, xs)
            gathered = self.gathered(inputs, xs, crossed)
            outs, saved = self.body.forward([*consts, *carry, *xs], gathered, wanted)
            full = where(gathered, [v in self.kept for v in self.body.split.gathers])
            return outs[:num_carry], (outs[num_carry:], ((self.keeping.put(saved), full), crossed))

        carry, (ys, kept) = self.scan(step, carry, xs, reverse=self.loop.reverse)
        return [*carry, *ys], kept

    def backward(
        self, inputs: Sequence[Value], saved: Any, crossed: list[Transit], cts: Sequence[Any]
    ) -> list[Gradient]:
        """Returns the gradients of the inputs."""
        consts, _, xs = self.parts(inputs)
        in_loop, xs = self.how.updates(xs), as_read(xs)
        d_carry, d_ys = self.d_outs(cts)
        types: list = self.carry_types(inputs)

        saved, full = saved
        last = self.loop.length - 1

        def step(state: tuple, scanned: tuple) -> tuple[tuple, list]:
            d_carry, d_consts, stacks, count = state
            saved, full, crossed, d_ys, xs, at = scanned
            layer = Layer(at, self.index(last - count))
            xs = in_loop.as_updated(xs, fetched_layer([one[:1] for one in stacks], layer))
            gathered = self.gathered(inputs, xs, crossed, full)
            saved = self.keeping.back(saved)
            d_layer = [*d_carry, *d_ys]
            d_inputs = self.body.backward([*consts, *types, *xs], gathered, saved, d_layer)
            more, d_carry, d_xs = self.parts(d_inputs)
            stacks = in_loop.updated(stacks, in_loop.fetched(stacks, layer), d_xs, layer)
            grads = d_carry, list(map(add, d_consts, more))
            return (*grads, stacks, count + 1), in_loop.left(d_xs)

        start = (d_carry, self.d_consts(consts, saved.wanted), in_loop.stacks, 0)
        (d_carry, d_consts, stacks, _), d_xs = self.scan(
            step,
            start,
            (saved, full, crossed, d_ys, xs, jnp.arange(last + 1)),
            reverse=not self.loop.reverse,
        )
        return [*d_consts, *d_carry, *in_loop.gradients(d_xs, stacks)]

    # -- what both walks share

    def scan(self, step: Any, init: Any, xs: Any, *, reverse: bool) -> tuple[Any, Any]:
        if reverse and any(map(_compat.is_on_host, jax.tree.leaves(xs))) and not self.how.counted():
            step, xs = by_scanned_index(step, xs, self.loop.length)
        return lax.scan(
            step, init, xs, length=self.loop.length, reverse=reverse, unroll=self.loop.unroll
        )

    def index(self, at: Index) -> Index:
        """Returns where in the stack the layer of an iteration is."""
        return self.loop.length - 1 - at if self.loop.reverse else at

    def cross(self, inputs: Sequence[Value], xs: Sequence[Value | None]) -> list[Transit]:
        """Returns the weights of one layer, whose shards are among `xs`, after their far hops."""
        return self.body.cross(self.weights(inputs, xs))

    def arrive(
        self, inputs: Sequence[Value], xs: Sequence[Value | None], crossed: Sequence[Transit]
    ) -> list[Transit]:
        """Returns the weights of one layer after both hops."""
        return self.body.arrive(self.weights(inputs, xs), crossed)

    def gathered(
        self,
        inputs: Sequence[Value],
        xs: Sequence[Value | None],
        crossed: Sequence[Transit],
        kept: Sequence[Array] = (),
    ) -> list[Array]:
        """Returns the full weights of one layer; in backward, those that are kept are there."""
        there = dict(zip(self.kept, kept, strict=True)) if kept else {}
        return self.body.gather(self.weights(inputs, xs), crossed, there)

    def weights(self, inputs: Sequence[Value], xs: Sequence[Value | None]) -> list[Value | None]:
        consts, carry, _ = self.parts(inputs)
        return self.body.weights_of([*consts, *carry, *xs])

    def wanted_inside(self, wanted: Sequence[bool]) -> list[bool]:
        """The carry may vary inside the loop even where its first value does not."""
        consts, carry, xs = self.parts(wanted)
        return [*consts, *[True] * len(carry), *xs]

    def d_outs(self, cts: Sequence[Any]) -> tuple[list[Gradient], list[Gradient]]:
        """Returns cotangents of the carry and of the stacked outputs, None where none can be."""
        floats = self.float_cts(cts)
        return floats[: self.loop.num_carry], floats[self.loop.num_carry :]

    def float_cts(self, cts: Sequence[Any]) -> list[Gradient]:
        return float_cotangents(cts, [v.aval for v in self.loop.split.outvars])

    def d_consts(self, consts: Sequence[Any], wanted: Sequence[bool]) -> list[Gradient]:
        """Returns zeros to add the constants' gradients to."""
        pairs = zip(consts, wanted[: len(consts)], strict=True)
        return [jnp.zeros_like(x) if want and is_float(x) else None for x, want in pairs]

    def carry_types(self, inputs: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        _, carry, _ = self.parts(inputs)
        return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in carry]


def as_read(inputs: Sequence[Value]) -> list[Value]:
    """Returns the inputs of a loop without what updates them."""
    return [x.as_read if isinstance(x, Held) else x for x in inputs]
