"""Training that goes on when a process is killed, with those that are left."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

import zerojax
from tests.processes import ROOT, Run

STEPS, KILLED_AT = 8, 5


def run(count, logs, directory, *arguments):
    options = ["--directory", str(directory), *map(str, arguments)]
    return Run(count, logs, options, module="tests.elastic_worker")


def losses(found, devices):
    lines = re.findall(
        rf"^step (\d+) on {devices} loss (\S+)", found.logs[0].read_text(), re.MULTILINE
    )
    return {int(step): loss for step, loss in lines}


def test_three_go_on_where_one_of_four_is_killed(tmp_path):
    """From the checkpoint of step 4, with the numbers of three devices that are started there."""
    found = run(4, tmp_path / "four", tmp_path / "c", "--kill-at", KILLED_AT)
    assert found.wait(180) == [0, 0, 0, -9], found.text()
    assert found.said(r"zerojax: (lost.*)") == "lost process 3 of 4, and goes on with 3"
    assert sorted(losses(found, 4)) == [1, 2, 3, 4, 5]
    assert sorted(losses(found, 3)) == [5, 6, 7, 8]
    for devices, steps in ((4, 4), (3, STEPS)):
        again = run(
            1, tmp_path / f"{devices}", tmp_path / "d", "--devices", devices, "--steps", steps
        )
        assert again.wait(120) == [0], again.text()
    assert losses(again, 3) == losses(found, 3)
    assert [log.read_text().count(again.digest()) for log in found.logs] == [1, 1, 1, 0]

    times = zerojax.Goodput(tmp_path / "c").to_dict()
    assert (times["starts"], times["steps"]) == (2, STEPS)
    assert times["redone"] > 0 and times["down"] > 0  # step 5; until it was found to be lost


@pytest.mark.slow
def test_three_go_on_where_the_lost_one_was_to_save(tmp_path):
    """The others wait for it beside the devices, while step 4 may still be written for all."""
    found = run(4, tmp_path / "four", tmp_path / "c", "--kill-after", 6)
    assert found.wait(180) == [0, 0, 0, -9], found.text()
    assert sorted(losses(found, 4)) == [1, 2, 3, 4, 5, 6]
    went_on = losses(found, 3)
    assert sorted(went_on) in ([3, 4, 5, 6, 7, 8], [5, 6, 7, 8])
    before = losses(found, 4)
    assert float(went_on[6]) == pytest.approx(float(before[6]), rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message", "lost"),
    [
        pytest.param(
            ["--kill-at", 1, "--at-least", 4],
            "elastic: 3 of 4 processes are left, and at_least=4.",
            3,
            marks=pytest.mark.slow,
            id="too few",
        ),
        pytest.param(
            ["--refuse-at", 1],
            "INTERNAL: of all of them",
            None,
            marks=pytest.mark.slow,
            id="nobody is lost",
        ),
        pytest.param(
            ["--raise-at", 1],
            "ValueError: this process has seen enough",
            None,
            marks=pytest.mark.slow,
            id="an error of the program",
        ),
        pytest.param(
            ["--not-elastic"],
            r"Start it with zerojax.initialize\(elastic=True\)",
            None,
            id="not elastic",
        ),
    ],
)
def test_when_it_ends(tmp_path, arguments, message, lost):
    found = run(4 if lost else 2, tmp_path / "logs", tmp_path / "c", *arguments)
    codes = found.wait(120)
    if lost:
        assert codes.pop(lost) == -9
    assert set(codes) == {1}, found.text()
    assert all(re.search(message, log.read_text()) for log in found.logs[:lost])
    assert "goes on" not in found.text()


PROGRAM = """
import sys, jax, zerojax
from zerojax._run import elastic as _elastic
jax.config.update("jax_num_cpu_devices", 2)

def train():
    state = zerojax.shard_train_state({"params": {"w": jax.numpy.ones((8, 4))}}, stage=3)
    return jax.jit(lambda state: state)(state)

kept = train()
if sys.argv[1] == "dropped":
    del kept
_elastic._forget_devices()
jax.config.update("jax_num_cpu_devices", 3)
print(len(jax.devices()))
"""


@pytest.mark.parametrize("arrays", ["kept", "dropped"])
def test_arrays_made_outside_are_said_to_keep_their_memory(arrays):
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, arrays],
        capture_output=True, text=True, check=True, cwd=ROOT, env=environment(),
    )  # fmt: skip
    assert found.stdout == "3\n"
    said = "something outside of train() holds arrays or devices" in found.stderr
    assert said == (arrays == "kept"), found.stderr


def environment():
    others = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    return {**others, "PYTHONPATH": str(pathlib.Path(zerojax.__file__).parents[1])}


def test_one_process_returns_what_it_made_and_raises_what_was_raised():
    assert zerojax.elastic(lambda: 8) == 8

    def fails():
        raise ValueError("UNKNOWN: of one")

    with pytest.raises(ValueError, match="UNKNOWN: of one"):
        zerojax.elastic(fails)
    with pytest.raises(ValueError, match=r"at_least=0.*1 or more"):
        zerojax.elastic(fails, at_least=0)
