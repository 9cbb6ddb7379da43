"""The notebooks' first cell: what it installs where zerojax is missing, as on Colab and Kaggle."""

import glob
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import types

import pytest

ROOT = pathlib.Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SMI = "nvidia-smi --query-gpu=driver_version --format=csv,noheader"
MISSING = "sh: 1: nvidia-smi: not found"
WHEEL = "zerojax-1.2.3-py3-none-any.whl"
FAILS = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."


def code_of(notebook):
    cells = json.loads(notebook.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def first_cell():
    """The cell, which all notebooks share."""
    (cell,) = {code_of(notebook)[0] for notebook in NOTEBOOKS}
    assert cell.startswith("# Installs zerojax") and len(NOTEBOOKS) == 6
    return cell


@pytest.fixture
def installed(monkeypatch):
    """Runs the first cell where pip has some sources; returns its names, and what it installs."""

    def installed(smi, known=(), has=("zerojax", "..", WHEEL), repository=""):
        commands, names = [], {}

        def install(command, **_):
            commands.append(" ".join(command[5:]))
            source = command[-1]
            origin = "git" if "git+" in source else source.partition("[")[0]
            return types.SimpleNamespace(returncode=int(origin not in has), stderr="")

        here = types.SimpleNamespace(origin="here")
        monkeypatch.setattr(subprocess, "getoutput", {SMI: smi}.__getitem__)
        monkeypatch.setattr(subprocess, "run", install)
        find = lambda name: here if name in known else None
        monkeypatch.setattr(importlib.util, "find_spec", find)
        monkeypatch.delenv("JAX_PLATFORMS", raising=False)
        cell = re.sub("^REPOSITORY = .*", f"REPOSITORY = {repository!r}", first_cell(), flags=re.M)
        exec(cell, names)
        return names, commands

    return installed


@pytest.mark.parametrize(
    ("smi", "known", "folder", "wanted"),
    [
        (MISSING, (), "notebooks", ["..[plot,gpu-compile]"]),
        (FAILS, ("jax_cuda12_plugin",), ".", ["zerojax[plot,gpu-compile]"]),
        ("550.54.15", (), ".", ["zerojax[plot,cuda12]"]),
        ("590.1\n590.1", ("jax_cuda12_plugin",), ".", ["zerojax[plot,cuda12]"]),
        ("580.65.06", (), "notebooks", ["..[plot,gpu]"]),
        ("550.54.15", ("zerojax",), ".", []),
    ],
)
def test_it_installs_what_fits_the_gpus(smi, known, folder, wanted, monkeypatch, installed):
    monkeypatch.chdir(ROOT / folder)
    names, commands = installed(smi, known)
    assert commands == wanted
    has_gpus = smi[0].isdigit()
    assert len(names["gpus"]) == has_gpus * len(smi.split())
    assert os.environ.get("JAX_PLATFORMS") == (None if has_gpus else "cpu")


def test_what_is_not_on_the_index_comes_from_the_repository(installed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    address, index = "https://git.invalid/zerojax.git", "zerojax[plot,gpu-compile]"
    both = [index, f"{index} @ git+{address}"]
    assert installed(MISSING, has=("zerojax", "git"), repository=address)[1] == both[:1]
    assert installed(MISSING, has=("git",), repository=address)[1] == both
    for repository in ("", address):
        message = rf"on pip's index nor at REPOSITORY='{repository}'\. Write .* or upload its wheel"
        with pytest.raises(ModuleNotFoundError, match=message):
            installed(MISSING, has=(), repository=repository)


def test_a_wheel_comes_before_the_index(installed, tmp_path, monkeypatch):
    """As uploaded to Colab, and as a data set of Kaggle; the real glob sees no /kaggle."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / WHEEL).touch()
    assert installed(MISSING)[1] == [f"{WHEEL}[plot,gpu-compile]"]
    data_set = f"/kaggle/input/mine/{WHEEL}"
    listed = {"/kaggle/input/*/zerojax-*.whl": [data_set]}
    monkeypatch.setattr(glob, "glob", lambda pattern: listed.get(pattern, []))
    assert installed("550.54.15", has=(data_set,))[1] == [f"{data_set}[plot,cuda12]"]


def test_a_session_keeps_its_numpy_and_no_older_jax(installed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    versions = {"numpy": "2.1.3", "jax": "0.11.2"}
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    monkeypatch.setitem(sys.modules, "jax", types.SimpleNamespace(__version__="0.11.2"))
    assert installed(MISSING, ("numpy",))[1] == ["numpy==2.1.3 zerojax[plot,gpu-compile]"]
    versions["numpy"] = "1.26.4"  # no JAX is for it
    assert installed(MISSING, ("numpy",))[1] == ["zerojax[plot,gpu-compile]"]
    sys.modules["jax"].__version__ = "0.7.2"
    with pytest.raises(RuntimeError, match=r"An earlier JAX is in memory\. Restart the session"):
        installed(MISSING)
    monkeypatch.delitem(sys.modules, "jax")
    installed(MISSING)


def test_what_shards_emulates_devices_beside_a_single_gpu(monkeypatch):
    starts = {one.name[:2]: code_of(one)[1].partition("\n\n")[0] for one in NOTEBOOKS}
    starts = {number: code for number, code in starts.items() if code.startswith("if len(gpus)")}
    assert starts.keys() == {"01", "02", "04"} and len(set(starts.values())) <= 2
    for count, platforms in ((0, "cpu"), (1, "cpu"), (2, None)):
        for code in starts.values():
            monkeypatch.delenv("JAX_PLATFORMS", raising=False)
            exec(code, {"os": os, "gpus": ["580.65"] * count})
            assert os.environ.get("JAX_PLATFORMS") == platforms
