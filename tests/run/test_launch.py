"""`zerojax launch`: what the processes are told, and how they end together."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.support.processes import ROOT, environment
from zerojax.tools import _launch

pytestmark = pytest.mark.ci  # several processes, some with limits of time

TOLD = """
import json, os, sys
names = "MASTER_ADDR MASTER_PORT WORLD_SIZE RANK LOCAL_RANK LOCAL_WORLD_SIZE JAX_PLATFORMS"
names += " JAX_NUM_CPU_DEVICES JAX_LOCAL_DEVICE_IDS JAX_CUDA_VISIBLE_DEVICES"
print(*(os.environ.get(name, "-") for name in names.split()), *sys.argv[1:])
print("half a line", end="", file=sys.stderr)
"""
ENDS = """
import os, sys, time
rank = int(os.environ["RANK"])
how = sys.argv[1] if rank == 1 else "waits"
print("started", flush=True)
if how == "raises":
    time.sleep(0.5)
    raise ValueError("it has seen enough")
if how == "is killed":
    os.kill(os.getpid(), 9)
time.sleep(60)
"""
SAVES = """
import os, signal, sys, time

def end(*_):
    time.sleep(int(os.environ["RANK"]))
    print("saved", flush=True)
    sys.exit(143)

signal.signal(signal.SIGTERM, end)
print("started", flush=True)
time.sleep(60)
"""
WORKER = """
import os, subprocess, sys, time
worker = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print("worker", worker.pid, flush=True)
if os.environ["RANK"] == "1":
    time.sleep(0.5)
    sys.exit(sys.argv[1])
time.sleep(60)
"""
LIVES = """
import os, signal, subprocess, time
signal.signal(signal.SIGTERM, lambda *_: None)
print(os.getpid(), subprocess.Popen(["sleep", "100"]).pid, flush=True)
time.sleep(100)
"""
SLURM = {
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08,11]",
    "SLURM_JOB_ID": "4097",
}
NODES = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "h0", "MASTER_PORT": "1234"}


@pytest.fixture
def launched(tmp_path):
    """Starts `zerojax launch` on a program, in a directory of its own."""

    def launched(code, *flags, arguments=(), **env):
        (tmp_path / "program.py").write_text(code)
        command = [sys.executable, "-m", "zerojax", "launch", *flags, *arguments]
        common = {name: value for name, value in environment().items() if name != "JAX_PLATFORMS"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        env = {**common, "CUDA_VISIBLE_DEVICES": "4,5,6,7", **env}
        return subprocess.Popen(command, cwd=tmp_path, env=env, **pipes)

    return launched


def ended(process, code):
    out, err = process.communicate(timeout=30)
    assert process.returncode == code, out + err
    return out, err


def test_processes_of_a_host_get_devices_numbers_and_a_log_each(launched, tmp_path):
    flags = ("-n", "2", "--devices", "2", "--logs", "logs", "program.py", "--lr", "a  b")
    out, err = ended(launched(TOLD, *flags), 0)
    port = re.search(r"zerojax: 2 processes of 2 GPUs each meet at 127.0.0.1:(\d+)\n", err)[1]
    line = f"127.0.0.1 {port} 2 {{0}} {{0}} 2 - - {{1}} {{1}} --lr a  b\n"
    said = [line.format(0, "0,1"), line.format(1, "2,3")]
    assert sorted(out.splitlines(True)) == [f"[{n}] {text}" for n, text in enumerate(said)]
    assert "[0] half a line\n" in err and "[1] half a line\n" in err
    logs = [(tmp_path / "logs" / f"{n}.log").read_text() for n in range(2)]
    assert [sorted(log.splitlines(True)) for log in logs] == [[s, "half a line\n"] for s in said]


def test_a_module_on_cpus_of_the_second_host(launched):
    """Host 1 of two, where the flags say less than srun or another launcher."""
    flags = ("-n", "1", "--cpu", "--devices", "4", "--port", "9", "-m", "program", "-n", "3")
    out, _ = ended(launched(TOLD, *flags, **NODES), 0)
    assert out == "[1] h0 9 2 1 0 1 cpu 4 - - -n 3\n"
    out, err = ended(launched(TOLD, *flags[:5], "program.py", **SLURM), 0)
    assert err.startswith("zerojax: 1 process of 4 emulated CPU devices meets at gpu07:61441\n")
    assert out == "[2] gpu07 61441 3 2 0 1 cpu 4 - -\n", "the port is that of the job"


@pytest.mark.parametrize(
    ("listed", "first"),
    [
        ("alone", "alone"),
        ("a1,b[2-3]", "a1"),
        ("gpu[07-08,11],cpu1", "gpu07"),
        ("rack[1-2]node[01-04,9],rack3", "rack1node01"),
        ("n[3,5]-ib", "n3-ib"),
    ],
)
def test_the_first_host_of_a_list_of_slurm(listed, first):
    assert _launch.hosts({}, SLURM | {"SLURM_STEP_NODELIST": listed}).address == first


@pytest.mark.parametrize(
    ("how", "code", "says"),
    [
        ("raises", 1, r"status 1\. It wrote:\nTraceback [^[]*\nValueError: it has seen enough\n"),
        ("is killed", 137, r"SIGKILL \(the kernel .* memory runs out\)\. It wrote no error\.\n"),
    ],
)
def test_a_process_that_fails_ends_the_others_and_speaks_last(launched, how, code, says):
    started = time.monotonic()
    _, err = ended(launched(ENDS, "-n", "4", "--grace", "50", "program.py", how), code)
    assert re.search(rf"\n\nzerojax: process 1 failed first, with {says}\Z", err), err
    assert time.monotonic() - started < 20, "the others sleep for 60 s"


def test_those_that_do_not_end_by_themselves_are_killed(launched):
    code = ENDS.replace("import os", "import signal, os")
    code = code.replace("print(", "signal.signal(15, lambda *_: print('no'))\nprint(", 1)
    out, _ = ended(launched(code, "-n", "2", "--grace", "0.5", "program.py", "raises"), 1)
    assert "[0] no\n" in out


def test_what_a_failed_run_has_started_ends_with_it(launched):
    """Workers that load data outlive a process that the kernel kills."""
    out, _ = ended(launched(WORKER, "-n", "2", "program.py", "it fails"), 1)
    workers = re.findall(r"worker (\d+)", out)
    assert len(workers) == 2 and not any(map(is_alive, workers))


def test_what_launch_has_started_ends_where_it_is_killed(launched):
    """What went on would keep the GPUs, and the lock of the checkpoints."""
    process = launched(LIVES, "-n", "2", "--grace", "1", "program.py")
    started = [pid for _ in range(2) for pid in process.stdout.readline().split()[1:]]
    process.kill()
    process.communicate()
    until = time.monotonic() + 15
    while any(map(is_alive, started)) and time.monotonic() < until:
        time.sleep(0.1)
    assert len(started) == 4 and not any(map(is_alive, started))


def is_alive(pid):
    """Whether a process runs; one that nobody waits for stays as a zombie in some containers."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_lines_pass_as_the_bytes_that_they_are(launched, tmp_path):
    code = "import sys\nsys.stdout.buffer.write('50% \u2588\u2588\\n'.encode())"
    flags = ("-n", "1", "--logs", "logs", "program.py")
    out, _ = ended(launched(code, *flags, PYTHONIOENCODING="ascii"), 0)
    assert out == "[0] 50% \u2588\u2588\n"
    assert (tmp_path / "logs" / "0.log").read_bytes() == out.removeprefix("[0] ").encode()


def test_a_start_keeps_what_an_earlier_one_has_logged(launched, tmp_path):
    """In a folder of its own, a first start writes what its processes do, and nothing else."""
    for how in ("raises", "waits"):
        code = ENDS.replace("60", "0").replace("rank == 1", "rank == 0")
        flags = ("-n", "1", "--logs", "logs", "program.py", how)
        ended(launched(code, *flags), int(how == "raises"))
    log = (tmp_path / "logs" / "0.log").read_text()
    again = r"--- zerojax launch: started again, \d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4}"
    assert re.fullmatch(rf"started\nTraceback (.|\n)*seen enough\n{again}\nstarted\n", log), log


def test_a_line_without_an_end_goes_on_in_parts(launched):
    """Of 16 MB; the end of the one before comes at once, and nothing is lost."""
    code = "import sys\nsys.stdout.write('a\\r' + 'x' * 2**24 + '\\nb')"
    started = time.monotonic()
    out, _ = ended(launched(code, "-n", "1", "program.py"), 0)
    first, *parts, last = [line.removeprefix("[0] ") for line in out.splitlines()]
    assert (first, last, "".join(parts)) == ("a", "b", "x" * 2**24)
    assert len(parts) > 100 and time.monotonic() - started < 10


def test_a_signal_reaches_the_process_that_is_being_started(monkeypatch):
    class Interrupted(subprocess.Popen):
        def __init__(self, args, **options):
            super().__init__(args, **options)
            if args is command:
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    command = [sys.executable, "-c", "import time; time.sleep(20)"]
    env = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
    assert _launch.launch(command, [env, env], None, 5.0) == 143


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_signals_are_passed_on(launched, name):
    process = launched(ENDS, "-n", "2", "program.py", "waits")
    for _ in range(2):
        assert process.stdout.readline().endswith("started\n")
    process.send_signal(number := getattr(signal, name))
    _, err = ended(process, 128 + number)
    assert ("KeyboardInterrupt" in err) == (name == "SIGINT") and "failed first" not in err


def test_processes_that_save_on_sigterm_have_the_time_for_it(launched):
    """`Checkpoints` ends with 143, in one process after another."""
    process = launched(SAVES, "-n", "2", "--grace", "0.1", "program.py")
    for _ in range(2):
        assert process.stdout.readline().endswith("started\n")
    process.send_signal(signal.SIGTERM)
    assert ended(process, 143)[0] == "[0] saved\n[1] saved\n"


REFUSED = {
    "no GPU": (["p.py"], {"CUDA_VISIBLE_DEVICES": ""}, "no GPU is visible here: pass -n 2.*--cpu"),
    "how many": (["--cpu", "p.py"], {}, r"CPUs have any number of devices: pass -n 2, say\."),
    "too many": (["-n", "3", "--devices", "2", "p.py"], {}, "3 .* 2 GPUs each: 4 are .* -n 2, or"),
    "too many for one": (["-n", "1", "--devices", "8", "p.py"], {}, "8 GPUs: 4 .*--devices 4,"),
    "no file": (["missing.py"], {}, r"missing\.py is no file here\. Pass -m before it"),
    "which host": (["--nodes", "2", "p.py"], {}, "--nodes 2: pass --node too, the number of this"),
    "where": (["--nodes", "2", "--node", "0", "p.py"], {}, "pass --address too, host 0"),
    "host 2": (["--node", "2", "p.py"], NODES, r"--node 2: 2 hosts are numbered 0 to 1\."),
    "host 1": (["--node", "1", "p.py"], {}, r"--node 1: the only host is 0\."),
    "srun": (["p.py"], SLURM | {"SLURM_STEP_NUM_TASKS": "24"}, "24 launchers on 3 .*per-node=1"),
}


@pytest.mark.parametrize(("flags", "env", "says"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_start_is_refused(run, module, monkeypatch, flags, env, says):
    module("p", "")
    for name, value in {"CUDA_VISIBLE_DEVICES": "4,5,6,7", **env}.items():
        monkeypatch.setenv(name, value)
    code, _, err = run("launch", *flags)
    assert code == 2 and re.search(says, err), err


COMPILED = """
import sys, jax.numpy as jnp, numpy as np, optax, zerojax
from flax.training.train_state import TrainState

zerojax.initialize()
make = lambda: TrainState.create(
    apply_fn=None, params={"w": jnp.ones((64, 64)) / 64}, tx=optax.sgd(0.1))
state, batch = zerojax.shard_train_state(make, stage=3), np.ones((16, 64), "f")
step = zerojax.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2))
if sys.argv[1] == "save":
    step.compile(state, batch).save("step.bin")
else:
    step = step.load("step.bin", state, batch)
for _ in range(2):
    state, metrics = step(state, batch)
print(f"loss {float(metrics['loss']):.6f}")
"""


def test_all_processes_load_what_the_first_one_has_written(launched, tmp_path):
    found = []
    for how in ("save", "load"):
        flags = ("-n", "2", "--cpu", "program.py", how)
        out, _ = ended(launched(COMPILED, *flags, PYTHONPATH=str(ROOT)), 0)
        found.append(re.findall(r"loss \S+", out))
    assert found[0] == found[1] and len(found[0]) == 2 and len({*found[0]}) == 1


LEAVES = """
import os, sys, time
import jax, zerojax
from zerojax._run import processes

jax.config.update("jax_num_cpu_devices", 3)
processes.LONELY = 2.0
zerojax.initialize()
if os.environ["RANK"] == "1" and sys.argv[1] == "caught":
    try:
        sys.exit(7)
    except SystemExit:
        raise ValueError("no data is left")
if os.environ["RANK"] == "1":
    sys.exit({"a status": 3, "a text": "no data is left", "well": 0}[sys.argv[1]])
time.sleep(6 if sys.argv[1] == "well" else 60)
print("slept", flush=True)
"""


ENDED = {"a status": "ended with status 3", "a text": "ended with status 1", "caught": "raised V"}


@pytest.mark.parametrize(("how", "code"), [("a status", 3), ("a text", 1), ("caught", 1)])
def test_sys_exit_ends_all_as_an_exception_does(launched, how, code):
    """JAX would have the process wait five minutes for the others."""
    started = time.monotonic()
    flags = ("-n", "2", "--cpu", "--grace", "20", "program.py", how)
    _, err = ended(launched(LEAVES, *flags, PYTHONPATH=str(ROOT)), code)
    assert time.monotonic() - started < 25, "the other one sleeps for 60 s"
    assert f"[0] zerojax: process 1 {ENDED[how]}" in err
    said = err.partition("process 1 failed first")[2]
    assert f"with status {code}. It wrote" in said and ("no data is left" in said) == (code == 1)


def test_a_process_that_goes_on_after_another_has_ended_says_so(launched):
    flags = ("-n", "2", "--cpu", "program.py", "well")
    out, err = ended(launched(LEAVES, *flags, PYTHONPATH=str(ROOT)), 0)
    said = "[0] zerojax: the program of process 1 has ended"
    assert "[0] slept\n" in out and err.count(said) == 1
    assert "this process has 3 emulated devices, and its launcher asks for 1" in err


RAISES_LATE = """
import os, sys, time, zerojax

zerojax.initialize()
if os.environ["RANK"] == sys.argv[1]:
    time.sleep(4)
    raise ValueError("no data is left")
print("done", flush=True)
"""


@pytest.mark.parametrize("late", ["0", "1"])
def test_a_process_that_raises_after_another_has_ended_is_named_by_it(launched, late):
    """The other one waits for it, and would end after the heartbeat without a reason."""
    started = time.monotonic()
    flags = ("-n", "2", "--cpu", "--grace", "20", "program.py", late)
    out, err = ended(launched(RAISES_LATE, *flags, PYTHONPATH=str(ROOT)), 1)
    waits = 1 - int(late)
    assert out.count(f"[{waits}] done") == 1 and time.monotonic() - started < 25
    assert f"[{waits}] zerojax: process {late} raised ValueError: no data is left\n" in err
    assert "this one goes on" not in err
