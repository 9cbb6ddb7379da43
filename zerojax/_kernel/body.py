"""The two halves of a split as functions, and their derivative by hand."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.tree_util import register_dataclass

from zerojax._fence import mark, wait
from zerojax._jaxprs import Atom, Var, evaluate, is_var, reads, type_of
from zerojax._kernel import travel as _travel
from zerojax._kernel.arrays import Gradient, Hook, Value, add, add_held, gradients, vary, zeros_like
from zerojax._kernel.pieces import Op, Split
from zerojax._kernel.travel import Cut, Held, Transit
from zerojax._types import TreeDef, is_float


@functools.partial(
    register_dataclass, data_fields=["arrays"], meta_fields=["treedef", "slots", "wanted", "moved"]
)
@dataclasses.dataclass(frozen=True)
class Saved:
    """A vjp function without the arrays that backward has anyway.

    `slots` has, for each residual, the position of the known array that it is, or None. `wanted`
    says which inputs need a gradient, and `moved` which arrays a `Keeping` has put elsewhere.
    """

    arrays: list[Array]
    treedef: TreeDef
    slots: tuple[int | None, ...]
    wanted: tuple[bool, ...]
    moved: tuple[bool, ...] = ()


def strip(vjp: Callable, known: Sequence[Array | None], wanted: Sequence[bool]) -> Saved:
    """Returns `vjp` without the arrays in `known`.

    [Note: residuals by identity] The function that `jax.vjp` returns is a pytree of residuals. If a
    residual is an input of the differentiated function, JAX returns the very object that went in,
    so `id` tells it from an equal value computed inside. JAX does so by habit, and promises
    nothing. If it stopped, backward would keep full weights: on a new JAX, `_readings.py` tries it.
    """
    index = {id(array): k for k, array in enumerate(known) if array is not None}
    leaves, treedef = jax.tree.flatten(vjp)
    slots = tuple(index.get(id(leaf)) for leaf in leaves)
    arrays = [x for x, k in zip(leaves, slots, strict=True) if k is None]
    return Saved(arrays, treedef, slots, tuple(wanted))


def restore(saved: Saved, known: Sequence[Array | None]) -> Callable:
    """Returns the vjp function that was stripped."""
    arrays = iter(saved.arrays)
    leaves = [next(arrays) if k is None else known[k] for k in saved.slots]
    return saved.treedef.unflatten(leaves)


class Keeping(Protocol):
    """Where a loop keeps what backward needs of each layer, if not as it is on the devices."""

    @property
    def host(self) -> bool: ...

    def put(self, saved: Saved) -> Saved:
        """Moves the residuals of one layer to where they rest."""
        ...

    def back(self, saved: Saved) -> Saved:
        """Brings the residuals back."""
        ...


# [Note: why backward waits]
# Backward gathers the same shards as forward. Left to itself, XLA takes the two for one
# computation, merges them, and keeps full weights in between. On GPUs an optimization barrier
# over the shards and the cotangents keeps them apart.
#
# XLA:CPU needs more (`zerojax/_fence.py`): there, the engine makes the shards depend on the results
# of forward. In backward, gradients of gathered weights, such as a head's, wait for the loops if
# any has 16 bits: XLA:CPU widens it to reduce it, which takes memory, and would do that last.
# Gradients of 32 bits it reduces at once, which frees memory.


# [Note: what stays for backward]
# JAX keeps for backward everything that the derivative needs, including full weights. With plain
# differentiation a gathered weight would stay alive from its use in forward to its use in
# backward, and stage 3 would save nothing. So the engine differentiates every scope that gathers by
# hand. It runs the prefix (gathers, and everything that comes from weights only), takes `jax.vjp`
# of the main part, and drops from the residuals every array that the prefix made or that came in as
# an input. Backward runs the prefix again and puts these arrays back. (With prefetching, the
# weights gathered last stay, because backward needs them first. If the route of a weight has a far
# hop, the result of that hop stays, so that the weight crosses the network only once: ZeRO++'s
# hpZ.) JAX and the user decide which other values to keep: their `jax.checkpoint` policies apply
# inside the main part.

CROSSED = "zerojax_in_node"  # the name of results of far hops, for policies of `jax.checkpoint`
Env = dict[Var, Any]  # a variable's value, or the `Held` of a root of shards
Run = Callable[[Sequence[Op], Env, "How"], None]
Weights = dict[Var, Array]  # full weights, by their variables in `Split.gathers`
WeightGrads = dict[int, Array]  # gradients of those among them that have one, by position
Outs = dict[int, Array]


@dataclasses.dataclass(frozen=True)
class How:
    """When the collectives of a loss run.

    `regather`: backward all-gathers the weights again, instead of keeping them. `prefetch`: loops
    all-gather one layer ahead (1) or none (0). `keep_layers`: the number of last layers, at least
    one, whose weights a prefetching loop keeps. `in_turn_above`: in backward of layers of more
    bytes, each weight of the next layer waits for its gradient of the previous one. `by_data`: data
    dependences, not barriers, keep collectives in order. `in_loop`: the body of a loop over layers
    runs. `keeping`: where a loop over layers keeps what backward needs. `updates`: what
    backward does with layers of parameters that change there. `counted`: whether XLA finds any
    layer in host memory by a loop's counter; called only if there is one.
    """

    regather: bool
    prefetch: int
    keep_layers: int = 1
    in_turn_above: float = math.inf
    by_data: bool = False
    in_loop: bool = False
    keeping: Keeping | None = None
    updates: Callable[[Mapping[int, Held]], Hook] | None = None
    counted: Callable[[], bool] = dataclasses.field(default=lambda: True, compare=False)


class Body:
    """A split as functions: its value, its value with residuals, its gradients.

    Inputs are in the order of `split.invars`: `Held` for shards, arrays for the others. Backward
    does not get the inputs at the positions in `lost`. `run` interprets the ops of the main part,
    and `wrap` wraps that part.
    """

    def __init__(
        self,
        split: Split,
        how: How,
        run: Run,
        *,
        lost: frozenset[int] = frozenset(),
        wrap: Callable[[Callable], Callable] = lambda f: f,
    ) -> None:
        self.split, self.how, self.run, self.lost, self.wrap = split, how, run, lost, wrap
        self.is_weight = [k is not None for k in split.kinds]
        self.float_outs = [k for k, v in enumerate(split.outvars) if is_float(v.aval)]
        kinds = zip(split.invars, split.kinds, strict=True)
        # What the main part reads beside the frontier: shards for inner loops, and plain inputs.
        self.rest = split.loop_roots, [var for var, kind in kinds if kind is None]

    def __call__(self, inputs: Sequence[Value]) -> list[Array]:
        """Returns the outputs, to be differentiated by JAX and not by the engine."""
        ways = zip(self.split.gathers, self._travellers(inputs), strict=True)
        gathered = {var: _travel.obtain(*way) for var, way in ways}
        return self.wrap(self.main)(self.prefix(inputs, gathered), self.rest_of(inputs))

    def cross(self, inputs: Sequence[Value | None]) -> list[Transit]:
        """Returns all weights after the far hops of their routes."""
        crossed = [_travel.cross(held, cut) for held, cut in self._travellers(inputs)]
        return jax.tree.map(lambda part: checkpoint_name(part, CROSSED), crossed)

    def arrive(self, inputs: Sequence[Value | None], crossed: Sequence[Transit]) -> list[Transit]:
        """Returns all weights after both hops."""
        pairs = zip(self._travellers(inputs), crossed, strict=True)
        return [_travel.arrive(held, cut, parts) for (held, cut), parts in pairs]

    def full(self, arrived: Sequence[Transit]) -> Weights:
        """Returns the full weights of those that have arrived; sends nothing."""
        shards = zip(self.split.gathers.items(), arrived, strict=True)
        return {var: _travel.full(parts, shard.cut) for (var, shard), parts in shards}

    def gather(
        self, inputs: Sequence[Value | None], crossed: Sequence[Transit], kept: Weights
    ) -> Weights:
        """Returns the full weights. Those in `kept` are not gathered again."""
        ways = zip(self.split.gathers, self._travellers(inputs), crossed, strict=True)
        return {
            var: kept[var] if var in kept else _travel.full(_travel.arrive(held, cut, parts), cut)
            for var, (held, cut), parts in ways
        }

    def _travellers(self, inputs: Sequence[Value | None]) -> Iterator[tuple[Held, Cut]]:
        """Yields the weights to gather. Each takes its view when its turn comes."""
        held = self._by_var(inputs)
        return ((shard.of(held[shard.root]), shard.cut) for shard in self.split.gathers.values())

    def prefix(self, inputs: Sequence[Value], gathered: Weights) -> list[Array]:
        """Returns the frontier: gathered weights, and values computed from weights only."""
        env: Env = {**self.split.constants, **self._by_var(inputs), **gathered}
        evaluate(self.split.prefix, env)
        return [env[v] for v in self.split.frontier]

    def main(self, frontier: Sequence[Array], rest: tuple[list[Value], list[Value]]) -> list[Array]:
        """Returns the outputs."""
        env: Env = dict(zip(self.split.frontier, frontier, strict=True))
        for variables, values in zip(self.rest, rest, strict=True):
            write(env, variables, values)
        self.run(self.split.main, env, self.how)
        return read_arrays(env, self.split.outvars)

    def _by_var(self, inputs: Sequence[Any]) -> Env:
        return dict(zip(self.split.invars, inputs, strict=True))

    def rest_of(self, inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        by_var, (roots, plain) = self._by_var(inputs), self.rest
        return [by_var[v] for v in roots], [by_var[v] for v in plain]

    # -- forward

    def forward(
        self, inputs: Sequence[Value], gathered: Weights, wanted: Sequence[bool]
    ) -> tuple[list[Array], Saved]:
        """Returns the outputs, and the residuals of the main part that backward cannot make itself.

        `wanted` says which inputs need a gradient.
        """
        frontier = self.prefix(inputs, gathered)
        varies = self._frontier_varies(wanted)
        rest, join_rest = vary(self.rest_of(inputs), self.rest_of(wanted))

        varied, join = vary(frontier, varies)

        def main(varied: list[Array], varied_rest: list[Array]) -> tuple[Outs, Outs]:
            outs = dict(enumerate(self.wrap(self.main)(join(varied), join_rest(varied_rest))))
            return {k: outs.pop(k) for k in self.float_outs}, outs

        float_outs, vjp, other_outs = jax.vjp(main, varied, rest, has_aux=True)
        outs = [x for _, x in sorted((float_outs | other_outs).items())]
        return outs, strip(vjp, self.known(frontier, inputs), wanted)

    def known(self, frontier: Sequence[Array], inputs: Sequence[Value]) -> list[Array | None]:
        """Returns the arrays that backward has anyway: it makes the frontier, and gets the inputs
        that are not lost."""
        kept = [None if i in self.lost else x for i, x in enumerate(inputs)]
        return [*frontier, *jax.tree.leaves(kept, is_leaf=lambda x: x is None)]

    # -- backward

    def backward(
        self, inputs: Sequence[Value], gathered: Weights, saved: Saved, cts: Sequence[Array | None]
    ) -> list[Gradient]:
        """Returns the gradients of the inputs, None for inputs without one.

        Lost inputs come as their types. `cts` has None for outputs without a float dtype.
        """
        grads, d_gathered = self.unreduced(inputs, gathered, saved, cts)
        return self.added(inputs, grads, self.summed(d_gathered))

    def unreduced(
        self, inputs: Sequence[Value], gathered: Weights, saved: Saved, cts: Sequence[Array | None]
    ) -> tuple[list[Gradient], WeightGrads]:
        """Returns the gradients of the inputs without the part that comes through gathered weights,
        and the gradients of these weights, not yet reduced over the devices.

        Applies the chain rule in two steps. The stripped vjp of the main part, with the frontier
        put back, gives the gradients of the frontier. The vjp of the prefix takes these to the
        sources of the prefix.
        """
        # Shards get their gradients through the gathered weights and through inner loops.
        want_full = [
            want and is_weight and not isinstance(x, Held)
            for x, want, is_weight in zip(inputs, saved.wanted, self.is_weight, strict=True)
        ]
        sources = [*gathered.values()], [*inputs]
        wanted = self._want_gathered(saved.wanted), want_full
        varied, join = vary(sources, wanted)

        def prefix(varied: list[Array]) -> list[Array]:
            weights, inputs = join(varied)
            return self.prefix(inputs, dict(zip(gathered, weights, strict=True)))

        frontier, prefix_vjp = jax.vjp(prefix, varied)
        vjp = restore(saved, self.known(frontier, inputs))
        d_varied, d_inputs = vjp({k: cts[k] for k in self.float_outs})
        d_frontier = gradients(frontier, self._frontier_varies(saved.wanted), d_varied)
        pairs = zip(frontier, d_frontier, strict=True)
        (d_prefix,) = prefix_vjp([zeros_like(x) if d is None else d for x, d in pairs])
        d_weights, d_full = gradients(sources, wanted, d_prefix)
        d_roots, d_plain = gradients(self.rest_of(inputs), self.rest_of(saved.wanted), d_inputs)
        totals, (roots, plain) = self._by_var(d_full), self.rest
        for var, grad in zip(roots, d_roots, strict=True):
            totals[var] = add_held(totals[var], grad)
        write(totals, plain, d_plain)
        d_gathered = {k: grad for k, grad in enumerate(d_weights) if grad is not None}
        # On CPUs, narrow gradients wait for the loops: see the note above.
        if self.how.by_data and any(x.dtype.itemsize < 4 for x in d_gathered.values()):
            d_gathered = wait(d_gathered, mark(jax.tree.leaves(d_roots)))
        return list(totals.values()), d_gathered

    def summed(self, d_gathered: WeightGrads) -> WeightGrads:
        """Reduces the gradients of gathered weights. They keep the dtypes of the wire."""
        cuts = [shard.cut for shard in self.split.gathers.values()]
        sums = _travel.summed([*d_gathered.values()], [cuts[k] for k in d_gathered])
        return dict(zip(d_gathered, sums, strict=True))

    def added(
        self, inputs: Sequence[Value], grads: Sequence[Gradient], sums: WeightGrads
    ) -> list[Gradient]:
        """Adds the reduced gradients to those of the inputs."""
        held, totals = self._by_var(inputs), self._by_var(grads)
        shards = [*self.split.gathers.values()]
        for shard, grad in ((shards[k], grad) for k, grad in sums.items()):
            root, total = held[shard.root].shard, totals[shard.root]
            grad = grad.astype(root.dtype)
            if shard.views:  # JAX takes long to differentiate what changes nothing
                (grad,) = jax.vjp(shard.view, root)[1](grad)
            totals[shard.root] = dataclasses.replace(total, shard=add(total.shard, grad))
        return list(totals.values())

    # -- what to differentiate by

    def _want_gathered(self, wanted: Sequence[bool]) -> list[bool]:
        """Returns, for each gathered weight, whether it needs a gradient. Frozen ones need none."""
        by_var = self._by_var(wanted)
        return [by_var[s.root] and not s.is_frozen for s in self.split.gathers.values()]

    def _frontier_varies(self, wanted: Sequence[bool]) -> list[bool]:
        """Returns, for each array of the frontier, whether it comes from weights that need a
        gradient."""
        varies = self._by_var(wanted)
        varies |= dict(zip(self.split.gathers, self._want_gathered(wanted), strict=True))
        for eqn in self.split.prefix:
            made = eqn.primitive.name != "stop_gradient" and any(map(varies.get, reads(eqn)))
            varies |= {v: made and is_float(v.aval) for v in eqn.outvars}
        return [varies.get(v, False) for v in self.split.frontier]


def read_arrays(env: Env, atoms: Sequence[Atom]) -> list[Any]:
    """Like `read`, but gives a literal, which may be a bare Python number, its dtype."""
    return [env[v] if is_var(v) else np.asarray(v.val, type_of(v).dtype) for v in atoms]


def write(env: Env, outvars: Sequence[Var], values: Sequence[Any]) -> None:
    env.update(zip(outvars, values, strict=True))
