"""Random streams of Flax nnx: those that a model holds, and those that a step is given."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx, struct

from zerojax._types import PyTree, TreeDef

STREAMS = nnx.Rngs | nnx.RngStream


@struct.dataclass
class Streams:
    """A `nnx.Rngs` without objects.

    Each key and count is a scalar here. The arrays of forked streams would be split over the
    devices, as the batch is; a scalar key is folded for each device, and a scalar count is not.
    """

    scalars: list[PyTree]
    treedef: TreeDef = struct.field(pytree_node=False)


def place(rng: PyTree, placed: Callable[[jax.Array], jax.Array]) -> None:
    """Puts keys and counts, in place, where a step returns counts.

    Else its second call would compile again.
    """
    for variable in _variables(rng, nnx.RngState):
        variable.set_value(placed(variable.get_value()))


def without_objects(rng: PyTree) -> PyTree:
    """Returns what a step is given after the batch with `Streams` for objects."""

    def taken_out(value: PyTree) -> PyTree:
        if not isinstance(value, STREAMS):
            return value
        leaves, treedef = jax.tree.flatten(value)
        return Streams(list(map(_scalars, leaves)), treedef)

    return jax.tree.map(taken_out, rng, is_leaf=_is_streams)


def with_objects(rng: PyTree) -> PyTree:
    def put_back(value: PyTree) -> PyTree:
        is_one = isinstance(value, Streams)
        return value.treedef.unflatten(map(_stacked, value.scalars)) if is_one else value

    return jax.tree.map(put_back, rng, is_leaf=lambda value: isinstance(value, Streams))


def has_streams(tree: PyTree) -> bool:
    return any(map(_is_streams, jax.tree.leaves(tree, is_leaf=_is_streams)))


def counts(rng: PyTree) -> list[nnx.RngCount]:
    """Returns the variables that count what was drawn from the streams of an argument."""
    return _variables(rng, nnx.RngCount)


def drawn(rng: PyTree, before: list[jax.Array]) -> list[PyTree]:
    """Returns how many keys a loss has drawn, as scalars: aux with rows would be the examples'.

    These are the same on all devices, and so small that floats, which aux becomes, are exact.
    """
    after = [count.get_value() for count in counts(rng)]
    if list(map(jnp.shape, after)) != list(map(jnp.shape, before)):
        raise ValueError(
            "the loss left the streams that the step was given in another shape. Undo "
            "nnx.split_rngs(rngs, splits=n), nnx.restore_rngs(backups), or use it as a decorator."
        )
    pairs = zip(after, before, strict=True)
    return [_scalars((new - old).astype(jnp.int32)) for new, old in pairs]


def advance(rng: PyTree, drawn: list[PyTree]) -> None:
    """Advances streams, in place, by what a step has drawn."""
    found = counts(rng)
    new = _advanced([count.get_value() for count in found], drawn) if found else []
    for count, value in zip(found, new, strict=True):
        count.set_value(value)


@jax.jit
def _advanced(before: list[jax.Array], drawn: list[PyTree]) -> list[jax.Array]:
    pairs = zip(before, map(_stacked, drawn), strict=True)
    return [old + jnp.round(new).astype(jnp.int32).astype(old.dtype) for old, new in pairs]


def check_arguments(model: nnx.Module, batch: PyTree, rng: PyTree) -> None:
    """Raises for objects of nnx that a step would take apart, and leave as they were."""
    for value in (batch, rng):
        if isinstance(value, nnx.Pytree) and not _is_streams(value):
            name = type(value).__name__
            use = "What the loss reads of it alone, it closes over."
            if isinstance(value, nnx.Metric):
                use = (
                    "Have the loss return what the metrics need, return loss, logits, and update "
                    "them after the step: values = step(model, optimizer, batch); "
                    "metrics.update(loss=values['loss'], logits=values['aux'], labels=...)."
                )
            raise TypeError(
                "a step of zerojax.nnx is called as step(model, optimizer, batch) or "
                f"step(model, optimizer, batch, rng), and a {name} is neither batch nor rng. {use}"
            )
    if has_streams(batch):
        raise TypeError(
            "the batch has a nnx.Rngs, which would not advance there. Pass it after the batch: "
            "step(model, optimizer, batch, rngs)."
        )
    given = set(map(id, counts(rng)))
    held = nnx.to_flat_state(nnx.state(model, nnx.RngCount)) if given else ()
    if any(id(count) in given for _, count in held):
        raise ValueError(
            "the model holds the nnx.Rngs that the step is given after the batch. Leave it out, "
            "step(model, optimizer, batch), and have the loss draw from the model's."
        )


def set_apart(model: nnx.Module, device_key: jax.Array) -> None:
    """Gives a model random streams of this device and microbatch."""
    salt = jax.random.bits(device_key)

    def fold(keys: jax.Array) -> jax.Array:
        folded = jax.vmap(jax.random.fold_in, (0, None))(keys.reshape(-1), salt)
        return folded.reshape(keys.shape)

    nnx.update(model, jax.tree.map(fold, nnx.state(model, nnx.RngKey)))


def _variables(rng: PyTree, kind: type[nnx.RngState]) -> list[PyTree]:
    streams = filter(_is_streams, jax.tree.leaves(rng, is_leaf=_is_streams))
    flat = (nnx.to_flat_state(nnx.state(one, kind)) for one in streams)
    return [variable for found in flat for _, variable in found]


def _is_streams(value: object) -> bool:
    return isinstance(value, STREAMS)


def _scalars(value: jax.Array) -> PyTree:
    return tuple(map(_scalars, value)) if value.shape else value


def _stacked(scalars: PyTree) -> jax.Array:
    if not isinstance(scalars, tuple):
        return jnp.asarray(scalars)
    return jnp.stack([_stacked(part) for part in scalars])
