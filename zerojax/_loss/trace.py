"""Traces a user's loss once, with the shapes that one device sees, and checks what it returns."""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from zerojax import _compat
from zerojax._loss import constraints as _constraints, fields as _fields
from zerojax._plan import mesh as _mesh
from zerojax._types import PyTree, is_key

T = TypeVar("T")


class TracedLoss(NamedTuple):
    """A loss as a jaxpr, whose inputs are the arguments' leaves and then `closed_over`."""

    jaxpr: Jaxpr
    closed_over: list[Array]
    aux: PyTree  # shapes, or None
    closures: list[Array]  # of closed_over, what is no part of a `Partial`


def trace_loss(
    loss_fn: Callable[..., PyTree],
    args: Sequence[PyTree],
    has_aux: bool | None,
    mesh: Mesh,
    axes: tuple[str, ...],
    mutable: Sequence[str] = (),
    absent: Iterable[str] = (),
) -> TracedLoss:
    """Traces `loss_fn(*args)` as code of one device of the mesh. `args` are shapes.

    Annotations may name the axes in `absent`, which the mesh lacks: what is over them is whole.

    With `has_aux=None` the result tells whether there is any. What the loss closes over, tracers
    included, becomes an input, so that `shard_map` never sees a closure.
    """
    captured, with_captured = _captured(loss_fn)

    def checked(args: Sequence[PyTree], captured: Sequence[Array]) -> tuple[Array, PyTree]:
        loss, aux = split_aux(_called(with_captured(captured), args, axes), has_aux)
        _check_scalar(loss)
        _check_aux(aux, mutable)
        return jnp.asarray(loss), jax.tree.map(jnp.asarray, aux)

    def traced(mesh: AbstractMesh) -> tuple[ClosedJaxpr, PyTree]:
        inputs = typed(args, mesh), typed(captured, mesh)
        closed, (_, aux) = jax.make_jaxpr(checked, return_shape=True)(*inputs)
        return closed, aux

    def opened() -> TracedLoss:
        closed, aux = _constraints.without_constraints(traced, axes, absent)
        jaxpr, consts = closed.jaxpr, [*captured, *closed.consts]
        invars = [*jaxpr.invars, *jaxpr.constvars]
        jaxpr = _compat.make_jaxpr(jaxpr.eqns, invars, jaxpr.outvars)
        # nnx.scan returns the weights it was given, layer by layer; what is not read goes first.
        return TracedLoss(_compat.without_unread(jaxpr), consts, aux, closed.consts)

    return as_one_device(opened, mesh, axes)


@contextlib.contextmanager
def explained_dtypes(given: DTypeLike | None) -> Iterator[None]:
    """Says of loops and branches that disagree on a dtype where it comes from: `precision=`."""
    try:
        yield
    except TypeError as error:
        differ = re.search(r"must have equal (output )?types.*\bfloat(32|64)\b", str(error), re.S)
        if given is not None and differ and str(jnp.dtype(given)) in str(error):
            error.add_note(
                f"precision= gives the loss its parameters in {jnp.dtype(given)} (with compute=, "
                "the batch too), and what the loss makes itself, such as the first carry of a "
                "loop, is float32. Make it in the dtype of what it meets, jnp.zeros(shape, "
                "x.dtype), or cast what a turn of the loop returns, new.astype(carry.dtype)."
            )
        raise


def as_one_device(code: Callable[[], T], mesh: Mesh, axes: tuple[str, ...]) -> T:
    """Calls `code` where JAX traces the code of one device, inside `shard_map` over `axes`."""
    found: list[T] = []

    def per_device() -> Array:
        found.append(code())
        return jnp.zeros(())

    with _mesh.seen_as(mesh.abstract_mesh):
        jax.eval_shape(
            jax.shard_map(
                per_device,
                mesh=mesh,
                in_specs=(),
                out_specs=PartitionSpec(),
                axis_names=set(axes),
                check_vma=False,
            )
        )
    return found[0]


def typed(values: PyTree, mesh: AbstractMesh) -> PyTree:
    """Returns shapes of the type that values computed on `mesh` have: libraries compare the two."""
    replicated = NamedSharding(mesh, PartitionSpec())

    def typed(v: Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        weak = getattr(v, "weak_type", False)
        return jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=replicated, weak_type=weak)

    return jax.tree.map(typed, values)


def _captured(
    loss_fn: Callable[..., PyTree],
) -> tuple[list[Array], Callable[[Sequence[Array]], Callable[..., PyTree]]]:
    """Returns the arrays of a `jax.tree_util.Partial`, and a function that puts others there.

    Closed over, they would keep the type that they have outside of the mesh's devices.
    """
    leaves, treedef = jax.tree.flatten(loss_fn)  # a plain function is one leaf

    def with_arrays(arrays: Sequence[Array]) -> Callable[..., PyTree]:
        found = iter(arrays)
        return treedef.unflatten([next(found) if isinstance(x, Array) else x for x in leaves])

    return [leaf for leaf in leaves if isinstance(leaf, Array)], with_arrays


def _called(
    loss_fn: Callable[..., PyTree], args: Sequence[PyTree], axes: tuple[str, ...]
) -> PyTree:
    """Returns `loss_fn(*args)`; names the mesh axes that it may name where it names another."""
    try:
        return loss_fn(*args)
    except NameError as error:
        unbound = re.search(r"unbound axis name: (\w+)", str(error))
        if unbound is None:
            raise
        name = repr(axes[0] if len(axes) == 1 else axes)
        raise NameError(
            f"the loss communicates over the axis {unbound[1]!r}, and its batch is split over "
            f"{name}. Name that: axis_name={name} in BatchNorm, jax.lax.pmean(x, {name}). Or call "
            f"the axis of the mesh {unbound[1]!r}; to a forecast, pass axis={unbound[1]!r}."
        ) from error


def split_aux(result: PyTree, has_aux: bool | None) -> tuple[PyTree, PyTree]:
    """Returns what a loss returned as the loss and its aux, None without any."""
    if isinstance(result, tuple) and len(result) == 2 and has_aux is not False:
        return result
    if has_aux:
        raise TypeError(
            f"with has_aux=True the loss must return (loss, aux), got {type(result).__name__}. "
            "Return a pair, or leave has_aux out."
        )
    return result, None


def _check_scalar(loss: PyTree) -> None:
    """Raises where a loss is not a scalar of a float dtype."""
    if isinstance(loss, tuple):
        raise TypeError(
            f"the loss returned a tuple of {len(loss)}. Return a scalar, or (loss, aux) with "
            "everything else in aux (value_and_grad then needs has_aux=True)."
        )
    if not hasattr(loss, "shape") and not isinstance(loss, int | float):
        raise TypeError(
            f"the loss must be a scalar array, got {type(loss).__name__}. Return a scalar, or "
            "(loss, aux) with everything else in aux."
        )
    shape, dtype = jnp.shape(loss), jnp.result_type(loss)
    if shape != ():
        raise TypeError(
            f"the loss must be a scalar, got shape {shape}. Reduce it, for example with "
            "jnp.mean, or zerojax.mean(values, where=mask) for padded batches."
        )
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"the loss must be of a float dtype, got {dtype}. Convert it: loss.astype(jnp.float32)."
        )


def _check_aux(aux: PyTree, mutable: Sequence[str]) -> None:
    """Raises for leaves of aux that have no mean; fields in `mutable` may be keys."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(aux)[0]:
        dtype = getattr(leaf, "dtype", None)
        numeric = dtype is not None and (not is_key(leaf) or _fields.is_field(path, mutable))
        if not numeric and not isinstance(leaf, int | float | complex):
            name = jax.tree_util.keystr(path)
            raise TypeError(
                f"aux{name} is a {type(leaf).__name__}{f' of {dtype}' if dtype else ''}, not a "
                "numeric array: aux is averaged over the devices. Leave it out of aux."
            )
