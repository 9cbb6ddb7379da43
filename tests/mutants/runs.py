"""Runs of pytest in a copy of the checkout, and what became of a mutant in them."""

import contextlib
import dataclasses
import importlib.util
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from collections.abc import Iterator, Sequence

from tests.mutants.table import HERE, ROOT, Mutant

QUICK = "not slow and not gpu_code and not tpu_code"
SILENCE = 300  # seconds in which no test ends: devices that wait for each other wait forever
KILLED = ("assertion", "error", "crash", "timeout")  # fates
# What Python says of code that cannot run at all. Such a mutant shows nothing about the tests.
BROKEN = ("ImportError", "ModuleNotFoundError", "NameError", "SyntaxError", "IndentationError")
ASSERTED = ("AssertionError", "assert ", "Failed: ")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a mutant: its fate is one of `KILLED` where `test` failed, "" where all tests
    passed, and "broken" where the package cannot even run."""

    fate: str = ""
    test: str = ""
    message: str = ""
    seconds: int = 0


@contextlib.contextmanager
def copied_checkout() -> Iterator[pathlib.Path]:
    """Copies what git knows of or would add, without the tests of mutants, which would fail."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory(prefix="zerojax-mutants-") as folder:
        for file in (ROOT / name for name in names.split("\0") if name):
            if file.is_file() and file != HERE / "test_table.py":
                target = pathlib.Path(folder, file.relative_to(ROOT))
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, target)
        yield pathlib.Path(folder)


@contextlib.contextmanager
def applied(mutant: Mutant, checkout: pathlib.Path) -> Iterator[None]:
    """Puts a mutant into a checkout, inside a `with`."""
    file = checkout / mutant.file
    text = file.read_text()
    _write(file, mutant.applied(text))
    try:
        yield
    finally:
        _write(file, text)


def _write(file: pathlib.Path, text: str) -> None:
    file.write_text(text)
    # Python tells files apart by their second and their size, which may be the same.
    pathlib.Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)


def run(checkout: pathlib.Path, tests: Sequence[str], workers: str) -> Outcome:
    """Runs tests until one fails. Tests that are no longer there pass."""
    start = time.monotonic()
    there = [test for test in tests if (checkout / test.partition("::")[0]).exists()]
    ended = outcome(*_run(checkout, there, workers, "-x")) if there else Outcome()
    return dataclasses.replace(ended, seconds=round(time.monotonic() - start))


def failing(checkout: pathlib.Path, tests: Sequence[str], workers: str) -> set[str]:
    """Returns those of some tests that fail; all, where the run does not come to its end."""
    code, report, _ = _run(checkout, tests, workers)
    return {one.test for one in _failures(report)} if code in (0, 1) else set(tests)


def _run(
    checkout: pathlib.Path, tests: Sequence[str], workers: str, *options: str
) -> tuple[int | None, pathlib.Path, str]:
    """Runs tests; returns pytest's code, None if it had to be ended, its report and its log."""
    report, log = checkout / "report.xml", checkout / "pytest.log"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", *tests, *options, "-vv", "-n", workers, "-m", QUICK]
    command += [f"--junitxml={report}", "-o", "junit_family=xunit1", "--tb=short"]
    environ = {**os.environ, "PYTHONPATH": str(checkout), "JAX_PLATFORMS": "cpu"}
    with log.open("w") as output:
        settings = {"cwd": checkout, "env": environ, "start_new_session": True}
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, **settings)
        in_time = _ended(process, log)
    return process.returncode if in_time else None, report, log.read_text()


def outcome(code: int | None, report: pathlib.Path, log: str) -> Outcome:
    """Returns the outcome of a run that was to end where a test fails."""
    if code in (0, 5) or (code == 4 and "ERROR: not found" in log):
        return Outcome()
    ran = re.findall(r"^(tests/\S+::.+?)(?: (?:PASSED|FAILED|SKIPPED|ERROR)\b.*)?$", log, re.M)
    if (code is None or code < 0) and ran:
        why = f"no test ended in {SILENCE} s" if code is None else f"signal {-code}"
        return Outcome("timeout" if code is None else "crash", ran[-1].strip(), why)
    failures = _failures(report) if report.exists() else []
    return failures[0] if failures else Outcome("broken", message=_line(log[-300:]))


def _ended(process: subprocess.Popen, log: pathlib.Path) -> bool:
    """Waits for a run to end; ends it, and returns False, where it is silent for too long."""
    size, since = 0, time.monotonic()
    try:
        while process.poll() is None:
            time.sleep(0.2)
            if (now := log.stat().st_size) != size:
                size, since = now, time.monotonic()
            if time.monotonic() - since > SILENCE:
                return False
        return True
    finally:
        with contextlib.suppress(ProcessLookupError):  # its workers and the tests' own processes
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _failures(report: pathlib.Path) -> list[Outcome]:
    """Returns the tests that failed, by pytest's report."""
    cases = xml.etree.ElementTree.parse(report).iter("testcase")
    pairs = [(case, case.find(kind)) for case in cases for kind in ("failure", "error")]
    return [_told(case, failure) for case, failure in pairs if failure is not None]


def _told(case: xml.etree.ElementTree.Element, failure: xml.etree.ElementTree.Element) -> Outcome:
    test, message = f"{case.get('file')}::{case.get('name')}", failure.get("message", "")
    if message.startswith(("collection failure", *BROKEN)):
        return Outcome("broken", test, _line(message + (failure.text or "")[-200:]))
    return Outcome("assertion" if message.startswith(ASSERTED) else "error", test, _line(message))


def _line(message: str) -> str:
    """Returns the beginning of a message, in a line without what differs from run to run."""
    text = re.sub(r"0x[0-9a-f]+|/tmp/\S+", "...", " ".join(message.split()))
    return text[:150]
