"""Facts about GPUs: names, memory, rates."""

import dataclasses

import pytest

import zerojax
from tests.hlo.modules import RATES
from zerojax._hlo import gpus as _gpus

MEMORY_GB = {
    "T4": 16, "L4": 24, "L40S": 48, "A100-40GB": 40, "A100-80GB": 80, "H100": 80, "H200": 141,
    "B200": 180, "GH200": 96, "GB200": 186, "GB300": 279,
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [("64xH100", 64, "H100"), (" 8 X h200 ", 8, "H200"), ("16*A100", 16, "A100-80GB"),
     ("1024xA100-40GB", 1024, "A100-40GB"), ("2xh100-80gb", 2, "H100"),
     ("1xNVIDIA A100-SXM4-40GB", 1, "A100-40GB"), ("8xTesla T4", 8, "T4")],
)  # fmt: skip
def test_counts_and_names(text, count, name):
    assert _gpus.parse_count(text) == (count, _gpus.GPUS[name])


def test_facts_of_gpus():
    assert {name: round(gpu.memory / 1e9) for name, gpu in _gpus.GPUS.items()} == {
        name: pytest.approx(size, rel=0.08) for name, size in MEMORY_GB.items()
    }
    h100 = _gpus.GPUS["H100"]
    assert h100.rates.flops == pytest.approx(600e12)
    assert h100.rates.memory == pytest.approx(2.7e12)
    assert h100.rates.link == pytest.approx(350e9)
    assert h100.rates.network == 50e9 and h100.usable == int(0.92 * h100.memory)
    for gpu in _gpus.GPUS.values():
        assert _gpus.of_device_kind(gpu.device_kind) is gpu
    assert _gpus.of_device_kind("TPU v5") is None


def test_gpus_by_rates():
    gpu = dataclasses.replace(_gpus.GPUS["H100"], given_rates=zerojax.Rates(1, 2, 3, 4))
    assert gpu.rates.flops == 1 and gpu.usable == _gpus.GPUS["H100"].usable


@pytest.mark.parametrize(
    ("name", "gpus", "link"),
    [("T4", 1, 12.5), ("A100", 1, 25), ("A100", 8, 20.5), ("H100", 1, 50), ("H100", 4, 50),
     ("H100", 8, 28.2), ("B200", 8, 28.2),
     # a superchip's GPU has its share of a CPU, of however many superchips a host is made
     ("GH200", 1, 154), ("GH200", 4, 154), ("GB200", 4, 77), ("GB300", 72, 77)],
)  # fmt: skip
def test_the_link_to_the_host_is_that_of_its_memory_where_that_is_less(name, gpus, link):
    assert _gpus.named(name).rates.to_host(gpus) == pytest.approx(link * 1e9, rel=0.01)


@pytest.mark.parametrize(
    ("group", "on_host", "bandwidth"),
    # within a host over its links; across hosts, as many cards as members stand on one
    [(8, 8, 1e11), (16, 8, 8e10), (2, 1, 1e10), (64, 4, 4e10), (32, 16, 1e11)],
)
def test_bandwidth_of_a_group(group, on_host, bandwidth):
    assert RATES.bandwidth(group, on_host) == bandwidth


def test_a_ring_leaves_a_host_by_another_card_for_each_gpu_and_an_all_to_all_does_not():
    share = _gpus.network_share
    for kind in ("all-gather", "reduce-scatter", "all-reduce"):
        assert share(kind, 64, 8) == 1 / 8  # each byte enters a host once
        assert share(kind, 8, 1) == 1 and share(kind, 8, 8) == 0
    assert share("all-to-all", 64, 8) == 56 / 63 and share("all-to-all", 8, 8) == 0
    # 100 MB: as long as a reduce-scatter that sends eight times as much.
    assert RATES.bandwidth(64, 8, "all-to-all") == RATES.network * 63 / 56


@pytest.mark.parametrize(
    ("kind", "group", "on_host", "between", "inside"),
    [
        ("all-gather", 64, 8, 7, 56),
        ("reduce-scatter", 8, 1, 7, 0),
        ("all-gather", 8, 8, 0, 7),
        ("all-reduce", 64, 8, 2 * 3, 2 * 7),
        ("all-reduce", 400, 8, 2 * 6, 2 * 7),
        ("all-to-all", 64, 8, 1, 0),
        ("all-to-all", 8, 8, 0, 1),
        ("all-gather", 1, 1, 0, 0),
        ("all-reduce", 1, 1, 0, 0),
    ],
)
def test_hops(kind, group, on_host, between, inside):
    assert _gpus.hops(kind, group, on_host) == (between, inside)
    rates = dataclasses.replace(RATES, link_hop=1e-6, network_hop=1e-3)
    waited = 1e-6 + inside * 1e-6 + between * 1e-3
    assert rates.seconds(kind, 0, group, on_host) == pytest.approx(waited)
