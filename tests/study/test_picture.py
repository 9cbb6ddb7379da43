"""The picture of a study: its lines, its labels, and that they can be read on a phone."""

import matplotlib.pyplot as plt
import pytest

from tests.pictures import overlapping
from tests.study import fakes
from zerojax import _figures
from zerojax._study.result import Study


@pytest.fixture
def drawn():
    def draw(cells):
        figure = Study(tuple(cells)).plot()
        figure.canvas.draw()
        return figure

    yield draw
    plt.close("all")


def swept(models=("7.5b",), stages=(1, 2, 3), asked=(4, "largest"), **given):
    return [
        fakes.cell(f"{count}xH100", stage, rows, model, tflops=300.0 + 20 * stage + count / 10,
                   **{"rows": stage + count // 16} if rows == "largest" else {}, **given)
        for model in models for count in (64, 128, 400) for stage in stages for rows in asked
    ]  # fmt: skip


def lines(axes):
    return {line.get_label(): line for line in axes.lines}


def test_each_model_has_a_panel_for_one_for_all_and_for_the_rows(drawn):
    figure = drawn(swept(models=("7.5b", "60b")))
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    panels = ["TFLOP/s of each GPU", "PFLOP/s of all", "rows on each GPU"]
    assert titles == [f"{model}, {panel}" for model in ("7.5b", "60b") for panel in panels]
    assert [axes.get_xlabel() for axes in figure.axes] == ["", "", "H100s"] * 2
    each, together, rows = figure.axes[:3]
    line = lines(each)["stage 2, largest rows"]
    assert list(line.get_xdata()) == [64, 128, 400]
    assert list(line.get_ydata()) == pytest.approx([346.4, 352.8, 380])
    assert lines(together)["stage 3, 4 rows"].get_ydata()[2] == pytest.approx(400 * 400 / 1e3)
    proportion = lines(together)["in proportion"]
    assert list(proportion.get_ydata()) == pytest.approx([0.3664 * n for n in (64, 128, 400)])
    assert list(lines(rows)) == [f"stage {stage}, largest rows" for stage in (1, 2, 3)]
    assert list(lines(rows)["stage 1, largest rows"].get_ydata()) == [5, 9, 26]


def test_it_is_legible_on_a_phone(drawn):
    """Texts do not overlap, and are at least 11 pixels high where the picture is 390 wide."""
    figure = drawn(swept(models=("7.5b", "mixtral-8x7b")))
    for axes in figure.axes:  # without the ticks beyond the axis, which are not drawn
        axes.set_yticks([tick for tick in axes.get_yticks() if tick <= axes.get_ylim()[1]])
    assert not overlapping(figure)
    inch = 390 / figure.get_figwidth()
    texts = [text for text in figure.findobj(plt.Text) if text.get_text() and text.get_visible()]
    assert len(texts) > 30 and min(text.get_fontsize() for text in texts) / 72 * inch >= 11
    assert figure.get_figwidth() == _figures.PHONE < figure.get_figheight()
    for axes in figure.axes:
        highest = max(value for line in axes.lines for value in line.get_ydata())
        assert axes.get_ylim() == (0, pytest.approx(1.1 * highest)), "no marker is cut off"
    assert [t.get_text() for t in figure.axes[0].get_xticklabels()] == ["64", "128", "400"]


def test_the_legend_names_each_line_once(drawn):
    figure = drawn(swept(models=("7.5b", "60b")))
    (legend,) = figure.legends
    named = [text.get_text() for text in legend.get_texts()]
    wanted = {f"stage {stage}, {rows} rows" for stage in (1, 2, 3) for rows in (4, "largest")}
    assert set(named) == wanted | {"in proportion"} and len(named) == 7


def test_what_does_not_fit_is_marked_and_what_failed_is_not(drawn):
    cells = [*swept(stages=(3,), asked=(4,)), fakes.cell("64xH100", 2, peak=90),
             fakes.cell("128xH100", 2, failed="no luck")]  # fmt: skip
    figure = drawn(cells)
    assert len(figure.axes) == 2, "no rows to draw"
    missing = lines(figure.axes[0])["does not fit"]
    assert (list(missing.get_xdata()), list(missing.get_ydata())) == ([64], [0])
    assert list(lines(figure.axes[0])["stage 2, 4 rows"].get_xdata()) == []


def test_kinds_of_gpus_have_panels_of_their_own(drawn):
    cells = swept(asked=(4,)) + [fakes.cell("64xA100-80GB", tflops=150.0)]
    figure = drawn(cells)
    assert [axes.get_xlabel() for axes in figure.axes] == ["", "H100s", "", "A100-80GBs"]


def test_it_is_written(drawn, tmp_path):
    path = tmp_path / "study.png"
    Study(tuple(swept())).plot(str(path))
    assert path.stat().st_size > 10_000
