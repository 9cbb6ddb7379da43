"""Pictures show what is there, stay within their frame, and ask for matplotlib by name."""

import dataclasses
import pathlib
import sys

import jax
import jax.numpy as jnp
import matplotlib
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex

import zerojax
from zerojax._forecast import forecast as _forecast
from zerojax._hlo import gpus as _gpus
from zerojax._plan import show as _show
from zerojax._plan.show import COLOURS

matplotlib.use("agg")
ROOT = pathlib.Path(__file__).parents[1]


def make_state():
    params = {"w": jnp.ones((64, 32)), "b": jnp.ones(3)}
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))


def filled(figure):
    """(x, y, width, height) of every filled box of the first axes, and its colour."""
    patches = [patch for patch in figure.axes[0].patches if patch.get_fill()]
    return [
        (patch.get_x(), patch.get_y(), patch.get_width(), patch.get_height(),
         to_hex(patch.get_facecolor()))
        for patch in patches
    ]  # fmt: skip


def overlapping(figure):
    """Pairs of texts that lie on each other, and texts that leave the figure."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    texts = [t for t in figure.findobj(matplotlib.text.Text) if t.get_text() and t.get_visible()]
    boxes = [(t.get_text(), t.get_window_extent(renderer)) for t in texts]
    width, height = canvas.get_width_height()
    outside = [  # numbers: matplotlib keeps, and does not draw, ticks beyond the axis
        name for name, box in boxes
        if not name.isdigit()
        and (box.x0 < -1 or box.y0 < -1 or box.x1 > width + 1 or box.y1 > height + 1)
    ]  # fmt: skip
    pairs = [
        (one, other)
        for i, (one, a) in enumerate(boxes)
        for other, b in boxes[i + 1 :]
        if min(a.x1, b.x1) - max(a.x0, b.x0) > 2 and min(a.y1, b.y1) - max(a.y0, b.y0) > 2
    ]
    return outside + pairs


@pytest.mark.parametrize("stage", [1, 3])
def test_a_plan_draws_what_each_device_holds(stage, tmp_path):
    plan = zerojax.plan(make_state, stage=stage)
    figure = plan.plot(str(tmp_path / "plan.png"))
    assert (tmp_path / "plan.png").stat().st_size > 5000
    boxes = filled(figure)
    rows = [leaf.path for leaf in sorted(plan.leaves, key=lambda leaf: -leaf.nbytes)]
    for path, kind, cut in (("params/w", "params", stage == 3),
                            ("opt_state/0/mu/w", "opt_state", True)):  # fmt: skip
        row = rows.index(path)
        mine = [box for box in boxes if abs(box[1] - (row - 0.38)) < 1e-6]
        assert len(mine) == 8 and {box[4] for box in mine} == {COLOURS[kind]}
        for device, (x, _, width, _, _) in enumerate(mine):
            share = 0.92 / 8 if cut else 0.92
            assert width == pytest.approx(share)
            assert x == pytest.approx(device + (share * device if cut else 0))
    assert not overlapping(figure)


def test_long_paths_and_many_leaves_keep_their_frame():
    kernel = jax.ShapeDtypeStruct((640, 64), jnp.float32)
    params = {f"encoder_{n}/a_rather_long_name_of_a_module/kernel": kernel for n in range(30)}
    plan = zerojax.plan((params, ()), stage=3)
    figure = plan.plot()
    assert not overlapping(figure)
    assert "14 smaller leaves" in figure.axes[0].get_xlabel()
    assert len(filled(figure)) == 16 * 8


def test_two_cut_dimensions_are_a_rectangle():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    plan = zerojax.plan(
        make_state, stage=3, mesh=mesh, overrides={"w": PartitionSpec("data", "tensor")}
    )
    leaf = next(leaf for leaf in plan.leaves if leaf.path == "params/w")
    found = _show.parts(plan, leaf, list(mesh.devices.flat))
    index = NamedSharding(mesh, leaf.spec).devices_indices_map((64, 32))
    for device, (rows, columns) in zip(mesh.devices.flat, found, strict=True):
        a, b = index[device]
        assert rows == (a.start / 64, a.stop / 64)
        assert columns == (b.start / 32, b.stop / 32)
    box = filled(plan.plot())[3]  # device 3: second rows, second half of the columns
    assert box[:4] == pytest.approx((3.46, -0.38 + 0.76 / 4, 0.46, 0.76 / 4))


def test_show_tells_which_device_holds_what(capsys):
    plan = zerojax.plan(make_state, stage=3)
    plan.show("params/w")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "params/w: float32[64, 32], 1.0 KiB of 8.0 KiB on each device"
    assert lines[1].split() == ["[0:8,", ":]", "device", "0"] and len(lines) == 9
    plan.show("params/b")
    assert "on each device, whole: " in capsys.readouterr().out
    with pytest.raises(
        ValueError, match=r"no leaf 'params/x' in this plan. Paths are such as para"
    ):
        plan.show("params/x")


def case(stage, peak):
    numbers = dict.fromkeys((f.name for f in _forecast.dataclasses.fields(_forecast.Case)), 0)
    gib = 2**30
    numbers |= {
        "stage": stage, "variant": "full", "accumulate": 1, "parameters": 20 * gib,
        "optimizer": 5 * gib, "gradients": 2 * gib, "peak": peak * gib, "fits": peak < 73,
        "compute_seconds": 0.5, "exposed_seconds": 0.1, "step_seconds": 0.6,
    }  # fmt: skip
    return _forecast.Case(**numbers)


def test_a_forecast_draws_memory_to_its_peak_and_times_to_the_step():
    made = _forecast.Forecast("64xH100", _gpus.GPUS["H100"], (case(0, 100), case(3, 30)))
    figure = made.plot()
    memory, times = figure.axes
    for axes, ends in ((memory, [100, 30]), (times, [600, 600])):
        for row, end in enumerate(ends):
            bars = [bar for bar in axes.patches if round(bar.get_y() + 0.4) == row]
            assert max(bar.get_x() + bar.get_width() for bar in bars) == pytest.approx(end)
    assert [t.get_text() for t in memory.texts] == [" 100.0, does not fit", " 30.0"]
    assert not overlapping(figure)


def test_notebooks_get_tables():
    plan = zerojax.plan(make_state, stage=3)
    assert "<td>params/w</td>" in plan._repr_html_()
    assert "<td>31.41</td>" in zerojax.memory_table(7.5e9, 64)._repr_html_()
    made = _forecast.Forecast("64xH100", _gpus.GPUS["H100"], (case(0, 100),))
    assert "Nothing fits." in made._repr_html_() and "<td>100.0 GiB</td>" in made._repr_html_()


def test_audits_in_notebooks_name_cells_by_their_lines():
    hlo = (ROOT / "programs" / "layers-cpu8-jax0.12.hlo").read_text()
    report = zerojax.audit(hlo)
    assert f"<td>{report.traffic[0].serves}</td>" in report._repr_html_()
    one = dataclasses.replace(report.traffic[0], parts=(), source="/tmp/ipykernel_12/34.py:5")
    assert one.serves == "cell line 5"


def test_without_matplotlib_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ModuleNotFoundError, match="Run: pip install matplotlib"):
        zerojax.plan(make_state, stage=3).plot()
