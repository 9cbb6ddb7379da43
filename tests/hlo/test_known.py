"""The GPUs that are known: names, memory, rates, and what the guide says of them."""

import dataclasses
import pathlib
import re

import pytest

import zerojax
from zerojax._hlo import known as _known
from zerojax._hlo.gpus import CUDA_13

GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "gpus.md"
MEMORY_GB = {
    "T4": 16, "L4": 24, "L40S": 48, "A10G": 24, "RTX4090": 24, "RTX5090": 32, "V100-16GB": 16,
    "V100-32GB": 32, "A100-40GB": 40, "A100-80GB": 80, "H20": 96, "H100": 80, "H200": 141,
    "B200": 180, "B300": 270, "GH200": 96, "GB200": 186, "GB300": 279,
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [("64xH100", 64, "H100"), (" 8 X h200 ", 8, "H200"), ("16*A100", 16, "A100-80GB"),
     ("1024xA100-40GB", 1024, "A100-40GB"), ("2xh100-80gb", 2, "H100"),
     ("1xNVIDIA A100-SXM4-40GB", 1, "A100-40GB"), ("8xTesla T4", 8, "T4"),
     ("400xV100", 400, "V100-32GB"), ("8xTesla V100-SXM2-32GB", 8, "V100-32GB"),
     ("8xV100-16GB", 8, "V100-16GB"), ("2xRTX 4090", 2, "RTX4090"), ("1xrtx5090", 1, "RTX5090"),
     ("4xNVIDIA GeForce RTX 4090", 4, "RTX4090"), ("8xH20-96GB", 8, "H20"),
     ("8xNVIDIA B300 SXM6 AC", 8, "B300")],
)  # fmt: skip
def test_counts_and_names(text, count, name):
    assert _known.parse_count(text) == (count, _known.GPUS[name])


def test_facts_of_gpus():
    assert {name: round(gpu.memory / 1e9) for name, gpu in _known.GPUS.items()} == {
        name: pytest.approx(size, rel=0.08) for name, size in MEMORY_GB.items()
    }
    h100 = _known.GPUS["H100"]
    assert h100.rates.flops == pytest.approx(600e12)
    assert h100.rates.memory == pytest.approx(2.7e12)
    assert h100.rates.link == pytest.approx(350e9)
    assert h100.rates.network == 50e9 and h100.usable == int(0.92 * h100.memory)


def test_gpus_by_what_they_report_to_jax():
    for gpu in _known.GPUS.values():
        assert _known.of_device_kind(gpu.device_kind) is gpu
    assert _known.of_device_kind("Tesla V100-SXM2-32GB") is _known.GPUS["V100-32GB"]
    assert _known.of_device_kind("TPU v5") is None and _known.of_device_kind("") is None


def test_gpus_before_the_a100_compute_in_float16():
    half = {name for name, gpu in _known.GPUS.items() if gpu.half == "float16"}
    assert half == {"T4", "V100-16GB", "V100-32GB"}


def test_cuda_13_compiles_for_all_but_v100s():
    older = {name for name, gpu in _known.GPUS.items() if gpu.chip.capability < CUDA_13}
    assert older == {"V100-16GB", "V100-32GB"}


@pytest.mark.parametrize(
    ("name", "gpus", "link"),
    [("T4", 1, 12.5), ("A100", 1, 25), ("A100", 8, 20.5), ("H100", 1, 50), ("H100", 4, 50),
     ("H100", 8, 28.2), ("B200", 8, 28.2), ("B300", 8, 33.3), ("V100-16GB", 1, 12.5),
     ("V100-16GB", 8, 6.8), ("V100-32GB", 8, 12.5), ("V100-32GB", 16, 6.4), ("RTX5090", 2, 50),
     # a superchip's GPU has its share of a CPU, of however many superchips a host is made
     ("GH200", 1, 154), ("GH200", 4, 154), ("GB200", 4, 77), ("GB300", 72, 77)],
)  # fmt: skip
def test_the_link_to_the_host_is_that_of_its_memory_where_that_is_less(name, gpus, link):
    assert _known.named(name).rates.to_host(gpus) == pytest.approx(link * 1e9, rel=0.01)


def test_a_dgx_2_has_half_a_card_for_each_gpu():
    """As the ZeRO paper's 25 of them: 800 Gb/s between nodes of 16."""
    assert _known.named("V100").machine.network == 800e9 / 8 / 16


def test_the_guide_lists_every_gpu_with_its_numbers():
    rows = re.findall(r"^\| (\S+) \|(.*)\|$", GUIDE.read_text(), flags=re.MULTILINE)
    listed = {name: cells.split(" | ")[:6] for name, cells in rows if name in _known.GPUS}
    assert list(listed) == list(_known.GPUS)
    for name, cells in listed.items():
        gpu, machine = _known.GPUS[name], _known.GPUS[name].machine
        numbers = [float(cell.strip()) for cell in cells]
        assert numbers == pytest.approx(
            [
                gpu.memory / 2**30,
                gpu.memory_rate / 1e12,
                gpu.flops / 1e12,
                machine.link / 1e9,
                machine.network * 8 / 1e9,
                machine.host / 1e9,
            ],
            rel=5e-3,
        ), name


def test_rates_of_a_known_gpu_with_others_in_their_place():
    """As the command line has them by --network and --host-link."""
    known = _known.GPUS["H100"].rates
    rates = zerojax.rates_of("h100", link_hop=1.5e-6, network=12.5e9)
    assert rates == dataclasses.replace(known, link_hop=1.5e-6, network=12.5e9) != known
    assert known.to_host(8) < zerojax.rates_of("H100", host=60e9).to_host(8) == 60e9
    assert zerojax.rates_of("H100", host=60e9, host_memory=80e9).to_host(8) == 5e9


def test_rates_in_other_units_or_of_unknown_gpus_are_refused():
    with pytest.raises(ValueError, match=r"Pass network=12.5e9 for 12.5 GB/s"):
        zerojax.rates_of("H100", network=12.5)
    with pytest.raises(ValueError, match=r"no facts about a GPU 'H9'. Name one of"):
        zerojax.rates_of("H9")
