"""Runs a loop over layers, differentiated by hand where its weights are gathered again."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from zerojax._engine.body import How
from zerojax._engine.ir import Loop
from zerojax._engine.layers import Array, Layers
from zerojax._engine.prefetch import PrefetchedLayers
from zerojax._engine.vary import perturbed, without_tangents


def run_loop(loop: Loop, inputs: Sequence[Any], how: How) -> list[Array]:
    """The outputs of a scan whose operands are `inputs`; `Held` stacks among them."""
    prefetches = how.prefetch and loop.body.gathers and loop.length > 1
    if prefetches and how.wire.unrolled:
        loop = dataclasses.replace(loop, unroll=loop.length)
    layers = (PrefetchedLayers if prefetches else Layers)(loop, how)
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
