"""The arguments of a loss after its parameters: zerojax splits some over devices and microbatches,
folds keys, and passes all else on."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from zerojax import _compat, _fingerprint
from zerojax._declared import check_count, checked
from zerojax._loss import fields as _fields
from zerojax._plan import mesh as _mesh, move as _move
from zerojax._plan.plan import Plan
from zerojax._plan.precision import cast_floats
from zerojax._run import agreement as _agreement
from zerojax._specs import Splits, as_names, entry_over
from zerojax._state import carried as _carried, refusals as _refusals
from zerojax._state.state import NNX_FIELDS, path_name
from zerojax._types import PyTree

Argument = ArrayLike | jax.ShapeDtypeStruct  # a leaf of the arguments
Sums = tuple[PyTree, PyTree]  # sums over microbatches, and what is stacked of them
BATCH, KEY, REPLICATED = "batch", "key", "replicated"


class Role(NamedTuple):
    """How a leaf of the arguments reaches each device and microbatch.

    A BATCH is split along `dim`, which counts examples. A KEY is folded with the index of the
    device and of the microbatch, so that each draws other numbers. All else is REPLICATED. Any but
    a key may be split along another dimension, `tokens`, over the devices that share its examples.
    """

    kind: str
    dim: int = 0
    tokens: int | None = None


def roles(args: Sequence[PyTree], specs: PyTree, splits: Splits) -> list[Role]:
    """Returns a role for each leaf of the arguments. `specs` may decide those of the first one.

    By default the second dimension of a batch has its tokens, unless they are too few to split.
    A key has no dimensions; an array of keys has one for each example. An old-style key, which is
    a pair of uint32, counts as a key except in the first argument, the batch itself. `check_pairs`
    refuses a pair that may as well be two rows.
    """

    def role(leaf: Argument, in_batch: bool) -> Role:
        is_key = jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
        if (is_key and not jnp.shape(leaf)) or (not in_batch and _is_raw_key(leaf)):
            return Role(KEY)
        shape = jnp.shape(leaf)
        has_tokens = splits.tokens and len(shape) > 1 and shape[1] >= splits.blocks and not is_key
        return Role(BATCH, tokens=1 if has_tokens else None) if shape else Role(REPLICATED)

    leaves = jax.tree_util.tree_leaves_with_path(tuple(args))
    roles = [role(leaf, path[0].idx == 0) for path, leaf in leaves]
    if specs is None or not args:
        return roles

    def is_leaf(spec: object) -> bool:
        return spec is None or isinstance(spec, PartitionSpec)

    try:
        specs = jax.tree.leaves(jax.tree.broadcast(specs, args[0], is_leaf=is_leaf), is_leaf)
    except ValueError:
        raise ValueError(
            f"batch_specs= does not fit the batch, which is {jax.tree.structure(args[0])}. Give "
            "one PartitionSpec for all of it, or a tree that begins as the batch does."
        ) from None
    over = entry_over(splits.rows)
    for i, spec in enumerate(specs):
        if spec is not None:
            roles[i] = _role_by_spec(*leaves[i], spec, splits)
    split = [i for i, role in enumerate(roles) if role.kind == BATCH]
    if split and split[0] >= len(specs):
        raise ValueError(
            "batch_specs= leaves the batch whole on each device, and describes only the batch: "
            f"{_name(leaves[split[0]][0])} would be split. Pass both as one batch, with a spec of "
            f"each: batch_specs=(PartitionSpec(), PartitionSpec({over!r})) splits the second, "
            "(PartitionSpec(), PartitionSpec()) neither."
        )
    return roles


def _role_by_spec(path: tuple, value: Argument, spec: object, splits: Splits) -> Role:
    shape, over = jnp.shape(value), entry_over(splits.rows)
    if isinstance(spec, PartitionSpec):
        entries = [(dim, as_names(entry)) for dim, entry in enumerate(spec) if entry]
        rows = [dim for dim, names in entries if names == splits.rows]
        tokens = [dim for dim, names in entries if names == (splits.tokens,)]
        are_known = len(rows + tokens) == len(entries) and max(len(rows), len(tokens)) < 2
        if are_known and max(rows + tokens, default=-1) < len(shape):
            if any(shape[dim] < splits.blocks for dim in tokens):
                raise ValueError(
                    f"batch_specs= has {spec!r} for {_name(path)} of shape {shape}, whose "
                    f"{shape[tokens[0]]} tokens are fewer than the {splits.blocks} devices of "
                    f"{splits.tokens!r}. Leave the axis out of the spec: each has all of them then."
                )
            return Role(BATCH if rows else REPLICATED, *(rows or [0]), *tokens)
    also = f", P({over!r}, {splits.tokens!r}) where the second has tokens" if splits.tokens else ""
    raise ValueError(
        f"batch_specs= has {spec!r} for {_name(path)} of shape {shape}, and batches are "
        f"split over {over!r}. Use P({over!r}) where the first dimension counts examples, P(None, "
        f"{over!r}) where the second does{also}, and P() for what is replicated."
    )


def check_pairs(args: Sequence[PyTree], specs: PyTree, splits: Splits) -> None:
    """Raises for an old-style key that may as well be two rows."""
    leaves = jax.tree_util.tree_leaves_with_path(tuple(args))
    pairs = zip(leaves, roles(args, specs, splits), strict=True)
    lengths = {jnp.shape(value)[role.dim] for (_, value), role in pairs if role.kind == BATCH}
    for path, value in leaves:
        if path[0].idx and _is_raw_key(value) and not lengths - {2}:
            raise ValueError(
                f"{_name(path)} is uint32[2] and no other leaf tells whether that is an old-style "
                "key or two rows. Make keys with jax.random.key (or jax.random.wrap_key_data). "
                "Pass data as the first argument after the parameters, or in another dtype."
            )


def counted(args: Sequence[PyTree], roles: Sequence[Role]) -> tuple[str, int]:
    """Returns the name of the first leaf with examples and their number, ("", 0) without such a
    leaf. Raises where another leaf has more or fewer examples."""
    leaves = jax.tree_util.tree_leaves_with_path(tuple(args))
    name, rows = "", 0
    for (path, value), role in zip(leaves, roles, strict=True):
        if role.kind != BATCH:
            continue
        own = jnp.shape(value)[role.dim]
        if name and own != rows:
            more = (
                " batch_specs= describes only the first argument. Close over anything that every "
                "device needs in full, such as batch statistics: "
                "lambda params, batch: loss_fn(params, batch, stats)."
            )
            raise ValueError(
                f"batch leaves disagree on the number of examples: {name} has {rows} and "
                f"{_name(path)} has {own}. Give every leaf one row for each example. Say in "
                "batch_specs= which leaves have none, or have them along another dimension, and "
                "make keys with jax.random.key." + (more if path[0].idx else "")
            )
        name, rows = name or _name(path), own
    return name, rows


def pad_options(options: Any) -> str:
    """Writes the options of `zerojax.pad_batch` for a batch of such a step, as users type them."""
    text = f", accumulate={options.accumulate}" if options.accumulate > 1 else ""
    holder = "plan"  # which the user of `value_and_grad` has
    if hasattr(options, "plan") and options.plan is None:
        holder = "optimizer" if options.mutable == NNX_FIELDS else "state"
    text += f", like={holder}"
    return text + ", batch_specs=batch_specs" * (options.batch_specs is not None)


def check(
    args: Sequence[PyTree], roles: Sequence[Role], size: int, accumulate: int = 1, padding: str = ""
) -> int:
    """Returns the number of examples; raises where devices and microbatches do not divide it.

    `padding` is the text of the options of `zerojax.pad_batch`, for the message.
    """
    (name, rows), ways = counted(args, roles), size * accumulate
    if name and (rows == 0 or rows % ways):
        below, above = rows // ways * ways, (rows // ways + 1) * ways
        use = f"{below} or {above}" if below else f"{above}"
        raise ValueError(
            f"{name} has {rows} examples, which do not divide over "
            f"{parts_text(size, accumulate)}. Use {use} examples, or pad: batch, mask = "
            f"zerojax.pad_batch(batch{padding}), with zerojax.mean(values, where=mask) in the loss."
        )
    return rows


def check_tokens(args: Sequence[PyTree], roles: Sequence[Role], splits: Splits) -> None:
    """Raises where no leaf has tokens to split, or none has examples for some of the devices."""
    if splits.blocks == 1:
        return
    over = entry_over(splits.rows)
    if all(role.tokens is None for role in roles):
        leaves = jax.tree_util.tree_leaves_with_path(tuple(args))
        shapes = ", ".join(f"{_name(path)} {list(jnp.shape(x))}" for path, x in leaves[:3])
        raise ValueError(
            f"sequence={splits.tokens!r} splits nothing of this batch ({shapes}). It "
            f"needs {splits.blocks} tokens or more. Pass whole sequences as an argument of the "
            "loss; batch_specs= may name their dimension, "
            f"PartitionSpec({over!r}, {splits.tokens!r}). Or place the state without sequence=."
        )
    if splits.ways > 1 and all(role.kind != BATCH for role in roles):
        raise ValueError(
            f"batch_specs= splits tokens over {splits.tokens!r} and no examples over {over!r}: all "
            f"{splits.ways} groups of devices would compute the same rows. Name both, "
            f"PartitionSpec({over!r}, {splits.tokens!r}), or use a mesh without {over!r}."
        )


check_accumulate = functools.partial(
    check_count,
    name="accumulate",
    what="the number of microbatches that each device's part of the batch is split into",
)


def parts_text(size: int, accumulate: int) -> str:
    """Names the devices and microbatches that a batch is split over."""
    return f"{size} devices" + (f" x {accumulate} microbatches" if accumulate > 1 else "")


def _name(path: tuple) -> str:
    argument, *inside = path
    name = path_name(tuple(inside))
    if argument.idx == 0:
        return f"batch leaf {name}" if name else "the batch"
    of = f"leaf {name} of " if name else ""
    return f"{of}argument {argument.idx + 2} of the loss"  # which takes parameters and batch first


def _is_raw_key(value: Argument) -> bool:
    return jnp.shape(value) == (2,) and jnp.result_type(value) == jnp.uint32


# -- parts of a batch


def split(value: Array, dim: int, count: int) -> Array:
    """Splits `value` into `count` parts along `dim`; a new first dimension counts the parts."""
    shape = (*value.shape[:dim], count, value.shape[dim] // count, *value.shape[dim + 1 :])
    return jnp.moveaxis(value.reshape(shape), dim, 0)


def part_shape(value: Argument, role: Role, ways: int) -> jax.ShapeDtypeStruct:
    """Returns the shape that a loss sees of a leaf, where the batch is split `ways` ways."""
    shape = list(jnp.shape(value))
    if role.kind == BATCH:
        shape[role.dim] //= ways
    return jax.ShapeDtypeStruct(shape, jnp.result_type(value))


def per_example(
    aux: PyTree, rows: int, ways: int, of_batch: Callable[[], PyTree], mutable: Sequence[str] = ()
) -> PyTree:
    """Returns, in the structure of `aux`, which of its leaves have a row for each example.

    A leaf is a suspect where its first dimension is as long as a part of the batch, which has
    `rows` examples. `of_batch` then traces the loss again on the whole batch, and a suspect
    that grows with it has rows. Fields in `mutable` have none.
    """

    def suspect(path: tuple, leaf: jax.ShapeDtypeStruct) -> bool:
        has_dim = rows and leaf.shape and not _fields.is_field(path, mutable)
        return bool(has_dim) and leaf.shape[0] == rows // ways

    suspects = jax.tree_util.tree_map_with_path(suspect, aux)
    if ways == 1 or not any(jax.tree.leaves(suspects)):
        return suspects
    return jax.tree.map(lambda s, leaf: s and leaf.shape[0] == rows, suspects, of_batch())


@dataclasses.dataclass(frozen=True)
class Microbatches:
    """The `count` microbatches of a device, which take the loss's arguments by their roles."""

    roles: Sequence[Role]
    count: int

    def prepared(
        self, args: Sequence[Array], axes: tuple[str, ...], compute: DTypeLike | None
    ) -> list[Array]:
        """Returns the arguments with floats in the dtype to compute in, and with the index of the
        device folded into keys."""
        device = lax.axis_index(axes)
        pairs = zip(cast_floats(list(args), compute), self.roles, strict=True)
        return [jax.random.fold_in(x, device) if role.kind == KEY else x for x, role in pairs]

    def with_blocks(self, args: Sequence[Array], splits: Splits) -> list[Array]:
        """Returns the arguments with their last tokens repeated until the devices divide them."""

        def padded(value: Array, role: Role) -> Array:
            short = 0 if role.tokens is None else -value.shape[role.tokens] % splits.blocks
            if not short:
                return value
            widths = [(0, short * (dim == role.tokens)) for dim in range(value.ndim)]
            # Whole on each device, from which it takes its block: XLA would send parts of blocks.
            rows = NamedSharding(splits.mesh, spec(role._replace(tokens=None), splits))
            return lax.with_sharding_constraint(jnp.pad(value, widths, "edge"), rows)

        return [padded(value, role) for value, role in zip(args, self.roles, strict=True)]

    def stacked(self, args: Sequence[Array]) -> list[Array]:
        """Returns the arguments of all microbatches, stacked where they differ.

        A single microbatch takes them unchanged, keys too: it draws the numbers of a step without
        microbatches.
        """
        if self.count == 1:
            return list(args)

        def fold(key: Array) -> Array:
            return lax.map(lambda i: jax.random.fold_in(key, i), jnp.arange(self.count))

        return self._with(args, self._parts(args), fold)

    def summed(
        self, of_one: Callable[[list[Array]], Sums], args: Sequence[Array], like: PyTree
    ) -> Sums:
        """Scans `of_one(args) -> (to sum, to stack)` over the microbatches.

        The sums have the shapes and dtypes of `like`.
        """

        def body(total: PyTree, at: tuple[Array, list[Array]]) -> Sums:
            index, parts = at
            own = self._with(args, parts, lambda key: jax.random.fold_in(key, index))
            one, to_stack = of_one(own)
            # In the dtype of the sum, which may be wider than that of one microbatch's gradients.
            return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, one), to_stack

        parts = self._parts(args)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        return lax.scan(body, zeros, (jnp.arange(self.count), parts))

    def _parts(self, args: Sequence[Array]) -> list[Array]:
        """Splits a device's part of the batch, so nothing moves between devices."""
        pairs = zip(args, self.roles, strict=True)
        return [split(value, role.dim, self.count) for value, role in pairs if role.kind == BATCH]

    def _with(
        self, args: Sequence[Array], parts: Sequence[Array], fold: Callable[[Array], Array]
    ) -> list[Array]:
        """Returns the arguments, with `parts` in place of the batch and the keys folded."""
        rest = iter(parts)
        of = {BATCH: lambda _: next(rest), KEY: fold, REPLICATED: lambda value: value}
        return [of[role.kind](value) for value, role in zip(args, self.roles, strict=True)]


# -- batches that a user loads


@checked
def shard_batch(batch: PyTree, like: PyTree = None, *, batch_specs: PyTree = None) -> PyTree:
    """Puts a host batch on the devices, split along its first dimension, or as `batch_specs` says.

    `train_step` takes host batches too; a batch that you place early travels while the step before
    it runs. With `sequence=`, the second dimension is split too, where the devices divide it.
    Scalars and PRNG keys are replicated. The batch goes where the steps of `like` expect
    it: a plan, a placed state, or a placed `nnx.Optimizer`. Of a mesh, the axis `data` splits the
    rows, or its only axis. By default that is the mesh of `jax.set_mesh`, or one of all devices.

    Each of several processes passes its own rows, as `zerojax.run.process_slice` counts them; the
    rows of all processes together are the batch. Sequences are whole: processes whose devices share
    rows pass the same ones.

    Example:
        >>> batch = zerojax.shard_batch({"x": np.ones((8, 3))})
        >>> print(batch["x"].addressable_shards[0].data.shape)
        (1, 3)
    """
    _refusals.check_values(batch, "batch")
    kinds = {"Mesh": "mesh", "Plan": "plan", "Optimizer": "optimizer"}
    holder = kinds.get(type(like).__name__, "state")
    padding = f", like={holder}" * (like is not None)
    padding += ", batch_specs=batch_specs" * (batch_specs is not None)
    splits = splits_of(like)
    batch_roles = roles((batch,), batch_specs, splits)
    check((batch,), batch_roles, len(local_parts(splits)), padding=padding)
    leaves, treedef = jax.tree.flatten(batch)
    if splits.mesh.is_multi_process:
        places = _fingerprint.show([spec(role, splits) for role in batch_roles])
        _agree_on_rows(_fingerprint.of_shapes(batch), places, splits.mesh)

    def placed(value: ArrayLike, role: Role) -> Array:
        sharding = NamedSharding(splits.mesh, placed_spec(value, role, splits))
        if role.kind != BATCH:
            return _move.moved(value, sharding)
        value = _move.own(value, sharding.device_set)
        if sharding.is_fully_addressable or not getattr(value, "is_fully_addressable", True):
            return jax.device_put(value, sharding)
        return jax.make_array_from_process_local_data(sharding, np.asarray(value))

    return treedef.unflatten(map(placed, leaves, batch_roles))


def spec(role: Role, splits: Splits) -> PartitionSpec:
    """Returns how a step splits a leaf over the axes of a mesh."""
    over = {role.tokens: splits.tokens} | ({role.dim: splits.rows} if role.kind == BATCH else {})
    last = max((dim for dim in over if dim is not None), default=-1)
    return PartitionSpec(*(over.get(dim) for dim in range(last + 1)))


def placed_spec(value: Argument, role: Role, splits: Splits) -> PartitionSpec:
    """Returns how a leaf rests before a step, which pads tokens that its devices do not divide.

    Each of several processes loads whole sequences, and a step takes its blocks of them.
    """
    uneven = role.tokens is not None and jnp.shape(value)[role.tokens] % splits.blocks
    is_whole = uneven or splits.mesh.is_multi_process
    return spec(role._replace(tokens=None) if is_whole else role, splits)


@_compat.device_cache
def _agree_on_rows(rows: str, places: str, mesh: Mesh) -> None:
    """Raises where processes have different numbers of rows: each infers the batch from its own.

    The cache has them compare each shape of a batch once.
    """
    items = {"the rows of one process": rows, "how they are split": places}
    _agreement.agree("shard_batch", lambda: items, mesh, ordered=False)


@checked
def process_slice(rows: int, like: PyTree = None) -> slice:
    """Returns the rows that this process loads of a batch of `rows` rows over all processes.

    `like` is that of `zerojax.shard_batch`.

    Example:
        >>> print(zerojax.run.process_slice(32))  # a single process loads all
        slice(0, 32, None)
    """
    splits = splits_of(like)
    size = splits.ways
    if not isinstance(rows, int | np.integer) or rows < 1 or rows % size:
        raise ValueError(
            f"a batch of {rows!r} rows does not divide over {size} devices. Use a multiple of "
            f"{size}: the last batch may have fewer rows than the slice of a full one, and "
            "zerojax.pad_batch(batch, to=...) fills it up."
        )
    here = local_parts(splits)
    first, last = min(here), max(here)
    if last - first + 1 != len(here):
        raise ValueError(
            f"the devices of this process have the parts {sorted(here)} of the batch, which are "
            "not one slice. Order the mesh so that they follow one another along the ZeRO axis."
        )
    return slice(first * rows // size, (last + 1) * rows // size)


def splits_of(like: PyTree) -> Splits:
    """Returns the mesh, and its axes that split a batch for the steps of `like`."""
    if like is None or isinstance(like, Mesh):
        mesh = _mesh.current() if like is None else like
        if mesh is None or _mesh.DEFAULT_AXIS in mesh.axis_names or len(mesh.axis_names) == 1:
            return Splits(*_mesh.resolve(mesh, None))
        raise ValueError(
            f"like= is a mesh of the axes {mesh.axis_names}, none of which is called "
            f"{_mesh.DEFAULT_AXIS!r}: it does not say which ones split the rows. Pass the plan or "
            "the placed state, like=state."
        )
    plan = like if isinstance(like, Plan) else _carried.carried_plan(like)
    plan = getattr(like, "plan", None) if plan is None else plan  # of a placed state's `tx`
    if not isinstance(plan, Plan):
        raise TypeError(
            f"like= has the type {type(like).__name__}, which carries no plan. Pass the plan, a "
            "state from zerojax.shard_train_state, an optimizer from zerojax.nnx.shard, or a "
            "jax.sharding.Mesh with an axis data, or with one axis. A tuple or dict carries no "
            "plan: pass that from zerojax.plan."
        )
    return dataclasses.replace(plan._splits, mesh=plan._given_mesh or plan.mesh)


def local_parts(splits: Splits) -> set[int]:
    """Returns the indices of the batch's parts that are on the devices of this process."""
    size = splits.ways
    split = NamedSharding(splits.mesh, PartitionSpec(splits.rows))
    slices = split.addressable_devices_indices_map((size,)).values()
    return {index[0].indices(size)[0] for index in slices if index is not None}
