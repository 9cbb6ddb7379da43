"""What is not a whole checkpoint: not counted where it is none, an error where it was one."""

import json
import os
import pathlib
import subprocess
import sys
import threading

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

import zerojax
from tests.checkpoint.test_checkpoint import DAMAGE, damage_all
from tests.reference import assert_equal_bits
from zerojax._checkpoint import checkpoint as _checkpoint, files as _files

STATE = {"w": jnp.arange(12.0).reshape(3, 4)}


def save_steps(directory, *steps, **options):
    with zerojax.Checkpoints(directory, keep=None, **options) as checkpoints:
        for n in steps:
            metrics = {options["best"]: 1 / n} if "best" in options else None
            checkpoints.save(n, {"w": STATE["w"] + n}, metrics=metrics, data={"at": n})


# -- what counts


def test_what_is_being_written_does_not_count(tmp_path, monkeypatch):
    """Orbax calls `finalize` last, and is held there."""
    go, real = threading.Event(), _checkpoint.Handler.finalize
    with zerojax.Checkpoints(tmp_path, best="loss", keep=1) as checkpoints:
        checkpoints.save(1, STATE, metrics={"loss": 2.0})
        checkpoints.wait()
        monkeypatch.setattr(
            _checkpoint.Handler, "finalize", lambda *args: (go.wait(60), real(*args))[1]
        )
        checkpoints.save(2, STATE, metrics={"loss": 1.0})
        assert checkpoints.busy() and checkpoints.steps() == [1]
        assert checkpoints.latest() == 1 and checkpoints.best() == 1
        threading.Timer(0.1, go.set).start()
        assert checkpoints.resume(STATE)[1].step == 2  # waits for its own
        assert checkpoints.steps() == [2] and checkpoints.best() == 2


def test_a_directory_named_like_a_step_is_none(tmp_path):
    save_steps(tmp_path, 1)
    for name in ("7", "8"):
        (tmp_path / name).mkdir()
    (tmp_path / "8" / "notes.txt").write_text("mine")
    (tmp_path / "9").write_text("a file")
    with zerojax.Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.steps() == [1] and checkpoints.resume(STATE)[1].step == 1
        for n in (8, 9):
            with pytest.raises(ValueError, match=rf"/{n} is no checkpoint, and nothing.*Remove it"):
                checkpoints.save(n, STATE)
        checkpoints.save(7, STATE)
        checkpoints.wait()
        assert checkpoints.steps() == [1, 7]  # keep= counts checkpoints alone
    assert (tmp_path / "8" / "notes.txt").read_text() == "mine"


def test_steps_that_plain_orbax_wrote_count(tmp_path):
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(3, args=ocp.args.StandardSave(STATE))
    with zerojax.Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [3]
        assert_equal_bits(checkpoints.resume({"w": jnp.zeros((3, 4))})[0], STATE)


def test_a_failed_write_takes_nothing_with_it(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no space")

    save_steps(tmp_path, 1)
    with zerojax.Checkpoints(tmp_path, keep=1, background=False) as checkpoints:
        with monkeypatch.context() as patched:
            patched.setattr(_checkpoint.Handler, "finalize", fail)
            with pytest.raises(OSError, match="no space"):
                checkpoints.save(2, STATE)
            with pytest.raises(OSError, match="no space"):
                zerojax.save(tmp_path / "one", STATE)
        assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "1"]
        assert checkpoints.steps() == [1] and checkpoints.latest() == 1
        with pytest.raises(ValueError, match="step 1 is saved"):
            checkpoints.save(1, STATE)
        checkpoints.save(2, STATE)
        assert checkpoints.steps() == [2]


def test_an_interrupted_wait_does_not_end_the_write(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    go, real = threading.Event(), _checkpoint.Handler.finalize
    monkeypatch.setattr(
        _checkpoint.Handler, "finalize", lambda *args: (go.wait(60), real(*args))[1]
    )
    with zerojax.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, STATE)
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(checkpoints._manager, "wait_until_finished", interrupt)
            checkpoints.wait()
        go.set()
    assert_equal_bits(zerojax.restore(tmp_path / "1", STATE), STATE)


def test_a_leaf_that_cannot_be_read_leaves_nothing_behind(tmp_path):
    donated = {"a": jnp.ones(4), "z": jnp.ones(3)}
    donated["z"].delete()
    with zerojax.Checkpoints(tmp_path / "loop") as checkpoints:
        for save in (
            lambda: checkpoints.save(1, donated),
            lambda: zerojax.save(tmp_path / "one", donated),
            lambda: zerojax.export_safetensors(tmp_path / "two", donated),
        ):
            with pytest.raises((RuntimeError, ValueError), match=r"deleted|donated"):
                save()
        assert [p.name for p in (tmp_path / "loop").iterdir()] == [".lock"]
        assert not checkpoints.busy()
    assert [p.name for p in tmp_path.iterdir()] == ["loop"]


EXIT = """
import sys, jax.numpy as jnp, zerojax
checkpoints = zerojax.Checkpoints(sys.argv[1])
for n in (1, 2):
    checkpoints.save(n, {"w": jnp.full((500, 500), n)})
raise SystemExit(3)
"""


def test_without_a_with_block_the_last_checkpoint_is_finished_at_exit(tmp_path):
    root = str(pathlib.Path(zerojax.__file__).parents[1])
    ran = subprocess.run(
        [sys.executable, "-c", EXIT, str(tmp_path)], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": root},
    )  # fmt: skip
    assert (ran.returncode, ran.stdout, ran.stderr) == (3, "", "")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]
    back = zerojax.restore(tmp_path / "2", {"w": jnp.zeros((500, 500), int)})
    assert np.all(back["w"] == 2)


def test_without_a_with_block_save_waits_and_dropping_it_lets_another_in(tmp_path):
    checkpoints = zerojax.Checkpoints(tmp_path)
    checkpoints.save(1, STATE)
    assert not checkpoints.busy() and checkpoints.steps() == [1]
    del checkpoints
    assert not (tmp_path / ".lock").exists()
    save_steps(tmp_path, 2)


# -- metrics


@pytest.mark.parametrize("damage", ["flipped", "deleted", "nested", "list"])
def test_a_damaged_file_of_metrics_costs_a_rank_and_nothing_more(tmp_path, damage):
    save_steps(tmp_path, 1, 2, 3, best="loss")
    file = tmp_path / "3" / "metrics" / "metrics"  # the best one's
    whole = file.read_bytes()
    if damage == "deleted":
        file.unlink()
    else:
        bad = {"flipped": whole[:5] + b"\0" + whole[6:], "nested": b"[" * 10**5, "list": b"[1]"}
        file.write_bytes(bad[damage])
    with pytest.warns(match=r"3/metrics/metrics cannot be read .*step 3 has no rank.*until you"):
        checkpoints = zerojax.Checkpoints(tmp_path, keep=1, best="loss")
    with checkpoints:
        assert checkpoints.best() == 2 and checkpoints.steps() == [1, 2, 3]
        checkpoints.save(4, STATE, metrics={"loss": 9.0})
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3, 4]
    with zerojax.Checkpoints(tmp_path) as checkpoints:  # nobody asks for metrics
        assert checkpoints.best() is None


def test_another_best_ranks_what_has_it(tmp_path):
    save_steps(tmp_path, 1, 2, best="loss")
    with zerojax.Checkpoints(tmp_path, keep=2, best="acc", mode="max") as checkpoints:
        assert checkpoints.best() is None and checkpoints.steps() == [1, 2]
        checkpoints.save(3, STATE, metrics={"acc": 1.0})
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3] and checkpoints.best() == 3


# -- files


def rewritten(path, change):
    """The checkpoint with its tree's metadata changed, and checksums to match."""
    file = path / "_METADATA"
    content = json.loads(file.read_text())
    change(content["custom_metadata"]["zerojax"])
    file.write_text(json.dumps(content).replace('"nested"', "[" * 3000 + "]" * 3000))
    (path / "zerojax_checksums.json").unlink()
    _files.write_checksums(epath.Path(path))


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


def test_extras_that_hold_themselves_are_refused(tmp_path):
    metadata: list = []
    metadata.append(metadata)
    with pytest.raises(ValueError, match=r"rng=, data= or metadata= .*holds itself"):
        zerojax.save(tmp_path / "c", STATE, metadata=metadata)


def test_hostile_extras_are_an_error(tmp_path):
    array = {"zerojax": "array", "dtype": "|O", "shape": [1], "value": "AAAAAAAAAAA="}
    hostile = [
        lambda found: found.update(step="x"),
        lambda found: found.pop("rng"),
        lambda found: found.update(metadata="nested"),
        lambda found: found.update(data=7),
        lambda found: found.update(metadata={"zerojax": "code", "value": "import os"}),
        lambda found: found.update(metadata=array),
        lambda found: found.update(metadata={**array, "dtype": "<f4", "shape": [2**60]}),
        lambda found: found.update(rng={"zerojax": "key", "impl": "no", "value": array}),
    ]
    zerojax.save(tmp_path / "c", STATE)
    whole = (tmp_path / "c" / "_METADATA").read_text()
    for change in hostile:
        rewritten(tmp_path / "c", change)
        with pytest.raises(ValueError, match=r"/c .*(damaged|be read).*Restore another checkpoint"):
            zerojax.read_extras(tmp_path / "c")
        (tmp_path / "c" / "_METADATA").write_text(whole)
    (tmp_path / "c" / "_METADATA").write_text("[" * 10**5)
    (tmp_path / "c" / "zerojax_checksums.json").unlink()
    with pytest.raises(ValueError, match=r"/c cannot be read .*Restore another"):
        zerojax.restore(tmp_path / "c", STATE)


def right_or_named(path, read):
    """Whether `read()` gives STATE; where it does not, it names the path."""
    try:
        back = read()
    except ValueError as error:
        assert str(path) in str(error)
        return False
    assert_equal_bits(back, STATE)
    return True


HOW = {**DAMAGE, "emptied": lambda file, whole: file.write_bytes(b"")}


@pytest.mark.filterwarnings("ignore:.*metrics cannot be read")
@pytest.mark.parametrize("how", HOW)
def test_damage_to_a_loop_is_never_read(tmp_path, how):
    def resumed():
        with zerojax.Checkpoints(tmp_path, best="loss") as checkpoints:
            assert checkpoints.best() in (1, None)
            back, saved = checkpoints.resume({"w": jnp.zeros((3, 4))})
            assert saved.step == 1 and saved.data == {"at": 1}
            return back

    with zerojax.Checkpoints(tmp_path, best="loss") as checkpoints:
        checkpoints.save(1, STATE, metrics={"loss": 1.0}, data={"at": 1})
    state = tmp_path / "1" / "default"
    noted = {state / name for name in json.loads((state / _files.CHECKSUMS).read_text())}
    damaged = damage_all(tmp_path / "1", HOW[how])
    right = {file: right_or_named(tmp_path, resumed) for file in damaged}
    wrong = {file for file, is_right in right.items() if not is_right}
    assert wrong == noted | {state / _files.CHECKSUMS} and len(right) > len(wrong) >= 6


def test_damage_to_an_export_is_never_read_but_in_its_data(tmp_path):
    """The format has no checksums."""
    zerojax.export_safetensors(tmp_path / "w", {"w": STATE["w"], "b": jnp.ones(3)})
    like = {"w": jnp.zeros((3, 4)), "b": jnp.zeros(3)}
    read = lambda: {"w": zerojax.import_safetensors(tmp_path / "w", like)["w"]}
    file = next((tmp_path / "w").glob("*.safetensors"))
    whole = file.read_bytes()
    for at in range(0, len(whole) - 60, 3):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        right_or_named(tmp_path / "w", read)
        file.write_bytes(whole[:at])
        assert not right_or_named(tmp_path / "w", read)
