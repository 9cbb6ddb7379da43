"""The step: loss, gradients, the user's own optimizer update, every sharding pinned."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from zerojax import _finite, _refusals, _state, _xla_options
from zerojax._fields import names_of, split_fields, with_fields
from zerojax._grad import loss_and_grads
from zerojax._idle_axes import check_used
from zerojax._opt_specs import check_called
from zerojax._plan import Plan, check_plan, check_stage
from zerojax._precision import Precision
from zerojax._program import Options
from zerojax._update import apply_gradients


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a step is made of; `step.recipe`."""

    loss_fn: Callable[..., Any]
    options: Options
    mutable: tuple[str, ...] = ()
    plan: Plan | None = None
    tx: optax.GradientTransformation | None = None
    stage: int | None = None


class Step:
    """A jitted step, used like what `jax.jit` returns.

    Which XLA options suit it depends on the loss and on the mesh, so it is compiled with them
    when it first sees its state.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        recipe: Recipe,
        donate: bool,
        compiler_options: dict[str, Any] | None,
    ) -> None:
        self.recipe, self.compiler_options = recipe, compiler_options
        self.jit = functools.partial(jax.jit, function, donate_argnums=(0,) if donate else ())
        self.nested = self.jit()  # an inner jit may have no options of its own
        self.jitted: dict[Plan | None, Any] = {}

    def __call__(self, *args: Any, **named: Any) -> tuple[Any, dict[str, Any]]:
        """`(state, batch[, rng])`."""
        _refusals.check_alive(args[0] if args else named.get("state"))
        try:
            return self.for_args(*args, **named)(*args, **named)
        except ValueError as error:
            if "incompatible devices" in str(error):
                error.add_note("Pass the batch as numpy arrays, or through zerojax.shard_batch.")
            raise

    def lower(self, *args: Any, **named: Any) -> Any:
        return self.for_args(*args, **named).lower(*args, **named)

    def trace(self, *args: Any, **named: Any) -> Any:
        return self.for_args(*args, **named).trace(*args, **named)

    def eval_shape(self, *args: Any, **named: Any) -> Any:
        return self.nested.eval_shape(*args, **named)

    def clear_cache(self) -> None:
        for jitted in (self.nested, *self.jitted.values()):
            jitted.clear_cache()  # type: ignore

    def for_args(self, *args: Any, **named: Any) -> Any:
        """The jitted function for the plan by which the state was placed."""
        carried = _state.carried_plan(args[0] if args else named.get("state"))
        plan = carried if carried is not None else self.recipe.plan
        if plan not in self.jitted:
            if plan is not None:
                given = (args, named)
                check_used(plan, given, lambda: self.nested.trace(*args, **named).jaxpr)
            options = self.options_for(plan, args, named) | (self.compiler_options or {})
            self.jitted[plan] = self.jit(compiler_options=options) if options else self.nested
        jitted = self.jitted[plan]
        if jitted is self.nested:
            return jitted
        traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((args, named)))
        return self.nested if traced else jitted

    def options_for(
        self, plan: Plan | None, args: Sequence[Any], named: dict[str, Any]
    ) -> dict[str, Any]:
        ahead = self.recipe.options.prefetch != 0 and self.recipe.options.regather
        if plan is None or plan.mesh.devices.flat[0].platform == "cpu":
            return {}
        jaxpr = self.nested.trace(*args, **named).jaxpr
        return _xla_options.options_for(jaxpr, plan.mesh, ahead)

    def _cache_size(self) -> int:
        return sum(jitted._cache_size() for jitted in self.jitted.values())


def train_step(
    loss_fn: Callable[..., Any],
    *,
    stage: int | None = None,
    accumulate: int = 1,
    precision: Precision | None = None,
    mutable: Sequence[str] = (),
    plan: Plan | None = None,
    tx: optax.GradientTransformation | None = None,
    regather: bool = True,
    prefetch: int | str = "auto",
    skip_nonfinite: bool = False,
    donate: bool = True,
    compiler_options: dict[str, Any] | None = None,
) -> Step:
    """Makes a jitted step `(state, batch[, rng]) -> (state, metrics)`.

    The old state is donated, and the new one lives where the old one lived. `metrics` holds
    `loss`, `grad_norm` and, where the loss returns it, `aux`, all means over the devices.

    A state with a field `dynamic_scale`, a `flax.training.dynamic_scale.DynamicScale`, has its
    loss scaled for float16 gradients; `skip_nonfinite` is on then, and `metrics` has
    `loss_scale`, the scale of this step.

    Arguments:
        loss_fn: `loss_fn(params, batch[, rng]) -> loss` or `(loss, aux)`, written for one
            device; it sees each device's part of the batch, and `rng` folded with its index.
        stage: only to state the stage that the code expects; the placed state decides.
        accumulate: number of microbatches that each device's part of the batch is split into.
        precision: dtypes to compute and to reduce in; default, what the state was placed with.
        mutable: fields of the state, such as `batch_stats`, that the loss takes as keyword
            arguments and returns updated in a dict `aux`, under the same names.
        plan: the plan, for states that do not carry an optimizer (tuples, dicts).
        tx: the optimizer, for states that do not carry theirs.
        regather: gather weights again in backward instead of keeping them (stage 3).
        prefetch: gather the weights of the next layer of a `scan` under the compute of this one, in
            both directions: 1, 0, or "auto", which is 1 on GPUs. It costs the memory of one layer.
            What forward reads last, a head, then stays for backward.
        skip_nonfinite: where the loss or the norm of the gradients is not finite, leave parameters,
            optimizer state and `mutable` fields as they were, bit by bit; `metrics["skipped"]`
            is 1 then and 0 otherwise. An integer field `skipped` of the state keeps the total.
        donate: give the old state's memory to the new one.
        compiler_options: as in `jax.jit`, over those that the step chooses itself on GPUs.

    Returns:
        A `Step`, to be used like what `jax.jit` returns: `step.lower(state, batch).compile()`
        works too.

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
    options = Options(None, accumulate, precision, regather, prefetch=prefetch)
    mutable = names_of(mutable)
    if stage is not None:
        check_stage(stage)
    if plan is not None:
        check_plan(plan, "train_step(plan=)")
    check_called(tx)

    def step(state: Any, batch: Any, rng: Any = None) -> tuple[Any, dict[str, Any]]:
        found = find_plan(state, plan, stage)
        found.check_structure(state)
        scale = _finite.scale_of(state)
        loss, aux, grads = loss_and_grads(
            _finite.scaled(with_fields(loss_fn, state, mutable), scale), found, options,
            _state.get_params(state), (batch,) if rng is None else (batch, rng),
        )  # fmt: skip
        loss, grads = _finite.unscaled((loss, grads), scale)
        aux, fields = split_fields(aux, state, mutable)
        metrics = {"loss": loss, "grad_norm": grad_norm(grads)}
        old_state = found.scatter(state)
        with jax.named_scope("optimizer"):
            new_state = apply_gradients(old_state, grads, tx, fields)
        if skip_nonfinite or scale is not None:
            finite = jnp.isfinite(loss) & jnp.isfinite(metrics["grad_norm"])
            new_state = _finite.held(finite, new_state, old_state, mutable)
            metrics["skipped"] = 1 - finite.astype(jnp.int32)
            new_state = _finite.counted(new_state, metrics["skipped"])
        if scale is not None:
            metrics["loss_scale"] = scale.scale
            new_state = _state.replace(new_state, dynamic_scale=_finite.next_scale(scale, finite))
        if aux is not None:
            metrics["aux"] = aux
        return found.constrain(new_state, into=state if donate else None), metrics

    recipe = Recipe(loss_fn, options, mutable, plan, tx, stage)
    return Step(step, recipe, donate, compiler_options)


def eval_step(
    loss_fn: Callable[..., Any],
    *,
    precision: Precision | None = None,
    mutable: Sequence[str] = (),
    plan: Plan | None = None,
) -> Any:
    """Makes a jitted `(state, batch[, rng]) -> metrics`; no gradients, nothing donated.

    `loss_fn` is as in `train_step`, and so are `metrics`, less `grad_norm`. Fields of the state
    in `mutable` are passed to the loss as keyword arguments.

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
    options = Options(None, 1, precision, regather=False, differentiate=False)
    mutable = names_of(mutable)
    if plan is not None:
        check_plan(plan, "eval_step(plan=)")

    def step(state: Any, batch: Any, rng: Any = None) -> dict[str, Any]:
        found = find_plan(state, plan, None)
        found.check_structure(state)
        loss, aux, _ = loss_and_grads(
            with_fields(loss_fn, state, mutable), found, options, _state.get_params(state),
            (batch,) if rng is None else (batch, rng),
        )  # fmt: skip
        return {"loss": loss} if aux is None else {"loss": loss, "aux": aux}

    return jax.jit(step)


def find_plan(state: Any, given: Plan | None, stage: int | None) -> Plan:
    """The plan that the state was placed by."""
    carried = _state.carried_plan(state)
    plan = carried if carried is not None else given
    if plan is None:
        how = (
            "state = zerojax.shard_train_state(state, stage=3)"
            if _state.get_tx(state) is not None
            else "plan = zerojax.plan(state, stage=3), then state = plan.place(state), and pass "
            "plan=plan here (a state without an optimizer field cannot carry it)"
        )
        raise ValueError(
            f"the state of type {type(state).__name__} is not placed, or its optimizer was "
            f"replaced since. First: {how}."
        )
    if given is not None and given != plan:
        raise ValueError(
            f"the state was placed by another plan (stage {plan.stage} on {plan.mesh.devices.size} "
            f"devices) than plan= (stage {given.stage} on {given.mesh.devices.size}). Place it "
            "again: state = plan.place(state)."
        )
    if stage is not None and stage != plan.stage:
        raise ValueError(
            f"the step is for stage {stage} and the state was placed for stage {plan.stage}. Place "
            f"it again, zerojax.shard_train_state(state, stage={stage}), or leave stage= out."
        )
    return plan


def grad_norm(grads: Any) -> jax.Array:
    floats = [g for g in jax.tree.leaves(grads) if jnp.issubdtype(g.dtype, jnp.inexact)]
    return jnp.asarray(optax.tree.norm(cast_up(floats)))


def cast_up(grads: list[Any]) -> list[Any]:
    """In float32: squares of narrower gradients overflow or vanish."""
    return [g.astype(jnp.promote_types(g.dtype, jnp.float32)) for g in grads]
