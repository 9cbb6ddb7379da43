"""Writes and reads parameters as safetensors files, with one leaf in memory at a time.

The format is a length, a JSON header and the raw bytes. The `safetensors` package can neither
write a file piece by piece nor slice bfloat16 from one into numpy; twenty lines each can.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zerojax._checkpoint import checkpoint as _checkpoint, files as _files, matching as _matching
from zerojax._checkpoint.matching import Saved
from zerojax._plan import move as _move
from zerojax._plan.padding import Shape, padded, padded_param_shapes, unpadded
from zerojax._plan.plan import Plan, check_plan
from zerojax._state import refusals as _refusals, state as _state
from zerojax._state.state import Leaf
from zerojax._types import PyTree

DTYPES = {f"F{bits}": f"float{bits}" for bits in (64, 32, 16)}
DTYPES |= {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "BOOL": "bool"}
DTYPES |= {f"I{bits}": f"int{bits}" for bits in (64, 32, 16, 8)}
DTYPES |= {f"U{bits}": f"uint{bits}" for bits in (64, 32, 16, 8)}
INDEX = "model.safetensors.index.json"
MOST_HEADER_BYTES = 10**8  # as in the safetensors package


class Tensor(NamedTuple):
    """A leaf as the files have it: named with dots, and without its padding."""

    name: str
    value: PyTree
    shape: Shape
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def export_safetensors(
    path: str | os.PathLike,
    params: PyTree,
    *,
    max_file_bytes: int = 5 * 10**9,
    plan: Plan | None = None,
) -> None:
    """Writes parameters as safetensors files with an index, as Hugging Face lays them out.

    The host needs memory for one full leaf at a time. Every process calls it, process 0 writes.
    Tensors are named by their paths with dots, such as `dense.kernel`.

    Arguments:
        path: a new directory; complete or not there at all.
        params: a tree of parameters, or a state that has them.
        max_file_bytes: start a new file rather than grow one beyond this.
        plan: the plan, for parameters without their state, and for states that do not carry an
            optimizer (tuples, dicts): files hold arrays without padding, and these do not tell
            what is padding.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/weights"
        >>> state = zerojax.shard_train_state({"params": {"w": jnp.ones((64, 16))}}, stage=3)
        >>> zerojax.export_safetensors(path, state)
        >>> params = zerojax.import_safetensors(path, like=state)
        >>> print(params["w"].addressable_shards[0].data.shape)
        (8, 16)
    """
    _refusals.check_alive(params)
    if plan is not None:
        check_plan(plan, "plan=")
    tree = _state.params_in(params)
    leaves, shapes = _state.named_leaves(tree), padded_param_shapes(tree, params, plan)
    first = jax.process_index() == 0
    target = _checkpoint.absolute(path)
    parts = target.parent / f"{target.name}.unfinished"
    remedy, refusal = "Export to a new path.", _refusal(leaves)
    with _files.only_writer_of_new(target, remedy, lambda: [parts], refusal):
        _files.remove([parts])  # of an export that was killed
        if first:
            os.makedirs(parts)
        tensors = [_tensor_of(leaf, shapes) for leaf in leaves]
        _write_all(os.fspath(parts), tensors, max_file_bytes, first)
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
    rename: Callable[[str], str] | None = None,
) -> PyTree:
    """Reads safetensors files straight into shards: each device's part, and no more.

    Arguments:
        path: a directory with an index, or one `.safetensors` file.
        like: a `Plan`, a state or a tree of parameters; gives structure, dtypes and shardings.
        keep, ignore, cast: as in `zerojax.restore`.
        rename: from a tensor's name in the files to its path in `like`, for files that others
            wrote.

    Returns:
        The parameters alone; put them into a state with `state.replace(params=...)`.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/weights"
        >>> zerojax.export_safetensors(path, {"model": {"proj": {"weight": jnp.ones((64, 16))}}})
        >>> plan = zerojax.plan({"params": {"proj": {"kernel": jnp.zeros((64, 16))}}}, stage=3)
        >>> ours = lambda name: name.removeprefix("model.").replace("weight", "kernel")
        >>> params = zerojax.import_safetensors(path, like=plan, rename=ours)
        >>> print(params["proj"]["kernel"].addressable_shards[0].data.shape)
        (8, 16)
    """
    if isinstance(like, Plan):
        params = _state.get_params(like.abstract())
        shapes = padded_param_shapes(params, None, like)
    else:
        params = _state.params_in(like)
        shapes = padded_param_shapes(params, like)
    leaves = _state.named_leaves(params)
    slashed = {_dotted(leaf): leaf.name for leaf in leaves}
    tensors = _tensors(os.fspath(_checkpoint.absolute(path)), rename, slashed)
    saved = {name: Saved(value.shape, value.dtype, False) for name, value in tensors.items()}
    try:
        wanted = _matching.match(leaves, saved, path, shapes, keep=keep, ignore=ignore, cast=cast)
    except ValueError as error:
        if rename is not None or saved.keys() & slashed.values():
            raise
        raise ValueError(
            f"{error} No tensor has the name of a parameter: there are {_some(saved)} and not "
            f"{_some(slashed)}. Pass rename=, a function from their names to those."
        ) from None
    read = {name: _placed(tensors[name], value) for name, value in wanted.items()}
    return _matching.filled(params, read)


def _tensors(
    path: str, rename: Callable[[str], str] | None, slashed: dict[str, str]
) -> dict[str, np.ndarray]:
    """Returns what the files hold, by the names of leaves; their bytes are read where used."""
    tensors: dict[str, np.ndarray] = {}
    for file in _stored_files(path):
        for name, value in _read_file(file):
            ours = name if rename is None else _renamed(rename, name)
            ours = slashed.get(ours, ours)
            if ours in tensors:
                raise ValueError(
                    f"{name} in {file} is a second {ours}. Give each tensor a name of its own "
                    "with rename=."
                )
            tensors[ours] = value
    return tensors


def _renamed(rename: Callable[[str], str], name: str) -> str:
    ours = rename(name) if callable(rename) else None
    if not isinstance(ours, str):
        what = f"made {ours!r} of {name!r}" if callable(rename) else f"is {type(rename).__name__}"
        raise TypeError(
            f"rename= {what}. Pass a function from each name in the files to a path in like=, a "
            "string; leave out what is not wanted with ignore=."
        )
    return ours


def _some(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)[:3])


def _refusal(leaves: list[Leaf]) -> Exception | None:
    """Returns an error for leaves that the format has no dtype for, or whose names read alike."""
    named: dict[str, str] = {}
    for leaf in leaves:
        if str(_dtype(leaf)) not in DTYPES.values():
            return TypeError(
                f"{leaf.name} is {_dtype(leaf)}, which safetensors does not know. Cast it or "
                "leave it out."
            )
        other = named.setdefault(_dotted(leaf), leaf.name)
        if other != leaf.name:
            return ValueError(f"{other} and {leaf.name} are both {_dotted(leaf)}. Rename one.")
    return None


def _dotted(leaf: Leaf) -> str:
    return leaf.name.replace("/", ".")


def _dtype(leaf: Leaf) -> np.dtype:
    """Returns the dtype as stored: a numpy array's own, even one that JAX would narrow."""
    given = getattr(leaf.value, "dtype", None)
    return np.asarray(leaf.value).dtype if given is None else given


def _tensor_of(leaf: Leaf, shapes: Mapping[str, Shape]) -> Tensor:
    shape = shapes.get(leaf.name, np.shape(leaf.value))
    return Tensor(_dotted(leaf), leaf.value, shape, _dtype(leaf))


def _write_all(directory: str, tensors: list[Tensor], most: int, first: bool) -> None:
    files = list(_files.grouped(tensors, lambda tensor: tensor.nbytes, most))
    weight_map = {}
    for number, group in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        weight_map |= {tensor.name: name for tensor in group}
        file = os.path.join(directory, name)
        try:
            _write_file(file, group, first)
        except OSError as error:  # a full disk, say; Python does not name the file
            raise OSError(error.errno, f"{error.strerror}; {file} is not complete") from error
    if first:
        total = sum(tensor.nbytes for tensor in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        with open(os.path.join(directory, INDEX), "w") as file:
            json.dump(index, file)


def _write_file(name: str, group: list[Tensor], first: bool) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "np"}}
    kinds = {dtype: kind for kind, dtype in DTYPES.items()}
    end = 0
    for tensor in group:
        start, end = end, end + tensor.nbytes
        header[tensor.name] = {
            "dtype": kinds[str(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(name if first else os.devnull, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in group:
            full = unpadded(_move.to_host(tensor.value), tensor.shape)  # all processes have a part
            for part in _contiguous(full) if first else ():
                file.write(part.reshape(-1).view(np.uint8).data)


def _contiguous(full: np.ndarray) -> Iterable[np.ndarray]:
    """Yields a leaf in contiguous parts; without its padding it may not be one itself.

    Then it goes row by row, so that the host does not have the leaf twice.
    """
    if full.flags.c_contiguous:
        yield full
    else:
        yield from map(np.ascontiguousarray, full)


def _stored_files(path: str) -> list[str]:
    index, only = (os.path.join(path, name) for name in (INDEX, "model.safetensors"))
    if os.path.isfile(path):
        return [path]
    if not os.path.isfile(index):
        if os.path.exists(only):
            return [only]
        what = (
            f"there is no {INDEX} in {path}" if os.path.exists(path) else f"{path} does not exist"
        )
        raise ValueError(f"{what}. Give a directory with {INDEX}, or one file.")
    try:
        with open(index) as file:
            names = sorted(set(json.load(file)["weight_map"].values()))
        if outside := [name for name in names if os.path.basename(name) != name]:
            raise ValueError(f"it names {outside[0]!r}, outside of its directory")
    except _files.DAMAGE as error:
        raise ValueError(f"{index} is damaged ({error}). Export it again.") from error
    files = [os.path.join(path, name) for name in names]
    for file in files:
        if not os.path.isfile(file):
            raise ValueError(f"{file} is missing, and {index} names it. Export it again.")
    return files


def _read_file(file: str) -> list[tuple[str, np.ndarray]]:
    """Returns the names and arrays of a file; their bytes are read where they are used."""
    try:
        with open(file, "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > min(MOST_HEADER_BYTES, os.path.getsize(file)):
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(opened.read(length), object_pairs_hook=_each_once)
        header.pop("__metadata__", None)
        data = np.memmap(file, np.uint8, mode="r")[8 + length :]
        tensors = [(name, _tensor(data, name, **entry)) for name, entry in header.items()]
        _check_tiled([entry["data_offsets"] for entry in header.values()], data.size)
        return tensors
    except _files.DAMAGE as error:
        raise ValueError(f"{file} is truncated or damaged ({error}). Export it again.") from error


def _each_once(pairs: list[tuple[str, PyTree]]) -> dict[str, PyTree]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"a name twice among {_some(found)}")
    return found


def _tensor(
    data: np.ndarray, name: str, dtype: str, shape: list[int], data_offsets: list[int]
) -> np.ndarray:
    if dtype not in DTYPES:
        raise ValueError(f"{name} has the dtype {dtype!r}, which is none of {', '.join(DTYPES)}")
    kind = jnp.dtype(DTYPES[dtype])
    start, end = data_offsets
    are_counts = all(type(number) is int and number >= 0 for number in (start, end, *shape))
    if not are_counts or end > data.size or end - start != math.prod(shape) * kind.itemsize:
        raise ValueError(f"{name}, {shape} of {dtype}, does not lie at bytes {start} to {end}")
    return data[start:end].view(kind).reshape(shape)


def _check_tiled(offsets: list[list[int]], size: int) -> None:
    """Raises unless each byte belongs to one tensor, as the format demands."""
    end = 0
    for start, stop in [*sorted(offsets), [size, size]]:
        if start != end:
            at = min(start, end)
            raise ValueError(f"{'no tensor' if start > end else 'two tensors'} at byte {at}")
        end = stop


def _placed(stored: np.ndarray, like: PyTree) -> jax.Array:
    struct = _matching.stored_struct(like)
    shard = struct.sharding.shard_shape(struct.shape)

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        return padded(np.asarray(stored[index], struct.dtype), shard)

    read = jax.make_array_from_callback(struct.shape, struct.sharding, part)
    return _matching.laundered(read, like)
