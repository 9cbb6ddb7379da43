"""Compiled steps on disk: the same results without the compiler, and no harm done."""

import concurrent.futures
import json
import os
import pathlib
import sys
import zlib

import jax
import pytest

import zerojax
from tests import audits
from tests.checkpoint.damage import pipe_for
from tests.test_cli import MODEL
from zerojax._audit import audit as _audit
from zerojax._forecast import cache as _cache


@pytest.fixture
def compiles(monkeypatch):
    """What was lowered to be compiled."""
    seen = []

    def compiled(lowered, compile=_audit.compiled):
        seen.append(lowered)
        return compile(lowered)

    monkeypatch.setattr(_audit, "compiled", compiled)
    return seen


def alike(function, *args, **options):
    """Calls a function with the same calls on the stack each time, as a new process does: a
    program's text names the lines that it was called from."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *args, **options).result()


def report(folder, **options):
    return alike(reported, folder, **options)


def reported(folder, stage=3, rows=16, **options):
    plan = audits.planned("cpu", stage)
    step = zerojax.train_step(audits.loss, plan=plan, **options)
    args = plan.abstract(), audits.tokens(plan, rows), None
    with _cache.kept(folder):
        made = _cache.compiled(step, *args, plan)
    return zerojax.audit(made, *args, plan=plan)


def files(folder):
    return sorted(folder.glob("*")) if folder.exists() else []


def test_a_second_audit_reads_what_the_first_compiled(tmp_path, compiles):
    folder = tmp_path / "new" / "cache"
    first = report(folder, accumulate=2)
    (file,) = files(folder)
    assert file.stat().st_size < len(zlib.decompress(file.read_bytes())) / 3
    assert (
        report(folder, accumulate=2).to_dict()
        == first.to_dict()
        == report(None, accumulate=2).to_dict()
    )
    assert len(compiles) == 2, "the first, and the one without"
    assert first.memory.temporary > 0 and first.accumulate == 2 and first.check()


def test_what_the_compiler_warned_of_is_kept(tmp_path, monkeypatch):
    made = _audit.compiled
    monkeypatch.setattr(_audit, "compiled", lambda lowered: (made(lowered)[0], ["too large"]))
    assert report(tmp_path).warnings == ("too large",)
    monkeypatch.setattr(_audit, "compiled", None)
    assert report(tmp_path).warnings == ("too large",)


def test_nothing_is_kept_unless_asked(tmp_path, monkeypatch, compiles):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ZEROJAX_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    plan = audits.planned("cpu", 3)
    step = zerojax.train_step(audits.loss, plan=plan)
    assert _cache.compiled(step, None, None, None, plan) is step
    assert not compiles and not files(tmp_path)


DIFFERENT = {
    "shapes": lambda _: {"rows": 32},
    "stage": lambda _: {"stage": 2},
    "microbatches": lambda _: {"accumulate": 2},
    "options": lambda _: {"compiler_options": {"xla_embed_ir_in_executable": True}},
    "flags": lambda patch: patch.setenv("XLA_FLAGS", "--xla_dump_to="),
    "JAX": lambda patch: patch.setattr(jax, "__version__", "0.0.1"),
    "zerojax": lambda patch: patch.setattr(zerojax, "__version__", "0.0.1"),
    "compiler": lambda patch: patch.setattr(_cache, "_version", lambda name: "1"),
    "GPU": lambda patch: patch.setattr(_cache._known, "of_device_kind", an_h100),
}


def an_h100(kind):
    return _cache._known.GPUS["H100"]


@pytest.mark.parametrize("what", DIFFERENT)
def test_what_differs_is_compiled(what, tmp_path, monkeypatch, compiles):
    report(tmp_path)
    report(tmp_path)
    assert len(compiles) == 1
    options = DIFFERENT[what](monkeypatch) or {}
    report(tmp_path, **options)
    assert len(compiles) == 2 and len(files(tmp_path)) == 2


def test_what_jax_is_told_of_compiling_is_compiled(tmp_path, compiles):
    name = "jax_disable_most_optimizations"
    given = jax.config.values[name]
    report(tmp_path)
    jax.config.update(name, not given)
    try:
        report(tmp_path)
    finally:
        jax.config.update(name, given)
    report(tmp_path)
    assert len(compiles) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: data[:50] + bytes([data[50] ^ 1]) + data[51:],
        lambda data: b"no program",
        lambda data: zlib.compress(b"{"),
        lambda data: zlib.compress(b"\xff"),
        lambda data: zlib.compress(b"[]"),
        lambda data: zlib.compress(b'{"text": "x"}'),
    ],
)
def test_a_damaged_file_is_compiled_again(damage, tmp_path, compiles):
    whole = report(tmp_path).to_dict()
    (file,) = files(tmp_path)
    data = file.read_bytes()
    file.write_bytes(damage(data))
    assert report(tmp_path).to_dict() == whole and len(compiles) == 2
    assert files(tmp_path) == [file] and file.read_bytes() == data


def test_a_pipe_is_not_waited_for(tmp_path):
    file = tmp_path / "program"
    with pipe_for(file):
        assert _cache._read(file) is None and file.is_fifo()


def test_a_folder_that_cannot_be_is_no_error(tmp_path, compiles):
    (tmp_path / "file").write_text("in the way")
    assert report(tmp_path / "file").check() and report(tmp_path / "file").check()
    assert len(compiles) == 2 and (tmp_path / "file").read_text() == "in the way"


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert report(tmp_path).check() and not files(tmp_path)


def test_what_was_not_read_for_longest_goes_first(tmp_path, monkeypatch, compiles):
    mine = tmp_path / "mine.txt"
    mine.write_text("x" * 10**6)
    kinds = ({"rows": 16}, {"rows": 32}, {"rows": 64})
    for age, kind in zip((3, 2), kinds, strict=False):
        before = set(files(tmp_path))
        report(tmp_path, **kind)
        (file,) = set(files(tmp_path)) - before
        os.utime(file, (file.stat().st_mtime - 1000 * age,) * 2)
    report(tmp_path, **kinds[0])  # reads the oldest
    each = file.stat().st_size
    monkeypatch.setattr(_cache, "MOST_BYTES", 2.5 * each)
    report(tmp_path, **kinds[2])
    assert len(compiles) == 3 and len(files(tmp_path)) == 3
    report(tmp_path, **kinds[0])
    assert len(compiles) == 3, "was kept"
    report(tmp_path, **kinds[1])
    assert len(compiles) == 4, "was dropped"
    monkeypatch.setattr(_cache, "MOST_BYTES", 1)
    report(tmp_path, stage=2)
    assert len(files(tmp_path)) == 2 and mine.exists(), "the latest, and what is not ours"


@pytest.mark.parametrize(
    ("platform", "environ", "found"),
    [
        ("linux", {"ZEROJAX_CACHE": "/some/where"}, "/some/where"),
        ("linux", {"ZEROJAX_CACHE": "~/there"}, "/home/me/there"),
        ("linux", {"ZEROJAX_CACHE": ""}, None),
        ("linux", {}, "/home/me/.cache/zerojax"),
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/zerojax"),
        ("darwin", {}, "/home/me/Library/Caches/zerojax"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/zerojax"),
    ],
)
def test_where_it_is(platform, environ, found, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(sys, "platform", platform)
    assert _cache.folder(environ) == (None if found is None else pathlib.Path(found))


@pytest.mark.gpu_code
def test_commands_compile_once(run, module, tmp_path, monkeypatch, compiles):
    """And model other networks from what they have."""
    name = module("mymodel", MODEL) + ":model"
    monkeypatch.setenv("ZEROJAX_CACHE", str(tmp_path / "cache"))

    def cases(network, *more):
        flags = ("--gpus", "16xH100", "--stages", "3", "--network", network, "--json")
        code, out, err = alike(run, "forecast", name, *flags, *more)
        assert (code, err) == (0, "")
        (case,) = json.loads(out)["cases"]
        return {k: v for k, v in case.items() if k != "compile_seconds"}

    slow = cases("12.5")
    assert len(compiles) == 1
    slower = cases("6.25")
    assert len(compiles) == 1 and slower["step_seconds"] > slow["step_seconds"]
    assert cases("12.5") == slow == cases("12.5", "--no-cache")
    assert len(compiles) == 2 and len(files(tmp_path / "cache")) == 1
    audit = ("audit", name, "--gpus", "16xH100")
    first, count = alike(run, *audit), len(compiles)
    assert first == alike(run, *audit) and first[0] == 0 and len(compiles) == count
    assert first == alike(run, *audit, "--no-cache") and len(compiles) == count + 1
