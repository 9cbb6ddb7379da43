"""A step's loss and gradients on one device: the parts that a mesh would see, one by one."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh, AxisType
from jax.typing import DTypeLike

from zerojax import _compat
from zerojax._loss import batch as _batch
from zerojax._loss.mean import exact_share
from zerojax._loss.trace import TracedLoss, trace_loss
from zerojax._plan.plan import Plan
from zerojax._plan.precision import cast_floats, wide
from zerojax._state.state import zero_gradient
from zerojax._table import human_bytes
from zerojax._types import Device, PyTree, is_key

MICROBATCHES = "zerojax_microbatches"

# The losses of the parts, their aux, and the gradients of the floats by their positions.
Results: TypeAlias = tuple[jax.Array, list[jax.Array], dict[int, jax.Array] | None]


@dataclasses.dataclass(frozen=True)
class Replayed:
    """The losses of all parts in the batch's order, their aux stacked, their mean's gradients."""

    losses: np.ndarray
    aux: PyTree
    grads: PyTree  # None where nothing was differentiated
    jaxpr: Jaxpr  # of the loss on one part
    compute: DTypeLike | None  # what its inputs are cast to

    @functools.cached_property
    def dtype(self) -> np.dtype:
        """The narrowest floats that the loss computes in, or that its gradients come in."""
        return narrowest(self.jaxpr, self.compute)

    @property
    def loss(self) -> float:
        return float(self.losses.mean())


@dataclasses.dataclass(frozen=True)
class BatchSplit:
    """A split of a batch: over the axes of a mesh, then over microbatches."""

    devices: dict[str, int]
    accumulate: int

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes by axis; microbatches are one too, because `zerojax.mean` averages over them."""
        return {**self.devices, MICROBATCHES: self.accumulate}

    @property
    def ways(self) -> int:
        return math.prod(self.sizes.values())

    def on_one(self, accumulate: int = 1) -> "BatchSplit":
        """Returns a split over the same axes, with one device on each."""
        return BatchSplit(dict.fromkeys(self.devices, 1), accumulate)

    def parts(self, value: jax.Array, role: _batch.Role, fold: bool) -> jax.Array:
        """Returns a leaf of the loss's arguments with a new first dimension, over the parts.

        What every part has alike stays as it is.
        """
        if role.kind == _batch.BATCH:
            return _batch.split(value, role.dim, self.ways)
        if role.kind == _batch.KEY:
            return jnp.stack([self.key(value, i) if fold else value for i in range(self.ways)])
        return value

    def key(self, key: jax.Array, part: int) -> jax.Array:
        device, microbatch = divmod(part, self.accumulate)
        key = jax.random.fold_in(key, device)
        return jax.random.fold_in(key, microbatch) if self.accumulate > 1 else key


class _Inputs:
    """The inputs of a traced loss by their positions: what it is differentiated by, and the rest.

    Those in `mapped` have a dimension over the parts.
    """

    def __init__(
        self,
        values: Sequence[jax.Array],
        args: Sequence[jax.Array],
        roles: Sequence[_batch.Role],
        split: BatchSplit,
    ) -> None:
        self.split = split
        self.floats = {i: v for i, v in enumerate(values) if jnp.issubdtype(v.dtype, jnp.inexact)}
        self.rest = {i: v for i, v in enumerate([*values, *args]) if i not in self.floats}
        self.mapped = {
            i for i, role in enumerate(roles, len(values)) if role.kind != _batch.REPLICATED
        }

    def part(self, number: int) -> dict[int, jax.Array]:
        return {i: v[number] if i in self.mapped else v for i, v in self.rest.items()}


def evaluate(
    loss_fn: Callable[..., PyTree],
    params: PyTree,
    args: Sequence[PyTree],
    split: BatchSplit,
    *,
    compute: DTypeLike | None = None,
    differentiate: bool = True,
    fold: bool = True,
    mutable: Sequence[str] = (),
    roles: Sequence[_batch.Role] | None = None,
) -> Replayed:
    """Evaluates the loss on every part of the batch, on the device where `params` are.

    One part after the other, so that the activations of only one are alive; all at once where the
    parts communicate (`zerojax.mean`, BatchNorm over an axis of the mesh).
    """
    roles = _batch.roles(args) if roles is None else roles
    traced = _traced(loss_fn, params, args, split, roles=roles, compute=compute, mutable=mutable)
    values, treedef = jax.tree.flatten(params)
    (device,) = values[0].devices()
    closed_over = on_one_device(traced.closed_over, device)
    share, factor = exact_share(split.ways)

    def mean_loss(
        floats: dict[int, jax.Array], rest: dict[int, jax.Array]
    ) -> tuple[jax.Array, list[jax.Array]]:
        every = floats | rest
        inputs = cast_floats([every[i] for i in range(len(every))], compute)
        loss, *aux = map(jnp.asarray, _compat.run_jaxpr(traced.jaxpr, [*inputs, *closed_over]))
        return loss.astype(wide(loss.dtype)) * share, aux

    pairs = zip(jax.tree.leaves(tuple(args)), roles, strict=True)
    inputs = _Inputs(values, [split.parts(v, role, fold) for v, role in pairs], roles, split)
    run = _all_at_once if _compat.names_an_axis(traced.jaxpr) else _one_by_one
    losses, aux, grads = run(mean_loss, inputs, differentiate)
    # Arrays that were traced for a mesh say so in their type, which may be a mesh replayed earlier
    # (JAX caches inner calls). Arrays of two meshes cannot be added.
    aux, grads = on_one_device((aux, grads), device)
    if grads is not None:
        found = {i: grad * factor for i, grad in grads.items()}
        grads = treedef.unflatten([found.get(i, zero_gradient(v)) for i, v in enumerate(values)])
    aux = jax.tree.structure(traced.aux).unflatten(aux)
    return Replayed(np.asarray(losses) / share, aux, grads, traced.jaxpr, compute)


def _traced(
    loss_fn: Callable[..., PyTree],
    params: PyTree,
    args: Sequence[PyTree],
    split: BatchSplit,
    *,
    roles: Sequence[_batch.Role],
    compute: DTypeLike | None,
    mutable: Sequence[str],
) -> TracedLoss:
    sizes = split.sizes
    auto = (AxisType.Auto,) * len(sizes)
    # In place of a mesh of devices, of which there may be fewer.
    mesh: PyTree = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=auto)
    full = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), params)
    leaves, treedef = jax.tree.flatten(tuple(args))
    pairs = zip(leaves, roles, strict=True)
    parts = [_batch.part_shape(value, role, split.ways) for value, role in pairs]
    shapes = cast_floats([full, *treedef.unflatten(parts)], compute)
    return trace_loss(loss_fn, shapes, None, mesh, tuple(sizes), mutable)


def _one_by_one(mean_loss: Callable[..., PyTree], inputs: _Inputs, differentiate: bool) -> Results:
    run = _with_gradients(mean_loss, differentiate)

    @functools.partial(jax.jit, donate_argnums=0)
    def add(total: PyTree, floats: PyTree, rest: PyTree) -> PyTree:
        (loss, aux), grads = run(floats, rest)
        return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads), loss, aux

    def zeros(value: jax.Array) -> jax.Array:
        return jnp.zeros(value.shape, wide(value.dtype), device=value.sharding)

    total, results = jax.tree.map(zeros, inputs.floats) if differentiate else None, []
    for number in range(inputs.split.ways):
        done = add(total, inputs.floats, inputs.part(number))
        total, *result = jax.block_until_ready(done)
        results.append(result)
    losses, aux = jax.tree.map(lambda *parts: jnp.stack(parts), *results)
    return losses, aux, total


def _all_at_once(mean_loss: Callable[..., PyTree], inputs: _Inputs, differentiate: bool) -> Results:
    sizes = inputs.split.sizes
    axes = {i: 0 if i in inputs.mapped else None for i in inputs.rest}
    every = mean_loss
    for name in reversed(sizes):
        every = jax.vmap(every, (None, axes), axis_name=name, axis_size=sizes[name])

    def total(floats: PyTree, rest: PyTree) -> PyTree:
        losses, aux = every(floats, rest)
        return losses.sum(), (losses, aux)

    rest = {
        i: v.reshape(*sizes.values(), *v.shape[1:]) if i in inputs.mapped else v
        for i, v in inputs.rest.items()
    }
    run = jax.jit(_with_gradients(total, differentiate))
    (_, (losses, aux)), grads = run(inputs.floats, rest)
    aux = [a.reshape(inputs.split.ways, *a.shape[len(sizes) :]) for a in aux]
    return losses.reshape(-1), aux, grads


def _with_gradients(function: Callable[..., PyTree], differentiate: bool) -> Callable[..., PyTree]:
    """Returns `function` with gradients by its first argument, or with None in their place."""
    if differentiate:
        return jax.value_and_grad(function, has_aux=True)
    return lambda *inputs: (function(*inputs), None)


def on_one_device(tree: PyTree, device: Device) -> PyTree:
    """Moves every leaf to `device`, one at a time.

    By way of the host: arrays put straight from a mesh to a device still have it in their type.
    """

    def moved(leaf: PyTree) -> jax.Array:
        if not is_key(leaf):
            return jax.device_put(np.asarray(leaf), device)
        words = jax.device_put(np.asarray(jax.random.key_data(leaf)), device)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))

    return jax.tree.map(lambda leaf: jax.block_until_ready(moved(leaf)), tree)


def check_fits(plan: Plan, device: Device) -> None:
    """Raises where the device says that it has no room for the full state and its successor."""
    stats = getattr(device, "memory_stats", dict)() or {}
    if "bytes_limit" not in stats:
        return
    state = sum(leaf.nbytes for leaf in plan.leaves)
    grads = sum(leaf.nbytes for leaf in plan.params)
    needed = 2 * state + 2 * grads
    free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    if needed > free:
        raise ValueError(
            f"the replay needs {human_bytes(needed)} on {device}, and {human_bytes(free)} are "
            f"free: the full state before and after ({human_bytes(state)} each) and gradients "
            f"({human_bytes(grads)}, twice). Activations come on top. Verify a smaller model "
            "(fewer layers, same code), or replay in host memory: device=jax.devices('cpu')[0]."
        )


def narrowest(jaxpr: Jaxpr, compute: DTypeLike | None) -> np.dtype:
    """Returns the least precise float dtype that a jaxpr computes, at any depth.

    Where its inputs are cast to `compute`, it may widen them again and have all in float32: their
    gradients are rounded all the same, before a step sums them.
    """
    made = [v.aval for eqn in _compat.every_eqn(jaxpr) for v in eqn.outvars]
    dtypes = [getattr(aval, "dtype", jnp.int32) for aval in made]
    dtypes += [] if compute is None else [compute]
    floats = [jnp.dtype(d) for d in dtypes if jnp.issubdtype(d, jnp.floating)]
    return max([jnp.dtype(jnp.float64), *floats], key=lambda dtype: float(jnp.finfo(dtype).eps))
