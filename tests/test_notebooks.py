"""The notebooks' first cell: what it installs where zerojax is missing, as on Colab and Kaggle."""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import tomllib
import types

import pytest

ROOT = pathlib.Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SMI = "nvidia-smi --query-gpu=driver_version --format=csv,noheader"
MISSING = "sh: 1: nvidia-smi: not found"
FAILS = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."


def code_of(notebook):
    cells = json.loads(notebook.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def first_cell():
    """The cell, which all notebooks share."""
    (cell,) = {code_of(notebook)[0] for notebook in NOTEBOOKS}
    assert cell.startswith("# Installs zerojax") and len(NOTEBOOKS) == 6
    return cell


def test_the_repository_is_the_projects():
    """Whose pyproject.toml may have no address, so that a fork has no wrong one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    urls = project.get("urls", {})
    address = urls.get("Repository", urls.get("Source", ""))
    assert f"\nREPOSITORY = {json.dumps(address)}  #" in first_cell()


@pytest.fixture
def installed(monkeypatch):
    """Runs the first cell where pip has some sources; returns its names, and what it installs."""

    def installed(smi, known=(), has=("zerojax", ".."), repository=""):
        commands, names = [], {}

        def install(command, **_):
            commands.append(source := command[-1])
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
        message = rf"on pip's index nor at REPOSITORY='{repository}'\. Write the address"
        with pytest.raises(ModuleNotFoundError, match=message):
            installed(MISSING, has=(), repository=repository)


def test_what_shards_emulates_devices_beside_a_single_gpu(monkeypatch):
    starts = {one.name[:2]: code_of(one)[1].partition("\n\n")[0] for one in NOTEBOOKS}
    starts = {number: code for number, code in starts.items() if code.startswith("if len(gpus)")}
    assert starts.keys() == {"01", "02", "04"} and len(set(starts.values())) <= 2
    for count, platforms in ((0, "cpu"), (1, "cpu"), (2, None)):
        for code in starts.values():
            monkeypatch.delenv("JAX_PLATFORMS", raising=False)
            exec(code, {"os": os, "gpus": ["580.65"] * count})
            assert os.environ.get("JAX_PLATFORMS") == platforms
