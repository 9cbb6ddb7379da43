"""The cache of compiled programs: whose folder it is, and what happens where it cannot be used."""

import os
import types

import pytest

from zerojax._run import programs
from zerojax.tools._forecast import cache


@pytest.fixture(autouse=True)
def undecided(monkeypatch):
    """JAX as it is where the user has not decided where it keeps programs; it takes no folder."""
    config = types.SimpleNamespace(jax_compilation_cache_dir="", jax_enable_compilation_cache=1)
    monkeypatch.setattr(programs, "jax", types.SimpleNamespace(config=config))
    return config


@pytest.mark.parametrize("where", ["file", "x" * 300])  # pathlib raises where a name is too long
def test_a_folder_that_the_user_names_and_cannot_write(tmp_path, where, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZEROJAX_CACHE", folder := f"{tmp_path}/{where}/zerojax")
    said = rf"ZEROJAX_CACHE={folder}: compiled programs are not kept"
    with pytest.warns(UserWarning, match=said):
        programs.keep.__wrapped__()
    with pytest.warns(UserWarning, match=said), cache.kept(programs.folder()):
        assert cache._STORE.get()[0] is None


def everyones(folder):
    folder.chmod(0o777)
    return rf"everyone can write to {folder} \(mode 777\)"


def anothers(folder):
    os.chown(folder, 4321, -1)
    return f"{folder} belongs to user 4321"


@pytest.mark.parametrize("inner", ["", "programs"])
@pytest.mark.parametrize("open_up", [everyones, anothers])
def test_a_cache_that_others_write_to_is_not_used(tmp_path, open_up, inner, undecided, monkeypatch):
    """They could have a process run their code."""
    monkeypatch.setenv("ZEROJAX_CACHE", str(tmp_path / "zerojax"))
    (tmp_path / "zerojax" / "programs").mkdir(mode=0o700, parents=True)
    if open_up is anothers and os.geteuid():
        pytest.skip("only root can give a folder away")
    others = open_up(tmp_path / "zerojax" / inner)
    said = rf"not kept: {others}, and what is there is run\. Remove it; or chmod 700 it, .*ZERO"
    with pytest.warns(UserWarning, match=said):
        programs.keep.__wrapped__()
    if not inner:
        with pytest.warns(UserWarning, match=said), cache.kept(programs.folder()):
            assert cache._STORE.get()[0] is None
    undecided.jax_compilation_cache_dir = str(tmp_path / "zerojax" / inner)
    programs.keep.__wrapped__()  # the user has decided it


def test_a_cache_is_made_for_its_user_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("ZEROJAX_CACHE", str(tmp_path / "zerojax"))
    kept = programs.folder(), programs.folder() / "programs"
    before = os.umask(0)
    try:
        assert programs.usable(*kept)
    finally:
        os.umask(before)
    assert [folder.stat().st_mode & 0o777 for folder in kept] == [0o700, 0o700]
    assert programs.usable(*kept)


@pytest.mark.parametrize("folder", ["kept", ""])
def test_folders_that_processes_do_not_share_are_not_used(tmp_path, folder, undecided, monkeypatch):
    """Nor is that of another process where process 0 has none."""
    undecided.jax_compilation_cache_dir = path = folder and str(tmp_path / folder)
    undecided.update = lambda name, value: setattr(undecided, name, value)
    run = types.SimpleNamespace(num_processes=2, process_id=0, coordinator_address="a:1")
    monkeypatch.setattr(programs._compat, "run_of_processes", lambda: run)

    def differ(_, items, **options):
        if items():
            raise ValueError("the mark differs")

    monkeypatch.setattr(programs._agreement, "agree", differ)
    why = f"writes them to {path}, which another process does not see"
    why = why if folder else "has no folder for them, and another process has one"
    with pytest.warns(
        UserWarning, match=rf"not kept: process 0 {why}\. ZEROJAX_CACHE=\.\.\. names"
    ):
        programs.keep_together()
    assert undecided.jax_compilation_cache_dir is None
