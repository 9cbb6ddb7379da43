"""Updates in backward where the optimizer clips by a global norm: guess, look, run again if wrong.

Gains, modelled for 7.5B on 8 H100s (JAX 0.12): 8.1 GiB and 576 ms with the optimizer state in host
memory, for 11.2 and 689. Costs 10.1 GiB of host memory for each GPU, twice the time for a step that
clips, and 120 lines of code here, 80 for what can be guessed (`_update/guess.py`), and 50 to donate
only a part of a state (`_step/donated.py`).
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from zerojax import _compat
from zerojax._features.in_backward import InBackward, LayerUpdate, total
from zerojax._kernel.arrays import sliced, written
from zerojax._kernel.device import at_rest, scattered
from zerojax._kernel.places import LeafPlan
from zerojax._plan.offload import PINNED
from zerojax._state.state import PARAMS
from zerojax._types import PyTree

# [Note: one pass, or more]
# Backward updates each layer as if nothing were clipped, and sums the norm. If that shows that the
# step clips, forward and backward run once more, from the old state, with the norm; and once more
# for a second clip, whose norm follows from the first. So the numbers are those of an update after
# backward. The devices decide: the passes are a loop. (XLA's thread that launches kernels reads the
# loop's condition, before and after a pass. Python does not wait.)
#
# The old state stays in host memory. Moments that rest there are read from their old stacks and
# written to new ones: no byte more is copied, and the step deletes the old ones. Stacks on
# the devices, and parameters, are updated in place, and backward sends what it writes over to host
# memory. An inverse of the update would be smaller, and wrong: after a gradient that is a thousand
# times larger than others, the new moments have lost the last digits of the old ones.

PerUpdate: TypeAlias = list[list[Array]]  # of each update

# The scopes of the loop over passes, and of those that put the old state back; an audit knows them.
GUESSED, RESTORED = "guessed", "restored"


def stays(leaf: LeafPlan) -> bool:
    """Whether a stack's old value stays where it is, beside the new one; else it is sent there."""
    return leaf.is_on_host and leaf.kind != PARAMS


def _spare(leaf: LeafPlan) -> LeafPlan:
    """Returns the place of the other value, in host memory."""
    rest = dataclasses.replace(leaf.update, memory=PINNED)
    return leaf if stays(leaf) else dataclasses.replace(leaf, rest=rest)


class Passes:
    """The runs of the program of all devices, the first of which updates with a guess.

    It is called like `program`, that of `Program`.
    """

    def __init__(
        self, program: Callable[..., tuple], backward: InBackward, updates: Sequence[LayerUpdate]
    ) -> None:
        self.program, self.backward, self.guess = program, backward, backward.guess
        self.plan, self.mesh = backward.plan, backward.plan.mesh
        self.needed = frozenset[int]().union(*(update.needed for update in updates))
        params = [k for k, leaf in enumerate(self.plan.leaves) if leaf.kind == PARAMS]
        self.updates = {params.index(update.stacks[0]): update for update in updates}

    def __call__(
        self, values: list[Array], args: list[Array], closed_over: list[Any], state: list[tuple]
    ) -> tuple[Any, ...]:
        stacks, sent, old = self.first(values, state)
        given = [given for _, given, _ in state]
        others = [None if k in self.updates else value for k, value in enumerate(values)]
        fixed = others, args, closed_over, list(zip(given, old, strict=True))
        once = jax.jit(self.one_pass)  # so that JAX traces it once
        guess = list(map(jnp.asarray, self.guess.values))
        types, *_ = jax.eval_shape(once, fixed, guess, stacks, sent)

        def turn(carry: tuple) -> tuple:
            i, _, guess, stacks, sent, _ = carry
            stacks = self.restored(i, stacks, sent)
            results, stacks, sent = once(fixed, guess, stacks, sent)
            numbers = self.numbers(results)
            wrong = self.anywhere(self.guess.is_wrong(numbers, self.needed))
            return i + 1, wrong, numbers, stacks, sent, _carried(results)

        def again(carry: tuple) -> Array:
            i, wrong, *_ = carry
            return (i == 0) | ((i < self.guess.passes) & wrong)

        zeros = jax.tree.map(lambda x: lax.full(x.shape, 0, x.dtype), _carried(types))
        start = 0, jnp.array(False), guess, stacks, sent, zeros
        with jax.named_scope(GUESSED):
            _, _, _, stacks, _, results = lax.while_loop(again, turn, start)
        loss, aux, grads, *sums = jax.tree.map(
            lambda like, x: np.zeros(like.shape, like.dtype) if x is None else x, types, results
        )
        return loss, aux, grads, list(map(tuple, stacks)), *sums

    def one_pass(
        self, fixed: tuple, guess: list[Array], stacks: PerUpdate, sent: PerUpdate
    ) -> tuple[tuple[Any, ...], PerUpdate, PerUpdate]:
        """Runs the program on the old state, and returns its results, the new stacks and what they
        were written over."""
        ((*values,), *inputs, read), state = fixed, []
        pairs = zip(self.updates.items(), stacks, sent, read, strict=True)
        for (k, update), (param, *new), kept, (given, old) in pairs:
            values[k] = param
            state.append(([*new, *kept], [*given, *guess * bool(update.needed)], old))
        loss, aux, grads, new, *sums = self.program(values, *inputs, state)
        pairs = [(list(each), len(stack)) for each, stack in zip(new, stacks, strict=True)]
        ends = [each[:n] for each, n in pairs], [each[n:] for each, n in pairs]
        return (loss, aux, grads, *sums), *ends

    def first(self, values: list[Array], state: list[tuple]) -> Sequence[PerUpdate]:
        """Returns the stacks to write to, which are there or new ones in host memory, those for
        what backward writes over, and the old ones that stay."""
        fills = itertools.count(1)  # of two stacks that are alike, XLA would allocate one
        stacks, sent, old = [], [], []
        for (k, update), (own, *_) in zip(self.updates.items(), state, strict=True):
            leaves = [self.plan.leaves[at] for at in update.stacks]
            empty = [jnp.full(leaf.shape, next(fills), leaf.dtype) for leaf in leaves]
            places = zip(empty, map(_spare, leaves), strict=True)
            new = [at_rest(x, place, self.mesh) for x, place in places]
            each = list(zip(map(stays, leaves), [values[k], *own], new, strict=True))
            stacks.append([new if is_kept else x for is_kept, x, new in each])
            sent.append([new for is_kept, _, new in each if not is_kept])
            old.append([x if is_kept else None for is_kept, x, _ in each])
        return stacks, sent, old

    def restored(self, i: Array, stacks: PerUpdate, sent: PerUpdate) -> PerUpdate:
        """Returns the stacks as the first pass has read them, if this is another one."""

        def turn(update: LayerUpdate, sent: list[Array], k: int | Array, stacks: list) -> list:
            stacks, old = list(stacks), iter(sent)
            for n, leaf in enumerate(self.plan.leaves[at] for at in update.stacks):
                if not stays(leaf):
                    layer = at_rest(_compat.fetched(sliced(next(old), k)), leaf, self.mesh)
                    stacks[n] = written(stacks[n], layer, k)
            return stacks

        with jax.named_scope(RESTORED):
            return [
                lax.fori_loop(0, (i > 0) * len(each[0]), functools.partial(turn, update, old), each)
                for update, each, old in zip(self.updates.values(), stacks, sent, strict=True)
            ]

    def numbers(self, results: tuple[Any, ...]) -> list[Array]:
        """Returns the guessed numbers as they are, after a pass."""
        _, _, grads, _, sums = results
        pairs = zip(self.updates.values(), sums, strict=True)
        totals = {k: x for update, each in pairs for k, x in zip(update.sums, each, strict=True)}
        values = [*grads, *self.backward.state]
        # Of what is updated after backward, from whole gradients.
        for k in sorted(self.guess.sums.keys() - totals.keys()):
            program = self.guess.added(k, totals)
            inputs: list[Any] = [None] * len(program.invars)
            for at in program.read():
                inputs[at] = scattered(values[at], self.backward.leaves[at], self.mesh)
            (added,) = program(inputs)
            totals[k] = total(added)
        return self.guess.following(totals)

    def anywhere(self, wrong: Array) -> Array:
        """Returns whether the guess was wrong for any device, so that all of them go on alike."""
        if self.mesh.size == 1:
            return wrong

        def ask(wrong: Array) -> Array:
            return lax.pmax(wrong.astype(jnp.int32), self.mesh.axis_names) > 0

        spec, mesh = PartitionSpec(), self.mesh
        return jax.shard_map(ask, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(wrong)


def _carried(results: PyTree) -> PyTree:
    """Returns what a loop can carry: not the gradients of keys and integers."""
    return jax.tree.map(lambda x: None if x.dtype == jax.dtypes.float0 else x, results)
