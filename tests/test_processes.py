"""Real processes on this machine: the same numbers, and the same after they are killed."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import AxisType, Mesh

import zerojax
from tests.processes import ROOT, Run, completed
from zerojax import _agreement, _fingerprint
from zerojax._plan.mesh import default_mesh

STEPS = 8


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The digest of one process with four devices."""
    logs = tmp_path_factory.mktemp("undisturbed")
    arguments = ("--directory", logs / "c", "--steps", STEPS, "--devices", 4)
    return completed(1, logs, *arguments, "--export", logs / "weights"), logs / "weights"


def arguments(directory, **more):
    found = {"directory": directory / "c", "steps": STEPS, **more}
    pairs = [(f"--{name.replace('_', '-')}", value) for name, value in found.items()]
    return [str(x) for pair in pairs for x in pair]


@pytest.mark.parametrize(
    "count, devices, stage",
    [(2, 2, 3), pytest.param(4, 1, 3, marks=pytest.mark.slow),
     pytest.param(2, 2, 1, marks=pytest.mark.slow)],
)  # fmt: skip
def test_several_processes_compute_what_one_does(undisturbed, tmp_path, count, devices, stage):
    one, weights = undisturbed
    export = tmp_path / "weights"
    run = completed(
        count, tmp_path, *arguments(tmp_path, devices=devices, stage=stage, export=export)
    )
    assert run.said(r"zerojax: (.*)") == f"{count} processes, 4 devices"
    assert all("step" not in log.read_text() for log in run.logs[1:])  # process 0 alone speaks
    assert all(f"digest {run.digest()}" in log.read_text() for log in run.logs)
    if stage == 3:
        assert run.digest() == one.digest()
    for file in weights.glob("*.safetensors"):
        want, have = (safetensors.numpy.load_file(d / file.name) for d in (weights, export))
        for name, value in want.items():
            np.testing.assert_allclose(have[name], value, rtol=0 if stage == 3 else 2e-6, atol=1e-7)


def goes_on(count, directory):
    """A run of so many processes, from what two with two devices each have saved."""
    data = ["--no-data"] if count != 2 else []  # two data iterators are not one
    return completed(count, directory, *arguments(directory, devices=4 // count), *data)


@pytest.mark.parametrize(
    "victims, then", [([1], 2), pytest.param([0, 1], 1, marks=pytest.mark.slow)]
)
def test_a_killed_run_goes_on_from_a_complete_checkpoint(undisturbed, tmp_path, victims, then):
    """kill -9: the others end within a bounded time, and the next run ends bit-equal."""
    run = Run(2, tmp_path, arguments(tmp_path, step_seconds=0.1, heartbeat=5))
    run.reach(5)  # the write of step 2 is done, before step 4's began
    for victim in victims:
        run.processes[victim].kill()
    assert all(run.wait(60))  # killed, or ended with an error
    again = goes_on(then, tmp_path)
    assert int(again.said(r"^from (\d+)")) in (2, 4, 6, 8)
    assert again.digest() == undisturbed[0].digest()


def test_sigterm_to_one_process_saves_in_all(undisturbed, tmp_path):
    # JAX looks for the signal once a second: steps must be left when it has.
    run = Run(2, tmp_path, arguments(tmp_path, every=100, step_seconds=1))
    run.reach(1)
    run.processes[1].send_signal(signal.SIGTERM)
    assert run.wait(60) == [128 + signal.SIGTERM] * 2, run.text()
    again = goes_on(1, tmp_path)
    assert int(again.said(r"^from (\d+)")) >= 1
    assert again.digest() == undisturbed[0].digest()


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


DISAGREE = {
    "agreed": "nothing", "alone": "nothing", "kept": "nothing", "after all that": "nothing",
    "stage": "placing a state: .*the stage: 2 in process 0, 3 in process 1",
    "seed": "placing a state: .*how it is made: .*random_seed 0 .*random_seed 1",
    "values": "placing a state: .*the values of params/w: float32.64, 16. of checksum",
    "learning rate": "the step: .*the program: optimizer .* mul -0.01 .* mul -0.02",
    "loss": r"the step: .*the program: .* 1\.0 in process 0.* 2\.0 in process 1",
    "eval": r"the step: .*the program: .* 1\.0 in process 0.* 2\.0 in process 1",
    "table": "the step: .*the program: constant float32.64, 16. of checksum",
    "rows": r"shard_batch: .*the rows of one process: float32\[8, 64\] in process 0, .*16, 64",
    "accumulate": "the step: .*accumulate: 1 in process 0, 2 in process 1\nStart all with the same",
    "key": "the step: .*the values of .*: uint32.2. of checksum",
    "version": r"shard_batch: .*the version of JAX: 0\.0\.9 in process 0, 0\.1\.9 in process 1",
    "save": "zerojax.save: .*the directory: .*/0 in process 0, .*/1 in process 1",
    "step": "zerojax.save: .*step: 0 in process 0, 1 in process 1",
    "restore": "zerojax.restore: .*the directory: .*/same in process 0, .*/same1 in process 1\n"
               "  found: True in process 0, False in process 1",
    "like": "zerojax.restore: .*cast: False in process 0, True in process 1",
    "Checkpoints": "Checkpoints: .*every: 1 in process 0, 2 in process 1",
    "Checkpoints.save": "Checkpoints.save: .*step: 2 in process 0, 3 in process 1",
    "resume": "Checkpoints.resume: .*step: 1 in process 0, 2 in process 1",
}  # fmt: skip


def test_processes_that_disagree_are_all_told_in_what(tmp_path):
    run = Run(2, tmp_path, ["--directory", str(tmp_path / "d")], "tests.disagreements")
    assert run.wait(120) == [0, 0], run.text()
    texts = [log.read_text() for log in run.logs]
    first, second = (dict(map(json.loads, re.findall("^case (.*)", t, re.M))) for t in texts)
    assert first == second and first.keys() == DISAGREE.keys()
    for case, pattern in DISAGREE.items():
        assert re.match("ValueError: " * (pattern != "nothing") + pattern, first[case], re.S), (
            case, first[case],
        )  # fmt: skip


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


# -- one process


def test_programs_are_told_apart_and_the_same_program_is_the_same():
    def text(rate, table):
        def f(x):
            inner = jax.jit(lambda x: x * rate)
            return jax.lax.scan(lambda c, x: (inner(c) + x @ table, None), x[0], x)[0]

        return _fingerprint.of_program(jax.make_jaxpr(f)(np.ones((3, 4), np.float32)))

    table = np.eye(4, dtype=np.float32)
    assert text(0.1, table) == text(0.1, table.copy()) and " at 0x" not in text(0.1, table)
    assert text(0.1, table) != text(0.2, table) != text(0.2, table + 1)


def test_values_of_every_kind_have_a_fingerprint():
    key, narrow = jax.random.key(1), jax.numpy.arange(4, dtype="bfloat16")
    values = [key, narrow, narrow[::-1], np.zeros((0, 3)), True, 3, np.float32(0.1), narrow > 1]
    found = _fingerprint.of_values((str(i), value) for i, value in enumerate(values)).values()
    assert len(set(found)) == len(values)
    assert [*found][4:7] == ["True", "3", "0.1"]
    assert _fingerprint.show({"b", "a", "c"}) == "{a, b, c}"


def test_of_long_texts_the_first_difference_is_shown():
    same = "x" * 1000
    told = _agreement._difference("a", f"1\n{same}2\n3", f"1\n{same}4", 0, 7)
    assert "x2 in process 0, " in told and told.endswith("x4 in process 7") and len(told) < 300
    many = {str(n): "a" for n in range(9)}
    assert "\n  and 4 more\n" in _agreement._message("f", 0, 1, many, {})


def test_one_process_compares_nothing():
    _agreement.agree("f", lambda: pytest.fail("it was asked"))


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


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What a mesh asks of a device. Where there are several hosts, JAX gives each a slice."""

    id: int
    process_index: int
    slice_index: int
    platform = "gpu"
    device_kind = "NVIDIA H100"


def test_the_mesh_goes_along_the_links_of_a_host_first(monkeypatch):
    """Devices of two hosts in turn; `jax.make_mesh` refuses more than one slice."""
    gpus = [Gpu(n, process_index=n // 2, slice_index=n // 2 % 2) for n in range(8)]
    monkeypatch.setattr(jax, "devices", lambda: gpus)
    assert [gpu.id for gpu in default_mesh().devices] == [0, 1, 4, 5, 2, 3, 6, 7]


def test_rows_that_do_not_divide_or_do_not_follow_one_another_are_refused():
    with pytest.raises(ValueError, match=r"30 rows does not divide over 8.*a multiple of 8"):
        zerojax.process_slice(30)
    two = Mesh(
        np.array(jax.devices()).reshape(2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2
    )
    assert zerojax.process_slice(6, two) == slice(0, 6)
