"""The code of one device in a step: the loss and its gradients on this device's examples."""

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from zerojax import _compat
from zerojax._features import activations as _activations, updating as _updating
from zerojax._features.host_state import are_found
from zerojax._features.in_backward import InBackward, InLoop, LayerUpdate, NoGradientError
from zerojax._fence import LOOPS, in_order
from zerojax._jaxprs import type_of
from zerojax._kernel.device import DeviceLoss, Param, exact_share
from zerojax._loss import batch as _batch, fields as _fields
from zerojax._loss.trace import TracedLoss
from zerojax._passes.loss import Loss
from zerojax._plan.encodings import as_stored
from zerojax._plan.plan import Plan
from zerojax._plan.precision import Precision
from zerojax._step.parameter import as_of, step_param
from zerojax._step.step_options import LossOptions, how_on
from zerojax._types import PyTree, wide
from zerojax._warn import warn

Grads: TypeAlias = Sequence[Any]  # arrays, JAX's own zeros of keys, None


class Results(NamedTuple):
    """What a program returns. Loss, aux and gradients are means over the devices. The aux comes
    with what passes add to the metrics.

    Of each parameter that backward updated, it returns the `new` stacks and no gradient. `squares`
    are sums of the squares of these gradients, and of those at the positions `normed`; `sums` are
    what else it summed over gradients.
    """

    loss: Array
    aux: PyTree
    grads: Grads = ()
    new: Sequence[tuple[Array, ...]] = ()
    squares: Sequence[Array] = ()
    sums: Sequence[Sequence[Array]] = ()


class Program:
    """The code of one device in a step. `loss` is the traced one after the passes of the step."""

    def __init__(
        self,
        plan: Plan,
        options: LossOptions,
        traced: TracedLoss,
        loss: Loss,
        microbatches: _batch.Microbatches,
        precision: Precision,
        per_example: PyTree,
        backward: InBackward | None = None,
    ) -> None:
        self.plan, self.options, self.traced, self.per_example = plan, options, traced, per_example
        self.loss, self.microbatches, self.precision = loss, microbatches, precision
        # How often a step gathers each layer, and reduces its gradient.
        self.rounds = 1 if loss.layered else options.accumulate
        self.device = self.holding(())
        self.updates: dict[int, LayerUpdate] = {}  # what backward updates, by parameter
        schedule, others = options.schedule, dict[str, Any]()
        if schedule.activations and not self.device.split.loops:
            note = (
                f"activations={schedule.activations} is left out: the loss has no scan of stacked "
                "parameters outside of jax.checkpoint. Stack the layers (nn.scan), with "
                "jax.checkpoint around one and not around the loop"
            )
            warn(f"{note}.")
            self.loss = loss.noting(note)
        if schedule.activations:
            others["keeping"] = _activations.kept(plan, schedule.activations)
        if backward and self.rounds == 1:  # else its gradients are sums of microbatches
            self.update_in(backward)
        if self.updates:
            others["updates"] = InLoop
        brings = any(leaf.is_on_host for leaf in plan.params)
        self.how = how_on(
            plan.mesh,
            regather=bool(schedule.regather) and options.differentiates,
            # Weights that rest whole are gathered after their update, beside the layer before.
            prefetch=schedule.prefetch if plan.groups.params or self.updates or brings else False,
            keep_layers=schedule.keep_layers,
            gathers=bool(plan.groups.params),
            counted=functools.partial(are_found, plan.mesh.devices.flat[0]),
            **others,
        )
        whole = enumerate(loss.feed.are_whole)
        self.normed = [k for k, is_whole in whole if is_whole and self.params[k].is_varied]

    @property
    def params(self) -> list[Param]:
        return self.device.params

    def holding(self, paths: Collection[str]) -> DeviceLoss:
        """Returns the loss with its parameters, of which the engine takes these in any case."""
        plan, stacks, params = self.plan, self.loss.feed.stacks, list[Param]()
        for k, leaf in enumerate(self.loss.params):
            precision, is_stack = self.precision, k < len(stacks)
            if is_stack:  # it travels as each of its layers does
                precision = as_of(plan.params[stacks[k][0]].path, precision)
            in_loops = bool(self.options.schedule.activations) and leaf.stacked
            must = leaf.path in paths or in_loops
            accumulates = self.rounds > 1
            params.append(
                step_param(leaf, plan, precision, accumulates, must_hold=must, copied=is_stack)
            )
        return DeviceLoss(self.loss.jaxpr, params, plan.mesh, plan.batch_axes)

    def update_in(self, backward: InBackward) -> None:
        """Has backward update the parameters that it can."""
        if updates := backward.updates:
            trial = self.holding(updates)
            pairs = zip(trial.params, trial.split.scanned_alone, strict=False)
            paths = {p.leaf.path for p, is_alone in pairs if is_alone} & updates.keys()
            self.device = self.holding(paths)
            each = enumerate(p.leaf.path for p in self.params)
            self.updates = {k: updates[path] for k, path in each if path in paths}
        backward.check([*self.updates.values()])

    def on_all_devices(self) -> Callable[..., PyTree]:
        """Returns the program of all devices together."""
        code = in_order(self) if self.how.by_data and self.may_loop else self
        program = self.device.on_all_devices(code, self.in_specs(), self.out_specs())

        def padded(values: list[Array], args: list[Array], *others: PyTree) -> PyTree:
            return program(values, self.microbatches.with_blocks(args, splits), *others)

        splits = self.plan._splits
        return padded if splits.blocks > 1 else program

    @property
    def may_loop(self) -> bool:
        """Whether collectives may run in a loop."""
        names = {eqn.primitive.name for eqn in _compat.every_eqn(self.loss.jaxpr)}
        return self.rounds > 1 or not names.isdisjoint(LOOPS)

    # -- its inputs and outputs, as `shard_map` sees them

    def specs_at(self, places: Iterable[int]) -> list[PartitionSpec]:
        """Returns how leaves of the state rest, from their positions in it."""
        return [self.plan.leaves[at].rest.local for at in places]

    def in_specs(self) -> tuple[list[PyTree], ...]:
        params = [leaf.rest.local for leaf in self.plan.params]
        args = [_batch.spec(role, self.plan._splits) for role in self.microbatches.roles]
        updates = self.updates.values()
        state = [(self.specs_at(u.stacks[1:]), self.specs_at(u.given)) for u in updates]
        return params, args, [PartitionSpec()] * len(self.traced.closed_over), state

    def out_specs(self) -> Results:
        replicated = PartitionSpec()
        have_rows, treedef = jax.tree.flatten(self.per_example)
        kinds = [_batch.BATCH if rows else _batch.REPLICATED for rows in have_rows]
        dims = self.loss.out_dims or [None] * len(kinds)
        roles = [_batch.Role(kind, 0, dim) for kind, dim in zip(kinds, dims, strict=True)]
        aux = treedef.unflatten(_batch.spec(role, self.plan._splits) for role in roles)
        aux = aux, [replicated] * len(self.loss.metrics)
        specs: Any = Results  # of specs, in place of arrays
        if not self.options.differentiates:
            return specs(replicated, aux)
        updates = self.updates.values()
        updated = {self.params[k].leaf.path for k in self.updates}
        grads = [None if leaf.path in updated else leaf.update.local for leaf in self.plan.params]
        new = [tuple(self.specs_at(u.stacks)) for u in updates]
        squares = [replicated] * (len(new) + len(self.normed))
        sums = [[replicated] * len(update.sums) for update in updates]
        return specs(replicated, aux, grads, new, squares, sums)

    # -- the program

    def __call__(
        self,
        values: list[Array],
        args: list[Array],
        closed_over: list[Array],
        state: list[tuple[list[Array], list[Array]]],
    ) -> Results:
        """`state` has, for each parameter that backward updates, the state that is updated with it,
        and the state that its update only reads."""
        device, params = self.device, self.params
        args = self.microbatches.prepared(args, self.plan._splits.rows, self.precision.compute)
        dtypes = self.travel_dtypes
        values = self.loss.feed.fed(values, dtypes)
        each = zip(params, values, dtypes, strict=True)
        values = [p.brought_near(value, dtype) for p, value, dtype in each]
        counts = self.counts(args, closed_over)
        # The exact part of the mean's factor scales the loss, the remaining one the sums.
        share, remaining = exact_share(device.size * self.options.accumulate)
        states, reached = dict(zip(self.updates, state, strict=True)), set[str]()
        varied = [p.varied(value) for p, value in zip(params, values, strict=True)]
        for k, update in self.updates.items():
            own, _ = states[k]
            varied[k] = _updating.stacks_of(params[k], update, values[k], own)

        def scaled_loss(floats: list[PyTree], loss_args: list[Array]) -> tuple[Array, PyTree]:
            now = device.with_floats(varied, floats)
            inputs = [p.loss_input(*each) for p, *each in zip(params, values, now, strict=True)]
            for k, update in self.updates.items():
                _, given = states[k]
                inputs[k] = _updating.updated_input(
                    params[k], update, now[k], given, remaining, reached
                )
            loss, aux = self.run([*inputs, *loss_args, *closed_over, *counts])
            return loss * share, (loss, aux)

        floats = device.floats(varied)
        (loss, grads), aux = self.over_microbatches(scaled_loss, floats, args)
        # Without a gradient, JAX takes zeros for the new stacks of what backward should update.
        if missed := sorted({params[k].leaf.path for k in self.updates} - reached):
            raise NoGradientError(*missed)
        aux, more = aux
        aux = jax.tree_util.tree_map_with_path(self.joined_aux, aux, self.per_example)
        aux = aux, [self.joined_aux((), each, False) for each in more]
        loss = device.device_mean(loss / self.options.accumulate)
        if not self.options.differentiates:
            return Results(loss, aux)
        return Results(loss, aux, *self.reduced(grads, remaining))

    @property
    def travel_dtypes(self) -> list[DTypeLike]:
        """The dtypes in which the parameters are gathered."""
        pairs = zip(self.params, self.device.split.gathered_dtypes, strict=False)
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
        if self.rounds == 1:
            sums, aux = value(self.microbatches.stacked(args))
            return sums, aux if self.loss.layered else jax.tree.map(lambda x: x[None], aux)
        trained = [p for p in self.params if p.is_varied]
        pairs = zip(trained, floats, strict=True)
        grads = [jax.ShapeDtypeStruct(v.shape, p.grad_dtype) for p, v in pairs]
        loss = jax.ShapeDtypeStruct((), self.loss_dtype)
        like = loss, grads if self.options.differentiates else []
        return self.microbatches.summed(value, args, like)

    @property
    def loss_dtype(self) -> DTypeLike:
        return wide(type_of(self.traced.jaxpr.outvars[0]).dtype)

    def run(self, inputs: list[PyTree]) -> tuple[Array, PyTree]:
        """Returns the loss of one microbatch, and its aux with what passes add to the metrics. Of a
        layered loss it returns the sum of the losses of all, and the others stacked."""
        outputs = self.device.run([*inputs, *self.loss.constants], self.how)
        loss, *aux = map(jnp.asarray, outputs)  # a constant comes out as a Python number
        loss = jnp.sum(loss.astype(self.loss_dtype))
        count = len(aux) - len(self.loss.metrics)
        return loss, (jax.tree.structure(self.traced.aux).unflatten(aux[:count]), aux[count:])

    def counts(self, args: list[Array], closed_over: list[Array]) -> list[Array]:
        """Returns the count of each `zerojax.mean` over the devices, a mean over microbatches."""
        counter = self.loss.counter
        if counter is None:
            return []

        def count(loss_args: list[Array]) -> tuple[list[Array], None]:
            inputs = [*loss_args, *closed_over, *self.loss.constants]
            # Later passes have constants after its own.
            return _compat.run_jaxpr(counter, inputs[: len(counter.invars)]), None

        like = list(map(type_of, counter.outvars))
        totals, _ = self.microbatches.summed(count, args, like)
        times = self.options.accumulate
        return [lax.psum(t, self.plan._splits.rows) / times for t in totals]

    # -- results

    def joined_aux(self, path: tuple, stacked: Array, has_rows: bool) -> Array:
        """Concatenates an aux leaf over microbatches, or makes it one value for all devices."""
        if has_rows:
            return stacked.reshape(-1, *stacked.shape[2:])
        if _fields.has_no_mean(path, stacked, self.options.mutable):
            return self.of_first_device(stacked[0])
        return self.device.device_mean(jnp.mean(stacked.astype(wide(stacked.dtype)), axis=0))

    def of_first_device(self, value: Array) -> Array:
        """Returns the first device's integers, booleans or keys, exactly, on every device."""
        if self.device.size == 1:
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
        params, new, squares, sums = self.params, [], [], []
        means: list[Array | np.ndarray | None] = []
        for k, grad in enumerate(self.device.with_floats(params, grads)):
            param = params[k]
            if k in self.updates:
                stacks, square, more = _updating.taken_apart(self.updates[k], grad)
                new.append(self.as_stored(self.updates[k], stacks))
                squares.append(_over_shards(square, param))
                sums.append([_over_shards(each, param) for each in more])
                means.append(None)
            else:
                mean = param.mean(grad, remaining) if param.is_varied else param.no_gradient()
                means.append(mean)
        # XLA takes longer to compile the norms of each layer's gradients than all other code.
        squares += [_over_shards(sum_of_squares(means[k]), params[k]) for k in self.normed]
        return self.loss.feed.returned(means), new, squares, sums

    def as_stored(self, update: LayerUpdate, values: Sequence[Array]) -> tuple[Array, ...]:
        """Returns the new stacks of an update in their dtypes."""
        pairs = zip(values, update.stacks, strict=True)
        return tuple(as_stored(value, self.plan.leaves[at].dtype) for value, at in pairs)


@jax.jit  # so that JAX traces it once for all gradients of one shape
def sum_of_squares(grad: Array) -> Array:
    # Squares of narrower dtypes overflow or vanish.
    grad = grad.astype(wide(grad.dtype))
    # `optax.tree.norm` has three operations more for each gradient, which XLA would take away.
    return jnp.sum((grad.conj() * grad).real)


def _over_shards(squares: Array, p: Param) -> Array:
    """Returns the sum of what each shard of a gradient has."""
    over = p.leaf.update.axes + p.leaf.update.apart
    return lax.psum(squares, over) if over else squares
