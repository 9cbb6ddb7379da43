"""Real processes on this machine: the same numbers, and the same after they are killed."""

import functools
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import safetensors.numpy

import zerojax
from tests.processes import ROOT, Run, completed
from zerojax._run import processes as _processes

STEPS = 8
OFFLOAD = ["--offload"]  # the worker asserts where its state was born, restored, and left


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Runs one process with four devices, once for each way; returns it and its weights."""

    @functools.cache
    def run(*where):
        logs = tmp_path_factory.mktemp("undisturbed")
        weights = logs / "weights"
        arguments = ("--directory", logs / "c", "--steps", STEPS, "--devices", 4)
        return completed(1, logs, *arguments, "--export", weights, *where), weights

    return run


def arguments(directory, **more):
    found = {"directory": directory / "c", "steps": STEPS, **more}
    pairs = [(f"--{name.replace('_', '-')}", value) for name, value in found.items()]
    return [str(x) for pair in pairs for x in pair]


def folder_bytes(folder):
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize(
    "count, devices, stage, where",
    [(2, 2, 3, []), pytest.param(2, 2, 3, OFFLOAD, marks=pytest.mark.slow),
     pytest.param(4, 1, 3, [], marks=pytest.mark.slow),
     pytest.param(2, 2, 1, [], marks=pytest.mark.slow)],
)  # fmt: skip
def test_several_processes_compute_what_one_does(
    undisturbed, tmp_path, count, devices, stage, where
):
    """Also with the state in the memory of each process's host, updated in backward."""
    one, _ = undisturbed(*where)
    _, weights = undisturbed()
    export = tmp_path / "weights"
    run = completed(
        count, tmp_path, *arguments(tmp_path, devices=devices, stage=stage, export=export), *where
    )
    assert run.said(r"zerojax: (.*)") == f"{count} processes, 4 devices"
    assert all("step" not in log.read_text() for log in run.logs[1:])  # process 0 alone speaks
    assert all(f"digest {run.digest()}" in log.read_text() for log in run.logs)
    saved = tmp_path / "c" / str(STEPS) / "default"  # stage 1: copies of the parameters too
    written = [folder_bytes(saved / f"ocdbt.process_{n}") for n in range(count)]
    assert max(written) < 1.1 * min(written), "each process writes as much as the others"
    if stage == 3:
        assert run.digest() == one.digest()
    for file in weights.glob("*.safetensors"):
        want, have = (safetensors.numpy.load_file(d / file.name) for d in (weights, export))
        for name, value in want.items():
            # Adam enlarges how the gradients of another program are rounded.
            rtol, atol = (2e-6, 1e-6) if where else (0 if stage == 3 else 2e-6, 1e-7)
            np.testing.assert_allclose(have[name], value, rtol=rtol, atol=atol)


def goes_on(count, directory, where=()):
    """A run of so many processes, from what two with two devices each have saved."""
    data = ["--no-data"] if count != 2 else []  # two data iterators are not one
    return completed(count, directory, *arguments(directory, devices=4 // count), *data, *where)


@pytest.mark.parametrize(
    "victims, then, where",
    [([1], 2, OFFLOAD), pytest.param([1], 2, [], marks=pytest.mark.slow),
     pytest.param([0, 1], 1, [], marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_killed_run_goes_on_from_a_complete_checkpoint(
    undisturbed, tmp_path, victims, then, where
):
    """kill -9: the others end within a bounded time, and the next run ends bit-equal."""
    run = Run(2, tmp_path, [*arguments(tmp_path, step_seconds=0.1, heartbeat=5), *where])
    run.reach(5)  # the write of step 2 is done, before step 4's began
    for victim in victims:
        run.processes[victim].kill()
    assert all(run.wait(60))  # killed, or ended with an error
    again = goes_on(then, tmp_path, where)
    assert int(again.said(r"^from (\d+)")) in (2, 4, 6, 8)
    assert again.digest() == undisturbed(*where)[0].digest()


def test_sigterm_to_one_process_saves_in_all(undisturbed, tmp_path):
    # JAX looks for the signal once a second: steps must be left when it has.
    run = Run(2, tmp_path, arguments(tmp_path, every=100, step_seconds=1))
    run.reach(1)
    run.processes[1].send_signal(signal.SIGTERM)
    assert run.wait(60) == [128 + signal.SIGTERM] * 2, run.text()
    again = goes_on(1, tmp_path)
    assert int(again.said(r"^from (\d+)")) >= 1
    assert again.digest() == undisturbed()[0].digest()


def test_a_process_that_hangs_ends_all_within_a_bounded_time(tmp_path):
    run = Run(2, tmp_path, arguments(tmp_path, hang_at=2, watchdog=4))
    run.reach(2)
    started = time.monotonic()
    assert all(run.wait(30)) and time.monotonic() - started < 25
    assert any(
        "was not alive for 4 s after step 2. It, or one" in log.read_text() for log in run.logs
    )
    assert any(
        "time.sleep" in log.read_text() or "worker.py" in log.read_text() for log in run.logs
    )


@pytest.mark.parametrize("at", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_a_process_that_raises_ends_at_once_and_the_others_soon(tmp_path, at):
    run = Run(2, tmp_path, arguments(tmp_path, raise_at=at, heartbeat=100))
    run.reach(at)
    started = time.monotonic()
    assert all(run.wait(60)), run.text()
    assert at == 0 or time.monotonic() - started < 20
    other, raised = (log.read_text() for log in run.logs)
    assert "Traceback" in raised and "ValueError: this process has seen enough" in raised
    assert "process 1 raised ValueError: this process has seen enough" in other


def test_a_watchdog_that_is_fed_is_quiet_and_one_that_is_not_ends_the_process():
    code = """
import zerojax, time
with zerojax.Watchdog(1) as dog:
    for n in range(15):
        dog.alive(n)
        time.sleep(0.1)
time.sleep(1.5)
print("quiet while fed, and after its end")
with zerojax.Watchdog(1) as dog:
    dog.alive(7)
    time.sleep(30)
print("not ended")
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    env.pop("PYTHONUNBUFFERED", None)
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert ran.stdout == "quiet while fed, and after its end\n" and ran.returncode, ran.stderr
    assert "process 0 of 1 was not alive for 1 s after step 7" in ran.stderr
    with pytest.raises(ValueError, match=r"give a positive number of seconds"):
        zerojax.Watchdog(0)


def test_alone_initialize_leaves_one_process_and_says_so():
    code = "import zerojax; print(zerojax.initialize())"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert ran.stdout.split("\n")[:2] == ["zerojax: 1 process, 8 devices", "1"], ran.stderr


def test_torchrun_keeps_its_port_to_itself(monkeypatch):
    """Its own store listens there; processes started by hand take the port that they are given."""
    joined = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **given: joined.append(given))
    for name, value in {"MASTER_ADDR": "a", "MASTER_PORT": "29500", "WORLD_SIZE": "16", "RANK": "9",
                        "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    zerojax.initialize()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    zerojax.initialize()
    assert [given.pop("coordinator_address") for given in joined] == ["a:29500", "a:29501"]
    assert joined[0] == joined[1] == {
        "num_processes": 16, "process_id": 9, "local_device_ids": [1],
        "heartbeat_timeout_seconds": 100,
    }  # fmt: skip


def test_half_an_environment_is_an_error(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"WORLD_SIZE=2 is set and MASTER_ADDR is not. Set"):
        zerojax.initialize()


@pytest.mark.parametrize("name", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_a_process_that_has_not_joined_the_others_is_warned_once(name, monkeypatch):
    monkeypatch.setenv(name, "1")
    _processes.warn_if_not_joined.cache_clear()
    zerojax.process_slice(32)  # no warning, which would be an error
    monkeypatch.setenv(name, "4")
    _processes.warn_if_not_joined.cache_clear()
    with pytest.warns(UserWarning, match=rf"{name}=4 says .* 4 processes.*zerojax.initialize\(\)"):
        zerojax.process_slice(32)
    zerojax.process_slice(32)


def test_a_job_of_several_tasks_may_run_one_program(monkeypatch):
    """As in the batch script of a Slurm job, outside of srun."""
    monkeypatch.setenv("SLURM_NTASKS", "4")
    _processes.warn_if_not_joined.cache_clear()
    zerojax.process_slice(32)
