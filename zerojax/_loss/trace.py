"""Traces a user's loss with the shapes that one device sees, and checks its results.

[Note: the mesh that a loss sees]
A model may ask which mesh is set, and constrain arrays over its axes; Flax does so for every
annotated weight. No single mesh suits all models, so `trace_loss` tries these:

1. The mesh of one device's code, which a loss is: the axes that the batch is split over are manual.
   A constraint over one of those is an error, because nothing is left to split.
2. The mesh of all devices' code, whose axes are all automatic. It also has the axes that
   annotations name and the user's mesh lacks, with size 1: what is sharded over them is whole.
3. The user's own mesh, if it has Explicit axes, which `jax.sharding.reshard` and `out_sharding=`
   may name. Those of the batch have size 1, because the loss sees a part of the batch.
4. No mesh, where Flax constrains nothing, as in a program that sets none. A constraint may fit no
   mesh: `nn.DenseGeneral` constrains a flattened kernel by the names of all its dimensions. The
   plan has read the annotations of the state anyway.

The pass in `_passes/constraints.py` makes a loss of 2 to 4 that of one device.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import flax.errors
import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.typing import DTypeLike

from zerojax import _compat
from zerojax._axis_types import NO_MESH
from zerojax._jaxprs import Eqn, unclosed
from zerojax._loss import fields as _fields
from zerojax._passes import codes as _codes, constraints as _constraints, tables as _tables
from zerojax._passes.constraints import is_constraint, named_axes
from zerojax._passes.loss import Loss
from zerojax._passes.means import TOKENS
from zerojax._passes.one_device import as_one_device, seeing, typed
from zerojax._specs import beyond
from zerojax._state.hints import axes_of_rules
from zerojax._state.packed import codings_of
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
    explicit: AbstractMesh | None = None,
) -> TracedLoss:
    """Traces `loss_fn(*args)` as code of one device of the mesh. `args` are shapes.

    Annotations may name the axes in `absent`, which the mesh lacks: what is sharded over them is
    whole. The loss may be written for the axes of `explicit`; shapes then have their sharding over
    these. Where `has_aux` is None, a pair is taken for a loss and its aux. What the loss closes
    over, tracers included, becomes an input, so that `shard_map` never sees a closure.
    """
    # If the loss closed over the arrays of a `jax.tree_util.Partial`, they would keep the types
    # that they have outside of `shard_map`.
    leaves, treedef = jax.tree.flatten(loss_fn)  # a plain function is one leaf
    captured = [leaf for leaf in leaves if isinstance(leaf, Array)]
    codings = codings_of(args)
    is_quantized = any(codings)
    if is_quantized:
        args = _codes.as_weights(args)

    def checked(args: Sequence[PyTree], captured: Sequence[Array]) -> tuple[Array, PyTree]:
        arrays = iter(captured)
        loss_fn = treedef.unflatten([next(arrays) if isinstance(x, Array) else x for x in leaves])
        args = _codes.without_nodes(args) if is_quantized else args
        loss, aux = split_aux(_call(loss_fn, args, axes), has_aux)
        _check_scalar(loss)
        _check_aux(aux, mutable)
        return jnp.asarray(loss), jax.tree.map(jnp.asarray, aux)

    def opened() -> TracedLoss:
        here = jax.sharding.get_abstract_mesh()
        outer = here.update_axis_types(dict.fromkeys(here.manual_axes, AxisType.Auto))

        def traced(mesh: AbstractMesh) -> tuple[ClosedJaxpr, PyTree]:
            inputs = typed(args, mesh), typed(captured, mesh)
            closed, (_, aux) = jax.make_jaxpr(checked, return_shape=True)(*inputs)
            if mesh is here and _has_more(closed, here, axes):
                # JAX traces such a constraint, and cannot run it.
                raise ValueError(f"with_sharding_constraint over one of {axes}")
            return closed, aux

        meshes = [here, with_absent(outer, absent), *filter(None, [explicit]), NO_MESH]
        (closed, aux), seen, failed = traced_where_it_can_be(traced, meshes, axes)
        loss = Loss(unclosed(closed)[0])
        if seen is not here:
            if not any(map(_is_of_mesh, failed)) and not _has_more(closed, here, axes):
                raise failed[0]  # for another reason than a constraint
            loss = _constraints.dropped(loss, axes, outer, seen)
        # nnx.scan returns the weights it was given, layer by layer; what is not read goes first.
        loss = dataclasses.replace(loss, jaxpr=_compat.without_unread(loss.jaxpr))
        if is_quantized:
            loss = _codes.read_as_codes(loss, codings)
        if tables := _tables.narrow_inputs(loss):
            loss = _tables.summed_wide(loss, tables)
        return TracedLoss(loss.jaxpr, [*captured, *closed.consts], aux, closed.consts)

    return as_one_device(opened, mesh, axes)


@contextlib.contextmanager
def explained_dtypes(narrow: DTypeLike | None) -> Iterator[None]:
    """Adds to an error of a loop or branch whose dtypes differ that one comes from `precision=`."""
    try:
        yield
    except TypeError as error:
        differ = _compat.said(error, _compat.OTHER_DTYPES)
        if narrow is not None and differ and _compat.said(error, str(jnp.dtype(narrow))):
            error.add_note(
                f"precision= gives the loss its parameters in {jnp.dtype(narrow)} (with compute=, "
                "the batch too), and what the loss makes itself, such as the first carry of a "
                "loop, is float32. Make it in the dtype of what it meets, jnp.zeros(shape, "
                "x.dtype), or cast what a turn of the loop returns, new.astype(carry.dtype)."
            )
        raise


def _call(loss_fn: Callable[..., PyTree], args: Sequence[PyTree], axes: tuple[str, ...]) -> PyTree:
    """Returns `loss_fn(*args)`. Where that names another mesh axis, or changes an object, the error
    says what to do."""
    try:
        return loss_fn(*args)
    except NameError as error:
        unbound = _compat.said(error, _compat.UNBOUND_AXIS)
        if unbound is None:
            raise
        axes = beyond(axes, (TOKENS.get(),))
        name = repr(axes[0] if len(axes) == 1 else axes)
        raise NameError(
            f"the loss communicates over the axis {unbound[1]!r}, and its batch is split over "
            f"{name}. Name that: axis_name={name} in BatchNorm, jax.lax.pmean(x, {name}). Or call "
            f"the axis of the mesh {unbound[1]!r}; to a forecast, pass axis={unbound[1]!r}."
        ) from error
    except flax.errors.TraceContextError as error:
        error.add_note(
            "A loss is traced, and can change no object of Flax nnx but the model that a step of "
            "zerojax.nnx passes it. Have it return what metrics need, return loss, logits, and "
            "update them after the step: metrics.update(loss=values['loss'], "
            "logits=values['aux']). A nnx.Rngs goes after the batch: step(model, optimizer, batch, "
            "rngs)."
        )
        raise


def split_aux(result: PyTree, has_aux: bool | None) -> tuple[PyTree, PyTree]:
    """Takes a loss's result apart into the loss and its aux, which is None where it has none."""
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
    if not hasattr(loss, "shape") and not isinstance(loss, int | float):
        kind = f"a tuple of {len(loss)}" if isinstance(loss, tuple) else type(loss).__name__
        raise TypeError(
            f"the loss must be a scalar array, got {kind}. Return a scalar, or (loss, aux) with "
            "everything else in aux (value_and_grad then needs has_aux=True)."
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
    for path, leaf in jax.tree_util.tree_leaves_with_path(aux):
        dtype = getattr(leaf, "dtype", None)
        numeric = dtype is not None and (not is_key(leaf) or _fields.is_field(path, mutable))
        if not numeric and not isinstance(leaf, int | float | complex):
            name = jax.tree_util.keystr(path)
            raise TypeError(
                f"aux{name} is a {type(leaf).__name__}{f' of {dtype}' if dtype else ''}, not a "
                "numeric array: aux is averaged over the devices. Leave it out of aux."
            )


# -- sharding constraints of the loss


def traced_where_it_can_be(
    trace: Callable[[AbstractMesh], T], meshes: Sequence[AbstractMesh], axes: tuple[str, ...]
) -> tuple[T, AbstractMesh, list[Exception]]:
    """Returns `trace(mesh)` for the first mesh where it raises nothing, that mesh, and the errors.

    The code that is traced sees the mesh. The second mesh is tried after any error that a
    constraint may lead to, a later one after an error that speaks of a mesh. Where all fail, the
    error that says most is raised.
    """
    failed: list[Exception] = []
    for mesh in meshes:
        try:
            with seeing(mesh, axes):
                return trace(mesh), mesh, failed
        except Exception as error:
            if not failed and not isinstance(error, TypeError | ValueError):
                raise
            failed.append(error)
            if len(failed) > 1 and not _is_of_mesh(error):
                break
    # Errors of a mesh that is not the user's say little, and that of no mesh nothing. Of those that
    # have axes of the user's types, the last has most: what it refuses, JAX itself would refuse.
    errors = [error for error in failed if not _is_of_mesh(error)]
    errors += [error for error in failed[1:-1] if not _compat.said(error, _compat.NOT_EXPLICIT)]
    errors += [*failed[1:-1][::-1], *failed]
    raise _explained(errors[0], meshes[0]) from errors[0].__cause__


def _is_of_mesh(error: Exception) -> bool:
    return _compat.said(error, _compat.OF_SHARDINGS) is not None


def _explained(error: Exception, mesh: AbstractMesh) -> Exception:
    """Returns an error with a remedy for that of a constraint over an axis that the mesh lacks."""
    unknown = _compat.said(error, _compat.UNKNOWN_AXIS)
    if unknown is None:
        return error
    sizes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    return ValueError(
        f"the loss constrains an array to {unknown[2]}, and the mesh ({sizes}) has no axis "
        f"{unknown[1]!r}. Correct the name, or place the state on a mesh that has it, if only with "
        f"size 1: mesh=zerojax.mesh({sizes}, {unknown[1]}=1)."
    )


def with_absent(mesh: AbstractMesh, absent: Iterable[str]) -> AbstractMesh:
    """Returns a mesh of Auto axes, with those in `absent` and in Flax's rules in force added with
    size 1."""
    added = sorted({*absent, *axes_of_rules()} - {*mesh.axis_names})
    sizes = {**mesh.shape, **dict.fromkeys(added, 1)}
    types = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types) if added else mesh


def _has_more(closed: ClosedJaxpr, mesh: AbstractMesh, axes: tuple[str, ...]) -> bool:
    """Whether a constraint, at any depth, names one of the axes, or one that the mesh lacks."""
    constraints = filter(is_constraint, _compat.every_eqn(closed.jaxpr))
    named = set().union(*(named_axes(Eqn(eqn).sharding.spec) for eqn in constraints))
    return not named <= {*mesh.axis_names} - {*axes}
