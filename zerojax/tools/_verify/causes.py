"""Names likely causes of a disagreement: mistakes that people make, each tried on one device."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from zerojax._loss import batch as _batch, mean as _mean
from zerojax._plan.padding import padded, unpadded
from zerojax._state import refusals as _refusals, state as _state
from zerojax._types import PyTree
from zerojax.tools._verify import compare as _compare, draws as _draws
from zerojax.tools._verify.compare import Check
from zerojax.tools._verify.reference import Comparison, Reference
from zerojax.tools._verify.replay import BatchSplit, Replayed, on_one_device

STATE = (_state.PARAMS, _state.OPT_STATE, _state.OTHER)
LOSS, GRADIENTS = "loss", "gradients"
ON_SHARDS = (
    "Optimizers need full arrays: run the update outside of shard_map, on sharded arrays, where "
    "norms, clipping and factored moments see all of them."
)


def of_the_step(found: Comparison, checks: Sequence[Check]) -> Iterator[str]:
    """Yields likely causes of a step that does not compute the mean over the parts."""
    wrong = {check.kind for check in checks if check.is_wrong}
    if _compare.PADDING in wrong:
        yield _of_the_padding([c.path for c in checks if c.is_wrong and c.kind == _compare.PADDING])
    differing = [check.path for check in checks if check.copies_differ and check.kind in STATE]
    unexplained = [LOSS] if "loss" in wrong else []
    if differing:
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        yield (
            f"Devices that should hold the same {differing[0]}{more} hold different values: a "
            "device used its own part of the batch alone. Reduce gradients before the update: "
            f"jax.lax.pmean(grads, {found.reference.axis_name})."
        )
    elif wrong & {"gradient", *STATE}:
        unexplained.append(GRADIENTS)
    for made, what, remedy in _mistakes(found) if unexplained else ():
        explained = [kind for kind in unexplained if _explains(made, kind, found)]
        unexplained = [kind for kind in unexplained if kind not in explained]
        if explained:
            are = "is" if explained == [LOSS] else "are"
            yield f"The step's {' and '.join(explained)} {are} {what}. {remedy}"
    if GRADIENTS in unexplained:
        yield _of_the_update(found, "gradient" in wrong)


def _of_the_padding(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return (
        f"The padding of {paths[0]}{more} is not zero after the step: the update changed it as if "
        "it were part of the state. Inside jax.jit, take gradients and update with "
        "zerojax.unpad(state), and return plan.constrain(new_state), which pads with zeros."
    )


def _mistakes(found: Comparison) -> Iterator[tuple[Replayed, str, str]]:
    """Yields what each mistake gives, its name and its remedy."""
    reference, right, split = found.reference, found.right, found.reference.split
    devices, microbatches = split.ways // split.accumulate, split.accumulate
    mean = f"jax.lax.pmean(x, {reference.axis_name})"
    if reference.has_keys:
        yield (
            reference.replay(fold=False),
            "what one and the same key gives on every device",
            f"Fold it: jax.random.fold_in(rng, jax.lax.axis_index({reference.axis_name})).",
        )
    if devices > 1:
        what = f"{devices} times too large: a sum over the devices"
        yield _times(right, devices), what, f"Take the mean: {mean}."
        # The loss alone: gradients of one device make copies of the state differ.
        first = dataclasses.replace(right, losses=right.losses[:microbatches], grads=None)
        what = "what the first device's part alone gives"
        yield first, what, f"Take the mean over the devices: {mean}."
    if microbatches > 1:
        what = f"{microbatches} times too large: a sum over the microbatches"
        yield _times(right, microbatches), what, "Divide it by their number."


def _times(right: Replayed, count: int) -> Replayed:
    def times(grad: jax.Array) -> jax.Array:
        return grad * count if jnp.issubdtype(grad.dtype, jnp.inexact) else grad

    grads = jax.tree.map(times, right.grads)
    return dataclasses.replace(right, losses=right.losses * count, grads=grads)


def _explains(made: Replayed, kind: str, found: Comparison) -> bool:
    """Whether a mistake gives the step's loss, or gradients that lead to what the step gave."""
    if kind == LOSS:
        scale = found.tolerance * max(np.max(np.abs(found.right.losses)), abs(made.loss))
        return abs(float(found.observed.loss) - made.loss) <= scale
    if made.grads is None:
        return False
    limits = _compare.gradient_limits(made.grads, found.tolerance)
    if found.observed.grads is not None:
        return not any(check.is_wrong for check in found.gradient_checks(made.grads, limits))
    return _gave(found, *found.led_to(made.grads, limits))


def _gave(found: Comparison, new: PyTree, spreads: Sequence[np.ndarray]) -> bool:
    """Whether the step gave the parameters and optimizer state of `new`."""
    checks = found.state_checks(new, spreads)
    return not any(check.is_wrong for check in checks if check.kind != _state.OTHER)


def _of_the_update(found: Comparison, gradients_are_wrong: bool) -> str:
    if _is_updated_on_shards(found):
        return f"Each device ran the optimizer on its own shards alone. {ON_SHARDS}"
    if gradients_are_wrong:
        return (
            "The gradients are not the mean over the parts, nor a sum, nor those of one part: "
            "look at where they are reduced and at what the loss does on the way."
        )
    if found.observed.grads is not None:
        return (
            "The gradients agree and the new state does not: the update is another than tx, is "
            f"applied twice, or sees shards only. {ON_SHARDS}"
        )
    return (
        "The step shows no gradients, so two causes are left: gradients that are reduced wrongly, "
        f"or an update that is another than tx or sees shards only. {ON_SHARDS} To tell them "
        "apart, return them: metrics['grads']."
    )


def _is_updated_on_shards(found: Comparison) -> bool:
    """Whether updating each device's shards by themselves gives what the step gave."""
    reference, plan = found.reference, found.reference.plan
    if reference.recipe.mutable or not plan.groups.opt_state:
        return False
    treedef = jax.tree.structure(reference.state)
    shardings = treedef.unflatten(plan.shard_shardings)
    shapes = treedef.unflatten(leaf.update.padded(leaf.shape) for leaf in plan.leaves)
    places = shardings, _state.get_params(shardings)
    whole = reference.state, found.right.grads
    widths = shapes, _state.get_params(shapes)
    state, grads = jax.device_put(jax.tree.map(padded, whole, widths), places)
    specs = jax.tree.map(lambda sharding: sharding.spec, places)
    update = jax.shard_map(
        lambda state, grads: reference.update(grads, found.right, state),
        mesh=plan.mesh,
        in_specs=specs,
        out_specs=specs[0],
        check_vma=False,
    )
    try:
        new = on_one_device(jax.jit(update)(state, grads), reference.device)
    except (TypeError, ValueError):  # one that factors a matrix may not run on its shards at all
        return False
    new = jax.tree.map(lambda value, old: unpadded(value, old.shape), new, reference.state)
    same = jax.tree.map(np.shape, new) == jax.tree.map(np.shape, reference.state)
    return same and _gave(found, new, found.wanted[1])


def of_the_loss(reference: Reference, parts: Replayed, whole: float, tolerance: float) -> str:
    """Returns the likely cause of a loss that means something else on the parts of a batch."""
    split, axis = reference.split, reference.axis_name
    accept = "or accept it with whole_batch=False"
    finite = np.flatnonzero(np.isfinite(parts.losses))
    replay = functools.partial(reference.replay, in_float32=True, differentiate=False)
    close = functools.partial(math.isclose, rel_tol=tolerance)

    if len(finite) < split.ways and np.isfinite(whole):
        return (
            f"{split.ways - len(finite)} of {split.ways} parts have a loss that is not finite: a "
            "mean over no true element. Use zerojax.mean(values, where=mask)."
        )
    if split.ways > 1 and close(split.ways * parts.loss, whole):
        return (
            f"The loss is a sum over the batch: on the whole batch it is {split.ways} times its "
            "mean over the parts. Use a mean, or divide by the number of rows that the loss sees, "
            "len(x), not by that of the whole batch."
        )
    if split.accumulate > 1 and close(replay(BatchSplit(split.devices, 1)).loss, whole):
        norm = ", as BatchNorm does" if _has_statistics(reference, parts) else ""
        return (
            f"The loss means something else on a microbatch than on the whole batch{norm}: with "
            f"accumulate=1 it is the same. Use that, {accept}."
        )
    if _draws.has_keys_of_its_own(parts.jaxpr):
        return f"{_keys_of_its_own(reference)}, {accept}."
    for what, roles in _other_splits(reference):
        if close(_loss_by(reference, roles), whole):
            return f"{what} Say so, batch_specs={_specs_text(reference, roles)}, {accept}."
    first = int(finite[0]) if len(finite) else 0
    if not close(replay(split.on_one(), reference.repeated(first)).loss, parts.losses[first]):
        return (
            "The loss compares the examples of a batch with one another, as in-batch negatives do: "
            f"one part, repeated {split.ways} times, has another loss than the part. Gather the "
            f"other devices' examples in the loss, jax.lax.all_gather(x, {axis}, tiled=True), "
            f"{accept}."
        )
    likely = _normalised(reference, whole, tolerance) or _weighed(reference, parts)
    return f"{likely}; {accept.removeprefix('or ')} where it is meant."


def _loss_by(reference: Reference, roles: list[_batch.Role]) -> float:
    """Returns the loss on a batch split by other roles; NaN where it takes no such parts."""
    try:
        _batch.check(reference.args, roles, reference.split.ways)
        return reference.replay(roles=roles, in_float32=True, differentiate=False).loss
    except Exception:  # whatever the loss or its library raises
        return float("nan")


def _specs_text(reference: Reference, roles: Sequence[_batch.Role]) -> str:
    pairs = zip(_state.leaves_with_paths(reference.args[0]), roles, strict=False)
    specs = {x.name: _batch.spec(role, reference.plan.batch_axes) for x, role in pairs}
    return str(specs.get("", specs)).replace(",)", ")")  # P('data'), not P('data',)


def _keys_of_its_own(reference: Reference) -> str:
    remedy = "Pass the key to the step, step(state, batch, rng), which folds it for each part"
    if hasattr(reference.state, "with_streams"):
        remedy = (
            "Draw from a nnx.Rngs that the model holds or the step is given, step(model, "
            "optimizer, batch, rngs): its keys are folded for each part"
        )
    return (
        "The loss draws random numbers from a key that the step does not see, one kept in the "
        f"state or made in the loss: every part of the batch gets the same ones. {remedy}"
    )


def _normalised(reference: Reference, whole: float, tolerance: float) -> str | None:
    """Names a batch leaf that the loss normalises by its own mean and deviation, as PPO does.

    Scaled and shifted it leads to the same loss, and in another order it does not.
    """

    def is_whole(change: Callable[[jax.Array], jax.Array], at: int) -> bool:
        args = treedef.unflatten([change(v) if i == at else v for i, v in enumerate(values)])
        split = reference.split.on_one()
        found = reference.replay(split, args, in_float32=True, differentiate=False)
        return math.isclose(found.loss, whole, rel_tol=tolerance)

    once = " and accumulate=1" if reference.split.accumulate > 1 else ""  # it is not linear
    values, treedef = jax.tree.flatten(reference.args)
    for i, leaf in enumerate(_state.leaves_with_paths(reference.args[0])):
        role, is_float = reference.roles[i], jnp.issubdtype(values[i].dtype, jnp.floating)
        if role.kind != _batch.BATCH or not is_float or not is_whole(lambda x: 2 * x + 1, i):
            continue
        if not is_whole(functools.partial(jnp.flip, axis=role.dim), i):
            return (
                f"The loss normalises {_refusals.where('batch', leaf)} by its mean and deviation, "
                "which are others in a part of the batch. Normalise it before the step, over the "
                "whole batch, or by those of all devices, jnp.sqrt(zerojax.mean((x - "
                f"zerojax.mean(x)) ** 2)){once}"
            )
    return None


def _has_statistics(reference: Reference, parts: Replayed) -> bool:
    """Whether the loss updates floats in fields of the state, as BatchNorm does."""
    fields = jax.tree.leaves([parts.aux[name] for name in reference.recipe.mutable])
    return any(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in fields)


def _weighed(reference: Reference, parts: Replayed) -> str:
    once = ", with accumulate=1" if reference.split.accumulate > 1 else ""
    norm = f"BatchNorm: give it axis_name={reference.axis_name}{once}"
    mask = "a masked mean: use zerojax.mean(values, where=mask)"
    likely, other = (norm, mask) if _has_statistics(reference, parts) else (mask, norm)
    if _mean.takes_gradients(parts.jaxpr):
        return (
            "The loss takes a gradient itself (jax.grad), on each device that of its own part of "
            "the batch. With respect to parameters, average it before you use it: "
            f"jax.lax.pmean(jax.grad(...)(...), {reference.axis_name}). With respect to examples, "
            f"take that of a sum, jnp.sum. Else {likely}. Or {other}"
        )
    return (
        "Examples weigh or are normalised differently in a part than in the whole batch. Most "
        f"likely {likely}. Else {other}"
    )


def _other_splits(reference: Reference) -> Iterator[tuple[str, list[_batch.Role]]]:
    """Yields other ways to split the batch, and what they would mean."""
    leaves = _state.leaves_with_paths(reference.args[0])
    roles, rest = reference.roles[: len(leaves)], reference.roles[len(leaves) :]
    everywhere = _batch.Role(_batch.REPLICATED)
    seconds = [leaf.value.shape[1] for leaf in leaves if leaf.value.ndim > 1]
    if seconds and seconds[0] % reference.split.ways == 0:
        dims = [[d for d in (1, 0) if x.value.shape[d : d + 1] == (seconds[0],)] for x in leaves]
        yield (
            "The batch is time-major: split along dimension 1 the loss means the same on every "
            "part.",
            [_batch.Role(_batch.BATCH, found[0]) if found else everywhere for found in dims] + rest,
        )
    batched = [i for i, role in enumerate(roles) if role.kind == _batch.BATCH]
    for i in batched if len(batched) > 1 else ():
        yield (
            f"The batch leaf {leaves[i].name} belongs to all examples: replicated, the loss means "
            "the same on every part.",
            [*roles[:i], everywhere, *roles[i + 1 :], *rest],
        )
