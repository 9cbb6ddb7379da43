"""The code of one device in a step: the loss and its gradients on this device's examples."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.extend.core import Jaxpr
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from zerojax import _compat
from zerojax._features import activations as _activations
from zerojax._features.host_state import are_found
from zerojax._features.in_backward import InBackward, InLoop, LayerUpdate, NoGradientError
from zerojax._features.layered import NoLayersError, layered
from zerojax._features.rolled import roll, unrolled
from zerojax._features.speculate import stays
from zerojax._jaxprs import type_of
from zerojax._kernel.body import How
from zerojax._kernel.device import DeviceStep, exact_share
from zerojax._loss import batch as _batch, fields as _fields, mean as _mean
from zerojax._loss.trace import TracedLoss, as_one_device
from zerojax._plan.encodings import as_stored
from zerojax._plan.plan import Plan
from zerojax._specs import axes_size
from zerojax._step.parameter import StepParam, as_of, codecs_of
from zerojax._step.schedule import MICROBATCHES
from zerojax._step.step_options import LossOptions, how_on, precision_of
from zerojax._types import PyTree, wide
from zerojax._update.guess import Guess
from zerojax._warn import warn

Grads: TypeAlias = Sequence[Array | np.ndarray | None]
Results: TypeAlias = tuple[
    Array, PyTree, Grads, list[tuple[Array, ...]], list[Array], list[list[Array]]
]


class Program(DeviceStep[StepParam]):
    """The code of one device in a step with options."""

    guess: Guess | None = None  # if it may run again, because that was wrong

    def __init__(
        self,
        plan: Plan,
        options: LossOptions,
        traced: TracedLoss,
        roles: Sequence[_batch.Role],
        per_example: PyTree,
        backward: InBackward | None = None,
    ) -> None:
        self.plan, self.options, self.traced, self.per_example = plan, options, traced, per_example
        self.microbatches = _batch.Microbatches(roles, options.accumulate)
        self.precision = precision_of(plan, options.precision)
        loss, schedule, self.counter, self.hoisted = traced.jaxpr, options.schedule, None, []
        # Before layers are rolled up: that leaves no call of a mean, and puts some into loops.
        if options.accumulate > 1:
            loss, self.counter, self.hoisted = _mean.hoist_counts(loss, len(plan.params))
        self.rolled = unrolled(loss, plan.params)
        if schedule.roll and axes_size(plan.mesh, plan.groups.params) > 1:
            ways = [codecs_of(leaf, self.precision, plan) for leaf in plan.params]
            up = functools.partial(roll, loss, plan.params, ways, schedule.roll)
            self.rolled = as_one_device(up, plan.mesh, plan.batch_axes)
        elif schedule.roll is True:
            self.rolled.told.append("roll=True rolls up nothing: no parameter is sharded (stage 3)")
        loss, leaves = self.rolled.jaxpr, self.rolled.leaves
        axes, self.constants = plan.batch_axes, ()
        if options.is_layered:
            loss, self.constants = self.layered(loss, len(leaves))
            options = self.options
        rules = [(as_of(path, self.precision), True) for path in self.rolled.named_after]
        rules += [(self.precision, False)] * len(self.rolled.own)
        common = {"accumulates": options.rounds > 1, "loops": bool(schedule.activations)}
        params = [
            StepParam.of(leaf, plan, precision, copied=copied, **common)
            for leaf, (precision, copied) in zip(leaves, rules, strict=True)
        ]
        how = How(regather=False, prefetch=0)  # until it is known what backward updates
        super().__init__(loss, params, plan.mesh, axes, how)
        if schedule.activations and not self.split.loops:
            self.leave_out(
                f"activations={schedule.activations}",
                "the loss has no scan of stacked parameters outside of jax.checkpoint. Stack the "
                "layers (nn.scan), with jax.checkpoint around one and not around the loop",
            )
        if backward and options.rounds == 1:  # else its gradients are sums of microbatches
            self.update_in(backward)
        brings = any(leaf.is_on_host for leaf in plan.params)
        self.how = how_on(
            plan.mesh,
            regather=bool(schedule.regather) and options.differentiates,
            # Weights that rest whole are gathered after their update, beside the layer before.
            prefetch=schedule.prefetch if plan.groups.params or self.updated or brings else False,
            keep_layers=schedule.keep_layers,
            gathers=bool(plan.groups.params),
            keeping=_activations.kept(plan, schedule.activations),
            updates=InLoop,
            counted=functools.partial(are_found, plan.mesh.devices.flat[0]),
        )
        self.reached: set[str] = set()  # paths of parameters that backward has updated
        whole = enumerate(self.rolled.are_whole)
        self.normed = [k for k, is_whole in whole if is_whole and self.params[k].is_varied]

    def layered(self, loss: Jaxpr, params: int) -> tuple[Jaxpr, Sequence[ArrayLike]]:
        """Returns the loss on all microbatches and its constants; or the loss on one, which the
        options then say."""
        plan, options = self.plan, self.options
        try:
            return layered(loss, params, self.microbatches, plan.mesh, plan.batch_axes)
        except NoLayersError as error:
            if options.schedule.update == "backward":
                raise ValueError(
                    f"update='backward' of {options.accumulate} microbatches is for "
                    f"order='layers', and {error}, or pass Schedule(update='auto')."
                ) from None
            self.leave_out("order='layers'", f"{error}, or pass Schedule(order='microbatches')")
            one_by_one = dataclasses.replace(options.schedule, order=MICROBATCHES)
            self.options = dataclasses.replace(options, schedule=one_by_one)
            return loss, ()

    def leave_out(self, option: str, why: str) -> None:
        """Says that the step runs without an option, once and where the step is printed."""
        text = f"{option} is left out: {why}"
        self.rolled.told.append(text)
        warn(f"{text}.")

    def update_in(self, backward: InBackward) -> None:
        """Has backward update the parameters that it can."""
        if updates := backward.updates:
            params = [dataclasses.replace(p, update=updates.get(p.leaf.path)) for p in self.params]
            fits = self.split_by(params).scanned_alone
            pairs = zip(params, self.params, fits, strict=False)
            self.params = [p if fit else q for p, q, fit in pairs]
            self.split = self.split_by(self.params)
        backward.check(self.updated)
        if any(update.needed for update in self.updated):
            self.guess = backward.guess

    # -- its inputs and outputs, as `shard_map` sees them

    @property
    def updated(self) -> list[LayerUpdate]:
        """What backward updates, in the order of the parameters."""
        return [p.update for p in self.params if p.update is not None]

    def specs_at(self, places: Iterable[int]) -> list[PartitionSpec]:
        """Returns how leaves of the state rest, from their positions in it."""
        return [self.plan.leaves[at].rest.local for at in places]

    def in_specs(self) -> tuple[list[PyTree], ...]:
        params = [leaf.rest.local for leaf in self.plan.params]
        args = [_batch.spec(role, self.plan.batch_axes) for role in self.microbatches.roles]
        state = [self.state_specs(u) for u in self.updated]
        return params, args, [PartitionSpec()] * len(self.traced.closed_over), state

    def state_specs(self, update: LayerUpdate) -> tuple[list[Any], ...]:
        """Returns how what an update needs rests, as `__call__` takes it."""
        own, given = self.specs_at(update.stacks[1:]), self.specs_at(update.given)
        if self.guess is None:
            return own, given, []
        guessed = len(self.guess.numbers) if update.needed else 0
        pairs = zip(update.stacks[1:], own, strict=True)
        old = [spec if stays(self.plan.leaves[at]) else None for at, spec in pairs]
        given += [PartitionSpec()] * guessed
        return [*own, *self.sent_specs(update)], given, [None, *old]

    def sent_specs(self, update: LayerUpdate) -> list[PartitionSpec]:
        """Returns how the stacks rest that an update sends away before it writes over them."""
        leaves = [self.plan.leaves[at] for at in update.stacks] if self.guess else []
        return [leaf.update.local for leaf in leaves if not stays(leaf)]

    def out_specs(self) -> tuple[PartitionSpec, PyTree, list, list, list, list]:
        batch, replicated = PartitionSpec(self.plan.batch_axes), PartitionSpec()
        aux = jax.tree.map(lambda rows: batch if rows else replicated, self.per_example)
        if not self.options.differentiates:
            return replicated, aux, [], [], [], []
        updated = {p.leaf.path for p in self.params if p.update}
        grads = [None if leaf.path in updated else leaf.update.local for leaf in self.plan.params]
        new = [(*self.specs_at(u.stacks), *self.sent_specs(u)) for u in self.updated]
        sums = [[replicated] * len(u.sums) for u in self.updated]
        return replicated, aux, grads, new, [replicated] * (len(new) + len(self.normed)), sums

    # -- the program

    def __call__(
        self,
        values: list[Array],
        args: list[Array],
        closed_over: list[Any],
        state: list[tuple[list[Array], list[Array], list[Array | None]]],
    ) -> Results:
        """Returns the loss, the aux and the gradients, all of them means over the devices; the new
        stacks of each parameter that backward updated; the sums of the squares of their
        gradients, and of those at the positions `normed`; and what else it summed over gradients.

        `state` has, for each of these, the state that is updated with it, the state that its
        update only reads, and `Updating.old`.
        """
        args = self.microbatches.prepared(args, self.plan.batch_axes, self.precision.compute)
        values = self.brought_near(self.rolled.joined(values, self.travel_dtypes))
        counts = self.counts(args, closed_over)
        # The exact part of the mean's factor scales the loss, the remaining one the sums.
        share, remaining = exact_share(self.size * self.options.accumulate)
        of_updated = iter(state)
        states = [next(of_updated) if p.update else ([], [], []) for p in self.params]
        varied = [
            p.stacks(value, own) if p.update else p.varied(value)
            for p, value, (own, *_) in zip(self.params, values, states, strict=True)
        ]

        def scaled_loss(floats: list[PyTree], loss_args: list[Array]) -> tuple[Array, PyTree]:
            sources = zip(
                self.params, values, self.with_floats(varied, floats), states, strict=True
            )
            inputs = [
                p.updated_input(v, given, old, remaining, self.reached)
                if p.update
                else p.loss_input(value, v)
                for p, value, v, (_, given, old) in sources
            ]
            loss, aux = self.loss([*inputs, *loss_args, *closed_over], counts)
            return loss * share, (loss, aux)

        floats = self.floats(varied)
        (loss, grads), aux = self.over_microbatches(scaled_loss, floats, args)
        # Without a gradient, JAX takes zeros for the new stacks of what backward should update.
        paths = {p.leaf.path for p in self.params if p.update is not None}
        if missed := sorted(paths - self.reached):
            raise NoGradientError(*missed)
        aux = jax.tree_util.tree_map_with_path(self.joined_aux, aux, self.per_example)
        loss = self.device_mean(loss / self.options.accumulate)
        if not self.options.differentiates:
            return loss, aux, [], [], [], []
        return loss, aux, *self.reduced(grads, remaining)

    def brought_near(self, values: list[Array]) -> list[Array]:
        """Returns the parameters after the part of their way that all microbatches share."""
        if not any(p.is_brought_near for p in self.params):
            return values
        return [
            p.brought_near(value, dtype) if p.is_brought_near else value
            for p, value, dtype in zip(self.params, values, self.travel_dtypes, strict=True)
        ]

    @property
    def travel_dtypes(self) -> list[DTypeLike]:
        """The dtypes in which the parameters are gathered."""
        pairs = zip(self.params, self.split.gathered_dtypes, strict=False)
        return [dtype or p.compute_dtype for p, dtype in pairs]

    def over_microbatches(
        self,
        scaled_loss: Callable[[list[PyTree], list[Array]], tuple[Array, PyTree]],
        floats: list[PyTree],
        args: list[Array],
    ) -> tuple[tuple[Array, list[Array]], PyTree]:
        """Returns the sums of the loss and its gradients over microbatches, and the stacked aux.

        `scaled_loss` returns the scaled loss, and then the loss with the aux.
        """

        def value(loss_args: list[Array]) -> tuple[tuple[Array, list[Array]], PyTree]:
            if not self.options.differentiates:
                _, (loss, aux) = scaled_loss(floats, loss_args)
                return (loss, []), aux
            grads, (loss, aux) = jax.grad(scaled_loss, has_aux=True)(floats, loss_args)
            return (loss, grads), aux

        # One microbatch needs no scan and no accumulators, so its numbers are those of a step
        # without microbatches. With order="layers", the loops over layers sum the gradients.
        if self.options.rounds == 1:
            sums, aux = value(self.microbatches.stacked(args))
            return sums, aux if self.options.is_layered else jax.tree.map(lambda x: x[None], aux)
        trained = [p for p in self.params if p.is_varied]
        pairs = zip(trained, floats, strict=True)
        grads = [jax.ShapeDtypeStruct(v.shape, p.grad_dtype) for p, v in pairs]
        loss = jax.ShapeDtypeStruct((), self.loss_dtype)
        like = loss, grads if self.options.differentiates else []
        return self.microbatches.summed(value, args, like)

    @property
    def loss_dtype(self) -> DTypeLike:
        return wide(type_of(self.traced.jaxpr.outvars[0]).dtype)

    def loss(self, inputs: list, counts: list[Array]) -> tuple[Array, PyTree]:
        """Returns the loss and the aux of one microbatch. With order="layers" it returns the sum of
        the losses of all, and their aux, stacked. `loss_input` made the weights among the inputs.
        """
        inputs = [*inputs, *self.hoisted, *counts, *self.rolled.constants, *self.constants]
        loss, *aux = map(jnp.asarray, self.run(inputs))  # a constant comes out as a Python number
        loss = jnp.sum(loss.astype(self.loss_dtype))
        return loss, jax.tree.structure(self.traced.aux).unflatten(aux)

    def counts(self, args: list[Array], closed_over: list[Array]) -> list[Array]:
        """Returns the count of each `zerojax.mean` over the devices, a mean over microbatches."""
        counter = self.counter
        if counter is None:
            return []
        unread = [jnp.zeros(())] * len(self.plan.params)  # a count depends on no weight

        def count(loss_args: list[Array]) -> tuple[list[Array], None]:
            inputs = [*unread, *loss_args, *closed_over, *self.hoisted]
            return _compat.run_jaxpr(counter, inputs), None

        like = list(map(type_of, counter.outvars))
        totals, _ = self.microbatches.summed(count, args, like)
        times = self.options.accumulate
        return [lax.psum(t, self.plan.batch_axes) / times for t in totals]

    # -- results

    def joined_aux(self, path: tuple, stacked: Array, has_rows: bool) -> Array:
        """Concatenates an aux leaf over microbatches, or makes it one value for all devices."""
        if has_rows:
            return stacked.reshape(-1, *stacked.shape[2:])
        if _fields.has_no_mean(path, stacked, self.options.mutable):
            return self.of_first_device(stacked[0])
        return self.device_mean(jnp.mean(stacked.astype(wide(stacked.dtype)), axis=0))

    def of_first_device(self, value: Array) -> Array:
        """Returns the first device's integers, booleans or keys, exactly, on every device."""
        if self.size == 1:
            return value
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            words = self.of_first_device(jax.random.key_data(value))
            return jax.random.wrap_key_data(words, impl=jax.random.key_impl(value))
        # A sum with the other devices' zeros. Booleans have no sum, and NCCL has none for 16 bits.
        summed = value if value.dtype.itemsize >= 4 else value.astype(jnp.int32)
        is_first = lax.axis_index(self.plan.batch_axes) == 0
        return lax.psum(jnp.where(is_first, summed, 0), self.plan.batch_axes).astype(value.dtype)

    def reduced(
        self, grads: list[PyTree], remaining: float
    ) -> tuple[Grads, list[tuple[Array, ...]], list[Array], list[list[Array]]]:
        """Returns the means of the gradients, which lack the factor `remaining`; what backward
        updated, whose means are None; sums of squares; and other sums."""
        each = list(zip(self.params, self.with_floats(self.params, grads), strict=True))
        new = [(p, *p.taken_apart(stacks)) for p, stacks in each if p.update is not None]
        squares = [_over_shards(each, p) for p, _, each, _ in new]
        sums = [[_over_shards(each, p) for each in more] for p, _, _, more in new]
        means = [
            None
            if p.update is not None
            else p.mean(p.reduced(grad), remaining)
            if p.is_varied
            else p.no_gradient()
            for p, grad in each
        ]
        # XLA takes longer to compile the norms of each layer's gradients than all other code.
        squares += [_over_shards(sum_of_squares(means[k]), self.params[k]) for k in self.normed]
        stacks = [self.as_stored(p, values) for p, values, *_ in new]
        return self.rolled.split(means), stacks, squares, sums

    def as_stored(self, param: StepParam, values: Sequence[Array]) -> tuple[Array, ...]:
        """Returns the new stacks of an update, and the old ones that it kept, in their dtypes."""
        assert param.update is not None
        own = [self.plan.leaves[at] for at in param.update.stacks]
        kept = [leaf for leaf in own if not stays(leaf)][: len(values) - len(own)]
        pairs = zip(values, [*own, *kept], strict=True)
        return tuple(as_stored(value, leaf.dtype) for value, leaf in pairs)


@jax.jit  # so that JAX traces it once for all gradients of one shape
def sum_of_squares(grad: Array) -> Array:
    # Squares of narrower dtypes overflow or vanish.
    return jnp.asarray(optax.tree.norm(grad.astype(wide(grad.dtype)), squared=True))


def _over_shards(squares: Array, p: StepParam) -> Array:
    """Returns the sum of what each shard of a gradient has."""
    over = p.leaf.update.axes
    return lax.psum(squares, over) if over else squares
