"""A study as text and as a picture: its table, what it concludes, and that both can be read."""

import json

import matplotlib.pyplot as plt
import pytest

from tests.forecast import fakes
from tests.support.pictures import overlapping

COUNTS = (64, 128, 400)


def text_of(*cells):
    return " ".join(str(fakes.study(*cells)).split())


def scaled(*throughputs, counts=COUNTS, asked="largest", **given):
    """Cells of ever more GPUs, each of which does so much."""
    return [
        fakes.cell(f"{count}xH100", asked=asked, tflops=each, **{"rows": 4 * at + 4} | given)
        for at, (count, each) in enumerate(zip(counts, throughputs, strict=False))
    ]


def test_the_table_has_a_line_for_each_cell():
    made = fakes.study(
        fakes.cell(asked=4, tflops=440.4),
        fakes.cell(asked="largest", rows=22, tflops=0.12345),
        fakes.cell(stage=1, peak=90),
        fakes.cell(stage=2, failed="out of luck", lacks="Ask for float16."),
    )
    text = str(made)
    assert [" ".join(line.split()) for line in text.splitlines()[3:7]] == [
        "7.5b 64xH100 3 4 30.0 GiB 440 44.5% 262,144 20%",
        "7.5b 64xH100 3 max 22 30.0 GiB 0.123 0.0% 1,441,792 20%",
        "7.5b 64xH100 1 4 90.0 GiB no room - - -",
        "7.5b 64xH100 2 4 - failed - - -",
    ]
    assert "Failed: 7.5b on 64xH100, stage 2, 4 rows: out of luck" in text
    assert "Best for 7.5b: 440 TFLOP/s of each GPU, at stage 3 on 64xH100 with 4 rows." in text
    assert "<td>max 22</td>" in made._repr_html_() and "out of luck" in made._repr_html_()


def test_growth_with_the_largest_rows_is_super_linear():
    growing, level = scaled(400.0, 440.0, 500.0), scaled(400.0, 440.0, 403.0, stage=2)
    fixed = scaled(400.0, 440.0, 500.0, asked=4, rows=4, stage=1)
    others = [*scaled(300.0, peak=90, model="60b"), *scaled(1.0, stage=0)]
    made = fakes.study(*reversed(growing), *level, *fixed, *others)
    (growth,) = made.super_linear
    assert growth == (growing[0], growing[2])
    line = (
        "Super-linear: 7.5b at stage 3. From 64 to 400 H100s, each GPU does 400 and then 500 "
        "TFLOP/s, with 4 and then 12 rows."
    )
    assert str(made).endswith(line)
    told = json.loads(json.dumps(made.to_dict()))
    for case, one in zip(told["cases"], made.cases, strict=True):
        assert (case["model"], case["stage"], case["peak"]) == (one.model, one.stage, one.peak)


def test_the_best_is_of_one_model_and_fits():
    cells = [*scaled(400.0, 440.0, 430.0), *scaled(600.0, model="60b"), *scaled(700.0, peak=90)]
    made = fakes.study(*cells, fakes.cell(failed="no luck"))
    assert made.best("7.5b") is cells[1] and made.best("60b") is cells[3]
    assert made.best("other") is None
    nothing = fakes.cell(peak=90), fakes.cell(stage=2, peak=85), fakes.cell(failed="no luck")
    least = "7.5b fits nowhere. The least is 85.0 GiB: use more GPUs, a higher"
    assert least in text_of(*nothing) and "fits nowhere" not in text_of(nothing[2])


# -- the picture


@pytest.fixture
def drawn():
    def draw(*cells):
        figure = fakes.study(*cells).plot()
        figure.canvas.draw()
        return figure

    yield draw
    plt.close("all")


def swept(model, asked=(4, "largest")):
    def one(count, stage, rows):
        tflops = 300.0 + 20 * stage + count / 10
        found = stage + count // 16 if rows == "largest" else rows
        return fakes.cell(f"{count}xH100", stage, rows, model, rows=found, tflops=tflops)

    return [one(count, stage, rows) for count in COUNTS for stage in (1, 2, 3) for rows in asked]


def lines(axes):
    points = lambda line: zip(line.get_xdata(), line.get_ydata(), strict=True)
    return {line.get_label(): dict(points(line)) for line in axes.lines}


def test_each_model_has_a_panel_for_a_gpu_and_for_the_rows(drawn):
    """Legible on a phone: texts do not overlap, and are at least 11 pixels high where the picture
    is 390 wide."""
    models = "7.5b", "mixtral-8x7b"
    figure = drawn(*swept(models[0]), *swept(models[1]), fakes.cell(failed="no luck"))
    panels = "TFLOP/s of each GPU", "rows on each GPU"
    titled = [axes.get_title(loc="left") for axes in figure.axes]
    assert titled == [f"{model}, {panel}" for model in models for panel in panels]
    each, rows = map(lines, figure.axes[:2])
    assert each["stage 2, largest rows"] == pytest.approx({64: 346.4, 128: 352.8, 400: 380})
    assert rows["stage 1, largest rows"] == {64: 5, 128: 9, 400: 26}
    for axes in figure.axes:  # without the ticks beyond the axis, which are not drawn
        axes.set_yticks([tick for tick in axes.get_yticks() if tick <= axes.get_ylim()[1]])
    assert not overlapping(figure)
    texts = [text for text in figure.findobj(plt.Text) if text.get_text() and text.get_visible()]
    smallest = min(text.get_fontsize() for text in texts) / 72 * 390 / figure.get_figwidth()
    assert len(texts) > 20 and smallest >= 11
