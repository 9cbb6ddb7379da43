"""The GPUs that are known: their names, memory and rates, and how fast collectives run on them."""

import dataclasses
import math
import pathlib
import re
import types

import pytest

import zerojax
from tests.hlo.modules import GPUS, RATES, gpu_named

GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "gpus.md"
V100S = {"V100-16GB", "V100-32GB"}


def test_gpus_by_their_names():
    for text, name in {
        "h200": "H200", "A100": "A100-80GB", "h100-80gb": "H100", "V100": "V100-32GB",
        "Tesla V100-SXM2-32GB": "V100-32GB", "NVIDIA A100-SXM4-40GB": "A100-40GB",
        "RTX 4090": "RTX4090",
    }.items():  # fmt: skip
        assert gpu_named(text) is GPUS[name], text
        for counted in (f"64x{text}", f" 64 X {text} ", f"64*{text}"):
            with pytest.raises(ValueError, match="does not hold 64 GPUs"):
                zerojax.aot.mesh(counted, shape=(2, 2))
    peak = lambda kind: zerojax.tools.peak_flops([types.SimpleNamespace(device_kind=kind)])
    assert [peak(gpu.device_kind) for gpu in GPUS.values()] == [g.flops for g in GPUS.values()]
    assert peak("TPU v5") is None and peak("") is None


def test_the_guide_lists_every_gpu_with_its_numbers():
    rows = re.findall(r"^\| (\S+) \|(.*)\|$", GUIDE.read_text(), flags=re.MULTILINE)
    listed = {name: cells.split(" | ")[:6] for name, cells in rows if name in GPUS}
    assert list(listed) == list(GPUS) and len(GPUS) == 18
    for name, cells in listed.items():
        gpu = GPUS[name]
        facts = gpu.memory / 2**30, gpu.memory_rate / 1e12, gpu.flops / 1e12, gpu.link / 1e9
        facts += gpu.network * 8 / 1e9, gpu.host / 1e9
        assert [float(cell.strip()) for cell in cells] == pytest.approx(facts, rel=5e-3), name


def test_what_each_generation_computes_in():
    named = lambda holds: {name for name, gpu in GPUS.items() if holds(gpu)}
    assert named(lambda gpu: gpu.half == "float16") == {"T4", *V100S}
    assert named(lambda gpu: gpu.capability < (7, 5)) == V100S, "CUDA 13 knows the others"
    # float8 came with the L4; by the data sheets it is twice as fast as 16 bits.
    before = {"T4", *V100S, "A100-40GB", "A100-80GB", "A10G"}
    assert named(lambda gpu: not gpu.flops8) == before
    assert GPUS["H100"].rates.flops8 == 2 * GPUS["H100"].rates.flops
    speeds = ("V100-32GB", 15.7, 15.7), ("A100-80GB", 156, 19.5), ("H100", 494.5, 67)
    for name, tf32, fp32 in speeds:
        gpu, rates = GPUS[name], zerojax.tools.rates_of(name)
        assert gpu.tf32 / 1e12 == pytest.approx(tf32, rel=0.01)
        assert gpu.fp32 / 1e12 == pytest.approx(fp32, rel=0.02)
        assert rates.of_matmuls("f32") == gpu.tf32 * gpu.reached_flops
        assert rates.of_matmuls("f32 highest") == gpu.fp32 * gpu.reached_flops
        assert rates.of_matmuls("bf16") == rates.flops


def test_programs_reach_a_part_of_the_data_sheet_and_users_may_say_which():
    """As the command line does by --network and --host-link."""
    known, gpu = zerojax.tools.rates_of("H100"), GPUS["H100"]
    assert (known.flops, known.memory, known.link) == pytest.approx((600e12, 2.7e12, 350e9))
    assert known.network == 50e9 and gpu.usable == int(0.92 * gpu.memory)
    rates = zerojax.tools.rates_of("h100", link_hop=1.5e-6, network=12.5e9)
    assert rates == dataclasses.replace(known, link_hop=1.5e-6, network=12.5e9) != known
    assert known.to_host(8) < zerojax.tools.rates_of("H100", host=60e9).to_host(8) == 60e9
    assert zerojax.tools.rates_of("H100", host=60e9, host_memory=80e9).to_host(8) == 5e9
    with pytest.raises(ValueError, match=r"Pass network=12.5e9 for 12.5 GB/s"):
        zerojax.tools.rates_of("H100", network=12.5)


@pytest.mark.parametrize(
    ("name", "links"),
    [
        ("H100", {1: 50, 4: 50, 8: 28.2}),
        ("V100-32GB", {8: 12.5, 16: 6.4}),
        # A superchip's GPU has its share of a CPU, of however many superchips a host is made.
        ("GH200", {1: 154, 4: 154}),
    ],
)
def test_the_link_to_the_host_is_that_of_its_memory_where_that_is_less(name, links):
    """GB/s, by the GPUs of a host that copy at once."""
    rates = zerojax.tools.rates_of(name)
    assert {gpus: rates.to_host(gpus) / 1e9 for gpus in links} == pytest.approx(links, rel=0.01)


@pytest.mark.parametrize(
    ("name", "links"),
    [
        ("RTX5090", {2: 35, 4: 35, 8: 30.7}),  # measured: 35 and 28, NVIDIA/nccl#1639
        ("RTX4090", {2: 17.5, 8: 17.5}),
        ("L40S", {2: 24.9, 8: 24.9}),
    ],
)
def test_geforces_send_through_the_memory_of_their_host(name, links):
    """GB/s of a collective inside a host, and as many between hosts as their cards allow."""
    rates = zerojax.tools.rates_of(name)
    found = {gpus: rates.bandwidth(gpus, gpus) / 1e9 for gpus in links}
    assert found == pytest.approx(links, rel=0.01)
    assert rates.bandwidth(16, 8) == min(rates.bandwidth(8, 8), 8 * rates.network)
    with_peers = zerojax.tools.rates_of(name, link=50e9)
    assert with_peers.bandwidth(8, 8) == 50e9


def test_a_target_config_has_what_xla_has_of_a_v100():
    """As in XLA's own `v100.txtpb`. From the A100 on, CUDA keeps 1 KiB of a block's memory."""
    text = GPUS["V100-16GB"].target_config()
    for line in (
        "shared_memory_per_core: 98304", "core_count: 80", "fpus_per_core: 64",
        "l2_cache_size: 6291456", "clock_rate_ghz: 1.53", "device_memory_size: 16935682048",
        "cuda_compute_capability { major: 7 }", 'device_description_str: "Tesla V100-SXM2-16GB"',
    ):  # fmt: skip
        assert f"{line}\n" in text, line
    assert "cuda_compute_capability { major: 10 minor: 3 }" in GPUS["B300"].target_config()
    sizes = r"shared_memory_per_core: (\d+)|shared_memory_per_block_optin: (\d+)"
    shared = {name: re.findall(sizes, gpu.target_config()) for name, gpu in GPUS.items()}
    kept = {name: int(core[0]) - int(block[1]) for name, (core, block) in shared.items()}
    assert kept == {name: 0 if name in {"T4", *V100S} else 1024 for name in GPUS}


@pytest.mark.parametrize(
    ("kind", "group", "on_host", "share", "between", "inside"),
    [
        # Rings leave a host by another card for each GPU, so that each byte enters it once.
        ("all-gather", 64, 8, 1 / 8, 7, 56),
        ("reduce-scatter", 8, 1, 1, 7, 0),
        ("all-reduce", 400, 8, 1 / 8, 2 * 6, 2 * 7),
        ("all-gather", 8, 8, 0, 0, 7),
        ("all-to-all", 64, 8, 56 / 63, 1, 0),
        ("all-to-all", 8, 8, 0, 0, 1),
        ("collective-permute", 64, 8, 1, 1, 0),
    ],
)
def test_the_share_of_bytes_that_leaves_a_host_and_the_hops(
    kind, group, on_host, share, between, inside
):
    bandwidth = dataclasses.replace(RATES, link=math.inf).bandwidth(group, on_host, kind)
    assert RATES.network / bandwidth == pytest.approx(share)
    slower = RATES.bandwidth(group, on_host, kind)  # of the cards and the links
    assert slower == min(RATES.link, bandwidth)
    rates = dataclasses.replace(RATES, link_hop=1e-6, network_hop=1e-3)
    waited = 1e-6 + inside * 1e-6 + between * 1e-3
    assert rates.seconds(kind, 0, group, on_host) == pytest.approx(waited)
