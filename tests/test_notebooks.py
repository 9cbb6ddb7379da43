"""The notebooks' first cell: what it installs where zerojax is missing, as on Colab and Kaggle."""

import importlib.util
import json
import os
import pathlib
import subprocess
import textwrap
import tomllib
import types
import venv

import pytest

ROOT = pathlib.Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FIRST = "# Installs zerojax"
SMI = "nvidia-smi --query-gpu=driver_version --format=csv,noheader"
HOST = "https://git.invalid/"
MISSING = "sh: 1: nvidia-smi: not found"
FAILS = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."


def code_of(notebook):
    cells = json.loads(notebook.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def first_cell():
    """The cell, which all notebooks share."""
    (cell,) = {code_of(notebook)[0] for notebook in NOTEBOOKS}
    assert cell.startswith(FIRST) and len(NOTEBOOKS) == 6
    return cell


def with_repository(address):
    lines = first_cell().splitlines()
    (at,) = (n for n, line in enumerate(lines) if line.startswith("REPOSITORY = "))
    return "\n".join([*lines[:at], f"REPOSITORY = {str(address)!r}", *lines[at + 1 :]])


def test_the_repository_is_the_projects():
    """Whose pyproject.toml may have no address, so that a fork has no wrong one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    urls = project.get("urls", {})
    address = urls.get("Repository", urls.get("Source", ""))
    assert f"\nREPOSITORY = {json.dumps(address)}  #" in first_cell()


@pytest.mark.parametrize(
    ("smi", "known", "folder", "wanted"),
    [
        (MISSING, (), "notebooks", "..[plot,gpu-compile]"),
        (FAILS, ("jax_cuda12_plugin",), ".", "zerojax[plot,gpu-compile]"),
        ("550.54.15", (), ".", "zerojax[plot,cuda12]"),
        ("590.1\n590.1", ("jax_cuda12_plugin",), ".", "zerojax[plot,cuda12]"),
        ("580.65.06", (), "notebooks", "..[plot,gpu]"),
        ("550.54.15", ("zerojax",), ".", None),
    ],
)
def test_it_installs_what_fits_the_gpus(smi, known, folder, wanted, monkeypatch):
    installed = []

    def install(command, **_):
        installed.append(command[-1])
        return types.SimpleNamespace(returncode=0)

    spec = types.SimpleNamespace(origin="here")
    monkeypatch.setattr(subprocess, "getoutput", {SMI: smi}.__getitem__)
    monkeypatch.setattr(subprocess, "run", install)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name in known else None)
    monkeypatch.chdir(ROOT / folder)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    seen = {}
    exec(first_cell(), seen)
    assert installed == [one for one in [wanted] if one]
    has_gpus = smi[0].isdigit()
    assert len(seen["gpus"]) == has_gpus * len(smi.split())
    assert os.environ.get("JAX_PLATFORMS") == (None if has_gpus else "cpu")


def test_what_shards_emulates_devices_beside_a_single_gpu(monkeypatch):
    starts = {one.name[:2]: code_of(one)[1].partition("\n\n")[0] for one in NOTEBOOKS}
    starts = {number: code for number, code in starts.items() if code.startswith("if len(gpus)")}
    assert starts.keys() == {"01", "02", "04"} and len(set(starts.values())) <= 2
    for count, platforms in ((0, "cpu"), (1, "cpu"), (2, None)):
        for code in starts.values():
            monkeypatch.delenv("JAX_PLATFORMS", raising=False)
            exec(code, {"os": os, "gpus": ["580.65"] * count})
            assert os.environ.get("JAX_PLATFORMS") == platforms


# -- a machine without zerojax, and without a network

# Makes a wheel whose zerojax says where it came from; as the build backend of a repository too.
BACKEND = """
    import pathlib, zipfile

    def build_wheel(directory, settings=None, metadata=None, origin="git"):
        extras = "".join(f"Provides-Extra: {name}\\n" for name in ("plot", "gpu-compile"))
        about = f"Metadata-Version: 2.1\\nName: zerojax\\nVersion: 0.1\\n{extras}"
        files = {
            "zerojax/__init__.py": f"origin = {origin!r}",
            "zerojax-0.1.dist-info/METADATA": about,
            "zerojax-0.1.dist-info/WHEEL": "Wheel-Version: 1.0\\nTag: py3-none-any\\n",
        }
        record = "".join(f"{name},,\\n" for name in [*files, "zerojax-0.1.dist-info/RECORD"])
        name = "zerojax-0.1-py3-none-any.whl"
        with zipfile.ZipFile(pathlib.Path(directory, name), "w") as wheel:
            for path, text in (files | {"zerojax-0.1.dist-info/RECORD": record}).items():
                wheel.writestr(path, text)
        return name
"""
PROJECT = """
    [build-system]
    requires = []
    build-backend = "backend"
    backend-path = ["."]
    [project]
    name = "zerojax"
    version = "0.1"
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A Python that has nothing but pip, whose index is a folder."""
    pip = pytest.importorskip("pip")
    folder = tmp_path_factory.mktemp("bare")
    (folder / "pips").mkdir()
    (folder / "pips/pip").symlink_to(pathlib.Path(pip.__file__).parent)
    (folder / "index").mkdir()
    venv.create(folder / "venv")
    return folder


@pytest.fixture(scope="module")
def repository(bare):
    """The address of a bare repository with a zerojax in it."""
    source = bare / "source"
    source.mkdir()
    (source / "backend.py").write_text(textwrap.dedent(BACKEND))
    (source / "pyproject.toml").write_text(textwrap.dedent(PROJECT))
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (
        ["git", "init", "-q", "."],
        ["git", "add", "."],
        ["git", *author, "commit", "-q", "-m", "all"],
        ["git", "clone", "-q", "--bare", ".", str(bare / "zerojax.git")],
    ):
        subprocess.run(command, cwd=source, check=True)
    return f"{HOST}zerojax.git"


def run_cell(bare, address):
    """Runs the cell there, and says where the zerojax that it installed came from."""
    (bare / "work").mkdir(exist_ok=True)
    python = bare / "venv/bin/python"
    subprocess.run(
        [python, "-m", "pip", "uninstall", "-q", "-y", "zerojax"],
        env=environment(bare),
        capture_output=True,
    )
    code = with_repository(address) + "\nimport zerojax\nprint(zerojax.origin, len(gpus))"
    return subprocess.run(
        [python, "-c", code],
        cwd=bare / "work",
        env=environment(bare),
        capture_output=True,
        text=True,
    )


def environment(bare):
    """Has pip look into a folder for the index, and git into another for the host."""
    host = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_VALUE_0": HOST}
    host["GIT_CONFIG_KEY_0"] = f"url.{bare.as_uri()}/.insteadOf"
    pip = {"PYTHONPATH": str(bare / "pips"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    pip |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(bare / "index")}
    return os.environ | host | pip


@pytest.mark.ci
def test_it_installs_from_the_repository_what_is_not_on_the_index(bare, repository):
    ran = run_cell(bare, repository)
    assert (ran.stderr, ran.returncode) == ("", 0)
    index, clone, result = ran.stdout.splitlines()
    assert index == "pip install zerojax[plot,gpu-compile]"
    assert clone == f"pip install zerojax[plot,gpu-compile] @ git+{repository}"
    assert result == "git 0"


@pytest.mark.ci
def test_it_prefers_the_index(bare, repository):
    namespace = {}
    exec(textwrap.dedent(BACKEND), namespace)
    namespace["build_wheel"](bare / "index", origin="index")
    ran = run_cell(bare, repository)
    (bare / "index/zerojax-0.1-py3-none-any.whl").unlink()
    assert (ran.stderr, ran.returncode) == ("", 0)
    assert ran.stdout == "pip install zerojax[plot,gpu-compile]\nindex 0\n"


@pytest.mark.ci
@pytest.mark.parametrize("address", ["", f"{HOST}nowhere.git"])
def test_where_nothing_can_be_installed_it_says_so_in_a_line(bare, address):
    ran = run_cell(bare, address)
    told = (
        f"ModuleNotFoundError: zerojax is neither on pip's index nor at REPOSITORY={address!r}. "
        "Write the address of its repository there, and run this cell again. (On Kaggle, switch "
        "the internet on first.)"
    )
    assert ran.stderr.splitlines()[-1] == told
    assert "ERROR: No matching distribution" in ran.stdout or "nowhere.git" in ran.stdout
