"""Names likely causes of a disagreement: mistakes that people make, each tried on one device."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from zerojax._loss import batch as _batch, fields as _fields
from zerojax._passes import means as _means
from zerojax._state import refusals as _refusals, state as _state
from zerojax._table import few
from zerojax.tools._verify import compare as _compare, reference as _reference
from zerojax.tools._verify.compare import Check, Verification
from zerojax.tools._verify.reference import Comparison, Reference, Replayed

OF_STATE = (_state.PARAMS, _state.OPT_STATE, _state.OTHER)
LOSS, GRADIENTS = "loss", "gradients"
UNSEEN_KEY = (  # of a TrainState, and of nnx
    "Pass the key to the step, step(state, batch, rng), which folds it for each part",
    "Draw from a nnx.Rngs that the model holds, or pass one to the step, "
    "step(model, optimizer, batch, rngs): its keys are folded for each part",
)
ON_SHARDS = (
    "Optimizers need full arrays: run the update outside of shard_map, on sharded arrays, where "
    "norms, clipping and factored moments see all of them."
)


def of_the_step(step: Comparison, checks: Sequence[Check]) -> Iterator[str]:
    """Yields likely causes of a step that does not compute the mean over the parts."""
    wrong = {check.kind for check in checks if check.is_wrong}
    if _compare.PADDING in wrong:
        paths = [c.path for c in checks if c.is_wrong and c.kind == _compare.PADDING]
        yield (
            f"The padding of {few(paths, 1)} is not zero after the step: the update changed it "
            "as if it were part of the state. Inside jax.jit, take gradients and update with "
            "zerojax.unpad(state), and return plan.constrain(new_state), which pads with zeros."
        )
    differing = [check.path for check in checks if check.copies_differ and check.kind in OF_STATE]
    unexplained = [LOSS] if "loss" in wrong else []
    if differing:
        yield (
            f"Devices that should hold the same {few(differing, 1)} hold different values: a "
            "device used only its own part of the batch. Reduce gradients before the update: "
            f"jax.lax.pmean(grads, {step.reference.axis_name})."
        )
    elif wrong & {"gradient", *OF_STATE}:
        unexplained.append(GRADIENTS)
    for mistake, what, remedy in _mistakes(step) if unexplained else ():
        explained = [kind for kind in unexplained if _explains(mistake, kind, step)]
        unexplained = [kind for kind in unexplained if kind not in explained]
        if explained:
            are = "is" if explained == [LOSS] else "are"
            yield f"The step's {' and '.join(explained)} {are} {what}. {remedy}"
    if GRADIENTS in unexplained:
        yield _of_the_update(step, "gradient" in wrong)


def _mistakes(step: Comparison) -> Iterator[tuple[Replayed, str, str]]:
    """Yields the results of each mistake, its name and its remedy."""
    reference, right, microbatches = step.reference, step.right, step.reference.microbatches
    devices = reference.ways // microbatches
    mean = f"jax.lax.pmean(x, {reference.axis_name})"

    def times(count: int) -> Replayed:
        grads = jax.tree.map(
            lambda g: g * count if jnp.issubdtype(g.dtype, jnp.inexact) else g, right.grads
        )
        return dataclasses.replace(right, losses=right.losses * count, grads=grads)

    if reference.has_keys:
        yield (
            reference.replay(fold=False),
            "those of one key, the same on every device",
            f"Fold it: jax.random.fold_in(rng, jax.lax.axis_index({reference.axis_name})).",
        )
    if devices > 1:
        what = f"{devices} times too large: a sum over the devices"
        yield times(devices), what, f"Take the mean: {mean}."
        # Only the loss: gradients of one device make copies of the state differ.
        first = dataclasses.replace(right, losses=right.losses[:microbatches], grads=None)
        what = "only that of the first device's part"
        yield first, what, f"Take the mean over the devices: {mean}."
    if microbatches > 1:
        what = f"{microbatches} times too large: a sum over the microbatches"
        yield times(microbatches), what, "Divide it by their number."


def _explains(mistake: Replayed, kind: str, step: Comparison) -> bool:
    """Whether a mistake gives the step's loss, or gradients that lead to the step's new state."""
    if kind == LOSS:
        scale = step.tolerance * max(np.max(np.abs(step.right.losses)), abs(mistake.loss))
        return abs(float(step.loss) - mistake.loss) <= scale
    if mistake.grads is None:
        return False
    if step.grads is not None:
        return not any(check.is_wrong for check in step.gradient_checks(mistake.grads))
    checks = step.state_checks(*step.led_to(mistake.grads))
    return not any(check.is_wrong for check in checks if check.kind in OF_STATE[:2])


def _of_the_update(step: Comparison, gradients_are_wrong: bool) -> str:
    if gradients_are_wrong:
        return (
            "The gradients are not the mean over the parts, nor a sum, nor those of one part: "
            "look at where they are reduced, and at the operations of the loss on the way."
        )
    if step.grads is not None:
        return (
            "The gradients agree and the new state does not: the update is not that of tx, is "
            f"applied twice, or sees only shards. {ON_SHARDS}"
        )
    return (
        "The step shows no gradients, so two causes are left: gradients that are reduced wrongly, "
        f"or an update that is not that of tx or sees only shards. {ON_SHARDS} To tell them apart, "
        "return the gradients: metrics['grads']."
    )


def of_the_loss(reference: Reference, parts: Replayed, whole: float, tolerance: float) -> str:
    """Returns the likely cause of a loss that means something else on the parts of a batch."""
    ways, axis = reference.ways, reference.axis_name
    accept = "or accept it with whole_batch=False"
    finite = np.flatnonzero(np.isfinite(parts.losses))
    replay = functools.partial(reference.replay, differentiate=False)
    close = functools.partial(math.isclose, rel_tol=tolerance)

    if len(finite) < ways and np.isfinite(whole):
        return (
            f"The loss of {ways - len(finite)} of {ways} parts is not finite: a mean over no true "
            "element, or a deviation of too few rows. Use zerojax.mean(values, where=mask)."
        )
    if ways > 1 and close(ways * parts.loss, whole):
        return (
            f"The loss is a sum over the batch: on the whole batch it is {ways} times its "
            "mean over the parts. Use a mean, or divide by the number of rows that the loss sees, "
            "len(x), not by that of the whole batch."
        )
    at_once = reference.split | {_reference.MICROBATCH_AXIS: 1}
    if reference.microbatches > 1 and close(replay(at_once).loss, whole):
        norm = ", as BatchNorm does" if _has_statistics(reference, parts) else ""
        return (
            f"The loss means something else on a microbatch than on the whole batch{norm}: with "
            f"accumulate=1 it is the same. Use that, {accept}."
        )
    for what, roles in _other_splits(reference):
        try:
            _batch.check(reference.args, roles, ways)
            loss = replay(roles=roles).loss
        except Exception:
            # Broad, because a batch split another way has shapes that the user's loss was not
            # written for: it and its libraries (Flax, for one) raise errors of their own.
            continue
        if close(loss, whole):
            what = f"{what} Say so, batch_specs={_specs_text(reference, roles)}, {accept}."
            return _after_gradients(reference, parts, what)
    has_statistics = _has_statistics(reference, parts)  # of a BatchNorm, whose remedy is another
    normalised = None if has_statistics else _normalised(reference, whole, tolerance)
    likely = normalised or _weighed(reference, parts, has_statistics)
    likely = f"{likely}; {accept.removeprefix('or ')} where it is meant."
    if _reference.has_keys_of_its_own(parts.jaxpr):
        remedy = UNSEEN_KEY[hasattr(reference.state, "with_streams")]
        return (
            "The loss draws random numbers from a key that the step does not see, one in the state "
            "or made in the loss: every part of the batch gets the same ones. "
            f"{remedy}, {accept}. If that is not the cause: {likely}"
        )
    repeated = reference.repeated(int(finite[0]) if len(finite) else 0)
    if not normalised and not close(
        replay(reference.in_one, repeated).loss, replay(args=repeated).loss
    ):
        return (
            "The loss compares the examples of a batch with one another, as in-batch negatives do, "
            f"and experts with a capacity: one part, repeated {ways} times, has another loss than "
            "the part. Gather the other devices' examples in the loss, jax.lax.all_gather(x, "
            f"{axis}, tiled=True), {accept}."
        )
    return likely


def of_the_gradients(reference: Reference) -> str:
    """Returns the cause of gradients that differ although the loss does not."""
    once = ", with accumulate=1" if reference.microbatches > 1 else ""
    return (
        "The loss of the whole batch is the mean over its parts, up to rounding, and its gradient "
        "is not. Either a small term of the loss is no mean over examples, such as a balance of "
        "experts or the entropy of a mean: take means in it over all devices, "
        f"jax.lax.pmean(x, {reference.axis_name}){once}. Or a rule (jax.custom_vjp) or a "
        "stop_gradient does with a part what it should do with each example, such as clip its "
        "gradient, jax.vmap, or with such a mean. Or accept it with whole_batch=False."
    )


def _specs_text(reference: Reference, roles: Sequence[_batch.Role]) -> str:
    pairs = zip(_state.leaves_with_paths(reference.args[0]), roles, strict=False)
    specs = {x.name: _batch.spec(role, reference.plan._splits) for x, role in pairs}
    return str(specs.get("", specs)).replace(",)", ")")  # P('data'), not P('data',)


def _normalised(reference: Reference, whole: float, tolerance: float) -> str | None:
    """Names a batch leaf that the loss normalises by its own mean and deviation, as PPO does.

    Scaling and shifting it does not change the loss, and doing so with some rows does: a norm of
    each row, such as LayerNorm, would hide that as well.
    """

    def is_whole(change: Callable[[jax.Array], jax.Array], at: int) -> bool:
        args = treedef.unflatten([change(v) if i == at else v for i, v in enumerate(values)])
        changed = reference.replay(reference.in_one, args, differentiate=False)
        return math.isclose(changed.loss, whole, rel_tol=tolerance)

    once = " and accumulate=1" if reference.microbatches > 1 else ""  # it is not linear
    values, treedef = jax.tree.flatten(reference.args)
    for i, leaf in enumerate(_state.leaves_with_paths(reference.args[0])):
        role, is_float = reference.roles[i], jnp.issubdtype(values[i].dtype, jnp.floating)
        if role.kind != _batch.BATCH or not is_float or not is_whole(lambda x: 2 * x + 1, i):
            continue
        shape = [-1 if dim == role.dim else 1 for dim in range(values[i].ndim)]
        factors = (1.0 + jnp.arange(values[i].shape[role.dim]) % 2).reshape(shape)
        if not is_whole(lambda x, by=factors: x * by.astype(x.dtype), i):
            return (
                f"The loss normalises {_refusals.where('batch', leaf)} by its mean and deviation, "
                "which differ in a part of the batch. Normalise it before the step, over the "
                "whole batch, or by those of all devices, jnp.sqrt(zerojax.mean((x - "
                f"zerojax.mean(x)) ** 2)){once}"
            )
    return None


def _has_statistics(reference: Reference, parts: Replayed) -> bool:
    """Whether the loss updates floats in fields of the state, as BatchNorm does."""
    fields = jax.tree.leaves([parts.aux[name] for name in reference.recipe.options.mutable])
    return any(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in fields)


def _after_gradients(reference: Reference, parts: Replayed, likely: str) -> str:
    """Puts before a cause, in a loss that takes a gradient itself, how to take that."""
    if not _means.takes_gradients(parts.jaxpr):
        return likely[0].upper() + likely[1:]
    return (
        "The loss takes a gradient itself (jax.grad), on each device that of its own part of "
        "the batch. With respect to parameters, average it before you use it: "
        f"jax.lax.pmean(jax.grad(...)(...), {reference.axis_name}). With respect to examples, "
        f"take that of a sum, jnp.sum. Else {likely}"
    )


def _weighed(reference: Reference, parts: Replayed, has_statistics: bool) -> str:
    once = ", with accumulate=1" if reference.microbatches > 1 else ""
    in_vmap = f"{('batch', *reference.plan._splits.rows)} in a jax.vmap whose axis is 'batch'"
    norm = f"BatchNorm: give it axis_name={reference.axis_name}, or {in_vmap}{once}"
    means = (
        "by a masked mean: use zerojax.mean(values, where=mask). Or by a root, a deviation or "
        "another function of a mean: take that mean with zerojax.mean(values)"
    )
    by = f"most likely by {norm}. Else {means}" if has_statistics else f"{means}. Or by {norm}"
    what = f"examples weigh or are normalised differently in a part than in the whole batch, {by}"
    return _after_gradients(reference, parts, what)


def _other_splits(reference: Reference) -> Iterator[tuple[str, list[_batch.Role]]]:
    """Yields other ways to split the batch, and the meaning of each."""
    leaves = _state.leaves_with_paths(reference.args[0])
    roles, rest = reference.roles[: len(leaves)], reference.roles[len(leaves) :]
    everywhere = _batch.Role(_batch.REPLICATED)
    seconds = [leaf.value.shape[1] for leaf in leaves if leaf.value.ndim > 1]
    if seconds and seconds[0] % reference.ways == 0:
        dims = [[d for d in (1, 0) if x.value.shape[d : d + 1] == (seconds[0],)] for x in leaves]
        yield (
            "the batch is time-major: split along dimension 1 the loss means the same on every "
            "part.",
            [_batch.Role(_batch.BATCH, dim[0]) if dim else everywhere for dim in dims] + rest,
        )
    batched = [i for i, role in enumerate(roles) if role.kind == _batch.BATCH]
    for i in batched if len(batched) > 1 else ():
        yield (
            f"each part needs all of the batch leaf {leaves[i].name}: replicated, the loss means "
            "the same on every part.",
            [*roles[:i], everywhere, *roles[i + 1 :], *rest],
        )


# -- fields in mutable=


def check_fields_of_parts(report: Verification, reference: Reference, parts: Replayed) -> None:
    """Checks that all parts agree on leaves without a mean: a step keeps the first part's."""
    wrong = []
    for name, each, _, _, has_no_mean in _aux_of(reference, parts, parts):
        differs = np.any(each != each[:1], axis=0)
        if has_no_mean and np.any(differs):
            first = np.broadcast_to(each[:1], each.shape)
            report.checks.append(_compare.compare(f"{name} on every part", "field", each, first, 0))
            wrong.append(f"{name} ({', '.join(_element(part, differs) for part in each)})")
    if wrong:
        report.causes.append(
            f"The parts of the batch disagree on {few(wrong)}, in mutable= and of a dtype that has "
            "no mean: a step keeps that of the first part. Make it from values that all devices "
            f"share: sum their counts, jax.lax.psum(x, {reference.axis_name}); derive a "
            "key from the state's own, not from one folded for the device."
        )


def check_aux_of_whole(
    report: Verification, reference: Reference, parts: Replayed, whole: Replayed, tolerance: float
) -> None:
    """Checks that counts are those of the whole batch; other means that differ get a note."""
    counts, means, metrics = [], [], []
    before = {leaf.name: leaf.value for leaf in _state.leaves_of(reference.state)}
    for name, each, kept, of_whole, has_no_mean in _aux_of(reference, parts, whole):
        if kept.shape != of_whole.shape:
            continue  # it has a row for each example
        parts_differ, off = np.any(each != each[:1]), _compare.difference(kept, of_whole)
        limit = 0 if has_no_mean else tolerance * max(map(_compare.largest, (each, of_whole)))
        if not np.any(off > limit):
            continue
        pair = " and ".join(_element(x, off > limit) for x in (kept, of_whole))
        if has_no_mean is None:
            metrics.append(f"{name} ({pair})")
            continue
        old = _compare.numbers(before.get(name, of_whole))
        times = [n * (kept - old) for n in (reference.ways, reference.microbatches)]
        is_sum = any(np.all(abs(x - (of_whole - old)) <= limit) for x in times)
        if not parts_differ if has_no_mean else is_sum:
            where = f"{name} on the whole batch"
            report.checks.append(_compare.compare(where, "field", kept, of_whole, limit))
            counts.append(f"{name} ({pair})")
        elif not has_no_mean and parts_differ:
            means.append(name)
    if counts:
        times = f", times {count}" if (count := reference.microbatches) > 1 else ""
        report.causes.append(
            f"A part of the batch and all of it make different numbers of {few(counts)}, in "
            f"mutable=. Count over the devices: jax.lax.psum(x, {reference.axis_name}){times}, or "
            "accept it with whole_batch=False."
        )
    if means:
        report.notes.append(
            f"The parts of the batch update {few(means)}, in mutable=, and a step keeps the "
            "mean of their results; the whole batch gives another. That is right for running "
            f"statistics, and wrong for sums, jax.lax.psum(x, {reference.axis_name}), and a queue: "
            "put the rows of all devices into it, "
            f"jax.lax.all_gather(x, {reference.axis_name}, tiled=True)."
        )
    if metrics:
        report.notes.append(
            f"The mean over the parts and the whole batch differ in {few(metrics)}, in aux, and "
            "a step returns the mean. Return a count as a fraction, and take another mean over "
            f"all devices, jax.lax.pmean(x, {reference.axis_name})."
        )


def _aux_of(
    reference: Reference, parts: Replayed, whole: Replayed
) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray, bool | None]]:
    """Yields leaves of aux by name: of each part, as a step keeps them, and of the whole batch; and
    whether they have no mean, or None where they are in no field."""
    names = reference.recipe.options.mutable
    others = (jax.tree.leaves(_reference.averaged(x.aux, names)) for x in (parts, whole))
    for leaf, *values in zip(_state.leaves_with_paths(parts.aux), *others, strict=True):
        each, kept, of_whole = map(_compare.numbers, (leaf.value, *values))
        has_no_mean = _fields.has_no_mean(leaf.path, leaf.value, names)
        is_field = _fields.is_field(leaf.path, names)
        yield leaf.name, each, kept, of_whole, has_no_mean if is_field else None


def _element(value: np.ndarray, differs: np.ndarray) -> str:
    """Shows the first element that differs."""
    return f"{value.reshape(-1)[np.argmax(differs)]:.10g}"
