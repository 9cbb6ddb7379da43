"""`zerojax.verify`: one step against one device."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zerojax._loss import arguments as _arguments, batch as _batch
from zerojax._loss.arguments import find_plan
from zerojax._loss.fields import with_fields, without_fields
from zerojax._plan import mesh as _mesh
from zerojax._plan.plan import Plan
from zerojax._plan.precision import Precision
from zerojax._state import refusals as _refusals, state as _state
from zerojax._step.grad import loss_and_grads
from zerojax._step.program import Options
from zerojax._step.step import Recipe, grad_norm
from zerojax._verify import causes as _causes, compare as _compare, field_checks as _field_checks
from zerojax._verify.causes import Observed
from zerojax._verify.compare import NOT_FINITE, OK, Check
from zerojax._verify.field_checks import Found
from zerojax._verify.reference import Reference, aux_like
from zerojax._verify.replay import Replayed, check_fits
from zerojax._verify.verification import Verification

WHOLE_BATCH = "loss on the whole batch"
# One device and one code round alike for batches of two sizes, whatever they round to.
MEANING_TOLERANCE = 5e-3


def verify(
    step: Callable[..., Any],
    state: Any,
    batch: Any,
    rng: Any = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    tx: optax.GradientTransformation | None = None,
    plan: Plan | None = None,
    accumulate: int | None = None,
    precision: Precision | None = None,
    mutable: Sequence[str] | None = None,
    batch_specs: Any = None,
    whole_batch: bool = True,
    tolerance: float | None = None,
    device: Any = None,
) -> Verification:
    """Replays one step on one device, and compares loss, gradients and new state.

    Three losses tell most: the step's; the mean over the parts of the batch that the devices see,
    with their own keys; and that of the whole batch at once. Where the first two differ, the step
    is wrong; where the last two do, the loss means something else on a part. The state passed in
    stays valid.

    Arguments:
        step: from `train_step`, or any `(state, batch[, rng]) -> (new state, metrics)`. Metrics
            are the loss, or a dict with `loss` and, as far as it has them, `grad_norm`, `grads`
            and `aux`.
        state: a placed state, not donated.
        batch, rng: as the step takes them.
        loss_fn, tx, plan, accumulate, precision, mutable, batch_specs: as in `train_step`, for
            other steps.
        whole_batch: whether the loss should be that of the whole batch too. Not compared where
            there are keys, which are folded for each part.
        tolerance: relative; default, by the narrowest dtype that the loss computes in.
        device: where to replay; default, the first one of the mesh.

    Returns:
        A `Verification`: prints as a table; `.ok`, `.raise_if_wrong()`, `.to_dict()`.

    Example:
        >>> params, tx = {"w": jnp.ones((64, 16))}, optax.adam(1e-3)
        >>> state = TrainState.create(apply_fn=None, params=params, tx=tx)
        >>> state = zerojax.shard_train_state(state, stage=3)
        >>> step = zerojax.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2))
        >>> zerojax.verify(step, state, np.ones((8, 64), np.float32)).ok
        True
    """
    if hasattr(step, "pure"):
        raise TypeError(
            "a step of zerojax.nnx is verified without its objects: "
            "zerojax.verify(*step.pure(model, optimizer, batch))."
        )
    made = getattr(step, "recipe", None)
    options = Options(None, accumulate or 1, precision, regather=True, batch_specs=batch_specs)
    if made is None and loss_fn is None:
        raise TypeError(
            "the step does not come from zerojax.train_step, so verify cannot know its loss. Pass "
            "zerojax.verify(step, state, batch, loss_fn=loss_fn), and tx=, plan=, accumulate=, "
            "mutable= where they apply."
        )
    _arguments.check_kinds(state, batch)
    _refusals.check_alive(state)
    _refusals.check_values(batch, "batch")
    recipe = made or Recipe(loss_fn, options, tuple(mutable or ()), plan, tx)  # type: ignore
    _check_given(made, loss_fn, tx, plan, accumulate, precision, mutable, batch_specs)
    found = find_plan(state, recipe.plan, recipe.stage)
    if jax.process_count() > 1:
        raise ValueError(
            f"verify gathers everything on one device, and this run has {jax.process_count()} "
            "processes. Run it in one process, on fewer devices."
        )
    _mesh.check_runs(found.mesh)
    found.check_structure(state)
    args = (batch,) if rng is None else (batch, rng)
    roles = _batch.roles(args, recipe.options.batch_specs, found.axes)
    _batch.check(args, roles, found.size, recipe.options.accumulate)
    device = found.mesh.devices.flat[0] if device is None else device
    check_fits(found, device)

    with _mesh.unset():
        reference = Reference(recipe, found, state, args, device)
    new_state, metrics = _run(step, state, args)
    grads = metrics.get("grads")
    if made is not None:
        grads = _gradients(recipe, found, state, args)
    observed = Observed(new_state, metrics.get("loss"), grads)
    with _mesh.unset():
        return _compared(reference, observed, metrics, whole_batch, tolerance, made is not None)


def _check_given(made: Recipe | None, *given: Any) -> None:
    if made is not None and any(value is not None for value in given):
        raise ValueError(
            "a step from zerojax.train_step knows its loss and options. Leave loss_fn=, tx=, "
            "plan=, accumulate=, precision=, mutable= and batch_specs= out."
        )


def _gradients(recipe: Recipe, plan: Plan, state: Any, args: Sequence[Any]) -> Any:
    """Those of the step, which traces its state's fields: so must this."""

    def gradients(state: Any, args: Sequence[Any]) -> Any:
        loss = with_fields(recipe.loss_fn, state, recipe.mutable)
        return loss_and_grads(loss, plan, recipe.options, _state.get_params(state), args)[2]

    return jax.jit(gradients)(state, args)


def _run(step: Callable[..., Any], state: Any, args: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
    """The step's results; it gets copies, as it may donate what it takes."""
    copied = jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, (state, *args))
    result = jax.block_until_ready(step(*copied))
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(
            f"the step returned a {type(result).__name__}. verify takes steps that return (new "
            "state, metrics): wrap yours, lambda state, batch: (new_state, {'loss': loss})."
        )
    new_state, metrics = result
    return new_state, dict(metrics) if isinstance(metrics, Mapping) else {"loss": metrics}


def _compared(
    reference: Reference,
    observed: Observed,
    metrics: dict[str, Any],
    whole_batch: bool,
    given: float | None,
    from_train_step: bool,
) -> Verification:
    parts = reference.replay()
    tolerance = reference.tolerance(parts) if given is None else given
    notes = []
    if not from_train_step and _takes_the_whole_batch(reference, observed, parts, tolerance):
        notes.append("The step's loss is that of the whole batch, which it is held against.")
        reference.split = reference.split.whole()
        parts = reference.replay()
    wanted = reference.new_state(parts)
    limits = _compare.gradient_limits(parts.grads, tolerance)
    spreads = _compare.spread(lambda g: reference.update(g, parts), wanted, parts.grads, limits)
    checks = [
        *_metric_checks(reference, observed, metrics, parts, tolerance),
        *_gradient_checks(observed, parts, limits),
        *_compare.compare_states(
            _state.leaves_of(observed.state),
            jax.tree.leaves(reference.state),
            _state.leaves_of(wanted),
            spreads,
            tolerance,
        ),
    ]
    causes = []
    if any(check.is_wrong or check.copies_differ for check in checks):
        causes += _causes.of_the_step(reference, parts, observed, checks, spreads, tolerance)
    losses = {"the step": _number(observed.loss), "mean over the parts": parts.loss}
    notes += _notes(reference, observed, parts)
    found = [_field_checks.of_the_parts(reference, parts)]
    if whole_batch and not reference.has_keys:
        meant, more = _meaning(reference, parts, given)
        found, losses = [*found, *meant], losses | more
    for more in found:
        checks, causes, notes = checks + more.checks, causes + more.causes, notes + more.notes
    if reference.skips(parts):
        checks = [_accepted(check) for check in checks]
    elif any(check.verdict == NOT_FINITE for check in checks):
        causes.insert(
            0,
            (
                "Gradients or the new state are not finite on one device either, which leaves "
                "nothing to compare. Find where with the plain loss on one device, under "
                "jax.debug_nans(True), and verify with a batch and a state that are finite."
            ),
        )
    checks.sort(key=lambda check: (not check.is_wrong, -check.excess))
    return Verification(losses, tuple(checks), tuple(causes), tuple(notes), tolerance)


def _accepted(check: Check) -> Check:
    """Of a step that is left out: its loss and gradients may be what they are."""
    if check.verdict != NOT_FINITE or check.kind in (_state.PARAMS, _state.OPT_STATE):
        return check
    return dataclasses.replace(check, verdict=OK)


def _takes_the_whole_batch(
    reference: Reference, observed: Observed, parts: Replayed, tolerance: float
) -> bool:
    """Whether a step leaves the splitting to the compiler, so that its loss sees all examples."""
    if observed.loss is None or reference.has_keys:
        return False
    limit, found = tolerance * _largest(parts.losses), _number(observed.loss)
    if abs(found - parts.loss) <= limit:
        return False
    whole = reference.replay(reference.split.whole(), differentiate=False)
    return abs(found - whole.loss) <= limit


def _meaning(
    reference: Reference, parts: Replayed, given: float | None
) -> tuple[list[Found], dict[str, float]]:
    """Whether loss and updated fields are the same on the whole batch as on its parts."""
    losses, where = {}, ""
    if reference.computes_narrow:
        parts, where = reference.replay(in_float32=True, differentiate=False), ", in float32"
        losses[f"mean over the parts{where}"] = parts.loss
    split = reference.split.whole()
    whole = reference.replay(split, in_float32=True, differentiate=False)
    losses[f"the whole batch at once{where}"] = whole.loss
    tolerance = min(reference.tolerance(whole) / 2, MEANING_TOLERANCE) if given is None else given
    limit = tolerance * _largest([*parts.losses, whole.loss])
    check = _compare.compare(WHOLE_BATCH, "loss", np.asarray(parts.loss), whole.loss, limit)
    is_wrong = check.is_wrong
    causes = [_causes.of_the_loss(reference, parts, whole.loss, tolerance)] if is_wrong else []
    of_fields = _field_checks.of_the_whole(reference, parts, whole, tolerance)
    return [Found([check], causes, []), of_fields], losses


def _metric_checks(
    reference: Reference,
    observed: Observed,
    metrics: dict[str, Any],
    parts: Replayed,
    tolerance: float,
) -> Iterator[Check]:
    if observed.loss is not None:
        limit = tolerance * _largest(parts.losses)
        yield _compare.compare("loss", "loss", observed.loss, parts.loss, limit)
    if "grad_norm" in metrics:
        norm = float(grad_norm(parts.grads))
        value = metrics["grad_norm"]
        yield _compare.compare("grad_norm", "grad_norm", value, norm, tolerance * norm)
    aux = without_fields(parts.aux, reference.recipe.mutable)
    if aux is not None and "aux" in metrics:
        wanted = aux_like(aux, metrics["aux"])
        sizes = jax.tree.map(lambda a: tolerance * _largest(a), aux)
        pairs = zip(jax.tree.leaves(wanted), jax.tree.leaves(sizes), strict=True)
        by_id = {id(leaf): limit for leaf, limit in pairs}
        yield from _compare.compare_trees("aux", metrics["aux"], wanted, lambda w: by_id[id(w)])


def _gradient_checks(observed: Observed, parts: Replayed, limits: Any) -> Iterator[Check]:
    if observed.grads is None:
        return
    leaves = jax.tree_util.tree_flatten_with_path(parts.grads)[0]
    others = (jax.tree.leaves(observed.grads), jax.tree.leaves(limits))
    for (path, wanted), value, limit in zip(leaves, *others, strict=True):
        if jnp.issubdtype(wanted.dtype, jnp.inexact):
            name = "/".join(filter(None, ("grads", _state.path_name(path))))
            yield _compare.compare(name, "gradient", value, wanted, limit)


def _notes(reference: Reference, observed: Observed, parts: Replayed) -> Iterator[str]:
    if observed.loss is None:
        yield "The step's metrics have no 'loss', so it is not compared."
    if observed.grads is None:
        yield "The step returns no gradients; what they did to the new state is compared."
    if reference.has_keys:
        yield (
            "Each part has its own key, so the whole batch's loss is another sample and is not "
            "compared. To learn whether a part means the same, verify a loss without randomness."
        )
    if reference.skips(parts):
        yield (
            "The loss or the gradients are not finite on one device either, and the step is left "
            "out on both sides: what the state keeps is compared, and no gradients are."
        )
    elif not np.all(np.isfinite(parts.losses)):
        yield "The loss is not finite on one device either; the rest is compared."


def _number(value: Any) -> float:
    return float("nan") if value is None else float(np.mean(_compare.numbers(value)))


def _largest(values: Any) -> float:
    sizes = np.abs(np.asarray(values, np.float64))
    return float(np.max(sizes, where=np.isfinite(sizes), initial=0.0))
