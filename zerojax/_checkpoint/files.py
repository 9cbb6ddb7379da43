"""Files of a checkpoint: one writer at a time, and every byte accounted for on the way back.

[Note: padding in files]
Orbax writes each device's shard as chunks of a zarr array, padding included. A zarr array may end
in the middle of a chunk. Once all chunks are written, a shorter shape in the array's header drops
the padding, and no data moves. Chunks that hold only padding are removed.
"""

import base64
import contextlib
import errno
import json
import math
import operator
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import jax
import numpy as np
import tensorstore as ts  # which Orbax writes with
from etils import epath  # Orbax's own path type: local, gs:// and s3://
from jax.experimental import multihost_utils

from zerojax import _compat
from zerojax._run import processes as _processes
from zerojax._warn import warn

T = TypeVar("T")

METADATA = "_METADATA"  # Orbax's file of the tree and its custom metadata
SHARDINGS = "_sharding"  # Orbax's file of where each leaf was, for a restore without shardings
CHECKSUMS = "zerojax_checksums.json"
WRITTEN_LATER = "_CHECKPOINT_METADATA"  # Orbax's note of times, which a restore does not read
HEADER = ".zarray"
BLOCK = 2**22
MOST_READ = 2**30  # bytes of a file that is read whole
ONE_WRITER = (
    "Give each writer its own path, or wait for the other to finish (in a notebook, close() the "
    "Checkpoints of an earlier cell)."
)
SEEN_WITHIN = 10.0  # seconds after which a process must see another's file
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # some mounts of Lustre and NFS
# What parsers raise for text that nobody wrote.
DAMAGE = (ValueError, KeyError, AttributeError, TypeError, RecursionError)


def tree_in(path: epath.Path) -> epath.Path | None:
    """Returns the directory of a tree: `path`, or the item that an Orbax manager put into it."""
    for directory in (path, path / "default", path / "state"):
        if any((directory / file).exists() for file in (METADATA, CHECKSUMS)):
            return directory
    return None


def is_complete(step: epath.Path) -> bool:
    """Whether Orbax finished a step's directory, which may hold a tree or other items."""
    return (step / WRITTEN_LATER).exists() or tree_in(step) is not None


def nothing_at(path: epath.Path) -> str:
    """Returns the error for a path without a tree, and how to open the files that it has."""
    if path.exists() and (path.suffix == ".safetensors" or any(path.glob("*.safetensors"))):
        return (
            f"{path} has safetensors, not a checkpoint. Pass it to "
            "zerojax.checkpoint.import_safetensors."
        )
    if path.exists() and not path.is_dir():
        return (
            f"{path} is a file, and checkpoints are directories. Open a file of "
            "flax.serialization with plan.place(flax.serialization.from_bytes(make_state(), "
            "open(path, 'rb').read()))."
        )
    steps = [entry.name for entry in path.iterdir() if tree_in(entry)] if path.exists() else []
    if steps:
        steps.sort(key=lambda name: (len(name), name))
        return (
            f"{path} is not a checkpoint, but contains some: {', '.join(steps)}. Pass one of them: "
            f"{path / steps[-1]}"
        )
    busy = unfinished(path.parent, path.name) if path.name else []
    note = f" {busy[0]} was never finished." if busy else ""
    if (path / "manifest.ocdbt").exists():
        note = f" Its {METADATA}, which describes the arrays, is missing."
    what = "no complete checkpoint" if path.exists() else "nothing"
    return (
        f"there is {what} at {path}.{note} Pass the directory that you passed to zerojax.save, "
        "or the directory of a step of zerojax.Checkpoints."
    )


@contextlib.contextmanager
def naming(what: str, directory: epath.Path) -> Iterator[None]:
    """Names the part of a checkpoint that cannot be read when Orbax raises in its block."""
    try:
        yield
    except (*DAMAGE, OSError, NotImplementedError) as error:
        text = str(error).partition(_compat.SPEC_OF_FILE)[0]
        raise ValueError(
            f"{what} of {directory} cannot be read ({type(error).__name__}: {text}). Restore "
            "another checkpoint."
        ) from error


def write_checksums(directory: epath.Path) -> None:
    """Notes the size and CRC-32 of every file, just before a checkpoint counts as complete."""
    sums = {file: _size_and_crc(directory / file) for file in sorted(_files_below(directory))}
    (directory / CHECKSUMS).write_text(json.dumps(sums))


def check_regular(file: str | os.PathLike, most: float = math.inf) -> None:
    """Raises for a pipe or a device in place of a file, and for one of more bytes than `most`."""
    if os.path.exists(file) and not (os.path.isfile(file) and os.path.getsize(file) <= most):
        why = "it is not a regular file, or too large to be what was written"
        raise OSError(errno.EINVAL, why, os.fspath(file))


def read(file: str | os.PathLike) -> bytes:
    """Returns the bytes of a file that describes others."""
    check_regular(file, MOST_READ)
    return epath.Path(file).read_bytes()


def check_files(directory: epath.Path, only: str | None, listed: bool) -> None:
    """Raises where `damage` sees some. Processes share the reading."""
    wrong = damage(directory, only, listed, jax.process_index(), jax.process_count())
    raise_together(ValueError(f"{wrong}. Restore another checkpoint.") if wrong else None)


def damage(
    directory: epath.Path, only: str | None, listed: bool, first: int = 0, among: int = 1
) -> str | None:
    """Returns what is wrong with a file, or with the one named `only`, of every `among`.

    Orbax may open files that are not `listed`, too.
    """
    listing = directory / CHECKSUMS
    read_whole = (os.fspath(directory), os.path.join(directory, "array_metadatas"))
    try:
        for at, _, names in os.walk(directory) if only is None and first == 0 else ():
            for name in names:
                most = MOST_READ if at in read_whole else math.inf
                check_regular(os.path.join(at, name), most)
        noted = json.loads(read(listing)) if listed else {}
        sums = sorted(noted.items()) if only is None or not noted else [(only, noted[only])]
        damages = (_damage(directory, name, *sum_) for name, sum_ in sums[first::among])
        return next(filter(None, damages), None)
    except FileNotFoundError:
        return (
            f"{listing} is missing, so nothing shows that the other files are complete (write {{}} "
            "into it to accept them unchecked)"
        )
    except DAMAGE:
        return f"{listing} is not the list of checksums that was written"
    except OSError as error:
        return f"{error.filename or listing} cannot be read ({error.strerror})"


def raise_together(error: Exception | None) -> None:
    """Raises in every process when one has an error, so that none waits for it for ever."""
    failed = [error is not None]
    if jax.process_count() > 1:
        failed = multihost_utils.process_allgather(np.asarray(failed)).reshape(-1).tolist()
    if error is not None:
        raise error
    if any(failed):
        raise ValueError(f"process {failed.index(True)} failed; see its own message.")


def remove(directories: Iterable[epath.Path]) -> None:
    """Removes directories, in process 0."""
    for directory in directories if jax.process_index() == 0 else ():
        shutil.rmtree(directory, ignore_errors=True)


def unfinished(directory: epath.Path, name: str = "*") -> list[epath.Path]:
    """Returns the directories that Orbax has not given their final names yet."""
    return list(directory.glob(f"{name}.orbax-checkpoint-tmp*"))


def nbytes(struct: jax.ShapeDtypeStruct) -> int:
    return struct.size * struct.dtype.itemsize


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
    path: epath.Path, remedy: str, unfinished: Callable[[], Iterable[epath.Path]]
) -> Iterator[None]:
    """Refuses a path that exists and a second writer.

    If its block raises, it removes the directories that are `unfinished` then.
    """
    with only_writer(path, path.parent / f".{path.name}.lock"):
        error = ValueError(f"{path} exists, and nothing is overwritten. {remedy}")
        raise_together(error if jax.process_index() == 0 and path.exists() else None)
        try:
            yield
        except BaseException:  # Ctrl-C is one
            remove(unfinished())
            raise


@contextlib.contextmanager
def only_writer(path: epath.Path, lock: epath.Path) -> Iterator[None]:
    """Refuses a second writer. The system frees the lock when the process dies.

    Object stores have no locks. There, only a path that exists is refused.
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
                f"another process is writing to {path}. " + (_processes.not_joined() or ONE_WRITER)
            )
    raise_together(error)
    try:
        _check_shared(path, lock, lock_file)
        yield
    finally:
        if lock_file is not None:
            with contextlib.suppress(OSError):  # removed with its directory, or moved
                if os.path.samestat(os.fstat(lock_file), os.stat(lock)):  # and not another's
                    os.unlink(lock)
            os.close(lock_file)


def _check_shared(path: epath.Path, lock: epath.Path, lock_file: int | None) -> None:
    """Raises if other processes do not see the lock of process 0: Orbax would wait for ever.

    A killed run may have left a lock on each host. Only this run's has its token.
    """
    if jax.process_count() == 1 or "://" in str(path):
        return
    token = np.int32(time.time_ns() % 2**31)
    if lock_file is not None:
        os.pwrite(lock_file, token.tobytes(), 0)
        os.fsync(lock_file)  # NFS shows it to the other hosts
    token = multihost_utils.broadcast_one_to_all(token).tobytes()

    def is_seen() -> bool:
        with contextlib.suppress(OSError):
            return lock.read_bytes().startswith(token)
        return False

    until = time.monotonic() + SEEN_WITHIN  # another host's file may take some seconds on NFS
    while not is_seen() and time.monotonic() < until:
        time.sleep(0.1)
    seen = multihost_utils.process_allgather(np.asarray(is_seen())).reshape(-1)
    if not seen.all():
        raise ValueError(
            f"{path} is not one directory: process {seen.argmin()} does not see the files that "
            "process 0 writes there. Choose a directory on a file system that all hosts share, or "
            "in an object store."
        )


def _lock(name: str) -> int | None:
    """Returns a descriptor of the locked file, or None if another process has the lock."""
    import fcntl  # not on every system that can import zerojax

    while True:
        file = os.open(name, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file), os.stat(name)):
                return file
        except BlockingIOError:
            os.close(file)
            return None
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            warn(
                f"{name} cannot be locked ({error.strerror}). Make sure that nothing else writes "
                "there."
            )
            return file
        os.close(file)  # its last holder has just removed it: lock the new one


def _files_below(directory: epath.Path, name: str = "") -> Iterator[str]:
    for entry in (directory / name).iterdir():
        below = f"{name}/{entry.name}" if name else entry.name
        if entry.is_dir():
            yield from _files_below(directory, below)
        elif entry.name != WRITTEN_LATER:
            yield below


def _size_and_crc(file: epath.Path, most: float = math.inf) -> list[int]:
    check_regular(file)
    size = crc = 0
    with file.open("rb") as source:
        while size <= most and (block := source.read(BLOCK)):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return [size, crc]


def _damage(directory: epath.Path, name: str, size: int, crc: int) -> str | None:
    if ".." in (file := directory / name).parts or directory not in file.parents:
        raise ValueError(f"{name} is outside of the checkpoint")
    if not file.exists():
        return f"{file} is missing"
    now = _size_and_crc(file, size)
    if now[0] != size:
        return f"{file} has {file.stat().length} bytes and was written with {size}"
    return None if now[1] == crc else f"{file} is damaged: its bytes have changed"


def drop_padding(directory: epath.Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """Gives the arrays in Orbax's files their logical shapes; see the note above."""
    if not shapes:
        return
    where = str(directory)
    base = f"{where}/" if "://" in where else {"driver": "file", "path": f"{where}/"}
    store = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    dims: dict[str, int] = {}  # the padded one of each array
    with ts.Transaction(atomic=True) as transaction:  # without it, each edit writes the index
        edited = store.with_transaction(transaction)
        for name, shape in shapes.items():
            header = json.loads(store[f"{name}/{HEADER}"])
            differs = [have != want for have, want in zip(header["shape"], shape, strict=True)]
            dims[name] = differs.index(True)
            prefix, after = f"{name}/", f"{name}0"  # "0" follows "/"
            for key in store.list(ts.KvStore.KeyRange(prefix, after)).result():
                chunk = key.decode().removeprefix(prefix)
                if chunk == HEADER:
                    continue
                starts = map(operator.mul, map(int, chunk.split(".")), header["chunks"])
                if any(map(operator.ge, starts, shape)):  # "2.0" starts beyond the end
                    del edited[key]
            edited[f"{name}/{HEADER}"] = json.dumps({**header, "shape": list(shape)}).encode()
    _replicate(directory / SHARDINGS, dims)


def _replicate(file: epath.Path, dims: Mapping[str, int]) -> None:
    """Has Orbax replicate dimensions that no longer divide, if it restores without shardings.

    It would otherwise ask JAX for the sharding of the padded array, which JAX refuses. Arrays on
    the host or on one device have no sharding in this file.
    """
    noted = json.loads(file.read_bytes()) if file.exists() else {}
    for name, dim in dims.items():
        key = base64.urlsafe_b64encode(name.encode()).decode()
        sharding = json.loads(noted.get(key, "{}"))
        if dim < len(spec := sharding.get("partition_spec", ())):
            spec[dim] = None
            noted[key] = json.dumps(sharding)
    if noted:
        file.write_text(json.dumps(noted))
