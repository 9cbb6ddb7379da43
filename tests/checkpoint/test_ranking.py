"""Checkpoints of a loop: which of them count, which is best, and which are kept."""

import threading

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import zerojax
from tests.checkpoint.states import STATE, filled, place, save_steps
from tests.reference import assert_equal_bits
from zerojax._checkpoint import checkpoint as _checkpoint


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


def test_the_best_is_kept_beside_the_newest(tmp_path):
    state = place()
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: 4.0, 5: 5.0}
    with zerojax.Checkpoints(tmp_path, keep=1, best="loss") as checkpoints:
        for n, loss in losses.items():
            checkpoints.save(n, state, metrics={"loss": np.float32(loss), "aux": {"x": [1]}})
        checkpoints.wait()
        assert checkpoints.steps() == [2, 5] and checkpoints.best() == 2
        with pytest.raises(ValueError, match=r"best='loss' is not among .*Pass metrics="):
            checkpoints.save(6, state, metrics={"accuracy": 1.0})
    with zerojax.Checkpoints(tmp_path / "max", keep=1, best="loss", mode="max") as checkpoints:
        for n, loss in losses.items():
            checkpoints.save(n, state, metrics={"loss": -loss})
        checkpoints.wait()
        assert checkpoints.steps() == [2, 5] and checkpoints.best() == 2


@pytest.mark.parametrize("mode, losses", [("min", [3, 1, np.nan]), ("max", [-3, -1, np.nan]),
                                          ("min", [np.nan, 1, 5])])  # fmt: skip
def test_nan_never_takes_the_place_of_the_best(tmp_path, mode, losses):
    state = filled(0)
    with zerojax.Checkpoints(tmp_path, keep=1, best="loss", mode=mode) as checkpoints:
        for n, loss in enumerate(losses, 1):
            checkpoints.save(n, state, metrics={"loss": loss})
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3] and checkpoints.best() == 2
