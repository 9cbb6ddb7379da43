"""What becomes of a run's time, over starts that end, fail, or are killed."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import types

import jax.numpy as jnp
import pytest

import zerojax
from zerojax._checkpoint import goodput as _goodput

STATE = {"params": {"w": jnp.ones((8, 4))}}


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only where a test says so, beside a clock on the wall that may be set."""
    now = types.SimpleNamespace(seconds=1000.0, set_by=0.0)
    fake = types.SimpleNamespace(
        time=lambda: 1e9 + now.seconds + now.set_by, monotonic=lambda: now.seconds
    )
    monkeypatch.setattr(_goodput, "time", fake)
    return now


def train(clock, directory, steps, fails_after=None, evaluates=0):
    """Starts in 30 s; steps take 2, saves 5, and the last save another 3 at the end."""
    with zerojax.Checkpoints(directory, every=4) as checkpoints:
        state, saved = checkpoints.resume(STATE)
        manager = checkpoints._manager
        save, wait = manager.save, manager.wait_until_finished

        def saving(*args, **kwargs):
            clock.seconds += 5
            return save(*args, **kwargs)

        def last_wait():
            clock.seconds += 3
            manager.wait_until_finished = wait
            return wait()

        manager.save = saving
        for n in range(saved.step or 0, steps):
            clock.seconds += 30 if n == (saved.step or 0) else 2
            checkpoints.save(n + 1, state)
            if n + 1 == fails_after:
                raise RuntimeError("a failure of the program's own")
        clock.seconds += evaluates
        manager.wait_until_finished = last_wait
    return zerojax.Goodput(directory).to_dict()


def test_one_start(clock, tmp_path):
    assert train(clock, tmp_path, steps=9) == {
        "productive": 16.0, "redone": 0.0, "starting": 30.0, "saving": 18.0, "down": 0.0,
        "goodput": 16 / 64, "starts": 1.0, "steps": 9.0,
    }  # fmt: skip


@pytest.mark.parametrize(("steps", "saving"), [(8, 13), (9, 18)])  # one more, at the end
def test_what_follows_the_last_step_is_no_saving(clock, tmp_path, steps, saving):
    """An evaluation of a minute, before the block ends and waits for the last save."""
    times = train(clock, tmp_path, steps=steps, evaluates=60)
    assert (times["productive"], times["saving"]) == (2 * (steps - 1) + 60, saving)


def test_a_wait_of_the_loops_own_is_saving(clock, tmp_path, monkeypatch):
    """Of 7 s; before the first step it is a part of the start, and after the end it is nothing."""

    def wait(checkpoints):
        with monkeypatch.context() as patched:
            slowly = lambda: setattr(clock, "seconds", clock.seconds + 7)
            patched.setattr(checkpoints._manager, "wait_until_finished", slowly)
            checkpoints.wait()

    with zerojax.Checkpoints(tmp_path) as checkpoints:
        wait(checkpoints)
        clock.seconds += 2
        checkpoints.save(1, STATE)
        clock.seconds += 60
        wait(checkpoints)
        clock.seconds += 5
    wait(checkpoints)
    times = zerojax.Goodput(tmp_path).to_dict()
    assert (times["starting"], times["productive"], times["saving"]) == (7 + 2, 60 + 5, 7)


def test_steps_after_the_checkpoint_are_done_again(clock, tmp_path):
    """It fails after step 7, is down for 100 s, and goes on from step 4."""
    with pytest.raises(RuntimeError, match="of the program's own"):
        train(clock, tmp_path, steps=10, fails_after=7)
    first = zerojax.Goodput(tmp_path).to_dict()
    assert (first["productive"], first["redone"], first["down"]) == (12, 0, 0)
    clock.seconds += 100
    times = train(clock, tmp_path, steps=10)
    assert times == {
        "productive": 6 + 10.0, "redone": 6.0, "starting": 60.0, "saving": 18.0, "down": 100.0,
        "goodput": 16 / 200, "starts": 2.0, "steps": 10.0,
    }  # fmt: skip


def test_the_time_until_an_error_ends_the_loop_is_down(clock, tmp_path):
    """A step hangs for 50 s until another process counts as lost; restarting takes 100 s."""
    with pytest.raises(RuntimeError), zerojax.Checkpoints(tmp_path, every=4) as checkpoints:
        for n in range(6):
            clock.seconds += 2
            checkpoints.save(n + 1, STATE)
        clock.seconds += 50
        raise RuntimeError("connection closed by peer")
    clock.seconds += 100
    times = train(clock, tmp_path, steps=8)
    assert (times["down"], times["redone"], times["starts"]) == (150, 4, 2)
    assert times["saving"] == 5 + 3  # all in the second start


def test_starts_that_end_before_their_first_step_are_down(clock, tmp_path):
    """The first start fails after 40 s, and another one between two that train; 100 s pass between
    two starts."""

    def fails():
        with pytest.raises(RuntimeError), zerojax.Checkpoints(tmp_path, every=4) as checkpoints:
            checkpoints.resume(STATE)
            clock.seconds += 40
            raise RuntimeError("out of memory")
        clock.seconds += 100

    fails()
    assert "0 steps in 0.0 s, 1 start" in str(zerojax.Goodput(tmp_path))
    train(clock, tmp_path, steps=8)
    clock.seconds += 1e6  # its end was no interruption
    fails()
    assert zerojax.Goodput(tmp_path).steps == 8
    times = train(clock, tmp_path, steps=12)
    assert (times["starts"], times["steps"], times["down"]) == (4, 12, 2 * 140)
    assert (times["productive"], times["redone"], times["starting"]) == (14 + 6, 0, 60)


@pytest.mark.parametrize("trained", [0, 8])
def test_reading_checkpoints_is_no_start(clock, tmp_path, trained):
    if trained:
        train(clock, tmp_path, steps=trained)
    before = {path: path.read_bytes() for path in tmp_path.glob("*.json")}
    with zerojax.Checkpoints(tmp_path) as checkpoints:
        checkpoints.resume(STATE)
        assert len(list(tmp_path.glob("*.json"))) == 1  # until it is over
    assert {path: path.read_bytes() for path in tmp_path.glob("*.json")} == before


def test_a_pause_after_the_end_is_not_counted(clock, tmp_path):
    train(clock, tmp_path, steps=8)
    clock.seconds += 1e6
    times = train(clock, tmp_path, steps=12)
    assert times["down"] == 0 and times["redone"] == 0 and times["productive"] == 14 + 6


def start(clock, directory, first, last, seconds=2.0):
    """A start that is killed after `last`: nothing ends its clock."""
    kept = _goodput.Clock(directory)
    for step in range(first, last + 1):
        clock.seconds += seconds
        kept.step_done(step)


@pytest.mark.parametrize(
    ("starts", "productive", "redone"),
    [
        ([(1, 10), (9, 12)], 14 + 6, 4),
        ([(1, 10), (9, 12), (9, 20)], 14 + 0 + 22, 4 + 6),
        ([(1, 10), (9, 12), (5, 20)], 6 + 0 + 30, 12 + 6),  # from an older checkpoint
        ([(1, 10), (1, 4)], 0 + 6, 18),  # killed before there was any
        ([(1, 10), (11, 12)], 18 + 2, 0),
    ],
)
def test_a_step_counts_if_no_later_start_goes_behind_it(
    clock, tmp_path, starts, productive, redone
):
    for first, last in starts:
        start(clock, tmp_path, first, last)
    times = zerojax.Goodput(tmp_path).to_dict()
    assert (times["productive"], times["redone"]) == (productive, redone)
    assert times["starting"] == 2 * len(starts)  # each one's first step
    total = productive + redone + times["starting"]
    assert total == clock.seconds - 1000 and times["goodput"] == productive / total


def test_without_a_later_start_nothing_is_done_again(clock, tmp_path):
    """One step alone, which `save` is called for once more 2 s later."""
    kept = _goodput.Clock(tmp_path)
    for _ in range(2):
        clock.seconds += 2
        kept.step_done(1)
    times = zerojax.Goodput(tmp_path).to_dict()
    assert (times["starting"], times["productive"], times["redone"]) == (2, 2, 0)


@pytest.mark.parametrize("hour", [-3600, 3600])
def test_a_clock_that_is_set_while_a_start_runs(clock, tmp_path, hour):
    start(clock, tmp_path, 1, 5)
    clock.seconds += 50
    kept = _goodput.Clock(tmp_path)
    for step in range(6, 10):
        clock.seconds += 2
        clock.set_by += hour if step == 8 else 0
        kept.step_done(step)
    clock.seconds += 50
    start(clock, tmp_path, 10, 15)
    times = zerojax.Goodput(tmp_path).to_dict()
    assert times["productive"] == 2 * (4 + 3 + 5) and times["down"] == 100


def test_a_clock_that_is_set_back_between_two_starts(clock, tmp_path):
    start(clock, tmp_path, 1, 5)
    clock.seconds, clock.set_by = clock.seconds + 50, -3600
    start(clock, tmp_path, 6, 8)
    assert zerojax.Goodput(tmp_path).to_dict()["down"] == 0


PROGRAM = """
import os, signal, sys, time, jax.numpy as jnp, zerojax
state = {"params": {"w": jnp.ones((8, 4))}}
with zerojax.Checkpoints(sys.argv[1], every=4) as checkpoints:
    state, saved = checkpoints.resume(state)
    print(saved.step or 0)
    for n in range(saved.step or 0, 10):
        time.sleep(0.2)
        checkpoints.save(n + 1, state)
        checkpoints.wait()
        if n + 1 == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_that_is_killed_and_resumed(tmp_path):
    """After step 7 of 10: what was done since step 4 is lost, as far as the file knew of it."""

    def start(killed_after):
        env = {**os.environ, "PYTHONPATH": str(pathlib.Path(zerojax.__file__).parents[1])}
        command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(killed_after)]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=env)

    began = time.time()
    assert start(killed_after=7).returncode == -signal.SIGKILL
    killed = json.loads((tmp_path / "goodput.json").read_text())[0]
    assert killed["step"] in (4, 5, 6, 7) and not killed["ended"]
    assert start(killed_after=0).stdout == "4\n"
    times = zerojax.Goodput(tmp_path).to_dict()
    assert times["starts"] == 2 and times["steps"] == 10
    lost = killed["step"] - 4
    # The first step of each start is a part of starting: steps 1 and 5.
    mean = killed["stepping"] / (killed["step"] - 1)
    assert mean >= 0.2 and times["redone"] == pytest.approx(lost * mean)
    assert times["productive"] >= 0.2 * (3 + 5) and times["starting"] >= 0.2 * 2
    first, last = json.loads((tmp_path / "goodput.json").read_text())
    assert times["down"] == last["began"] - first["alive"] > 0 and last["ended"]
    accounted = sum(times[kind] for kind in _goodput.MEANING)
    assert accounted == pytest.approx(last["alive"] - first["began"], abs=0.1)
    assert accounted < time.time() - began


def test_writes_are_rare_where_they_are_slow(clock, tmp_path, monkeypatch):
    """Each takes half a second, so 50 seconds pass between two; what is saved is written."""
    written, write = [], _goodput.json.dumps

    def dumps(history):
        written.append(history[-1]["step"])
        clock.seconds += 0.5
        return write(history)

    monkeypatch.setattr(_goodput.json, "dumps", dumps)
    kept = _goodput.Clock(tmp_path)
    for step in range(1, 101):
        clock.seconds += 1
        kept.step_done(step)
    assert written == [1, 51]
    kept.saved()
    assert written == [1, 51, 100]


def test_it_prints_a_table(clock, tmp_path):
    start(clock, tmp_path, 1, 1801)
    clock.seconds += 41
    start(clock, tmp_path, 1701, 1800)
    said = str(zerojax.Goodput(tmp_path)).splitlines()
    assert said[0] == "goodput 93.6%: 1800 steps in 1:04:03, 2 starts"
    assert [line.split()[:3] for line in said[4:]] == [
        ["productive", "0:59:56", "93.6%"],
        ["redone", "0:03:22", "5.3%"],
        ["starting", "4.0", "s"],
        ["saving", "0.0", "s"],
        ["down", "41.0", "s"],
    ]
    assert "done again" in said[5] and "<td>redone</td>" in zerojax.Goodput(tmp_path)._repr_html_()


def test_where_nothing_was_trained(tmp_path):
    with zerojax.Checkpoints(tmp_path, every=4) as checkpoints:
        assert checkpoints.latest() is None
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match=r"Give the directory of .*Checkpoints whose save"):
        zerojax.Goodput(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '[{"began": 1}]', '[{"began": 1, "alive": ""}]'])
def test_damage_does_not_stop_training(clock, tmp_path, text):
    (tmp_path / "goodput.json").write_text(text)
    with pytest.raises(ValueError, match=r"goodput.json is damaged \(.*\). Remove it"):
        zerojax.Goodput(tmp_path)
    with pytest.warns(UserWarning, match="goodput.json is damaged .* left out of this run's"):
        assert train(clock, tmp_path, steps=4)["starts"] == 1


def test_a_file_that_cannot_be_written_does_not_either(clock, tmp_path):
    (tmp_path / "goodput.json").mkdir()
    kept = _goodput.Clock.__new__(_goodput.Clock)
    vars(kept).update(
        file=_goodput.epath.Path(tmp_path) / "goodput.json", before=[], write_at=0.0, until=0.0,
        start=_goodput.Start(0.0, 0.0), began=False, meant=False,
    )  # fmt: skip
    with pytest.warns(UserWarning, match="goodput.json cannot be written"):
        kept.step_done(1)


def test_process_0_alone_keeps_the_file(clock, tmp_path, monkeypatch):
    monkeypatch.setattr(_goodput.jax, "process_index", lambda: 1)
    start(clock, tmp_path, 1, 3)
    assert list(tmp_path.iterdir()) == []


def test_its_file_is_no_checkpoint(clock, tmp_path):
    train(clock, tmp_path, steps=8)
    assert len(json.loads((tmp_path / "goodput.json").read_text())) == 1
    with zerojax.Checkpoints(tmp_path, every=4) as checkpoints:
        assert checkpoints.steps() == [4, 8]
