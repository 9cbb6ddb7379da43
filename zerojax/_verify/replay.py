"""A step's loss and gradients on one device: the parts that a mesh would see, one by one."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jax.sharding import AbstractMesh, AxisType

from zerojax import _compat
from zerojax._loss import batch as _batch
from zerojax._loss.trace import TracedLoss, trace_loss
from zerojax._plan.plan import Plan
from zerojax._plan.precision import cast_floats, exact_share, wide
from zerojax._text import human_bytes

MICROBATCHES = "zerojax_microbatches"


@dataclasses.dataclass(frozen=True)
class Replayed:
    """The losses of all parts in the batch's order, their aux stacked, their mean's gradients."""

    losses: np.ndarray
    aux: Any
    grads: Any
    dtype: Any  # the narrowest floats that the loss computes in

    @property
    def loss(self) -> float:
        return float(self.losses.mean())


@dataclasses.dataclass(frozen=True)
class Split:
    """How a batch is cut: over the axes of a mesh, then over microbatches."""

    devices: dict[str, int]
    accumulate: int

    @property
    def sizes(self) -> dict[str, int]:
        """By axis name; microbatches are an axis too, as `zerojax.mean` averages over them."""
        return {**self.devices, MICROBATCHES: self.accumulate}

    @property
    def ways(self) -> int:
        return math.prod(self.sizes.values())

    def whole(self, accumulate: int = 1) -> "Split":
        """The same axes, with one device on each."""
        return Split(dict.fromkeys(self.devices, 1), accumulate)

    def parts(self, value: Any, role: _batch.Role, fold: bool) -> Any:
        """A leaf of the loss's arguments, with one dimension more, over the parts."""
        if role.kind == _batch.BATCH:
            return _batch.split(value, role.dim, self.ways)
        if role.kind == _batch.KEY:
            return jnp.stack([self.key(value, i) if fold else value for i in range(self.ways)])
        return value

    def key(self, key: Any, part: int) -> Any:
        device, microbatch = divmod(part, self.accumulate)
        key = jax.random.fold_in(key, device)
        return jax.random.fold_in(key, microbatch) if self.accumulate > 1 else key


def replay(
    loss_fn: Callable[..., Any],
    params: Any,
    args: Sequence[Any],
    split: Split,
    *,
    compute: Any = None,
    differentiate: bool = True,
    fold: bool = True,
    mutable: Sequence[str] = (),
    roles: Sequence[_batch.Role] | None = None,
) -> Replayed:
    """Evaluates the loss on every part of the batch, on the device where `params` are.

    Part by part, so that activations of one part are alive at a time; all at once where the parts
    speak to each other (`zerojax.mean`, BatchNorm over an axis of the mesh).
    """
    values, treedef = jax.tree.flatten(params)
    arg_values, arg_tree = jax.tree.flatten(tuple(args))
    roles = _batch.roles(args) if roles is None else roles
    trees = (treedef, arg_tree)
    traced = _traced(loss_fn, values, arg_values, trees, roles, split, compute, mutable)
    (device,) = values[0].devices()
    closed_over = on_one_device(traced.closed_over, device)
    parts = [split.parts(v, role, fold) for v, role in zip(arg_values, roles, strict=True)]
    is_float = [jnp.issubdtype(v.dtype, jnp.inexact) for v in values]

    share, rest = exact_share(split.ways)

    def mean_loss(floats: list[Any], others: list[Any], part: list[Any]) -> tuple[Any, Any]:
        params = _merged(is_float, floats, others)
        inputs = [*cast_floats([*params, *part], compute), *closed_over]
        loss, *aux = map(jnp.asarray, _compat.run_jaxpr(traced.jaxpr, inputs))
        return loss.astype(wide(loss.dtype)) * share, aux

    run = _all_at_once if _compat.names_an_axis(traced.jaxpr) else _one_by_one
    floats = [v for v, f in zip(values, is_float, strict=True) if f]
    others = [v for v, f in zip(values, is_float, strict=True) if not f]
    mapped = [role.kind != _batch.WHOLE for role in roles]
    losses, aux, grads = run(mean_loss, floats, others, parts, mapped, split, differentiate)
    # What was traced for a mesh says so in its type, at times for one that was replayed earlier
    # (JAX caches inner calls). Leaves of two meshes cannot be added.
    aux, grads = on_one_device((aux, [g * rest for g in grads]), device)
    aux = jax.tree.structure(traced.aux).unflatten(aux)
    grads = treedef.unflatten(_merged(is_float, grads, map(_no_gradient, others)))
    dtype = narrowest(traced.jaxpr)
    return Replayed(np.asarray(losses) / share, aux, grads, dtype)


def _traced(
    loss_fn: Callable[..., Any],
    values: list[Any],
    arg_values: list[Any],
    trees: tuple[Any, Any],
    roles: Sequence[_batch.Role],
    split: Split,
    compute: Any,
    mutable: Sequence[str],
) -> TracedLoss:
    treedef, arg_tree = trees
    sizes = split.sizes
    auto = (AxisType.Auto,) * len(sizes)
    mesh: Any = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=auto)
    whole = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values]
    pairs = zip(arg_values, roles, strict=True)
    parts = [_batch.part_shape(value, role, split.ways) for value, role in pairs]
    shapes = cast_floats([treedef.unflatten(whole), *arg_tree.unflatten(parts)], compute)
    return trace_loss(loss_fn, shapes, None, mesh, tuple(sizes), mutable)


def _one_by_one(
    mean_loss: Callable[..., Any],
    floats: list[Any],
    others: list[Any],
    parts: list[Any],
    mapped: list[bool],
    split: Split,
    differentiate: bool,
) -> tuple[Any, list[Any], list[Any]]:
    @functools.partial(jax.jit, donate_argnums=0)
    def add(total: list[Any], floats: list[Any], others: list[Any], part: list[Any]) -> Any:
        if not differentiate:
            return total, *mean_loss(floats, others, part)
        grad = jax.value_and_grad(mean_loss, has_aux=True)
        (loss, aux), grads = grad(floats, others, part)
        return [t + g.astype(t.dtype) for t, g in zip(total, grads, strict=True)], loss, aux

    total = [jnp.zeros(v.shape, wide(v.dtype), device=v.sharding) for v in floats]
    losses, every_aux = [], []
    for i in range(split.ways):
        part = [v[i] if cut else v for v, cut in zip(parts, mapped, strict=True)]
        total, loss, aux = jax.block_until_ready(add(total, floats, others, part))
        losses.append(loss)
        every_aux.append(aux)
    return jnp.stack(losses), [jnp.stack(leaves) for leaves in zip(*every_aux, strict=True)], total


def _all_at_once(
    mean_loss: Callable[..., Any],
    floats: list[Any],
    others: list[Any],
    parts: list[Any],
    mapped: list[bool],
    split: Split,
    differentiate: bool,
) -> tuple[Any, list[Any], list[Any]]:
    sizes = split.sizes
    every = mean_loss
    for name in reversed(sizes):
        axes = (None, None, [0 if cut else None for cut in mapped])
        every = jax.vmap(every, axes, axis_name=name, axis_size=sizes[name])

    def total(floats: list[Any], others: list[Any], parts: list[Any]) -> tuple[Any, Any]:
        losses, aux = every(floats, others, parts)
        return losses.sum(), (losses, aux)

    cut_up = [
        v.reshape(*sizes.values(), *v.shape[1:]) if cut else v
        for v, cut in zip(parts, mapped, strict=True)
    ]
    if differentiate:
        grad = jax.jit(jax.grad(total, has_aux=True))
        grads, (losses, aux) = grad(floats, others, cut_up)
    else:
        (_, (losses, aux)), grads = jax.jit(total)(floats, others, cut_up), floats
    aux = [a.reshape(split.ways, *a.shape[len(sizes) :]) for a in aux]
    return losses.reshape(-1), aux, grads


def on_one_device(tree: Any, device: Any) -> Any:
    """Every leaf whole on `device`, moved there one at a time.

    By way of the host: arrays put straight from a mesh to a device still carry it in their type.
    """

    def moved(leaf: Any) -> jax.Array:
        if not jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
            return jax.device_put(np.asarray(leaf), device)
        words = jax.device_put(np.asarray(jax.random.key_data(leaf)), device)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))

    return jax.tree.map(lambda leaf: jax.block_until_ready(moved(leaf)), tree)


def check_fits(plan: Plan, device: Any) -> None:
    """Raises where the device says that it cannot hold the whole state and its successor."""
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return
    state = sum(leaf.nbytes for leaf in plan.leaves)
    grads = sum(leaf.nbytes for leaf in plan.params)
    needed = 2 * state + 2 * grads
    free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    if needed > free:
        raise ValueError(
            f"the replay needs {human_bytes(needed)} on {device}, and {human_bytes(free)} are "
            f"free: the whole state before and after ({human_bytes(state)} each) and gradients "
            f"({human_bytes(grads)}, twice), besides activations. Verify a smaller model (fewer "
            "layers, same code), or replay in host memory: device=jax.devices('cpu')[0]."
        )


def narrowest(jaxpr: Any) -> Any:
    """The least precise float dtype that is computed at any depth of a jaxpr."""
    found = [jnp.dtype(jnp.float64)]
    for eqn in jaxpr.eqns:
        dtypes = [getattr(v.aval, "dtype", jnp.int32) for v in eqn.outvars]
        found += [jnp.dtype(d) for d in dtypes if jnp.issubdtype(d, jnp.floating)]
        for inner in jex_core.jaxprs_in_params(eqn.params):
            found.append(narrowest(getattr(inner, "jaxpr", inner)))
    return max(found, key=lambda dtype: float(jnp.finfo(dtype).eps))


def _merged(is_float: list[bool], floats: Any, others: Any) -> list[Any]:
    floats, others = iter(floats), iter(others)
    return [next(floats) if f else next(others) for f in is_float]


def _no_gradient(value: Any) -> Any:
    if jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return np.zeros(value.shape, jax.dtypes.float0)
    return jnp.zeros_like(value)
