"""Makes a plan from shapes, and places states by it.

A plan says for each leaf how it is sharded, or why it is not. `zerojax.plan` decides that, and
`shard_train_state`, `unpad` and `gather_params` move states.
"""

import dataclasses
import functools
import itertools
from collections.abc import Collection, Container, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import Mesh, PartitionSpec

from zerojax import _fingerprint, _readings
from zerojax._axis_types import carried_mesh, with_auto_axes
from zerojax._declared import checked, takes
from zerojax._kernel.places import Groups, LeafPlan, Placement, leaf_at
from zerojax._plan import (
    mesh as _mesh,
    move as _move,
    optimizer as _optimizer,
    padding as _padding,
    quantize as _quantize,
)
from zerojax._plan.expert import Experts, as_experts
from zerojax._plan.kept import stored_with
from zerojax._plan.offload import as_offload
from zerojax._plan.plan import Plan
from zerojax._plan.plan_options import PlanOptions, StateOptions
from zerojax._plan.precision import Precision
from zerojax._plan.rule import Rule, chosen_groups
from zerojax._plan.sequence import Sequences, as_sequences
from zerojax._run import agreement as _agreement, programs as _programs
from zerojax._specs import Axes, beyond, names_in
from zerojax._state import carried as _carried, refusals as _refusals, state as _state
from zerojax._state.hints import is_of_some, layer_dims, own_axes
from zerojax._state.state import OPT_STATE, PARAMS, Leaf, state_of
from zerojax._types import PyTree, Shape, is_key
from zerojax._warn import warn
from zerojax._wire import codecs as _codecs

# Warn when more than this share of the parameter bytes, and more than so many, stay replicated.
REPLICATED_SHARE, REPLICATED_BYTES = 0.02, 2**20
FROZEN = "frozen: nothing updates it"

Reasoned = tuple[PartitionSpec, str | None]  # the spec of a leaf, and why it is replicated


@takes(StateOptions)
def plan(state_or_fn: PyTree, options: StateOptions) -> Plan:
    """Decides where each leaf of a state lives. Moves nothing.

    Arguments:
        state_or_fn: a flax `TrainState`, a tuple `(params, opt_state)`, a dict or dataclass with
            those names, or a function without arguments that makes one of these.
        {options}

    Returns:
        The plan: printable, hashable, made of shapes only.

    Example:
        >>> params = {"w": jax.ShapeDtypeStruct((1024, 8), "float32")}
        >>> plan = zerojax.plan({"params": params, "opt_state": ()}, stage=3)
        >>> print(plan.leaves[0].path, "is sharded along dimension", plan.leaves[0].dim)
        params/w is sharded along dimension 0
    """
    _readings.check()  # what is traced first is the optimizer
    sequence = as_sequences(options.sequence)
    experts = as_experts(options.experts)
    given, axes = _devices(options, state_or_fn, sequence, experts)
    mesh = with_auto_axes(given)
    groups = chosen_groups(options.stage, axes, {} if options.groups is None else options.groups)
    patterns = {} if options.overrides is None else options.overrides
    shards_over = groups.opt_state or axes
    rule = Rule(mesh, shards_over, patterns, options.min_shard_size, options.pad, experts)
    state, leaves = _as_stored(state_or_fn, options.precision)
    _refusals.check_one_tx(state, options.tx)
    tx = _state.get_tx(state) if options.tx is None else options.tx
    names = {leaf.path[1:]: leaf.name for leaf in leaves if leaf.kind == PARAMS}
    params = [*names.values()]
    _refusals.check_gradients_sum(params)
    apart = _state.matching(experts.pattern, names, "experts=") if experts else set[tuple]()
    stacks = layer_dims(_state.get_params(state), options.stacked, apart)
    _state.check_patterns(rule.overrides, params, "overrides=")
    gathered = _codecs.patterns_of(options.precision and options.precision.gather)
    _state.check_patterns(gathered, params, "Precision(gather=)")
    own = own_axes(state, axes, mesh.axis_names)
    specs = _shard_specs(state, leaves, [spec for spec, *_ in own], rule, stacks, tx)
    has_update = tx is not None or hasattr(state, "apply_gradients")
    update = _optimizer.update_of(state, tx) if has_update else None
    are_frozen = [] if update is None else _optimizer.frozen_params(state, update)
    frozen = set(itertools.compress(params, are_frozen))
    if update is not None:
        _quantize.check_frozen(state, frozen)
    over = groups if rule.size > 1 else Groups()
    planned = [
        _leaf_plan(leaf, spec, over, rule, frozen, stacks, apart, *named)
        for leaf, spec, (_, *named) in zip(leaves, specs, own, strict=True)
    ]
    if offload := as_offload(options.offload):
        planned = offload.place(planned, mesh)
    treedef = jax.tree.structure(state)
    result = Plan(
        groups.stage,
        mesh,
        axes,
        over,
        tuple(planned),
        treedef,
        options.precision,
        update,
        given,
        sequence,
        experts,
    )
    _check_worth(result)
    return result


def _devices(
    options: PlanOptions, state: PyTree, sequence: Sequences | None, experts: Experts | None
) -> tuple[Mesh, Axes]:
    """Returns the mesh, and the axes that the batch is split over: all of them, with groups."""
    axis, given = options.axis, options.mesh
    more = sequence and sequence.axis, experts and experts.axis
    if given is None:
        given = carried_mesh(state) or _mesh.current()
    if options.groups is not None and given is not None and axis is None:
        axis = beyond(given.axis_names, more) or None
    mesh, axes = _mesh.resolve(given, axis, *more, experts.pattern if experts else "")
    if given is None and options.stage >= 1 and mesh.devices.size == 1:
        _warn_alone(mesh.devices.flat[0].platform)
    return mesh, axes


def _as_stored(state_or_fn: PyTree, precision: Precision | None) -> tuple[PyTree, list[Leaf]]:
    """Returns a state, or its shapes, without its plan and stored as `precision` says."""
    _refusals.check_functional(state_or_fn)
    _refusals.check_state_function(state_or_fn)
    if _state.is_state_function(state_or_fn):
        state = jax.eval_shape(functools.partial(state_of, state_or_fn))
        _refusals.check_functional(state)
    else:
        shapes = _padding.padded_shapes(state_or_fn)
        state = _padding.replaced(state_or_fn, shapes, _struct)
    leaves = _state.leaves_of(state)
    if precision is not None and precision.stores:
        if precision.param and not precision.master and jnp.finfo(precision.param).bits < 32:
            _warn_rounded(jnp.dtype(precision.param).name)
        state = stored_with(jax.tree.map(_struct, state), precision)
        leaves = _state.leaves_of(state)
    if not any(leaf.kind == PARAMS for leaf in leaves):
        raise _state.no_parameters(state)
    return _carried.without_plan(state), leaves


def _struct(value: PyTree, shape: Shape | None = None) -> jax.ShapeDtypeStruct:
    """Returns a leaf as a shape, or with another shape, and with its sharding."""
    struct, sharding = _state.shape_dtype(value), getattr(value, "sharding", None)
    shape = struct.shape if shape is None else shape
    return jax.ShapeDtypeStruct(shape, struct.dtype, sharding=sharding)


def _leaf_plan(
    leaf: Leaf,
    spec_and_reason: Reasoned,
    groups: Groups,
    rule: Rule,
    frozen: Container[str],
    stacks: Collection[tuple],
    experts: Collection[tuple],
    absent: Axes,
    taken: Axes,
) -> LeafPlan:
    spec, reason = spec_and_reason
    is_frozen = leaf.name in frozen
    if is_frozen and not groups.params:  # no optimizer state to follow, no gradient to shard
        groups, reason = Groups(), FROZEN
    struct = _state.shape_dtype(leaf.value)
    may_be = (rule.experts.axis,) if rule.experts and is_of_some(leaf, experts) else ()
    apart = tuple(axis for axis in may_be if axis in tuple(spec))
    own = tuple(axis for axis in beyond(rule.axes, apart) if axis in names_in(spec))
    return leaf_at(
        Placement(spec, own, padding=rule.padding(struct.shape, spec), apart=apart),
        groups,
        is_param=leaf.kind == PARAMS,
        path=leaf.name,
        kind=leaf.kind,
        shape=tuple(struct.shape),
        dtype=struct.dtype,
        stacked=is_of_some(leaf, stacks),
        reason=reason,
        frozen=is_frozen,
        absent=() if leaf.kind == OPT_STATE else absent,
        taken=() if leaf.kind == OPT_STATE else beyond(taken, apart),
    )


def _shard_specs(
    state: PyTree,
    leaves: list[Leaf],
    bases: list[PartitionSpec],
    rule: Rule,
    stacks: Mapping[tuple, int],
    tx: optax.GradientTransformation | None,
) -> list[Reasoned]:
    """Returns how each leaf can be sharded: parameters by the rule, optimizer state with them.

    `bases` have the axes that leaves are sharded over beside ZeRO's.
    """
    shapes = [_state.shape_dtype(leaf.value).shape for leaf in leaves]
    specs: dict[int, Reasoned] = {}
    for i, (leaf, shape, base) in enumerate(zip(leaves, shapes, bases, strict=True)):
        if is_key(leaf.value) and leaf.kind == PARAMS:
            specs[i] = base, "a PRNG key"
        elif leaf.kind == PARAMS:
            specs[i] = rule(leaf.name, shape, base, stacks.get(leaf.path[1:], 0))
    params = [(leaves[i], spec) for i, (spec, _) in specs.items()]
    whys = [(leaves[i], why) for i, (_, why) in specs.items() if why]
    typed, untyped = _optimizer.typed_state(state, tx, [spec for _, spec in params], rule)
    inferred = iter(jax.tree.leaves(typed))
    for i, (leaf, shape, base) in enumerate(zip(leaves, shapes, bases, strict=True)):
        if leaf.kind == PARAMS:
            continue
        followed, result = _optimizer.followed(leaf, params), None
        if leaf.kind == OPT_STATE and typed is not None:
            of = (f"follows {p.name}: {why}" for p, why in whys if _optimizer.is_of(leaf, p))
            why = followed[1] if followed else next(of, None)
            result = _typed_spec(shape, next(inferred), why, rule)
        if result is None:
            result = followed or (PartitionSpec(), "neither a parameter nor optimizer state")
            if followed is None and leaf.kind == OPT_STATE:
                alone = dataclasses.replace(rule, experts=None)  # no parameter, whatever its path
                spec, reason = alone(leaf.name, shape, PartitionSpec(), 0)
                why = f"sharded by its shape only: {untyped}" if untyped else None
                result = spec, "; ".join(filter(None, (reason, why))) or None
            spec, reason = result
            result = spec if tuple(spec) else base, reason
        specs[i] = result
    return [specs[i] for i in range(len(leaves))]


def _typed_spec(
    shape: Shape, struct: jax.ShapeDtypeStruct, why: str | None, rule: Rule
) -> Reasoned | None:
    """Returns the spec that JAX inferred for a leaf, and why it is replicated, as its parameter is.

    Returns None where the padding of a parameter changed more than the sharded dimension: Adafactor
    factors a matrix only if it is large enough.
    """
    spec = getattr(struct.sharding, "spec", PartitionSpec())
    if len(struct.shape) != len(shape) or struct.shape != rule.padded_shape(shape, spec):
        return None
    if not shape:
        return PartitionSpec(), "scalar"
    if any(entry is not None for entry in spec):
        return spec, None
    return spec, why or "has none of the sharded dimensions of a parameter"


@functools.cache  # once in a process
def _warn_alone(platform: str) -> None:
    warn(
        f"there is one {platform} device, so a stage shards nothing. Use more, or emulate some "
        "before JAX starts: jax.config.update('jax_num_cpu_devices', 8). If you mean to use one, "
        "pass it as mesh=."
    )


@functools.cache  # once in a process
def _warn_rounded(dtype: str) -> None:
    warn(
        f"Precision(param={dtype!r}) without master= rounds parameters after each update, and "
        "loses small ones. Add master='float32', or store float32 and compute in "
        f"{dtype}, as FSDP2's param_dtype does: Precision(compute={dtype!r})."
    )


def _check_worth(plan: Plan) -> None:
    """Warns if much of the state cannot be sharded as the stage asks."""
    params = [leaf for leaf in plan.params if leaf.shape]
    chosen = ("overrides=", FROZEN)
    whole = (leaf for leaf in params if leaf.dim is None and leaf.experts is None)
    unwanted = (leaf for leaf in whole if leaf.reason not in chosen)
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


@takes(StateOptions)
def shard_train_state(state_or_fn: PyTree, options: StateOptions) -> PyTree:
    """Places a training state for a ZeRO stage, as `zerojax.train_step` expects it.

    Arguments:
        state_or_fn: a flax `TrainState` or any state that `zerojax.plan` takes. JAX compiles a
            function without arguments to make the state already sharded, so that no device ever
            has all of it.
        {options}

    Returns:
        The same type of state; its arrays sharded, its optimizer carrying the plan.

    Example:
        >>> params = {"w": jnp.ones((64, 16))}
        >>> state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
        >>> state = zerojax.shard_train_state(state, stage=3)
        >>> print(state.params["w"].shape, state.params["w"].addressable_shards[0].data.shape)
        (64, 16) (8, 16)
    """
    _refusals.check_alive(state_or_fn)
    if jax.process_count() == 1:
        _programs.keep()
    return plan(state_or_fn, **vars(options)).place(state_or_fn)


@checked
def unpad(state: PyTree, plan: Plan | None = None) -> PyTree:
    """Returns a placed state without its padding, to apply a model to its parameters yourself.

    Parameters that the devices do not divide end with zeros along one dimension. Steps,
    checkpoints and `gather_params` drop these zeros; if you call the model yourself, drop them with
    this function. Inside `jax.jit` the parameters stay sharded. Outside JAX has no arrays with such
    shards, so every device gets the whole of each padded leaf. Other leaves do not change.

    Arguments:
        plan: the plan, for states that do not carry an optimizer (tuples, dicts).

    Example:
        >>> params = {"w": jnp.ones((257, 3))}
        >>> state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
        >>> state = zerojax.shard_train_state(state, stage=3)
        >>> print(state.params["w"].shape, zerojax.unpad(state).params["w"].shape)
        (264, 3) (257, 3)
    """
    _refusals.check_alive(state)
    plan = _carried.carried_plan(state) or plan
    if plan is None:
        raise ValueError(
            f"a state of type {type(state).__name__} does not carry the plan that it was placed "
            "by. Pass it: zerojax.unpad(state, plan)."
        )
    _agree_on_leaves("zerojax.unpad", _state.leaves_with_paths(state))
    return plan.unpad(state)


def _agree_on_leaves(call: str, leaves: Sequence[Leaf]) -> None:
    """Raises where processes bring other leaves together."""
    kinds = {type(leaf.value) for leaf in leaves}
    is_traced = any(issubclass(kind, Tracer) for kind in kinds)
    if is_traced or all(getattr(leaf.value, "is_fully_addressable", True) for leaf in leaves):
        return
    lines = (f"{leaf.name} {_fingerprint.of_shapes(leaf.value)}" for leaf in leaves)
    _agreement.agree(call, lambda: {"the leaves": "\n".join(lines)})


@checked
def gather_params(state: PyTree, plan: Plan | None = None) -> PyTree:
    """Returns the parameters as numpy arrays on the host, moved there one leaf at a time.

    Takes a state, or any tree of arrays; it refuses a pair that may be either. In several processes
    each calls it and gets all parameters; write a model too large for that to files with
    `zerojax.checkpoint.export_safetensors`. Tuples, dicts and parameters without a state do not
    carry their plan: pass it where it pads parameters.

    Example:
        >>> params = {"w": jnp.ones((64, 16))}
        >>> state = zerojax.shard_train_state((params, ()), stage=3)
        >>> print(type(zerojax.gather_params(state)["w"]).__name__)
        ndarray
    """
    _refusals.check_alive(state)
    _refusals.check_values(state)
    params = _state.params_in(state)
    if params is state and plan is None:  # parameters, or several states in one tree
        shapes = _padding.resting_shapes(params) | _padding.padded_shapes(params)
    else:
        shapes = _padding.padded_param_shapes(params, state, plan)
    _agree_on_leaves("zerojax.gather_params", leaves := _state.leaves_with_paths(params))

    def full(leaf: Leaf) -> PyTree:
        if is_key(leaf.value):
            return leaf.value
        value = _move.to_host(leaf.value)
        logical = _padding.unpadded(value, shapes.get(leaf.name, value.shape))
        return np.asarray(logical, order="C")  # `ascontiguousarray` would make a row of a scalar

    return jax.tree.structure(params).unflatten(map(full, leaves))
