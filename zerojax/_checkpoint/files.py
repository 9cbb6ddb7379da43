"""Files of a checkpoint: one writer at a time, and every byte accounted for on the way back.

[Note: padding in files]
Orbax writes each device's shard as chunks of a zarr array, padding and all. A zarr array may end in
the middle of a chunk, so once all is written the padding is dropped by writing a shorter shape into
the array's header. No data moves. Chunks of nothing but padding are removed.
"""

import base64
import contextlib
import errno
import json
import os
import pathlib
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, TypeVar

import jax
import numpy as np
import tensorstore as ts  # which Orbax writes with
from etils import epath  # Orbax's own path type: local, gs:// and s3://
from jax.experimental import multihost_utils

from zerojax._run import processes as _processes
from zerojax._warn import warn

T = TypeVar("T")

METADATA = "_METADATA"  # Orbax's file of the tree, and of what is saved with it
ITEM = "default"  # where Orbax's CheckpointManager puts a state inside of a step
SHARDINGS = "_sharding"  # Orbax's file of where each leaf was, for those who restore without `like`
CHECKSUMS = "zerojax_checksums.json"
WRITTEN_LATER = "_CHECKPOINT_METADATA"  # Orbax's note of times and metrics; restoring does without
HEADER = ".zarray"
BLOCK = 2**22
ONE_WRITER = (
    "Give each writer a path of its own, or wait for the other to finish (in a notebook, close() "
    "the Checkpoints of an earlier cell)."
)
SEEN_WITHIN = 10.0  # seconds after which a file that another process made must be seen
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # some mounts of Lustre and NFS
IRREGULAR = "not a file, but a pipe or a device"
# What a parser makes of text that is not what was written.
DAMAGE = (ValueError, KeyError, AttributeError, TypeError, RecursionError)


def tree_in(given: epath.Path) -> epath.Path | None:
    """Returns the directory of a tree: `given`, or the item that a manager put in it."""
    for directory in (given, given / ITEM, given / "state"):
        if any((directory / file).exists() for file in (METADATA, CHECKSUMS)):
            return directory
    return None


def other_items(path: str) -> list[str]:
    """Names what an Orbax manager saved beside the tree that `restore` reads."""
    given = epath.Path(path)
    tree = tree_in(given)
    items = () if tree == given else given.iterdir()
    return sorted(entry.name for entry in items if entry.is_dir() and entry != tree)


def is_complete(step: epath.Path) -> bool:
    """Whether Orbax finished what is in a step's directory, be it a tree or other items."""
    note = step / WRITTEN_LATER  # which its manager reads of each step
    if _is_irregular(note):
        raise ValueError(f"{note} is {IRREGULAR}. Remove it.")
    return note.exists() or tree_in(step) is not None


def nothing_at(given: epath.Path) -> str:
    """Returns the error for a path without a tree, with what would read what is there."""
    if given.exists() and (given.suffix == ".safetensors" or any(given.glob("*.safetensors"))):
        return (
            f"{given} has safetensors, not a checkpoint. Pass it to "
            "zerojax.checkpoint.import_safetensors."
        )
    if given.exists() and not given.is_dir():
        return (
            f"{given} is a file, and checkpoints are directories. One that flax.serialization "
            "wrote opens with plan.place(flax.serialization.from_bytes(make_state(), "
            "open(path, 'rb').read()))."
        )
    below = [entry for entry in given.iterdir() if tree_in(entry)] if given.exists() else []
    if below:
        names = sorted((entry.name for entry in below), key=lambda name: (len(name), name))
        return (
            f"{given} is no checkpoint, but has some: {', '.join(names)}. Give one of them: "
            f"{given / names[-1]}"
        )
    busy = unfinished(given.parent, given.name) if given.name else []
    note = f" {busy[0]} is one that was not finished." if busy else ""
    if (given / "manifest.ocdbt").exists():
        note = f" Its {METADATA} is missing, without which nothing tells what its arrays are."
    what = "no complete checkpoint" if given.exists() else "nothing"
    return (
        f"there is {what} at {given}.{note} Give the directory that was passed to zerojax.save, "
        "or a step's in that of zerojax.Checkpoints."
    )


def opened(file: str | os.PathLike) -> IO[bytes]:
    """Opens a file to read. A pipe in its place is refused: who opens one may wait for ever."""
    if _is_irregular(file):
        raise OSError(errno.EINVAL, IRREGULAR, os.fspath(file))
    return epath.Path(file).open("rb")


def read(file: str | os.PathLike) -> bytes:
    """Returns the bytes of a file, if it is a regular one."""
    with opened(file) as source:
        return source.read()


@contextlib.contextmanager
def naming(what: str, directory: epath.Path) -> Iterator[None]:
    """Says what of a checkpoint cannot be read where Orbax raises in its block."""
    try:
        yield
    except (*DAMAGE, OSError, NotImplementedError) as error:
        text = str(error).partition(" [tensorstore_spec")[0]  # pages of it
        damaged = _no_json(directory)
        why = f"{damaged} is damaged: {text}" if damaged else f"{type(error).__name__}: {text}"
        raise ValueError(
            f"{what} of {directory} cannot be read ({why}). Restore another checkpoint."
        ) from error


def _no_json(directory: epath.Path) -> epath.Path | None:
    """Returns one of Orbax's files of JSON that is none."""
    arrays = (directory / "array_metadatas").glob("*")
    for file in (directory / METADATA, directory / SHARDINGS, *arrays):
        try:
            json.loads(read(file))
        except OSError:
            continue
        except DAMAGE:
            return file
    return None


def write_checksums(directory: epath.Path) -> None:
    """Writes down the size and CRC-32 of every file, just before a checkpoint counts."""
    sums = {file: _size_and_crc(directory / file) for file in sorted(_files_below(directory))}
    (directory / CHECKSUMS).write_text(json.dumps(sums))


def check_regular(directory: epath.Path) -> None:
    """Raises for a pipe among the files, which Orbax would open; object stores have none."""
    pipes = iter(()) if "://" in str(directory) else _irregular_below(os.fspath(directory))
    wrong = next(pipes, None)
    error = ValueError(f"{wrong} is {IRREGULAR}. Restore another checkpoint.")
    raise_together(error if wrong else None)


def check_files(directory: epath.Path, only: str | None = None) -> None:
    """Raises where a file is not as written; `only` names one. The processes share the reading."""
    listing = directory / CHECKSUMS
    wrong = None
    try:
        noted = json.loads(read(listing))
        sums = sorted(noted.items()) if only is None or not noted else [(only, noted[only])]
        mine = sums[jax.process_index() :: jax.process_count()]
        found = (_damage(directory / _inside(name), *sum_) for name, sum_ in mine)
        wrong = next((damage for damage in found if damage), None)
    except FileNotFoundError:
        wrong = (
            f"{listing} is missing, without which nothing says that the rest is complete (write "
            "{} into it to take the rest as it is)"
        )
    except DAMAGE:
        wrong = f"{listing} is not the list of checksums it was"
    except OSError as error:
        wrong = f"{error.filename or listing} cannot be read ({error.strerror})"
    raise_together(ValueError(f"{wrong}. Restore another checkpoint.") if wrong else None)


def raise_together(error: Exception | None) -> None:
    """Raises in every process when one has an error, so that none waits for it forever."""
    failed = [error is not None]
    if jax.process_count() > 1:
        failed = multihost_utils.process_allgather(np.asarray(failed)).reshape(-1).tolist()
    if error is not None:
        raise error
    if any(failed):
        raise ValueError(f"process {failed.index(True)} refused; its own message says why.")


def remove(directories: Iterable[epath.Path]) -> None:
    """Removes directories, which process 0 does for all."""
    for directory in directories if jax.process_index() == 0 else ():
        shutil.rmtree(directory, ignore_errors=True)


def unfinished(directory: epath.Path, name: str = "*") -> list[epath.Path]:
    """Returns the directories that Orbax writes to before it gives them their final names."""
    return list(directory.glob(f"{name}.orbax-checkpoint-tmp*"))


def grouped(items: Iterable[T], nbytes: Callable[[T], int], most: float) -> Iterator[list[T]]:
    """Yields the items in groups of at most `most` bytes; a larger one is a group of its own."""
    group: list[T] = []
    total = 0
    for item in items:
        size = nbytes(item)
        if group and total + size > most:
            yield group
            group, total = [], 0
        group.append(item)
        total += size
    if group:
        yield group


@contextlib.contextmanager
def only_writer_of_new(
    path: epath.Path,
    remedy: str,
    unfinished: Callable[[], Iterable[epath.Path]],
    refusal: Exception | None = None,
) -> Iterator[None]:
    """Refuses a path that exists and a second writer, and raises the `refusal` of any process.

    Where its block raises, it removes the directories that are then `unfinished`.
    """
    with only_writer(path, path.parent / f".{path.name}.lock"):
        if jax.process_index() == 0 and path.exists():
            refusal = ValueError(f"{path} exists, and nothing is overwritten. {remedy}")
        raise_together(refusal)
        try:
            yield
        except BaseException:  # Ctrl-C is one
            remove(unfinished())
            raise


@contextlib.contextmanager
def only_writer(path: epath.Path, lock: epath.Path) -> Iterator[None]:
    """Refuses a second writer. The lock is the kernel's, which frees it when the process dies.

    Object stores have no locks; there, that an existing path is refused must suffice.
    """
    lock_file, error = None, None
    if jax.process_index() == 0 and "://" not in str(lock):
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            lock_file = _lock(os.fspath(lock))
        except OSError as reason:
            error = ValueError(f"{path} cannot be written ({reason}). Choose another directory.")
        if lock_file is None and error is None:
            error = ValueError(
                f"something else is writing to {path}. " + (_processes.not_joined() or ONE_WRITER)
            )
    raise_together(error)
    try:
        _check_shared(path, lock)
        yield
    finally:
        if lock_file is not None:
            os.unlink(lock)
            os.close(lock_file)


def _check_shared(path: epath.Path, lock: epath.Path) -> None:
    """Raises where other processes do not see what process 0 writes: Orbax would wait for ever."""
    if jax.process_count() == 1 or "://" in str(path):
        return
    token = int(multihost_utils.broadcast_one_to_all(np.int32(time.time_ns() % 2**31)))
    mark = lock.with_name(f"{lock.name}-{token}")
    if jax.process_index() == 0:
        mark.touch()
    until = time.monotonic() + SEEN_WITHIN  # another host's file may take some seconds on NFS
    while not mark.exists() and time.monotonic() < until:
        time.sleep(0.1)
    seen = multihost_utils.process_allgather(np.asarray(mark.exists())).reshape(-1)
    if jax.process_index() == 0:
        mark.unlink()
    if not seen.all():
        raise ValueError(
            f"{path} is not one directory: process {seen.argmin()} does not see there what process "
            "0 writes. Choose one on a file system that all hosts share, or in an object store."
        )


def _lock(name: str) -> int | None:
    """Returns a descriptor of the locked file, or None where another process has the lock."""
    import fcntl  # not on every system that can import zerojax

    while True:
        file = os.open(name, os.O_CREAT | os.O_RDWR, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            warn(
                f"{name} cannot be locked ({error.strerror}): make sure that nothing else writes "
                "there."
            )
            return file
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(file).st_ino == os.stat(name).st_ino:
                return file
        os.close(file)  # the last holder has removed this file since: lock the new one


def _files_below(directory: epath.Path, name: str = "") -> Iterator[str]:
    for entry in (directory / name).iterdir():
        below = f"{name}/{entry.name}" if name else entry.name
        if entry.is_dir():
            yield from _files_below(directory, below)
        elif entry.name != WRITTEN_LATER:
            yield below


def _irregular_below(directory: str) -> Iterator[str]:
    with os.scandir(directory) as entries:  # which ask nothing more of the file system for files
        for entry in entries:
            if entry.is_dir():
                yield from _irregular_below(entry.path)
            elif not entry.is_file() and _is_irregular(entry.path):
                yield entry.path


def _is_irregular(file: str | os.PathLike) -> bool:
    """Whether something is there that is no file: etils takes pipes for files."""
    return os.path.exists(file) and not os.path.isfile(file)


def _inside(name: str) -> str:
    path = pathlib.PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{name} is outside of the checkpoint")
    return name


def _size_and_crc(file: epath.Path) -> list[int]:
    size = crc = 0
    with opened(file) as source:
        while block := source.read(BLOCK):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return [size, crc]


def _damage(file: epath.Path, size: int, crc: int) -> str | None:
    if not file.exists():
        return f"{file} is missing"
    now = _size_and_crc(file)
    if now[0] != size:
        return f"{file} has {now[0]} bytes and was written with {size}"
    return None if now[1] == crc else f"{file} is damaged: its bytes are not those written"


def drop_padding(directory: epath.Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """Gives arrays that Orbax wrote their logical shapes, by their names in its files."""
    if not shapes:
        return
    where = str(directory)
    base = f"{where}/" if "://" in where else {"driver": "file", "path": f"{where}/"}
    store = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    dims: dict[str, int] = {}  # which of each is padded
    with ts.Transaction(atomic=True) as all_at_once:  # one by one, each would write the index
        edited = store.with_transaction(all_at_once)
        for name, shape in shapes.items():
            header = json.loads(store[f"{name}/{HEADER}"])
            differs = [have != want for have, want in zip(header["shape"], shape, strict=True)]
            dims[name] = differs.index(True)
            prefix, after = f"{name}/", f"{name}0"  # "0" is what follows "/"
            for key in store.list(ts.KvStore.KeyRange(prefix, after)).result():
                chunk = key.decode().removeprefix(prefix)
                if chunk != HEADER and _starts_beyond(chunk, header["chunks"], shape):
                    del edited[key]
            edited[f"{name}/{HEADER}"] = json.dumps({**header, "shape": list(shape)}).encode()
    _replicate(directory / SHARDINGS, dims)


def _starts_beyond(chunk: str, sizes: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a chunk, which "2.0" names, starts where the array of this shape has ended."""
    numbers = map(int, chunk.split("."))
    return any(at * size >= end for at, size, end in zip(numbers, sizes, shape, strict=True))


def _replicate(file: epath.Path, dims: Mapping[str, int]) -> None:
    """Has Orbax, where it is told no sharding, replicate dimensions that no longer divide.

    It would otherwise ask JAX for the sharding that the padded array had, which JAX refuses. Of
    arrays on the host or on one device, Orbax notes none.
    """
    noted = json.loads(read(file)) if file.exists() else {}
    for name, dim in dims.items():
        key = base64.urlsafe_b64encode(name.encode()).decode()
        sharding = json.loads(noted.get(key, "{}"))
        if dim < len(spec := sharding.get("partition_spec", ())):
            spec[dim] = None
            noted[key] = json.dumps(sharding)
    if noted:
        file.write_text(json.dumps(noted))
