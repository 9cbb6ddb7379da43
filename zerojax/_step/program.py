"""The code of one device in a step: the loss and its gradients on this device's examples."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Jaxpr
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from zerojax import _compat
from zerojax._engine import run as _run
from zerojax._engine.ir import InputKind
from zerojax._features.layered import layered
from zerojax._jaxpr import type_of
from zerojax._loss import batch as _batch, fields as _fields, mean as _mean
from zerojax._loss.trace import TracedLoss
from zerojax._plan.plan import Plan
from zerojax._plan.precision import wide
from zerojax._step import host_slices as _slices
from zerojax._step.backward import InBackward, NoGradientError
from zerojax._step.parameter import Parameter
from zerojax._step.step_options import LossOptions, keeping, precision_of
from zerojax._types import PyTree
from zerojax._update.in_backward import LayerUpdate


class Program:
    """The code of one device, to be run under `shard_map` with the specs it gives."""

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
        many, loss = options.accumulate > 1, traced.jaxpr
        self.hoisted = _mean.hoist_counts(loss, len(plan.params)) if many else None
        self.jaxpr, self.constants = self.as_it_runs()
        self.params = self.parameters()
        if backward:
            self.params = self.with_updates(backward.updates)
            backward.check(self.updated)
        brings = any(leaf.is_on_host for leaf in plan.params)
        self.how = _run.how_on(
            plan.mesh,
            regather=bool(options.regather) and options.differentiates,
            # What is gathered after its update is so while the layer before computes backward.
            prefetch=options.prefetch if plan.groups.params or self.updated or brings else 0,
            gathers=bool(plan.groups.params),
            keeping=keeping(plan, options.activations or ()),
            counted=functools.partial(_slices.are_found, plan.mesh.devices.flat[0]),
        )
        self.trained = [p for p in self.params if p.is_varied]
        self.reached: set[str] = set()  # paths of parameters that backward has updated

    def parameters(self) -> list[Parameter]:
        """Returns the parameters; raises where the loss does not keep activations by layers."""
        activations, accumulates = self.options.activations, self.options.rounds > 1
        params = [
            Parameter(leaf, self.plan, self.precision, accumulates, loops=bool(activations))
            for leaf in self.plan.params
        ]
        if activations and not _run.has_loops(self.jaxpr, self.kinds_of(params)):
            raise ValueError(
                f"activations={activations} is for loops over layers, and the loss has no scan of "
                "stacked parameters outside of jax.checkpoint. Stack the layers (nn.scan), with "
                "jax.checkpoint around one and not around the loop, or leave it out."
            )
        return params

    def with_updates(self, updates: Sequence[LayerUpdate | None]) -> list[Parameter]:
        """Returns the parameters, those with an update that backward can do with it."""
        if not any(updates):
            return self.params
        pairs = zip(self.params, updates, strict=True)
        params = [dataclasses.replace(p, update=update) for p, update in pairs]
        alone = _run.scanned_alone(self.jaxpr, self.kinds_of(params))
        return [p if fits else q for p, q, fits in zip(params, self.params, alone, strict=False)]

    # -- its inputs and outputs, as `shard_map` sees them

    @property
    def updated(self) -> list[LayerUpdate]:
        """What backward updates, in the order of the parameters."""
        return [p.update for p in self.params if p.update is not None]

    def specs_at(self, places: Iterable[int]) -> list[PartitionSpec]:
        """Returns how leaves of the state rest, from their places among an update's inputs."""
        first = len(self.plan.params)
        return [self.plan.leaves[at - first].rest.local for at in places]

    def in_specs(self) -> tuple[list[PyTree], ...]:
        params = [leaf.rest.local for leaf in self.plan.params]
        args = [_batch.spec(role, self.plan.batch_axes) for role in self.microbatches.roles]
        state = [(self.specs_at(u.stacks[1:]), self.specs_at(u.given)) for u in self.updated]
        return params, args, [PartitionSpec()] * len(self.traced.closed_over), state

    def out_specs(self) -> tuple[PartitionSpec, PyTree, list, list]:
        batch, replicated = PartitionSpec(self.plan.batch_axes), PartitionSpec()
        aux = jax.tree.map(lambda rows: batch if rows else replicated, self.per_example)
        grads = [None if p.update else p.leaf.update.local for p in self.params]
        new = [(*self.specs_at(u.stacks), replicated) for u in self.updated]
        return replicated, aux, grads if self.options.differentiates else [], new

    # -- the program

    def on_all_devices(self) -> Callable[..., tuple]:
        """Returns the program of all devices together."""
        # Only ZeRO's axes are manual: over axes of the user's own, XLA shards the loss as it likes.
        # JAX must not track what varies over the devices (vma): it would sum gradients once more.
        return jax.shard_map(
            self,
            mesh=self.plan.mesh,
            in_specs=self.in_specs(),
            out_specs=self.out_specs(),
            axis_names=set(self.plan.batch_axes),
            check_vma=False,
        )

    def __call__(
        self,
        values: list[Array],
        args: list[Array],
        closed_over: list[Array],
        state: list[tuple[list[Array], list[Array]]],
    ) -> tuple[Array, PyTree, list[Array | np.ndarray | None], list[tuple[Array, ...]]]:
        """Returns the loss, the aux and the gradients, all of them means over the devices; and, of
        each parameter that backward updated, the new stacks and the sum of its gradient's squares.

        `state` has what these are updated with, and what is only read for it.
        """
        args = self.microbatches.prepared(args, self.plan.batch_axes, self.precision.compute)
        values = self.brought_near(values)
        counts = self.counts(args, closed_over)
        # The exact part of the mean's factor scales the loss, the rest scales the sums.
        share, remaining = _batch.exact_share(self.plan.size * self.options.accumulate)
        of_updated = iter(state)
        states = [next(of_updated) if p.update else ([], []) for p in self.params]
        varied = [
            p.varied(value, own)
            for p, value, (own, _) in zip(self.params, values, states, strict=True)
        ]

        def scaled_loss(floats: list[PyTree], loss_args: list[Array]) -> tuple[Array, PyTree]:
            found = iter(floats)
            inputs = [
                p.loss_input(
                    value, next(found) if p.is_varied else v, given, remaining, self.reached
                )
                for p, value, v, (_, given) in zip(self.params, values, varied, states, strict=True)
            ]
            loss, aux = self.loss([*inputs, *loss_args, *closed_over], counts)
            return loss * share, (loss, aux)

        # JAX differentiates by what has a gradient only: integers, keys and frozen parameters reach
        # the loss as they are.
        floats = [v for p, v in zip(self.params, varied, strict=True) if p.is_varied]
        (loss, grads), aux = self.over_microbatches(scaled_loss, floats, args)
        self.check_reached()
        aux = jax.tree_util.tree_map_with_path(self.joined_aux, aux, self.per_example)
        loss = self.device_mean(loss / self.options.accumulate)
        if not self.options.differentiates:
            return loss, aux, [], []
        return loss, aux, *self.reduced(grads, remaining)

    def check_reached(self) -> None:
        """Raises where JAX would take zeros, as of no gradient, for what backward updates."""
        paths = {p.leaf.path for p in self.params if p.update is not None}
        if missed := sorted(paths - self.reached):
            raise NoGradientError(missed)

    def brought_near(self, values: list[Array]) -> list[Array]:
        """Returns what the loss gathers parameters from."""
        if not any(p.is_brought_near for p in self.params):
            return values
        dtypes = _run.gathered_dtypes(self.jaxpr, self.kinds)
        return [
            p.brought_near(value, dtype or p.compute_dtype) if p.is_brought_near else value
            for p, value, dtype in zip(self.params, values, dtypes, strict=False)
        ]

    def as_it_runs(self) -> tuple[Jaxpr, Sequence[ArrayLike]]:
        """Returns the loss of a microbatch, or of all in layers, and its constants. Counts over the
        batch are among its inputs if they are known before."""
        hoisted = self.hoisted
        jaxpr = self.traced.jaxpr if hoisted is None else hoisted.loss
        if not self.options.is_layered:
            return jaxpr, ()
        over = self.plan.mesh, self.plan.batch_axes
        return layered(jaxpr, len(self.plan.params), self.microbatches, *over)

    @property
    def kinds(self) -> list[InputKind]:
        return self.kinds_of(self.params)

    def kinds_of(self, params: Sequence[Parameter]) -> list[InputKind]:
        """Returns what its inputs are: after the parameters, plain arrays."""
        others = len(self.jaxpr.invars) - len(params)
        return [*(p.kind() for p in params), *[None] * others]

    def over_microbatches(
        self,
        scaled_loss: Callable[[list[PyTree], list[Array]], tuple[Array, PyTree]],
        floats: list[PyTree],
        args: list[Array],
    ) -> tuple[tuple[Array, list[Array]], PyTree]:
        """Returns the sums of the loss and its gradients over microbatches, and the aux, stacked.

        `scaled_loss` returns the scaled loss, then the loss and the aux.
        """

        def value(loss_args: list[Array]) -> tuple[tuple[Array, list[Array]], PyTree]:
            if not self.options.differentiates:
                _, (loss, aux) = scaled_loss(floats, loss_args)
                return (loss, []), aux
            grads, (loss, aux) = jax.grad(scaled_loss, has_aux=True)(floats, loss_args)
            return (loss, grads), aux

        # One microbatch needs no scan and no accumulators: the numbers are those of a loop that
        # never heard of microbatches. All at once sum their gradients layer by layer.
        if self.options.rounds == 1:
            sums, aux = value(self.microbatches.stacked(args))
            return sums, aux if self.options.is_layered else jax.tree.map(lambda x: x[None], aux)
        pairs = zip(self.trained, floats, strict=True)
        grads = [jax.ShapeDtypeStruct(v.shape, p.grad_dtype) for p, v in pairs]
        loss = jax.ShapeDtypeStruct((), self.loss_dtype)
        like = loss, grads if self.options.differentiates else []
        return self.microbatches.summed(value, args, like)

    @property
    def loss_dtype(self) -> DTypeLike:
        return wide(type_of(self.traced.jaxpr.outvars[0]).dtype)

    def loss(self, inputs: list, counts: list[Array]) -> tuple[Array, PyTree]:
        """Returns the loss and the aux of one microbatch, weights being as `loss_input` says; of
        all in layers, the sum of their losses and their aux, stacked."""
        if self.hoisted is not None:
            inputs = [*inputs, *self.hoisted.constants, *counts]
        inputs = [*inputs, *self.constants]
        if any(p.is_held for p in self.params):
            outs = _run.evaluate(self.jaxpr, inputs, self.kinds, self.how)
        else:
            outs = _compat.run_jaxpr(self.jaxpr, inputs)
        loss, *aux = map(jnp.asarray, outs)  # a constant comes out as a Python number
        loss = jnp.sum(loss.astype(self.loss_dtype))
        return loss, jax.tree.structure(self.traced.aux).unflatten(aux)

    def counts(self, args: list[Array], closed_over: list[Array]) -> list[Array]:
        """Returns the count of each `zerojax.mean` over the devices, a mean over microbatches."""
        hoisted = self.hoisted
        if hoisted is None:
            return []
        unread = [jnp.zeros(())] * len(self.params)  # a count depends on no weight

        def count(loss_args: list[Array]) -> tuple[list[Array], None]:
            inputs = [*unread, *loss_args, *closed_over, *hoisted.constants]
            return _compat.run_jaxpr(hoisted.counter, inputs), None

        like = list(map(type_of, hoisted.counter.outvars))
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

    def device_mean(self, value: Array) -> Array:
        return lax.pmean(value, self.plan.batch_axes) if self.plan.size > 1 else value

    def of_first_device(self, value: Array) -> Array:
        """Returns the first device's integers, booleans or keys, exactly, on every device."""
        if self.plan.size == 1:
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
    ) -> tuple[list[Array | np.ndarray | None], list[tuple[Array, ...]]]:
        """Returns the mean of the gradients, which lack the factor `remaining`, None where the
        parameter was updated; and what was."""
        found = dict(zip(map(id, self.trained), grads, strict=True))

        def mean(p: Parameter) -> Array | np.ndarray | None:
            if p.update is not None:
                return None
            return p.mean(p.reduced(found[id(p)]), remaining) if p.is_varied else p.no_gradient()

        updated = []
        for p in (p for p in self.params if p.update is not None):
            *stacks, squares = found[id(p)]
            over = p.leaf.update.axes
            updated.append((*stacks, lax.psum(jnp.sum(squares), over) if over else squares.sum()))
        return list(map(mean, self.params)), updated
