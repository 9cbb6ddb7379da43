"""Files of a checkpoint: one writer at a time, and damage to any of them is an error."""

import errno
import fcntl
import json
import resource

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from etils import epath

import zerojax
from tests.checkpoint.damage import DAMAGE, damage_all, files_of, pipe_for
from tests.checkpoint.states import STATE, place, plan_of, words
from tests.reference import assert_equal_bits
from zerojax._checkpoint import files as _files


def test_a_missing_list_of_checksums_is_an_error_until_it_is_accepted(tmp_path):
    zerojax.save(tmp_path / "c", STATE, step=3)
    listing = tmp_path / "c" / "zerojax_checksums.json"
    listing.unlink()
    for read in (lambda path: zerojax.restore(path, STATE), zerojax.read_extras):
        with pytest.raises(
            ValueError, match=r"/zerojax_checksums.json is missing.*write {} into it"
        ):
            read(tmp_path / "c")
    listing.write_text("{}")
    assert_equal_bits(zerojax.restore(tmp_path / "c", STATE), STATE)
    assert zerojax.read_extras(tmp_path / "c").step == 3


@pytest.mark.parametrize(
    "listing",
    ["[" * 10**5, '{"../x": [1, 2]}', '{"/dev/zero": [1, 2]}', "[1]",
     '{"_METADATA": 3}', '{"_METADATA": [1, 2, 3]}', "3"],
)  # fmt: skip
def test_a_hostile_list_of_checksums_is_an_error(tmp_path, listing):
    zerojax.save(tmp_path / "c", STATE)
    (tmp_path / "c" / "zerojax_checksums.json").write_text(listing)
    with pytest.raises(ValueError, match=r"zerojax_checksums.json is not the list.*Restore anoth"):
        zerojax.restore(tmp_path / "c", STATE)


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_to_any_file_is_an_error_that_names_it(tmp_path, how):
    state, plan = place(), plan_of(3, 8)
    zerojax.save(tmp_path / "c", state)
    noted = json.loads((tmp_path / "c" / "zerojax_checksums.json").read_text())
    seen = 0
    for file in damage_all(tmp_path / "c", DAMAGE[how]):
        name = file.relative_to(tmp_path / "c").as_posix()
        if name in noted:
            seen += 1
            with pytest.raises(ValueError, match=rf"{name} (is damaged|is missing|has)"):
                zerojax.restore(tmp_path / "c", plan)
    assert seen == len(noted) >= 6
    assert_equal_bits(words(zerojax.restore(tmp_path / "c", plan)), words(state))


def test_a_damaged_list_of_checksums_is_named(tmp_path):
    zerojax.save(tmp_path / "c", place())
    listing = tmp_path / "c" / "zerojax_checksums.json"
    listing.write_text(listing.read_text()[:-5])
    with pytest.raises(ValueError, match=r"zerojax_checksums.json is not the list of checksums"):
        zerojax.restore(tmp_path / "c", plan_of(3, 8))


def test_a_second_writer_to_one_path_is_refused(tmp_path):
    target, lock = epath.Path(tmp_path / "c"), epath.Path(tmp_path / ".c.lock")
    with _files.only_writer(target, lock):
        with pytest.raises(ValueError, match=r"something else is writing to .*/c. Give each"):
            zerojax.save(tmp_path / "c", place())
        assert not (tmp_path / "c").exists()
    zerojax.save(tmp_path / "c", place())
    assert not lock.exists()


def test_a_writer_that_has_not_joined_its_processes_is_told(tmp_path, monkeypatch):
    state = place()
    monkeypatch.setenv("WORLD_SIZE", "4")
    with (
        _files.only_writer(epath.Path(tmp_path / "c"), epath.Path(tmp_path / ".c.lock")),
        pytest.raises(ValueError, match=r"is writing to .*/c. WORLD_SIZE=4 says .*initialize\(\)"),
    ):
        zerojax.save(tmp_path / "c", state)


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(match=r"c.lock cannot be locked \(Function not.*nothing else writes"):
        zerojax.save(tmp_path / "c", place())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # Orbax's
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # threads, failing
def test_a_full_disk_is_an_error_that_names_the_file(tmp_path):
    """As a limit on the size of files: to the writer both are a write that fails."""
    small = zerojax.shard_train_state({"params": {"w": jnp.ones((64, 64))}})
    noise = jax.random.normal(jax.random.key(0), (1024, 1024))
    large = zerojax.shard_train_state({"params": {"w": noise}})
    with zerojax.Checkpoints(tmp_path / "loop") as checkpoints:
        checkpoints.save(1, small)
        checkpoints.wait()
        before = {p: p.read_bytes() for p in files_of(tmp_path / "loop" / "1")}
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            with pytest.raises(ValueError, match=r"Failed writing: .*/one.*/d/\w+.*too large"):
                zerojax.save(tmp_path / "one", large)
            checkpoints.save(2, large)
            with pytest.raises(ValueError, match=r"Failed writing: .*/loop/2.*/d/\w+.*too large"):
                checkpoints.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert checkpoints.steps() == [1] and not (tmp_path / "one").exists()
        assert {p: p.read_bytes() for p in files_of(tmp_path / "loop" / "1")} == before
        assert_equal_bits(checkpoints.resume(small)[0], small)
        checkpoints.save(3, large)  # with room again, it goes on
        checkpoints.wait()
        assert checkpoints.steps() == [1, 3]
    zerojax.save(tmp_path / "one", large)


PIPE = "is not a file, but a pipe or a device"


def test_a_pipe_in_the_place_of_any_file_is_refused_and_not_waited_for(tmp_path):
    """Those that zerojax reads, and those that Orbax does."""
    zerojax.save(tmp_path / "c", STATE)
    for file in files_of(tmp_path / "c"):
        with pipe_for(file):
            for read in (lambda path: zerojax.restore(path, STATE), zerojax.read_extras):
                with pytest.raises(ValueError, match=rf"{file.name} {PIPE}. Restore another"):
                    read(tmp_path / "c")
    assert_equal_bits(zerojax.restore(tmp_path / "c", STATE), STATE)


def test_a_pipe_beside_the_checkpoints_of_a_loop_does_not_stop_it(tmp_path):
    with zerojax.Checkpoints(tmp_path, best="loss") as checkpoints:
        checkpoints.save(1, STATE, metrics={"loss": 1.0})
    for name, warned in [
        ("1/metrics/metrics", "metrics cannot be read .*but a pipe or a device"),
        ("goodput.json", "but a pipe or a device.*Its times are left out of this run's"),
    ]:
        with (
            pipe_for(tmp_path / name),
            pytest.warns(UserWarning, match=warned),
            zerojax.Checkpoints(tmp_path, best="loss") as checkpoints,
        ):
            assert_equal_bits(checkpoints.resume(STATE)[0], STATE)
            checkpoints.best()
    with pipe_for(tmp_path / "goodput.json"), pytest.raises(OSError, match="but a pipe or a dev"):
        zerojax.Goodput(tmp_path)
    note = "1/_CHECKPOINT_METADATA"
    with pipe_for(tmp_path / note), pytest.raises(ValueError, match=rf"{note} {PIPE}. Remove it"):
        zerojax.Checkpoints(tmp_path)


def test_a_pipe_in_the_place_of_safetensors_is_not_waited_for(tmp_path):
    zerojax.export_safetensors(tmp_path / "many", STATE)
    (tmp_path / "one").mkdir()
    for name, refused in [
        ("many/model-00001-of-00001.safetensors", "model-00001-of-00001.safetensors is missing"),
        ("many/model.safetensors.index.json", "there is no model.safetensors.index.json in"),
        ("one/model.safetensors", "there is no model.safetensors.index.json in .*, or one file"),
    ]:
        file = tmp_path / name
        with pipe_for(file), pytest.raises(ValueError, match=refused):
            zerojax.import_safetensors(file.parent, STATE)


@pytest.mark.parametrize(
    ("name", "part", "why"),
    [
        ("_METADATA", "the tree", "/_METADATA is damaged: Expecting value"),
        ("_sharding", "the tree", "/_sharding is damaged: "),
        ("manifest.ocdbt", "the tree", r"ValueError: .*/manifest.ocdbt"),
    ],
)
def test_what_others_wrote_and_is_damaged_says_what_cannot_be_read(tmp_path, name, part, why):
    """There are no checksums, and Orbax's own errors seldom name a file."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", STATE)
    (tmp_path / "c" / name).write_bytes(b"")
    message = rf"{part} of .*/c cannot be read \(.*{why}.*\). Restore another checkpoint"
    with pytest.raises(ValueError, match=message) as raised:
        zerojax.restore(tmp_path / "c", STATE)
    assert "tensorstore_spec" not in str(raised.value)


def test_leaves_that_cannot_be_read_are_named(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise json.JSONDecodeError("Expecting value", "", 0)

    zerojax.save(tmp_path / "c", STATE)
    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", fail)
    with pytest.raises(ValueError, match=r"w of .*/c cannot be read \(JSONDecodeError: Expecting"):
        zerojax.restore(tmp_path / "c", STATE)
    (tmp_path / "c" / "array_metadatas" / "process_0").write_bytes(b"")
    (tmp_path / "c" / "zerojax_checksums.json").write_text("{}")
    with pytest.raises(ValueError, match=r"w of .*\(.*/array_metadatas/process_0 is damaged: Ex"):
        zerojax.restore(tmp_path / "c", STATE)


def test_what_is_no_checkpoint_says_what_would_read_it(tmp_path):
    zerojax.export_safetensors(tmp_path / "weights", STATE)
    for path in (tmp_path / "weights", next((tmp_path / "weights").glob("*.safetensors"))):
        with pytest.raises(ValueError, match=r"has safetensors.*zerojax.import_safetensors"):
            zerojax.restore(path, STATE)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", STATE)
    (tmp_path / "c" / "_METADATA").unlink()
    with pytest.raises(ValueError, match=r"no complete checkpoint at .*Its _METADATA is missing"):
        zerojax.restore(tmp_path / "c", STATE)
