"""The step: loss, gradients, the user's own optimizer update, every sharding constrained."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from zerojax import _axis_types
from zerojax._declared import takes
from zerojax._features import (
    finite as _finite,
    host_state as _host_state,
    in_backward as _in_backward,
)
from zerojax._fence import mark, mixes_up_collectives, wait
from zerojax._loss import arguments as _arguments
from zerojax._loss.arguments import find_plan
from zerojax._loss.fields import split_fields, with_fields
from zerojax._plan.optimizer import Guard, next_state, update_of
from zerojax._plan.plan import Plan
from zerojax._state import refusals as _refusals, state as _state
from zerojax._step.grad import grad_norm, loss_and_grads
from zerojax._step.jitted import Step
from zerojax._step.parameter import grad_dtype_of
from zerojax._step.step_options import (
    EvalOptions,
    Notes,
    Recipe,
    TrainOptions,
    may_update_in_backward,
    precision_of,
)
from zerojax._types import PyTree, is_key
from zerojax._update.update import Update


@takes(TrainOptions)
def train_step(loss_fn: Callable[..., PyTree], options: TrainOptions) -> Step:
    """Makes a jitted step `(state, batch[, rng]) -> (state, metrics)`.

    The step donates the old state, and places the new one as the old one was. `metrics` has `loss`,
    `grad_norm` and, where the loss returns it, `aux`, all of them means over the devices.

    Where a state has a field `dynamic_scale`, a `flax.training.dynamic_scale.DynamicScale`, the
    step scales the loss for float16 gradients. It then skips updates as with `skip_nonfinite`, and
    `metrics` has `loss_scale`, the scale of this step.

    Arguments:
        loss_fn: `loss_fn(params, batch[, rng]) -> loss` or `(loss, aux)`, written for one
            device; it sees each device's part of the batch, and `rng` folded with its index.
        {options}

    Returns:
        A step, used like a jitted function; `step.lower(state, batch)` works too.

    Example:
        >>> loss = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
        >>> state = TrainState.create(
        ...     apply_fn=None, params={"w": jnp.ones((64, 16))}, tx=optax.adam(1e-2))
        >>> state = zerojax.shard_train_state(state, stage=3)
        >>> step = zerojax.train_step(loss, accumulate=2)
        >>> state, metrics = step(state, jnp.ones((32, 64)))
        >>> print(metrics["loss"], state.params["w"].addressable_shards[0].data.shape)
        4096.0 (8, 16)
    """
    _arguments.check_loss(loss_fn)
    recipe, notes = Recipe(loss_fn, options), dict[Plan, Notes]()

    @_axis_types.auto_axes()
    def step(state: PyTree, batch: PyTree, rng: PyTree = None) -> tuple[PyTree, dict[str, PyTree]]:
        args = (batch,) if rng is None else (batch, rng)
        state, args = _axis_types.computed_with((state, args))
        plan = find_plan(state, options.plan)
        with _axis_types.owned_by((plan.mesh, plan.groups.opt_state)):
            new_state, metrics, notes[plan] = _train(recipe, plan, state, args)
        return new_state, metrics

    return Step(step, recipe, notes)


def _train(
    recipe: Recipe, plan: Plan, state: PyTree, args: tuple[PyTree, ...]
) -> tuple[PyTree, dict[str, PyTree], Notes]:
    """Returns the state after one step, the metrics, and what the trace knows beside them."""
    plan._check_structure(state)
    _refusals.check_one_tx(state, recipe.options.tx)
    has_scale = _state.field(state, "dynamic_scale") is not None
    scale = _finite.scale_of(state) if has_scale else None
    logical = plan.unpad(state)
    loss_fn = with_fields(recipe.loss_fn, logical, recipe.options.mutable)
    if scale is not None:
        # JAX differentiates the scaled loss; metrics and gradients are those of the loss itself.
        loss_fn = _finite.scaled(loss_fn, scale)
    guard = None
    if recipe.options.skip_nonfinite or scale is not None:
        guard = functools.partial(_finite.guarded, mutable=recipe.options.mutable)
    wanted = not recipe.options.needs_all(guard is not None)
    wanted = wanted and may_update_in_backward(plan, recipe.options.schedule.update)
    # Where the whole update runs at once, XLA sees the user's own functions.
    update = _traced_update(recipe, plan, state, guard) if wanted or plan._offloads else None
    backward = None
    if wanted and update is not None:
        must = recipe.options.schedule.update == "backward"
        backward = _in_backward.InBackward(plan, state, update, must)
    params = _state.get_params(state)
    graded = loss_and_grads(loss_fn, plan, recipe.options, params, args, backward)
    aux, done = graded.aux, graded.done
    loss, grads, norms = graded.loss, graded.grads, graded.norms
    if scale is not None:
        loss, grads, norms = _finite.unscaled((loss, grads, norms), scale)
    aux, fields = split_fields(aux, logical, recipe.options.mutable)
    # A tree of parameters may have None in it, and gradients are None where backward has updated.
    of_grads = jax.tree.structure(_state.get_params(state))
    grads = plan._like_params(of_grads.flatten_up_to(grads), [leaf.shape for leaf in plan.params])
    others = [grad for at, grad in enumerate(grads) if at not in graded.normed]
    metrics = {"loss": loss, "grad_norm": grad_norm(others, norms)}
    finite = jnp.isfinite(loss) & jnp.isfinite(metrics["grad_norm"])
    # On CPUs, in order: after the update, loops gather weights that rest whole.
    if plan.groups.opt_state and not plan.groups.params and mixes_up_collectives(plan.mesh):
        grads = wait(grads, mark([*metrics.values()]))
    if update is not None and (plan._offloads or done):
        update = dataclasses.replace(update, known=graded.sums)
        values = [*grads, *jax.tree.leaves((state, fields, finite))]
        streamed = _host_state.Streamed(update, plan, values, done)
        new_state = jax.tree.structure(state).unflatten(streamed.run())
    else:
        inputs = of_grads.unflatten(grads), plan.scatter(state), fields, finite
        new_state = next_state(recipe.options.tx, guard, *inputs)
    metrics |= graded.metrics
    if guard is not None:
        metrics["skipped"] = 1 - finite.astype(jnp.int32)
    if scale is not None:
        metrics["loss_scale"] = scale.scale
    if aux is not None:
        metrics["aux"] = aux
    # Without donation the old parameters are still the user's: do not gather into their memory.
    into = state if recipe.options.donate else None
    return plan.constrain(new_state, into=into, resting=done), metrics, graded.notes


def _traced_update(recipe: Recipe, plan: Plan, state: PyTree, guard: Guard | None) -> Update:
    """Returns the update of a state, with the function of the plan's if both are the same."""
    shapes = (jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in plan.leaves)
    planned = jax.tree.structure(state).unflatten(shapes)
    update = update_of(planned, recipe.options.tx, recipe.options.mutable, guard)
    precision, shapes = precision_of(plan, recipe.options.precision), list(update.shapes)
    for k, leaf in enumerate(plan.params):
        if not is_key(leaf):
            dtype = grad_dtype_of(leaf, precision, accumulates=False)
            shapes[k] = jax.ShapeDtypeStruct(leaf.shape, dtype)
    function = update.function
    if plan._update is not None and plan._update.identity == update.identity:
        function = plan._update.function  # whose traces JAX has
    return dataclasses.replace(update, function=function, shapes=shapes)


@takes(EvalOptions)
def eval_step(loss_fn: Callable[..., PyTree], options: EvalOptions) -> Step:
    """Makes a jitted `(state, batch[, rng]) -> metrics`; no gradients, nothing donated.

    `loss_fn` is that of `train_step`, and `metrics` are too, without `grad_norm`. The devices may
    not divide the last batch of a dataset: `zerojax.pad_batch` fills it up.

    Arguments:
        {options}

    Example:
        >>> def loss(params, batch):
        ...     errors = batch @ params["w"] - 1
        ...     return jnp.mean(errors**2), {"within": jnp.mean(jnp.abs(errors) < 1)}
        >>> params = {"w": jnp.zeros((64, 16))}
        >>> state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-2))
        >>> state = zerojax.shard_train_state(state, stage=3)
        >>> metrics = zerojax.eval_step(loss)(state, jnp.ones((32, 64)))
        >>> print(metrics["loss"], metrics["aux"]["within"])
        1.0 0.0
    """
    _arguments.check_loss(loss_fn)
    notes: dict[Plan, Notes] = {}

    @_axis_types.auto_axes()
    def step(state: PyTree, batch: PyTree, rng: PyTree = None) -> dict[str, PyTree]:
        plan = find_plan(state, options.plan)
        plan._check_structure(state)
        state, args = _axis_types.computed_with((state, (batch,) if rng is None else (batch, rng)))
        called = with_fields(loss_fn, plan.unpad(state), options.mutable)
        graded = loss_and_grads(called, plan, options, _state.get_params(state), args)
        notes[plan] = graded.notes
        metrics = {"loss": graded.loss, **graded.metrics}
        return metrics if graded.aux is None else metrics | {"aux": graded.aux}

    return Step(step, Recipe(loss_fn, options), notes)
