"""A clock that a test sets: `tests/run/test_meter.py` uses it."""

import sys
import time
import types


def stopped(monkeypatch):
    """Returns a clock whose `seconds` pass, for zerojax alone, only where a test says so.

    Beside it is one on the wall, which may be `set_by` some seconds while it runs.
    """
    now = types.SimpleNamespace(seconds=1000.0, set_by=0.0)

    def replace(name, fake):
        real = getattr(time, name)

        def ask():
            asks = sys._getframe(1).f_globals["__name__"].partition(".")[0]
            return fake() if asks == "zerojax" else real()

        monkeypatch.setattr(time, name, ask)

    replace("time", lambda: 1e9 + now.seconds + now.set_by)
    for name in ("monotonic", "perf_counter"):
        replace(name, lambda: now.seconds)
    return now
