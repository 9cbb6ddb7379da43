"""Updates in backward where the optimizer clips by a global norm: guess, look, run again if wrong.

Gains, modelled for 7.5B on 8 H100s (JAX 0.12): 8.1 GiB and 576 ms with the optimizer state in host
memory, for 11.2 and 689. Costs 10.1 GiB of host memory for each GPU, twice the time for a step that
clips, and 170 lines of code here, 140 for what can be guessed (`_update/guess.py`), and 50 to
donate only a part of a state (`_step/donated.py`).
"""

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
from zerojax._features.in_backward import InBackward, LayerUpdate
from zerojax._kernel.arrays import Index, sliced, written
from zerojax._kernel.device import at_rest, constrained
from zerojax._kernel.places import LeafPlan
from zerojax._plan.offload import PINNED
from zerojax._state.state import PARAMS
from zerojax._types import PyTree, is_key
from zerojax._update.guess import Guess

# [Note: one or two passes]
# Backward updates each layer as if nothing were clipped, and sums the norm. If that shows that the
# step clips, forward and backward run once more, from the old state, with the norm. So the numbers
# are those of an update after backward. The devices decide: the passes are a loop. (XLA's thread
# that launches kernels reads the loop's condition, before and after a pass. Python does not wait.)
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


class Passes:
    """One or two runs of the program of all devices, which its updates make with a guess.

    `program(values, args, closed_over, state)` is that of `Program`. `whole` makes gradients as the
    optimizer sees them.
    """

    def __init__(
        self,
        program: Callable[..., tuple],
        backward: InBackward,
        updates: Sequence[LayerUpdate],
        whole: Callable[[Sequence[Any]], list[Any]],
    ) -> None:
        assert isinstance(backward.guess, Guess)
        self.program, self.updates, self.guess = program, updates, backward.guess
        self.plan, self.mesh, self.whole = backward.plan, backward.plan.mesh, whole
        reads = [update.speculates for update in updates if update.speculates]
        self.needed = frozenset[int]().union(*(each.needed for each in reads))
        params = [k for k, leaf in enumerate(self.plan.leaves) if leaf.kind == PARAMS]
        self.params = [params.index(update.stacks[0]) for update in updates]
        # Those that backward writes over.
        self.sent = [[k for k in u.stacks if not stays(self.plan.leaves[k])] for u in updates]
        # Of two stacks that are alike, XLA would allocate one and copy it.
        self.fills = itertools.count(1)

    def __call__(
        self,
        values: list[Array],
        args: list[Array],
        closed_over: list[Any],
        state: Sequence[tuple[list[Array], list[Array], list]],
    ) -> tuple[Any, ...]:
        """Returns what the program does; `state` has, for each update, the leaves that change with
        its parameter and those that it reads."""
        others = [None if k in self.params else value for k, value in enumerate(values)]
        fixed = others, args, closed_over, [(own, given) for own, given, _ in state]

        @jax.jit  # so that JAX traces it once
        def once(guess: list, stacks: PerUpdate, sent: PerUpdate, fixed: tuple) -> tuple:
            return self.one_pass(guess, stacks, sent, *fixed)

        guess = list(map(jnp.asarray, self.guess.values))
        stacks, sent = self.first_stacks(values, state), self.first_sent()
        loss, aux, grads, _, *sums = jax.eval_shape(once, guess, stacks, sent, fixed)
        zeros, merged = _carried((loss, aux, grads, *sums))

        def turn(carry: tuple) -> tuple:
            i, _, guess, stacks, sent, _ = carry
            stacks = self.restored(i, stacks, sent)
            loss, aux, grads, new, *sums = once(guess, stacks, sent, fixed)
            found = self.guess.found(self.whole(grads), self.known(sums[-1]))
            counts = [len(update.stacks) for update in self.updates]
            stacks = [list(one[:n]) for one, n in zip(new, counts, strict=True)]
            sent = [list(one[n:]) for one, n in zip(new, counts, strict=True)]
            wrong = self.anywhere(self.guess.was_wrong(found, self.needed))
            return i + 1, wrong, found, stacks, sent, _arrays((loss, aux, grads, *sums))

        def again(carry: tuple) -> Array:
            i, wrong, *_ = carry
            return (i == 0) | ((i == 1) & wrong)

        start = 0, jnp.array(False), guess, stacks, sent, zeros
        with jax.named_scope(GUESSED):
            _, _, _, stacks, _, found = lax.while_loop(again, turn, start)
        loss, aux, grads, *sums = merged(found)
        return loss, aux, grads, [tuple(one) for one in stacks], *sums

    def one_pass(
        self,
        guess: list[Array],
        stacks: PerUpdate,
        sent: PerUpdate,
        others: list[Array | None],
        args: list[Array],
        closed_over: list[Any],
        state: list[tuple[list[Array], list[Array]]],
    ) -> tuple[Any, ...]:
        """Runs the program; `state` is the old one."""
        values, full = list(others), []
        for k, update, (param, *new), kept, (own, given) in zip(
            self.params, self.updates, stacks, sent, state, strict=True
        ):
            values[k] = param
            read = [*given, *(guess if update.speculates else [])]
            pairs = zip(update.stacks[1:], own, strict=True)
            old = [x if stays(self.plan.leaves[at]) else None for at, x in pairs]
            full.append(([*new, *kept], read, [None, *old]))
        return self.program(values, args, closed_over, full)

    def first_stacks(self, values: Sequence[Array], state: Sequence[tuple]) -> PerUpdate:
        """Returns the stacks to write to: those that there are, or new ones in host memory."""
        stacks = []
        for k, update, (own, *_) in zip(self.params, self.updates, state, strict=True):
            leaves = [self.plan.leaves[at] for at in update.stacks[1:]]
            pairs = zip(leaves, own, strict=True)
            new = [
                at_rest(self.empty(leaf), leaf, self.mesh) if stays(leaf) else x
                for leaf, x in pairs
            ]
            stacks.append([values[k], *new])
        return stacks

    def first_sent(self) -> PerUpdate:
        """Returns stacks in host memory for what backward writes over."""
        return [[self.sent_like(self.plan.leaves[k]) for k in each] for each in self.sent]

    def sent_like(self, leaf: LeafPlan) -> Array:
        stack = _compat.stored(constrained(self.empty(leaf), leaf.update, self.mesh))
        place = leaf.update.sharding(self.mesh).with_memory_kind(PINNED)
        return lax.with_sharding_constraint(stack, place)

    def empty(self, leaf: LeafPlan) -> Array:
        return jnp.full(leaf.shape, next(self.fills), leaf.dtype)

    def restored(self, i: Array, stacks: PerUpdate, sent: PerUpdate) -> PerUpdate:
        """Returns the stacks as the first pass found them, if this is the second."""

        def turn(
            at: list[int], leaves: list[LeafPlan], kept: list[Array], k: Index, own: list
        ) -> list:
            own = list(own)
            for n, leaf, stack in zip(at, leaves, kept, strict=True):
                layer = _compat.fetched(sliced(stack, k))
                if _compat.is_on_host(own[n]):
                    layer = _compat.stored(layer)
                else:
                    layer = constrained(layer, leaf.rest.on_device, self.mesh)
                own[n] = written(own[n], layer, k)
            return own

        found = []
        for update, each, own, kept in zip(self.updates, self.sent, stacks, sent, strict=True):
            at = [update.stacks.index(k) for k in each]
            put = functools.partial(turn, at, [self.plan.leaves[k] for k in each], kept)
            with jax.named_scope(RESTORED):
                found.append(lax.fori_loop(0, i * len(own[0]), put, own))
        return found

    def known(self, sums: Sequence[Sequence[Array]]) -> dict[int, Array]:
        """Returns sums over gradients by the equations that they are the results of."""
        pairs = zip(self.updates, sums, strict=True)
        return {k: x for update, own in pairs for k, x in zip(update.sums, own, strict=True)}

    def anywhere(self, wrong: Array) -> Array:
        """Returns whether the guess was wrong for any device, so that all of them go on alike."""
        if self.mesh.size == 1:
            return wrong

        def ask(wrong: Array) -> Array:
            return lax.pmax(wrong.astype(jnp.int32), self.mesh.axis_names) > 0

        spec, mesh = PartitionSpec(), self.mesh
        return jax.shard_map(ask, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(wrong)


def _arrays(results: PyTree) -> list[Array]:
    """Returns the leaves that a loop can carry: not the gradients of keys and integers."""
    return [x for x in jax.tree.leaves(results) if x.dtype != jax.dtypes.float0]


def _carried(shapes: PyTree) -> tuple[list[Array], Callable[[Sequence[Array]], PyTree]]:
    """Returns zeros for a loop to carry such results, and a function that makes results of them."""
    leaves, treedef = jax.tree.flatten(shapes)

    def merged(found: Sequence[Array]) -> PyTree:
        each = iter(found)
        is_none = [x.dtype == jax.dtypes.float0 for x in leaves]
        pairs = zip(leaves, is_none, strict=True)
        return treedef.unflatten(
            np.zeros(x.shape, x.dtype) if none else next(each) for x, none in pairs
        )

    return list(map(_zeros, _arrays(shapes))), merged


def _zeros(shape: Any) -> Array:
    if not is_key(shape):
        return jnp.zeros(shape.shape, shape.dtype)
    words = jax.eval_shape(jax.random.key_data, shape)
    return jax.random.wrap_key_data(
        jnp.zeros(words.shape, words.dtype), impl=jax.random.key_impl(shape)
    )
