"""Evaluates a loss with sharded parameters: each scope and loop gathers what it reads."""

import contextlib
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import jax
from jax import Array, lax
from jax.extend.core import Jaxpr
from jax.typing import DTypeLike

from zerojax import _compat
from zerojax._fence import mark, wait
from zerojax._jaxprs import Atom, Var, read, unique
from zerojax._kernel.arrays import Gradient, Value, as_read, by_hand, changing
from zerojax._kernel.body import CROSSED, Body, Env, How, Saved, read_arrays, write
from zerojax._kernel.loops import Layers, PrefetchedLayers
from zerojax._kernel.pieces import (
    InputKind,
    Loop,
    Op,
    Scope,
    Shard,
    Split,
    dtypes_of,
    gathers,
    shards_read,
    split_of,
)
from zerojax._kernel.split import split
from zerojax._kernel.travel import Held, Transit
from zerojax._types import PyTree, is_float


class SplitLoss:
    """A traced loss, split once. It tells how it uses its parameters, and runs."""

    def __init__(self, jaxpr: Jaxpr, kinds: Sequence[InputKind]) -> None:
        """Pass inputs whose kind is a `Cut` as `Held`, and the others as plain arrays."""
        self.jaxpr, self.kinds = jaxpr, kinds
        self.split = split(jaxpr, (), kinds, pull=False)

    def __call__(self, inputs: Sequence[Value], how: How) -> list[Array]:
        # As in loops that prefetch, backward starts with the weights that forward ended with.
        kept = self.split.read_last if how.prefetch else ()
        return ScopeCode(self.split, how, kept=kept)(inputs)

    @property
    def gathered_dtypes(self) -> list[DTypeLike | None]:
        """The widest dtype in which each input is gathered: its own, or the one that the loss casts
        it to. None for inputs that are not gathered."""
        wide = {v: max(d, key=lambda d: d.itemsize) for v, d in dtypes_of(self.split).items()}
        return [wide.get(var) for var in self.jaxpr.invars]

    @property
    def loops(self) -> list[Loop]:
        """The loops over layers that scan parameters."""
        return [op for op in self.split.main if isinstance(op, Loop)]

    @property
    def scanned_alone(self) -> list[bool]:
        """Returns, for each input, whether one loop scans it unchanged and nothing else reads it.
        That loop then has all of a layer's gradient."""
        shards = [*self.split.gathers.values(), *shards_read(self.split.main)]
        reads = Counter(shard.root for shard in shards)
        scanned = set()
        for loop in self.loops:
            gathered = {s.root for s in loop.split.gathers.values() if not s.is_frozen}
            gathered -= {*loop.split.loop_roots}
            for var, operand in zip(loop.split.invars, loop.operands, strict=True):
                if isinstance(operand, Shard) and not operand.views and var in gathered:
                    scanned.add(operand.root)
        return [var in scanned and reads[var] == 1 for var in self.jaxpr.invars]


# [Note: layers in a Python loop]
# Only the end of backward reads the gradients of layers. Without a loop around these, XLA's
# scheduler for GPUs would leave them all for the end, with the activations that they come from:
# 7.5B at stage 2 with two microbatches on 64 H100s took 53 GiB instead of 33. So backward enters a
# scope when the gradients of the second scope after it are reduced. Those of the next one are
# reduced meanwhile, as in loops.


def run(ops: Sequence[Op], env: Env, how: How) -> None:
    """Runs the ops of a main part in `env`."""
    scopes = [op for op in ops if isinstance(op, Scope)]
    alike: dict[int, list[Scope]] = defaultdict(list)
    for scope in scopes:
        alike[id(scope.split)].append(scope)
    gathering = list(filter(gathers, scopes))
    second_after = dict(zip(map(id, gathering), gathering[2:], strict=False))
    codes: dict[tuple[int, bool], ScopeCode] = {}
    for op in ops:
        match op:
            case Scope():
                inputs = operand_values(op.operands, env)
                same = alike[id(op.split)]
                on_host = any(map(_compat.is_on_host, jax.tree.leaves(inputs)))
                does_more = changing(inputs) or on_host or _compat.has_side_effects(op)
                repeats = len(same) > 1 and not does_more
                key = id(op.split), repeats
                if key not in codes:
                    wrap = checkpoint_like(op)
                    codes[key] = ScopeCode(split_of(same), how, wrap, repeats=repeats)
                with _named(op):
                    outs = codes[key](inputs)
            case Loop():
                with _named(op):
                    outs = run_loop(op, operand_values(op.operands, env), how)
            case _:
                outs = _compat.bind(op, read(env, op.invars))
        write(env, op.outvars, outs)
        if isinstance(op, Scope) and id(op) in second_after:
            _pace(op, second_after[id(op)], env)


def _pace(op: Scope, later: Scope, env: Env) -> None:
    """Has the gradients of a scope's outputs wait for those of the weights that a later one reads.

    Float outputs and shards: others have no gradients.
    """
    outs = [v for v in op.outvars if is_float(v.aval)]
    roots = unique(shard.root for shard in shards_read([later]) if is_float(env[shard.root].shard))
    values, shards = _together([env[v] for v in outs], [env[v].shard for v in roots])
    write(env, outs, values)
    for root, shard in zip(roots, shards, strict=True):
        env[root] = dataclasses.replace(env[root], shard=shard)


@jax.custom_vjp
def _together(values: list[Array], others: list[Array]) -> tuple[list[Array], list[Array]]:
    """Returns both, whose gradients wait for each other."""
    return values, others


_together.defvjp(lambda *both: (both, None), lambda _, cts: lax.optimization_barrier(cts))


def _named(op: Scope | Loop) -> contextlib.AbstractContextManager:
    return jax.named_scope(op.name) if op.name else contextlib.nullcontext()


Residuals = tuple[Saved, list[Transit], list[Array], Array | None]


class ScopeCode:
    """The code of a scope. Backward gathers its weights again, except for those `kept`.

    See the note in `body.py`. With `repeats`, the code runs for several equal scopes. It is jitted,
    so that JAX traces and lowers only the first of them.
    """

    def __init__(
        self,
        split: Split,
        how: How,
        wrap: Callable[[Callable], Callable] = lambda f: f,
        *,
        kept: Sequence[Var] = (),
        repeats: bool = False,
    ) -> None:
        self.how, self.kept = how, kept
        self.body = Body(split, how, run, wrap=wrap)
        # A loss in chunks leaves backward nothing to wait for. XLA would then run forward's chunks
        # last, for the loss alone, and the kept head would stay until then: 1 GiB of Llama-8B.
        self.waits = bool(kept) and split.ends_again
        self.by_hand = bool(split.frontier) and how.regather
        # A function that JAX differentiates itself may be inside another scope, which knows its
        # residuals by identity. A jitted function returns other objects.
        if repeats and (self.by_hand or not how.regather):
            self.plain, self.backward = jax.jit(self.plain), jax.jit(self.backward)
            self.forward = jax.jit(self.forward, static_argnums=1)

    def __call__(self, inputs: Sequence[Value]) -> list[Array]:
        if not self.by_hand:
            return self.plain(list(inputs))
        outvars = self.body.split.outvars
        return by_hand(self.plain, self.forward, self.backward, inputs, outvars)

    def plain(self, inputs: list[Value]) -> list[Array]:
        return self.body(inputs)

    def forward(
        self, inputs: list[Value], wanted: tuple[bool, ...]
    ) -> tuple[list[Array], Residuals]:
        body = self.body
        crossed = body.cross(inputs)
        gathered = body.gather(inputs, crossed, {})
        outs, saved = body.forward(inputs, gathered, wanted)
        still_there = [gathered[v] for v in self.kept]
        done = mark(outs) if self.how.by_data or self.waits else None
        return outs, (saved, crossed, still_there, done)

    def backward(
        self, inputs: list[Value], residuals: Residuals, cts: list[Gradient]
    ) -> list[Gradient]:
        body, (saved, crossed, still_there, done) = self.body, residuals
        if done is not None and not self.how.by_data:
            cts, done = wait(cts, done), None
        inputs, crossed, cts = _tied(inputs, body.is_weight, crossed, cts, done)
        kept = dict(zip(self.kept, still_there, strict=True))
        return body.backward(inputs, body.gather(inputs, crossed, kept), saved, cts)


def run_loop(loop: Loop, inputs: Sequence[Value], how: How) -> list[Array]:
    """Runs a scan over layers. Backward gathers their weights again, or forward keeps them."""
    prefetches = how.prefetch and how.regather and loop.split.gathers and loop.length > 1
    if (how.keeping and how.keeping.host) or any(map(_compat.is_on_host, jax.tree.leaves(inputs))):
        loop = dataclasses.replace(loop, unroll=1)  # unrolled, XLA finds no layers of such stacks
    layers = (PrefetchedLayers if prefetches else Layers)(loop, how, run)
    if not how.regather and how.keeping is None:  # JAX keeps all of it
        return layers.forward(inputs)

    def saving(inputs: list[Value], wanted: tuple[bool, ...]) -> tuple[list[Array], PyTree]:
        outs, (saved, crossed) = layers.forward_saving(as_read(inputs), wanted)
        return outs, (saved, crossed, mark(outs) if how.by_data else None)

    def backward(inputs: list[Value], residuals: PyTree, cts: list[Gradient]) -> list[Gradient]:
        saved, crossed, done = residuals
        if how.by_data or loop.unroll != 1:  # otherwise even a short loop keeps them apart
            is_held = [isinstance(x, Held) for x in inputs]
            inputs, crossed, cts = _tied(inputs, is_held, crossed, cts, done)
        return layers.backward(inputs, saved, crossed, cts)

    def plain(inputs: list[Value]) -> list[Array]:
        return layers.forward(as_read(inputs))

    return by_hand(plain, saving, backward, inputs, loop.split.outvars)


def _tied(
    inputs: list[Value],
    tie: list[bool],
    crossed: list[Transit],
    cts: list[Gradient],
    done: Array | None,
) -> tuple[list[Value], list[Transit], list[Gradient]]:
    """Keeps backward's all-gathers, which read the inputs that `tie` says, behind forward. See the
    note in `body.py`."""
    read: PyTree = {k: x for k, x in enumerate(as_read(inputs)) if tie[k]}, crossed
    if done is None:
        read, cts = lax.optimization_barrier((read, cts))
    else:
        read = wait(read, done)
    now, crossed = read
    inputs = list(inputs)
    for k, x in now.items():
        if isinstance(was := inputs[k], Held):
            x = dataclasses.replace(was, shard=x.shard, rest=x.rest)
        inputs[k] = x
    return inputs, crossed, cts


def checkpoint_like(scope: Scope) -> Callable[[Callable], Callable]:
    """Returns the user's own `jax.checkpoint`, which also keeps the results of far hops."""
    policy = scope.policy
    if any(shard.cut.gather.far for shard in shards_read(scope.split.main)):
        policies = jax.checkpoint_policies
        far_hops = policies.save_only_these_names(CROSSED)
        policy = far_hops if policy is None else policies.save_from_both_policies(policy, far_hops)
    return lambda f: jax.checkpoint(f, policy=policy, prevent_cse=scope.prevent_cse)


def operand_values(operands: Sequence[Shard | Atom], env: Env) -> list[Value]:
    return [
        v.of(env[v.root]) if isinstance(v, Shard) else read_arrays(env, [v])[0] for v in operands
    ]
