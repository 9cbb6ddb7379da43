"""Starts the processes of a run on this host, and ends them together: zerojax launch.

Each process gets the variables of torchrun, which `zerojax.initialize` reads, and GPUs of its own,
as JAX names them: the numbers count those that CUDA_VISIBLE_DEVICES leaves. Other libraries in a
process see all GPUs, and can copy from one to another.
"""

import collections
import contextlib
import dataclasses
import glob
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, BinaryIO

PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
AFTER_SIGTERM = (0, 128 + signal.SIGTERM, -signal.SIGTERM)  # `Checkpoints` saves, and ends with 143
TORCHRUN = {"nodes": "NNODES", "node": "NODE_RANK", "address": "MASTER_ADDR", "port": "MASTER_PORT"}
PORT = 29500  # torchrun's, on which all hosts agree
LINES_KEPT, SHOWN = 500, 20  # lines of standard error; of these without a traceback
END_OF_LINE = re.compile(rb"\r\n|\n|\r")  # progress bars end theirs with \r
TRACEBACK = "Traceback (most recent call last):"
LINE_BYTES = 2**16  # of a line are kept until its end comes; the rest goes on in parts
# Reads groups of processes, and ends them where `launch` is killed, which closes its input.
GUARD = """trap '' HUP INT TERM; groups=
while read -r group; do groups="$groups -$group"; done
kill -s TERM -- $groups; sleep "$0"; kill -s KILL -- $groups"""


@dataclasses.dataclass(frozen=True)
class Hosts:
    """How many hosts a run has, which of them this is, and where process 0 listens."""

    count: int
    me: int
    address: str
    port: int


def number_of(count: int, name: str) -> str:
    """Returns "1 process" or "2 processes"."""
    return f"{count} {name}{'' if count == 1 else 'es' if name.endswith('s') else 's'}"


def hosts(named: Mapping[str, Any], env: Mapping[str, str]) -> Hosts:
    """Returns the hosts that flags name, or srun, or else the variables of other launchers."""
    told: dict[str, Any] = {flag: env[name] for flag, name in TORCHRUN.items() if name in env}
    told = _of_srun(env) if "SLURM_STEP_NUM_NODES" in env else told
    asked = {name: value for name, value in named.items() if value is not None}
    count = int((told | asked).get("nodes", 1))
    alone = {"node": 0, "address": "127.0.0.1"}  # whatever a shell still has of another run
    told = (told if count > 1 else alone) | asked
    for name, remedy in (("node", "the number of this host, from 0"), ("address", "host 0")):
        if told.get(name) is None:
            raise ValueError(f"--nodes {count}: pass --{name} too, {remedy}.")
    if not 0 <= int(told["node"]) < count:
        numbers = f"{count} hosts are numbered 0 to {count - 1}" * (count > 1)
        raise ValueError(f"--node {told['node']}: {numbers or 'the only host is 0'}.")
    port = int(told.get("port") or (PORT if count > 1 else _free_port()))
    return Hosts(count, int(told["node"]), told["address"], port)


def _of_srun(env: Mapping[str, str]) -> dict[str, Any]:
    count, tasks = int(env["SLURM_STEP_NUM_NODES"]), int(env.get("SLURM_STEP_NUM_TASKS", 1))
    if tasks > count:
        raise ValueError(
            f"srun started {tasks} launchers on {number_of(count, 'host')}. Pass srun "
            "--ntasks-per-node=1: zerojax launch starts the processes of a host."
        )
    if count == 1:
        return {}
    # rack[1-2]node[07-09,12]-ib begins with rack1node07-ib. JAX chooses ports by the job, too.
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", env["SLURM_STEP_NODELIST"])
    assert first is not None, "Slurm names the hosts"
    port = 61440 + int(env["SLURM_JOB_ID"]) % 4096
    name = re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])
    return {"nodes": count, "node": env["SLURM_NODEID"], "address": name, "port": port}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def gpus_here(env: Mapping[str, str]) -> int | None:
    """Returns how many GPUs of this host are visible; None if nothing says so."""
    if (visible := env.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len(list(filter(str.strip, visible.split(","))))
    return len(glob.glob("/proc/driver/nvidia/gpus/*")) or None


def processes_here(asked: int | None, devices: int, gpus: int | None, cpu: bool) -> int:
    """Returns how many processes to start, by default as many as the GPUs are enough for."""
    if asked is None and (cpu or not gpus):
        where = "CPUs have any number of devices" if cpu else "no GPU is visible here"
        raise ValueError(
            f"{where}: pass -n 2, say{'' if cpu else ', and --cpu to rehearse without GPUs'}."
        )
    count = asked or (gpus or 0) // devices
    if not cpu and gpus is not None and not 0 < count * devices <= gpus:
        each, are = " each" * (count > 1), "is" if gpus == 1 else "are"
        fitting = f"-n {gpus // devices}" if devices <= gpus else f"--devices {max(gpus, 1)}"
        raise ValueError(
            f"{number_of(count, 'process')} with {number_of(devices, 'GPU')}{each}: {gpus} {are} "
            f"visible here. Pass {fitting}, or --cpu to rehearse without GPUs."
        )
    return count


def environments(
    env: Mapping[str, str], run: Hosts, count: int, devices: int, cpu: bool
) -> list[dict[str, str]]:
    """Returns the variables of each process on this host."""
    common: dict[str, object] = {"MASTER_ADDR": run.address, "MASTER_PORT": run.port}
    common |= {"WORLD_SIZE": run.count * count, "LOCAL_WORLD_SIZE": count, "PYTHONUNBUFFERED": 1}
    common |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": devices} if cpu else {}
    gpus = "JAX_LOCAL_DEVICE_IDS", "JAX_CUDA_VISIBLE_DEVICES", "JAX_ROCM_VISIBLE_DEVICES"
    variables = []
    for local in range(count):
        own = {"RANK": run.me * count + local, "LOCAL_RANK": local}
        mine = ",".join(map(str, range(local * devices, (local + 1) * devices)))
        own |= {} if cpu else dict.fromkeys(gpus, mine)
        variables.append({**env, **{name: str(value) for name, value in (common | own).items()}})
    return variables


class _Stream:
    """One of a process's streams: each line goes on with a prefix, and to its log as it is."""

    def __init__(self, pipe: IO[bytes], out: BinaryIO, prefix: bytes, log: BinaryIO | None) -> None:
        self.pipe, self.out, self.prefix, self.log = pipe, out, prefix, log
        self.kept: collections.deque[bytes] = collections.deque(maxlen=LINES_KEPT)
        self.rest = b""

    def read(self) -> bool:
        """Passes on what is there; returns whether more may come."""
        data = os.read(self.pipe.fileno(), 2**16)
        *lines, self.rest = END_OF_LINE.split(self.rest + data)
        if self.rest and (not data or len(self.rest) > LINE_BYTES):
            lines, self.rest = [*lines, self.rest], b""
        self.kept.extend(lines)
        # As bytes: this process may have another encoding.
        for out, prefix in ((self.out, self.prefix), (self.log, b"")):
            if out is not None:
                out.write(b"".join(b"%s%s\n" % (prefix, line) for line in lines))
                out.flush()
        return bool(data)


def _started(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Starts a process in a session of its own: ^C in the terminal reaches it once, from here."""
    return subprocess.Popen(command, start_new_session=True, **options)


class _Process:
    """A process of the run and its two streams."""

    def __init__(self, command: Sequence[str], env: dict[str, str], log: BinaryIO | None) -> None:
        self.rank = int(env["RANK"])
        pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        self.popen = _started(command, env=env, stdin=subprocess.DEVNULL, **pipes)
        prefix = f"[{self.rank:>{len(str(int(env['WORLD_SIZE']) - 1))}}] ".encode()
        assert self.popen.stdout is not None and self.popen.stderr is not None, "they are pipes"
        self.output = _Stream(self.popen.stdout, sys.stdout.buffer, prefix, log)
        self.errors = _Stream(self.popen.stderr, sys.stderr.buffer, prefix, log)

    @property
    def status(self) -> int | None:
        return self.popen.poll()

    def send(self, number: int) -> None:
        if self.status is None:
            self.popen.send_signal(number)

    def kill(self) -> None:
        """Kills it with the processes that it has started, such as workers that load data. These
        may outlive it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)

    def ending(self) -> str:
        """Returns how it ended, and its traceback or the last lines of its standard error."""
        status = self.popen.wait()
        lines = [line.decode(errors="replace") for line in self.errors.kept]
        how = f"status {status}" if status > 0 else signal.Signals(-status).name
        why = " (the kernel sends it when memory runs out)" if how == "SIGKILL" else ""
        begins = [n for n, line in enumerate(lines) if line.startswith(TRACEBACK)]
        said = "\n".join(lines[begins[-1] :] if begins else lines[-SHOWN:]).strip("\n")
        wrote = f"It wrote:\n{said}" if said else "It wrote no error."
        return f"process {self.rank} failed first, with {how}{why}. {wrote}"


class Team:
    """The processes of a run on this host, which end together."""

    def __init__(self, grace: float) -> None:
        self.processes: list[_Process] = []
        self.grace = grace
        self.told: list[int] = []  # the signals that have come
        self.passed_on = 0  # how many of them
        self.failed: _Process | None = None
        self.kills_at = float("inf")

    def _pass_on(self) -> None:
        """Passes signals on. A second ^C kills."""
        for at in range(self.passed_on, len(self.told)):
            number = self.told[at]
            kills = number == signal.SIGINT and number in self.told[:at]
            for process in self.processes:
                process.kill() if kills else process.send(number)
            self.passed_on = at + 1

    def watch(self) -> None:
        """Returns when all have ended. If one fails, the others have `grace` seconds to end."""
        with selectors.DefaultSelector() as selector:
            for process in self.processes:
                for stream in (process.output, process.errors):
                    selector.register(stream.pipe, selectors.EVENT_READ, stream)
            while True:
                over = all(process.status is not None for process in self.processes)
                ready = selector.select(0.1) if selector.get_map() else []
                for key, _ in ready:
                    if not key.data.read():
                        selector.unregister(key.fileobj)
                        key.data.pipe.close()
                # What it has started may go on, and keep its pipes open.
                if over and not ready:
                    return
                if not selector.get_map():
                    time.sleep(0.05)
                self._pass_on()
                self._end_together()

    def _end_together(self) -> None:
        if self.failed is None:
            fine = AFTER_SIGTERM if signal.SIGTERM in self.told else (0,)
            failed = (one for one in self.processes if one.status not in (None, *fine))
            self.failed = next(failed, None)
            if self.failed is not None:
                self.kills_at = time.monotonic() + self.grace
                for process in self.processes:
                    process.send(signal.SIGTERM)
        if time.monotonic() > self.kills_at:
            for process in self.processes:
                process.kill()

    def code(self) -> int:
        """Returns the exit code of all, and says which process failed first."""
        if signal.SIGINT in self.told:
            return 128 + signal.SIGINT
        if self.failed is None:
            statuses = [process.popen.wait() for process in self.processes]
            is_told = any(statuses) or not statuses  # or before the first one started
            return 128 + signal.SIGTERM if is_told else 0
        print(f"\nzerojax: {self.failed.ending()}", file=sys.stderr, flush=True)
        status = self.failed.popen.wait()
        return status if status > 0 else 128 - status


@contextlib.contextmanager
def _handling(team: Team) -> Iterator[None]:
    numbers = [getattr(signal, name) for name in PASSED_ON]
    # A signal may come while a process starts, which could not be told yet.
    before = {n: signal.signal(n, lambda number, _: team.told.append(number)) for n in numbers}
    before[signal.SIGPIPE] = signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # it must end the others
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        # What a run has started that ended well may go on.
        if any(process.status != 0 for process in team.processes):
            for process in team.processes:
                process.kill()


def launch(
    command: Sequence[str], environments: Sequence[dict[str, str]], logs: str | None, grace: float
) -> int:
    """Runs the processes of this host; returns the exit code of all."""
    with contextlib.ExitStack() as files:
        opened: list[BinaryIO | None] = [None] * len(environments)
        if logs is not None:
            os.makedirs(logs, exist_ok=True)
            paths = [os.path.join(logs, f"{env['RANK']}.log") for env in environments]
            opened = [files.enter_context(open(path, "ab")) for path in paths]
        for log in filter(None, opened):
            if log.tell():  # above stands why an earlier start has failed
                log.write(time.strftime("--- zerojax launch: started again, %F %T %z\n").encode())
        team = Team(grace)
        with _handling(team), _guarded(grace) as groups:
            for env, log in zip(environments, opened, strict=True):
                if not team.told:
                    team.processes.append(_Process(command, env, log))
                    groups.write(b"%d\n" % team.processes[-1].popen.pid)
            team.watch()
            return team.code()


@contextlib.contextmanager
def _guarded(grace: float) -> Iterator[IO[bytes]]:
    """Starts what ends the groups of processes written to its input, if this process is killed."""
    quiet = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
    guard = _started(["sh", "-c", GUARD, str(grace)], stdin=subprocess.PIPE, bufsize=0, **quiet)
    assert guard.stdin is not None, "it is a pipe"
    try:
        yield guard.stdin
    finally:
        guard.kill()
        guard.communicate()
