"""What XLA is told of slow network cards."""

import dataclasses
import os
import subprocess
import sys

import pytest

from tests.forecast.test_result import case
from zerojax._forecast import network as _network
from zerojax._forecast.result import Forecast
from zerojax._hlo import known as _known

TOLD = {"XLA_FLAGS": f"--other=1 {_network.FLAG}"}


def gpu(name, network):
    known = _known.GPUS[name]
    return dataclasses.replace(known, given_rates=dataclasses.replace(known.rates, network=network))


@pytest.mark.parametrize(
    ("name", "network", "wanted"),
    [
        ("H100", 12.5e9, True),
        ("H100", 25e9, False),
        ("B200", 12e9, True),
        ("A100-80GB", 3e9, False),
        ("RTX5090", 3e9, False),
    ],
)
def test_xla_misjudges_cards_that_are_slower_than_it_thinks(name, network, wanted):
    assert _network.is_misjudged(gpu(name, network)) == wanted
    assert bool(_network.advice(gpu(name, network), {})) == wanted


def test_what_xla_is_told_is_what_the_docs_say():
    told = "XLA_FLAGS=--xla_gpu_analytical_latency_estimator_options=nic_speed_gbps=3"
    assert told == f"XLA_FLAGS={_network.FLAG}" and f"--{_network.NAME}=" in _network.FLAG


def test_xla_is_told_once_and_what_it_is_told_stays():
    environ = {}
    _network.tell(environ)
    assert environ == {"XLA_FLAGS": _network.FLAG}
    told = {"XLA_FLAGS": f"--{_network.NAME}=rtt_us=2,nic_speed_gbps=20"}
    assert _network.told(told) and _network.told(TOLD) and not _network.told({})
    assert not _network.told({"XLA_FLAGS": f"--{_network.NAME}=nic_speed_gbps=50"})
    assert not _network.told({"XLA_FLAGS": f"--{_network.NAME}=rtt_us=2"})
    _network.tell(environ := dict(told))
    assert environ == told
    _network.tell(environ := {"XLA_FLAGS": "--other=1"})
    assert environ == TOLD


def test_a_forecast_says_what_to_set(monkeypatch):
    there = dataclasses.replace(case(3, 30), network_bytes=2**30)
    text = lambda network, one=there: " ".join(
        str(Forecast("64xH100", gpu("H100", network), (one,))).split()
    )
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert text(12e9).endswith(
        f"put {_network.FLAG} into XLA_FLAGS before Python starts, here and on your hosts."
    )
    assert "XLA_FLAGS" not in text(25e9)
    assert "XLA_FLAGS" not in text(12e9, case(3, 30))  # nothing crosses the network
    monkeypatch.setenv("XLA_FLAGS", TOLD["XLA_FLAGS"])
    assert text(12e9).endswith(
        f"Compiled with {_network.FLAG} in XLA_FLAGS: set it on your hosts too."
    )
    monkeypatch.setenv("XLA_FLAGS", f"--{_network.NAME}=nic_speed_gbps=50,rtt_us=2")
    assert "before Python starts" in text(12e9)


@pytest.mark.gpu_code
def test_the_command_line_tells_xla_of_a_slow_network():
    command = [sys.executable, "-m", "zerojax", "forecast", "124m", "--gpus", "16xH100"]
    command += ["--network", "6.25", "--stages", "3"]
    fast = f"--{_network.NAME}=nic_speed_gbps=50"  # what XLA takes it for
    runs = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
        for environ in (
            {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
            os.environ | {"XLA_FLAGS": fast},
        )
    ]
    told, taken_for_fast = (" ".join(run.communicate()[0].split()) for run in runs)
    assert f"Compiled with {_network.FLAG} in XLA_FLAGS" in told
    assert f"put {_network.FLAG} into XLA_FLAGS" in taken_for_fast
    step = lambda text: float(text.split("remat 'full', ")[1].split(" ms")[0])
    assert step(told) < 0.97 * step(taken_for_fast)
