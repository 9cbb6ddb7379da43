"""Starts processes on this machine: tests of programs and of several processes use it."""

import os
import pathlib
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def environment() -> dict[str, str]:
    """This process's own, but for its devices: whoever is started compiles as it does."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    flags = [flag for flag in flags if "device_count" not in flag]
    common = {key: value for key, value in os.environ.items() if key != "JAX_COMPILATION_CACHE_DIR"}
    common |= {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
    return common | {"PYTHONPATH": str(ROOT)}


def python(code: str, *arguments: object, **env: str) -> tuple[int, str, str]:
    """Runs code in a process of its own; returns its exit code, and what it prints."""
    command, env = [sys.executable, "-c", code, *map(str, arguments)], {**environment(), **env}
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    return ran.returncode, ran.stdout, ran.stderr


def output(
    program: object,
    *arguments: object,
    code: int = 0,
    cwd: pathlib.Path = ROOT,
    timeout: float = 600,
    **env: str,
) -> tuple[str, str]:
    """(standard output, standard error) of a program, started as from a user's shell."""
    interpreter = [sys.executable] if str(program).endswith(".py") else []
    done = subprocess.run(
        [*interpreter, str(program), *map(str, arguments)],
        env={**environment(), **env},
        cwd=cwd,
        timeout=timeout,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, done.stderr


def stub(directory: pathlib.Path, name: str, script: str) -> dict[str, str]:
    """Variables with which a command of that name, first on the PATH, runs a script of bash."""
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
    (directory / name).chmod(0o755)
    return {"PATH": f"{directory}:{os.environ['PATH']}", "PYTHON": sys.executable}


def ssh(directory: pathlib.Path) -> dict[str, str]:
    """Variables with which `ssh` runs on this machine what it is to run on a host."""
    return stub(directory, "ssh", 'exec bash -c "${@: -1}"') | {"PORT": str(free_port())}


class Run:
    """Processes of `tests.support.worker`, or of `module`; their output is in files of `logs`."""

    def __init__(
        self,
        count: int,
        logs: pathlib.Path,
        arguments: Sequence[str],
        module: str = "tests.support.worker",
    ) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self.logs = [logs / f"{number}.log" for number in range(count)]
        common = {**environment(), "MASTER_ADDR": "127.0.0.1"}
        port = str(free_port())
        self.processes = []
        for number, log in enumerate(self.logs):
            env = {**common, "MASTER_PORT": port, "WORLD_SIZE": str(count), "RANK": str(number)}
            command = [sys.executable, "-m", module, *arguments]
            log.unlink(missing_ok=True)
            with log.open("a") as out:  # appended, so that XLA's lines overwrite none of ours
                self.processes.append(
                    subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out)
                )

    def reach(self, steps: int, timeout: float = 120) -> None:
        """Waits until so many steps are done."""
        started = time.monotonic()
        while self.steps_done() < steps:
            if self.processes[0].poll() is not None or time.monotonic() - started > timeout:
                self.kill()
                raise AssertionError(f"{self.steps_done()} steps, not {steps}:\n{self.text()}")
            time.sleep(0.02)

    def wait(self, timeout: float) -> list[int]:
        """Exit codes; kills what has not ended in time and says so."""
        try:
            return [process.wait(timeout) for process in self.processes]
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"not ended within {timeout} s:\n{self.text()}") from None

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def text(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()[-4000:]}" for log in self.logs)

    def steps_done(self) -> int:
        return len(re.findall(r"^step ", self.logs[0].read_text(), flags=re.MULTILINE))

    def said(self, pattern: str) -> str | None:
        found = re.search(pattern, self.logs[0].read_text(), flags=re.MULTILINE)
        return found and found.group(1)

    def digest(self) -> str | None:
        return self.said(r"^digest (\w+)")


def completed(count: int, logs: pathlib.Path, *arguments: object, timeout: float = 240) -> Run:
    run = Run(count, logs, [str(argument) for argument in arguments])
    codes = run.wait(timeout)
    assert codes == [0] * count, run.text()
    return run


def check_written_together(step: pathlib.Path, count: int) -> None:
    """Each of the processes wrote as much of a checkpoint as the others."""
    folders = [step / "default" / f"ocdbt.process_{number}" for number in range(count)]
    files = [[f.stat().st_size for f in folder.rglob("*") if f.is_file()] for folder in folders]
    assert max(map(sum, files)) < 1.1 * min(map(sum, files)), files
