"""`zerojax.verify`: compares one step with one device."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn
from jax.typing import ArrayLike

from zerojax import _compat
from zerojax._declared import checked
from zerojax._jaxprs import inferred
from zerojax._loss import arguments as _arguments
from zerojax._loss.arguments import find_plan
from zerojax._loss.fields import with_fields, without_fields
from zerojax._plan import mesh as _mesh
from zerojax._plan.plan import Plan
from zerojax._progress import working
from zerojax._state import refusals as _refusals, state as _state
from zerojax._step.grad import loss_and_grads
from zerojax._step.step import Recipe, grad_norm
from zerojax._types import Device, PyTree
from zerojax.tools._verify import causes as _causes, compare as _compare, rehearse as _rehearse
from zerojax.tools._verify.compare import NOT_FINITE, RIGHT, Check, Verification, largest
from zerojax.tools._verify.reference import DRAWS, Comparison, Reference, Replayed, averaged
from zerojax.tools._verify.widened import can_widen

WHOLE_BATCH = "loss on the whole batch"
# One device rounds batches of both sizes alike, whatever the dtype.
MEANING_TOLERANCE = 5e-3
NOTHING_TO_COMPARE = (
    "Gradients or the new state are not finite in the replay either, which leaves nothing to "
    "compare. Find the operation with the plain loss of a part, under jax.debug_nans(True), and "
    "verify with a batch and a state that are finite."
)
NO_MEMORY = (
    "The activations of the whole batch do not fit in memory, so its gradients are not compared. "
    "To compare them, verify a smaller batch."
)
DRAWS_DIFFER = (
    "Each part has its own key, so the whole batch's loss is another sample and is not compared. "
    "To learn whether a part means the same, verify a loss without randomness."
)


@checked
def verify(
    step: Callable[..., PyTree],
    state: PyTree,
    batch: PyTree,
    rng: PyTree = None,
    *,
    like: Callable[..., PyTree] | None = None,
    plan: Plan | None = None,
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
        like: for a step that you wrote yourself, one of `train_step` that should do the same: its
            loss and its options are replayed.
        plan: of devices that are not here, such as `zerojax.plan(make_state,
            mesh=zerojax.aot.mesh("400xH100"))`. `state` is then a function that makes a small
            state of the same structure, with fewer layers maybe, and `batch` is one for it. They
            are placed as that plan says, on a mesh of the same axes of the devices that are here.
            Leaves whose place differs, and collectives that only one of both steps has, are wrong.
        whole_batch: whether the loss should be that of the whole batch too. With a key, the two are
            compared with all random numbers alike: dropout keeps everything.
        tolerance: relative; default, by the narrowest dtype of the loss, its `precision` and the
            parameters.
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
    if not isinstance(whole_batch, bool):
        raise TypeError(f"whole_batch={whole_batch!r} must be True or False.")
    is_number = isinstance(tolerance, int | float | np.number)
    if tolerance is not None and not (is_number and tolerance >= 0):
        raise ValueError(
            f"tolerance={tolerance!r} must be a number from 0: how far values may differ, relative "
            "to the largest. Leave it out for one that fits their dtypes."
        )
    args, checks, notes = (batch,) if rng is None else (batch, rng), [], []
    if replays := getattr(step, "replays", None):  # of `zerojax.tools.replay`
        step = replays.step
    if plan is not None and like is not None:
        raise TypeError(
            "verify(plan=) runs the step on another mesh, which a step of your own may not know. "
            "Leave like= out, and pass the step that you would pass there."
        )
    if plan is not None:
        with _mesh.unset():
            step, state, args, checks, notes = _rehearse.rehearsal(step, state, batch, rng, plan)
    recipe = _recipe_of(step if like is None else like)
    plan = _plan_of(state, args, recipe)
    with _mesh.unset(), working("verify: copying the state to one device"):
        reference = Reference(recipe, plan, state, args, device)
        # As the step may donate its arguments, it gets copies.
        copied = jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, (state, *args))
    on_all = f"on {plan.mesh.size} device{'s' * (plan.mesh.size > 1)}"
    with working(f"verify: running the step {on_all}"):
        result = jax.block_until_ready(step(*copied))
    new_state, metrics = _taken_apart(result)
    grads = metrics.get("grads")
    if like is None:
        with working(f"verify: computing the step's gradients {on_all}"):
            grads = jax.jit(lambda *args: _gradients(recipe, plan, *args))(state, args)
            grads = jax.block_until_ready(grads)
    with _mesh.unset():
        parts = reference.replay()
        relative = reference.tolerance(parts) if tolerance is None else tolerance
        comparison = Comparison(reference, parts, relative, new_state, metrics, grads)
        report = _verified(comparison, like is not None, whole_batch, tolerance)
    report.checks[:0], report.notes[:0] = checks, notes
    return report


def _taken_apart(result: PyTree) -> tuple[PyTree, dict[str, PyTree]]:
    """Returns the new state and the metrics of a step."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(
            f"the step returned a {type(result).__name__}. verify takes steps that return (new "
            "state, metrics): wrap yours, lambda state, batch: (new_state, {'loss': loss})."
        )
    state, metrics = result
    return state, dict(metrics) if isinstance(metrics, Mapping) else {"loss": metrics}


def _recipe_of(step: object) -> Recipe:
    """Returns the loss and the options of a step; raises for one that the library did not make."""
    if hasattr(step, "pure"):
        raise TypeError(
            "for a step of zerojax.nnx, call zerojax.verify(*step.pure(model, optimizer, batch))."
        )
    if (recipe := getattr(step, "recipe", None)) is None:
        raise TypeError(
            "the step does not come from zerojax.train_step, so verify cannot know its loss. Pass "
            "one that should do the same: zerojax.verify(step, state, batch, "
            "like=zerojax.train_step(loss_fn)), with tx=, plan=, accumulate= or mutable= where "
            "they apply."
        )
    return recipe


def _plan_of(state: PyTree, args: Sequence[PyTree], recipe: Recipe) -> Plan:
    """Returns the plan of the state; raises for wrong arguments, and where one process cannot
    replay a step on them."""
    _arguments.check_kinds(state, args[0])
    _refusals.check_alive(state)
    for value, what in zip(args, ("batch", "rng"), strict=False):
        _refusals.check_values(value, what)
    plan = find_plan(state, recipe.options.plan)
    if jax.process_count() > 1:
        raise ValueError(
            f"verify gathers everything on one device, and this run has {jax.process_count()} "
            "processes. Run it in one process, on fewer devices."
        )
    _mesh.check_runs(plan.mesh)
    plan._check_structure(state)
    return plan


def _gradients(recipe: Recipe, plan: Plan, state: PyTree, args: Sequence[PyTree]) -> PyTree:
    """Returns the gradients of a step of the library. It traces the fields of its state, and so
    does this."""
    loss = with_fields(recipe.loss_fn, plan.unpad(state), recipe.options.mutable)
    return loss_and_grads(loss, plan, recipe.options, _state.get_params(state), args)[2]


def _verified(
    comparison: Comparison, by_hand: bool, whole_batch: bool, tolerance: float | None
) -> Verification:
    """Compares a step with one device, and its parts of the batch with the whole batch."""
    reference, parts = comparison.reference, comparison.right
    report = Verification({}, comparison.tolerance)
    if by_hand and _takes_the_whole_batch(comparison):
        report.notes.append("The step's loss is that of the whole batch: the two are compared.")
        reference.split = reference.in_one
        parts = reference.replay()
        comparison = dataclasses.replace(comparison, right=parts)
    with working("verify: comparing gradients and the new state"):
        report.checks += [
            *_metric_checks(comparison),
            *comparison.gradient_checks(parts.grads),
            *comparison.state_checks(*comparison.wanted),
        ]
    if any(check.is_wrong or check.copies_differ for check in report.checks):
        report.causes += _causes.of_the_step(comparison, report.checks)
    report.notes += _notes(comparison)
    _causes.check_fields_of_parts(report, reference, parts)
    report.losses |= {"the step": _number(comparison.loss), "mean over the parts": parts.loss}
    if whole_batch:
        _compare_meaning(report, reference, parts, tolerance)
    report.checks.sort(key=lambda check: (not check.is_wrong, -check.excess))
    if reference.skips(parts):  # any loss and gradients are right in a step that is skipped
        kept = (_state.PARAMS, _state.OPT_STATE)
        for at, check in enumerate(report.checks):
            if check.verdict == NOT_FINITE and check.kind not in kept:
                report.checks[at] = dataclasses.replace(check, verdict=RIGHT)
    elif report.not_finite:
        report.causes.insert(0, NOTHING_TO_COMPARE)
    return report


def _takes_the_whole_batch(comparison: Comparison) -> bool:
    """Whether a step leaves the splitting to the compiler, so that its loss sees all examples."""
    reference, parts = comparison.reference, comparison.right
    if comparison.loss is None or reference.has_keys:
        return False
    limit, loss = comparison.tolerance * largest(parts.losses), _number(comparison.loss)
    if abs(loss - parts.loss) <= limit:
        return False
    whole = reference.replay(reference.in_one, differentiate=False)
    return abs(loss - whole.loss) <= limit


def _compare_meaning(
    report: Verification, reference: Reference, parts: Replayed, tolerance: float | None
) -> None:
    """Compares what a loss returns on the whole batch with that on its parts, and gradients."""
    comparable = _comparable(reference, parts)
    if comparable is None:
        report.notes.append(DRAWS_DIFFER)
        return
    reference, compared = comparable
    where = ", in float32" if reference.widens else ""
    where += ", all random numbers alike" if reference.has_keys else ""
    if compared is not parts:
        report.losses[f"mean over the parts{where}"] = compared.loss
    whole = _at_once(reference, differentiate=compared.grads is not None)
    if compared.grads is not None and whole.grads is None:
        report.notes.append(NO_MEMORY)
    report.losses[f"the whole batch at once{where}"] = whole.loss
    if tolerance is None:
        rounding = _compare.tolerance_for([whole.dtype], reference.device.platform)
        tolerance = min(rounding / 2, MEANING_TOLERANCE)
    limit = tolerance * largest([*compared.losses, whole.loss])
    check = _compare.compare(WHOLE_BATCH, "loss", np.asarray(compared.loss), whole.loss, limit)
    report.checks.append(check)
    if check.is_wrong:
        report.causes.append(_causes.of_the_loss(reference, compared, whole.loss, tolerance))
    elif whole.grads is not None and whole.dtype.itemsize >= 4:
        limits = _compare.gradient_limits(whole.grads, 2 * tolerance)
        trees = compared.grads, whole.grads, limits
        checks = [*_compare.compare_trees("grads on the whole batch", "gradient", *trees)]
        report.checks += checks
        if any(check.is_wrong for check in checks):
            report.causes.append(_causes.of_the_gradients(reference))
    _causes.check_aux_of_whole(report, reference, compared, whole, tolerance)


def _at_once(reference: Reference, differentiate: bool) -> Replayed:
    """Replays the whole batch, without gradients where its activations do not fit in memory."""
    try:
        return reference.replay(reference.in_one, differentiate=differentiate)
    except jax.errors.JaxRuntimeError as error:
        if not (differentiate and _compat.said(error, _compat.OUT_OF_MEMORY)):
            raise
    return reference.replay(reference.in_one, differentiate=False)


def _comparable(reference: Reference, parts: Replayed) -> tuple[Reference, Replayed] | None:
    """Returns a reference whose parts compare with the whole batch, and these parts; or None.

    Rounding to 16 bits hides what a loss means, and dropout of the whole batch is another sample:
    floats are float32, and all random numbers one. A rule of the user's own (`jax.custom_vjp`) may
    round as before, so that gradients do not compare.
    """
    if reference.has_keys and (_rejects(parts.jaxpr) or _seeds(parts.jaxpr)):
        return None
    is_narrow = parts.dtype.itemsize < 4
    widens = is_narrow and can_widen(parts.jaxpr)
    if not reference.has_keys and not widens:
        return reference, parts
    other = reference.comparable(widens)
    has_rule = any(e.primitive.name == "custom_vjp_call" for e in _compat.every_eqn(parts.jaxpr))
    try:
        return other, other.replay(differentiate=not (is_narrow and has_rule))
    except Exception:
        # Broad, because the user's loss runs on keys of a kind that it has never seen: it may look
        # into them and raise whatever it likes, as does JAX where it cannot draw from them.
        if not reference.has_keys:
            raise
        return None


def _rejects(jaxpr: Jaxpr) -> bool:
    """Whether a loss draws until something holds, which never ends where all draws are alike."""
    loops = (eqn for eqn in _compat.every_eqn(jaxpr) if eqn.primitive.name == "while")
    inside = (part for eqn in loops for part in _compat.inner_jaxprs(eqn))
    drawn = {eqn.primitive.name for part in inside for eqn in _compat.every_eqn(part)} & DRAWS
    return bool(drawn) or "random_gamma" in {e.primitive.name for e in _compat.every_eqn(jaxpr)}


def _seeds(jaxpr: Jaxpr) -> bool:
    """Whether a loss makes keys of numbers that it has drawn, as Keras's generators do."""
    made = []

    def rule(eqn: JaxprEqn, drawn: list[bool]) -> list[bool]:
        for inner in _compat.inner_jaxprs(eqn):
            drawn = [*drawn, *inferred(inner, [any(drawn)] * len(inner.invars), False, rule)]
        if eqn.primitive.name in ("random_wrap", "random_seed"):
            made.append(any(drawn))
        return [any(drawn) or eqn.primitive.name == "random_bits"] * len(eqn.outvars)

    inferred(jaxpr, [False] * len(jaxpr.invars), False, rule)
    return any(made)


def _metric_checks(comparison: Comparison) -> Iterator[Check]:
    metrics, parts, tolerance = comparison.metrics, comparison.right, comparison.tolerance
    if comparison.loss is not None:
        limit = tolerance * largest(parts.losses)
        yield _compare.compare("loss", "loss", comparison.loss, parts.loss, limit)
    if "grad_norm" in metrics:
        norm, name = float(grad_norm(parts.grads)), "grad_norm"
        yield _compare.compare(name, name, metrics[name], norm, tolerance * norm)
    aux = without_fields(parts.aux, comparison.reference.recipe.options.mutable)
    if aux is not None and "aux" in metrics:

        def wanted(stacked: jax.Array, mean: jax.Array, value: jax.Array) -> jax.Array:
            """A step returns the mean over the parts, or their rows one after another."""
            rows = stacked.reshape(-1, *stacked.shape[2:]) if stacked.ndim > 1 else mean
            return rows if rows.shape == np.shape(value) != mean.shape else mean

        right = jax.tree.map(wanted, aux, averaged(aux), metrics["aux"])
        limits = jax.tree.map(lambda a: tolerance * largest(a), aux)
        yield from _compare.compare_trees("aux", "aux", metrics["aux"], right, limits)


def _notes(comparison: Comparison) -> Iterator[str]:
    parts = comparison.right
    if comparison.loss is None:
        yield "The step's metrics have no 'loss', so it is not compared."
    if comparison.grads is None:
        yield "The step returns no gradients; their effect on the new state is compared."
    if comparison.reference.skips(parts):
        yield (
            "The loss or the gradients are not finite in the replay either, and both sides skip "
            "the step: the parts of the state that it keeps are compared, and no gradients."
        )
    elif count := np.sum(~np.isfinite(parts.losses)):
        of = f"{count} of {len(parts.losses)} parts"
        yield f"The loss of {of} is not finite in the replay either; the rest is compared."


def _number(value: ArrayLike | None) -> float:
    return float("nan") if value is None else float(np.mean(_compare.numbers(value)))
