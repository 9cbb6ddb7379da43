"""The step: loss, gradients, the user's own optimizer update, every sharding pinned."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from zerojax import _agreement, _fingerprint
from zerojax._engine import xla_options as _xla_options
from zerojax._loss import arguments as _arguments
from zerojax._loss.arguments import find_plan, plan_of
from zerojax._loss.fields import names_of, split_fields, with_fields
from zerojax._plan import mesh as _mesh
from zerojax._plan.optimizer import apply_gradients
from zerojax._plan.plan import Plan, check_plan, check_stage, fingerprint
from zerojax._plan.precision import Precision, wide
from zerojax._state import refusals as _refusals, state as _state
from zerojax._step import finite as _finite
from zerojax._step.grad import loss_and_grads
from zerojax._step.idle_axes import check_used
from zerojax._step.program import Options


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a step is made of; `step.recipe`."""

    loss_fn: Callable[..., Any]
    options: Options
    mutable: tuple[str, ...] = ()
    plan: Plan | None = None
    tx: optax.GradientTransformation | None = None
    stage: int | None = None
    skip_nonfinite: bool = False


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
        donate = donate and not jax.config.jax_debug_infs  # JAX runs it again (`_loss/nans.py`)
        self.jit = functools.partial(jax.jit, function, donate_argnums=(0,) if donate else ())
        self.nested = self.jit()  # an inner jit may have no options of its own
        self.jitted: dict[Plan | None, Any] = {}
        self.checked: set[Plan] = set()
        self.agreed: set[tuple[Plan, str]] = set()

    def __call__(self, *args: Any, **named: Any) -> Any:
        """`(state, batch[, rng])`."""
        with _arguments.explained(args, named, self.recipe.plan):
            jitted = self.for_args(*args, **named)
            self.agree(jitted, args, named)
            return jitted(*args, **named)

    def agree(self, jitted: Any, args: Sequence[Any], named: dict[str, Any]) -> None:
        """At the first call for a plan and shapes, several processes compare what they run."""
        plan = self._plan_for(args, named)
        if plan is None or not jax.distributed.is_initialized():
            return
        batch = jax.tree_util.tree_leaves_with_path((args[1:], {**named, "state": None}))
        shapes = _fingerprint.of_shapes([leaf for _, leaf in batch])
        traced = any(isinstance(leaf, Tracer) for _, leaf in batch)

        def items() -> dict[str, str]:
            options = vars(self.recipe.options) | {"mutable": self.recipe.mutable}
            options |= self.jit.keywords | {"compiler_options": self.compiler_options}
            program = _fingerprint.of_program(jitted.trace(*args, **named).jaxpr)
            return {
                **{name: str(value) for name, value in options.items()},
                **fingerprint(plan),
                "the shapes of the batch": shapes,
                **_fingerprint.of_values((jax.tree_util.keystr(p), leaf) for p, leaf in batch),
                "the program": program,
            }

        if not traced and (plan, shapes) not in self.agreed:
            _agreement.agree("the step", items, plan.mesh)
            self.agreed.add((plan, shapes))

    def lower(self, *args: Any, **named: Any) -> Any:
        with _arguments.explained(args, named, self.recipe.plan):
            return self.for_args(*args, **named).lower(*args, **named)

    def trace(self, *args: Any, **named: Any) -> Any:
        with _arguments.explained(args, named, self.recipe.plan):
            return self.for_args(*args, **named).trace(*args, **named)

    def eval_shape(self, *args: Any, **named: Any) -> Any:
        return self.nested.eval_shape(*args, **named)

    def clear_cache(self) -> None:
        for jitted in (self.nested, *self.jitted.values()):
            jitted.clear_cache()  # type: ignore

    def for_args(self, *args: Any, **named: Any) -> Any:
        """The jitted function for the plan by which the state was placed."""
        plan = self._plan_for(args, named)
        if plan is not None and plan not in self.checked:
            trace = lambda: self.nested.trace(*args, **named).jaxpr  # noqa: E731
            if check_used(plan, (args, named), trace):
                self.checked.add(plan)
        if plan not in self.jitted:
            options = self.options_for(plan, args, named) | (self.compiler_options or {})
            self.jitted[plan] = self.jit(compiler_options=options) if options else self.nested
        jitted = self.jitted[plan]
        if jitted is self.nested:
            return jitted
        traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((args, named)))
        return self.nested if traced else jitted

    def _plan_for(self, args: Sequence[Any], named: dict[str, Any]) -> Plan | None:
        return plan_of(args[0] if args else named.get("state"), self.recipe.plan)

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
    batch_specs: Any = None,
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
            arguments and returns updated in a dict `aux`, under the same names. Floats become the
            mean over devices and microbatches; integers, booleans and keys what the first of them
            returns, exactly (`zerojax.verify` says where they do not agree).
        plan: the plan, for states that do not carry an optimizer (tuples, dicts).
        tx: the optimizer, for states that do not carry theirs.
        regather: gather weights again in backward instead of keeping them (stage 3).
        prefetch: gather the weights of the next layer of a `scan` under the compute of this one, in
            both directions: 1, 0, or "auto", which is 1 on GPUs. It costs the memory of one layer.
            What forward reads last, a head, then stays for backward.
        skip_nonfinite: where the loss or the norm of the gradients is not finite, leave parameters,
            optimizer state and `mutable` fields as they were, bit by bit; `metrics["skipped"]`
            is 1 then and 0 otherwise. An integer field `skipped` of the state keeps the total.
        batch_specs: which dimension of the batch's leaves counts examples: a `PartitionSpec` or a
            tree of them that begins as the batch does. `P("data")`, the first one, is the default;
            `P(None, "data")` for time-major leaves; `P()` for what is whole on every device.
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
    _arguments.check_mutable(mutable)
    _arguments.check_switches(regather=regather, skip_nonfinite=skip_nonfinite, donate=donate)
    mutable = names_of(mutable)
    options = Options(
        None,
        accumulate,
        precision,
        regather,
        prefetch=prefetch,
        mutable=mutable,
        batch_specs=batch_specs,
    )
    _check(loss_fn, plan, tx)
    if stage is not None:
        check_stage(stage)

    @_mesh.auto_axes()
    def step(state: Any, batch: Any, rng: Any = None) -> tuple[Any, dict[str, Any]]:
        found = find_plan(state, plan, stage)
        found.check_structure(state)
        scale = _finite.scale_of(state)
        loss, aux, grads = loss_and_grads(
            _finite.scaled(with_fields(loss_fn, state, mutable), scale),
            found,
            options,
            _state.get_params(state),
            (batch,) if rng is None else (batch, rng),
        )
        loss, grads = _finite.unscaled((loss, grads), scale)
        aux, fields = split_fields(aux, state, mutable)
        metrics = {"loss": loss, "grad_norm": grad_norm(grads)}
        old_state = found.scatter(state)
        with jax.named_scope("optimizer"):
            new_state = _refusals.updated(apply_gradients, old_state, grads, tx, fields)
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

    recipe = Recipe(loss_fn, options, mutable, plan, tx, stage, skip_nonfinite)
    return Step(step, recipe, donate, compiler_options)


def eval_step(
    loss_fn: Callable[..., Any],
    *,
    precision: Precision | None = None,
    mutable: Sequence[str] = (),
    plan: Plan | None = None,
    batch_specs: Any = None,
) -> Step:
    """Makes a jitted `(state, batch[, rng]) -> metrics`; no gradients, nothing donated.

    `loss_fn` is as in `train_step`, and so are `metrics`, less `grad_norm`. Fields of the state
    in `mutable` are passed to the loss as keyword arguments; `batch_specs` is as there.

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
    _arguments.check_mutable(mutable)
    mutable = names_of(mutable)
    options = Options(
        None,
        1,
        precision,
        regather=False,
        differentiate=False,
        mutable=mutable,
        batch_specs=batch_specs,
    )
    _check(loss_fn, plan)

    @_mesh.auto_axes()
    def step(state: Any, batch: Any, rng: Any = None) -> dict[str, Any]:
        found = find_plan(state, plan, None)
        found.check_structure(state)
        loss, aux, _ = loss_and_grads(
            with_fields(loss_fn, state, mutable),
            found,
            options,
            _state.get_params(state),
            (batch,) if rng is None else (batch, rng),
        )
        return {"loss": loss} if aux is None else {"loss": loss, "aux": aux}

    return Step(step, Recipe(loss_fn, options, mutable, plan), False, None)


def _check(loss_fn: Any, plan: Any, tx: Any = None) -> None:
    _arguments.check_loss(loss_fn)
    if tx is not None:
        _refusals.check_tx(tx)
    if plan is not None:
        check_plan(plan, "plan=")


def grad_norm(grads: Any) -> jax.Array:
    floats = [g for g in jax.tree.leaves(grads) if jnp.issubdtype(g.dtype, jnp.inexact)]
    return jnp.asarray(optax.tree.norm(cast_up(floats)))


def cast_up(grads: list[Any]) -> list[Any]:
    """In float32: squares of narrower gradients overflow or vanish."""
    return [g.astype(wide(g.dtype)) for g in grads]
