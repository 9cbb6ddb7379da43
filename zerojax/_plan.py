"""The plan: which leaf of a state lives where, at a given stage. Made from shapes, immutable."""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax import _gather, _mesh, _opt_specs, _spec, _state, _table
from zerojax._precision import Precision
from zerojax._state import OPT_STATE, OTHER, PARAMS

# Warn when more than this share of the parameter bytes, and at least so many, stay whole.
WHOLE_SHARE, WHOLE_BYTES = 0.02, 2**20


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """One leaf: `spec` is where it lives between steps, `shard_spec` where it is cut."""

    path: str
    kind: str
    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec
    shard_spec: PartitionSpec
    dim: int | None
    stacked: bool
    reason: str | None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def bytes_per_device(self, mesh: Mesh) -> int:
        shard = NamedSharding(mesh, self.spec).shard_shape(self.shape)
        return math.prod(shard) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """Where every leaf of a state lives. Made by `zerojax.plan`; print it to see.

    `place` moves a state there, `constrain` keeps it there inside `jax.jit`, `abstract` is
    the same state as shapes with shardings, for lowering without any array.
    """

    stage: int
    mesh: Mesh
    axes: tuple[str, ...]
    leaves: tuple[LeafPlan, ...]
    treedef: Any = dataclasses.field(compare=False)  # static fields differ from call to call
    precision: Precision | None = None

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.stage, self.mesh, self.axes, self.leaves, self.precision))

    def __hash__(self) -> int:
        return self._hash

    def __deepcopy__(self, memo: Any) -> "Plan":
        return self  # immutable, and devices cannot be copied

    @property
    def size(self) -> int:
        """Over how many devices ZeRO shards."""
        return _mesh.axes_size(self.mesh, self.axes)

    @property
    def sharded(self) -> dict[str, bool]:
        """What the stage shards: this table is all that a stage is."""
        stage = self.stage if self.size > 1 else 0
        return {OPT_STATE: stage >= 1, "grads": stage >= 2, PARAMS: stage >= 3}

    @property
    def params(self) -> list[LeafPlan]:
        return [leaf for leaf in self.leaves if leaf.kind == PARAMS]

    @functools.cached_property
    def shardings(self) -> list[NamedSharding]:
        """Where each leaf lives between steps, in the order of `jax.tree.leaves(state)`."""
        return [NamedSharding(self.mesh, leaf.spec) for leaf in self.leaves]

    @functools.cached_property
    def shard_shardings(self) -> list[NamedSharding]:
        """Where each leaf lives while the optimizer updates it."""
        return [NamedSharding(self.mesh, leaf.shard_spec) for leaf in self.leaves]

    def abstract(self) -> Any:
        """The state as `jax.ShapeDtypeStruct`s that carry their shardings."""
        structs = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            for leaf, sharding in zip(self.leaves, self.shardings, strict=True)
        ]
        return _state.carry_plan(self.treedef.unflatten(structs), self)

    def place(self, state: Any) -> Any:
        """The state, moved to where the plan wants it; a function makes it there.

        The arrays passed in stay valid and untouched: a step may donate what comes out.
        """
        _mesh.check_one_process("placing a state")
        if _state.is_state_function(state):
            made: list[Any] = []
            leaves = self.born_sharded(state, made.append)()
            return made[0].unflatten(leaves)
        leaves, treedef = jax.tree.flatten(state)
        self.check_structure(state)
        values = [_as_array(value, leaf) for value, leaf in zip(leaves, self.leaves, strict=True)]
        placed = [_moved(v, sharding) for v, sharding in zip(values, self.shardings, strict=True)]
        return _state.carry_plan(treedef.unflatten(placed), self)

    def born_sharded(self, make_state: Callable[[], Any], tell_treedef: Callable = id) -> Any:
        """A jitted function to the state's leaves, no device ever holding the whole state.

        It returns leaves because static fields, an optimizer made anew for instance, may differ
        from call to call; `tell_treedef` gets the structure of the call that was compiled.
        """

        def make() -> list[Any]:
            state = make_state()
            self.check_structure(state)
            leaves, treedef = jax.tree.flatten(_state.carry_plan(state, self))
            tell_treedef(treedef)
            return leaves

        return jax.jit(make, out_shardings=self.shardings)

    def constrain(self, state: Any, *, into: Any = None) -> Any:
        """Inside `jax.jit`: the state as computed, held to the plan's shardings.

        First to where the optimizer worked, then to where the leaf rests. In that order a
        parameter of stage 1 or 2 is updated on shards and gathered once, in its own dtype.
        Give the donated old state as `into`, and stacks of layers are gathered into its memory
        one layer at a time instead of beside it.
        """
        self.check_structure(state)
        leaves, treedef = jax.tree.flatten(self.scatter(state))
        rests_whole = [i for i, leaf in enumerate(self.leaves) if leaf.spec != leaf.shard_spec]
        if rests_whole:
            old = [None] * len(leaves) if into is None else jax.tree.leaves(into)
            whole = self._gathered(rests_whole, leaves, old)
            for i, leaf in zip(rests_whole, whole, strict=True):
                leaves[i] = leaf
        return self._constrained(treedef.unflatten(leaves), self.shardings)

    def _gathered(self, indices: list[int], shards: list[Any], old: list[Any]) -> list[Any]:
        plans = [self.leaves[i] for i in indices]

        def gather(shards: list[Any], old: list[Any]) -> list[Any]:
            return [
                _gather.gather_rested(shard, stack, leaf.dim, leaf.stacked, self.axes)
                for shard, stack, leaf in zip(shards, old, plans, strict=True)
            ]

        cut = [_spec.only_axes(leaf.shard_spec, self.axes) for leaf in plans]
        return jax.shard_map(
            gather, mesh=self.mesh, in_specs=(cut, PartitionSpec()), out_specs=PartitionSpec(),
            axis_names=set(self.axes), check_vma=False,
        )([shards[i] for i in indices], [old[i] for i in indices])  # fmt: skip

    def scatter(self, state: Any) -> Any:
        """Inside `jax.jit`: the state cut to where the optimizer updates it."""
        return self._constrained(state, self.shard_shardings)

    def _constrained(self, state: Any, shardings: Sequence[NamedSharding]) -> Any:
        leaves, treedef = jax.tree.flatten(state)
        constrained = map(jax.lax.with_sharding_constraint, leaves, shardings)
        return treedef.unflatten(constrained)

    def check_structure(self, state: Any) -> None:
        """Raises where `state` is not the tree that this plan was made for."""
        have = {leaf.name: shape_and_dtype(leaf.value) for leaf in _state.leaves_of(state)}
        want = {leaf.path: (leaf.shape, leaf.dtype) for leaf in self.leaves}
        remedy = "Make a plan for this state: zerojax.plan(state, stage=...)."
        for path in [*want, *have]:
            if path not in have or path not in want:
                where = "missing from the state" if path in want else "not in the plan"
                raise ValueError(f"state leaf {path} is {where}. {remedy}")
            if have[path] != want[path]:
                raise ValueError(
                    f"state leaf {path} is {_show(have[path])} and the plan was made for "
                    f"{_show(want[path])}. {remedy}"
                )

    def bytes_per_device(self) -> dict[str, int]:
        """Bytes on each device between steps, by kind of state."""
        totals = {PARAMS: 0, OPT_STATE: 0, OTHER: 0}
        for leaf in self.leaves:
            totals[leaf.kind] += leaf.bytes_per_device(self.mesh)
        return totals

    def __repr__(self) -> str:
        return f"<Plan of {len(self.leaves)} leaves: {_table.plan_title(self)}>"

    def __str__(self) -> str:
        return _table.plan_text(self)

    def _repr_html_(self) -> str:
        return _table.plan_html(self)


def plan(
    state_or_fn: Any,
    *,
    stage: int = 3,
    mesh: Mesh | None = None,
    axis: str | Sequence[str] | None = None,
    overrides: Mapping[str, PartitionSpec] | None = None,
    min_shard_size: int = _spec.DEFAULT_MIN_SHARD_SIZE,
    stacked: str | None = None,
    precision: Precision | None = None,
    tx: Any = None,
) -> Plan:
    """Decides where each leaf of a state lives. Moves nothing.

    Arguments:
        state_or_fn: a flax `TrainState`, a tuple `(params, opt_state)`, a dict or dataclass with
            those names, or a function without arguments that makes one.
        stage: 0 replicates all; 1 shards the optimizer state, 2 gradients too, 3 parameters too.
        mesh: the devices; default, all of them along one axis `data`. Axes must be Auto.
        axis: the mesh axis or axes to shard over; default, the only one or `data`.
        overrides: `{path regex: PartitionSpec}` for parameters, read against paths such as
            `params/dense/kernel`; the optimizer state follows.
        min_shard_size: parameters with fewer elements stay replicated.
        stacked: a path regex for parameters whose first dimension counts layers; default, read
            off the shapes.
        precision: dtypes that steps by this plan compute and reduce in, unless told otherwise.
        tx: the optimizer, for states that do not carry theirs.

    Returns:
        The plan: printable, hashable, made of shapes only.

    Example:
        >>> params = {"w": jax.ShapeDtypeStruct((1024, 8), "float32")}
        >>> plan = zerojax.plan({"params": params, "opt_state": ()}, stage=3)
        >>> print(plan.leaves[0].path, "is cut along dimension", plan.leaves[0].dim)
        params/w is cut along dimension 0
    """
    if type(stage) is not int or stage not in (0, 1, 2, 3):
        raise ValueError(
            f"stage must be 0, 1, 2 or 3, got {stage!r}: 0 replicates, 1 shards the optimizer "
            "state, 2 gradients too, 3 parameters too."
        )
    mesh, axes = _mesh.resolve(mesh, axis)
    axis_sizes = dict(mesh.shape)
    rule = _spec.make_rule(axes, axis_sizes, overrides, min_shard_size)
    born = _state.is_state_function(state_or_fn)
    state = jax.eval_shape(state_or_fn) if born else state_or_fn
    leaves = _state.leaves_of(state)
    bases = _state.base_specs(state, axes, mesh.axis_names)
    tx = tx if tx is not None else _state.get_tx(state)

    cut = _shard_specs(state, leaves, bases, rule, stacked, tx, axis_sizes)
    cuts = stage >= 1 and rule.size > 1
    shards = {OPT_STATE: cuts, OTHER: cuts, PARAMS: cuts and stage >= 3}
    planned = []
    for leaf, (spec, reason, is_stacked) in zip(leaves, cut, strict=True):
        struct = _state.shape_dtype(leaf.value)
        whole = _spec.normal(_rest_spec(spec, axes))
        shard = _spec.normal(spec) if cuts else whole
        rest = shard if shards[leaf.kind] else whole
        dim = _spec.shard_dim(shard, axes)
        planned.append(
            LeafPlan(
                path=leaf.name, kind=leaf.kind, shape=tuple(struct.shape), dtype=struct.dtype,
                spec=rest, shard_spec=shard, dim=dim, stacked=is_stacked, reason=reason,
            )
        )  # fmt: skip
    made = Plan(
        stage, mesh, axes, tuple(planned), jax.tree.structure(_state.without_plan(state)), precision
    )
    _check_worth(made)
    return made


def _shard_specs(
    state: Any,
    leaves: list[_state.Leaf],
    bases: list[PartitionSpec],
    rule: _spec.Rule,
    stacked: str | None,
    tx: Any,
    axis_sizes: dict[str, int],
) -> list[tuple[PartitionSpec, str | None, bool]]:
    """How each leaf is cut, why not, and whether its first dimension counts layers."""
    params = [(leaf, base) for leaf, base in zip(leaves, bases, strict=True) if leaf.kind == PARAMS]
    for pattern, _ in rule.overrides:
        _state.matching(pattern, {leaf.path: leaf.name for leaf, _ in params}, "overrides=")
    stacks = _state.stacked_paths(_state.get_params(state), stacked)
    cuts = {}
    for leaf, base in params:
        is_stack = leaf.path[1:] in stacks
        if jax.dtypes.issubdtype(getattr(leaf.value, "dtype", None), jax.dtypes.extended):
            cuts[leaf.path] = (base, "a PRNG key", is_stack)
            continue
        shape = _state.shape_dtype(leaf.value).shape
        cuts[leaf.path] = (*rule(leaf.name, shape, base, is_stack), is_stack)
    pairs = [(leaf, cuts[leaf.path][0]) for leaf, _ in params]
    opt_state = _state.get_opt_state(state)
    typed = None
    if tx is not None and opt_state is not None:
        tree = _state.get_params(state)
        _opt_specs.check_optimizer(tx, tree, opt_state)
        typed = _opt_specs.from_sharding_types(tx, tree, [s for _, s in pairs], axis_sizes)
    inferred = iter(jax.tree.leaves(typed))
    for leaf, base in zip(leaves, bases, strict=True):
        if leaf.kind == OPT_STATE and typed is not None:
            cuts[leaf.path] = (*_typed_spec(leaf, next(inferred)), False)
        elif leaf.kind != PARAMS:
            fallback = rule if leaf.kind == OPT_STATE else None
            spec, reason = _opt_specs.from_matching_shapes(leaf, pairs, fallback)
            cuts[leaf.path] = (spec if tuple(spec) else base, reason, False)
    return [cuts[leaf.path] for leaf in leaves]


def _typed_spec(leaf: _state.Leaf, struct: Any) -> tuple[PartitionSpec, str | None]:
    spec = getattr(struct.sharding, "spec", PartitionSpec())
    if not struct.shape:
        return PartitionSpec(), "scalar"
    if any(entry is not None for entry in spec):
        return spec, None
    return spec, "its own dimensions carry no shard of a parameter"


def _rest_spec(spec: PartitionSpec, axes: tuple[str, ...]) -> PartitionSpec:
    """`spec` without the ZeRO axes."""
    dim = _spec.shard_dim(spec, axes)
    return PartitionSpec(*(None if d == dim else entry for d, entry in enumerate(spec)))


def _check_worth(made: Plan) -> None:
    """Says so where a stage was asked for and much of the state cannot follow."""
    params = [leaf for leaf in made.params if leaf.shape]
    total = sum(leaf.nbytes for leaf in params)
    if made.stage == 0 or made.size == 1 or not total:
        return
    unwanted = (leaf for leaf in params if leaf.dim is None and leaf.reason != "overrides=")
    whole = sorted(unwanted, key=lambda leaf: -leaf.nbytes)
    nbytes = sum(leaf.nbytes for leaf in whole)
    share = nbytes / total
    if share <= WHOLE_SHARE or nbytes < WHOLE_BYTES:
        return
    named = "; ".join(f"{x.path} {x.shape}: {x.reason}" for x in whole[:3])
    more = f"; and {len(whole) - 3} more" if len(whole) > 3 else ""
    warnings.warn(
        f"{share:.0%} of the parameter bytes stay whole on every device ({named}{more}). "
        "Pad those dimensions, lower min_shard_size=, or accept them with overrides=.",
        stacklevel=3,
    )


def shape_and_dtype(value: Any) -> tuple[tuple[int, ...], Any]:
    struct = _state.shape_dtype(value)
    return tuple(struct.shape), struct.dtype


def _show(shape_dtype: tuple[tuple[int, ...], Any]) -> str:
    return f"{shape_dtype[1]}{list(shape_dtype[0])}"


def _moved(value: Any, sharding: NamedSharding) -> jax.Array:
    """`value` at `sharding`, sharing no memory with it: a step will donate what comes out.

    `device_put(may_alias=False)` still reuses the source as one of several replicas.
    """
    if isinstance(value, jax.Array) and sharding.is_fully_replicated:
        value = value.copy()
    return jax.device_put(value, sharding, may_alias=False)


def _as_array(value: Any, leaf: LeafPlan) -> Any:
    return value if isinstance(value, jax.Array) else np.asarray(value, leaf.dtype)
