"""The safetensors format, written and read with one tensor in memory at a time.

A file is a length, a JSON header and the raw bytes. The `safetensors` package can neither write a
file piece by piece nor slice bfloat16 from one into numpy.

The format has no checksums. The CRC-32 of each tensor's bytes goes into the header's metadata,
which other readers ignore. It is known last, so the header is written twice, with the same length.
"""

import collections
import itertools
import json
import math
import os
import pathlib
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import IO, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from zerojax._checkpoint import files as _files

DTYPES = {f"F{bits}": f"float{bits}" for bits in (64, 32, 16)}
DTYPES |= {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "BOOL": "bool"}
DTYPES |= {f"I{bits}": f"int{bits}" for bits in (64, 32, 16, 8)}
DTYPES |= {f"U{bits}": f"uint{bits}" for bits in (64, 32, 16, 8)}
INDEX = "model.safetensors.index.json"
MOST_HEADER_BYTES = 10**8  # as in the safetensors package
NO_TENSOR = "__metadata__"  # an entry of the header
CHECKSUM = "crc32:"  # before a tensor's name in the metadata


# A tensor to write: its shape and dtype, and a function that returns its value.
Written: TypeAlias = tuple[jax.ShapeDtypeStruct, Callable[[], np.ndarray]]


class FileTensor(NamedTuple):
    """A tensor in a file, read where it is used, and its checksum, if it has one."""

    file: str
    name: str
    value: np.ndarray
    checksum: str | None


def write(directory: str, tensors: Mapping[str, Written], most: float) -> None:
    """Writes files of `most` bytes and their index, in process 0; all processes call it."""
    first = jax.process_index() == 0
    sizes = {name: _files.nbytes(struct) for name, (struct, _) in tensors.items()}
    files = list(_files.grouped(tensors, sizes.__getitem__, most))
    weight_map = {}
    for number, group in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        weight_map |= dict.fromkeys(group, name)
        file = os.path.join(directory, name)
        try:
            with open(file if first else os.devnull, "wb") as target:
                _write_file(target, {name: tensors[name] for name in group}, first)
        except OSError as error:  # a full disk, say; Python does not name the file
            raise OSError(error.errno, f"{error.strerror}; {file} is not complete") from error
    if first:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        pathlib.Path(directory, INDEX).write_text(json.dumps(index))


def _write_file(file: IO[bytes], tensors: Mapping[str, Written], first: bool) -> None:
    kinds = {dtype: kind for kind, dtype in DTYPES.items()}
    entries: dict[str, object] = {}
    sums, end = dict.fromkeys(tensors, 0), 0
    for name, (struct, _) in tensors.items():
        start, end = end, end + _files.nbytes(struct)
        entry = {"dtype": kinds[str(struct.dtype)], "shape": [*struct.shape]}
        entries[name] = entry | {"data_offsets": [start, end]}
    file.write(_header(entries, sums))
    for name, (_, make) in tensors.items():
        value = make()  # in every process: each has a part of it
        # An array without its padding may not be contiguous. The host copies only a row at a time.
        rows = [value] if value.flags.c_contiguous else map(np.ascontiguousarray, value)
        for row in rows if first else ():
            data = row.reshape(-1).view(np.uint8).data
            sums[name] = zlib.crc32(data, sums[name])
            file.write(data)
    file.seek(0)
    file.write(_header(entries, sums))


def _header(entries: Mapping[str, object], sums: Mapping[str, int]) -> bytes:
    # transformers refuses files that do not name a framework that it knows.
    metadata = {"format": "pt"} | {CHECKSUM + name: f"{crc:08x}" for name, crc in sums.items()}
    text = json.dumps({NO_TENSOR: metadata, **entries}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def stored_files(path: str) -> list[str]:
    """Returns the files that an index names, or the only one."""
    index, only = (os.path.join(path, name) for name in (INDEX, "model.safetensors"))
    if os.path.exists(path) and not os.path.isdir(path):
        return [path]
    if not os.path.exists(index):
        if os.path.exists(only):
            return [only]
        there = f"there is no {INDEX} in {path}"
        there = there if os.path.exists(path) else f"{path} does not exist"
        raise ValueError(f"{there}. Pass a directory with {INDEX}, or one file.")
    try:
        names = sorted(set(json.loads(_files.read(index))["weight_map"].values()))
        if outside := [name for name in names if os.path.basename(name) != name]:
            raise ValueError(f"it names {outside[0]!r}, outside its directory")
        files = [os.path.join(path, name) for name in names]
    except _files.DAMAGE as error:
        raise ValueError(f"{index} is damaged ({error}). Export it again.") from error
    if missing := [file for file in files if os.path.isdir(file) or not os.path.exists(file)]:
        raise ValueError(f"{missing[0]}, which {index} names, is missing. Export it again.")
    return files


def read_file(file: str) -> list[FileTensor]:
    """Returns the tensors of a file."""
    try:
        _files.check_regular(file)
        with open(file, "rb") as source:
            length = int.from_bytes(source.read(8), "little")
            if length > min(MOST_HEADER_BYTES, os.path.getsize(file)):
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(source.read(length), object_pairs_hook=_unique)
        sum_of = header.pop(NO_TENSOR, {}).get
        data = np.memmap(file, np.uint8, mode="r")[8 + length :]
        tensors = [
            FileTensor(file, name, _tensor(data, name, **entry), sum_of(CHECKSUM + name))
            for name, entry in header.items()
        ]
        spans = sorted((*entry["data_offsets"], name) for name, entry in header.items())
        spans = [(0, 0, "the header"), *spans, (data.size, 0, "the end of the file")]
        for (_, end, last), (start, _, name) in itertools.pairwise(spans):
            if start != end:  # the format allows neither holes nor overlaps
                raise ValueError(f"{last} ends at byte {end}, and {name} is at {start}")
        return tensors
    except _files.DAMAGE as error:
        raise ValueError(f"{file} is truncated or damaged ({error}). Export it again.") from error


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    names = collections.Counter(name for name, _ in pairs)
    for name in (name for name, count in names.items() if count > 1):
        raise ValueError(f"it has {name} twice")
    return dict(pairs)


def check(tensors: Iterable[FileTensor], together: bool) -> None:
    """Raises for a tensor whose bytes do not have its checksum, if it has one.

    Processes that read `together` share the tensors, and raise together.
    """
    known = [tensor for tensor in tensors if tensor.checksum is not None]
    mine = known[jax.process_index() :: jax.process_count()] if together else known
    sums = ((one, zlib.crc32(one.value.reshape(-1).view(np.uint8))) for one in mine)
    wrong = next((one for one, crc in sums if f"{crc:08x}" != one.checksum), None)
    error = wrong and ValueError(
        f"{wrong.name} in {wrong.file} is damaged: its bytes do not match its checksum. Export it "
        "again. If another program changed the tensor, have that program write the file without "
        f"the old metadata ({CHECKSUM}{wrong.name})."
    )
    if together:
        _files.raise_together(error)
    elif error:
        raise error


def _tensor(
    data: np.ndarray, name: str, dtype: str, shape: list[int], data_offsets: list[int]
) -> np.ndarray:
    if dtype not in DTYPES:
        raise ValueError(f"{name} has the dtype {dtype!r}, not one of {', '.join(DTYPES)}")
    kind = jnp.dtype(DTYPES[dtype])
    start, end = data_offsets
    are_counts = all(type(number) is int and number >= 0 for number in (start, end, *shape))
    if not are_counts or end > data.size or end - start != math.prod(shape) * kind.itemsize:
        raise ValueError(f"{name}, {shape} of {dtype}, does not lie at bytes {start} to {end}")
    return data[start:end].view(kind).reshape(shape)


def some(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)[:3])
