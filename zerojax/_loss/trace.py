"""Traces a user's loss once, at the shapes one device sees, and checks what it returns."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from zerojax import _compat
from zerojax._loss import constraints as _constraints, fields as _fields
from zerojax._plan import mesh as _mesh


@dataclasses.dataclass(frozen=True)
class TracedLoss:
    """A loss as a jaxpr. Its inputs: the arguments' leaves, then `closed_over`."""

    jaxpr: Any
    closed_over: list[Any]
    aux: Any  # shapes, or None


def trace_loss(
    loss_fn: Callable[..., Any],
    args: Sequence[Any],
    has_aux: bool | None,
    mesh: Mesh,
    axes: tuple[str, ...],
    mutable: Sequence[str] = (),
) -> TracedLoss:
    """Traces `loss_fn(*args)` as code of one device of the mesh. `args` are shapes.

    `has_aux=None` reads off the result whether there is any. What the loss closes over, tracers
    included, becomes an input, so that `shard_map` never sees a closure.
    """
    found: list[TracedLoss] = []
    held, holding = _held_arrays(loss_fn)

    def checked(args: Sequence[Any], held: Sequence[Any]) -> tuple[Any, Any]:
        loss, aux = split_aux(holding(held)(*args), has_aux)
        check_loss(loss)
        check_aux(aux, mutable)
        return jnp.asarray(loss), jax.tree.map(jnp.asarray, aux)

    def traced(mesh: AbstractMesh) -> tuple[Any, Any]:
        inputs = _typed(args, mesh), _typed(held, mesh)
        with jax.sharding.use_abstract_mesh(mesh):
            closed, (_, aux) = jax.make_jaxpr(checked, return_shape=True)(*inputs)
        return closed, aux

    def per_device() -> Any:
        closed, aux = _without_constraints(traced, axes)
        jaxpr, consts = closed.jaxpr, [*held, *closed.consts]
        invars = [*jaxpr.invars, *jaxpr.constvars]
        # nnx.scan returns the weights it was given, layer by layer. What nobody reads goes first.
        opened = _compat.without_unread(_compat.make_jaxpr(jaxpr.eqns, invars, jaxpr.outvars))
        found.append(TracedLoss(opened, consts, aux))
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


def _without_constraints(
    traced: Callable[[AbstractMesh], tuple[Any, Any]], axes: tuple[str, ...]
) -> tuple[Any, Any]:
    """A loss traced as code of one device, without the constraints over `axes` that it may have.

    They are an error there, so a loss that has some is traced a second time.
    """
    try:
        closed, aux = traced(jax.sharding.get_abstract_mesh())
        if not _constraints.name_any(closed.jaxpr, axes):
            return closed, aux
    except (TypeError, ValueError) as error:
        failed: Exception | None = error
    else:
        failed = None
    try:
        closed, aux = traced(_constraints.whole_mesh())
    except Exception as error:
        raise failed or error from None
    if failed is not None and not _constraints.name_any(closed.jaxpr, axes):
        raise failed
    return _constraints.Dropper(axes).jaxpr(closed), aux


def _typed(values: Any, mesh: AbstractMesh) -> Any:
    """Shapes of the type that values computed on `mesh` have: libraries compare the two."""
    whole = NamedSharding(mesh, PartitionSpec())

    def typed(v: Any) -> jax.ShapeDtypeStruct:
        weak = getattr(v, "weak_type", False)
        return jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=whole, weak_type=weak)

    return jax.tree.map(typed, values)


def _held_arrays(
    loss_fn: Callable[..., Any],
) -> tuple[list[jax.Array], Callable[[Sequence[Any]], Callable[..., Any]]]:
    """The arrays that a `jax.tree_util.Partial` holds, and what it is with others in their place.

    Closed over, they would keep the type that they have outside of the mesh's devices.
    """
    if not isinstance(loss_fn, jax.tree_util.Partial):
        return [], lambda _: loss_fn
    leaves, treedef = jax.tree.flatten(loss_fn)
    is_array = [isinstance(leaf, jax.Array) for leaf in leaves]

    def holding(arrays: Sequence[Any]) -> Callable[..., Any]:
        found = iter(arrays)
        pairs = zip(leaves, is_array, strict=True)
        return treedef.unflatten([next(found) if a else leaf for leaf, a in pairs])

    return [leaf for leaf, a in zip(leaves, is_array, strict=True) if a], holding


def split_aux(result: Any, has_aux: bool | None) -> tuple[Any, Any]:
    is_pair = isinstance(result, tuple) and len(result) == 2
    if has_aux is None:
        has_aux = is_pair
    if not has_aux:
        return result, None
    if not is_pair:
        raise TypeError(
            f"with has_aux=True the loss must return (loss, aux), got {type(result).__name__}. "
            "Return a pair, or leave has_aux out."
        )
    return result


def check_loss(loss: Any) -> None:
    if isinstance(loss, tuple):
        raise TypeError(
            f"the loss returned a tuple of {len(loss)}. Return a scalar, or (loss, aux) with "
            "everything else in aux (value_and_grad wants has_aux=True then)."
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


def check_aux(aux: Any, mutable: Sequence[str]) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(aux)[0]:
        dtype = getattr(leaf, "dtype", None)
        is_key = jnp.issubdtype(dtype or int, jax.dtypes.extended)
        numeric = dtype is not None and (not is_key or _fields.is_field(path, mutable))
        if not numeric and not isinstance(leaf, int | float | complex):
            name = jax.tree_util.keystr(path)
            raise TypeError(
                f"aux{name} is a {type(leaf).__name__}{f' of {dtype}' if dtype else ''}, not a "
                "numeric array: aux is averaged over the devices. Leave it out of aux."
            )
