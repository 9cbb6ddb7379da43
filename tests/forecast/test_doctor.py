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
HIDING = "xla_gpu_enable_latency_hiding_scheduler"
COMBINED = "xla_gpu_all_gather_combine_threshold_bytes"
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
    ("variable", "value", "name", "status", "message"),
    [
        ("NCCL_P2P_DISABLE", "1", "NCCL_P2P_DISABLE", "warn", "host memory. Unset it."),
        ("JAX_DISABLE_JIT", "True", "JAX_DISABLE_JIT", "warn", "nothing is compiled"),
        ("XLA_FLAGS", f"--{HIDING}=false", "XLA_FLAGS", "warn", "Take it out of XLA_FLAGS"),
        ("XLA_FLAGS", f"--{COMBINED}=1", "XLA_FLAGS", "warn", "set it by what a layer needs"),
        ("XLA_PYTHON_CLIENT_ALLOCATOR", "platform", "memory", "warn", "allocator is slow"),
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92", "memory", "ok", "takes 92% of each GPU"),
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", "most", "memory", "fail", "'most' is no share of a"),
        (POOL_LIMIT, "128", "host memory", "ok", "offload= may use 128 GiB in each process"),
        (POOL_LIMIT, "all", "host memory", "fail", "'all' is no number of GiB. Set it to 64"),
        (ADDRESS, "nohost", "processes", "fail", "'nohost' is not host:port"),
        ("SLURM_NTASKS", "8", "network", "note", f"put {FLAG} into XLA_FLAGS."),
    ],
)
def test_what_hurts_has_a_remedy(variable, value, name, status, message, statuses):
    found = statuses(**{variable: value})
    assert found[name][0] == status and message in found[name][1]


def test_the_speed_of_the_network_is_asked_for_once(statuses):
    assert "network" in statuses(WORLD_SIZE="2", XLA_FLAGS=f"{ESTIMATOR}=rtt_us=2")
    assert "network" not in statuses(WORLD_SIZE="2", XLA_FLAGS=FLAG)
    assert "network" not in statuses(SLURM_NTASKS="1", WORLD_SIZE="1")


def test_the_coordinator_is_reached(statuses):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        there = statuses(**{ADDRESS: address})
    gone = statuses(**{ADDRESS: address})
    assert there["processes"] == ("ok", f"the coordinator {address} answers")
    assert gone["processes"][0] == "warn" and "open the port" in gone["processes"][1]


def test_a_second_nccl_is_warned_of(statuses, monkeypatch):
    def told(backend, gpus, installed, version=importlib.metadata.version):
        known = lambda name: "2.20" if name == installed else version(name)
        monkeypatch.setattr(importlib.metadata, "version", known)
        monkeypatch.setattr(jax, "default_backend", lambda: backend)
        monkeypatch.setattr(jax, "device_count", lambda: gpus)
        return statuses().get("tensorflow")

    status, text = told("gpu", 2, "tensorflow")
    assert status == "warn" and "tensorflow-cpu" in text
    assert not told("gpu", 2, "tensorflow-cpu") and not told("gpu", 1, "tensorflow")
    assert not told("cpu", 8, "tensorflow")
