"""What describes a GPU: its rates, its collectives, what XLA is told of it."""

import dataclasses

import pytest

import zerojax
from tests.hlo.modules import RATES
from zerojax._hlo import gpus as _gpus, known as _known

CHIPS = {name: gpu.chip for name, gpu in _known.GPUS.items()}


def test_gpus_by_rates():
    gpu = dataclasses.replace(_known.GPUS["H100"], given_rates=zerojax.Rates(1, 2, 3, 4))
    assert gpu.rates.flops == 1 and gpu.usable == _known.GPUS["H100"].usable


def test_float8_came_with_the_l4():
    """Twice as fast as 16 bits by the data sheets: 1,979 TFLOP/s on an H100."""
    twice = {name for name, gpu in _known.GPUS.items() if gpu.flops8}
    assert {"L4", "L40S", "H100", "B200"} <= twice
    assert twice.isdisjoint({"T4", "V100-16GB", "V100-32GB", "A100-40GB", "A100-80GB", "A10G"})
    h100 = _known.GPUS["H100"]
    assert h100.flops8 == pytest.approx(1979e12, rel=1e-3)
    assert h100.rates.flops8 == 2 * h100.rates.flops


@pytest.mark.parametrize(
    ("name", "tf32", "fp32"),
    [
        ("V100-32GB", 15.7, 15.7),  # without TF32
        ("T4", 8.1, 8.1),
        ("A100-80GB", 156, 19.5),
        ("L4", 60.5, 30.3),
        ("RTX4090", 82.6, 82.6),
        ("H100", 494.5, 67),
        ("B200", 1125, 75),
    ],
)
def test_float32_by_the_data_sheets(name, tf32, fp32):
    gpu = _known.GPUS[name]
    assert gpu.tf32 / 1e12 == pytest.approx(tf32, rel=0.01)
    assert gpu.chip.fp32 / 1e12 == pytest.approx(fp32, rel=0.02)
    assert gpu.rates.of_matmuls("f32") == gpu.tf32 * gpu.reached_flops
    assert gpu.rates.of_matmuls("f32 highest") == gpu.chip.fp32 * gpu.reached_flops
    assert gpu.rates.of_matmuls("bf16") == gpu.rates.flops


def test_a_target_config_has_what_xla_has_of_a_v100():
    """As in XLA's own `v100.txtpb`."""
    text = _known.GPUS["V100-16GB"].target_config()
    for line in (
        "shared_memory_per_core: 98304",
        "shared_memory_per_block_optin: 98304",
        "core_count: 80",
        "fpus_per_core: 64",
        "l2_cache_size: 6291456",
        "clock_rate_ghz: 1.53",
        "device_memory_size: 16935682048",
        "cuda_compute_capability { major: 7 }",
        'device_description_str: "Tesla V100-SXM2-16GB"',
    ):
        assert f"{line}\n" in text, line


def test_cuda_keeps_a_part_of_a_blocks_shared_memory_from_the_a100_on():
    kept = {name: chip.shared_per_core - chip.shared_per_block for name, chip in CHIPS.items()}
    assert {name for name, size in kept.items() if not size} == {"T4", "V100-16GB", "V100-32GB"}
    assert set(kept.values()) == {0, 1024}
    assert "cuda_compute_capability { major: 10 minor: 3 }" in _known.GPUS["B300"].target_config()


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
