"""What each device runs in a step: the loss and its gradients on this device's examples."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from zerojax import _collectives, _compat
from zerojax._engine import run as _run
from zerojax._loss import batch as _batch, fields as _fields
from zerojax._loss.trace import TracedLoss
from zerojax._plan.plan import Plan
from zerojax._plan.precision import Precision, cast_floats, check_precision, exact_share, wide
from zerojax._step import accumulate as _accumulate
from zerojax._step.parameter import Parameter


@dataclasses.dataclass(frozen=True)
class Options:
    """How a loss is evaluated."""

    has_aux: bool | None
    accumulate: int
    precision: Precision | None
    regather: bool
    differentiate: bool = True
    prefetch: int | str = "auto"
    mutable: tuple[str, ...] = ()  # names in aux that are fields of a state
    batch_specs: Any = None

    def __post_init__(self) -> None:
        check_precision(self.precision)
        if not isinstance(self.accumulate, int) or self.accumulate < 1:
            raise ValueError(
                f"accumulate must be a positive integer, got {self.accumulate!r}: the number of "
                "microbatches that each device's part of the batch is split into."
            )
        if self.prefetch not in (0, 1, "auto"):
            raise ValueError(
                f"prefetch must be 0, 1 or 'auto', got {self.prefetch!r}: the number of layers "
                "whose weights are gathered ahead of their use."
            )


def precision_of(plan: Plan, given: Precision | None) -> Precision:
    """The dtypes of a step: the plan's, or those given where the plan has none."""
    if given is None:
        return plan.precision or Precision()
    if plan.precision is not None and given != plan.precision:
        raise ValueError(
            f"the step has {given} and the state was placed with {plan.precision}. Leave "
            "precision= out of the step, or place the state again with the one you want."
        )
    if plan.precision is None and (given.param or given.master):
        raise ValueError(
            f"{given} says how parameters are stored, and the state was placed without it. Place "
            "it with zerojax.shard_train_state(state, precision=...); the step then needs none."
        )
    return given


class Program:
    """The code of one device, to be run under `shard_map` with the specs it gives."""

    def __init__(
        self,
        plan: Plan,
        options: Options,
        traced: TracedLoss,
        roles: Sequence[_batch.Role],
        per_example: Any,
    ) -> None:
        self.plan, self.options, self.traced, self.roles = plan, options, traced, roles
        self.per_example = per_example
        self.precision = precision_of(plan, options.precision)
        self.how = _run.how_on(
            plan.mesh,
            _collectives.wire_over(plan.batch_axes, self.precision.reduce),
            regather=options.regather and options.differentiate,
            prefetch=options.prefetch if plan.groups.params else 0,
        )
        self.params = [
            Parameter(leaf, plan, self.precision, options.accumulate > 1) for leaf in plan.params
        ]
        self.hoisted = None
        if options.accumulate > 1 and _accumulate.has_counts(traced.jaxpr):
            known = [i >= len(self.params) for i in range(len(traced.jaxpr.invars))]
            self.hoisted = _accumulate.hoist_counts(traced.jaxpr, known)

    # -- where things come from and go to

    def in_specs(self) -> tuple[list, list, list]:
        params = [leaf.rest.local for leaf in self.plan.params]
        args = [_batch.spec(role, self.plan.batch_axes) for role in self.roles]
        return params, args, [PartitionSpec()] * len(self.traced.closed_over)

    def out_specs(self) -> tuple[Any, Any, Any]:
        batch, whole = PartitionSpec(self.plan.batch_axes), PartitionSpec()
        aux = jax.tree.map(lambda rows: batch if rows else whole, self.per_example)
        grads = [leaf.update.local for leaf in self.plan.params]
        return whole, aux, grads if self.options.differentiate else []

    # -- the program

    def __call__(
        self, values: list[Any], args: list[Any], closed_over: list[Any]
    ) -> tuple[Any, Any, list[Any]]:
        count = self.options.accumulate
        args = self.prepared(args)
        counts = self.counts(args, closed_over)
        varied = [p.varied(value) for p, value in zip(self.params, values, strict=True)]
        floats = [v for p, v in zip(self.params, varied, strict=True) if p.is_varied]
        share, rest = exact_share(self.plan.size * count)

        def scaled_loss(floats: list[Any], loss_args: list[Any]) -> tuple[Any, tuple[Any, Any]]:
            found = iter(floats)
            inputs = [
                p.loss_input(value, next(found) if p.is_varied else v)
                for p, value, v in zip(self.params, values, varied, strict=True)
            ]
            loss, aux = self.loss([*inputs, *loss_args, *closed_over], counts)
            return loss * share, (loss, aux)

        def microbatch(index: Any, parts: list[Any]) -> tuple[tuple[Any, list[Any]], Any]:
            loss_args = self.loss_args(args, parts, index)
            if not self.options.differentiate:
                _, (loss, aux) = scaled_loss(floats, loss_args)
                return (loss, []), aux
            grads, (loss, aux) = jax.grad(scaled_loss, has_aux=True)(floats, loss_args)
            return (loss, grads), aux

        if count == 1:
            (loss, grads), aux = microbatch(None, self.batch_args(args))
            aux = jax.tree.map(lambda leaf: leaf[None], aux)
        else:
            accumulators = [
                jax.ShapeDtypeStruct(v.shape, p.grad_dtype)
                for p, v in zip(self.params, varied, strict=True)
                if p.is_varied and self.options.differentiate
            ]
            like = (jax.ShapeDtypeStruct((), self.loss_dtype), accumulators)
            parts = self.microbatches(args)
            (loss, grads), aux = _accumulate.summed(microbatch, parts, count, like)
        aux = jax.tree_util.tree_map_with_path(self.joined_aux, aux, self.per_example)
        loss = self.device_mean(loss / count)
        return loss, aux, self.reduced(grads, rest) if self.options.differentiate else []

    @property
    def loss_dtype(self) -> Any:
        return wide(self.traced.jaxpr.outvars[0].aval.dtype)

    def loss(self, inputs: list[Any], counts: list[Any]) -> tuple[Any, Any]:
        jaxpr = self.traced.jaxpr
        if self.hoisted is not None:
            jaxpr, inputs = self.hoisted.loss, [*inputs, *self.hoisted.constants, *counts]
        if any(p.is_held for p in self.params):
            kinds = [p.kind() for p in self.params]
            kinds += [None] * (len(inputs) - len(kinds))
            outs = _run.evaluate(jaxpr, inputs, kinds, self.how)
        else:
            outs = _compat.run_jaxpr(jaxpr, inputs)
        loss, *aux = map(jnp.asarray, outs)  # a constant comes out as a Python number
        return loss.astype(self.loss_dtype), jax.tree.structure(self.traced.aux).unflatten(aux)

    def counts(self, args: list[Any], closed_over: list[Any]) -> list[Any]:
        """For each `zerojax.mean`, the mean over microbatches of its count over the devices."""
        hoisted = self.hoisted
        if hoisted is None:
            return []
        unread = [jnp.zeros(())] * len(self.params)

        def count(index: Any, parts: list[Any]) -> tuple[list[Any], None]:
            loss_args = self.loss_args(args, parts, index)
            inputs = [*unread, *loss_args, *closed_over, *hoisted.constants]
            return _compat.run_jaxpr(hoisted.counter, inputs), None

        like = [v.aval for v in hoisted.counter.outvars]
        times = self.options.accumulate
        totals, _ = _accumulate.summed(count, self.microbatches(args), times, like)
        return [lax.psum(t, self.plan.batch_axes) / times for t in totals]

    # -- the loss's arguments

    def prepared(self, args: list[Any]) -> list[Any]:
        """Floats in the compute dtype, keys of this device's own."""
        index = lax.axis_index(self.plan.batch_axes)
        args = cast_floats(args, self.precision.compute)
        pairs = zip(args, self.roles, strict=True)
        is_key = lambda role: role.kind == _batch.KEY  # noqa: E731
        return [jax.random.fold_in(a, index) if is_key(role) else a for a, role in pairs]

    def batch_args(self, args: list[Any]) -> list[Any]:
        return [a for a, role in zip(args, self.roles, strict=True) if role.kind == _batch.BATCH]

    def microbatches(self, args: list[Any]) -> list[Any]:
        """This device's part of the batch, split where it lies: nothing moves between devices."""
        dims = [role.dim for role in self.roles if role.kind == _batch.BATCH]
        pairs = zip(self.batch_args(args), dims, strict=True)
        return [_batch.split(value, dim, self.options.accumulate) for value, dim in pairs]

    def loss_args(self, args: list[Any], parts: list[Any], index: Any | None) -> list[Any]:
        """The arguments of microbatch `index` (None: there is only one), its `parts` put in."""
        found = iter(parts)

        def arg(value: Any, role: _batch.Role) -> Any:
            if role.kind == _batch.BATCH:
                return next(found)
            if role.kind == _batch.KEY and index is not None:
                return jax.random.fold_in(value, index)
            return value

        return [arg(value, role) for value, role in zip(args, self.roles, strict=True)]

    # -- results

    def joined_aux(self, path: tuple, stacked: Any, has_rows: bool) -> Any:
        """An aux leaf, one a microbatch: put together, or one value for all and the devices."""
        if has_rows:
            return stacked.reshape(-1, *stacked.shape[2:])
        if _fields.has_no_mean(path, stacked, self.options.mutable):
            return self.of_first_device(stacked[0])
        return self.device_mean(jnp.mean(stacked.astype(wide(stacked.dtype)), axis=0))

    def device_mean(self, value: Any) -> Any:
        return lax.pmean(value, self.plan.batch_axes) if self.plan.size > 1 else value

    def of_first_device(self, value: Any) -> Any:
        """The first device's integers, booleans or keys on every device, bit by bit."""
        if self.plan.size == 1:
            return value
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            words = self.of_first_device(jax.random.key_data(value))
            return jax.random.wrap_key_data(words, impl=jax.random.key_impl(value))
        summed = value if value.dtype.itemsize >= 4 else value.astype(jnp.int32)
        is_first = lax.axis_index(self.plan.batch_axes) == 0
        return lax.psum(jnp.where(is_first, summed, 0), self.plan.batch_axes).astype(value.dtype)

    def reduced(self, grads: list[Any], rest: float) -> list[Any]:
        """The mean of the gradients, of which `rest` is the factor that they still lack."""
        found = iter(grads)

        def mean(p: Parameter) -> Any:
            if not p.is_varied:
                return p.no_gradient()
            grad = p.reduced(next(found), self.how.wire.reduce)
            return grad if rest == 1 else (grad.astype(wide(grad.dtype)) * rest).astype(grad.dtype)

        return list(map(mean, self.params))
