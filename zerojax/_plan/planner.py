"""Makes a plan from shapes: decides how each leaf of a state is sharded, or says why it is not."""

import dataclasses
import functools
import itertools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from zerojax._declared import takes
from zerojax._kernel import places as _places
from zerojax._kernel.places import (
    Axes,
    Groups,
    LeafPlan,
    Placement,
    by_layer,
    chosen_groups,
    leaf_at,
)
from zerojax._kernel.travel import names_in
from zerojax._plan import mesh as _mesh, optimizer as _optimizer
from zerojax._plan.padding import padded_shapes, replaced
from zerojax._plan.plan import Plan
from zerojax._plan.plan_options import PlanOptions, StateOptions
from zerojax._plan.precision import Precision, stored_with
from zerojax._state import carried as _carried, refusals as _refusals, state as _state
from zerojax._state.hints import is_stack, layer_dims, own_axes
from zerojax._state.state import OPT_STATE, PARAMS, Leaf, state_of
from zerojax._types import PyTree, Shape, is_key
from zerojax._update import offload as _offload
from zerojax._update.offload import PINNED, Offload, as_offload
from zerojax._warn import warn
from zerojax._wire import codecs as _codecs

# Warn when more than this share of the parameter bytes, and at least so many, stay replicated.
REPLICATED_SHARE, REPLICATED_BYTES = 0.02, 2**20
FROZEN = "frozen: nothing updates it"

Reasoned = tuple[PartitionSpec, str | None]  # the spec that a leaf can have, or why it has none


@takes(StateOptions)
def plan(state_or_fn: PyTree, options: StateOptions) -> Plan:
    """Decides where each leaf of a state lives. Moves nothing.

    Arguments:
        state_or_fn: a flax `TrainState`, a tuple `(params, opt_state)`, a dict or dataclass with
            those names, or a function without arguments that makes one.
        {options}

    Returns:
        The plan: printable, hashable, made of shapes only.

    Example:
        >>> params = {"w": jax.ShapeDtypeStruct((1024, 8), "float32")}
        >>> plan = zerojax.plan({"params": params, "opt_state": ()}, stage=3)
        >>> print(plan.leaves[0].path, "is sharded along dimension", plan.leaves[0].dim)
        params/w is sharded along dimension 0
    """
    precision = options.precision
    mesh, axes = _devices(options)
    groups = chosen_groups(options.stage, axes, {} if options.groups is None else options.groups)
    patterns = {} if options.overrides is None else options.overrides
    widest, least = groups.opt_state or axes, options.min_shard_size
    rule = _places.Rule(mesh, widest, patterns, least, options.pad)
    state, leaves = _as_stored(state_or_fn, precision)
    tx = _state.get_tx(state) if options.tx is None else options.tx
    stacks = layer_dims(_state.get_params(state), options.stacked)
    names = [leaf.name for leaf in leaves if leaf.kind == PARAMS]
    _state.check_patterns(rule.overrides, names, "overrides=")
    gathered = _codecs.patterns_of(precision and precision.gather)
    _state.check_patterns(gathered, names, "Precision(gather=)")
    own = own_axes(state, axes, mesh.axis_names)
    specs = _shard_specs(state, leaves, [spec for spec, _ in own], rule, stacks, tx)
    has_update = tx is not None or hasattr(state, "apply_gradients")
    update = _optimizer.update_of(state, tx) if has_update else None
    params = [leaf.path for leaf in leaves if leaf.kind == PARAMS]
    are_frozen = [False] if update is None else _optimizer.frozen_params(state, update)
    frozen = set(itertools.compress(params, are_frozen))
    over = groups if rule.size > 1 else Groups()
    planned = [
        _leaf_plan(leaf, specs[leaf.path], over, rule, leaf.path in frozen, stacks, absent)
        for leaf, (_, absent) in zip(leaves, own, strict=True)
    ]
    placed = tuple(_offloaded(planned, as_offload(options.offload), mesh))
    treedef = jax.tree.structure(state)
    result = Plan(groups.stage, mesh, axes, over, placed, treedef, precision, update)
    _check_worth(result)
    return result


def _devices(options: PlanOptions) -> tuple[Mesh, Axes]:
    """Returns the mesh, and the axes that the batch is split over: with groups, all of them."""
    axis = options.axis
    if options.groups is not None and options.mesh is not None and axis is None:
        axis = options.mesh.axis_names
    mesh, axes = _mesh.resolve(options.mesh, axis)
    if options.mesh is None and options.stage >= 1 and mesh.devices.size == 1:
        _mesh.say_alone(mesh.devices.flat[0].platform)
    return mesh, axes


def _as_stored(state_or_fn: PyTree, precision: Precision | None) -> tuple[PyTree, list[Leaf]]:
    """Returns a state, or the shapes of one, in the dtypes of `precision`, and its leaves.

    It carries no plan.
    """
    _refusals.check_functional(state_or_fn)
    _refusals.check_state_function(state_or_fn)
    if _state.is_state_function(state_or_fn):
        state = jax.eval_shape(functools.partial(state_of, state_or_fn))
        _refusals.check_functional(state)
    else:
        state = replaced(state_or_fn, padded_shapes(state_or_fn), _struct)
    leaves = _state.leaves_of(state)
    if precision is not None and precision.stores:
        if precision.param and not precision.master and jnp.finfo(precision.param).bits < 32:
            _say_rounded(jnp.dtype(precision.param).name)
        state = stored_with(jax.tree.map(_struct, state), precision)
        leaves = _state.leaves_of(state)
    if not any(leaf.kind == PARAMS for leaf in leaves):
        raise _state.no_parameters(state)
    return _carried.without_plan(state), leaves


def _struct(value: PyTree, shape: Shape | None = None) -> jax.ShapeDtypeStruct:
    """Returns the shape of a leaf, or another one, with its sharding."""
    struct, sharding = _state.shape_dtype(value), getattr(value, "sharding", None)
    shape = struct.shape if shape is None else shape
    return jax.ShapeDtypeStruct(shape, struct.dtype, sharding=sharding)


def _leaf_plan(
    leaf: Leaf,
    spec_and_reason: Reasoned,
    groups: Groups,
    rule: _places.Rule,
    frozen: bool,
    stacks: Mapping[tuple, int],
    absent: Axes,
) -> LeafPlan:
    spec, reason = spec_and_reason
    if frozen and not groups.params:  # no optimizer state to follow, no gradient to shard
        groups, reason = Groups(), FROZEN

    is_param = leaf.kind == PARAMS
    struct = _state.shape_dtype(leaf.value)
    own = tuple(axis for axis in rule.axes if axis in names_in(spec))
    return leaf_at(
        Placement(spec, own, padding=rule.padding(struct.shape, spec)),
        groups,
        is_param=is_param,
        path=leaf.name,
        kind=leaf.kind,
        shape=tuple(struct.shape),
        dtype=struct.dtype,
        stacked=is_stack(leaf, stacks),
        reason=reason,
        frozen=frozen,
        absent=() if leaf.kind == OPT_STATE else absent,
    )


def _offloaded(leaves: list[LeafPlan], offload: Offload | None, mesh: Mesh) -> list[LeafPlan]:
    """Puts state in host memory, and notes why the rest of it stays on the devices."""
    if offload is None:
        return leaves
    found = list(leaves)
    for kind in (kind for kind in _offload.OFFLOADED if getattr(offload, kind)):
        own = [i for i, leaf in enumerate(leaves) if leaf.kind == kind and _may_leave(leaf)]
        sizes = [leaves[i].bytes_per_device(mesh) for i in own]
        layers = [leaves[i].shape[0] if by_layer(leaves[i]) else 1 for i in own]
        pieces = [size // n for size, n in zip(sizes, layers, strict=True)]
        used = sum(leaf.bytes_per_device(mesh) for leaf in found if leaf.is_on_host)
        for i, reason in zip(own, offload.stay(kind, sizes, pieces, used), strict=True):
            rest = leaves[i].rest if reason else dataclasses.replace(leaves[i].rest, memory=PINNED)
            found[i] = dataclasses.replace(leaves[i], rest=rest, stays=reason)
    _offload.warn_where_nothing_goes([leaf.is_on_host for leaf in found], offload)
    return found


def _may_leave(leaf: LeafPlan) -> bool:
    """Whether a leaf may rest in host memory: scalars would save nothing, and keys stay."""
    return bool(leaf.shape) and (leaf.kind != PARAMS or jnp.issubdtype(leaf.dtype, jnp.inexact))


def _shard_specs(
    state: PyTree,
    leaves: list[Leaf],
    bases: list[PartitionSpec],
    rule: _places.Rule,
    stacks: Mapping[tuple, int],
    tx: optax.GradientTransformation | None,
) -> dict[tuple, Reasoned]:
    """Returns how each leaf can be sharded: parameters by the rule, optimizer state with them.

    `bases` have the axes that leaves are sharded over beside ZeRO's.
    """
    pairs = list(zip(leaves, bases, strict=True))
    specs: dict[tuple, Reasoned] = {}
    for leaf, base in pairs:
        if leaf.kind == PARAMS:
            shape, layers = _state.shape_dtype(leaf.value).shape, stacks.get(leaf.path[1:], 0)
            key = (base, "a PRNG key") if is_key(leaf.value) else None
            specs[leaf.path] = key or rule(leaf.name, shape, base, layers)
    params = [(leaf, specs[leaf.path][0]) for leaf in leaves if leaf.kind == PARAMS]
    typed, why = _optimizer.typed_state(state, tx, [spec for _, spec in params], rule)
    inferred = iter(jax.tree.leaves(typed))
    for leaf, base in pairs:
        if leaf.kind == PARAMS:
            continue
        is_state, from_types = leaf.kind == OPT_STATE, None
        if is_state and typed is not None:
            followed = _optimizer.followed(leaf, params)
            from_types = _typed_spec(leaf, next(inferred), followed, rule)
        if from_types is None:
            fallback = rule if is_state else None
            spec, reason = _optimizer.from_matching_shapes(leaf, params, fallback, why)
            from_types = spec if tuple(spec) else base, reason
        specs[leaf.path] = from_types
    return specs


def _typed_spec(
    leaf: Leaf, struct: jax.ShapeDtypeStruct, followed: Reasoned | None, rule: _places.Rule
) -> Reasoned | None:
    """Returns the spec that JAX inferred for a leaf; where it has none, the parameter tells why.

    Returns None where the padding of a parameter changed more than the sharded dimension: Adafactor
    factors a matrix that is large enough.
    """
    spec = getattr(struct.sharding, "spec", PartitionSpec())
    shape = _state.shape_dtype(leaf.value).shape
    if len(struct.shape) != len(shape) or struct.shape != rule.padded_shape(shape, spec):
        return None
    if not shape:
        return PartitionSpec(), "scalar"
    if any(entry is not None for entry in spec):
        return spec, None
    reason = followed[1] if followed is not None else None
    return spec, reason or "its own dimensions carry no shard of a parameter"


@functools.cache  # once in a process
def _say_rounded(dtype: str) -> None:
    warn(
        f"Precision(param={dtype!r}) without master= rounds parameters after each update, and "
        "loses small ones. Add master='float32', or store float32 and compute in "
        f"{dtype}, as FSDP2's param_dtype does: Precision(compute={dtype!r})."
    )


def _check_worth(plan: Plan) -> None:
    """Warns where much of the state cannot be sharded as the stage asks."""
    params = [leaf for leaf in plan.params if leaf.shape]
    chosen = ("overrides=", FROZEN)
    unwanted = (leaf for leaf in params if leaf.dim is None and leaf.reason not in chosen)
    replicated = sorted(unwanted, key=lambda leaf: -leaf.nbytes)
    nbytes, total = (sum(leaf.nbytes for leaf in leaves) for leaves in (replicated, params))
    is_little = nbytes < REPLICATED_BYTES or nbytes <= REPLICATED_SHARE * total
    if plan.stage == 0 or plan.size == 1 or is_little:
        return
    named = "; ".join(f"{x.path} {x.shape}: {x.reason}" for x in replicated[:3])
    more = f"; and {len(replicated) - 3} more" if len(replicated) > 3 else ""
    warn(
        f"{nbytes / total:.0%} of the parameter bytes are replicated on every device ({named}"
        f"{more}). Allow padding (pad=True), lower min_shard_size=, or accept them with overrides=."
    )
