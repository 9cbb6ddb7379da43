"""A forecast as text, as data and as a picture, and the case that wins."""

import json

import pytest

import zerojax
from tests.forecast import fakes
from tests.support.pictures import overlapping


def text_of(*cases, **options):
    return " ".join(str(fakes.forecast(*cases, **options)).split())


def test_the_fastest_that_fits_wins():
    slow, fast = fakes.case(2, 40, step_seconds=3.0), fakes.case(3, 30, step_seconds=2.0)
    forecast = fakes.forecast(fakes.case(0, 100, step_seconds=1.0), slow, fast)
    assert forecast.best is fast
    text = str(forecast)
    assert text.startswith("64xH100, 72.8 GiB usable of 79.1 GiB each; bytes per GPU, grads a")
    assert "\nFastest that fits: stage=3, remat 'full', 2.0 s a step, " in text
    told = json.loads(json.dumps(forecast.to_dict()))
    assert (told["best"], told["usable_bytes"]) == (2, fakes.H100.usable)
    assert [case["peak"] >> 30 for case in told["cases"]] == [100, 40, 30]
    assert "report" not in told["cases"][0]
    layers = zerojax.Schedule(order="layers", keep_layers=2)
    ordered = fakes.case(3, 30, schedule=layers, accumulate=2)
    assert f"accumulate=2, schedule={layers}, remat" in text_of(ordered)


def test_nothing_fits():
    forecast = fakes.forecast(fakes.case(0, 100), fakes.case(3, 80))
    assert forecast.best is None and forecast.to_dict()["best"] is None
    least = "Nothing fits. The least is 80.0 GiB at stage 3: use more GPUs, more microbatches"
    assert least in " ".join(str(forecast).split())
    for shown in ("Nothing fits.", "<td>100.0 GiB</td>"):
        assert shown in forecast._repr_html_()


def test_what_rests_on_the_host_has_columns_and_more_than_xla_pins_is_told_of():
    there = {"on_host": 12 * 2**30, "waited_seconds": 0.3, "step_seconds": 0.9}
    text = text_of(fakes.case(3, 30, **there))
    assert "on the host" in text and "12.0 GiB" in text and "300.0 ms" in text
    assert "on the host" not in text_of(fakes.case(3, 30)) and "XLA pins" not in text
    text = text_of(fakes.case(3, 30, pinned=96 * 2**30, **there))
    assert "96.0 GiB are in host memory if one process runs all GPUs of a host. XLA pins" in text
    assert text.endswith("set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=106 before JAX starts.")


def test_the_title_has_what_the_cases_share_and_the_dtype_in_which_they_compute():
    assert "; regather=False; bytes" in text_of(fakes.case(3, 30), settings=("regather=False",))
    assert fakes.forecast(settings=("x=1",)).to_dict()["settings"] == ["x=1"]
    narrow, share = fakes.case(3, 30, matmuls=("bfloat16",)), "3% of FLOPs in float32"
    assert "; matmuls in bfloat16; bytes per GPU" in text_of(narrow, narrow)
    wide = fakes.case(3, 30, matmuls=("bfloat16", "float32"), wide_matmuls=share)
    both = f"; matmuls in bfloat16 or bfloat16 and float32 ({share}); bytes"
    assert both in text_of(narrow, wide)
    lacking = fakes.case(3, 30, matmuls=("float32",), lacks="Ask for float16.")
    assert text_of(narrow, lacking, lacking).count("Ask for float16.") == 1


# -- the picture


def test_it_draws_memory_to_its_peak_and_times_to_the_step():
    there = fakes.case(3, 30, on_host=2**30, waited_seconds=0.3, step_seconds=0.9)
    forecast = fakes.forecast(fakes.case(0, 100), there, settings=("all over gpu",))
    figure = forecast.plot()
    memory, times = figure.axes
    for axes, ends in ((memory, [100, 30]), (times, [600, 900])):
        for row, end in enumerate(ends):
            bars = [bar for bar in axes.patches if round(bar.get_y() + 0.4) == row]
            assert max(bar.get_x() + bar.get_width() for bar in bars) == pytest.approx(end)
    assert [t.get_text() for t in memory.texts] == [" 100.0, does not fit", " 30.0"]
    assert "all over gpu" in figure.get_suptitle()
    assert not overlapping(figure)
