"""Updates of whole matrices, each by one device: for Muon, SOAP, Shampoo and their like.

Gains: in `examples/muon.py` a step sends 18 MiB for 62, and each device computes a share of the
updates. An all-to-all brings gradients to the devices that own their matrices, and another brings
updates back. State between steps rests with the owners. Costs 90 lines.
"""

import collections
import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from zerojax._declared import checked
from zerojax._specs import Axes, axes_size, entry_over, padded
from zerojax._state.state import leaves_with_paths
from zerojax._types import PyTree

_OWNERS = contextvars.ContextVar[tuple[Mesh | AbstractMesh, Axes]](
    "owners", default=(AbstractMesh((), ()), ())
)


class MatrixState(NamedTuple):
    """The state of `by_matrix`: that of all matrices of a dtype and shape, under these.

    The first dimension of its arrays counts matrices. Scalars that all of these share, such as a
    number of steps, have none.
    """

    stacks: dict[str, PyTree]


@contextlib.contextmanager
def owned_by(mesh: Mesh | AbstractMesh, axes: Axes) -> Iterator[None]:
    """Has the devices along these axes own matrices, in updates that are traced inside.

    Where the axes are Explicit, `by_matrix` has an empty state: `owner_spec` says where it rests.
    """
    token = _OWNERS.set((mesh, axes))
    try:
        yield
    finally:
        _OWNERS.reset(token)


def owners_of(state: PyTree) -> tuple[Mesh | AbstractMesh, Axes] | None:
    """Returns what an update of this state does otherwise than elsewhere: who owns its matrices."""
    nodes = jax.tree.leaves(state, is_leaf=is_of_matrices)
    return _OWNERS.get() if any(map(is_of_matrices, nodes)) else None


def is_of_matrices(node: PyTree) -> bool:
    return isinstance(node, MatrixState)


def owner_spec(shape: Sequence[int], axes: Axes) -> PartitionSpec:
    """Returns the spec of a stack of whole matrices, or of a scalar, in a `MatrixState`."""
    return PartitionSpec(entry_over(axes)) if shape else PartitionSpec()


@checked
def by_matrix(tx: optax.GradientTransformation, dims: int = 2) -> optax.GradientTransformation:
    """Runs `tx` on each matrix alone; a step runs it on the device that owns the matrix.

    A parameter of more than `dims` dimensions is a stack of matrices: the layers of a scan. `tx`
    sees one matrix, and its state may have arrays of any shape. All matrices of one shape and dtype
    are divided among the devices, and their state rests there. Give parameters of fewer dimensions
    another optimizer, by `optax.partition`. Works without zerojax too.

    Example:
        >>> tx = zerojax.manual.by_matrix(optax.contrib.scale_by_muon())
        >>> params = {"layers": jnp.ones((12, 64, 16)), "last": jnp.ones((64, 16))}
        >>> print(tx.init(params).stacks["float32_64x16"].mu.shape)
        (13, 64, 16)
    """

    def init(params: PyTree) -> MatrixState:
        if _only_types():
            return MatrixState({})
        leaves, stacks = jax.tree.leaves(params), {}
        for name, places in _groups(params, dims).items():
            stack = _stacked([leaves[k] for k in places], dims)
            stacks[name] = jax.vmap(tx.init, out_axes=_axes(tx, stack))(stack)
        return MatrixState(stacks)

    def update(
        updates: PyTree, state: MatrixState, params: PyTree = None
    ) -> tuple[PyTree, MatrixState]:
        if params is None:
            raise ValueError("by_matrix needs params: call update(grads, state, params).")
        if _only_types():
            return updates, state
        weights, treedef = jax.tree.flatten(params)
        new, stacks = treedef.flatten_up_to(updates), {}
        for name, places in _groups(params, dims).items():
            grads, old = (_stacked([xs[k] for k in places], dims) for xs in (new, weights))
            stack, stacks[name] = _by_owners(tx.update, grads, state.stacks[name], old)
            start = 0
            for k in places:
                count = math.prod(weights[k].shape[:-dims])
                new[k] = stack[start : start + count].reshape(weights[k].shape)
                start += count
        return treedef.unflatten(new), MatrixState(stacks)

    return optax.GradientTransformation(init, update)


def _only_types() -> bool:
    return AxisType.Explicit in _OWNERS.get()[0].axis_types


def _groups(params: PyTree, dims: int) -> dict[str, list[int]]:
    """Returns the positions of the parameters whose matrices have a dtype and shape, by these."""
    groups = collections.defaultdict[str, list[int]](list)
    for place, leaf in enumerate(leaves_with_paths(params)):
        shape = leaf.value.shape
        if len(shape) < dims:
            raise ValueError(
                f"by_matrix(tx, dims={dims}) got the parameter {leaf.name} of shape {shape}. Give "
                "it another optimizer: optax.partition({'matrix': zerojax.manual.by_matrix(tx), "
                "'other': optax.adam(1e-3)}, labels)."
            )
        groups[f"{leaf.value.dtype}_{'x'.join(map(str, shape[-dims:]))}"].append(place)
    return groups


def _stacked(leaves: Sequence[Array], dims: int) -> Array:
    return jnp.concatenate([x.reshape(-1, *x.shape[x.ndim - dims :]) for x in leaves])


def _is_stack(value: Array) -> int | None:
    return 0 if value.shape else None


def _axes(tx: optax.GradientTransformation, stack: Array) -> PyTree:
    """Returns, for each array of a state, the dimension that counts matrices.

    Matrices share scalars (None), unless some scalar depends on a matrix.
    """
    state = jax.eval_shape(tx.init, jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype))
    axes = jax.tree.map(_is_stack, state)

    def both(stack: Array) -> PyTree:
        state = jax.vmap(tx.init, out_axes=axes)(stack)
        return jax.vmap(tx.update, (0, axes, 0), (0, axes))(stack, state, stack)

    try:
        jax.eval_shape(both, stack)
    except ValueError:  # a scalar depends on a matrix; what else is wrong raises again
        return 0
    return axes


def _by_owners(
    update: Callable[..., tuple[Array, PyTree]], grads: Array, state: PyTree, params: Array
) -> tuple[Array, PyTree]:
    """Returns the updates of a stack of matrices and their new state."""
    axes, (mesh, names) = jax.tree.map(_is_stack, state), _OWNERS.get()
    run = jax.vmap(update, (0, axes, 0), (0, axes))
    if not names:
        return run(grads, state, params)
    size, shape = axes_size(mesh, names), grads.shape
    # As a plan shards a parameter: by the dimension that the devices divide, or almost.
    dim = min(range(1, len(shape)), key=lambda dim: padded(shape[dim], size) / shape[dim])
    exchanged = functools.partial(lax.all_to_all, axis_name=names, tiled=True)

    def filled(value: Array, dim: int = 0) -> Array:
        counts = [0] * value.ndim
        counts[dim] = -value.shape[dim] % size
        return jnp.pad(value, [(0, count) for count in counts])

    def whole(parts: Array) -> Array:
        stack = exchanged(parts, split_axis=0, concat_axis=dim)
        return lax.slice_in_dim(stack, 0, shape[dim], axis=dim)

    def per_device(grads: Array, state: PyTree, params: Array) -> tuple[Array, PyTree]:
        new, state = run(whole(grads), state, whole(params))
        return exchanged(filled(new, dim), split_axis=dim, concat_axis=0), state

    parts = [filled(filled(x), dim) for x in (grads, params)]
    state = jax.tree.map(lambda x: filled(x) if x.shape else x, state)
    spec = PartitionSpec(*[None] * dim, entry_over(names))
    specs = jax.tree.map(lambda x: owner_spec(x.shape, names), state)
    new, state = jax.shard_map(
        per_device,
        mesh=mesh,
        in_specs=(spec, specs, spec),
        out_specs=(spec, specs),
        check_vma=False,
    )(parts[0], state, parts[1])
    state = jax.tree.map(lambda x: x[: shape[0]] if x.shape else x, state)
    return lax.slice(new, [0] * len(shape), shape), state
