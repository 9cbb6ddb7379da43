"""An audit as a picture."""

import pytest

import zerojax
from tests.audit.models import audited
from tests.stored import stored
from zerojax._audit.timeline import drawn_once
from zerojax._hlo import (
    schedule as _schedule,
)


def test_the_timeline_leaves_no_room_for_later_runs_of_a_loop():
    spans = [
        _schedule.Span(0.0, 1.0, "a", "compute", 4),
        _schedule.Span(4.0, 5.0, "b", "compute", 1),
        _schedule.Span(4.5, 6.0, "all-gather", "collectives", 1),
    ]
    moved = [(s.start, s.end) for s in drawn_once(spans)]
    assert moved == [(0.0, 1.0), (1.0, 2.0), (1.5, 3.0)]


def test_plots_need_times():
    report = audited("mlp", 3)[0]
    with pytest.raises(ValueError, match=r"no times to plot: .* for cpu. Pass gpu='H100' to audit"):
        report.plot()


def test_plot_writes_a_picture(tmp_path):
    pytest.importorskip("matplotlib").use("agg")
    import matplotlib.pyplot as plt

    report = zerojax.audit(audited("gpt", 3)[2], gpu="H100")
    figure = report.plot(str(tmp_path / "step.png"))
    assert (tmp_path / "step.png").read_bytes()[:4] == b"\x89PNG"
    (axes,) = figure.axes
    labels = {t.get_text() for t in axes.get_legend().get_texts()}
    assert labels >= {"compute", "all-gather", "reduce-scatter", "exposed"}
    assert any(t.get_text() == "x 3" for t in axes.texts), "loops say how often they run"
    assert "on 8 x H100" in axes.get_title()
    caveat = "compiled for CPUs, where no collective runs beside compute"
    assert axes.get_title().endswith(f"exposed\n({caveat})") and f"; {caveat})" in str(report)
    plt.close(figure)


def test_a_program_for_gpus_needs_no_caveat():
    report = zerojax.audit(stored("step3-8xH100-jax0.12"), gpu="H100")
    assert report.gpu is not None and not report.caveat and "CPU" not in str(report)


def test_plot_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.pyplot", None)
    report = zerojax.audit(audited("mlp", 3)[2], gpu="H100")
    with pytest.raises(ModuleNotFoundError, match="Run: pip install matplotlib"):
        report.plot()
