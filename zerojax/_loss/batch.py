"""The arguments of a loss after its parameters: which are split, folded or passed on."""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from zerojax import _compat, _fingerprint
from zerojax._loss import fields as _fields
from zerojax._loss.arguments import find_plan
from zerojax._plan import mesh as _mesh, move as _move
from zerojax._plan.plan import Plan
from zerojax._run import agreement as _agreement
from zerojax._state import carried as _carried, refusals as _refusals
from zerojax._state.state import path_name
from zerojax._types import PyTree

Argument = ArrayLike | jax.ShapeDtypeStruct  # of the arguments
BATCH, KEY, REPLICATED = "batch", "key", "replicated"
WHOLE = (  # of arguments after the batch
    " batch_specs= applies to the first argument alone; what all devices need whole, such as batch "
    "statistics, the loss closes over: lambda params, batch: loss_fn(params, batch, stats)."
)


class Role(NamedTuple):
    """The role of a leaf of the arguments: split, folded or replicated; `dim` counts examples."""

    kind: str
    dim: int = 0


def roles(args: Sequence[PyTree], specs: PyTree = None, axes: Sequence[str] = ()) -> list[Role]:
    """Returns a role for each leaf of the arguments; `specs` may decide those of the first.

    A key has no dimensions; an array of keys has one for each example. Old-style keys, pairs of
    uint32, count as keys everywhere but in the batch itself, the first argument; `check_pairs`
    refuses those that may be rows.
    """

    def role(leaf: Argument, in_batch: bool) -> Role:
        is_key = jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
        if (is_key and not jnp.shape(leaf)) or (not in_batch and _is_raw_key(leaf)):
            return Role(KEY)
        return Role(BATCH if jnp.shape(leaf) else REPLICATED)

    found = [role(leaf, i == 0) for i, arg in enumerate(args) for leaf in jax.tree.leaves(arg)]
    if specs is None or not args:
        return found
    said = _roles_by_specs(args[0], specs, tuple(axes))
    return [given or role for given, role in itertools.zip_longest(said, found)]


def _roles_by_specs(batch: PyTree, specs: PyTree, axes: tuple[str, ...]) -> list[Role | None]:
    """Returns the role that a tree prefix of specs gives each leaf of the batch, or None."""

    def is_leaf(spec: object) -> bool:
        return spec is None or isinstance(spec, PartitionSpec)

    try:
        given = jax.tree.broadcast(specs, batch, is_leaf=is_leaf)
    except ValueError:
        raise ValueError(
            f"batch_specs= does not fit the batch, which is {jax.tree.structure(batch)}. Give one "
            "PartitionSpec for all of it, or a tree that begins as the batch does."
        ) from None
    leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
    pairs = zip(leaves, jax.tree.leaves(given, is_leaf=is_leaf), strict=True)
    return [_role_by_spec(path, value, spec, axes) for (path, value), spec in pairs]


def _role_by_spec(path: tuple, value: Argument, spec: object, axes: tuple[str, ...]) -> Role | None:
    if spec is None:
        return None
    entries = tuple(spec) if isinstance(spec, PartitionSpec) else (spec,)
    named = [(dim, entry) for dim, entry in enumerate(entries) if entry]
    if not named and isinstance(spec, PartitionSpec):
        return Role(REPLICATED)
    dim, entry = named[0] if named else (0, spec)
    over = axes[0] if len(axes) == 1 else axes
    fits = isinstance(spec, PartitionSpec) and entry in (axes, over)
    if len(named) > 1 or not fits or dim >= len(jnp.shape(value)):
        name = path_name(path)
        raise ValueError(
            f"batch_specs= has {spec!r} for {f'batch leaf {name}' if name else 'the batch'} of "
            f"shape {jnp.shape(value)}, and batches are split over {over!r}. Use P({over!r}) where "
            f"the first dimension counts examples, P(None, {over!r}) where the second does, and "
            "P() for what is replicated."
        )
    return Role(BATCH, dim)


def split(value: Array, dim: int, count: int) -> Array:
    """Splits `value` into so many parts along `dim`; a new first dimension counts them."""
    shape = (*value.shape[:dim], count, value.shape[dim] // count, *value.shape[dim + 1 :])
    return jnp.moveaxis(value.reshape(shape), dim, 0)


def check_pairs(args: Sequence[PyTree], specs: PyTree = None, axes: Sequence[str] = ()) -> None:
    """Raises for an old-style key that may as well be two rows of the batch."""
    leaves = jax.tree_util.tree_flatten_with_path(tuple(args))[0]
    pairs = zip(leaves, roles(args, specs, axes), strict=True)
    lengths = {jnp.shape(value)[role.dim] for (_, value), role in pairs if role.kind == BATCH}
    for path, value in leaves:
        if path[0].idx and _is_raw_key(value) and not lengths - {2}:
            raise ValueError(
                f"{_name(path)} is uint32[2] beside no longer batch: an old-style key, or two "
                "rows? Make keys with jax.random.key (or jax.random.wrap_key_data), and put data "
                "into the first argument after the parameters or into another dtype."
            )


class Counted(NamedTuple):
    """The first leaf that has examples, by name, and how many it has along `dim`."""

    name: str
    rows: int
    dim: int
    argument: int


def counted(args: Sequence[PyTree], roles: Sequence[Role]) -> Counted | None:
    """Returns the leaf that counts the examples, if one does; raises where another disagrees."""
    leaves = jax.tree_util.tree_flatten_with_path(tuple(args))[0]
    found = [
        Counted(_name(path), jnp.shape(value)[role.dim], role.dim, path[0].idx)
        for (path, value), role in zip(leaves, roles, strict=True)
        if role.kind == BATCH
    ]
    for leaf in (leaf for leaf in found if leaf.rows != found[0].rows):
        more = WHOLE if leaf.argument else ""
        raise ValueError(
            f"batch leaves disagree on their {_dim_name(max(leaf.dim, found[0].dim))}: "
            f"{found[0].name} has {found[0].rows} and {leaf.name} has {leaf.rows}. Give every "
            "leaf one row for each example; say with batch_specs= which have none, or have "
            f"them along another dimension, and make keys with jax.random.key.{more}"
        )
    return found[0] if found else None


def check(
    args: Sequence[PyTree], roles: Sequence[Role], size: int, accumulate: int = 1
) -> Counted | None:
    """Returns `counted`; raises where the batch cannot be split over devices and microbatches."""
    leaf, ways = counted(args, roles), size * accumulate
    if leaf is not None and (leaf.rows == 0 or leaf.rows % ways):
        below, above = leaf.rows // ways * ways, (leaf.rows // ways + 1) * ways
        use = f"{below} or {above}" if below else f"{above}"
        options = f", accumulate={accumulate}" if accumulate > 1 else ""
        # The default mesh has all devices; the plan knows which of them the batch is split over.
        options += ", plan=state" if size != jax.device_count() else ""
        raise ValueError(
            f"{leaf.name} has a {_dim_name(leaf.dim)} of {leaf.rows}, which does not divide over "
            f"{parts_text(size, accumulate)}. Use {use} examples, or pad: batch, mask = "
            f"zerojax.pad_batch(batch{options}), with zerojax.mean(values, where=mask) in the loss."
        )
    return leaf


def check_accumulate(accumulate: object) -> object:
    if not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(
            f"accumulate must be a positive integer, got {accumulate!r}: the number of "
            "microbatches that each device's part of the batch is split into."
        )
    return accumulate


def parts_text(size: int, accumulate: int) -> str:
    """Returns, for a message, what a batch is split over."""
    return f"{size} devices" + (f" x {accumulate} microbatches" if accumulate > 1 else "")


def _dim_name(dim: int) -> str:
    return f"dimension {dim}" if dim else "leading dimension"


def part_shape(value: Argument, role: Role, ways: int) -> jax.ShapeDtypeStruct:
    """Returns the shape of a leaf that a loss sees when the batch is split so many ways."""
    shape = list(jnp.shape(value))
    if role.kind == BATCH:
        shape[role.dim] //= ways
    return jax.ShapeDtypeStruct(shape, jnp.result_type(value))


def rows(values: Sequence[Argument], roles: Sequence[Role]) -> int:
    """Returns the number of examples in the batch; 0 without one."""
    pairs = zip(values, roles, strict=True)
    found = [jnp.shape(v)[role.dim] for v, role in pairs if role.kind == BATCH]
    return found[0] if found else 0


def per_example(
    aux: PyTree,
    rows: int,
    ways: int,
    aux_of_batch: Callable[[], PyTree],
    mutable: Sequence[str] = (),
) -> PyTree:
    """Returns which aux leaves have a row for each example, in the structure of `aux`.

    Those whose first dimension is as long as a part of the batch are suspects. The loss is traced
    again, by `aux_of_batch`, on the batch of all devices, and the true ones are as long as that.
    Without suspects nothing is traced. Fields in `mutable` have no rows.
    """

    def suspect(path: tuple, leaf: jax.ShapeDtypeStruct) -> bool:
        if not rows or not leaf.shape or _fields.is_field(path, mutable):
            return False
        return leaf.shape[0] == rows // ways

    suspects = jax.tree_util.tree_map_with_path(suspect, aux)
    if ways == 1 or not any(jax.tree.leaves(suspects)):
        return suspects
    return jax.tree.map(lambda s, leaf: s and leaf.shape[0] == rows, suspects, aux_of_batch())


def shard_batch(
    batch: PyTree,
    mesh: Mesh | None = None,
    *,
    axis: str | Sequence[str] | None = None,
    plan: PyTree = None,
    batch_specs: PyTree = None,
) -> PyTree:
    """Puts a host batch on the devices, split along its first dimension, or as `batch_specs` says.

    `train_step` takes host batches too; placing the next batch early overlaps its transfer
    with the running step. Scalars and PRNG keys are replicated. `plan`, a plan or a state that it
    placed, says which mesh and axes: for every mesh of several axes the surest way.

    In several processes each gives its own rows, as `zerojax.run.process_slice` counts them, and
    all of them together are the batch.

    Example:
        >>> batch = zerojax.shard_batch({"x": np.ones((8, 3))})
        >>> print(batch["x"].addressable_shards[0].data.shape)
        (1, 3)
    """
    _refusals.check_values(batch, "batch")
    mesh, axes = mesh_and_axes(mesh, axis, plan)
    found = roles((batch,), batch_specs, axes)
    check((batch,), found, len(local_parts(mesh, axes)))
    leaves, treedef = jax.tree.flatten(batch)
    if mesh.is_multi_process:
        _agree_on_rows(_fingerprint.of_shapes(batch), mesh)

    def placed(value: ArrayLike, role: Role) -> Array:
        sharding = NamedSharding(mesh, spec(role, axes))
        move = _from_this_process if role.kind == BATCH else _move.moved
        return move(value, sharding)

    return treedef.unflatten(map(placed, leaves, found))


def spec(role: Role, axes: Sequence[str]) -> PartitionSpec:
    """Returns how a leaf is split over the axes of a mesh."""
    if role.kind != BATCH:
        return PartitionSpec()
    return PartitionSpec(*[None] * role.dim, tuple(axes))


@_compat.device_cache
def _agree_on_rows(rows: str, mesh: Mesh) -> None:
    """Raises where processes have different rows: each infers the batch from its own.

    It asks once for each shape of a batch.
    """
    _agreement.agree("shard_batch", lambda: {"the rows of one process": rows}, mesh)


def process_slice(
    rows: int,
    mesh: Mesh | None = None,
    *,
    axis: str | Sequence[str] | None = None,
    plan: PyTree = None,
) -> slice:
    """Returns which of the `rows` of a batch over all processes this one is to load.

    The mesh, axes or plan are those of `zerojax.shard_batch`.

    Example:
        >>> print(zerojax.run.process_slice(32))  # a single process loads all
        slice(0, 32, None)
    """
    mesh, axes = mesh_and_axes(mesh, axis, plan)
    size = _mesh.axes_size(mesh, axes)
    if not isinstance(rows, int | np.integer) or rows < 1 or rows % size:
        raise ValueError(
            f"a batch of {rows!r} rows does not divide over {size} devices. Use a multiple of "
            f"{size}: the last batch may have fewer rows than the slice of a full one, and "
            "zerojax.pad_batch(batch, to=...) fills it up."
        )
    parts = local_parts(mesh, axes)
    first, last = min(parts), max(parts)
    if last - first + 1 != len(parts):
        raise ValueError(
            f"this process has the parts {sorted(parts)} of the batch, which are not one slice. "
            "Order the mesh so that a process's devices follow one another along the ZeRO axis."
        )
    return slice(first * rows // size, (last + 1) * rows // size)


def mesh_and_axes(
    mesh: Mesh | None, axis: str | Sequence[str] | None, plan: PyTree
) -> tuple[Mesh, tuple[str, ...]]:
    """Returns the mesh and the axes that a batch is split over."""
    if plan is None:
        if isinstance(mesh, Plan) or _carried.carried_plan(mesh) is not None:
            raise TypeError("mesh= is a plan, or a placed state. Pass it as plan=.")
        return _mesh.resolve(mesh, axis)
    if mesh is not None or axis is not None:
        raise ValueError("plan= brings its own mesh and axes. Leave the mesh and axis= out.")
    found = plan if isinstance(plan, Plan) else find_plan(plan)
    return found.mesh, found.batch_axes


def local_parts(mesh: Mesh, axes: tuple[str, ...]) -> set[int]:
    """Returns which parts of a batch that is split over the axes are on this process's devices."""
    size = _mesh.axes_size(mesh, axes)
    split = NamedSharding(mesh, PartitionSpec(axes))
    slices = split.addressable_devices_indices_map((size,)).values()
    return {index[0].indices(size)[0] for index in slices if index is not None}


def _from_this_process(value: ArrayLike, split: NamedSharding) -> Array:
    value = _move.own(value, split.device_set)
    if split.is_fully_addressable or not getattr(value, "is_fully_addressable", True):
        return jax.device_put(value, split)
    return jax.make_array_from_process_local_data(split, np.asarray(value))


def _name(path: tuple) -> str:
    argument, *inside = path
    name = path_name(tuple(inside))
    if argument.idx == 0:
        return f"batch leaf {name}" if name else "the batch"
    of = f"leaf {name} of " if name else ""
    return f"{of}argument {argument.idx + 2} of the loss"  # which takes parameters and batch first


def _is_raw_key(value: Argument) -> bool:
    return jnp.shape(value) == (2,) and jnp.result_type(value) == jnp.uint32
