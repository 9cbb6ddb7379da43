"""How processes start: by what is around them, alone, and two that train, save and restore."""

import sys

import jax
import numpy as np
import pytest
import safetensors.numpy

import zerojax
from tests.conftest import make_mesh
from tests.support import worker
from tests.support.processes import check_written_together, completed, output, python
from tests.support.reference import assert_close
from zerojax._run import processes


def test_two_processes_train_save_export_restore_and_disagree(tmp_path):
    """Processes of four devices, which pad 260 to 264; one of five devices reads what they saved.

    The worker restores it, too. All have the numbers of a run in one process.
    """
    options = ["--steps", 2, "--dim", 65, "--devices", 4, "--disagree"]
    two, one, weights = (tmp_path / name for name in ("two", "one", "weights"))
    found = completed(2, tmp_path, "--directory", two, *options, "--export", weights)
    assert found.said(r"zerojax: (.*)") == "2 processes, 8 devices"
    logs = [log.read_text() for log in found.logs]
    assert ["step 1" in log for log in logs] == [True, False], "process 0 alone speaks"
    assert all(f"digest {found.digest()}" in log for log in logs)
    assert all("zerojax.save: the processes disagree" in log for log in logs)
    assert all("differ in\n  step: 0 in process 0, 1 in process 1\n" in log for log in logs)
    check_written_together(two / "2", 2)

    args = ["--directory", one, *options]
    alone = worker.train(worker.parser.parse_args(list(map(str, args))))
    plan = zerojax.plan(lambda: worker.make_state(65), stage=1, mesh=make_mesh(5))
    restored = zerojax.gather_params({"state": zerojax.restore(two / "2", plan)})["state"]
    assert_close(restored, zerojax.gather_params({"state": alone})["state"], 1e-6)
    with pytest.raises(ValueError, match=r"iterators of 2 processes, and this run has 1.*data=F"):
        zerojax.checkpoint.read_extras(two / "2")
    assert zerojax.checkpoint.read_extras(two / "2", data=False).step == 2

    (file,) = weights.glob("*.safetensors")
    tensors, layers = safetensors.numpy.load_file(file), restored.params["layers"]
    assert len(tensors) == 5
    for n in range(2):
        np.testing.assert_array_equal(tensors[f"layers.{n}.up"], layers["w1"][n].T)
        np.testing.assert_array_equal(tensors[f"layers.{n}.down"], layers["w2"][n])


ALONE = """
import os, zerojax
print(zerojax.initialize())
os.environ["WORLD_SIZE"] = "4"
print([zerojax.run.process_slice(32) for _ in range(2)])
"""


def test_initialize_alone_says_so_and_a_process_that_has_not_joined_others_is_warned_once():
    _, said, error = python(ALONE)
    assert said.splitlines() == ["zerojax: 1 process, 1 devices", "1", f"{[slice(0, 32)] * 2}"]
    assert error.count("UserWarning: WORLD_SIZE=4 says that this is one of 4 processes, but") == 1


@pytest.mark.parametrize(
    "name, says",
    [
        ("WORLD_SIZE", r"WORLD_SIZE=4 says .* 4 processes.*zerojax.initialize\(\)"),
        ("SLURM_STEP_NUM_TASKS", r"SLURM_STEP_NUM_TASKS=4 says .* one of 4 processes"),
        ("OMPI_COMM_WORLD_SIZE", r"OMPI_COMM_WORLD_SIZE=4 says .* one of 4 processes"),
        ("SLURM_NTASKS", "Give each writer its own path"),  # of a batch script, outside srun
    ],
)
def test_a_writer_in_whose_way_others_are_is_told_if_it_is_one(tmp_path, monkeypatch, name, says):
    monkeypatch.setenv(name, "4")
    with zerojax.Checkpoints(tmp_path / "c"), pytest.raises(ValueError, match=says):
        zerojax.Checkpoints(tmp_path / "c")


def test_torchrun_keeps_its_port_to_itself(monkeypatch):
    """Its own store listens there; processes started by hand take the port that they are given."""
    joined = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **options: joined.append(options))
    torchrun = {"MASTER_ADDR": "a", "MASTER_PORT": "29500", "WORLD_SIZE": "16", "RANK": "9"}
    torchrun |= {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    zerojax.initialize()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    zerojax.initialize()
    assert [options.pop("coordinator_address") for options in joined] == ["a:29500", "a:29501"]
    rest = {"num_processes": 16, "process_id": 9, "local_device_ids": [1]}
    assert joined[0] == joined[1] == rest | {"heartbeat_timeout_seconds": 100}
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "2,3")  # of `zerojax launch`, which JAX reads
    zerojax.initialize()
    assert "local_device_ids" in joined[-1] and joined[-1]["local_device_ids"] is None


def test_the_variables_of_jax_join_too(monkeypatch):
    joined = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **options: joined.append(options))
    monkeypatch.setenv("JAX_NUM_PROCESSES", "16")
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "a:1")
    with pytest.raises(ValueError, match=r"JAX_NUM_PROCESSES=16 is set, but JAX_PROCESS_ID is no"):
        zerojax.initialize()
    monkeypatch.setenv("JAX_PROCESS_ID", "9")
    zerojax.initialize()
    numbers = {"num_processes": 16, "process_id": 9, "heartbeat_timeout_seconds": 100}
    assert joined == [numbers], "JAX reads the address"


OWN_FOLDERS = """
import os, sys, warnings
os.environ["JAX_COMPILATION_CACHE_DIR"] = sys.argv[1] + os.environ["RANK"] * int(sys.argv[2])
import jax, zerojax
with warnings.catch_warnings(record=True) as said:
    zerojax.initialize()
print("said", *(str(each.message) for each in said))
print("keeps", jax.config.jax_compilation_cache_dir)
"""


@pytest.mark.ci
@pytest.mark.parametrize("is_shared", [True, False])
def test_processes_keep_programs_where_all_see_them(tmp_path, is_shared):
    """In a folder of its own, process 1 would compile, and on GPUs wait for process 0."""
    (tmp_path / "program.py").write_text(OWN_FOLDERS)
    flags = "-m", "zerojax", "launch", "--cpu", "-n", 2, tmp_path / "program.py"
    out, _ = output(sys.executable, *flags, tmp_path / "kept", int(not is_shared))
    folder = f"{tmp_path}/kept"
    lines = sorted(line for line in out.splitlines() if line[4:8] in ("said", "keep"))
    kept, own = [[line for line in lines if word in line] for word in ("keeps", "said")]
    wanted = folder if is_shared else None
    assert kept == [f"[{n}] keeps {wanted}" for n in range(2)]
    text = f"[0] said compiled programs are not kept: process 0 writes them to {folder}0, which"
    assert own[0].startswith("[0] said" if is_shared else text) and own[1].strip() == "[1] said"
    assert (own[0].strip() == "[0] said") == is_shared
    assert not [*tmp_path.glob("kept*/*.run")]


def test_options_of_mtls_reach_jax_or_are_refused(monkeypatch):
    """A JAX without them would send in the open."""
    joined = []

    def knows(*, coordinator_address=None, heartbeat_timeout_seconds=0, mtls_cert_file=None):
        joined.append(mtls_cert_file)

    monkeypatch.setattr(jax.distributed, "initialize", knows)
    zerojax.initialize("a:1", mtls_cert_file="cert.pem")
    assert joined == ["cert.pem"]
    with pytest.raises(ValueError, match=r"has no mtls_key_file\. Leave out mtls_key_file=, or"):
        zerojax.initialize("a:1", mtls_key_file="key.pem")
    monkeypatch.setenv("JAX_MTLS_CA_FILE", "ca.pem")
    with pytest.raises(ValueError, match="Leave out the variable JAX_MTLS_CA_FILE, or install a J"):
        zerojax.initialize("a:1")


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK"])
def test_half_an_environment_is_an_error(monkeypatch, missing):
    names = {"WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK"}
    for name in names - {missing}:
        monkeypatch.setenv(name, "2")
    with pytest.raises(ValueError, match=rf"WORLD_SIZE=2 is set, but {missing} is not. Set MASTER"):
        zerojax.initialize()


WATCHED = """
import threading, zerojax, time
with zerojax.run.Watchdog(1) as dog:
    threads = threading.enumerate()
    for n in range(15):
        dog.alive(n)
        time.sleep(0.1)
    assert threading.enumerate() == threads, "no call starts another"
time.sleep(1.5)
print("quiet while fed, and after its end")
with zerojax.run.Watchdog(1) as dog:
    dog.alive(7)
    time.sleep(30)
print("not ended")
"""


@pytest.mark.ci
def test_a_watchdog_that_is_fed_is_quiet_and_one_that_is_not_ends_the_process():
    code, said, error = python(WATCHED, PYTHONUNBUFFERED="")
    assert said == "quiet while fed, and after its end\n" and code, error
    assert "process 0 of 1 was not alive for 1 s after step 7. This process hangs, or" in error


GIVEN_UP = """
import gc, sys, tempfile, weakref
import flax.nnx, jax, numpy as np, optax
from jax.extend import backend
import zerojax
import zerojax.nnx
from tests.support import worker
from zerojax._run import elastic

def flax_run(*flags):
    directory = tempfile.mkdtemp()
    state = worker.train(worker.parser.parse_args(["--directory", directory, *flags]))
    worker.digest(zerojax.restore(f"{directory}/2", like=state))

def nnx_run():
    model = flax.nnx.Linear(64, 8, rngs=flax.nnx.Rngs(0))
    optimizer = flax.nnx.Optimizer(model, optax.adam(1e-3), wrt=flax.nnx.Param)
    zerojax.nnx.shard(model, optimizer, stage=3)
    step = zerojax.nnx.train_step(lambda model, x: (model(x) ** 2).mean())
    step(model, optimizer, np.ones((16, 64), np.float32))

def clients():
    return [weakref.ref(client) for client in backend.backends().values()]

def live(clients):
    gc.collect()
    return any(client() for client in clients)

flags = ("--steps", "2", "--devices", "4", "--offload")
for run in (lambda: flax_run(*flags), nnx_run):
    run()
    of_run = clients()
    assert live(of_run)
    elastic.forget_devices(of_run)
    assert not live(of_run)
print("all are given up")
"""


@pytest.mark.ci
def test_nothing_of_the_library_holds_devices_that_are_given_up():
    code, said, error = python(GIVEN_UP, JAX_NUM_CPU_DEVICES="2")
    assert code == 0 and said.endswith("\nall are given up\n"), error


def test_an_error_has_all_that_led_to_it():
    """What it names as its cause, and what was handled then: each holds arrays of its frames."""
    error, cause, context = ValueError("error"), KeyError("cause"), OSError("context")
    error.__cause__, error.__context__, context.__cause__ = cause, context, cause
    cause.__context__ = context  # a circle
    assert {*processes.chain(error)} == {error, cause, context}


def test_elastic_in_one_process_returns_and_raises_as_its_function_does():
    assert zerojax.run.elastic(lambda: 8) == 8

    def fails():
        raise ValueError("UNKNOWN: of one")

    with pytest.raises(ValueError, match="UNKNOWN: of one"):
        zerojax.run.elastic(fails)
    with pytest.raises(ValueError, match=r"at_least=0.*1 or more"):
        zerojax.run.elastic(fails, at_least=0)
