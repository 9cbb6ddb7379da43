"""Evaluates a user's loss with its parameters held as shards, gathering each at its first use."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from zerojax import _compat, _layers
from zerojax._body import (
    Body,
    Env,
    How,
    instantiated,
    is_float,
    merge,
    perturbed,
    read,
    write,
)
from zerojax._gather import Wire
from zerojax._split import Atom, Loop, Remat, Scope, Shard, Split, Step, split, unique

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
    engine = _Engine(wire, regather, prefetch)
    return engine.run_scope(split(jaxpr, (), kinds, pull=False), inputs, lambda f: f)


class _Engine:
    def __init__(self, wire: Wire, regather: bool, prefetch: int) -> None:
        self.how = How(wire, regather, prefetch, self.run)

    def run(self, steps: Sequence[Step], env: Env) -> None:
        """Runs the steps of a rest in `env`."""
        for step in steps:
            match step:
                case Remat():
                    outs = self.run_remat(step, env)
                case Scope():
                    inputs = operand_values(step.operands, env)
                    outs = self.run_scope(step.split, inputs, checkpoint_like(step))
                case Loop():
                    outs = _layers.run_loop(step, operand_values(step.operands, env), self.how)
                case _:
                    outs = _compat.bind(step, read(env, step.invars))
            write(env, step.outvars, outs)

    def run_remat(self, step: Remat, env: Env) -> list[Array]:
        names = unique([*step.reads, *step.roots])

        def inner(values: list[Any]) -> list[Array]:
            scope = dict(zip(names, values, strict=True))
            self.run(step.steps, scope)
            return read(scope, step.outvars)

        return checkpoint_like(step)(inner)([env[v] for v in names])

    def run_scope(self, scope: Split, inputs: Sequence[Any], wrap: Callable) -> list[Array]:
        """Runs a scope, its weights gathered again in backward. See the note in `_body.py`."""
        body = Body(scope, self.how, wrap=wrap)
        if not scope.frontier or not self.how.regather:
            return body(inputs)

        @jax.custom_vjp
        def call(inputs: list[Any]) -> list[Array]:
            return body(inputs)

        def forward(inputs: list[Any]) -> tuple[list[Array], Any]:
            wanted, values = perturbed(inputs)
            gathered = body.gather(body.weights_of(values))
            outs, saved = body.forward(values, gathered, wanted)
            return outs, (values, saved)

        def backward(residuals: Any, cts: list[Any]) -> tuple[list[Any]]:
            inputs, saved = residuals
            floats = [is_float(v.aval) for v in scope.outvars]
            cts = [instantiated(ct) if f else None for ct, f in zip(cts, floats, strict=True)]
            # Without the barrier XLA would merge this gather with forward's and keep its result.
            weights, cts = lax.optimization_barrier((body.weights_of(inputs), cts))
            inputs = merge(body.is_weight, weights, body.plain_of(inputs))
            return (body.backward(inputs, body.gather(weights), saved, cts),)

        call.defvjp(forward, backward, symbolic_zeros=True)
        return call(list(inputs))


def checkpoint_like(step: Remat | Scope) -> Callable[[Callable], Callable]:
    """The user's own `jax.checkpoint`."""
    return lambda f: jax.checkpoint(f, policy=step.policy, prevent_cse=step.prevent_cse)


def operand_values(operands: Sequence[Shard | Atom], env: Env) -> list[Any]:
    return [env[v.root] if isinstance(v, Shard) else read(env, [v])[0] for v in operands]
