"""Keeps padding out of files: how what Orbax wrote loses it.

[Note: padding in files]
Orbax writes each device's shard as chunks of a zarr array, padding and all. A zarr array may end in
the middle of a chunk, so once all is written the padding is dropped by writing a shorter shape into
the array's header. No data moves. Chunks of nothing but padding are removed.
"""

import base64
import json
from collections.abc import Mapping, Sequence

import tensorstore as ts  # which Orbax writes with
from etils import epath

from zerojax._checkpoint import files as _files

HEADER = ".zarray"


def drop_padding(directory: epath.Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """Gives arrays that Orbax wrote their logical shapes, by their names in its files."""
    if not shapes:
        return
    where = str(directory)
    base = f"{where}/" if "://" in where else {"driver": "file", "path": f"{where}/"}
    store = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    dims: dict[str, int] = {}
    with ts.Transaction(atomic=True) as all_at_once:  # one by one, each would write the index
        edited = store.with_transaction(all_at_once)
        for name, shape in shapes.items():
            header = json.loads(store[f"{name}/{HEADER}"])
            dims[name] = _differs(header["shape"], shape)
            for key in _chunks_beyond(store, name, header["chunks"], shape):
                del edited[key]
            edited[f"{name}/{HEADER}"] = json.dumps({**header, "shape": list(shape)}).encode()
    _replicate(directory / _files.SHARDINGS, dims)


def _differs(padded: Sequence[int], shape: Sequence[int]) -> int:
    """Returns the dimension that is padded."""
    return next(d for d, (have, want) in enumerate(zip(padded, shape, strict=True)) if have != want)


def _chunks_beyond(
    store: ts.KvStore, name: str, chunk: Sequence[int], shape: Sequence[int]
) -> list[str]:
    """Returns the keys of an array's chunks that start where its logical shape has ended."""
    prefix, after = f"{name}/", f"{name}0"  # "0" is what follows "/"
    keys = store.list(ts.KvStore.KeyRange(prefix, after), len(prefix)).result()
    chunks = [key.decode() for key in keys if key.decode() != HEADER]
    return [
        prefix + key
        for key in chunks
        if any(int(i) * c >= n for i, c, n in zip(key.split("."), chunk, shape, strict=True))
    ]


def _replicate(file: epath.Path, dims: Mapping[str, int]) -> None:
    """Has Orbax, where it is told no sharding, replicate dimensions that no longer divide.

    It would otherwise ask JAX for the sharding that the padded array had, which JAX refuses. Of
    arrays on the host or on one device, Orbax notes none.
    """
    noted = json.loads(_files.read(file)) if file.exists() else {}
    for name, dim in dims.items():
        key = base64.urlsafe_b64encode(name.encode()).decode()
        sharding = json.loads(noted.get(key, "{}"))
        if dim < len(spec := sharding.get("partition_spec", ())):
            spec[dim] = None
            noted[key] = json.dumps(sharding)
    if not noted:
        return
    file.write_text(json.dumps(noted))
