"""`zerojax.verify`: compares one step with one device."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np
import optax
from jax.typing import ArrayLike

from zerojax._loss import arguments as _arguments
from zerojax._loss.arguments import find_plan
from zerojax._loss.fields import with_fields, without_fields
from zerojax._plan import mesh as _mesh
from zerojax._plan.plan import Plan
from zerojax._plan.precision import Precision
from zerojax._state import refusals as _refusals, state as _state
from zerojax._step.grad import loss_and_grads
from zerojax._step.step import Recipe, grad_norm
from zerojax._step.step_options import TrainOptions
from zerojax._types import Device, PyTree
from zerojax.tools._verify import (
    causes as _causes,
    compare as _compare,
    draws as _draws,
    field_checks as _field_checks,
)
from zerojax.tools._verify.compare import NOT_FINITE, OK, Check
from zerojax.tools._verify.field_checks import Found
from zerojax.tools._verify.reference import Comparison, Observed, Reference, aux_like
from zerojax.tools._verify.replay import Replayed
from zerojax.tools._verify.verification import Verification

WHOLE_BATCH = "loss on the whole batch"
# One device rounds batches of both sizes alike, whatever the dtype.
MEANING_TOLERANCE = 5e-3
NOTHING_TO_COMPARE = (
    "Gradients or the new state are not finite on one device either, which leaves nothing to "
    "compare. Find where with the plain loss on one device, under jax.debug_nans(True), and verify "
    "with a batch and a state that are finite."
)
DRAWS_DIFFER = (
    "Each part has its own key, so the whole batch's loss is another sample and is not compared. "
    "To learn whether a part means the same, verify a loss without randomness."
)


def verify(
    step: Callable[..., PyTree],
    state: PyTree,
    batch: PyTree,
    rng: PyTree = None,
    *,
    loss_fn: Callable[..., PyTree] | None = None,
    tx: optax.GradientTransformation | None = None,
    plan: Plan | None = None,
    accumulate: int | None = None,
    precision: Precision | None = None,
    mutable: Sequence[str] | None = None,
    batch_specs: PyTree = None,
    whole_batch: bool = True,
    tolerance: float | None = None,
    device: Device | None = None,
) -> Verification:
    """Replays one step on one device, and compares loss, gradients and new state.

    Three losses tell most: the step's; the mean over the parts of the batch that the devices see,
    with their own keys; and that of the whole batch at once. Where the first two differ, the step
    is wrong; where the last two do, the loss means something else on a part. The state stays valid.

    Arguments:
        step: from `train_step`, or any `(state, batch[, rng]) -> (new state, metrics)`. Metrics
            are the loss, or a dict with `loss` and, as far as it has them, `grad_norm`, `grads`
            and `aux`.
        state: a placed state, not donated.
        batch, rng: as the step takes them.
        loss_fn, tx, plan, accumulate, precision, mutable, batch_specs: as in `train_step`, for
            other steps.
        whole_batch: whether the loss should be that of the whole batch too. With a key, the two
            are compared with all random numbers alike: dropout keeps everything.
        tolerance: relative; default, by the narrowest dtype that the loss, its `precision` and the
            parameters have.
        device: where to replay; default, the first one of the mesh.

    Returns:
        A `Verification`: prints as a table; `.ok`, `.check()`, `.to_dict()`.

    Example:
        >>> params, tx = {"w": jnp.ones((64, 16))}, optax.adam(1e-3)
        >>> state = TrainState.create(apply_fn=None, params=params, tx=tx)
        >>> state = zerojax.shard_train_state(state, stage=3)
        >>> step = zerojax.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2))
        >>> zerojax.verify(step, state, np.ones((8, 64), np.float32)).ok
        True
    """
    options = {
        "loss_fn": loss_fn,
        "tx": tx,
        "plan": plan,
        "accumulate": accumulate,
        "precision": precision,
        "mutable": mutable,
        "batch_specs": batch_specs,
    }
    recipe = _recipe_of(step, options)
    _check(state, batch, rng, whole_batch, tolerance)
    found = _plan_of(state, recipe)
    args = (batch,) if rng is None else (batch, rng)
    with _mesh.unset():
        reference = Reference(recipe, found, state, args, device=device)
    observed = _observed(step, recipe, found, state, args)
    with _mesh.unset():
        return _verified(reference, observed, whole_batch, tolerance)


def _check(
    state: PyTree, batch: PyTree, rng: PyTree, whole_batch: object, tolerance: object
) -> None:
    _arguments.check_kinds(state, batch)
    _refusals.check_alive(state)
    _refusals.check_values(batch, "batch")
    _refusals.check_values(rng, "rng")
    _arguments.check_switches(whole_batch=whole_batch)
    is_number = isinstance(tolerance, int | float | np.number)
    if tolerance is not None and not (is_number and tolerance >= 0):
        raise ValueError(
            f"tolerance={tolerance!r} must be a number from 0: how far values may differ, relative "
            "to the largest. Leave it out for one that fits their dtypes."
        )


def _recipe_of(step: Callable[..., PyTree], options: dict[str, PyTree]) -> Recipe:
    """Returns the recipe of a step from `train_step`, or one made of the options of another."""
    if hasattr(step, "pure"):
        raise TypeError(
            "a step of zerojax.nnx is verified without its objects: "
            "zerojax.verify(*step.pure(model, optimizer, batch))."
        )
    made = getattr(step, "recipe", None)
    if made is not None and any(value is not None for value in options.values()):
        raise ValueError(
            "a step from zerojax.train_step knows its loss and options. Leave loss_fn=, tx=, "
            "plan=, accumulate=, precision=, mutable= and batch_specs= out."
        )
    if made is None and options["loss_fn"] is None:
        raise TypeError(
            "the step does not come from zerojax.train_step, so verify cannot know its loss. Pass "
            "zerojax.verify(step, state, batch, loss_fn=loss_fn), and tx=, plan=, accumulate=, "
            "mutable= where they apply."
        )
    if made is not None:
        return made
    loss_fn = options.pop("loss_fn")
    return Recipe(loss_fn, TrainOptions(**{k: v for k, v in options.items() if v is not None}))


def _plan_of(state: PyTree, recipe: Recipe) -> Plan:
    """Returns the plan of the state; raises where one process cannot replay a step on it."""
    plan = find_plan(state, recipe.plan)
    if jax.process_count() > 1:
        raise ValueError(
            f"verify gathers everything on one device, and this run has {jax.process_count()} "
            "processes. Run it in one process, on fewer devices."
        )
    _mesh.check_runs(plan.mesh)
    plan.check_structure(state)
    return plan


def _observed(
    step: Callable[..., PyTree], recipe: Recipe, plan: Plan, state: PyTree, args: Sequence[PyTree]
) -> Observed:
    """Runs the step on copies, as it may donate what it takes."""
    copied = jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, (state, *args))
    result = jax.block_until_ready(step(*copied))
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(
            f"the step returned a {type(result).__name__}. verify takes steps that return (new "
            "state, metrics): wrap yours, lambda state, batch: (new_state, {'loss': loss})."
        )
    new_state, metrics = result
    metrics = dict(metrics) if isinstance(metrics, Mapping) else {"loss": metrics}
    by_hand = not hasattr(step, "recipe")
    grads = metrics.get("grads") if by_hand else _gradients(recipe, plan, state, args)
    return Observed(new_state, metrics, grads, by_hand)


def _gradients(recipe: Recipe, plan: Plan, state: PyTree, args: Sequence[PyTree]) -> PyTree:
    """Returns the gradients of a step, which traces the fields of its state, as this does."""

    def gradients(state: PyTree, args: Sequence[PyTree]) -> PyTree:
        loss = with_fields(recipe.loss_fn, plan.unpad(state), recipe.mutable)
        return loss_and_grads(loss, plan, recipe.options, _state.get_params(state), args)[2]

    return jax.jit(gradients)(state, args)


def _verified(
    reference: Reference, observed: Observed, whole_batch: bool, given: float | None
) -> Verification:
    """Compares a step with one device, and its parts of the batch with the whole batch."""
    parts = reference.replay()
    tolerance = reference.tolerance(parts) if given is None else given
    found = Found([], [], [])
    if observed.by_hand and _takes_the_whole_batch(reference, observed, parts, tolerance):
        found.notes.append("The step's loss is that of the whole batch: the two are compared.")
        reference.split = reference.split.on_one()
        parts = reference.replay()
    comparison = Comparison(reference, parts, observed, tolerance)
    found.add(_compared(comparison))
    found.add(_field_checks.of_the_parts(reference, parts))
    losses = {"the step": _number(observed.loss), "mean over the parts": parts.loss}
    if whole_batch:
        losses |= _add_meaning(found, reference, parts, given)
    checks = sorted(found.checks, key=lambda check: (not check.is_wrong, -check.excess))
    if reference.skips(parts):
        checks = [_accepted(check) for check in checks]
    elif any(check.verdict == NOT_FINITE for check in checks):
        found.causes.insert(0, NOTHING_TO_COMPARE)
    return Verification(losses, tuple(checks), tuple(found.causes), tuple(found.notes), tolerance)


def _compared(comparison: Comparison) -> Found:
    """Compares loss, gradients and new state."""
    checks = [
        *_metric_checks(comparison),
        *comparison.gradient_checks(comparison.right.grads, comparison.limits),
        *comparison.state_checks(*comparison.wanted),
        *comparison.padding_checks(),
    ]
    is_wrong = any(check.is_wrong or check.copies_differ for check in checks)
    causes = list(_causes.of_the_step(comparison, checks)) if is_wrong else []
    return Found(checks, causes, list(_notes(comparison)))


def _accepted(check: Check) -> Check:
    """Accepts any loss and gradients in a step that is skipped."""
    if check.verdict != NOT_FINITE or check.kind in (_state.PARAMS, _state.OPT_STATE):
        return check
    return dataclasses.replace(check, verdict=OK)


def _takes_the_whole_batch(
    reference: Reference, observed: Observed, parts: Replayed, tolerance: float
) -> bool:
    """Whether a step leaves the splitting to the compiler, so that its loss sees all examples."""
    if observed.loss is None or reference.has_keys:
        return False
    limit, loss = tolerance * _largest(parts.losses), _number(observed.loss)
    if abs(loss - parts.loss) <= limit:
        return False
    whole = reference.replay(reference.split.on_one(), differentiate=False)
    return abs(loss - whole.loss) <= limit


def _add_meaning(
    found: Found, reference: Reference, parts: Replayed, given: float | None
) -> dict[str, float]:
    """Compares loss and updated fields on the whole batch with those on its parts."""
    comparable = _comparable(reference, parts)
    if comparable is None:
        found.notes.append(DRAWS_DIFFER)
        return {}
    (reference, compared), losses = comparable, {}
    where = ", in float32" if reference.computes_narrow else ""
    where += ", all random numbers alike" if reference.has_keys else ""
    if compared is not parts:
        parts, losses[f"mean over the parts{where}"] = compared, compared.loss
    whole = reference.replay(reference.split.on_one(), in_float32=True, differentiate=False)
    losses[f"the whole batch at once{where}"] = whole.loss
    tolerance = min(reference.tolerance(whole) / 2, MEANING_TOLERANCE) if given is None else given
    limit = tolerance * _largest([*parts.losses, whole.loss])
    check = _compare.compare(WHOLE_BATCH, "loss", np.asarray(parts.loss), whole.loss, limit)
    found.checks.append(check)
    if check.is_wrong:
        found.causes.append(_causes.of_the_loss(reference, parts, whole.loss, tolerance))
    found.add(_field_checks.of_the_whole(reference, parts, whole, tolerance))
    return losses


def _comparable(reference: Reference, parts: Replayed) -> tuple[Reference, Replayed] | None:
    """Returns a reference whose parts mean what the whole batch does, and these; None without any.

    A wide dtype, and one random number for all: else dropout of the whole batch is another sample.
    """
    if reference.has_keys and _draws.rejects(parts.jaxpr):
        return None
    if not reference.has_keys and not reference.computes_narrow:
        return reference, parts
    other = reference.with_draws_alike() if reference.has_keys else reference
    try:
        return other, other.replay(in_float32=True, differentiate=False)
    except Exception:  # whatever a loss raises that looks into its keys, or JAX for some draws
        if not reference.has_keys:
            raise
        return None


def _metric_checks(comparison: Comparison) -> Iterator[Check]:
    observed, parts, tolerance = comparison.observed, comparison.right, comparison.tolerance
    if observed.loss is not None:
        limit = tolerance * _largest(parts.losses)
        yield _compare.compare("loss", "loss", observed.loss, parts.loss, limit)
    if "grad_norm" in observed.metrics:
        norm = float(grad_norm(parts.grads))
        value = observed.metrics["grad_norm"]
        yield _compare.compare("grad_norm", "grad_norm", value, norm, tolerance * norm)
    aux = without_fields(parts.aux, comparison.reference.recipe.mutable)
    if aux is not None and "aux" in observed.metrics:
        given = observed.metrics["aux"]
        limits = jax.tree.map(lambda a: tolerance * _largest(a), aux)
        yield from _compare.compare_trees("aux", "aux", given, aux_like(aux, given), limits)


def _notes(comparison: Comparison) -> Iterator[str]:
    reference, observed, parts = comparison.reference, comparison.observed, comparison.right
    if observed.loss is None:
        yield "The step's metrics have no 'loss', so it is not compared."
    if observed.grads is None:
        yield "The step returns no gradients; what they did to the new state is compared."
    if reference.skips(parts):
        yield (
            "The loss or the gradients are not finite on one device either, and both sides skip "
            "the step: what the state keeps is compared, and no gradients are."
        )
    elif not np.all(np.isfinite(parts.losses)):
        yield "The loss is not finite on one device either; the rest is compared."


def _number(value: ArrayLike | None) -> float:
    return float("nan") if value is None else float(np.mean(_compare.numbers(value)))


def _largest(values: ArrayLike | Sequence[float]) -> float:
    sizes = np.abs(np.asarray(values, np.float64))
    return float(np.max(sizes, where=np.isfinite(sizes), initial=0.0))
