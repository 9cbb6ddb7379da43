"""Damage to the files of a checkpoint, one after the other."""

import contextlib
import os
import pathlib
import threading

from tests.checkpoint.states import STATE
from tests.reference import assert_equal_bits


def files_of(path):
    return sorted(p for p in pathlib.Path(path).rglob("*") if p.is_file() and p.stat().st_size)


def damage_all(path, how):
    """Each file in turn: damaged, given to the caller, and put back."""
    for file in files_of(path):
        whole = file.read_bytes()
        how(file, whole)
        yield file
        file.write_bytes(whole)


def flip(file, whole):
    middle = len(whole) // 2
    file.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])


DAMAGE = {
    "truncated": lambda file, whole: file.write_bytes(whole[:-1]),
    "flipped": flip,
    "deleted": lambda file, whole: file.unlink(),
}


def right_or_named(path, read):
    """Whether `read()` gives STATE; where it does not, it names the path."""
    try:
        back = read()
    except ValueError as error:
        assert str(path) in str(error)
        return False
    assert_equal_bits(back, STATE)
    return True


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
