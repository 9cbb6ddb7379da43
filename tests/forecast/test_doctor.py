"""`zerojax doctor`: its findings in an environment."""

import importlib.metadata
import json
import os
import socket

import jax
import pytest

PREFIXES = ("JAX_", "NCCL_", "SLURM_", "XLA_", "CUDA_", "WORLD_SIZE")
ESTIMATOR = "--xla_gpu_analytical_latency_estimator_options"
FLAG = f"{ESTIMATOR}=nic_speed_gbps=3"
POOL_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
ADDRESS = "JAX_COORDINATOR_ADDRESS"


@pytest.fixture
def statuses(run, monkeypatch):
    """(status, text) by the name of what was checked, where these variables alone are set."""

    def statuses(**environ):
        with monkeypatch.context() as patch:
            for name in [name for name in os.environ if name.startswith(PREFIXES)]:
                patch.delenv(name)
            for name, value in environ.items():
                patch.setenv(name, value)
            code, out, err = run("doctor", "--json")
        checks = json.loads(out)
        assert all(check.keys() == {"name", "status", "text"} for check in checks) and not err
        found = {check["name"]: (check["status"], check["text"]) for check in checks}
        assert code == any(status == "fail" for status, _ in found.values())
        return found

    return statuses


def test_nothing_hurts_in_a_clean_environment(statuses, run):
    found = statuses()
    assert found["flags"] == ("ok", "none that hurt in XLA_FLAGS, NCCL_* or JAX_*")
    assert found["processes"][0] == "ok" and found["memory"][0] == "note"
    assert "host memory" not in found, "there is no GPU"
    assert "network" not in found, "there is one process"
    assert found["versions"][0] == "ok" and "optax" in found["versions"][1]
    assert found["devices"] == ("ok", "8 (cpu)")
    assert statuses(NCCL_P2P_DISABLE="0", JAX_DISABLE_JIT="false") == found, "what is off"
    code, out, _ = run("doctor")
    assert code == 0 and "versions" in out and "8 (cpu)" in out


@pytest.mark.parametrize(
    ("environ", "name", "status", "message"),
    [
        ({"NCCL_P2P_DISABLE": "1"}, "NCCL_P2P_DISABLE", "warn", "host memory. Unset it."),
        ({"NCCL_IB_DISABLE": "1"}, "NCCL_IB_DISABLE", "warn", "talk over TCP"),
        ({"JAX_DISABLE_JIT": "True"}, "JAX_DISABLE_JIT", "warn", "nothing is compiled"),
        (
            {"XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler=false"},
            "XLA_FLAGS",
            "warn",
            "no collective hides behind compute. Take it out of XLA_FLAGS",
        ),
        (
            {"XLA_FLAGS": "--xla_gpu_all_gather_combine_threshold_bytes=1"},
            "XLA_FLAGS",
            "warn",
            "steps set it by what a layer needs",
        ),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, "memory", "warn", "allocator is slow"),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, "memory", "warn", "which fragments"),
        ({"XLA_CLIENT_MEM_FRACTION": ".9"}, "memory", "ok", "takes 90% of each GPU"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}, "memory", "ok", "takes 92% of each GPU"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "most"}, "memory", "fail", "'most' is no share of a"),
        ({POOL_LIMIT: "128"}, "host memory", "ok", "offload= may use 128 GiB in each process"),
        ({POOL_LIMIT: "all"}, "host memory", "fail", "'all' is no number of GiB. Set it to 64"),
        ({ADDRESS: "nohost"}, "processes", "fail", "'nohost' is not host:port"),
        ({ADDRESS: "h:99999"}, "processes", "fail", "is not host:port"),
        ({ADDRESS: "nohost"}, "network", "note", f"put {FLAG} into XLA_FLAGS."),
        ({"SLURM_NTASKS": "8"}, "network", "note", f"put {FLAG} into XLA_FLAGS."),
        ({"WORLD_SIZE": "2", "XLA_FLAGS": f"{ESTIMATOR}=rtt_us=2"}, "network", "note", "put "),
    ],
)
def test_what_hurts_has_a_remedy(environ, name, status, message, statuses):
    found = statuses(**environ)
    assert found[name][0] == status and message in found[name][1]


def test_the_speed_of_the_network_is_asked_for_once(statuses):
    assert "network" not in statuses(**{ADDRESS: "nohost", "XLA_FLAGS": FLAG})
    assert "network" not in statuses(SLURM_NTASKS="1", WORLD_SIZE="1")


def test_the_coordinator_is_reached(statuses):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        there = statuses(**{ADDRESS: address})
    gone = statuses(**{ADDRESS: address})
    assert there["processes"] == ("ok", f"the coordinator {address} answers")
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
def test_a_second_nccl_is_warned_of(backend, gpus, installed, warns, statuses, monkeypatch):
    versions = importlib.metadata.version
    with_it = lambda name: "2.20" if name == installed else versions(name)
    monkeypatch.setattr(importlib.metadata, "version", with_it)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "device_count", lambda: gpus)
    found = statuses().get("tensorflow")
    assert (found is not None) == warns
    assert not warns or (found[0] == "warn" and "tensorflow-cpu" in found[1])
