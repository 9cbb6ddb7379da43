"""What happens to files: damage, a full disk, and pipes in their places."""

import contextlib
import os
import pathlib
import resource
import threading


def files_of(path):
    return sorted(p for p in pathlib.Path(path).rglob("*") if p.is_file() and p.stat().st_size)


def flip(file, whole):
    middle = len(whole) // 2
    file.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])


DAMAGE = {
    "truncated": lambda file, whole: file.write_bytes(whole[:-1]),
    "flipped": flip,
    "emptied": lambda file, whole: file.write_bytes(b""),
    "deleted": lambda file, whole: file.unlink(),
}


@contextlib.contextmanager
def full_disk(most=100_000):
    """As a limit on the size of files: to the writer both are a write that fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def pipe_for(file):
    """A named pipe in the place of a file, for which nobody waits: its end comes after a second."""
    whole = file.read_bytes() if file.exists() else None
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    over, waited = threading.Event(), []

    def end():
        while not over.wait(1.0):
            with contextlib.suppress(OSError):  # nobody waits
                os.close(os.open(file, os.O_WRONLY | os.O_NONBLOCK))
                waited.append(file)

    ending = threading.Thread(target=end)
    ending.start()
    try:
        yield
    finally:
        over.set()
        ending.join()
        file.unlink(missing_ok=True)
        if whole is not None:
            file.write_bytes(whole)
    assert not waited
