"""What happens to files: damage, and a full disk."""

import contextlib
import pathlib
import resource


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
