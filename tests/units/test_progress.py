"""What takes long is said: in a line that is wiped on a terminal, in few lines in a log."""

import os
import sys
import time

import pytest

from tests.verify.steps import verified
from zerojax import _progress

WIPE = "\r\x1b[K"


@pytest.fixture
def said(capfd, monkeypatch):
    """What a terminal or a log gets while some work goes on in a block."""
    monkeypatch.setattr(_progress, "ON_A_TERMINAL", 0.01)
    monkeypatch.setattr(_progress, "IN_A_LOG", 0.02)

    def run(work, is_terminal=False):
        monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
        monkeypatch.setattr(sys, "__stderr__", sys.stderr)  # as if nothing had replaced it
        work()
        return capfd.readouterr().err

    return run


def going_through(items, seconds):
    def compiling(item):
        kept = os.dup(2)
        os.close(2)  # what the compiler says meanwhile goes elsewhere
        time.sleep(seconds)
        os.dup2(kept, 2)
        os.close(kept)
        return item.upper()

    results = _progress.progress(items, lambda item: f"doing {item}", compiling)
    assert results == list(items.upper())


def test_on_a_terminal_a_line_counts_and_is_wiped(said):
    """A line for each item that takes long, however few there are."""
    two = ["doing a (1/2) ... 0 s", "doing b (2/2, about 0 s left) ... 0 s"]
    for items, lines in (("a", ["doing a ... 0 s"]), ("ab", two)):
        text = said(lambda items=items: going_through(items, 0.05), is_terminal=True)
        shown = list(dict.fromkeys(line for line in text.split(WIPE) if line))
        assert shown == lines and text.endswith(WIPE)


def test_a_log_gets_fewer_lines_the_longer_it_takes(said):
    lines = said(lambda: going_through("a", 0.25)).splitlines()  # after 0.02, 0.04, 0.08, 0.16 s
    assert lines == ["zerojax: doing a ... 0 s"] * len(lines) and 2 <= len(lines) <= 4


def test_what_is_quick_needs_no_line(said, monkeypatch):
    for name in ("ON_A_TERMINAL", "IN_A_LOG"):
        monkeypatch.setattr(_progress, name, 60)
    quick = lambda: going_through("a", 0.1)
    assert said(quick) == said(quick, is_terminal=True) == ""


def test_a_verification_says_what_it_does(said, monkeypatch):
    """What compiles takes long enough for a line."""
    compiling = [
        "running the step on 2 devices",
        "computing the step's gradients on 2 devices",
        "replaying 2 parts of the batch on one device",
        "replaying the whole batch on one device",
    ]
    text = said(lambda: verified().check(), is_terminal=True)
    shown = dict.fromkeys(line.partition(" ... ")[0] for line in text.split(WIPE) if line)
    assert all(line.startswith("verify: ") for line in shown) and text.endswith(WIPE)
    shown = [line.removeprefix("verify: ") for line in shown]
    assert [line for line in shown if line in compiling] == compiling
    monkeypatch.setattr(_progress, "IN_A_LOG", 60)
    assert said(lambda: verified().check()) == ""


def test_an_error_ends_the_line(said):
    """Its traceback keeps frames alive: a program could not exit, a shell counted on."""
    failed = []

    def failing():
        try:
            _progress.progress("a", lambda item: f"doing {item}", lambda item: 1 / 0)
        except ZeroDivisionError as error:
            failed.append(error)
        time.sleep(0.1)

    assert said(failing, is_terminal=True) == "" and failed


def test_a_notebook_that_replaced_stderr_gets_none(capfd, monkeypatch):
    for replaced in (None, sys.stdout):
        monkeypatch.setattr(sys, "stderr", replaced)
        going_through("a", 0.05)
    assert capfd.readouterr().err == ""
