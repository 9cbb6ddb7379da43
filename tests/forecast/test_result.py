"""A forecast as a picture and in a notebook."""

import dataclasses

import pytest

from tests.pictures import overlapping
from zerojax._forecast.result import Case, Forecast
from zerojax._hlo import known as _known


def case(stage, peak):
    numbers = dict.fromkeys((field.name for field in dataclasses.fields(Case)), 0)
    gib = 2**30
    numbers |= {
        "stage": stage, "variant": "full", "accumulate": 1, "parameters": 20 * gib, "matmuls": (),
        "wide_matmuls": "", "groups": "",
        "optimizer": 5 * gib, "gradients": 2 * gib, "peak": peak * gib, "fits": peak < 73,
        "compute_seconds": 0.5, "exposed_seconds": 0.1, "step_seconds": 0.6,
    }  # fmt: skip
    return Case(**numbers)


def test_a_forecast_draws_memory_to_its_peak_and_times_to_the_step():
    made = Forecast("64xH100", _known.GPUS["H100"], (case(0, 100), case(3, 30)))
    figure = made.plot()
    memory, times = figure.axes
    for axes, ends in ((memory, [100, 30]), (times, [600, 600])):
        for row, end in enumerate(ends):
            bars = [bar for bar in axes.patches if round(bar.get_y() + 0.4) == row]
            assert max(bar.get_x() + bar.get_width() for bar in bars) == pytest.approx(end)
    assert [t.get_text() for t in memory.texts] == [" 100.0, does not fit", " 30.0"]
    assert not overlapping(figure)


def test_what_rests_on_the_host_has_columns_and_a_bar():
    there = dataclasses.replace(
        case(3, 30), on_host=2**30, waited_seconds=0.3, step_seconds=0.9
    )  # fmt: skip
    made = Forecast("64xH100", _known.GPUS["H100"], (there,))
    text = str(made)
    assert "on the host" in text and "1.0 GiB" in text and "300.0 ms" in text
    _, times = made.plot().axes
    assert max(bar.get_x() + bar.get_width() for bar in times.patches) == pytest.approx(900)
    assert "XLA pins" not in text
    assert "on the host" not in str(Forecast("64xH100", _known.GPUS["H100"], (case(3, 30),)))


def test_more_than_xla_pins_is_told_of():
    there = dataclasses.replace(case(3, 30), on_host=12 * 2**30, pinned=96 * 2**30)
    text = " ".join(str(Forecast("64xH100", _known.GPUS["H100"], (there,))).split())
    assert "96.0 GiB are in host memory if one process runs all GPUs of a host. XLA pins" in text
    assert text.endswith("set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=106 before JAX starts.")


def test_groups_are_named_once_in_titles_and_in_advice():
    cases = [dataclasses.replace(case(3, peak), groups="params over gpu") for peak in (30, 40)]
    made = Forecast("64xH100", _known.GPUS["H100"], tuple(cases))
    title, advice = " ".join(str(made).split()).split("Fastest that fits: ")
    assert title.count("params over gpu") == 1
    assert advice.startswith("stage=3, params over gpu, remat 'full', 600.0 ms a step")
    figure = made.plot()
    assert figure.get_suptitle().endswith("64xH100, compiled; params over gpu")
    assert not overlapping(figure)


def test_the_title_says_in_which_dtype_it_computes():
    cases = [dataclasses.replace(case(3, 30), matmuls=(name,)) for name in ("bfloat16",) * 2]
    title = Forecast("64xH100", _known.GPUS["H100"], tuple(cases))._title()
    assert "; matmuls in bfloat16; bytes per GPU" in title
    wide = "3% of FLOPs in float32, most at model.py:12"
    cases.append(dataclasses.replace(cases[0], matmuls=("bfloat16", "float32"), wide_matmuls=wide))
    title = Forecast("64xH100", _known.GPUS["H100"], tuple(cases))._title()
    assert f"; matmuls in bfloat16 or bfloat16 and float32 ({wide}); bytes" in title


def test_notebooks_get_a_table():
    made = Forecast("64xH100", _known.GPUS["H100"], (case(0, 100),))
    assert "Nothing fits." in made._repr_html_() and "<td>100.0 GiB</td>" in made._repr_html_()
