"""Evaluates a user's loss with its parameters held as shards, gathering each at its first use."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from zerojax import _compat
from zerojax._collectives import Wire
from zerojax._engine.body import Body, Env, How, read, read_arrays, write
from zerojax._engine.ir import Atom, Loop, Remat, Scope, Shard, Split, Step, Var, unique
from zerojax._engine.layers import Layers
from zerojax._engine.prefetch import PrefetchedLayers
from zerojax._engine.split import split
from zerojax._engine.vary import instantiated, is_float, merge, perturbed, where, without_tangents

Array = Any


def evaluate(
    jaxpr: Any,
    inputs: Sequence[Any],
    kinds: Sequence[Any],
    wire: Wire,
    *,
    regather: bool,
    prefetch: int,
) -> list[Array]:
    """Runs `jaxpr`; inputs whose kind is a `Shard` are `Held`, the others plain values."""
    scope = split(jaxpr, (), kinds, pull=False)
    how = How(wire, regather, prefetch, run)
    # As in loops that gather ahead, backward starts with the weights that forward ended with.
    return run_scope(scope, inputs, how, lambda f: f, kept=scope.read_last if prefetch else ())


def run(steps: Sequence[Step], env: Env, how: How) -> None:
    """Runs the steps of a rest in `env`."""
    for step in steps:
        match step:
            case Remat():
                outs = run_remat(step, env, how)
            case Scope():
                inputs = operand_values(step.operands, env)
                outs = run_scope(step.split, inputs, how, checkpoint_like(step))
            case Loop():
                outs = run_loop(step, operand_values(step.operands, env), how)
            case _:
                outs = _compat.bind(step, read(env, step.invars))
        write(env, step.outvars, outs)


def run_remat(step: Remat, env: Env, how: How) -> list[Array]:
    names = unique([*step.reads, *step.roots])

    def inner(values: list[Any]) -> list[Array]:
        scope = dict(zip(names, values, strict=True))
        run(step.steps, scope, how)
        return read(scope, step.outvars)

    return checkpoint_like(step)(inner)([env[v] for v in names])


def run_scope(
    scope: Split, inputs: Sequence[Any], how: How, wrap: Callable, kept: Sequence[Var] = ()
) -> list[Array]:
    """Runs a scope, its weights but for those `kept` gathered again in backward. See the note in
    `body.py`."""
    body = Body(scope, how, wrap=wrap)
    if not scope.frontier or not how.regather:
        return body(inputs)

    @jax.custom_vjp
    def call(inputs: list[Any]) -> list[Array]:
        return body(inputs)

    def forward(inputs: list[Any]) -> tuple[list[Array], Any]:
        wanted, values = perturbed(inputs)
        gathered = body.gather(body.weights_of(values))
        outs, saved = body.forward(values, gathered, wanted)
        return outs, (values, saved, where(gathered, [v in kept for v in scope.gathers]))

    def backward(residuals: Any, cts: list[Any]) -> tuple[list[Any]]:
        inputs, saved, still_there = residuals
        floats = [is_float(v.aval) for v in scope.outvars]
        cts = [instantiated(ct) if f else None for ct, f in zip(cts, floats, strict=True)]
        # Without the barrier XLA would merge this gather with forward's and keep its result.
        weights, cts = lax.optimization_barrier((body.weights_of(inputs), cts))
        inputs = merge(body.is_weight, weights, body.plain_of(inputs))
        gathered = body.gather(weights, dict(zip(kept, still_there, strict=True)))
        return (body.backward(inputs, gathered, saved, cts),)

    call.defvjp(forward, backward, symbolic_zeros=True)
    return without_tangents(call(list(inputs)))


def checkpoint_like(step: Remat | Scope) -> Callable[[Callable], Callable]:
    """The user's own `jax.checkpoint`."""
    return lambda f: jax.checkpoint(f, policy=step.policy, prevent_cse=step.prevent_cse)


def operand_values(operands: Sequence[Shard | Atom], env: Env) -> list[Any]:
    return [
        v.of(env[v.root]) if isinstance(v, Shard) else read_arrays(env, [v])[0] for v in operands
    ]


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
