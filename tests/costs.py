"""What tests cost: the programs that XLA compiles for them, and CPU seconds.

A run ends with the totals; `--costs` adds those of each file. A program that an earlier test of the
run has compiled may be loaded from JAX's cache. What several files share costs the first of them.
"""

import collections
import os

import jax
import pytest


def cpu_seconds() -> float:
    """Of this process and of the children that it waited for."""
    return sum(os.times()[:4])


class Costs:
    """A plugin of pytest. Workers of xdist report to the process that started them."""

    def __init__(self, each_file: bool):
        self.each_file, self.file = each_file, "imports"
        self.by_file = collections.defaultdict(collections.Counter)
        self.seconds, self.is_loaded, self.has_workers = 0.0, False, False
        jax.monitoring.register_event_listener(self.heard)
        jax.monitoring.register_event_duration_secs_listener(self.timed)

    def heard(self, event, **_):
        self.is_loaded |= event.endswith("compilation_cache/cache_hits")

    def timed(self, event, *_, **__):
        """JAX calls it compiling, too, when it loads a program."""
        if event.endswith("backend_compile_duration"):
            self.by_file[self.file]["loaded" if self.is_loaded else "compiled"] += 1
            self.is_loaded = False

    def turn_to(self, file):
        now = cpu_seconds()
        self.by_file[self.file]["seconds"] += now - self.seconds
        self.file, self.seconds = file, now

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        self.turn_to(item.nodeid.partition("::")[0])
        return (yield)

    def pytest_sessionfinish(self, session):
        if self.has_workers:  # its children, which have told theirs
            self.seconds += sum(os.times()[2:4])
        self.turn_to("")
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["costs"] = {k: dict(v) for k, v in self.by_file.items()}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        self.has_workers = True
        for file, counts in getattr(node, "workeroutput", {}).get("costs", {}).items():
            self.by_file[file].update(counts)

    def pytest_terminal_summary(self, terminalreporter):
        total = sum(self.by_file.values(), collections.Counter())
        files = sorted(self.by_file.items()) if self.each_file else []
        for file, counts in [*files, ("in all", total)]:
            terminalreporter.write_line(
                f"{file}: {counts['compiled']} programs compiled, {counts['loaded']} loaded, "
                f"{counts['seconds']:.1f} s of CPU"
            )
