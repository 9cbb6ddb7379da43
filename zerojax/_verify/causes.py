"""Why a step and one device disagree: likely causes, each tried out on one device."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zerojax._loss import batch as _batch
from zerojax._state import state as _state
from zerojax._verify import compare as _compare
from zerojax._verify.compare import Check
from zerojax._verify.reference import Reference
from zerojax._verify.replay import Replayed, Split

STATE = (_state.PARAMS, _state.OPT_STATE, _state.OTHER)


class Observed(NamedTuple):
    """What a step gave: its new state and, where it tells them, its loss and gradients."""

    state: Any
    loss: Any
    grads: Any


class Mistake(NamedTuple):
    """A mistake that people make, what it would give, and its remedy."""

    what: str
    loss: float
    grads: Any
    remedy: str


def of_the_step(
    reference: Reference,
    right: Replayed,
    observed: Observed,
    checks: list[Check],
    spreads: list[Any],
    tolerance: float,
) -> Iterator[str]:
    """Likely causes of a step that is not the mean over the parts."""
    wrong = {check.kind for check in checks if check.is_wrong}
    differing = [check.path for check in checks if check.copies_differ and check.kind in STATE]
    if differing:
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        yield (
            f"Devices that should hold the same {differing[0]}{more} hold different values: a "
            "device went by its own part of the batch. Reduce gradients before the update: "
            f"jax.lax.pmean(grads, {reference.axis_name})."
        )
    state_is_wrong = bool(wrong & {"gradient", *STATE})
    found_loss = found_state = False
    for mistake in mistakes(reference, right):
        if "loss" in wrong and not found_loss:
            scale = tolerance * max(np.max(np.abs(right.losses)), abs(mistake.loss))
            found_loss = abs(float(observed.loss) - mistake.loss) <= scale
            if found_loss:
                yield f"The step's loss is {mistake.what}. {mistake.remedy}"
        if state_is_wrong and not found_state and not differing and mistake.grads is not None:
            found_state = _explains(reference, right, observed, mistake.grads, tolerance)
            if found_state:
                yield f"The step's gradients are {mistake.what}. {mistake.remedy}"
    if state_is_wrong and not found_state and not differing:
        yield _of_the_update(reference, right, observed, spreads, wrong, tolerance)


def mistakes(reference: Reference, right: Replayed) -> Iterator[Mistake]:
    split, axis = reference.split, reference.axis_name
    size = split.ways // split.accumulate
    if reference.has_keys:
        same = reference.replay(fold=False)
        remedy = f"Fold it: jax.random.fold_in(rng, jax.lax.axis_index({axis}))."
        yield Mistake(
            "what one and the same key gives on every device", same.loss, same.grads, remedy
        )
    if size > 1:
        yield _multiple(
            right,
            size,
            f"{size} times too large: a sum over the devices",
            f"Take the mean: jax.lax.pmean(x, {axis}).",
        )
        first = reference.replay(split.whole(split.accumulate), reference.part_args([0], size))
        yield Mistake(
            "what the first device's part alone gives",
            first.loss,
            first.grads,
            f"Take the mean over the devices: jax.lax.pmean(x, {axis}).",
        )
    if split.accumulate > 1:
        count = split.accumulate
        yield _multiple(
            right,
            count,
            f"{count} times too large: a sum over the microbatches",
            "Divide it by their number.",
        )


def _multiple(right: Replayed, by: int, what: str, remedy: str) -> Mistake:
    grads = jax.tree.map(
        lambda g: g * by if jnp.issubdtype(g.dtype, jnp.inexact) else g, right.grads
    )
    return Mistake(what, right.loss * by, grads, remedy)


def _explains(
    reference: Reference, right: Replayed, observed: Observed, grads: Any, tolerance: float
) -> bool:
    """Whether these gradients, rather than the right ones, lead to what the step gave."""
    limits = _compare.gradient_limits(grads, tolerance)
    if observed.grads is not None:
        pairs = zip(*map(jax.tree.leaves, (observed.grads, grads, limits)), strict=True)
        checks = [_compare.compare("", "", a, b, limit) for a, b, limit in pairs]
    else:
        wanted = reference.update(grads, right)
        spreads = _compare.spread(lambda g: reference.update(g, right), wanted, grads, limits)
        checks = [
            check
            for check in _compare.compare_states(
                _state.leaves_of(observed.state),
                jax.tree.leaves(reference.state),
                _state.leaves_of(wanted),
                spreads,
                tolerance,
            )
            if check.kind != _state.OTHER
        ]
    return not any(check.is_wrong for check in checks)


def _of_the_update(
    reference: Reference,
    right: Replayed,
    observed: Observed,
    spreads: list[Any],
    wrong: set[str],
    tolerance: float,
) -> str:
    on_shards = (
        "Optimizers need whole arrays: run the update outside of shard_map, on sharded arrays, "
        "where norms, clipping and factored moments see all of them."
    )
    if _updated_on_shards(reference, right, observed, spreads, tolerance):
        return f"Each device ran the optimizer on its own shards alone. {on_shards}"
    if "gradient" in wrong:
        return (
            "The gradients are not the mean over the parts, nor a sum, nor those of one part: "
            "look at where they are reduced and at what the loss does on the way."
        )
    if observed.grads is not None:
        return (
            "The gradients agree and the new state does not: the update is another than tx, is "
            f"applied twice, or sees shards only. {on_shards}"
        )
    return (
        "The step shows no gradients, so two causes are left: gradients that are reduced wrongly, "
        f"or an update that is another than tx or sees shards only. {on_shards} To tell them "
        "apart, return them: metrics['grads']."
    )


def _updated_on_shards(
    reference: Reference, right: Replayed, observed: Observed, spreads: list[Any], tolerance: float
) -> bool:
    """Whether updating each device's shards by themselves gives what the step gave."""
    plan = reference.plan
    if reference.recipe.mutable or not plan.sharded[_state.OPT_STATE]:
        return False
    old, treedef = jax.tree.flatten(reference.state)
    grads, grad_tree = jax.tree.flatten(right.grads)
    cut = plan.shard_shardings
    param_cut = [s for s, leaf in zip(cut, plan.leaves, strict=True) if leaf.kind == _state.PARAMS]
    new = jax.tree.leaves(observed.state)
    for device in plan.mesh.devices.flat:
        at = [s.devices_indices_map(v.shape)[device] for s, v in zip(cut, old, strict=True)]
        grads_at = [
            s.devices_indices_map(g.shape)[device] for s, g in zip(param_cut, grads, strict=True)
        ]
        shards = [v[i] for v, i in zip(old, at, strict=True)]
        grad_shards = [g[i] for g, i in zip(grads, grads_at, strict=True)]
        made = reference.update_of(
            treedef.unflatten(shards), grad_tree.unflatten(grad_shards), right
        )
        parts = zip(new, shards, jax.tree.leaves(made), at, spreads, strict=True)
        for value, before, wanted, index, far in parts:
            leaf = _state.Leaf((), wanted)
            found = _state.Leaf((), _compare.numbers(value)[index])
            check = next(
                _compare.compare_states([found], [before], [leaf], [far[index]], tolerance)
            )
            if check.is_wrong:
                return False
    return True


def of_the_loss(reference: Reference, parts: Replayed, whole: float, tolerance: float) -> str:
    """The likely cause of a loss that means something else on a part than on the whole batch."""
    split, axis = reference.split, reference.axis_name
    accept = "or accept it with whole_batch=False"

    def close(a: float, b: float) -> bool:
        return abs(a - b) <= tolerance * max(abs(a), abs(b))

    def loss_of(split: Split, args: Any = None) -> float:
        return reference.replay(split, args, in_float32=True, differentiate=False).loss

    finite = np.flatnonzero(np.isfinite(parts.losses))
    if len(finite) < split.ways and np.isfinite(whole):
        return (
            f"{split.ways - len(finite)} of {split.ways} parts have a loss that is not finite: a "
            "mean over no true element. Use zerojax.mean(values, where=mask)."
        )
    if split.ways > 1 and close(whole, split.ways * parts.loss):
        return (
            f"The loss is a sum over the batch: on the whole batch it is {split.ways} times its "
            "mean over the parts. Use a mean, or divide by a constant."
        )
    if split.accumulate > 1 and close(whole, loss_of(Split(split.devices, 1))):
        return (
            "The loss means something else on a microbatch than on the whole batch: with "
            f"accumulate=1 it is the same. Use that, {accept}."
        )
    for other in _other_splits(reference):
        if _splits_so(reference, other.roles, whole, close):
            return f"{other.what} Say so, batch_specs={other.specs}, {accept}."
    first = int(finite[0]) if len(finite) else 0
    repeated = loss_of(split.whole(), reference.part_args([first] * split.ways, split.ways))
    if not close(repeated, float(parts.losses[first])):
        return (
            "The loss compares the examples of a batch with one another, as in-batch negatives do: "
            f"one part, repeated {split.ways} times, has another loss than the part. Gather the "
            f"other devices' examples in the loss, jax.lax.all_gather(x, {axis}, tiled=True), "
            f"{accept}."
        )
    norm = f"BatchNorm: give it axis_name={axis}"
    mask = "a masked mean: use zerojax.mean(values, where=mask)"
    likely, other = (norm, mask) if reference.recipe.mutable else (mask, norm)
    return (
        "Examples weigh or are normalised differently in a part than in the whole batch. Most "
        f"likely {likely}. Else {other}; {accept.removeprefix('or ')} where it is meant."
    )


class _OtherSplit(NamedTuple):
    """Another way to split a batch, and what it would mean if that were the right one."""

    what: str
    roles: list[_batch.Role]
    specs: str


def _other_splits(reference: Reference) -> Iterator[_OtherSplit]:
    """Time-major, where second dimensions count the examples; one leaf whole on every device."""
    leaves = jax.tree_util.tree_flatten_with_path(reference.args[0])[0]
    rest = reference.roles[len(leaves) :]
    ways = reference.split.ways

    def other(what: str, roles: list[_batch.Role]) -> _OtherSplit:
        pairs = zip(leaves, roles, strict=True)
        said = {_state.path_name(path): _spec_text(role, reference) for (path, _), role in pairs}
        inside = ", ".join(f"{name!r}: {spec}" for name, spec in said.items())
        return _OtherSplit(what, [*roles, *rest], said.get("") or "{" + inside + "}")

    seconds = [value.shape[1] for _, value in leaves if value.ndim > 1]
    if seconds and seconds[0] % ways == 0:
        rows = (seconds[0],)
        fitting = [[d for d in (1, 0) if v.shape[d : d + 1] == rows] for _, v in leaves]
        roles = [_batch.Role(_batch.BATCH, d[0]) if d else _WHOLE for d in fitting]
        yield other(
            "The batch is time-major: split along dimension 1 the loss means the same on every "
            "part.",
            roles,
        )
    for i, (path, _) in enumerate(leaves):
        roles = list(reference.roles[: len(leaves)])
        if sum(role.kind == _batch.BATCH for role in roles) > 1 and roles[i].kind == _batch.BATCH:
            roles[i] = _WHOLE
            yield other(
                f"The batch leaf {_state.path_name(path)} belongs to all examples: whole on every "
                "device, the loss means the same on every part.",
                roles,
            )


_WHOLE = _batch.Role(_batch.WHOLE)


def _spec_text(role: _batch.Role, reference: Reference) -> str:
    dims = ["None"] * role.dim + [reference.axis_name]
    return f"P({', '.join(dims)})" if role.kind == _batch.BATCH else "P()"


def _splits_so(
    reference: Reference, roles: list[_batch.Role], whole: float, close: Callable[..., bool]
) -> bool:
    """Whether the loss on parts cut in this way is that of the whole batch."""
    try:
        _batch.check(reference.args, roles, reference.split.ways)
        parts = reference.replay(in_float32=True, differentiate=False, roles=roles)
    except Exception:  # a loss that takes no such parts raises what it or its library likes
        return False
    return close(parts.loss, whole)
