"""Compiled steps on disk: the same results without the compiler, and no harm done."""

import concurrent.futures
import json
import os
import zlib

import jax
import jaxlib
import pytest

import zerojax
from tests.forecast import fakes

MINE = f"""{fakes.MODEL}
    def plain():
        return zerojax.train_step(loss), state, model()[2]

    def optioned():
        options = {{"xla_embed_ir_in_executable": True}}
        schedule = zerojax.Schedule(compiler_options=options)
        return zerojax.train_step(loss, schedule=schedule), state, model()[2]
"""


@pytest.fixture
def audit(run, module, tmp_path, monkeypatch, compiled):
    """Audits a model by the command line, which keeps what it compiles in `cache`.

    Returns the report. Commands run with the same calls on the stack each time, as in a process of
    their own: a program's text names the lines that it was called from.
    """
    name = module("mymodel", MINE)
    monkeypatch.setenv("ZEROJAX_CACHE", str(tmp_path / "cache"))

    def audit(*flags, model="model", ends=0):
        with concurrent.futures.ThreadPoolExecutor(1) as thread, fakes.cpus_for_gpus():
            given = ("audit", f"{name}:{model}", "--gpus", "2xH100", "--json", *flags)
            code, out, err = thread.submit(run, *given).result()
        assert (code, err) == (ends, "")
        return json.loads(out)

    return audit


def files(folder):
    return sorted(folder.glob("*")) if folder.exists() else []


def test_a_second_command_reads_what_the_first_compiled(audit, tmp_path, compiled):
    first = audit("--accumulate", "2")
    (file,) = files(tmp_path / "cache")
    assert file.stat().st_size < len(zlib.decompress(file.read_bytes())) / 3
    assert len(compiled) == 1 and first["memory"]["temporary"] > 0
    assert audit("--accumulate", "2") == first and len(compiled) == 1
    assert audit("--accumulate", "2", "--no-cache") == first and len(compiled) == 2
    assert files(tmp_path / "cache") == [file]


def test_what_the_compiler_warned_of_is_kept(audit, compiled):
    said = "Involuntary full rematerialization. The compiler was not able to go from"

    def warn(event, *_, **__):
        if event.endswith("backend_compile_duration"):
            os.write(2, f"W0000 spmd_partitioner.cc:1] [spmd] {said}\n".encode())

    jax.monitoring.register_event_duration_secs_listener(warn)
    try:
        first = audit(ends=1)
    finally:
        jax.monitoring.unregister_event_duration_listener(warn)
    assert said in first["warnings"][0]
    assert audit(ends=1) == first and len(compiled) == 1


DIFFERENT = [
    ("six", "", ()),
    ("model", "", ("setattr", type(jax.devices()[0]), "device_kind", "another GPU")),
    ("model", "--stage 2", ()),
    ("model", "--accumulate 2", ()),
    ("optioned", "", ()),
    ("model", "", ("setenv", "XLA_FLAGS", "--xla_dump_to=")),
    ("model", "", ("setattr", jax, "__version__", "0.0.1")),
    ("model", "", ("setattr", zerojax, "__version__", "0.0.1")),
    ("model", "", ("setattr", jaxlib, "__version__", "0.0.1")),
]


def test_what_differs_is_compiled(audit, tmp_path, monkeypatch, compiled):
    audit()
    audit(model="plain")
    for model, flags, change in DIFFERENT:
        before = len(compiled)
        with monkeypatch.context() as patch:
            if change:
                getattr(patch, change[0])(*change[1:])
            audit(*flags.split(), model=model)
        assert len(compiled) == before + 1, (model, flags, change)
    name = "jax_disable_most_optimizations"
    given = jax.config.values[name]
    jax.config.update(name, not given)
    try:
        audit()
    finally:
        jax.config.update(name, given)
    audit()
    assert len(compiled) == before + 2 == len(files(tmp_path / "cache"))


@pytest.mark.ci
def test_a_damaged_file_is_compiled_again(audit, tmp_path, compiled):
    whole = audit()
    (file,) = files(tmp_path / "cache")
    data = file.read_bytes()
    damaged = [b"", data[:-1], data[:50] + bytes([data[50] ^ 1]) + data[51:], b"no program"]
    damaged += map(zlib.compress, (b"{", b"\xff", b"[]", b'{"text": "x"}'))
    for count, other in enumerate(damaged, start=2):
        file.write_bytes(other)
        assert audit() == whole and len(compiled) == count, other
        # Not its bytes: XLA's text of one program differs, rarely, from compile to compile.
        assert files(tmp_path / "cache") == [file] and audit() == whole, other
        assert len(compiled) == count, f"{other!r} was not replaced by a program"


def test_a_write_that_fails_leaves_nothing_and_all_else_goes_on(audit, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        first = audit()
    assert not files(tmp_path / "cache") and audit() == first


def test_what_was_not_read_for_longest_goes_first(audit, tmp_path, compiled):
    """Files of 2**28 bytes in all stay; one with a hole for its content takes most of that."""
    kinds = ["--accumulate", "2"], [], ["--accumulate", "4"]
    for kind in kinds[:2]:
        audit(*kind)
        for file in files(tmp_path / "cache"):
            os.utime(file, (10**9, 10**9))
    audit(*kinds[0])  # reads the older one
    sizes = sorted(file.stat().st_size for file in files(tmp_path / "cache"))
    large = tmp_path / "cache" / "large.zerojax"
    large.touch()
    os.truncate(large, 2**28 - 2 * sizes[1] - sizes[0] // 2)
    os.utime(large, (10**9 + 1, 10**9 + 1))
    audit(*kinds[2])
    audit(*kinds[0])
    assert len(compiled) == 3 and large.exists(), "what was read is kept"
    audit(*kinds[1])
    assert len(compiled) == 4 and not large.exists(), "the other was dropped"


WHERE = [
    ("XDG_CACHE_HOME", "~", "home/zerojax"),
    ("OTHER", "", "home/.cache/zerojax"),
    ("ZEROJAX_CACHE", "~/mine", "home/mine"),
    ("ZEROJAX_CACHE", "", None),
]


def test_where_it_is(audit, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("ZEROJAX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for variable, value, where in WHERE:
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            audit()
        kept = list(tmp_path.rglob("*.zerojax"))
        assert [path.parent for path in kept] == ([tmp_path / where] if where else [])
        for path in kept:
            path.unlink()


def doubled(params, batch):
    return 2 * fakes.loss(params, batch)


def test_a_later_study_compiles_only_what_it_lacks(compiled, tmp_path, monkeypatch):
    def study(gpus, loss=fakes.loss, **options):
        models = {"mine": (loss, fakes.make_state, fakes.batch)}
        with fakes.cpus_for_gpus():
            return zerojax.tools.study(models, gpus=gpus, stages=3, rows=4, **options).cases

    monkeypatch.setenv("ZEROJAX_CACHE", str(tmp_path))
    (first,) = study("2xH100")
    assert len(compiled) == 1
    again, more = study(["2xH100", "4xH100"])
    assert len(compiled) == 2 and more.count == 4
    assert again == first
    study("2xH100", doubled)
    assert len(compiled) == 3, "another loss"
    study("2xH100", cache=False)
    assert len(compiled) == 4
