"""Updates of whole matrices, each by one device: for Muon, SOAP, Shampoo and their like.

Gains: in `examples/muon.py` a step sends 17.5 MiB for 62, and each device computes a share of the
updates. An all-to-all brings gradients to the devices that own their matrices, and another brings
updates back. State between steps rests with the owners. Costs 110 lines.
"""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.sharding import PartitionSpec

from zerojax._axis_types import NOBODY, OWNERS, Owners
from zerojax._declared import checked
from zerojax._specs import Axes, axes_size, entry_over, padded
from zerojax._state.hints import layer_dims
from zerojax._state.state import leaves_with_paths
from zerojax._types import PyTree


class MatrixState(NamedTuple):
    """The state of `by_matrix`: that of all matrices of a dtype and shape, under these.

    The first dimension of its arrays counts matrices. Scalars that all of these share, such as a
    number of steps, have none.
    """

    stacks: dict[str, PyTree]


def owners_of(state: PyTree) -> Owners | None:
    """Returns what an update of this state does otherwise than elsewhere: who owns its matrices."""
    return OWNERS.get() if has_matrices(state) else None


def is_of_matrices(node: PyTree) -> bool:
    return isinstance(node, MatrixState)


def has_matrices(state: PyTree) -> bool:
    return any(map(is_of_matrices, jax.tree.leaves(state, is_leaf=is_of_matrices)))


def check_no_moments(state: PyTree, dtype: object) -> None:
    """Raises where moments would stay wide silently: they follow no parameter."""
    if has_matrices(state):
        narrowed = f"zerojax.manual.narrow_moments(tx, {str(dtype)!r})"
        raise ValueError(
            f"moments={str(dtype)!r} narrows moments that follow a parameter, and the optimizer "
            f"has those of by_matrix, which follow none. Leave moments= out, use {narrowed} for "
            f"each optimizer, and inside here: zerojax.manual.by_matrix({narrowed})."
        )


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
        if OWNERS.get() is None:
            return MatrixState({})
        leaves, stacks = jax.tree.leaves(params), {}
        for name, places in _groups(params, dims).items():
            stack = _stacked(leaves, places, dims)
            stacks[name] = jax.vmap(tx.init, out_axes=_axes(tx, stack))(stack)
        return MatrixState(stacks)

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, MatrixState]:
        if params is None:
            raise ValueError("by_matrix needs params: call update(grads, state, params).")
        if OWNERS.get() is None:
            return updates, state
        weights, treedef = jax.tree.flatten(params)
        new, stacks = treedef.flatten_up_to(updates), {}
        for name, places in _groups(params, dims).items():
            grads, old = (_stacked(leaves, places, dims) for leaves in (new, weights))
            done, stacks[name] = _by_owners(tx.update, grads, state.stacks[name], old)
            counts = [weights[k].size // old[0].size for k in places]
            for k, part in zip(places, lax.split(done, counts), strict=True):
                new[k] = part.reshape(weights[k].shape)
        return treedef.unflatten(new), MatrixState(stacks)

    return optax.GradientTransformation(init, update)


def _groups(params: PyTree, dims: int) -> dict[str, list[int]]:
    """Returns the positions of the parameters whose matrices have a dtype and shape, by these."""
    groups, stacks = collections.defaultdict[str, list[int]](list), layer_dims(params, None)
    for place, leaf in enumerate(leaves_with_paths(params)):
        shape, dtype = leaf.value.shape, leaf.value.dtype
        if len(shape) - stacks.get(leaf.path, 0) < dims:
            of = ", a stack of layers, it seems (else give it a by_matrix of its own)"
            raise ValueError(
                f"by_matrix(tx, dims={dims}) got the parameter {leaf.name} of shape "
                f"{shape}{of * (len(shape) >= dims)}. Give it another optimizer: "
                "optax.partition({'matrix': zerojax.manual.by_matrix(tx), 'other': "
                "optax.adam(1e-3)}, labels)."
            )
        groups[f"{dtype}_{'x'.join(map(str, shape[-dims:]))}"].append(place)
    return groups


def _stacked(leaves: Sequence[Array], places: Sequence[int], dims: int) -> Array:
    return jnp.concatenate([leaves[k].reshape(-1, *leaves[k].shape[-dims:]) for k in places])


def _is_stack(value: Array) -> int | None:
    return 0 if value.shape else None


def _axes(tx: optax.GradientTransformation, stack: Array) -> PyTree:
    """Returns, for each array of a state, the dimension that counts matrices.

    Matrices share scalars (None), unless some scalar depends on a matrix.
    """
    axes = jax.tree.map(_is_stack, jax.eval_shape(tx.init, jax.typeof(stack[0])))
    init, update = jax.vmap(tx.init, 0, axes), jax.vmap(tx.update, (0, axes, 0), (0, axes))
    try:
        jax.eval_shape(lambda stack: update(stack, init(stack), stack), stack)
    except ValueError:  # of `jax.vmap`; what else is wrong raises again
        return 0
    return axes


def _by_owners(
    update: Callable[..., PyTree], grads: Array, state: PyTree, params: Array
) -> tuple[Array, PyTree]:
    """Returns the updates of a stack of matrices and their new state."""
    axes, (mesh, names) = jax.tree.map(_is_stack, state), OWNERS.get() or NOBODY
    run = jax.vmap(update, (0, axes, 0), (0, axes))
    if not names:
        return run(grads, state, params)
    size, shape = axes_size(mesh, names), grads.shape
    # As a plan shards a parameter: by the dimension that the devices divide, or almost.
    dim = min(range(1, len(shape)), key=lambda dim: padded(shape[dim], size) / shape[dim])
    exchanged = functools.partial(lax.all_to_all, axis_name=names, tiled=True)

    def filled(value: Array, at: int = 0) -> Array:
        counts = (-n % size if k == at else 0 for k, n in enumerate(value.shape))
        return jnp.pad(value, [(0, count) for count in counts]) if value.shape else value

    def per_device(grads: Array, state: PyTree, params: Array) -> tuple[Array, PyTree]:
        whole = (exchanged(x, split_axis=0, concat_axis=dim) for x in (grads, params))
        grads, params = (lax.slice_in_dim(x, 0, shape[dim], axis=dim) for x in whole)
        new, state = run(grads, state, params)
        return exchanged(filled(new, dim), split_axis=dim, concat_axis=0), state

    grads, state, params = jax.tree.map(filled, (grads, state, params))
    args = filled(grads, dim), state, filled(params, dim)
    parts = PartitionSpec(*[None] * dim, entry_over(names))
    specs = parts, jax.tree.map(lambda x: owner_spec(x.shape, names), state), parts
    sharded = {"mesh": mesh, "in_specs": specs, "out_specs": specs[:2], "check_vma": False}
    new, state = jax.shard_map(per_device, **sharded)(*args)
    state = jax.tree.map(lambda x: x[: shape[0]] if x.shape else x, state)
    return lax.slice(new, [0] * len(shape), shape), state
