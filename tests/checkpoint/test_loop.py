"""Checkpoints of a loop: when they are saved, and where a run goes on."""

import contextlib
import functools
import json
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import zerojax
from tests.checkpoint.damage import DAMAGE, damage_all, right_or_named
from tests.checkpoint.states import (
    BATCH,
    STATE,
    filled,
    loss_fn,
    make_state,
    place,
    plan_of,
    save_steps,
    trained,
    words,
)
from tests.reference import assert_equal_bits
from zerojax._checkpoint import checkpoint as _checkpoint, files as _files


def run(directory, steps, every=2, state=None, stop_at=None, **options):
    """A training loop; sends itself a SIGTERM before `stop_at`."""
    step = zerojax.train_step(loss_fn)
    with zerojax.Checkpoints(directory, every=every, **options) as checkpoints:
        state, saved = checkpoints.resume(place() if state is None else state)
        for n in range(saved.step or 0, steps):
            state, _ = jax.block_until_ready(step(state, BATCH * (n + 1)))
            if n + 1 == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            checkpoints.save(n + 1, state, data={"at": n + 1})
    return state


@pytest.mark.parametrize("background", [True, False])
def test_a_loop_saves_every_so_many_steps_and_keeps_the_newest(tmp_path, background):
    run(tmp_path, 8, every=2, keep=2, background=background)
    with zerojax.Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [6, 8] and checkpoints.latest() == 8


class Rows:
    """A data iterator, whose state is where it is."""

    at = 0

    def get_state(self):
        return {"at": self.at}


@pytest.mark.parametrize("close", [False, True])
def test_the_last_step_is_saved_where_the_loop_ends(tmp_path, close):
    """It is none of `every`, has no metrics, and the data have gone on since."""
    state, rows = place(), Rows()
    step = zerojax.train_step(loss_fn)
    with contextlib.ExitStack() as stack:
        checkpoints = zerojax.Checkpoints(tmp_path, every=4, keep=1, best="loss")
        if not close:
            stack.enter_context(checkpoints)
        for n in range(1, 7):
            state, metrics = step(state, BATCH)
            rows.at = n
            metrics = metrics if n == 4 else None
            assert checkpoints.save(n, state, data=rows, metrics=metrics) is (n == 4)
        rows.at = 100
        assert checkpoints.latest() in (4, None)
        if close:
            checkpoints.close()
            checkpoints.close()
    with zerojax.Checkpoints(tmp_path, every=4, keep=1, best="loss") as checkpoints:
        assert checkpoints.steps() == [4, 6] and checkpoints.best() == 4
        back, saved = checkpoints.resume(place())
    assert_equal_bits(words(back), words(state))
    assert (saved.step, saved.data) == (6, {"at": 6})


def test_what_a_loop_that_fails_did_last_is_not_saved(tmp_path):
    with pytest.raises(RuntimeError), zerojax.Checkpoints(tmp_path, every=2) as checkpoints:
        for n in (1, 2, 3):
            checkpoints.save(n, STATE)
        raise RuntimeError
    with zerojax.Checkpoints(tmp_path, every=2) as checkpoints:
        assert checkpoints.steps() == [2]
        checkpoints.save(3, STATE)
        checkpoints.save(4, STATE)  # which leaves nothing for the end to do
        checkpoints.wait()
        (tmp_path / "4").rename(tmp_path / "four")
    assert sorted(p.name for p in tmp_path.glob("[0-9]*")) == ["2"]


@pytest.mark.parametrize(("code", "steps"), [(None, [2, 3]), (0, [2, 3]), (1, [2])])
def test_an_exit_that_is_no_error_ends_a_loop_as_any_other(tmp_path, code, steps):
    with pytest.raises(SystemExit), zerojax.Checkpoints(tmp_path, every=2) as checkpoints:
        for n in (1, 2, 3):
            checkpoints.save(n, STATE)
        sys.exit(code)
    with zerojax.Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == steps


def test_a_last_state_that_is_gone_is_told_of(tmp_path):
    state, step, key = place(), zerojax.train_step(loss_fn), jax.random.key(0)
    message = r"last steps are not saved in .*state of step 1, .*donated since. Call save after ea"
    for gone in (lambda: key.delete(), lambda: step(state, BATCH)):
        with pytest.warns(UserWarning, match=message), zerojax.Checkpoints(tmp_path, every=2) as it:
            it.save(1, state, rng=key if not key.is_deleted() else None)
            gone()
    with zerojax.Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == []


def test_what_cannot_be_saved_is_refused_at_the_first_step(tmp_path):
    with (
        pytest.raises(TypeError, match=r"f is a function, not an array"),
        zerojax.Checkpoints(tmp_path, every=100) as checkpoints,
    ):
        checkpoints.save(1, {"w": jnp.ones(2), "f": loss_fn})


def test_a_resumed_run_ends_where_an_undisturbed_one_does(tmp_path):
    want = words(run(tmp_path / "a", 7))
    run(tmp_path / "b", 5)
    assert_equal_bits(words(run(tmp_path / "b", 7)), want)
    assert zerojax.read_extras(tmp_path / "b" / "6").data == {"at": 6}


def test_a_sigterm_saves_without_the_metrics_of_the_best(tmp_path):
    state = filled(0)
    with zerojax.Checkpoints(tmp_path, every=2, keep=1, best="loss") as checkpoints:
        checkpoints.save(2, state, metrics={"loss": 1.0})
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(zerojax.Preempted):
            checkpoints.save(3, state)
    with zerojax.Checkpoints(tmp_path, keep=1, best="loss") as checkpoints:
        assert checkpoints.steps() == [2, 3] and checkpoints.best() == 2


@pytest.mark.parametrize("offload", [None, zerojax.Offload(params=True, min_bytes=0)])
def test_sigterm_saves_before_exiting(tmp_path, offload, capsys):
    """Wherever the state rests, the run ends as one that was left alone on the devices."""
    placed = functools.partial(place, offload=offload)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match=r"143|SIGTERM; step 3 is saved") as stopped:
        run(tmp_path, 9, every=100, stop_at=3, state=placed())
    told = f"zerojax: after a SIGTERM, step 3 is saved in {tmp_path}\n"
    assert told in capsys.readouterr().out
    assert stopped.value.code == 143 and isinstance(stopped.value, zerojax.Preempted)
    assert signal.getsignal(signal.SIGTERM) is before
    assert zerojax.read_extras(tmp_path / "3").data == {"at": 3}
    want = words(run(tmp_path / "undisturbed", 5))
    with zerojax.Checkpoints(tmp_path) as checkpoints:
        resumed, _ = checkpoints.resume(placed())
    state = run(tmp_path, 5, every=100, state=placed())
    assert_equal_bits(words(state), want)
    for each in (resumed, state):  # a step would bring back what was restored elsewhere
        arrays = [x for x in jax.tree.leaves((each.params, each.opt_state)) if x.ndim]
        is_on_host = {x.sharding.memory_kind == "pinned_host" for x in arrays}
        assert is_on_host == {offload is not None} and len(arrays) == 9


def test_an_unfinished_write_is_not_resumed_from(tmp_path):
    run(tmp_path, 4, every=2)
    leftover = tmp_path / "6.orbax-checkpoint-tmp"
    leftover.mkdir()
    with zerojax.Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest() == 4
        checkpoints.save(8, place())
    assert not leftover.exists()


def test_a_damaged_newest_is_an_error_and_the_one_before_opens(tmp_path):
    run(tmp_path, 4, every=2)
    file = next(p for p in (tmp_path / "4").rglob("d/*") if p.stat().st_size)
    DAMAGE["flipped"](file, file.read_bytes())
    with zerojax.Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match=rf"{file.name} is damaged.*Restore another"):
            checkpoints.resume(plan_of(3, 8))
        _, saved = checkpoints.resume(plan_of(3, 8), step=2)
    assert saved.step == 2


def test_an_earlier_run_is_not_removed_for_one_that_did_not_resume_it(tmp_path):
    """`keep=` would count its checkpoints, and drop the newest of them for older ones."""
    with zerojax.Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (6, 9):
            checkpoints.save(step, STATE)
    with zerojax.Checkpoints(tmp_path, keep=2) as checkpoints:
        message = r"step 3 cannot be saved: .* has an earlier run, up to step 9, .*resume\(\)"
        with pytest.raises(ValueError, match=message):
            checkpoints.save(3, STATE)
        assert checkpoints.steps() == [6, 9]
        checkpoints.resume(STATE, step=6)
        checkpoints.save(7, STATE)  # meant: after a step that was chosen
        checkpoints.wait()
        assert checkpoints.steps() == [7, 9]
    with zerojax.Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(10, STATE)  # goes on behind it without its state
        checkpoints.wait()
        assert checkpoints.steps() == [9, 10]


def test_a_saved_step_is_not_overwritten(tmp_path):
    with zerojax.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, place())
        checkpoints.wait()
        with pytest.raises(ValueError, match=r"step 1 is saved .* already.*resume\(\)"):
            checkpoints.save(1, place())


def test_saving_after_the_end_is_an_error_at_once(tmp_path):
    with zerojax.Checkpoints(tmp_path) as checkpoints:
        pass
    with pytest.raises(ValueError, match=r"step 1 cannot be saved: .*closed. Save inside of"):
        checkpoints.save(1, filled(0))


@pytest.mark.parametrize("step", [-1, 1.5, 2.0, "3"])
def test_a_step_is_a_count(tmp_path, step):
    with zerojax.Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match=r"step is a dict, not a count of steps. Pass an int"):
            checkpoints.save({"w": jnp.ones(4)}, 10)  # type: ignore
        with pytest.raises(ValueError, match=r"not a count of steps. Pass an integer from 0"):
            checkpoints.save(step, filled(0))
        assert checkpoints.save(jnp.int32(2), filled(0)) is True  # JAX's, as in a state
        checkpoints.save(np.int64(4), filled(0))
        checkpoints.wait()
        assert [type(n) for n in checkpoints.steps()] == [int, int]


def test_with_nothing_saved_a_plan_says_what_to_do(tmp_path):
    with (
        zerojax.Checkpoints(tmp_path) as checkpoints,
        pytest.raises(ValueError, match=r"no complete checkpoint.*resume\(plan, make_state\)"),
    ):
        checkpoints.resume(plan_of(3, 8))


def test_a_plan_resumes_without_a_second_state(tmp_path):
    made = []
    make = lambda: made.append(1) or make_state()
    with zerojax.Checkpoints(tmp_path) as checkpoints:
        state, saved = checkpoints.resume(plan_of(3, 8), make)
        assert saved == zerojax.Extras() and made == [1]
        assert state.params["layer"]["w"].addressable_shards[0].data.shape == (2, 64)
        checkpoints.save(1, trained(state))
        checkpoints.wait()
        again, saved = checkpoints.resume(plan_of(3, 8), make)
        assert saved.step == 1 and int(again.step) == 2 and made == [1]


@pytest.mark.parametrize(
    "option",
    [{"keep": 0}, {"keep": 1.5}, {"keep": True}, {"every": "3"}, {"every": 0}, {"mode": "least"},
     {"best": 3}, {"background": 1}],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(tmp_path, option):
    ((name, value),) = option.items()
    remedy = r"every and keep are positive \(keep=None keeps all\)|best is the name of one of"
    with pytest.raises(ValueError, match=rf"{name}={value!r}.*({remedy})"):
        zerojax.Checkpoints(tmp_path / "c", **option)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("path", [None, 3, b"c"])
def test_a_path_is_a_path(path):
    refused = pytest.raises(TypeError, match=r"(None|3|b'c') is no path. Pass a str or a pathlib")
    for call in (zerojax.Checkpoints, zerojax.read_extras):
        with refused:
            call(path)
    for call in (zerojax.save, zerojax.restore, zerojax.export_safetensors):
        with refused:
            call(path, {"w": jnp.ones(3)})


def write(directory, ready):
    with zerojax.Checkpoints(directory, keep=None) as checkpoints:
        for n in range(10_000):
            checkpoints.save(n, filled(n))
            if n == 1:
                ready.set()


def test_while_one_process_writes_others_read_and_do_not_write(tmp_path):
    """Until it is gone: killed, without a chance to clean up."""
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Event()
    writer = spawn.Process(target=write, args=(str(tmp_path), ready))
    writer.start()
    try:
        assert ready.wait(60)
        newest = set()
        for _ in range(10):
            newest.add(max(int(p.name) for p in tmp_path.iterdir() if p.name.isdigit()))
            back = zerojax.restore(tmp_path / str(max(newest)), filled(0))
            assert_equal_bits(back, filled(max(newest)))
        assert len(newest) > 1 and writer.is_alive()  # it did write meanwhile
        with pytest.raises(ValueError, match=r"something else is writing to .*path of its own"):
            zerojax.Checkpoints(tmp_path)
    finally:
        writer.kill()
        writer.join()
    with zerojax.Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest() >= max(newest)
        assert_equal_bits(checkpoints.resume(filled(0))[0], filled(checkpoints.latest()))


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
        assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "1", "goodput.json"]
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
        left = sorted(p.name for p in (tmp_path / "loop").iterdir())
        assert left == [".lock", "goodput.json"]
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
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2", "goodput.json"]
    back = zerojax.restore(tmp_path / "2", {"w": jnp.zeros((500, 500), int)})
    assert np.all(back["w"] == 2)


def test_without_a_with_block_save_waits_and_dropping_it_lets_another_in(tmp_path):
    checkpoints = zerojax.Checkpoints(tmp_path)
    checkpoints.save(1, STATE)
    assert not checkpoints.busy() and checkpoints.steps() == [1]
    del checkpoints
    assert not (tmp_path / ".lock").exists()
    save_steps(tmp_path, 2)
    checkpoints = zerojax.Checkpoints(tmp_path, every=5)
    checkpoints.save(3, STATE)  # is not due, and kept in mind for close()
    del checkpoints
    assert not (tmp_path / ".lock").exists()


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


def test_a_run_that_orbax_saved_goes_on_from_its_step(tmp_path):
    state = zerojax.shard_train_state({"params": {"w": jnp.arange(64.0)}})
    with ocp.CheckpointManager(tmp_path) as manager:
        tree = ocp.args.StandardSave(jax.tree.map(np.asarray, state))
        args = ocp.args.Composite(state=tree, data=ocp.args.JsonSave({"row": 7}))
        manager.save(40, args=args)
    with zerojax.Checkpoints(tmp_path) as checkpoints:
        with pytest.warns(
            UserWarning, match="40 is not zerojax's: its state is read, and data besi"
        ):
            found, saved = checkpoints.resume(state)
        assert_equal_bits(found, state)
        assert saved.step == 40 and saved.data is None
        checkpoints.save(41, found)


def test_several_processes_stay_close_to_their_devices(tmp_path, monkeypatch):
    """No more than two steps: after a SIGTERM to one process, all save where the furthest is."""
    waited = []
    with zerojax.Checkpoints(tmp_path) as checkpoints:
        monkeypatch.setattr(jax, "block_until_ready", waited.append)
        for n in range(4):
            state = {"large": jnp.ones((8, 8)), "key": jax.random.key(n), "step": jnp.int32(n)}
            checkpoints._hold_back(state)
            state["step"].delete()  # as a step that donates it does
            assert len(waited) == max(0, n - 1)
        monkeypatch.undo()
    assert list(map(int, waited)) == [0, 1]


def test_a_plain_save_keeps_its_extras_and_takes_the_step_of_its_directory(tmp_path):
    state = zerojax.shard_train_state({"params": {"w": jnp.arange(64.0)}})
    zerojax.save(tmp_path / "40", state, metadata={"run": "first"})
    with zerojax.Checkpoints(tmp_path) as checkpoints:
        _, saved = checkpoints.resume(state)
    assert (saved.step, saved.metadata) == (40, {"run": "first"})
