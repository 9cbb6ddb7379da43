"""Parameters to safetensors files and back, under one's own names or another library's."""

import functools
import operator
import os
from collections.abc import Callable, Mapping, Set

import jax
import numpy as np

from zerojax import _compat
from zerojax._checkpoint import (
    files as _files,
    matching as _matching,
    names as _names,
    save as _save,
    tensor_files as _tensor_files,
)
from zerojax._checkpoint.names import Names, Source
from zerojax._checkpoint.tensor_files import DTYPES, FileTensor, some
from zerojax._plan import move as _move
from zerojax._plan.padding import Shape, padded, padded_param_shapes, unpadded
from zerojax._plan.plan import Plan, check_plan
from zerojax._plan.precision import MasterState
from zerojax._state import refusals as _refusals, state as _state
from zerojax._state.state import Leaf
from zerojax._types import PyTree

LEAST_FILE_BYTES = 1000  # a header has about as many


def export_safetensors(
    path: str | os.PathLike,
    params: PyTree,
    *,
    names: Names | None = None,
    max_file_bytes: float = 5e9,
    plan: Plan | None = None,
) -> None:
    """Writes parameters as safetensors files with an index, as Hugging Face lays them out.

    The host needs memory for one full tensor at a time. Every process calls it, process 0 writes.
    Tensors are named by their paths with dots, such as `dense.kernel`, or as `names` says.

    Arguments:
        path: a new directory; complete or not there at all.
        params: a tree of parameters, or a state that has them.
        names: how another library names the tensors and lays them out, as in
            `zerojax.checkpoint.import_safetensors`.
        max_file_bytes: start a new file rather than grow one beyond this.
        plan: the plan, for parameters without their state, and for states that do not carry an
            optimizer (tuples, dicts): files hold arrays without padding, and these do not tell
            what is padding.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/weights"
        >>> state = zerojax.shard_train_state({"params": {"w": jnp.ones((64, 16))}}, stage=3)
        >>> zerojax.checkpoint.export_safetensors(path, state)
        >>> params = zerojax.checkpoint.import_safetensors(path, like=state)
        >>> print(params["w"].addressable_shards[0].data.shape)
        (8, 16)
    """
    _refusals.check_alive(params)
    if plan is not None:
        check_plan(plan, "plan=")
    tree = _state.params_in(params)
    leaves, shapes = _state.named_leaves(tree), padded_param_shapes(tree, params, plan)
    _check_export(params, leaves, max_file_bytes)
    sizes = {leaf.name: _shape(leaf, shapes) for leaf in leaves}
    by_tensor = _names.sources({} if names is None else names, sizes)
    own = [leaf for leaf in leaves if leaf.name not in _mapped(by_tensor)]
    first = jax.process_index() == 0
    target = _save.absolute(path)
    parts = target.parent / f"{target.name}.unfinished"
    remedy, refusal = "Export to a new path.", _refusal(leaves, own, by_tensor)
    with _files.only_writer_of_new(target, remedy, lambda: [parts], refusal):
        _files.remove([parts])  # of an export that was killed
        if first:
            os.makedirs(parts)
        for leaf in own:
            by_tensor[_dotted(leaf.name)] = [_names.source(leaf.name, (), sizes[leaf.name])]
        values = {leaf.name: leaf.value for leaf in leaves}
        dtypes = {leaf.name: _dtype(leaf) for leaf in leaves}
        tensors = {n: (one.tensor, dtypes[one.leaf]) for n, (one, *_) in by_tensor.items()}
        full = functools.partial(_full, tensors, by_tensor, values)
        _tensor_files.write(os.fspath(parts), tensors, full, max_file_bytes)
        if first:
            os.rename(parts, target)
        _files.raise_together(None)  # no process continues before it is there


def import_safetensors(
    path: str | os.PathLike,
    like: PyTree,
    *,
    keep: str | None = None,
    ignore: str | None = None,
    cast: bool = False,
    names: Names | None = None,
    rename: Callable[[str], str] | None = None,
) -> PyTree:
    """Reads safetensors files straight into shards: each device's part, and no more.

    Tensors with a checksum, as `export_safetensors` writes it, are checked before.

    Arguments:
        path: a directory with an index, or one `.safetensors` file.
        like: a `Plan`, a state or a tree of parameters; gives structure, dtypes and shardings.
        keep, ignore, cast: as in `zerojax.restore`.
        names: for files that others wrote, from paths in `like` to tensors: a name, or a pair of
            a name and a layout such as `"out in -> in out"`, from theirs to ours. `{}` in a name
            counts layers, which are one stack here unless the path has a `{}` too.
        rename: from a tensor's name in the files to that in `names`, or to its path in `like`.

    Returns:
        The parameters alone; put them into a state with `state.replace(params=...)`. Not so with
        `Precision(master=)`, whatever `like` is: the next step would make the parameters again from
        copies of the old ones in the optimizer's state. Make the state with those that are read,
        before it is placed.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/weights"
        >>> layers = {str(n): {"proj": {"weight": jnp.ones((16, 64))}} for n in range(4)}
        >>> zerojax.checkpoint.export_safetensors(path, {"model": layers})
        >>> plan = zerojax.plan({"params": {"proj": {"kernel": jnp.zeros((4, 64, 16))}}}, stage=3)
        >>> names = {"proj/kernel": ("model.{}.proj.weight", "out in -> in out")}
        >>> params = zerojax.checkpoint.import_safetensors(path, like=plan, names=names)
        >>> print(params["proj"]["kernel"].addressable_shards[0].data.shape)
        (4, 8, 16)
    """
    if isinstance(like, Plan):
        params = _state.get_params(like.abstract())
        shapes = padded_param_shapes(params, None, like)
    else:
        params = _state.params_in(like)
        shapes = padded_param_shapes(params, like)
    leaves = _state.named_leaves(params)
    sizes = {leaf.name: _shape(leaf, shapes) for leaf in leaves}
    by_tensor = _names.sources({} if names is None else names, sizes)
    stored = _tensors(os.fspath(_save.absolute(path)), rename, by_tensor, sizes)
    kept = {leaf.name for leaf in leaves if _matching.is_kept(leaf, keep)}
    if not isinstance(like, Plan):
        _check_masters(like, sizes.keys() - kept)
    firsts = _names.first_names(by_tensor)
    for leaf, name in firsts.items():  # which the match by name would not report as left over
        is_other = leaf in stored and leaf not in by_tensor
        if is_other and not _matching.finds(ignore, leaf, "ignore="):
            raise ValueError(
                f"{leaf} in {path} is named as the parameter that names= finds in {name}. Leave "
                "it behind with ignore=, or correct names=."
            )
    tensors = _names.arranged(stored, by_tensor, sizes, kept)
    saved = {name: tensor for name, (tensor, _) in tensors.items()}
    options = {"keep": keep, "ignore": ignore, "cast": cast, "theirs": firsts}
    try:
        wanted = _matching.match(leaves, saved, path, shapes, **options)
    except ValueError as error:
        if names or rename is not None or saved.keys() & sizes.keys():
            raise
        raise ValueError(
            f"{error} No tensor has the name of a parameter: there are {some(saved)} and not "
            f"{some(map(_dotted, sizes))}. Pass rename=, a function from their names to those, or "
            "names=, a dict from these to theirs."
        ) from None
    # Each tensor is read whole to check it. Processes that read parts of the same share that.
    used = {name for name, parts in by_tensor.items() if any(one.leaf in wanted for one in parts)}
    used |= wanted.keys() - _mapped(by_tensor)
    shardings = [_matching.stored_struct(value).sharding for value in wanted.values()]
    together = not all(sharding.is_fully_addressable for sharding in shardings)
    _tensor_files.check([stored[name] for name in sorted(used & stored.keys())], together)
    read = {name: _placed(tensors[name][1], value) for name, value in wanted.items()}
    return _matching.filled(params, read)


def _tensors(
    path: str,
    rename: Callable[[str], str] | None,
    by_tensor: Mapping[str, list[Source]],
    sizes: Mapping[str, Shape],
) -> dict[str, FileTensor]:
    """Returns what the files hold, by the names of leaves and of what `names=` has."""
    slashed = {_dotted(name): name for name in sizes if name not in _mapped(by_tensor)}
    tensors: dict[str, FileTensor] = {}
    for file in _tensor_files.stored_files(path):
        for tensor in _tensor_files.read_file(file):
            ours = tensor.name if rename is None else _renamed(rename, tensor.name)
            ours = slashed.get(ours, ours)
            if ours in tensors:
                raise ValueError(
                    f"{tensor.name} in {file} is a second {ours}. Give each tensor a name of its "
                    "own with rename=."
                )
            tensors[ours] = tensor
    return tensors


def _check_export(params: PyTree, leaves: list[Leaf], most: object) -> None:
    """Raises where there is nothing to export, or for a size that files cannot have."""
    if not leaves:
        raise ValueError(
            f"a {type(params).__name__} without parameters was passed, so there is nothing to "
            "export. Pass a state, or a tree of parameters."
        )
    if not isinstance(most, int | float | np.number) or not most >= LEAST_FILE_BYTES:
        raise ValueError(
            f"max_file_bytes={most!r} must be a number from {LEAST_FILE_BYTES}: after how many "
            "bytes a new file starts. 5e9 is 5 GB."
        )


def _check_masters(like: PyTree, wanted: Set[str]) -> None:
    """Raises where the next step would write the copies of old parameters over those read."""
    opt_state = _state.get_opt_state(like)
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, MasterState))
    masters = [node.master for node in nodes if isinstance(node, MasterState)]
    copied = wanted & {leaf.name for tree in masters for leaf in _state.named_leaves(tree)}
    if copied:
        raise ValueError(
            f"like= is a state with master copies of {some(copied)}, from which its next "
            "step would make the parameters again, as they were. Read them before the state is "
            "placed, with like=zerojax.plan(make_state, stage=3), make the state with them, and "
            "place it with precision=. To read them without training, like=zerojax.plan(state)."
        )


def _renamed(rename: Callable[[str], str], name: str) -> str:
    ours = rename(name) if callable(rename) else None
    if not isinstance(ours, str):
        what = f"made {ours!r} of {name!r}" if callable(rename) else f"is {type(rename).__name__}"
        raise TypeError(
            f"rename= {what}. Pass a function from each name in the files to a path in like=, a "
            "string; leave out what is not wanted with ignore=."
        )
    return ours


def _mapped(by_tensor: Mapping[str, list[Source]]) -> set[str]:
    """Returns the leaves that `names=` has."""
    return {one.leaf for parts in by_tensor.values() for one in parts}


def _refusal(
    leaves: list[Leaf], own: list[Leaf], by_tensor: Mapping[str, list[Source]]
) -> Exception | None:
    """Returns an error for dtypes that do not fit a tensor, or names that read alike.

    `own` are those that go out under their own names.
    """
    dtypes = {leaf.name: str(_dtype(leaf)) for leaf in leaves}
    for name, dtype in dtypes.items():
        if dtype not in DTYPES.values():
            return TypeError(
                f"{name} is {dtype}, which safetensors does not know. Cast it or leave it out."
            )
    for name, parts in by_tensor.items():
        if len({dtypes[one.leaf] for one in parts}) > 1:
            has = " and ".join(f"{one.leaf}, {dtypes[one.leaf]}," for one in parts)
            return TypeError(
                f"names= says that {name} has {has} as its parts. Cast them to one dtype."
            )
    named = {name: parts[0].leaf for name, parts in by_tensor.items()}
    for leaf in own:
        other = named.setdefault(_dotted(leaf.name), leaf.name)
        if other != leaf.name:
            return ValueError(f"{other} and {leaf.name} are both {_dotted(leaf.name)}. Rename one.")
    return None


def _dotted(name: str) -> str:
    return name.replace("/", ".")


def _dtype(leaf: Leaf) -> np.dtype:
    """Returns the dtype as stored: a numpy array's own, even one that JAX would narrow."""
    dtype = getattr(leaf.value, "dtype", None)
    return np.asarray(leaf.value).dtype if dtype is None else dtype


def _shape(leaf: Leaf, shapes: Mapping[str, Shape]) -> Shape:
    return shapes.get(leaf.name, np.shape(leaf.value))


def _full(
    tensors: Mapping[str, tuple[Shape, np.dtype]],
    by_tensor: Mapping[str, list[Source]],
    values: Mapping[str, PyTree],
    name: str,
) -> np.ndarray:
    """Returns a tensor, of one parameter as it is or of parts of some."""
    (shape, dtype), parts = tensors[name], by_tensor[name]
    if len(parts) == 1 and parts[0].is_whole:
        return unpadded(_move.to_host(values[parts[0].leaf]), shape)
    tensor = np.empty(shape, dtype)
    for one in parts:
        layer = values[one.leaf]
        if one.index:  # sliced on the devices, no more travels to the host than a layer
            cut = _sliced if isinstance(layer, jax.Array) else operator.getitem
            layer = cut(layer, one.index)
        one.view(tensor)[...] = unpadded(_move.to_host(layer), one.shape)
    return tensor


@jax.jit
def _sliced(value: jax.Array, index: tuple[int, ...]) -> jax.Array:
    return _compat.fetched(value)[index]


def _placed(read: Callable[[tuple[slice, ...]], np.ndarray], like: PyTree) -> jax.Array:
    struct = _matching.stored_struct(like)
    shard = struct.sharding.shard_shape(struct.shape)

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        index = index or (slice(None),) * len(shard)
        return padded(np.asarray(read(index), struct.dtype), shard)

    return _matching.laundered(
        jax.make_array_from_callback(struct.shape, struct.sharding, part), like
    )
