"""Parameters to safetensors files and back, under one's own names or another library's."""

import functools
import operator
import os
from collections.abc import Callable, Container, Mapping, Set
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.typing import DTypeLike

from zerojax import _compat, _fingerprint
from zerojax._checkpoint import (
    files as _files,
    matching as _matching,
    names as _names,
    save as _save,
    tensor_files as _tensor_files,
)
from zerojax._checkpoint.names import FileParam, Names, dotted, params_of
from zerojax._checkpoint.stream import Outgoing, check_bytes, outgoing
from zerojax._checkpoint.tensor_files import DTYPES, NO_TENSOR, FileTensor, Written, some
from zerojax._declared import checked
from zerojax._plan import move as _move
from zerojax._plan.kept import KEEPS_MASTERS, SplitState, states_in
from zerojax._plan.padding import padded, padded_param_shapes, unpadded
from zerojax._plan.plan import Plan
from zerojax._state import state as _state
from zerojax._types import PyTree


@checked
def export_safetensors(
    path: str | os.PathLike,
    params: PyTree,
    *,
    names: Names | None = None,
    dtype: DTypeLike | None = None,
    max_file_bytes: float = 5e9,
    plan: Plan | None = None,
) -> None:
    """Writes parameters as safetensors files with an index, as Hugging Face lays them out.

    The host needs memory for one full tensor at a time. Every process calls it, process 0 writes.
    The name of a tensor is its path with dots, such as `dense.kernel`, or its name in `names`.

    Arguments:
        path: a new directory; an export that fails leaves nothing there.
        params: a tree of parameters, or a state that has them.
        names: another library's names and layouts of the tensors, as in
            `zerojax.checkpoint.import_safetensors`. Quantized weights are written as they are, or
            decoded if `names` has the path of the weight.
        dtype: write floats in this dtype, such as "bfloat16", that of the files you began with.
        max_file_bytes: start a new file rather than grow one beyond this.
        plan: the plan, for parameters without their state, and for states that do not carry an
            optimizer (tuples, dicts). Files hold arrays without padding, and only the plan knows
            the padding of these.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/weights"
        >>> state = zerojax.shard_train_state({"params": {"w": jnp.ones((64, 16))}}, stage=3)
        >>> zerojax.checkpoint.export_safetensors(path, state)
        >>> params = zerojax.checkpoint.import_safetensors(path, like=state)
        >>> print(params["w"].addressable_shards[0].data.shape)
        (8, 16)
    """
    check_bytes("max_file_bytes", max_file_bytes)
    leaving, by_tensor = outgoing(params, names, dtype, plan, "export", decodes=False)
    tensors = _exported(by_tensor, leaving)
    first = jax.process_index() == 0
    target = _save.absolute(path)
    lines = [
        f"{name} {_fingerprint.of_shapes(tensor.struct)} of {tensor.parts[0].leaf} {tensor.parts}"
        for name, tensor in by_tensor.items()
    ]
    options = {"tensors": "\n".join(lines), "max_file_bytes": max_file_bytes}
    _save.agree("zerojax.checkpoint.export_safetensors", target, **options)
    parts = target.parent / f"{target.name}.unfinished"
    with _files.only_writer_of_new(target, "Export to a new path.", lambda: [parts]):
        _files.remove([parts])  # of an export that was killed
        if first:
            os.makedirs(parts)
        _tensor_files.write(os.fspath(parts), tensors, max_file_bytes)
        if first:
            os.rename(parts, target)
        _files.raise_together(None)  # no process continues before the files are there


@checked
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
    """Reads safetensors files straight into shards: each device reads only its part.

    Weights that are quantized in `like` are quantized as they are read, a layer of a stack at a
    time; files may also hold them quantized. It first checks the tensors that have a checksum,
    which `export_safetensors` writes.

    Arguments:
        path: a directory with an index, or one `.safetensors` file.
        like: a `Plan`, a state or a tree of parameters, with the structure, dtypes and shardings.
        keep, ignore, cast: as in `zerojax.restore`.
        names: for files of another library, a dict from paths in `like` to tensors: a name, or a
            pair of a name and a layout such as `"out in -> in out"`, from theirs to ours. `{}` in a
            name counts layers, which are one stack here unless the path has a `{}` too.
        rename: a function from a tensor's name in the files to its name in `names`, or to its path
            in `like`.

    Returns:
        Only the parameters; put them into a state with `state.replace(params=...)`. With
        `Precision(master=)` the next step would overwrite them from the copies of the old ones in
        the optimizer's state, or correct them as if they were the old ones ("split"), whatever
        `like` is: make the state with the new parameters before you place it.

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
    if rename is not None and not callable(rename):
        raise TypeError(
            f"rename={rename!r} is not a function. Pass one from each name in the files to a path "
            "in like=; for a dict d, pass lambda name: d.get(name, name)."
        )
    plan, state = (like, None) if isinstance(like, Plan) else (None, like)
    params = _state.params_in(state) if plan is None else _state.get_params(plan.abstract())
    shapes = padded_param_shapes(params, state, plan)
    kept = {leaf.name for leaf in _state.named_leaves(params) if _matching.is_kept(leaf, keep)}
    files = _save.absolute(path)
    stored = _tensors(os.fspath(files), rename, ())

    def is_weight(codes: str, _: str) -> bool:
        return codes not in kept and not {codes, dotted(codes)} & stored.keys()

    asked = params_of(params, shapes, is_weight)
    sizes = {name: param.shape for name, param in asked.items()}
    by_tensor = _names.sources({} if names is None else names, sizes, kept)
    sources = [one for parts in by_tensor.values() for one in parts]
    stored = _tensors(os.fspath(files), rename, by_tensor)
    if plan is None:
        _check_masters(state, sizes.keys() - kept)
    options = {"keep": keep, "ignore": ignore, "cast": cast}
    together = _agree(files, params, stored, parts=sources, **options)
    tensors = _names.arranged(stored, [one for one in sources if one.leaf not in kept], sizes)
    saved = {name: struct for name, (struct, _) in tensors.items()}
    options |= {"theirs": {one.leaf: one.tensor for one in reversed(sources)}}
    options |= {"left_over": [name for name in stored if name not in by_tensor]}
    try:
        leaves = [param.in_files for param in asked.values()]
        wanted = _matching.match(leaves, saved, path, shapes, **options)
    except ValueError as error:
        if names or rename is not None or saved:
            raise
        raise ValueError(
            f"{error} No tensor has the name of a parameter: the files have {some(stored)}, not "
            f"{some(by_tensor)}. Pass rename=, a function from their names to those, or names=, a "
            "dict from these to theirs."
        ) from None
    # A check reads whole tensors. Processes that read parts of the same tensors share it.
    used = {one.tensor for one in sources if one.leaf in wanted}
    _tensor_files.check([stored[name] for name in sorted(used)], together)
    read: dict[str, jax.Array] = {}
    for name in wanted:
        (_, to_read), param = tensors[name], asked[name]
        read[param.leaf.name] = _placed(param.reading(to_read), param.value)
    return _matching.filled(params, read)


def _agree(
    path: epath.Path, params: PyTree, stored: Mapping[str, FileTensor], **options: Any
) -> bool:
    """Returns whether the processes read together; raises where they would read other tensors."""
    structs = map(_matching.stored_struct, jax.tree.leaves(params))
    if all(struct.sharding.is_fully_addressable for struct in structs):
        return False
    lines = (f"{name} is {tensor.name}" for name, tensor in stored.items())
    call = "zerojax.checkpoint.import_safetensors"
    _save.agree(call, path, params, tensors="\n".join(lines), **options)
    return True


def _tensors(
    path: str, rename: Callable[[str], str] | None, known: Container[str]
) -> dict[str, FileTensor]:
    """Returns the tensors of the files by their names, after `rename`; paths get dots."""
    tensors: dict[str, FileTensor] = {}
    for file in _tensor_files.stored_files(path):
        for tensor in _tensor_files.read_file(file):
            name = tensor.name if rename is None else rename(tensor.name)
            if not isinstance(name, str):
                raise TypeError(
                    f"rename= makes {name!r} of {tensor.name!r}. Pass a function from each name in "
                    "the files to a path in like=, a string; leave out tensors with ignore=."
                )
            name = dotted(name) if dotted(name) in known else name
            if name in tensors:
                raise ValueError(
                    f"{tensor.name} in {file} is a second {name}. Give each tensor its own name "
                    "with rename=."
                )
            tensors[name] = tensor
    return tensors


def _check_masters(like: PyTree, wanted: Set[str]) -> None:
    """Raises if the next step would overwrite the parameters from master copies of the old ones."""
    opt_state = _state.get_opt_state(like)
    states = [node for node in states_in(opt_state) if isinstance(node, KEEPS_MASTERS)]
    masters = [node[-2] for node in states]
    copied = wanted & {leaf.name for tree in masters for leaf in _state.named_leaves(tree)}
    if copied:
        is_split = any(isinstance(node, SplitState) for node in states)
        what = "8-bit corrections" if is_split else "master copies"
        raise ValueError(
            f"like= is a state with {what} of {some(copied)}, from which its next step "
            "would restore the old parameters. Read the new ones before the state is placed, with "
            "like=zerojax.plan(make_state, stage=3), make the state with them, and place it with "
            "precision=. To read them without training, pass like=zerojax.plan(state)."
        )


def _exported(
    by_tensor: Mapping[str, Outgoing], params: Mapping[str, FileParam]
) -> dict[str, Written]:
    for name, (parts, struct) in by_tensor.items():
        if name == NO_TENSOR:
            raise ValueError(
                f"{parts[0].leaf} would be called {name}, which in safetensors is no tensor. Give "
                "it another name in names=."
            )
        if str(struct.dtype) not in DTYPES.values():
            named = ", ".join(one.leaf for one in parts) or "params"
            raise TypeError(
                f"{named} is {struct.dtype}, which safetensors does not know. Cast it or leave it "
                "out."
            )
    return {
        name: (tensor.struct, functools.partial(_assembled, tensor, params))
        for name, tensor in by_tensor.items()
    }


def _assembled(tensor: Outgoing, params: Mapping[str, FileParam]) -> np.ndarray:
    """Returns a tensor of its parts; only one layer of a stack is on the host at a time."""
    (first, *_), struct = tensor
    if first.split is None and not first.index and params[first.leaf].coding is None:
        whole = unpadded(_move.to_host(params[first.leaf].value), struct.shape)
        return whole.astype(struct.dtype, copy=False)
    whole = np.empty(struct.shape, struct.dtype)
    for one in tensor.parts:
        layer, coding = params[one.leaf].value, params[one.leaf].coding
        if one.index:  # the devices slice it
            cut = _sliced if isinstance(layer, jax.Array) else operator.getitem
            layer = cut(layer, one.index)
        layer = _move.to_host(layer)
        if coding is not None:
            rows = unpadded(layer, (*one.shape[:-1], coding.row))
            layer = np.asarray(coding.weight_of(rows))
        one.view(whole)[...] = unpadded(layer, one.shape)
    return whole


@jax.jit
def _sliced(value: jax.Array, index: tuple[int, ...]) -> jax.Array:
    return _compat.fetched(value)[index]


def _placed(read: Callable[[tuple[slice, ...]], np.ndarray], like: PyTree) -> jax.Array:
    struct = _matching.stored_struct(like)
    shard = struct.sharding.shard_shape(struct.shape)

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        index = index or (slice(None),) * len(shard)
        return padded(np.asarray(read(index), struct.dtype), shard)

    value = jax.make_array_from_callback(struct.shape, struct.sharding, part)
    return _matching.laundered(value, like)
