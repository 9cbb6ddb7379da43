"""The step: loss, gradients, the user's own optimizer update, every sharding constrained."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax

from zerojax._loss import arguments as _arguments
from zerojax._loss.arguments import find_plan
from zerojax._loss.fields import split_fields, with_fields
from zerojax._plan import mesh as _mesh
from zerojax._plan.optimizer import apply_gradients
from zerojax._plan.plan import Plan, check_plan
from zerojax._plan.precision import Precision
from zerojax._state import refusals as _refusals, state as _state
from zerojax._step import backward as _backward, finite as _finite, stream as _stream
from zerojax._step.grad import grad_norm, loss_and_grads
from zerojax._step.jitted import Step
from zerojax._step.options import Options, Recipe, activation_names, regathered
from zerojax._types import PyTree


def train_step(
    loss_fn: Callable[..., PyTree],
    *,
    accumulate: int = 1,
    order: str = "microbatches",
    precision: Precision | None = None,
    mutable: Sequence[str] = (),
    plan: Plan | None = None,
    tx: optax.GradientTransformation | None = None,
    regather: bool | str | Sequence[str] = True,
    prefetch: int | str = "auto",
    update: str = "auto",
    activations: str | Sequence[str] | None = None,
    skip_nonfinite: bool = False,
    batch_specs: PyTree = None,
    donate: bool = True,
    compiler_options: dict[str, int | bool | str] | None = None,
) -> Step:
    """Makes a jitted step `(state, batch[, rng]) -> (state, metrics)`.

    The old state is donated, and the new one is placed as the old one was. `metrics` has `loss`,
    `grad_norm` and, where the loss returns it, `aux`, all of them means over the devices.

    A state with a field `dynamic_scale`, a `flax.training.dynamic_scale.DynamicScale`, has its
    loss scaled for float16 gradients; `skip_nonfinite` is on then, and `metrics` has
    `loss_scale`, the scale of this step.

    Arguments:
        loss_fn: `loss_fn(params, batch[, rng]) -> loss` or `(loss, aux)`, written for one
            device; it sees each device's part of the batch, and `rng` folded with its index.
        accumulate: number of microbatches that each device's part of the batch is split into.
        order: "microbatches", one after another; or "layers", in which all microbatches go through
            a layer before the next, so that weights are gathered and gradients reduced once a step.
        precision: dtypes to compute and to reduce in; default, what the state was placed with.
        mutable: fields of the state, such as `batch_stats`, that the loss takes as keyword
            arguments and returns updated in a dict `aux`, under the same names. Floats become the
            mean over devices and microbatches; integers, booleans and keys become exactly what the
            first of them returns (`zerojax.verify` says where they do not agree).
        plan: the plan, for states that do not carry an optimizer (tuples, dicts).
        tx: the optimizer, for states that do not carry theirs.
        regather: gather weights again in backward instead of keeping them (stage 3). An axis,
            such as "gpu", gathers them again over that axis alone: what forward gathered over the
            others, between nodes, is kept in shards (ZeRO++'s hpZ).
        prefetch: gather the weights of a `scan`'s next layer while this one computes, in both
            directions: 1, 0, or "auto", which is 1 on GPUs. It costs the memory of one layer.
            What forward reads last, a head, is then kept for backward.
        update: when parameters are updated: "after" backward, or in "backward", layer by layer, so
            that no gradients are kept. That takes one microbatch, a stack that one `scan` reads,
            and an optimizer that treats elements alone (Adam; not clipping by a global norm). What
            it does not fit is updated after. "auto": in backward on GPUs where state is in host
            memory, or where weights rest whole.
        activations: where what a `scan` keeps of each layer waits for backward: "host", in host
            memory, a mesh axis such as "tensor", in parts over it, or both. With `jax.checkpoint`
            around the layer that is its input, without it all that JAX keeps.
        skip_nonfinite: where the loss or the norm of the gradients is not finite, leave parameters,
            optimizer state and `mutable` fields as they were, bit by bit; `metrics["skipped"]`
            is 1 then and 0 otherwise. An integer field `skipped` of the state keeps the total.
        batch_specs: which dimension of the batch's leaves counts examples: a `PartitionSpec` or a
            tree of them that begins as the batch does. `P("data")`, the first one, is the default;
            `P(None, "data")` for time-major leaves; `P()` for what is replicated.
        donate: give the old state's memory to the new one.
        compiler_options: as in `jax.jit`; they override those that the step chooses on GPUs.

    Returns:
        A step that is used like what `jax.jit` returns; `step.lower(state, batch)` works too.

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
    _arguments.check_switches(skip_nonfinite=skip_nonfinite, donate=donate)
    options = dataclasses.replace(
        Options(None, accumulate, precision, regathered(regather), prefetch=prefetch, order=order),
        mutable=_arguments.mutable_names(mutable),
        update=update,
        activations=activation_names(activations),
        batch_specs=batch_specs,
    )
    _backward.check_when(options, skip_nonfinite)
    _check(loss_fn, plan, tx)

    recipe = Recipe(loss_fn, options, plan, tx, skip_nonfinite)

    @_mesh.auto_axes()
    def step(state: PyTree, batch: PyTree, rng: PyTree = None) -> tuple[PyTree, dict[str, PyTree]]:
        return _train(recipe, donate, state, (batch,) if rng is None else (batch, rng))

    return Step(step, recipe, donate, compiler_options)


def _train(
    recipe: Recipe, donate: bool, state: PyTree, args: tuple[PyTree, ...]
) -> tuple[PyTree, dict[str, PyTree]]:
    """Returns the state after one step, and the metrics."""
    plan = find_plan(state, recipe.plan)
    plan.check_structure(state)
    scale = _finite.scale_of(state)
    # The scaled loss is differentiated; metrics and gradients are those of the loss itself.
    logical = plan.unpad(state)
    loss_fn = _finite.scaled(with_fields(recipe.loss_fn, logical, recipe.mutable), scale)
    guards = recipe.skip_nonfinite or scale is not None
    wanted = _backward.is_wanted(plan, recipe.options, guards)
    backward = _backward.in_backward(plan, recipe.options, state, recipe.tx) if wanted else None
    loss, aux, grads, updated = loss_and_grads(
        loss_fn, plan, recipe.options, _state.get_params(state), args, backward
    )
    loss, grads = _finite.unscaled((loss, grads), scale)
    aux, fields = split_fields(aux, logical, recipe.mutable)
    # A tree of parameters may have None in it, and gradients are None where backward has updated.
    grads = jax.tree.structure(_state.get_params(state)).flatten_up_to(grads)
    grads = plan.like_params(grads, [leaf.shape for leaf in plan.params])
    metrics = {"loss": loss, "grad_norm": grad_norm(grads, updated.squares)}
    finite = jnp.isfinite(loss) & jnp.isfinite(metrics["grad_norm"])

    def update(old_state: PyTree, grads: PyTree) -> PyTree:
        with jax.named_scope("optimizer"):
            new_state = _refusals.updated(apply_gradients, old_state, grads, recipe.tx, fields)
        if guards:
            new_state = _finite.guarded(finite, new_state, old_state, recipe.mutable)
        return new_state

    new_state = _stream.updated(update, plan, state, grads, updated.leaves)
    if guards:
        metrics["skipped"] = 1 - finite.astype(jnp.int32)
    if scale is not None:
        metrics["loss_scale"] = scale.scale
    if aux is not None:
        metrics["aux"] = aux
    # Without donation the old parameters are still the user's, and no memory to gather into.
    into = state if donate else None
    return plan.constrain(new_state, into=into, resting=updated.leaves), metrics


def eval_step(
    loss_fn: Callable[..., PyTree],
    *,
    precision: Precision | None = None,
    mutable: Sequence[str] = (),
    plan: Plan | None = None,
    batch_specs: PyTree = None,
) -> Step:
    """Makes a jitted `(state, batch[, rng]) -> metrics`; no gradients, nothing donated.

    `loss_fn` and `batch_specs` are as in `train_step`, and so are `metrics`, without `grad_norm`.
    Fields of the state in `mutable` are passed to the loss as keyword arguments. For the last batch
    of a dataset, which the devices may not divide, there is `zerojax.pad_batch`.

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
    mutable = _arguments.mutable_names(mutable)
    options = Options(
        None, 1, precision, False, differentiate=False, mutable=mutable, batch_specs=batch_specs
    )
    _check(loss_fn, plan)

    @_mesh.auto_axes()
    def step(state: PyTree, batch: PyTree, rng: PyTree = None) -> dict[str, PyTree]:
        found = find_plan(state, plan)
        found.check_structure(state)
        args = (batch,) if rng is None else (batch, rng)
        called = with_fields(loss_fn, found.unpad(state), mutable)
        loss, aux, *_ = loss_and_grads(called, found, options, _state.get_params(state), args)
        return {"loss": loss} if aux is None else {"loss": loss, "aux": aux}

    return Step(step, Recipe(loss_fn, options, plan), False, None)


def _check(loss_fn: object, plan: object, tx: object = None) -> None:
    _arguments.check_loss(loss_fn)
    if tx is not None:
        _refusals.check_tx(tx)
    if plan is not None:
        check_plan(plan, "plan=")
