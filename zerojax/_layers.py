"""The layer loop: a scan over stacked weights, one layer gathered at a time in both directions.

Forward keeps of each layer what its derivative needs, less the weights; backward walks the
layers in reverse, gathers each again and reduce-scatters its gradient inside the loop.
See the note in `_body.py`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax._body import Body, How
from zerojax._steps import Loop
from zerojax._vary import add, instantiated, is_float, perturbed, without_tangents

Array = Any


def run_loop(loop: Loop, inputs: Sequence[Any], how: How) -> list[Array]:
    """The outputs of a scan whose operands are `inputs`; `Held` stacks among them."""
    layers = _Layers(loop, how)
    if not how.regather:
        return layers.forward(list(inputs))

    @jax.custom_vjp
    def call(inputs: list[Any]) -> list[Array]:
        return layers.forward(inputs)

    def forward(inputs: list[Any]) -> tuple[list[Array], Any]:
        wanted, values = perturbed(inputs)
        outs, saved = layers.forward_saving(values, wanted)
        return outs, (values, saved)

    def backward(residuals: Any, cts: list[Any]) -> tuple[list[Any]]:
        inputs, saved = residuals
        return (layers.backward(inputs, saved, cts),)

    call.defvjp(forward, backward, symbolic_zeros=True)
    return without_tangents(call(list(inputs)))


class _Layers:
    """One scan in three forms: plain, keeping residuals, and backward over them."""

    def __init__(self, loop: Loop, how: How) -> None:
        self.loop = loop
        first_x = loop.num_consts + loop.num_carry
        # Backward has constants and scanned inputs again, but not what the carry was.
        lost = frozenset(range(loop.num_consts, first_x))
        self.how = how
        self.body = Body(loop.body, dataclasses.replace(how, in_loop=True), lost=lost)

    def parts(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Constants, carry and scanned operands."""
        first_x = self.loop.num_consts + self.loop.num_carry
        carry = slice(self.loop.num_consts, first_x)
        return list(operands[: carry.start]), list(operands[carry]), list(operands[first_x:])

    def scan(self, step: Any, init: Any, xs: Any, *, reverse: bool) -> tuple[Any, Any]:
        return lax.scan(
            step, init, xs, length=self.loop.length, reverse=reverse, unroll=self.loop.unroll
        )

    def forward(self, inputs: Sequence[Any]) -> list[Array]:
        consts, carry, xs = self.parts(inputs)
        num_carry = self.loop.num_carry

        def step(carry: list, xs: list) -> tuple[list, list]:
            outs = self.body([*consts, *carry, *xs])
            return outs[:num_carry], outs[num_carry:]

        carry, ys = self.scan(step, carry, xs, reverse=self.loop.reverse)
        return [*carry, *ys]

    def forward_saving(
        self, inputs: Sequence[Any], wanted: Sequence[bool]
    ) -> tuple[list[Array], tuple[Any, list[Array]]]:
        consts, carry, xs = self.parts(inputs)
        want_consts, _, want_xs = self.parts(wanted)
        num_carry = self.loop.num_carry
        # The carry may vary inside the loop even where its first value does not.
        wanted = [*want_consts, *[True] * num_carry, *want_xs]
        order = self.order(reverse=self.loop.reverse)

        def step(state: tuple[list, list], layer: tuple[Any, list]) -> tuple[Any, Any]:
            (carry, gathered), (index, xs) = state, layer
            gathered, ahead = self.weights_now_and_ahead(inputs, gathered, order, index)
            outs, saved = self.body.forward([*consts, *carry, *xs], gathered, wanted)
            return (outs[:num_carry], ahead), (outs[num_carry:], saved)

        start = (carry, self.first_weights(inputs, order))
        (carry, last), (ys, saved) = self.scan(
            step, start, (jnp.arange(self.loop.length), xs), reverse=self.loop.reverse
        )
        # Backward starts where forward ends, with the weights that are there already. Within
        # an outer loop they would be kept for each of its turns.
        return [*carry, *ys], (saved, [] if self.how.in_loop else last)

    def backward(self, inputs: Sequence[Any], residuals: Any, cts: Sequence[Any]) -> list[Any]:
        saved, last = residuals
        if self.loop.unroll != 1:
            # Without a loop of its own between them, XLA would merge backward's gathers with
            # forward's and keep their results.
            inputs, cts = self.tied(inputs, cts)
        consts, carry, xs = self.parts(inputs)
        want_consts, _, _ = self.parts(saved.wanted)
        varied = [want and is_float(x) for x, want in zip(consts, want_consts, strict=True)]
        d_consts = [jnp.zeros_like(x) if v else None for x, v in zip(consts, varied, strict=True)]
        d_outs = [
            instantiated(ct) if is_float(v.aval) else None
            for ct, v in zip(cts, self.loop.body.outvars, strict=True)
        ]
        d_carry, d_ys = d_outs[: len(carry)], d_outs[len(carry) :]
        carry_types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in carry]
        order = self.order(reverse=not self.loop.reverse)

        def step(state: tuple[list, list, list], layer: tuple[Any, Any, list, list]) -> Any:
            (d_carry, d_consts, gathered), (index, saved, d_ys, xs) = state, layer
            gathered, ahead = self.weights_now_and_ahead(inputs, gathered, order, index)
            layer_inputs = [*consts, *carry_types, *xs]
            d_inputs = self.body.backward(layer_inputs, gathered, saved, [*d_carry, *d_ys])
            more, d_carry, d_xs = self.parts(d_inputs)
            return (d_carry, list(map(add, d_consts, more)), ahead), d_xs

        (d_carry, d_consts, _), d_xs = self.scan(
            step,
            (d_carry, d_consts, last or self.first_weights(inputs, order)),
            (jnp.arange(self.loop.length), saved, d_ys, xs),
            reverse=not self.loop.reverse,
        )
        return [*d_consts, *d_carry, *d_xs]

    def tied(self, inputs: Sequence[Any], cts: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The inputs and cotangents, the shards not to be used before these are there."""
        pairs = zip(cts, self.loop.body.outvars, strict=True)
        floats = [instantiated(ct) if is_float(v.aval) else None for ct, v in pairs]
        shards = [x if isinstance(x, tuple) else None for x in inputs]
        shards, floats = lax.optimization_barrier((shards, floats))
        return [x if s is None else s for x, s in zip(inputs, shards, strict=True)], floats

    # -- weights, one layer ahead of their use

    @property
    def prefetches(self) -> bool:
        """Whether weights travel while the layer before computes. One layer has none before."""
        return bool(self.body.how.prefetch and self.body.split.gathers) and self.loop.length > 1

    def order(self, *, reverse: bool) -> int:
        """The way a loop walks through the layers."""
        return -1 if reverse else 1

    def first_weights(self, inputs: Sequence[Any], order: int) -> list[Array]:
        first = 0 if order > 0 else self.loop.length - 1
        return self.weights_at(inputs, first) if self.prefetches else []

    def weights_now_and_ahead(
        self, inputs: Sequence[Any], gathered: list[Array], order: int, index: Any
    ) -> tuple[list[Array], list[Array]]:
        """This layer's weights and the next one's, which are asked for first of all.

        The last layer asks for its own again: backward starts with them.
        """
        if not self.prefetches:
            return self.weights_at(inputs, index), []
        ahead = jnp.clip(index + order, 0, self.loop.length - 1)
        return gathered, self.weights_at(inputs, ahead)

    def weights_at(self, inputs: Sequence[Any], index: Any) -> list[Array]:
        """One layer's weights, gathered."""
        consts, carry, xs = self.parts(inputs)

        def layer(stack: Any) -> Any:
            # Only shards are gathered; the others stand in their places.
            if not isinstance(stack, tuple):
                return None
            return tuple(lax.dynamic_index_in_dim(a, index, keepdims=False) for a in stack)

        inside = [*consts, *carry, *map(layer, xs)]
        return self.body.gather(self.body.weights_of(inside))
