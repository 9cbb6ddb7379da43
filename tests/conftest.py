"""Every test runs on 8 emulated CPU devices, and fails rather than skips without them."""

import atexit
import collections
import gc
import importlib.metadata
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Iterable
from typing import Any

NUM_DEVICES = 8
os.environ["JAX_PLATFORMS"] = os.environ.get("ZEROJAX_TEST_PLATFORM", "cpu")
flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={NUM_DEVICES}"
OLDEST = importlib.metadata.version("jaxlib").startswith("0.10.")
if OLDEST:
    # Halves the CPU time of tests/test_pairs.py. Newer versions abort: they do not know the flag.
    flags += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = flags
# LLVM's optimizations would take a third of the suite's time to make programs fast that run once.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ["ZEROJAX_CACHE"] = ""  # the command line keeps nothing
# What one test has compiled, others load: those of all workers, of this run alone.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="zerojax-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# Tracing makes many objects, and at each collection JAX's own are gone through too: a twelfth of
# the suite's time.
gc.set_threshold(200_000, 10, 10)

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh

import zerojax
from tests import costs

# Where their asserts fail, pytest shows the values, as it does of those in files of tests.
for name in (
    "checkpoint.damage",
    "checkpoint.states",
    "support.compared",
    "support.printed",
    "support.reference",
):
    pytest.register_assert_rewrite(f"tests.{name}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a test that is skipped fails")
    for name, default, says in (
        ("seed", 0, "what tests/fuzz.py draws from"),
        ("first", 0, "the number of the first row that it draws"),
        ("count", 200, "how many it draws"),
    ):
        parser.addoption(f"--{name}", type=int, default=default, help=says)
    parser.addoption("--costs", action="store_true", help="what each file costs")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(costs.Costs(config.getoption("costs")))


def pytest_sessionstart(session: pytest.Session) -> None:
    if os.environ["JAX_PLATFORMS"] == "cpu":
        assert jax.device_count() == NUM_DEVICES, (
            f"tests need {NUM_DEVICES} devices and got {jax.device_count()}: something imported "
            "JAX before tests/conftest.py could ask for them"
        )


@pytest.fixture(scope="session")
def gpu_code() -> None:
    """For fixtures that compile for GPUs: the tests that use them are marked `gpu_code`."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips what compiles for GPUs or TPUs where the packages for that are missing."""
    for item in items:
        if "gpu_code" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.gpu_code)
    gpu_code = [item for item in items if item.get_closest_marker("gpu_code")]
    try:
        zerojax.aot._check_packages()
    except ModuleNotFoundError as error:
        for item in gpu_code:
            item.add_marker(pytest.mark.skip(reason=str(error)))
    if importlib.util.find_spec("libtpu") is None:
        missing = pytest.mark.skip(reason="compiling for TPUs needs libtpu: make tpu-code")
        for item in (item for item in items if item.get_closest_marker("tpu_code")):
            item.add_marker(missing)
    if config.args == config.getini("testpaths"):  # of files that are named, all cases run
        mark_other_end(items)


# Nearly all time goes into compiling. Here each test leaves half of its cases to the other end of
# the JAX versions, and each file half of its tests that have one case: CI runs both ends.
ALTERNATING = (
    "audit checkpoint engine forecast loss plan state step update verify wire test_aot test_cli "
    "test_examples test_families test_keras test_models_hf test_nnx test_pairs test_readme "
    "test_replay test_steps test_stream test_wrong_types"
)


def mark_other_end(items: list[pytest.Item]) -> None:
    cases = collections.defaultdict(list)
    for item in items:
        part = item.nodeid.split("/")[1].partition(".")[0]
        others = any(map(item.get_closest_marker, ("slow", "ci", "gpu_code", "skipif")))
        if part in ALTERNATING.split() and not others:
            test, bracket, _ = item.nodeid.partition("[")
            cases[test if bracket else item.path].append(item)
    for alike in cases.values():
        for number, item in enumerate(alike):
            # 0 1 1 0 1 0 0 1: in a product of parameters, no level stays with one end.
            if number.bit_count() % 2 == OLDEST and len(alike) > 1:
                item.add_marker(pytest.mark.other_end)


def shared_with_ci(cases: Iterable[Any]) -> list[Any]:
    """Leaves two cases of five to CI. No level of a product stays there: 5 divides no number of
    levels."""
    each = ((n, case if isinstance(case, tuple) else (case,)) for n, case in enumerate(cases))
    return [pytest.param(*case, marks=[pytest.mark.ci] * (n % 5 in (1, 3))) for n, case in each]


def without_skips(report, config: pytest.Config):
    if report.skipped and config.getoption("no_skips"):
        report.outcome, report.longrepr = "failed", f"skipped under --no-skips: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    return without_skips((yield), item.config)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    return without_skips((yield), collector.config)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    """What is compiled for GPUs and TPUs is looked at, so it is compiled as users would, be it by
    the test or by a fixture. And not from the cache: JAX warns that it cannot load it."""
    if not any(map(item.get_closest_marker, ("gpu_code", "tpu_code"))):
        return (yield)
    ours = ("jax_disable_most_optimizations", "jax_compilation_cache_dir")
    given = {name: jax.config.values[name] for name in ours}
    for name, value in zip(ours, (False, None), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    try:
        return (yield)
    finally:
        for name, value in given.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def is_here(warned: warnings.WarningMessage, file: str) -> bool:
    """Whether a warning points at a line of this file. On Python 3.11 it points into zerojax."""
    return warned.filename == file or sys.version_info < (3, 12)


def make_mesh(count: int = NUM_DEVICES) -> Mesh:
    return Mesh(
        np.array(jax.devices()[:count]),
        ("data",),
        axis_types=((AxisType.Explicit if os.environ.get("EXPL") else AxisType.Auto),),
    )


@pytest.fixture
def mesh() -> Mesh:
    return make_mesh()


@pytest.fixture
def compiled():
    """The names of what XLA compiles from here on. (JAX's own cache has an entry more at times.)"""
    names = []

    def listen(event, _, fun_name="", **about):
        if event.endswith("backend_compile_duration"):
            names.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


# -- the command line


@pytest.fixture
def as_it_was(monkeypatch):
    """Commands run in this process: their signal handling and paths end with the test."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("ZEROJAX_TRACEBACK", raising=False)


@pytest.fixture
def run(capsys, monkeypatch, as_it_was):
    """Runs a command of the command line in this process."""
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))  # commands may add to it

    def run(*arguments):
        """(exit code, standard output, standard error)."""
        from zerojax.tools._cli import main

        try:
            code = main(arguments)
        except SystemExit as stop:  # from argparse
            code = stop.code
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture
def module(tmp_path, monkeypatch, as_it_was):
    """Writes a module beside which commands run; gives its name."""

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        monkeypatch.chdir(tmp_path)
        return name

    yield write
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)
