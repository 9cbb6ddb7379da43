"""What takes long is said: in a line that is wiped on a terminal, in few lines in a log."""

import os
import re
import sys
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
from tests.conftest import make_mesh
from tests.verify.steps import verified
from zerojax import _progress
from zerojax._step import jitted

WIPE = "\r\x1b[K"
Run = types.SimpleNamespace


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
    *lines, last = said(lambda: going_through("a", 0.25)).splitlines()  # after 0.02, 0.06, 0.18 s
    assert lines == ["zerojax: doing a ... 0 s"] * len(lines) and 2 <= len(lines) <= 3
    assert re.fullmatch(r"zerojax: doing a \.\.\. done in \d s", last)


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

    text = said(failing, is_terminal=True)  # a loaded machine may begin a line
    assert failed and (text.endswith(WIPE) or not text)


def test_a_line_that_cannot_be_written_ends_no_work(monkeypatch):
    """Nor do later lines stay out: its turn is over."""
    monkeypatch.setattr(_progress, "IN_A_LOG", 0.02)
    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    kept, results = os.dup(2), []
    reading, writing = os.pipe()
    os.close(reading)
    try:
        os.dup2(writing, 2)
        with _progress.working("something"):
            time.sleep(0.1)
            results.append("done")
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(writing)
    assert results == ["done"] and not _progress._TURN.locked()


def test_a_notebook_that_replaced_stderr_gets_none(capfd, monkeypatch):
    for replaced in (None, sys.stdout):
        monkeypatch.setattr(sys, "stderr", replaced)
        going_through("a", 0.05)
    assert capfd.readouterr().err == ""


def stepped(monkeypatch, loss_fn, seconds=0.1):
    """A step whose first call compiles for so long; its second call does not."""
    mesh, at_rest = make_mesh(2), jitted.at_rest
    state = TrainState.create(apply_fn=None, params={"w": jnp.ones((8, 4))}, tx=optax.sgd(1e-2))
    state = zerojax.shard_train_state(state, stage=3, mesh=mesh)
    wait = lambda *args: time.sleep(seconds) or at_rest(*args)
    monkeypatch.setattr(jitted, "at_rest", wait)
    step, batch = zerojax.train_step(loss_fn), np.ones((4, 8), np.float32)
    with monkeypatch.context() as quiet, pytest.raises(TypeError, match="dot_general"):
        quiet.setattr(_progress, "IN_A_LOG", 60)
        step(state, batch[:, 1:])  # what fails leaves the line to the next call
    state, _ = step(state, batch)
    before = threading.active_count()
    step(state, batch)
    assert threading.active_count() == before
    return step


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


@pytest.mark.parametrize("folder", ["", "programs"])
@pytest.mark.parametrize("process", [0, 1])
def test_a_step_that_compiles_long_says_so_once(capsys, monkeypatch, tmp_path, process, folder):
    """In process 0, and in notebooks, which replace stderr as tests do."""
    monkeypatch.setattr(_progress, "IN_A_LOG", 0.02)
    monkeypatch.setattr(_progress._compat, "run_of_processes", lambda: Run(process_id=process))
    config = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", folder and str(tmp_path / folder))
    threads = threading.enumerate()
    try:
        stepped(monkeypatch, loss_fn)
    finally:
        jax.config.update("jax_compilation_cache_dir", config)
    assert threading.enumerate() == threads
    keep = "" if folder else "; JAX_COMPILATION_CACHE_DIR=... keeps the result"
    what = rf"zerojax: XLA compiles the step \(loss_fn\) at stage 3{keep} \.\.\. "
    lines = capsys.readouterr().err.splitlines()
    assert sum("done in" in line for line in lines) == (process == 0)
    for line, ends in zip(lines[-2:], (r"\d+ s", r"done in \d+ s"), strict=process == 0):
        assert re.fullmatch(what + ends, line), line


def test_a_short_compilation_and_one_that_fails(capsys, monkeypatch):
    monkeypatch.setattr(_progress, "IN_A_LOG", 60)
    threads, step = threading.enumerate(), stepped(monkeypatch, loss_fn)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(_progress, "IN_A_LOG", 0.02)

    def fails(*_):
        time.sleep(0.1)
        raise RuntimeError("of XLA")

    monkeypatch.setattr(jitted._compat, "compiled_anew", fails)
    state = TrainState.create(apply_fn=None, params={"w": jnp.ones((8, 4))}, tx=optax.sgd(1e-2))
    state = zerojax.shard_train_state(state, stage=3, mesh=make_mesh(2))
    with pytest.raises(RuntimeError, match="of XLA"):
        step.compile(state, np.ones((4, 8), np.float32))
    # Nothing but save() keeps what this compiles.
    assert "XLA compiles the step (loss_fn) at stage 3 ... " in capsys.readouterr().err
    assert threading.enumerate() == threads
    with _progress.working("more", in_lines=True):  # its turn is over
        time.sleep(0.1)
    assert "zerojax: more ... done in " in capsys.readouterr().err
