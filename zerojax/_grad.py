"""Loss and gradients on every device's shard of the batch: the inside of a step."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from zerojax import _accumulate, _batch, _compat, _engine, _gather, _spec
from zerojax._plan import LeafPlan, Plan, shape_and_dtype
from zerojax._precision import Precision, cast_floats
from zerojax._split import WEIGHT, Shard
from zerojax._state import OPT_STATE, PARAMS, leaves_of
from zerojax._trace import TracedLoss, trace_loss


@dataclasses.dataclass(frozen=True)
class Options:
    """How a loss is evaluated."""

    has_aux: bool | None = False
    accumulate: int = 1
    precision: Precision = Precision()
    regather: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.accumulate, int) or self.accumulate < 1:
            raise ValueError(
                f"accumulate must be a positive integer, got {self.accumulate!r}: the number of "
                "microbatches that each device's part of the batch is split into."
            )


def value_and_grad(
    loss_fn: Callable[..., Any],
    plan: Plan,
    *,
    has_aux: bool = False,
    accumulate: int = 1,
    precision: Precision | None = None,
    regather: bool = True,
) -> Callable[..., Any]:
    """`jax.value_and_grad` for parameters that live where `plan` puts them.

    `loss_fn(params, *args)` is written for one device. It runs on each device's part of the
    batch, and the value and gradients are the mean over the devices. Among `args`, arrays are
    split along their first dimension, PRNG keys are folded with the device's index, scalars are
    passed on. What the loss closes over is passed on whole.

    Arguments:
        loss_fn: returns a scalar, or `(scalar, aux)` with `has_aux`.
        plan: from `zerojax.plan`.
        has_aux: as in JAX. Aux leaves are averaged; those with a row for each example are
            put together along the batch instead.
        accumulate: number of microbatches that each device's part is split into. Stages 0 and 1
            reduce gradients once, stages 2 and 3 keep only shards of their sum.
        precision: dtypes to compute and to reduce in.
        regather: gather weights again in backward instead of keeping them (stage 3).

    Returns:
        A function `(params, *args) -> (value, grads)`. From stage 1 on, grads come out sharded.
    """
    options = Options(has_aux, accumulate, precision or Precision(), regather)

    def fn(params: Any, *args: Any) -> tuple[Any, Any]:
        loss, aux, grads = loss_and_grads(loss_fn, plan, options, params, args)
        return (loss, aux) if has_aux else loss, grads

    return fn


def loss_and_grads(
    loss_fn: Callable[..., Any],
    plan: Plan,
    options: Options,
    params: Any,
    args: Sequence[Any],
    *,
    differentiate: bool = True,
) -> tuple[Any, Any, Any]:
    """The mean loss, the aux and, with `differentiate`, the gradients in `params`' structure."""
    check_params(params, plan)
    values, treedef = jax.tree.flatten(params)
    arg_values, arg_tree = jax.tree.flatten(tuple(args))
    roles = _batch.roles(args)
    _batch.check(args, roles, plan, options.accumulate)
    compute = options.precision.compute

    def trace(split_by: int) -> TracedLoss:
        shapes = [_batch.local_shape(v, r, split_by) for v, r in zip(arg_values, roles, strict=True)]
        whole = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in values]
        traced_args = [treedef.unflatten(whole), *arg_tree.unflatten(shapes)]
        traced_args = cast_floats(traced_args, compute)
        return trace_loss(
            loss_fn, traced_args, has_aux=options.has_aux, mesh=plan.mesh, axes=plan.axes
        )

    ways = plan.size * options.accumulate
    traced = trace(ways)
    per_example = _batch.per_example(traced.aux, arg_values, roles, ways, lambda n: trace(n).aux)
    program = _Program(plan, options, traced, roles, per_example, differentiate)
    sharded = jax.shard_map(
        program, mesh=plan.mesh, in_specs=program.in_specs(arg_values),
        out_specs=program.out_specs(), axis_names=set(plan.axes), check_vma=False,
    )  # fmt: skip
    loss, aux, grads = jax.jit(sharded)(values, arg_values, traced.closed_over)
    return loss, aux, treedef.unflatten(grads) if differentiate else None


class _Program:
    """What each device runs."""

    def __init__(
        self,
        plan: Plan,
        options: Options,
        traced: TracedLoss,
        roles: Sequence[str],
        per_example: Any,
        differentiate: bool,
    ) -> None:
        self.plan, self.options, self.traced, self.roles = plan, options, traced, roles
        self.per_example, self.differentiate = per_example, differentiate
        self.wire = _gather.Wire(plan.axes, options.precision.reduce)
        self.has_counts = options.accumulate > 1 and any(
            _accumulate.is_count(e) or _accumulate.contains_count(e) for e in traced.jaxpr.eqns
        )

    # -- where things come from and go to

    def in_specs(self, arg_values: Sequence[Any]) -> tuple[list, list, list]:
        batch, whole = self._batch_spec(), PartitionSpec()
        params = [_spec.only_axes(leaf.spec, self.plan.axes) for leaf in self.plan.params]
        args = [batch if role == _batch.BATCH else whole for role in self.roles]
        return params, args, [whole] * len(self.traced.closed_over)

    def out_specs(self) -> tuple[Any, Any, Any]:
        batch, whole = self._batch_spec(), PartitionSpec()
        aux = jax.tree.map(lambda rows: batch if rows else whole, self.per_example)
        grads = [_spec.only_axes(leaf.shard_spec, self.plan.axes) for leaf in self.plan.params]
        return whole, aux, grads if self.differentiate else []

    def _batch_spec(self) -> PartitionSpec:
        return PartitionSpec(self.plan.axes)

    # -- how a parameter is held

    def is_held(self, leaf: LeafPlan) -> bool:
        return self.plan.sharded["grads"] and leaf.dim is not None

    def is_varied(self, leaf: LeafPlan) -> bool:
        return jnp.issubdtype(leaf.dtype, jnp.inexact)

    def grad_dtype(self, leaf: LeafPlan) -> Any:
        """Gradients come in the parameter's dtype, or in the one they are reduced in if wider."""
        return jnp.promote_types(leaf.dtype, self.options.precision.reduce or leaf.dtype)

    def compute_dtype(self, leaf: LeafPlan) -> Any:
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        return self.options.precision.compute if is_float and self.options.precision.compute else leaf.dtype

    def kind(self, leaf: LeafPlan) -> Any:
        if self.is_held(leaf):
            return Shard(None, _gather.Cut(leaf.dim, self.compute_dtype(leaf)))
        return WEIGHT

    def varied_part(self, leaf: LeafPlan, value: Any) -> Any:
        """What the loss is differentiated by: the shard where there is one."""
        if not self.is_held(leaf):
            return value.astype(self.compute_dtype(leaf))
        if self.plan.sharded[PARAMS]:
            return value.astype(self.grad_dtype(leaf))
        shape = list(leaf.shape)
        shape[leaf.dim] //= self.plan.size
        return jnp.zeros(shape, self.grad_dtype(leaf))  # only routes the gradient

    def loss_input(self, leaf: LeafPlan, value: Any, varied: Any) -> Any:
        if not self.is_held(leaf):
            return varied
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return (value,) if self.plan.sharded[PARAMS] else (value, varied)
        return (varied,) if self.plan.sharded[PARAMS] else (value, varied)

    # -- the program

    def __call__(
        self, values: list[Any], args: list[Any], closed_over: list[Any]
    ) -> tuple[Any, Any, list[Any]]:
        leaves, count = self.plan.params, self.options.accumulate
        varied = [
            self.varied_part(leaf, v) if self.is_varied(leaf) else v
            for leaf, v in zip(leaves, values, strict=True)
        ]
        args = self.prepared(args)
        counts = self.counts(values, args, closed_over) if self.has_counts else []

        def step(index_and_args: tuple[Any, list[Any]]) -> tuple[Any, Any]:
            index, split = index_and_args
            loss_args = self.microbatch(args, split, index)

            def scaled_loss(floats: list[Any]) -> tuple[Any, tuple[Any, Any]]:
                found = iter(floats)
                inputs = [
                    self.loss_input(leaf, v, next(found) if self.is_varied(leaf) else x)
                    for leaf, v, x in zip(leaves, values, varied, strict=True)
                ]
                loss, aux = self.loss([*inputs, *loss_args, *closed_over], counts)
                loss = loss.astype(jnp.float32)
                return loss / (self.plan.size * count), (loss, aux)

            floats = [v for leaf, v in zip(leaves, varied, strict=True) if self.is_varied(leaf)]
            if not self.differentiate:
                _, (loss, aux) = scaled_loss(floats)
                return (loss, []), aux
            grads, (loss, aux) = jax.grad(scaled_loss, has_aux=True)(floats)
            return (loss, grads), aux

        if count == 1:
            (loss, grads), aux = step((None, [a for a, r in zip(args, self.roles, strict=True) if r == _batch.BATCH]))
            aux = jax.tree.map(lambda x: x[None], aux)
        else:
            floats = [
                jax.ShapeDtypeStruct(v.shape, self.grad_dtype(leaf))
                for leaf, v in zip(leaves, varied, strict=True)
                if self.is_varied(leaf)
            ]
            like = (jax.ShapeDtypeStruct((), jnp.float32), floats if self.differentiate else [])
            (loss, grads), aux = _accumulate.summed(step, self.scanned(args), like)
        aux = jax.tree.map(self.gathered_aux, aux, self.per_example)
        loss = self.device_mean(loss / count)
        return loss, aux, self.reduced(grads) if self.differentiate else []

    def loss(self, inputs: list[Any], counts: list[Any]) -> tuple[Any, Any]:
        kinds = [self.kind(leaf) for leaf in self.plan.params]
        jaxpr = self.hoisted.loss if self.has_counts else self.traced.jaxpr
        extra = [*self.hoisted.constants, *counts] if self.has_counts else []
        inputs = [*inputs, *extra]
        kinds += [None] * (len(inputs) - len(kinds))
        if self.plan.sharded["grads"]:
            outs = _engine.evaluate(
                jaxpr, inputs, kinds, self.wire, regather=self.options.regather and self.differentiate
            )
        else:
            outs = _compat.run_jaxpr(jaxpr, inputs)
        loss, *aux = map(jnp.asarray, outs)  # a constant comes out as a Python number
        return loss, jax.tree.unflatten(jax.tree.structure(self.traced.aux), aux)

    def counts(self, values: list[Any], args: list[Any], closed_over: list[Any]) -> list[Any]:
        """For each `zerojax.mean`, the mean over microbatches of its count over the devices."""
        known = [False] * len(values) + [True] * (len(args) + len(closed_over))
        self.hoisted = _accumulate.hoist_counts(self.traced.jaxpr, known)
        # The parameters are not read; anything of their number will do.
        stand_ins = [jnp.zeros(())] * len(values)

        def count(index_and_args: tuple[Any, list[Any]]) -> tuple[list[Any], None]:
            index, split = index_and_args
            inputs = [*stand_ins, *self.microbatch(args, split, index), *closed_over]
            found = _compat.run_jaxpr(self.hoisted.counter, [*inputs, *self.hoisted.constants])
            return found, None

        like = [jax.ShapeDtypeStruct((), jnp.float32)] * self.hoisted.num_counts
        totals, _ = _accumulate.summed(count, self.scanned(args), like)
        return [lax.psum(t, self.plan.axes) / self.options.accumulate for t in totals]

    def prepared(self, args: list[Any]) -> list[Any]:
        """Batch leaves in the compute dtype, keys of this device's own."""
        index = lax.axis_index(self.plan.axes)
        args = cast_floats(args, self.options.precision.compute)
        return [
            _batch.folded(a, index) if role == _batch.KEY else a
            for a, role in zip(args, self.roles, strict=True)
        ]

    def scanned(self, args: list[Any]) -> tuple[Any, list[Any]]:
        count = self.options.accumulate
        split = [
            _accumulate.microbatches(a, count)
            for a, role in zip(args, self.roles, strict=True)
            if role == _batch.BATCH
        ]
        return jnp.arange(count), split

    def microbatch(self, args: list[Any], split: list[Any], index: Any) -> list[Any]:
        parts = iter(split)
        return [
            next(parts)
            if role == _batch.BATCH
            else _batch.folded(a, index)
            if role == _batch.KEY and index is not None
            else a
            for a, role in zip(args, self.roles, strict=True)
        ]

    def gathered_aux(self, stacked: Any, rows: bool) -> Any:
        """An aux leaf, one a microbatch: put together, or averaged over all and the devices."""
        if rows:
            return stacked.reshape(-1, *stacked.shape[2:])
        if not jnp.issubdtype(stacked.dtype, jnp.inexact):
            stacked = stacked.astype(jnp.float32)
        return self.device_mean(jnp.mean(stacked, axis=0))

    def device_mean(self, value: Any) -> Any:
        return lax.pmean(value, self.plan.axes) if self.plan.size > 1 else value

    def reduced(self, grads: list[Any]) -> list[Any]:
        """Gradients summed over the devices, where the loss did not do so itself."""
        found = iter(grads)
        return [
            self.reduced_leaf(leaf, next(found)) if self.is_varied(leaf) else self.no_gradient(leaf)
            for leaf in self.plan.params
        ]

    def reduced_leaf(self, leaf: LeafPlan, grad: Any) -> Any:
        if not self.is_held(leaf):
            if leaf.dim is not None and self.plan.sharded[OPT_STATE]:
                grad = _gather.scatter(grad, leaf.dim, self.wire)
            elif self.plan.size > 1:
                grad = _gather.reduce(grad, self.wire)
        return grad.astype(self.grad_dtype(leaf))

    def no_gradient(self, leaf: LeafPlan) -> Any:
        """Zeros in a dtype that optax can add; keys get JAX's own zero."""
        shape = list(leaf.shape)
        if leaf.dim is not None:
            shape[leaf.dim] //= self.plan.size
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
        return np.zeros(shape, jax.dtypes.float0) if is_key else jnp.zeros(shape, leaf.dtype)


def check_params(params: Any, plan: Plan) -> None:
    """Raises where `params` are not the parameters that the plan was made for."""
    have = {
        "/".join(leaf.name.split("/")[1:]): shape_and_dtype(leaf.value)
        for leaf in leaves_of({PARAMS: params})
    }
    want = {"/".join(p.path.split("/")[1:]): (p.shape, p.dtype) for p in plan.params}
    for path in [*want, *have]:
        if have.get(path) != want.get(path):
            raise ValueError(
                f"params/{path} is {have.get(path, 'missing')}, and the plan was made for "
                f"{want.get(path, 'nothing there')}. Make a plan for these parameters: "
                "zerojax.plan(state, stage=...)."
            )


