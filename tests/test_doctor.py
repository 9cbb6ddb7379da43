"""`zerojax doctor`: what it says of machines that are not here."""

import json
import os
import re
import types

import jax
import pytest

from tests.processes import ROOT
from zerojax._run import programs

B200, H100 = ("NVIDIA B200", "10.0"), ("NVIDIA H100 80GB HBM3", "9.0")
RTX4090, GB10 = ("NVIDIA GeForce RTX 4090", "8.9"), ("NVIDIA GB10", "12.1")


def gpu(kind, capability):
    return types.SimpleNamespace(platform="gpu", device_kind=kind, compute_capability=capability)


@pytest.fixture
def found(run, monkeypatch):
    """The exit code, and the rows for so many GPUs and these variables."""

    def found(count, kind, **env):
        with monkeypatch.context() as patch:
            patch.setattr(jax, "local_devices", lambda: [gpu(*kind) for _ in range(count)])
            for name, value in {"XLA_FLAGS": "", **env}.items():
                patch.setenv(name, value)
            code, out, err = run("doctor", "--json")
        assert not err
        return code, [tuple(row.values()) for row in json.loads(out).get("rows", [])]

    monkeypatch.delenv("JAX_DISABLE_JIT", raising=False)
    return found


def test_a_machine_without_hazards(found, run):
    assert found(8, H100, CUDA_DEVICE_MAX_CONNECTIONS="1", NCCL_P2P_DISABLE="0") == (0, [])
    assert found(1, B200) == found(1, RTX4090) == (0, [])
    assert found(1, H100, OFI_NCCL_PROTOCOL="RDMA") == (0, [])
    assert found(2, B200, NCCL_LAUNCH_MODE="group") == (0, [])
    kept = f"Compiled programs are kept in {os.environ['JAX_COMPILATION_CACHE_DIR']}."
    said = f"8 x cpu: nothing here is known to hang or slow a run.\n{kept}\n"
    assert run("doctor")[1] == said


def test_hazards_of_gpus(found):
    code, [(seen, does, remedy)] = found(8, B200)
    assert code == 1 and seen == "8 x NVIDIA B200 in one process" and "hang" in does
    assert remedy.startswith("NCCL_LAUNCH_ORDER_IMPLICIT=1 zerojax launch -n 8 train.py; or")
    _, rows = found(1, B200, CUDA_DEVICE_MAX_CONNECTIONS="1")
    assert [seen for seen, *_ in rows] == ["CUDA_DEVICE_MAX_CONNECTIONS=1"]
    # Their driver does what the variable asks for.
    _, [(_, does, remedy)] = found(2, RTX4090, NCCL_P2P_DISABLE="1")
    assert "through the host's memory, and forecasts count on that" in does
    assert "NCCL_P2P_DISABLE=1" in remedy
    _, [(_, does, remedy)] = found(1, GB10, XLA_CLIENT_MEM_FRACTION="0.9")
    assert "freezes" in does and "90%" in does and "XLA_CLIENT_MEM_FRACTION=0.6" in remedy


def test_a_folder_that_the_user_names_and_cannot_write(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZEROJAX_CACHE", str(tmp_path / "file"))
    undecided = types.SimpleNamespace(jax_compilation_cache_dir="", jax_enable_compilation_cache=1)
    monkeypatch.setattr(programs, "jax", types.SimpleNamespace(config=undecided))
    with pytest.warns(UserWarning, match=r"ZEROJAX_CACHE=.*file: compiled programs are not kept"):
        programs.keep.__wrapped__()


def test_a_share_of_memory_that_is_no_number(found):
    _, [first, (seen, does, remedy)] = found(1, GB10, XLA_CLIENT_MEM_FRACTION="60%")
    assert "75%" in first[1]
    assert seen == "XLA_CLIENT_MEM_FRACTION=60%" and "all GPUs out" in does and "0.75" in remedy
    assert found(1, H100, XLA_CLIENT_MEM_FRACTION="") == (0, [])


def test_programs_that_are_not_kept(found, tmp_path):
    """The tests keep theirs in a folder of JAX's, and have none of zerojax's."""
    _, [(seen, does, _)] = found(1, H100, JAX_ENABLE_COMPILATION_CACHE="false")
    assert seen == "JAX_ENABLE_COMPILATION_CACHE=false" and "again" in does
    (tmp_path / "file").write_text("")
    in_file = {"JAX_COMPILATION_CACHE_DIR": "", "ZEROJAX_CACHE": str(tmp_path / "file")}
    _, [(seen, _, remedy)] = found(1, H100, **in_file)
    assert seen == f"{tmp_path}/file/programs cannot be written" and "ZEROJAX_CACHE=" in remedy
    _, [(seen, does, remedy)] = found(1, H100, JAX_COMPILATION_CACHE_DIR="gs://programs")
    assert seen.endswith("DIR=gs://programs") and "tunes" in does and "a folder of each" in remedy
    assert found(1, H100, JAX_COMPILATION_CACHE_DIR="")[1][0][0] == "ZEROJAX_CACHE="
    assert found(1, H100, JAX_COMPILATION_CACHE_DIR="", ZEROJAX_CACHE="here") == (0, [])


def test_settings_that_cost_are_those_of_the_guide(found):
    """And each is told only with the value that costs."""
    from zerojax.tools._doctor import FLAGS, SETTINGS

    guide = (ROOT / "docs" / "debugging.md").read_text()
    guide = guide[guide.index("### Settings that slow a step") :]
    for name, (values, _) in SETTINGS.items():
        value = values[0] if values else "1"
        assert re.search(rf"^\|.*`{name}", guide, re.MULTILINE), name
        assert [row[0] for row in found(1, H100, **{name: value})[1]] == [f"{name}={value}"]
        assert found(1, H100, **{name: "rdma" if values else "0"}) == (0, [])
    flags = " ".join(f"{flag}=1" for flag in FLAGS)
    assert [row[0] for row in found(1, H100, XLA_FLAGS=f"--x=1 {flags}")[1]] == flags.split()
