"""The doctor's findings in an environment."""

import importlib.metadata
import socket

import jax
import pytest

from zerojax._forecast import doctor as _doctor
from zerojax._forecast.network import FLAG
from zerojax._update.offload import POOL_LIMIT


def statuses(**environ):
    return {check.name: (check.status, check.text) for check in _doctor.doctor(environ)}


def test_doctor_finds_nothing_in_a_clean_environment():
    found = statuses()
    assert found["flags"] == ("ok", "none that hurt in XLA_FLAGS, NCCL_* or JAX_*")
    assert found["processes"][0] == "ok" and found["memory"][0] == "note"
    assert "host memory" not in found, "there is no GPU"
    assert "network" not in found, "there is one process"
    assert found["versions"][0] == "ok" and "optax" in found["versions"][1]


@pytest.mark.parametrize(
    ("environ", "name", "status", "message"),
    [
        ({"NCCL_P2P_DISABLE": "1"}, "NCCL_P2P_DISABLE", "warn", "host memory. Unset it."),
        ({"NCCL_IB_DISABLE": "1"}, "NCCL_IB_DISABLE", "warn", "talk over TCP"),
        ({"JAX_DISABLE_JIT": "True"}, "JAX_DISABLE_JIT", "warn", "nothing is compiled"),
        (
            {"XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler=false"}, "XLA_FLAGS", "warn",
            "no collective hides behind compute. Take it out of XLA_FLAGS",
        ),
        (
            {"XLA_FLAGS": "--xla_gpu_all_gather_combine_threshold_bytes=1"}, "XLA_FLAGS", "warn",
            "steps set it by what a layer needs",
        ),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, "memory", "warn", "allocator is slow"),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, "memory", "warn", "which fragments"),
        ({"XLA_CLIENT_MEM_FRACTION": ".9"}, "memory", "ok", "takes 90% of each GPU"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}, "memory", "ok", "takes 92% of each GPU"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "most"}, "memory", "fail", "'most' is no share of a"),
        ({POOL_LIMIT: "128"}, "host memory", "ok", "offload= may use 128 GiB in each process"),
        ({POOL_LIMIT: "all"}, "host memory", "fail", "'all' is no number of GiB. Set it to 64"),
        ({"JAX_COORDINATOR_ADDRESS": "nohost"}, "processes", "fail", "'nohost' is not host:port"),
        ({"JAX_COORDINATOR_ADDRESS": "h:99999"}, "processes", "fail", "is not host:port"),
        ({"JAX_COORDINATOR_ADDRESS": "nohost"}, "network", "note", f"put {FLAG} into XLA_FLAGS."),
    ],
)  # fmt: skip
def test_doctor_finds_what_hurts(environ, name, status, message):
    found = statuses(**environ)
    assert found[name][0] == status and message in found[name][1]


@pytest.mark.parametrize("off", ["", "0", "false"])
def test_doctor_knows_what_is_off(off):
    assert statuses(NCCL_P2P_DISABLE=off)["flags"][0] == "ok"


def test_doctor_asks_for_the_speed_of_the_network_once():
    assert "network" not in statuses(JAX_COORDINATOR_ADDRESS="nohost", XLA_FLAGS=FLAG)
    assert "network" in statuses(SLURM_NTASKS="8") and "network" in statuses(WORLD_SIZE="2")
    assert "network" not in statuses(SLURM_NTASKS="1", WORLD_SIZE="1")


def test_doctor_reaches_the_coordinator():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        there = statuses(JAX_COORDINATOR_ADDRESS=f"127.0.0.1:{port}")
    gone = statuses(JAX_COORDINATOR_ADDRESS=f"127.0.0.1:{port}")
    assert there["processes"] == ("ok", f"the coordinator 127.0.0.1:{port} answers")
    assert gone["processes"][0] == "warn" and "open the port" in gone["processes"][1]


@pytest.mark.parametrize(
    ("backend", "gpus", "installed", "warns"),
    [
        ("gpu", 2, "tensorflow", True),
        ("gpu", 2, "tensorflow-cpu", False),
        ("gpu", 1, "tensorflow", False),
        ("cpu", 8, "tensorflow", False),
    ],
)
def test_doctor_warns_of_a_second_nccl(backend, gpus, installed, warns, monkeypatch):
    versions = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "2.20" if name == installed else versions(name)
    )
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "device_count", lambda: gpus)
    found = statuses()
    assert ("tensorflow" in found) == warns
    if warns:
        assert found["tensorflow"][0] == "warn" and "tensorflow-cpu" in found["tensorflow"][1]
