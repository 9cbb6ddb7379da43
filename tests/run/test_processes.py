"""Real processes on this machine: the same numbers, and the same after they are killed."""

import functools
import json
import re
import signal
import time

import pytest

from tests.support.processes import Run, check_written_together, completed

pytestmark = pytest.mark.ci
STEPS = 8
OUTSIDE = "something outside train() holds arrays or devices"
OFFLOAD = ["--offload"]  # the worker asserts where its state was born, restored, and left


def arguments(directory, *flags, **options):
    """As the worker takes them; `step_seconds=1` is --step-seconds 1."""
    pairs = {"directory": directory, "steps": STEPS, **options}.items()
    words = [(f"--{name.replace('_', '-')}", value) for name, value in pairs]
    return [*(str(word) for pair in words for word in pair), *flags]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Runs one process with four devices, once for each way; returns the digest of its state."""

    @functools.cache
    def digest(*flags):
        logs = tmp_path_factory.mktemp("undisturbed")
        return completed(1, logs, *arguments(logs / "c", *flags, devices=4)).digest()

    return digest


def test_several_processes_compute_what_one_does(undisturbed, tmp_path):
    """With the state in the memory of each process's host, updated in backward."""
    run = completed(4, tmp_path, *arguments(tmp_path / "c", *OFFLOAD, devices=1))
    assert run.said(r"zerojax: (.*)") == "4 processes, 4 devices"
    assert all(f"digest {run.digest()}" in log.read_text() for log in run.logs)
    check_written_together(tmp_path / "c" / str(STEPS), 4)
    assert run.digest() == undisturbed(*OFFLOAD)


def test_a_killed_run_goes_on_from_a_complete_checkpoint(undisturbed, tmp_path):
    """kill -9: the others end within a bounded time, and the next run ends bit-equal."""
    options = {"step_seconds": 0.1, "heartbeat": 20}
    run = Run(2, tmp_path, arguments(tmp_path / "c", *OFFLOAD, **options))
    run.reach(5)  # the write of step 2 is done, before step 4's began
    run.processes[1].kill()
    assert all(run.wait(120))  # killed, or ended with an error
    again = completed(2, tmp_path, *arguments(tmp_path / "c", *OFFLOAD))
    assert int(again.said(r"^from (\d+)")) in (2, 4, 6, 8)
    assert again.digest() == undisturbed(*OFFLOAD)


def test_sigterm_to_one_process_saves_in_all(undisturbed, tmp_path):
    # JAX looks for the signal once a second: steps must be left when it has.
    run = Run(2, tmp_path, arguments(tmp_path / "c", every=100, step_seconds=1))
    run.reach(1)
    run.processes[1].send_signal(signal.SIGTERM)
    assert run.wait(120) == [128 + signal.SIGTERM] * 2, run.text()
    flags = ["--no-data"]  # two data iterators are not one
    again = completed(1, tmp_path, *arguments(tmp_path / "c", *flags, devices=4))
    assert int(again.said(r"^from (\d+)")) >= 1
    assert again.digest() == undisturbed()


def test_a_process_that_hangs_ends_all_within_a_bounded_time(tmp_path):
    run = Run(2, tmp_path, arguments(tmp_path / "c", hang_at=2, watchdog=10))
    run.reach(2)
    started = time.monotonic()
    assert all(run.wait(60)) and time.monotonic() - started < 40
    logs = [log.read_text() for log in run.logs]
    assert any("was not alive for 10 s after step 2. This process hangs" in log for log in logs)
    assert any("worker.py" in log for log in logs), "its threads are listed"


def test_a_process_that_raises_ends_at_once_and_the_others_soon(tmp_path):
    run = Run(2, tmp_path, arguments(tmp_path / "c", raise_at=2, heartbeat=100))
    run.reach(2)
    started = time.monotonic()
    assert all(run.wait(60)), run.text()
    assert time.monotonic() - started < 40
    other, raised = (log.read_text() for log in run.logs)
    assert "Traceback" in raised and "ValueError: this process has seen enough" in raised
    assert "process 1 raised ValueError: this process has seen enough" in other


def test_processes_that_disagree_are_all_told_in_what(tmp_path):
    directory = tmp_path / "d"
    run = Run(2, tmp_path, ["--directory", str(directory)], "tests.run.disagreements")
    assert run.wait(240) == [0, 0], run.text()
    first, second = (json.loads((tmp_path / f"d.{number}.json").read_text()) for number in (0, 1))
    assert first == second and len(first) > 25


def test_a_process_may_compile_for_longer_than_gloo_waits(tmp_path):
    module = "tests.run.slow_compile"
    runs = [Run(2, tmp_path / str(len(flags)), flags, module) for flags in ([], ["--compile"])]
    for run in runs:
        assert run.wait(150) == [0, 0], run.text()
        first, second = (log.read_text() for log in run.logs)
        assert "loss 64, compiled 0" in first and "loss 64, compiled 1" in second
        assert "has waited 30 s in a step that this one has compiled for process 1" in first


ORDERS = {  # what processes 0 and 1 call
    "end": ("the end of its program", "the step of call 2 (loss)"),
    "evaluations": ("the step of call 2 (loss)", "eval_step of call 4 (loss)"),
    "turns": ("the step of call 2 (loss)", "the step of call 3 (twice)"),
    "rate": ("the step of call 2 (loss)", "new values of opt_state/hyperparams/learning_rate"),
    "weights": ("the step of call 2 (loss)", "zerojax.gather_params"),
}


def test_processes_that_call_known_steps_in_another_order_are_told(tmp_path):
    """Also where both wait for their devices, which wait for each other. All cases side by side:
    they wait longer than they compute."""
    started = time.monotonic()
    runs = [Run(2, tmp_path / case, ["--case", case], "tests.run.orders") for case in ORDERS]
    for run, (first, second) in zip(runs, ORDERS.values(), strict=True):
        assert all(run.wait(120)), run.text()
        assert time.monotonic() - started < 60
        for log in run.logs:
            said = log.read_text()
            assert f"call 7: {first} in process 0, {second} in process 1" in said, run.text()
            assert "makes the same calls in the same order" in said and "not a word" not in said


def test_a_device_that_computes_something_else_is_named_in_all_processes(tmp_path):
    run = Run(2, tmp_path, ["--directory", str(tmp_path / "r")], "tests.run.replayed")
    assert run.wait(240) == [0, 0], run.text()
    first, second = ((tmp_path / f"r.{number}.txt").read_text() for number in (0, 1))
    assert first == second
    flipped, copied = first.splitlines()
    assert re.search(r"device \d+ \(process 1 on .*, cpu \d\) differs first in what it", flipped)
    assert "all 4 devices differ in their copies of params/b, in both runs" in copied, copied


def test_processes_load_whole_sequences_of_their_rows(tmp_path):
    """Of the same rows, where their devices share these."""
    run = Run(2, tmp_path, [], "tests.run.sequences")
    assert run.wait(240) == [0, 0], run.text()
    assert all(log.read_text().count("right") == 4 for log in run.logs)


# -- runs that go on without those that are lost


def elastic(tmp_path, count, *flags, **options):
    options = {"devices": 1, "dim": 48, "rows": 12, "heartbeat": 20, **options}
    options = arguments(tmp_path / "c", "--no-data", *flags, **options)
    return Run(count, tmp_path / "logs", options)


def losses(run, devices):
    said = run.logs[0].read_text()
    lines = re.findall(rf"^step (\d+) on {devices} loss (\S+)", said, re.MULTILINE)
    return {int(step): loss for step, loss in lines}


def test_three_go_on_where_one_of_four_is_killed(tmp_path):
    """From the checkpoint of step 4, with the numbers of three devices that are started there."""
    run = elastic(tmp_path, 4, "--elastic", at_least=1, kill_at=5)
    assert run.wait(240) == [0, 0, 0, -9], run.text()
    assert run.said(r"zerojax: (lost.*)") == "lost process 3 of 4, and continues with 3"
    assert sorted(losses(run, 4)) == [1, 2, 3, 4, 5]
    assert sorted(losses(run, 3)) == [5, 6, 7, 8]
    for devices, steps in ((4, 4), (3, STEPS)):
        alone = elastic(tmp_path / "alone", 1, devices=devices, steps=steps)
        assert alone.wait(240) == [0], alone.text()
    assert losses(alone, 3) == losses(run, 3)
    ended = f"digest {alone.digest()}"
    assert [log.read_text().count(ended) for log in run.logs] == [1, 1, 1, 0]
    assert OUTSIDE not in run.text()


def test_three_go_on_where_the_lost_one_was_to_save(tmp_path):
    """The others wait for it beside the devices, while step 4 may still be written for all. They
    wait once, however many of their threads do."""
    run = elastic(tmp_path, 4, "--elastic", at_least=1, kill_after=6)
    run.processes[3].wait(120)
    lost = time.monotonic()
    while not run.said("(continues with 3)") and run.processes[0].poll() is None:
        time.sleep(0.1)
    assert 20 < time.monotonic() - lost < 60
    assert run.wait(240) == [0, 0, 0, -9], run.text()
    assert OUTSIDE not in run.text()
    before, after = losses(run, 4), losses(run, 3)
    assert sorted(before) == [1, 2, 3, 4, 5, 6]
    assert sorted(after) in ([3, 4, 5, 6, 7, 8], [5, 6, 7, 8])
    assert float(after[6]) == pytest.approx(float(before[6]), rel=0.02)  # dropout differs


ENDS = [
    (["--elastic", "--kill-at", "1"], 2, "elastic: 1 of 2 processes are left, but at_least=2."),
    (["--elastic", "--refuse-at", "1"], 1, "INTERNAL: of all of them"),  # nobody is lost
    (["--elastic", "--raise-at", "1"], 1, "ValueError: this process has seen enough"),
    ([], 1, r"Start it with zerojax.initialize\(elastic=True\)"),
]


def test_an_elastic_run_ends(tmp_path):
    """All cases side by side: most of their time is a heartbeat's."""
    runs = [
        elastic(tmp_path / str(case), 2, *flags, at_least=at_least)
        for case, (flags, at_least, _) in enumerate(ENDS)
    ]
    for run, (flags, _, message) in zip(runs, ENDS, strict=True):
        codes = run.wait(240)
        assert codes == [1, -9 if "--kill-at" in flags else 1], run.text()
        ended = run.logs[: codes.count(1)]
        assert all(re.search(message, log.read_text()) for log in ended)
        assert "continues" not in run.text()


def test_arrays_made_outside_are_said_to_keep_their_memory(tmp_path):
    options = {"at_least": 1, "kill_at": 1, "steps": 2}
    run = elastic(tmp_path, 2, "--elastic", "--keep-arrays", **options)
    assert run.wait(240) == [0, -9], run.text()
    assert OUTSIDE in run.text()
