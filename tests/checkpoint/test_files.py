"""Files of a checkpoint: one writer at a time, and damage to any of them is an error."""

import errno
import fcntl
import gc
import json
import os
import warnings

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import zerojax
from tests.checkpoint.damage import DAMAGE, files_of, full_disk
from tests.checkpoint.states import STATE, save_steps
from tests.support.reference import assert_equal_bits
from zerojax._checkpoint import files
from zerojax.checkpoint import export_safetensors

LISTING = "zerojax_checksums.json"
# Of Orbax's threads and event loops, where it fails; they are collected while it is ignored.
IGNORED = "ignore::pytest.PytestUnraisableExceptionWarning"

HOSTILE = ["[" * 10**5, "[1]", '{"_METADATA": 3}', '{"_METADATA": [1, 2, 3]}', '{"a": [1, 2]']
OUTSIDE = ['{"../x": [1, 2]}', '{"/dev/zero": [1, 2]}']


def test_a_list_of_checksums_is_there_and_as_it_was_written(tmp_path):
    zerojax.save(tmp_path / "c", STATE, step=3)
    listing = tmp_path / "c" / LISTING
    for text in HOSTILE + OUTSIDE:
        listing.write_text(text)
        with pytest.raises(ValueError, match=rf"{LISTING} is not the list.*Restore another"):
            zerojax.restore(tmp_path / "c", STATE)
    listing.unlink()
    for read in (lambda path: zerojax.restore(path, STATE), zerojax.checkpoint.read_extras):
        with pytest.raises(ValueError, match=rf"/{LISTING} is missing.*write {{}} into it"):
            read(tmp_path / "c")
    listing.write_text("{}")
    assert_equal_bits(zerojax.restore(tmp_path / "c", STATE), STATE)
    assert zerojax.checkpoint.read_extras(tmp_path / "c").step == 3


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_to_any_file_of_a_loop_is_never_read(tmp_path, how):
    """An error names the file, if it is one of the state; the state is right without the others."""
    save_steps(tmp_path, 1, best="loss")
    state = tmp_path / "1" / "default"
    noted = {state / name for name in json.loads((state / LISTING).read_text())}
    wrong, right = set(), set()
    for file in files_of(tmp_path / "1"):
        whole = file.read_bytes()
        DAMAGE[how](file, whole)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".* has no rank")
            checkpoints = zerojax.Checkpoints(tmp_path, best="loss")
        with checkpoints:
            assert checkpoints.best() in (1, None)
            try:
                back, saved = checkpoints.resume({"w": np.zeros((3, 4), np.float32)})
            except ValueError as error:
                named = state if file.name == LISTING else f"{file} "  # it may name another
                assert str(named) in str(error) and "Restore another checkpoint" in str(error)
                wrong.add(file)
            else:
                assert_equal_bits(back["w"], STATE["w"] + 1)
                assert saved.step == 1 and saved.data == {"at": 1}
                right.add(file)
        file.write_bytes(whole)
    assert wrong == noted | {state / LISTING} and len(wrong) >= 6 and right
    assert_equal_bits(zerojax.restore(tmp_path / "1", STATE)["w"], STATE["w"] + 1)


def test_what_is_not_a_regular_file_is_never_opened(tmp_path, monkeypatch):
    """To read a pipe hangs, and a link to an endless file fills the memory."""
    save_steps(tmp_path / "loop", 1)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", {"w": jax.device_put(STATE["w"])})
    export_safetensors(tmp_path / "weights", STATE)

    def resume(path):
        with zerojax.Checkpoints(path) as checkpoints:
            checkpoints.resume(STATE)

    restore = lambda path: zerojax.restore(path, STATE)
    weights = lambda path: zerojax.checkpoint.import_safetensors(path, STATE)
    for name, use in (("loop", resume), ("orbax", restore), ("weights", weights)):
        read = (x for x in files_of(tmp_path / name) if x.name != "commit_success.txt")
        for file in read:
            whole = file.read_bytes()
            file.unlink()
            os.mkfifo(file)
            with pytest.raises((ValueError, OSError), match="it is not a regular file") as raised:
                use(tmp_path / name)
            assert str(file) in str(raised.value)
            file.unlink()
            file.write_bytes(whole)
        use(tmp_path / name)
    (tmp_path / "loop" / "1" / "default" / "checkpoint").symlink_to("/dev/zero")  # Orbax looks
    with pytest.raises(ValueError, match=r"/checkpoint cannot be read \(it is not a regular"):
        resume(tmp_path / "loop")
    monkeypatch.setattr(files, "MOST_READ", 100)
    with pytest.raises(ValueError, match=r"/orbax/_\w+ cannot be read .*too large to be"):
        restore(tmp_path / "orbax")


def test_a_second_writer_to_one_path_is_refused(tmp_path):
    second = pytest.raises(ValueError, match=r"another process is writing to .*/c. Give each")
    with open(tmp_path / ".c.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for write in (zerojax.save, export_safetensors):
            with second:
                write(tmp_path / "c", STATE)
    assert [p.name for p in tmp_path.iterdir()] == [".c.lock"]
    zerojax.save(tmp_path / "c", STATE)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_a_lock_that_its_holder_has_just_removed_is_made_anew(tmp_path, monkeypatch):
    """Removed between its opening and the lock: nobody else would see such a lock."""
    real, held = fcntl.flock, []

    def flock(file, how):
        real(file, how)
        held.append(file)
        if len(held) == 1:
            (tmp_path / ".c.lock").unlink()

    monkeypatch.setattr(fcntl, "flock", flock)
    with files.only_writer(tmp_path / "c", tmp_path / ".c.lock"):
        assert len(held) == 2 and (tmp_path / ".c.lock").exists()


def test_a_lock_that_was_removed_or_is_anothers_now_is_left_alone(tmp_path):
    lock = tmp_path / ".c.lock"
    with files.only_writer(tmp_path / "c", lock):
        lock.unlink()
    with files.only_writer(tmp_path / "c", lock):
        lock.unlink()
        lock.write_text("another's")
    assert lock.read_text() == "another's"


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(match=r"c.lock cannot be locked \(Function not.*nothing else writes"):
        zerojax.save(tmp_path / "c", STATE)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning", IGNORED)
def test_a_write_that_fails_names_the_file_and_takes_nothing_with_it(tmp_path):
    large = {"w": np.random.default_rng(0).normal(size=(1024, 1024)).astype(np.float32)}
    with zerojax.Checkpoints(tmp_path / "loop", keep=1) as checkpoints:
        checkpoints.save(1, {"w": large["w"][:64]})
        checkpoints.wait()
        before = {p: p.read_bytes() for p in files_of(tmp_path / "loop" / "1")}
        with full_disk():
            with pytest.raises(ValueError, match=r"Failed writing: .*/one.*/d/\w+.*too large"):
                zerojax.save(tmp_path / "one", large)
            with pytest.raises(ValueError, match=r"Failed writing: .*/loop/2.*/d/\w+.*too large"):
                checkpoints.save(2, large)
                checkpoints.wait()
        assert checkpoints.steps() == [1] and checkpoints.latest() == 1
        left = sorted(p.name for p in (*tmp_path.iterdir(), *(tmp_path / "loop").iterdir()))
        assert left == [".lock", "1", "loop"]
        assert {p: p.read_bytes() for p in files_of(tmp_path / "loop" / "1")} == before
        with pytest.raises(ValueError, match="/1 exists, and nothing is overwritten"):
            checkpoints.save(1, large)
        checkpoints.save(2, large)  # with room again, it goes on
        checkpoints.wait()
        assert checkpoints.steps() == [2]
    zerojax.save(tmp_path / "one", large)
    gc.collect()


@pytest.mark.filterwarnings(IGNORED)
def test_what_others_wrote_and_is_damaged_says_what_cannot_be_read(tmp_path):
    """There are no checksums, and Orbax's own errors seldom name a file."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", {"w": jax.device_put(STATE["w"])})
    (tmp_path / "c" / "manifest.ocdbt").write_bytes(b"")
    message = r"the tree of .*/c cannot be read \(.*/manifest.ocdbt.*\). Restore another checkpoint"
    with pytest.raises(ValueError, match=message) as raised:
        zerojax.restore(tmp_path / "c", STATE)
    assert "tensorstore_spec" not in str(raised.value)
    del raised
    gc.collect()
