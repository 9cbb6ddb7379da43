"""What becomes of a run's time, over starts that end, fail, or are killed."""

import contextlib
import functools

import jax
import orbax.checkpoint as ocp
import pytest

import zerojax
from tests.checkpoint.states import STATE
from tests.clock import stopped


@pytest.fixture
def clock(monkeypatch):
    """One on which Orbax's saves take 5 seconds, and its waits what `waits` says, once."""
    clock = stopped(monkeypatch)
    clock.waits = 0
    save, wait = ocp.CheckpointManager.save, ocp.CheckpointManager.wait_until_finished

    def saving(*args, **options):
        clock.seconds += 5
        return save(*args, **options)

    def waiting(*args):
        clock.seconds, clock.waits = clock.seconds + clock.waits, 0
        return wait(*args)

    monkeypatch.setattr(ocp.CheckpointManager, "save", saving)
    monkeypatch.setattr(ocp.CheckpointManager, "wait_until_finished", waiting)
    return clock


# What a run goes through, each with the clock and its directory.


def train(steps, fails=False, hangs=0, evaluates=0):
    """Starts in 30 s; steps take 2, saves 5, and the last wait 3. It saves every 4 steps."""

    def event(clock, directory):
        with contextlib.suppress(RuntimeError), zerojax.Checkpoints(directory, every=4) as loop:
            state, saved = loop.resume(STATE)
            for n in range(saved.step or 0, steps):
                clock.seconds += 30 if n == (saved.step or 0) else 2
                loop.save(n + 1, state)
            clock.seconds += hangs + evaluates
            if fails:
                raise RuntimeError
            clock.waits = 3

    return event


def look(clock, directory, error=None):
    """A start that ends before its first step, after 40 s: it fails, or has only read."""
    with contextlib.suppress(RuntimeError), zerojax.Checkpoints(directory) as loop:
        loop.resume(STATE)
        assert (directory / "goodput.json").exists()  # until it is over
        clock.seconds += 40
        if error:
            raise error


def killed(first, last, set_by=0):
    """A start of steps of 2 s that is killed after `last`: nothing ends its clock."""

    def event(clock, directory):
        file = directory / "goodput.json"
        with contextlib.suppress(RuntimeError), zerojax.Checkpoints(directory, every=9999) as loop:
            for step in range(first, last + 1):
                clock.seconds += 2
                clock.set_by += set_by * (step == last - 1)
                loop.save(step, STATE)
            left = file.read_bytes()
            raise RuntimeError
        file.write_bytes(left)

    return event


def wait(seconds):
    def event(clock, directory):
        clock.seconds += seconds

    return event


FAILS = [functools.partial(look, error=RuntimeError), wait(100)]
RUNS = [
    ([train(9)], {"productive": 16, "starting": 30, "saving": 18, "goodput": 16 / 64, "steps": 9}),
    # What follows the last step, an evaluation of a minute, is no saving; the last wait is.
    ([train(8, evaluates=60)], {"productive": 14 + 60, "saving": 13, "starting": 30}),
    # It fails after step 7, is down for 100 s, and goes on from step 4.
    (
        [train(7, fails=True), wait(100), train(10)],
        {"productive": 16, "redone": 6, "starting": 60, "saving": 18, "down": 100, "starts": 2},
    ),
    # A step hangs for 50 s until another process counts as lost.
    (
        [train(6, fails=True, hangs=50), wait(100), train(8)],
        {"productive": 6 + 6, "redone": 4, "starting": 60, "saving": 13, "down": 150, "starts": 2},
    ),
    # Starts that end before their first step; the end of the second was no interruption.
    (
        [*FAILS, train(8), wait(1e6), *FAILS, train(12)],
        {"productive": 14 + 6, "starting": 60, "saving": 21, "down": 280, "starts": 4, "steps": 12},
    ),
    # A step counts if no later start goes behind it. Each start's first step is not one of them.
    ([killed(1, 10), killed(9, 12)], {"productive": 14 + 6, "redone": 4, "starting": 4}),
    ([killed(1, 10), killed(1, 4)], {"productive": 6, "redone": 18, "starting": 4}),
    # The clock on the wall is set by an hour while a start runs.
    (
        [killed(1, 5), wait(50), killed(6, 9, -3600), wait(50), killed(10, 15, 3600)],
        {"productive": 8 + 6 + 10, "starting": 6, "down": 100},
    ),
]


@pytest.mark.parametrize("events, wanted", RUNS)
def test_what_becomes_of_the_time(clock, tmp_path, events, wanted):
    for event in events:
        event(clock, tmp_path)
    times = zerojax.Goodput(tmp_path).to_dict()
    kinds = {kind: 0 for kind in ("productive", "redone", "starting", "saving", "down")}
    assert times == times | kinds | wanted
    assert times["goodput"] == times["productive"] / sum(times[kind] for kind in kinds)


def test_reading_checkpoints_is_no_start(clock, tmp_path):
    look(clock, tmp_path)
    assert not list(tmp_path.glob("*.json"))
    with pytest.raises(ValueError, match=r"Give the directory of .*Checkpoints whose save"):
        zerojax.Goodput(tmp_path)
    train(8)(clock, tmp_path)
    before = (tmp_path / "goodput.json").read_bytes()
    look(clock, tmp_path)
    assert (tmp_path / "goodput.json").read_bytes() == before


def test_it_prints_a_table(clock, tmp_path):
    for event in (killed(1, 1801), wait(41), killed(1701, 1801)):
        event(clock, tmp_path)
    said = str(zerojax.Goodput(tmp_path)).splitlines()
    assert said[0] == "goodput 93.6%: 1801 steps in 1:04:05, 2 starts"
    assert [line.split()[:3] for line in said[4:]] == [
        ["productive", "0:59:58", "93.6%"],
        ["redone", "0:03:22", "5.3%"],
        ["starting", "4.0", "s"],
        ["saving", "0.0", "s"],
        ["down", "41.0", "s"],
    ]
    assert "done again" in said[5] and "<td>redone</td>" in zerojax.Goodput(tmp_path)._repr_html_()


def test_damage_does_not_stop_training(clock, tmp_path):
    for text in ("", "[]", "{}", '[{"began": 1}]', '[{"began": 1, "alive": ""}]'):
        (tmp_path / "goodput.json").write_text(text)
        with pytest.raises(ValueError, match=r"goodput.json is damaged \(.*\). Remove it"):
            zerojax.Goodput(tmp_path)
    with pytest.warns(UserWarning, match="goodput.json is damaged .* left out of this run's"):
        train(4)(clock, tmp_path)
    assert zerojax.Goodput(tmp_path).starts == 1
    (tmp_path / ".goodput.json.new").mkdir()
    with pytest.warns(UserWarning, match="goodput.json cannot be written"):
        train(8)(clock, tmp_path)


def test_process_0_alone_keeps_the_file(clock, tmp_path, monkeypatch):
    with zerojax.Checkpoints(tmp_path, every=1000) as checkpoints:
        with monkeypatch.context() as patched:
            patched.setattr(jax, "process_index", lambda: 1)
            checkpoints.save(1, STATE)
            checkpoints.save(2, STATE)
        assert zerojax.Goodput(tmp_path).steps == 0
        checkpoints.save(3, STATE)
    assert zerojax.Goodput(tmp_path).steps == 3
