"""What XLA is told of network cards that it takes for faster ones."""

import os

import pytest

from tests.forecast import fakes

SET = "XLA_FLAGS=--xla_gpu_analytical_latency_estimator_options=nic_speed_gbps=3"
FLAG = SET.removeprefix("XLA_FLAGS=")
NAME = FLAG.rpartition("nic_speed")[0]
SLOW = f"{NAME}rtt_us=2,nic_speed_gbps=20"
PUT = f"put {FLAG} into XLA_FLAGS before Python starts, here and on your hosts."


def told(flag):
    return f"Compiled with {flag} in XLA_FLAGS: set it on your hosts too."


@pytest.mark.parametrize(
    ("flags", "gpu", "network", "said"),
    [
        ("", "H100", 12e9, PUT),
        (f"--other=1 {FLAG}", "H100", 12e9, told(FLAG)),
        (SLOW, "H100", 12e9, told(SLOW)),
        (f"{NAME}nic_speed_gbps=50,rtt_us=2", "H100", 12e9, PUT),
        ("", "H100", 25e9, "to spare."),
        ("", "A100-80GB", 3e9, "to spare."),  # its scheduler knows no speeds
        ("", "RTX5090", 3e9, "to spare."),
    ],
)
def test_a_forecast_says_what_to_set(flags, gpu, network, said, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    cases = [fakes.case(3, 30, network_bytes=sent) for sent in (2**30, 0)]
    across, none = (str(fakes.forecast(one, name=gpu, network=network)) for one in cases)
    assert " ".join(across.split()).endswith(said)
    assert "XLA_FLAGS" not in none, "nothing crosses the network"


@pytest.mark.parametrize(
    ("network", "before", "after"),
    [
        ("12.5", "--other=1", f"--other=1 {FLAG}"),
        ("12.5", "", FLAG),
        ("12.5", f"{NAME}nic_speed_gbps=20", f"{NAME}nic_speed_gbps=20"),
        ("50", "--other=1", "--other=1"),
    ],
)
def test_the_command_line_tells_xla_once(network, before, after, run, monkeypatch):
    fakes.recorded(monkeypatch, "forecast", fakes.forecast(fakes.case(3, 30)))
    monkeypatch.setenv("XLA_FLAGS", before)
    for _ in range(2):
        assert run("forecast", "124m", "--gpus", "16xH100", "--network", network)[0] == 0
        assert os.environ["XLA_FLAGS"] == after
