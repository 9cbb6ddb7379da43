"""Updates inside backward: which parameters a step updates there, and with what."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.core import Tracer
from jax.sharding import NamedSharding

from zerojax import _compat
from zerojax._kernel.places import LeafPlan, by_layer
from zerojax._plan.optimizer import flat_update
from zerojax._plan.plan import Plan
from zerojax._state.state import PARAMS, zero_gradient
from zerojax._step import host_slices as _slices
from zerojax._step.parameter import StepParam
from zerojax._step.step_options import LossOptions, precision_of
from zerojax._types import PyTree, is_key
from zerojax._update.in_backward import NO_STACK, Input, LayerUpdate, layer_updates

# [Note: updates inside backward]
# A layer's gradient is whole as soon as the loop over layers has left that layer. If the optimizer
# needs nothing else, the layer is updated there, and no tree of gradients is ever in memory
# (LOMO's idea, for every optimizer of which that is proved). State in host memory then travels
# beside backward's compute, and where weights rest whole (stages 1 and 2) so does their all-gather.
#
# The loop is a `jax.custom_vjp`, and the one way out of its backward is as gradients. So the
# parameter and its optimizer state go in as stacks (`_travel.Updating`), and what comes out
# as the gradients of these stacks are the stacks after the update.
#
# What backward updates comes from host memory with one gradient and goes back after the others, so
# that a step takes forward + max(backward, 2 * c), where c is how long the state travels one way.
# After backward both ways go at once: forward + backward + c, and all gradients are in memory.
# JAX 0.12, 7.5B on 8 H100s, modelled, c = 150, 300 and 600 ms: 553, 778 and 1369 ms in a backward
# of 400, and 686, 837 and 1143 after it. No plan knows how fast its links are, so "auto" does what
# saves memory; `zerojax.forecast` tells which is faster.


@dataclasses.dataclass(frozen=True)
class Updated:
    """What backward updated: leaves of the new state by their positions, and the sum of the squares
    of each gradient."""

    leaves: dict[int, Array] = dataclasses.field(default_factory=dict)
    squares: tuple[Array, ...] = ()


class NoGradientError(Exception):
    """Backward never comes to the loops of these parameters: no gradient leads through them."""

    def __init__(self, paths: Sequence[str]) -> None:
        super().__init__(", ".join(paths))
        self.paths = paths


@dataclasses.dataclass(frozen=True)
class InBackward:
    """What backward may update. `updates` has an entry for each parameter, None for those that are
    updated after it; `why` says why. With `must`, one at least is to be updated in backward."""

    leaves: list[Array]  # of the state
    paths: list[str]  # of the parameters
    updates: list[LayerUpdate | None]
    why: dict[str, str]
    must: bool

    @property
    def first(self) -> int:
        return len(self.updates)

    def without(self, paths: Sequence[str]) -> "InBackward":
        """Leaves parameters to be updated after backward, as no gradient leads there."""
        pairs = zip(self.paths, self.updates, strict=True)
        why = self.why | dict.fromkeys(paths, "it has no gradient")
        updates = [None if path in paths else update for path, update in pairs]
        return dataclasses.replace(self, updates=updates, why=why)

    def state_of(self, updates: Sequence[LayerUpdate]) -> list[tuple[list[Array], list[Array]]]:
        """Returns what parameters are updated with, and what is only read for it."""

        def values(places: Sequence[int]) -> list[Array]:
            return [self.leaves[at - self.first] for at in places]

        return [(values(update.stacks[1:]), values(update.given)) for update in updates]

    def check(self, updates: Sequence[LayerUpdate]) -> None:
        """Raises where the user asks for updates in backward and there are none."""
        if updates or not self.must:
            return
        pairs = zip(self.paths, self.updates, strict=True)
        unread = "its only reader must be a scan over its layers, in no other loop or checkpoint"
        why = {path: unread for path, update in pairs if update} or self.why
        unseen = set(why.values()) == {NO_STACK}
        listed = "; ".join(f"{path}: {reason}" for path, reason in list(why.items())[:3])
        named = "; stacked= names stacks, where the state is placed" * unseen
        raise ValueError(
            f"update='backward', and no parameter can be updated there ({listed}). What can is a "
            "stack of layers that one scan reads, with an optimizer that updates each element "
            f"alone{named}. Pass update='auto', which then updates after backward."
        )

    def updated(self, updates: Sequence[LayerUpdate], new: Sequence[tuple[Array, ...]]) -> Updated:
        """Names what a step's program returned."""
        leaves = {
            at - self.first: leaf
            for update, (*stacks, _) in zip(updates, new, strict=True)
            for at, leaf in zip(update.stacks, stacks, strict=True)
        }
        return Updated(leaves, tuple(squares for *_, squares in new))


def is_wanted(plan: Plan, options: LossOptions, skips: bool = False) -> bool:
    """Whether a step looks for parameters to update in backward; `skips`: what is not finite.

    "auto" does where there is something to hide: on GPUs, beside whose compute state travels from
    and to host memory, or weights that rest whole are all-gathered.
    """
    if options.needs_all(skips):
        return False
    hides = _compat.is_gpu(plan.mesh.devices.flat[0]) and (plan.offloads or _gathers(plan))
    return options.update == "backward" or (options.update == "auto" and hides)


def _gathers(plan: Plan) -> bool:
    """Whether updated weights are all-gathered, as they rest whole."""
    return bool(plan.groups.opt_state) and not plan.groups.params


def in_backward(
    plan: Plan, options: LossOptions, state: PyTree, tx: optax.GradientTransformation | None
) -> InBackward:
    """Returns what backward may update of a state as it rests."""
    precision = precision_of(plan, options.precision)
    params = [StepParam.of(leaf, plan, precision, accumulates=False) for leaf in plan.params]
    logical = jax.tree.structure(state).unflatten(
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in plan.leaves
    )
    function, _ = flat_update(logical, tx, options.mutable)
    first = len(params)
    at = [first + k for k, leaf in enumerate(plan.leaves) if leaf.kind == PARAMS]
    inputs = [_grad_input(plan, *pair) for pair in zip(params, at, strict=True)]
    finds = not plan.offloads or _slices.are_found(plan.mesh.devices.flat[0])
    inputs += [_leaf_input(plan, leaf, finds or not leaf.is_on_host) for leaf in plan.leaves]
    try:
        found, why = layer_updates(function, inputs, first)
    except Exception as error:  # what is wrong with an update, the update itself raises
        found, why = {}, dict.fromkeys(range(first), f"its update cannot be traced: {error}")
    for k, param in enumerate(params):
        unfound = "" if finds else f"JAX {jax.__version__} does not find layers in host memory"
        if k not in found and (reason := _why_not(param.leaf) or unfound):
            why[k] = reason
    for k, update in list(found.items()):
        read = {plan.leaves[i - first].path.partition("/")[0] for i in update.given}
        if not read.isdisjoint(options.mutable):
            why[k] = "the update reads a field that the loss returns"
        elif any(isinstance(value, Tracer) for value in update.program.constants.values()):
            why[k] = "the update reads an array that it was not given"
    updates = [None if k in why else found.get(k) for k in range(first)]
    reasons = {params[k].leaf.path: reason for k, reason in why.items()}
    paths, must = [p.leaf.path for p in params], options.update == "backward"
    return InBackward(jax.tree.leaves(state), paths, updates, reasons, must)


def _grad_input(plan: Plan, param: StepParam, at: int) -> Input:
    leaf = param.leaf
    shape = jax.ShapeDtypeStruct(leaf.shape, param.grad_dtype)
    if is_key(shape):
        shape = zero_gradient(shape)
    return Input(shape, by_layer(leaf), leaf.update.dim, _part(plan, leaf), param=at)


def _leaf_input(plan: Plan, leaf: LeafPlan, is_found: bool) -> Input:
    shape = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    may_be = is_found and not _why_not(leaf)
    return Input(shape, by_layer(leaf), leaf.update.dim, _part(plan, leaf), is_updated=may_be)


def _part(plan: Plan, leaf: LeafPlan) -> tuple[int, ...]:
    """Returns the shape of a device's part of what is updated, as a step's `shard_map` has it."""
    full = leaf.update.padded(leaf.shape)
    return NamedSharding(plan.mesh, leaf.update.local).shard_shape(full)


def _why_not(leaf: LeafPlan) -> str:
    """Returns '' where a device has, of each layer, the part that it updates, or the whole."""
    if not by_layer(leaf):
        return "it is sharded over its layers" if leaf.stacked else NO_STACK
    if leaf.frozen:
        return "it is not updated"
    if leaf.update.padding:
        return "it is padded (pad=False replicates it)"
    whole = leaf.kind == PARAMS and leaf.rest.dim is None
    if not whole and leaf.rest.on_device != leaf.update:
        return "it rests elsewhere than it is updated"
    return "" if jnp.issubdtype(leaf.dtype, jnp.floating) else f"it is {leaf.dtype}"
