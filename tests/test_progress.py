"""What takes long is said: in a line that is wiped on a terminal, in few lines in a log."""

import sys
import time

import pytest

from zerojax import _progress
from zerojax._audit.audit import heard


@pytest.fixture
def stderr(capfd, monkeypatch):
    monkeypatch.setattr(_progress, "ON_A_TERMINAL", 0.01)
    monkeypatch.setattr(_progress, "IN_A_LOG", 0.02)
    monkeypatch.setattr(sys, "__stderr__", None)  # and back at the end
    return capfd


def work(items, seconds=0.05):
    sys.__stderr__ = sys.stderr  # as if nothing had replaced it
    for _ in _progress.progress(items, lambda item: f"doing {item}"):
        with heard():  # what the compiler says meanwhile goes elsewhere
            time.sleep(seconds)


def test_on_a_terminal_a_line_counts_and_is_wiped(stderr, monkeypatch):
    """A line for each item that takes long, however few there are."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    for items, lines in (("a", ["doing a ... 0 s"]), ("ab", ["doing a (1/2) ... 0 s",
                         "doing b (2/2, about 0 s left) ... 0 s"])):  # fmt: skip
        work(items)
        said = stderr.readouterr().err
        shown = list(dict.fromkeys(line for line in said.split(_progress.WIPE) if line))
        assert shown == lines and said.endswith(_progress.WIPE)


def test_a_log_gets_fewer_lines_the_longer_it_takes(stderr):
    work("a", 0.25)  # after 0.02, 0.04, 0.08 and 0.16 s
    lines = stderr.readouterr().err.splitlines()
    assert lines == ["zerojax: doing a ... 0 s"] * len(lines) and 2 <= len(lines) <= 4


def test_what_is_quick_needs_no_line(stderr, monkeypatch):
    for name in ("ON_A_TERMINAL", "IN_A_LOG"):
        monkeypatch.setattr(_progress, name, 60)
    for terminal in (True, False):
        monkeypatch.setattr("sys.stderr.isatty", lambda terminal=terminal: terminal)
        work("quick", 0)
    assert stderr.readouterr().err == ""


def test_what_takes_long_gets_one_hint(stderr, monkeypatch):
    for seconds, hints in ((0.1, 1), (0, 0)):
        sys.__stderr__ = sys.stderr
        with _progress.hinting("name fewer stages"), heard():
            time.sleep(seconds)
        assert stderr.readouterr().err == "zerojax: name fewer stages\n" * hints
        monkeypatch.setattr(_progress, "IN_A_LOG", 60)


@pytest.mark.parametrize("replaced", [None, sys.stdout])
def test_a_notebook_that_replaced_stderr_gets_none(stderr, monkeypatch, replaced):
    monkeypatch.setattr(sys, "stderr", replaced)
    with _progress.working("doing a"):
        time.sleep(0.05)
    assert stderr.readouterr().err == ""
