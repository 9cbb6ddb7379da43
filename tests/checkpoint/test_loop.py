"""Checkpoints of a loop: when they are saved, which are kept, and where a run goes on."""

import concurrent.futures
import contextlib
import os
import signal
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import zerojax
from tests.checkpoint.damage import DAMAGE
from tests.checkpoint.states import STATE, make_state, plan_of, save_steps
from tests.conftest import is_here
from tests.support.processes import python
from tests.support.reference import assert_equal_bits


def run(directory, steps, stop_at=None, **options):
    """A loop that sends itself a SIGTERM before it saves `stop_at`."""
    with zerojax.Checkpoints(directory, **options) as checkpoints:
        state, saved = checkpoints.resume(STATE)
        assert saved.data == (saved.step and {"at": saved.step})
        for n in range(saved.step or 0, steps):
            state = {"w": np.asarray(state["w"]) * 2 + n}
            if n + 1 == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            checkpoints.save(n + 1, state, data={"at": n + 1})
    return state


def steps_in(directory):
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdigit())


@pytest.mark.parametrize("background", [True, False])
def test_a_resumed_loop_ends_as_an_undisturbed_one(tmp_path, background):
    options = {"every": 2, "keep": 2, "background": background}
    whole = run(tmp_path / "a", 9, **options)
    run(tmp_path / "b", 4, **options)
    assert (steps_in(tmp_path / "a"), steps_in(tmp_path / "b")) == ([8, 9], [2, 4])
    assert_equal_bits(run(tmp_path / "b", 9, **options), whole)


@pytest.mark.parametrize("close", [False, True])
def test_the_last_step_is_saved_where_the_loop_ends(tmp_path, close):
    """It is none of `every`, has no metrics, and the data have gone on since."""
    at, options = {"at": 0}, {"every": 4, "keep": 1, "best": "loss"}
    rows = types.SimpleNamespace(get_state=lambda: dict(at))
    checkpoints = zerojax.Checkpoints(tmp_path, **options)
    with contextlib.nullcontext() if close else checkpoints:
        for n in range(1, 7):
            at["at"], metrics = n, {"loss": 1.0} if n == 4 else None
            state = {"w": STATE["w"] + n}
            assert checkpoints.save(n, state, data=rows, metrics=metrics) is (n == 4)
        at["at"] = 100
    checkpoints.close()
    with zerojax.Checkpoints(tmp_path, **options) as checkpoints:
        assert checkpoints.steps() == [4, 6] and checkpoints.best() == 4
        back, saved = checkpoints.resume(STATE)
    assert_equal_bits(back["w"], STATE["w"] + 6)
    assert (saved.step, saved.data) == (6, {"at": 6})


ENDS = [(SystemExit(0), [2, 3]), (SystemExit(1), [2]), (KeyboardInterrupt(), [2])]


@pytest.mark.parametrize("error, saved", ENDS)
def test_the_last_step_is_saved_unless_the_loop_fails(tmp_path, error, saved):
    with pytest.raises(type(error)), zerojax.Checkpoints(tmp_path, every=2) as checkpoints:
        for n in (1, 2, 3):
            checkpoints.save(n, STATE)
        raise error
    assert steps_in(tmp_path) == saved


@pytest.mark.parametrize("gone", ["w", "key"])
def test_a_last_state_that_is_gone_is_told_of_at_the_users_line(tmp_path, gone):
    """Whatever library is between that line and zerojax."""
    state = {"w": jnp.ones(2), "key": jax.random.key(0)}
    checkpoints = zerojax.Checkpoints(tmp_path, every=2)
    checkpoints.save(1, {"w": state["w"]}, rng=state["key"])
    state[gone].delete()
    library = {"close": checkpoints.close}
    exec(compile("def end():\n    close()", optax.__file__, "exec"), library)
    message = r"last steps are not saved in .*state of step 1, .*donated since. Call save after ea"
    with pytest.warns(UserWarning, match=message) as warned:
        library["end"]()
    assert is_here(warned[0], __file__) and steps_in(tmp_path) == []


def test_sigterm_saves_before_exiting(tmp_path, capsys):
    """Also without the metrics of the best; and the run ends as one that is left alone."""
    before, options = signal.getsignal(signal.SIGTERM), {"every": 100, "best": "loss"}
    with pytest.raises(SystemExit, match=r"^ended by SIGTERM; step 3 is saved$") as stopped:
        run(tmp_path / "a", 9, stop_at=3, **options)
    told = f"zerojax: after a SIGTERM, step 3 is saved in {tmp_path / 'a'}\n"
    assert told in capsys.readouterr().out
    assert stopped.value.code == 143 and isinstance(stopped.value, zerojax.checkpoint.Preempted)
    assert signal.getsignal(signal.SIGTERM) is before
    assert steps_in(tmp_path / "a") == [3]
    assert_equal_bits(run(tmp_path / "a", 5), run(tmp_path / "undisturbed", 5))


def test_a_run_whose_directory_was_moved_ends_as_another(tmp_path):
    """Its lock is not where it was."""
    run = zerojax.Checkpoints(tmp_path / "a")
    with pytest.raises(zerojax.checkpoint.Preempted, match="step 1 is saved"), run as checkpoints:
        checkpoints.save(0, STATE)  # only then has Orbax looked for what earlier runs left
        checkpoints.wait()
        (tmp_path / "a").rename(tmp_path / "b")
        os.kill(os.getpid(), signal.SIGTERM)
        checkpoints.save(1, STATE)
    assert [steps_in(tmp_path / name) for name in "ba"] == [[0], [1]]


def test_threads_save_one_after_another(tmp_path):
    """In one loop, in two, and outside of loops. Orbax would wait for 300 s, and fail."""
    loops = [zerojax.Checkpoints(tmp_path / name, keep=None) for name in "ab"]

    def save(n):
        loops[n % 2].save(n, {"w": STATE["w"] + n})
        zerojax.save(tmp_path / "c" / str(n), {"w": STATE["w"] + n})

    with loops[0], loops[1], concurrent.futures.ThreadPoolExecutor(6) as threads:
        list(threads.map(save, range(6)))
    for n in range(6):
        for saved in (tmp_path / "ab"[n % 2], tmp_path / "c"):
            assert_equal_bits(zerojax.restore(saved / str(n), STATE)["w"], STATE["w"] + n)


def test_several_processes_stay_close_to_their_devices(tmp_path, monkeypatch):
    """No more than two steps: after a SIGTERM to one process, all save where the furthest is."""
    waited = []
    with zerojax.Checkpoints(tmp_path, every=100) as checkpoints:
        monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(ocp.CheckpointManager, "reached_preemption", lambda *_: False)
        monkeypatch.setattr(jax, "block_until_ready", waited.append)
        for n in range(4):
            state = {"large": jnp.ones((8, 8)), "key": jax.random.key(n), "step": jnp.int32(n)}
            checkpoints.save(n + 1, state)
            if n < 3:
                state["step"].delete()  # as a step that donates it does
            assert len(waited) == max(0, n - 1)
        monkeypatch.undo()
    assert list(map(int, waited)) == [0, 1]


# -- where a run goes on


def test_what_is_unfinished_or_damaged_is_not_resumed_from(tmp_path):
    """Left by a run that was killed, whose lock nobody holds any more."""
    save_steps(tmp_path, 2, 4)
    file = next(p for p in (tmp_path / "4").rglob("d/*") if p.stat().st_size)
    DAMAGE["flipped"](file, file.read_bytes())
    leftover = tmp_path / "6.orbax-checkpoint-tmp"
    leftover.mkdir()
    (tmp_path / ".lock").touch()
    with zerojax.Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest() == 4
        with pytest.raises(ValueError, match=rf"{file.name} is damaged.*Restore another"):
            checkpoints.resume(STATE)
        state, saved = checkpoints.resume(STATE, step=2)
        assert saved.step == 2 and np.all(state["w"] == STATE["w"] + 2)
        with pytest.raises(ValueError, match=r"another process is writing to .*its own path"):
            zerojax.Checkpoints(tmp_path)
        checkpoints.save(8, STATE)
    assert not leftover.exists() and not (tmp_path / ".lock").exists()


@pytest.mark.parametrize("step", [3, 500])
def test_an_earlier_run_is_not_removed_for_one_that_did_not_resume_it(tmp_path, step):
    """`keep=` would count its checkpoints, and drop them for those of this run."""
    save_steps(tmp_path, 6, 9)
    message = rf"step {step} cannot be saved: .* has an earlier run, up to step 9, .*resume\(\)"
    refused = pytest.raises(ValueError, match=message)
    with zerojax.Checkpoints(tmp_path, every=250) as checkpoints, refused:
        checkpoints.save(step, STATE)  # the first, though it is not saved yet
    with zerojax.Checkpoints(tmp_path, keep=2) as checkpoints:
        with pytest.raises(ValueError, match="does not fit like="):
            checkpoints.resume({"v": STATE["w"]})
        with refused:
            checkpoints.save(step, STATE)
        assert checkpoints.steps() == [6, 9]
        checkpoints.resume(STATE, step=6)
        checkpoints.save(7, STATE)  # meant: after a step that was chosen
        checkpoints.wait()
        assert checkpoints.steps() == [7, 9]
    with zerojax.Checkpoints(tmp_path, keep=None) as checkpoints:  # removes nothing
        with pytest.raises(ValueError, match=r"step 8 cannot be saved: .* up to step 9"):
            checkpoints.save(8, STATE)
        checkpoints.save(10, STATE)
    assert steps_in(tmp_path) == [7, 9, 10]


def test_a_plan_resumes_without_a_second_state(tmp_path):
    made, plan = [], plan_of()
    make = lambda: made.append(1) or make_state()
    with zerojax.Checkpoints(tmp_path) as checkpoints:
        message = r"no complete checkpoint.*resume\(plan, make_state\)"
        with pytest.raises(ValueError, match=message):
            checkpoints.resume(plan)
        state, saved = checkpoints.resume(plan, make)
        assert saved == zerojax.checkpoint.Extras() and made == [1]
        checkpoints.save(1, state)
        again, saved = checkpoints.resume(plan, make)
        assert saved.step == 1 and made == [1]
    assert again.tx.plan == plan


def test_what_others_saved_goes_on_from_the_step_of_its_directory(tmp_path):
    with ocp.CheckpointManager(tmp_path / "orbax") as manager:
        both = {"state": ocp.args.StandardSave(STATE), "data": ocp.args.JsonSave({"row": 7})}
        manager.save(40, args=ocp.args.Composite(**both))
    with zerojax.Checkpoints(tmp_path / "orbax") as checkpoints:
        with pytest.warns(UserWarning, match="write .*/40: it reads the state, but not data be"):
            state, saved = checkpoints.resume({"w": np.zeros_like(STATE["w"])})
        assert_equal_bits(state, STATE)
        assert saved.step == 40 and saved.data is None
        checkpoints.save(41, state)
    zerojax.save(tmp_path / "plain" / "40", STATE, metadata={"run": "first"})
    with zerojax.Checkpoints(tmp_path / "plain") as checkpoints:
        _, saved = checkpoints.resume(STATE)
    assert (saved.step, saved.metadata) == (40, {"run": "first"})


# -- what is refused


def test_steps_and_states_that_cannot_be_saved(tmp_path):
    with zerojax.Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(TypeError, match=r"f is a builtin_f.*, not an array"):
            checkpoints.save(1, {"w": STATE["w"], "f": len})
        for step, said in ((-1, "-1"), (2.0, "2.0"), ("3", "'3'"), (STATE, "a dict")):
            with pytest.raises(ValueError, match=f"step is {said}, not a count of steps. Pass an"):
                checkpoints.save(step, STATE)
        assert checkpoints.save(jnp.int32(2), STATE) is True  # JAX's, as in a state
        checkpoints.save(np.int64(4), STATE)
        checkpoints.wait()
        assert [type(n) for n in checkpoints.steps()] == [int, int]
        with pytest.raises(ValueError, match=r"/4 exists, and nothing is overwr.*resume\(\)"):
            checkpoints.save(4, STATE)
    with pytest.raises(ValueError, match=r"step 5 cannot be saved: .*closed. Save inside their"):
        checkpoints.save(5, STATE)


# -- which count, and which are kept


def test_what_is_being_written_does_not_count(tmp_path, monkeypatch):
    """Until it is waited for. Ctrl-C ends the waiting and not the write."""
    with zerojax.Checkpoints(tmp_path, best="loss", keep=1) as checkpoints:
        checkpoints.save(1, STATE, metrics={"loss": 2.0})
        checkpoints.wait()
        go, finalize = threading.Event(), ocp.PyTreeCheckpointHandler.finalize
        held = lambda *args: (go.wait(60), finalize(*args))[1]
        monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "finalize", held)
        checkpoints.save(2, STATE, metrics={"loss": 1.0})
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            interrupt = lambda _: signal.default_int_handler(signal.SIGINT, None)
            patched.setattr(ocp.CheckpointManager, "wait_until_finished", interrupt)
            checkpoints.wait()
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
            with pytest.raises(ValueError, match=rf"/{n} exists, and nothing is ov.*, remove this"):
                checkpoints.save(n, STATE)
        checkpoints.save(7, STATE)
        checkpoints.wait()
        assert checkpoints.steps() == [1, 7]  # keep= counts checkpoints alone
    assert (tmp_path / "8" / "notes.txt").read_text() == "mine"


NAN = float("nan")


@pytest.mark.parametrize(
    "mode, losses, kept",
    [
        ("max", [-3, -1, -2, -4, -5], [2, 5]),
        ("min", [3, 1, 1, 4], [3, 4]),  # the newest of equals
        ("min", [3, 1, NAN], [2, 3]),
        ("min", [NAN, 1, 5], [2, 3]),
    ],
)
def test_the_best_is_kept_beside_the_newest(tmp_path, mode, losses, kept):
    with zerojax.Checkpoints(tmp_path, keep=1, best="loss", mode=mode) as checkpoints:
        for n, loss in enumerate(losses, 1):
            checkpoints.save(n, STATE, metrics={"loss": np.float32(loss), "aux": {"x": [1]}})
        checkpoints.wait()
        assert checkpoints.steps() == kept and checkpoints.best() == kept[0]
        with pytest.raises(ValueError, match=r"best='loss' is not among .*Pass metrics="):
            checkpoints.save(9, STATE, metrics={"accuracy": 1.0})
    for other in ("accuracy", None):
        with zerojax.Checkpoints(tmp_path, best=other) as checkpoints:
            assert checkpoints.best() is None


DIGIT = lambda file, _: file.write_text(file.read_text().replace('"loss": 0.3', '"loss": 9.3'))


@pytest.mark.parametrize("damage", [*DAMAGE.values(), DIGIT])
def test_a_metric_that_cannot_be_read_costs_a_rank_and_no_checkpoint(tmp_path, damage):
    save_steps(tmp_path, 1, 2, 3, best="loss")
    file = tmp_path / "3" / "default" / "_METADATA"  # the best one's
    damage(file, file.read_bytes())
    said = rf"'loss' of .*/3 cannot be read \({file} .*: step 3 has no rank.*until you"
    with pytest.warns(match=said):
        checkpoints = zerojax.Checkpoints(tmp_path, keep=1, best="loss")
    with checkpoints:
        assert checkpoints.best() == 2
        checkpoints.resume(STATE, step=2)
        checkpoints.save(4, STATE, metrics={"loss": 9.0})
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3, 4] and checkpoints.best() == 2


def test_the_metrics_of_an_orbax_manager_rank_its_steps(tmp_path):
    ranking = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    with ocp.CheckpointManager(tmp_path, options=ranking) as manager:
        for step, loss in ((1, 0.1), (2, 0.5)):
            manager.save(step, args=ocp.args.StandardSave(STATE), metrics={"loss": loss})
    with zerojax.Checkpoints(tmp_path, keep=1, best="loss") as checkpoints:
        assert checkpoints.best() == 1
        with pytest.warns(UserWarning, match="it reads the state, but not metrics beside it"):
            checkpoints.resume(STATE, step=2)
        checkpoints.save(3, STATE, metrics={"loss": 0.3})
        checkpoints.wait()
        assert checkpoints.steps() == [1, 3]


# -- no `with` block


EXIT = """
import sys, numpy as np, zerojax
checkpoints = zerojax.Checkpoints(sys.argv[1])
for n in (1, 2):
    checkpoints.save(n, {"w": np.full((500, 500), n, np.int32)})
raise SystemExit(3)
"""


def test_without_a_with_block_the_last_checkpoint_is_finished_at_exit(tmp_path):
    assert python(EXIT, tmp_path) == (3, "", "")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]
    back = zerojax.restore(tmp_path / "2", {"w": np.zeros((500, 500), np.int32)})
    assert np.all(back["w"] == 2)


def test_without_a_with_block_save_waits_and_dropping_it_lets_another_in(tmp_path):
    checkpoints = zerojax.Checkpoints(tmp_path)
    checkpoints.save(1, STATE)
    assert not checkpoints.busy() and checkpoints.steps() == [1]
    del checkpoints
    assert not (tmp_path / ".lock").exists()
