"""Parameters on other placements than a state's, to be used many times.

Gains: a decode loop on resharded parameters sends nothing; on those of a stage 3 state, XLA gathers
every weight for every token. Costs 90 lines of code, and the memory of the parameters in their new
places; while they move, that of the largest leaf again.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from zerojax import _compat
from zerojax._axis_types import auto_axes, auto_mesh, computed_with, typed
from zerojax._declared import checked
from zerojax._kernel.places import Placement
from zerojax._plan.padding import padded_param_shapes, unpadded
from zerojax._plan.plan import Plan
from zerojax._plan.precision import decoded_in
from zerojax._run import agreement as _agreement
from zerojax._specs import as_names, axes_size, beyond, names_in
from zerojax._state import refusals as _refusals, state as _state
from zerojax._state.state import Leaf
from zerojax._types import PyTree, Shape
from zerojax._wire import codecs as _codecs


@checked
def reshard(
    state: PyTree,
    over: str | Sequence[str] = (),
    *,
    overrides: Mapping[str, PartitionSpec] | None = None,
    dtype: DTypeLike | None = None,
    plan: Plan | None = None,
) -> PyTree:
    """Returns the parameters on other placements, by default whole on each device.

    For code that uses them many times, such as a loop that generates text: on the parameters of a
    stage 3 state, every call of the model gathers all of them again. One compiled program moves
    them, and drops padding. The results are arrays of their own, and outlive the state: train on,
    and reshard again when you want the new weights. Every process calls it.

    Arguments:
        state: a placed state, or its parameters.
        over: the mesh axes that go on sharding what they shard in the state, such as `"gpu"` of
            `zerojax.mesh(node=2, gpu=4)`, or a `tensor` axis of your own.
        overrides: `{path regex: PartitionSpec}` for parameters that go elsewhere: for tensor
            parallelism over the same devices, say. Paths are such as `dense/kernel`.
        dtype: cast floats to this dtype, on the shards, before they travel. Codes stay as they are,
            and `zerojax.manual.dequantize` makes weights of this dtype of them.
        plan: the plan, for parameters without their state, and for states that do not carry an
            optimizer (tuples, dicts), if some of these are padded.

    Example:
        >>> state = zerojax.shard_train_state({"params": {"w": jnp.ones((64, 16))}}, stage=3)
        >>> params = zerojax.reshard(state, dtype="bfloat16")
        >>> print(params["w"].dtype, params["w"].addressable_shards[0].data.shape)
        bfloat16 (64, 16)
    """
    _refusals.check_alive(state)
    check_float(dtype)
    params = _state.params_in(state)
    leaves, shapes = _state.leaves_with_paths(params), padded_param_shapes(params, state, plan)
    if not leaves:
        raise _state.no_parameters(state)
    check_placed({leaf.name: leaf.value for leaf in leaves}, "zerojax.reshard")
    patterns = {} if overrides is None else overrides
    _state.check_patterns(patterns, [leaf.name for leaf in leaves], "overrides=")
    moves = []
    for leaf in leaves:
        shape: Shape = shapes.get(leaf.name) or leaf.value.shape
        given = (s for p, s in patterns.items() if _state.finds(p, leaf.name, "overrides="))
        spec = next(given, None)
        spec = _spec_over(leaf, over) if spec is None else spec
        _check_divides(leaf, shape, spec)
        is_cast = dtype is not None and jnp.issubdtype(leaf.value.dtype, jnp.floating)
        new = jnp.dtype(dtype) if is_cast else leaf.value.dtype
        moves.append((leaf.value.sharding, spec, shape, new))
    shown = [f"{leaf.name} {move[3]} {move[1]}" for leaf, move in zip(leaves, moves, strict=True)]
    said = {"the places": "\n".join(shown)}
    _agreement.agree("zerojax.reshard", lambda: said, leaves[0].value.sharding.mesh)
    new = _mover(tuple(moves))([leaf.value for leaf in leaves])
    new = jax.tree.structure(params).unflatten(new)
    return new if dtype is None else decoded_in(new, dtype)


def check_float(dtype: DTypeLike | None) -> None:
    if dtype is not None and _codecs.float_dtype(dtype) is None:
        raise TypeError(f"dtype={dtype!r} is not a dtype of floats. Pass 'bfloat16', say, or None.")


def check_placed(values: Mapping[str, PyTree], call: str) -> None:
    """Raises for a parameter that is not on a mesh."""
    for path, value in values.items():
        if not isinstance(getattr(value, "sharding", None), NamedSharding):
            what = "on no mesh" if isinstance(value, Array) else f"a {type(value).__name__}"
            raise TypeError(
                f"{path or 'the state'} is {what}, and {call} takes what zerojax has placed. Pass "
                "a state from zerojax.shard_train_state, or its parameters."
            )


def _spec_over(leaf: Leaf, over: str | Sequence[str]) -> PartitionSpec:
    sharding: NamedSharding = leaf.value.sharding
    axes = as_names(over)
    if axes is None or beyond(axes, sharding.mesh.axis_names):
        raise ValueError(
            f"over={over!r} must name axes of the mesh, which has {sharding.mesh.axis_names}. Pass "
            "one of these, or several; () has each parameter whole on each device."
        )
    return Placement(sharding.spec).within(axes)


def _check_divides(leaf: Leaf, shape: Shape, spec: PartitionSpec) -> None:
    """Raises for a place where an array of this shape, without padding, cannot be."""
    mesh = leaf.value.sharding.mesh
    whole = f"overrides={{{leaf.name!r}: jax.sharding.PartitionSpec()}} has it whole"
    if not isinstance(spec, PartitionSpec) or PartitionSpec.UNCONSTRAINED in tuple(spec):
        raise TypeError(
            f"overrides= puts {leaf.name} on {spec!r}; pass a jax.sharding.PartitionSpec of mesh "
            f"axes and None: {whole}."
        )
    unknown = beyond(tuple(sorted(names_in(spec))), mesh.axis_names)
    if unknown or len(spec) > len(shape):
        what = f"the mesh has no axis {unknown[0]!r}" if unknown else "it has fewer dimensions"
        raise ValueError(
            f"overrides= puts {leaf.name} (shape {shape}) on {spec}, but {what}. The axes are "
            f"{mesh.axis_names}; {whole}."
        )
    for dim, entry in enumerate(spec):
        count = axes_size(mesh, sorted(names_in([entry])))
        if shape[dim] % count:
            raise ValueError(
                f"{leaf.name} (shape {shape}) cannot be on {spec}: {count} does not divide "
                f"dimension {dim}, and it leaves the state without padding. {whole}."
            )


Move = tuple[NamedSharding, PartitionSpec, Shape, np.dtype]  # from where, to where, as what


@_compat.device_cache
def _mover(moves: tuple[Move, ...]) -> jax.stages.Wrapped:
    """Returns the program that moves arrays."""
    places = [old.update(spec=spec, memory_kind=None) for old, spec, _, _ in moves]

    def move(given: list[Array]) -> list[Array]:
        new = []
        for value, (old, _, shape, dtype), place in zip(given, moves, places, strict=True):
            value = _compat.fetched(computed_with(value))
            if value.dtype != dtype:  # on the shards: XLA may not gather first
                here = NamedSharding(auto_mesh(old), old.spec)
                value = jax.lax.with_sharding_constraint(value.astype(dtype), here)
            new.append(typed(unpadded(value, shape), place))
        return new

    return jax.jit(auto_axes()(move), out_shardings=places)
