"""A plan as text, as a table in notebooks, and as a picture."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import zerojax
from tests import reference
from tests.models import mlp
from tests.pictures import filled, overlapping
from zerojax._plan import show as _show
from zerojax._plan.show import COLOURS


def make_state():
    params = {"w": jnp.ones((64, 32)), "b": jnp.ones(3)}
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))


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
    long = "a_rather_long_name/of_a_module_{}/that_has/{}/and_a_kernel"
    params = {long.format(n, name): kernel for n in range(15) for name in ("query", "other")}
    plan = zerojax.plan((params, ()), stage=3)
    figure = plan.plot()
    assert not overlapping(figure)
    assert "14 smaller leaves" in figure.axes[0].get_xlabel()
    assert len(filled(figure)) == 16 * 8
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert len(set(labels)) == 16


def test_two_sharded_dimensions_are_a_rectangle():
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
    assert "on each device, replicated: " in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"no leaf 'params/x' in this plan. Did you mean params/w"):
        plan.show("params/x")
    with pytest.raises(ValueError, match=r"no leaf 'kernel'.*. Paths are such as step, params/b"):
        plan.show("kernel")


def test_plan_prints_leaves_bytes_and_totals():
    state = reference.make_state(mlp(False), optax.adam(1e-3))
    text = str(zerojax.plan(state, stage=3, min_shard_size=1))
    assert "ZeRO stage 3 over data=8 (cpu); sharded: opt_state, grads, params" in text
    row = next(line for line in text.splitlines() if line.startswith("params/in/w"))
    assert row.split() == ["params/in/w", "float32[24,", "64]", "(data)", "6.0", "KiB", "768", "B"]
    assert re.search(r"parameters +8.3 KiB +1.0 KiB", text)
    assert re.search(r"optimizer state +16.6 KiB +2.1 KiB", text)
    title = "ZeRO stage 3 over data=8 (cpu); sharded: opt_state, grads, params"
    assert repr(zerojax.plan(state)) == f"<Plan of 14 leaves: {title}>"
    html = zerojax.plan(state)._repr_html_()
    assert html.count("<tr>") == 1 + 14 + 4 and "<td>params/in/w</td>" in html


def rows_of(plan):
    return {line.split()[0]: re.split("  +", line)[1:] for line in str(plan).splitlines()[3:]}


def test_layers_that_are_planned_alike_share_a_row():
    """Layers of a Python loop, in loops within loops too; one that differs has its own row."""
    layer = {"norm": jnp.ones(64), "up": jnp.ones((64, 32))}
    params = {f"layers_{n}": layer for n in range(12)}
    params |= {"stage": [[jnp.ones((64, 8))] * 3 for _ in range(4)], "head_0": jnp.ones((64, 9))}
    params |= {"head_1": jnp.ones((64, 9))}
    state = {"params": params, "opt_state": optax.trace(0.9).init(params)}
    other = {"layers_7/up": PartitionSpec()}
    plan = zerojax.plan(state, stage=3, mesh=zerojax.mesh(data=8), overrides=other)
    rows = rows_of(plan)
    assert rows["params/layers_{0..11}/norm"][:4] == [
        "12 x float32[64]",
        "()",
        "3.0 KiB",
        "3.0 KiB",
    ]
    moments = rows["opt_state/trace/layers_{0..11}/norm"]
    assert moments[-1] == "follows params/layers_{0..11}/norm, which is replicated"
    ups = {name: row[:3] for name, row in rows.items() if "params" in name and "up" in name}
    assert ups == {
        "params/layers_{0..6}/up": ["7 x float32[64, 32]", "(data)", "56.0 KiB"],
        "params/layers_7/up": ["float32[64, 32]", "()", "8.0 KiB"],
        "params/layers_{8..11}/up": ["4 x float32[64, 32]", "(data)", "32.0 KiB"],
    }
    assert rows["params/stage/{0..3}/{0..2}"][0] == "12 x float32[64, 8]"
    assert "params/head_0" in rows and "params/head_1" in rows, "two are named"
    assert list(rows).index("params/layers_{0..11}/norm") < list(rows).index("params/layers_7/up")
    assert "<td>params/layers_{0..6}/up</td>" in plan._repr_html_()


def test_what_is_sent_otherwise_has_its_own_row():
    params = {f"w{n}": jnp.ones((64, 1024)) for n in range(6)}
    precision = zerojax.Precision(gather={"w3": "int8"})
    rows = rows_of(
        zerojax.plan((params, ()), stage=3, precision=precision, mesh=zerojax.mesh(data=8))
    )
    assert [name for name in rows if name.startswith("0/")] == ["0/w{0..2}", "0/w3", "0/w4", "0/w5"]


def padded(stage=3, **options):
    """Over eight devices `w` rests as [16, 17] and `even` as it is."""
    params = {"w": jnp.ones((9, 17)), "even": jnp.ones((64, 4))}
    mesh = zerojax.mesh(data=8)
    state = params, optax.trace(0.9).init(params)
    overrides = {"w": PartitionSpec("data")}
    return zerojax.plan(state, stage=stage, mesh=mesh, overrides=overrides, **options)


def test_a_padded_leaf_has_both_shapes_in_the_table():
    lines = str(padded()).splitlines()
    assert re.split("  +", lines[1])[:4] == ["leaf", "shape", "padded to", "spec"]
    cells = {line.split()[0]: re.split("  +", line)[1:] for line in lines[3:]}
    assert cells["0/w"] == ["float32[9, 17]", "[16, 17]", "(data)", "612 B", "136 B"]
    assert cells["0/even"] == ["float32[64, 4]", "(data)", "1.0 KiB", "128 B"]
    assert cells["parameters"] == ["1.6 KiB", "264 B"], "logical in all, padded on each device"
    html = padded()._repr_html_()
    assert "<th>padded to</th>" in html and "<td>[16, 17]</td>" in html


def test_a_table_has_no_column_for_padding_without_any():
    """At stage 1 parameters rest as they are; only the momentum is padded."""
    assert "padded to" not in str(zerojax.plan(make_state))
    text = str(padded(stage=1))
    assert text.count("[16, 17]") == 1
    assert next(line for line in text.splitlines() if "[16, 17]" in line).startswith("1/trace/w ")
    params = {"w": jnp.ones((257, 21))}
    assert zerojax.plan((params, ()), stage=1).pads
    assert "padded to" not in str(zerojax.plan((params, ()), stage=1))


def test_show_tells_logical_rows_and_who_has_only_padding(capsys):
    padded().show("0/w")
    first, *parts = capsys.readouterr().out.splitlines()
    assert first == "0/w: float32[9, 17] padded to [16, 17], 136 B of 612 B on each device"
    assert parts == [
        "  [0:2, :]      device 0",
        "  [2:4, :]      device 1",
        "  [4:6, :]      device 2",
        "  [6:8, :]      device 3",
        "  [8:9, :]      device 4",
        "  only padding  devices 5, 6, 7",
    ]
    padded(stage=1).show("0/w")
    first, *parts = capsys.readouterr().out.splitlines()
    assert first == "0/w: float32[9, 17], 612 B of 612 B on each device"
    assert parts == ["  [:, :]  devices 0, 1, 2, 3, 4, 5, 6, 7"]


def test_the_parts_of_a_padded_leaf_are_drawn_in_its_logical_shape():
    plan = padded()
    leaf = next(leaf for leaf in plan.leaves if leaf.path == "0/w")
    rows = [leaf.path for leaf in sorted(plan.leaves, key=lambda leaf: -leaf.nbytes)]
    found = [part for ((*part,),) in _show.parts(plan, leaf, list(plan.mesh.devices.flat))]
    assert found == [[min(2 * n, 9) / 9, min(2 * n + 2, 9) / 9] for n in range(8)]
    figure = plan.plot()
    mine = [box for box in filled(figure) if abs(box[1] - (rows.index("0/w") - 0.38)) < 1e-6]
    widths = [box[2] / 0.92 for box in mine]
    assert widths == pytest.approx([2 / 9] * 4 + [1 / 9] + [0] * 3)
    assert not overlapping(figure)


GROUPS = {"params": "gpu", "grads": "gpu", "opt_state": ("gpu", "node")}
GROUPED = "; params over gpu, grads over gpu, opt_state over gpu x node"


def grouped(**groups):
    return zerojax.plan(make_state, mesh=zerojax.mesh(node=2, gpu=4), groups=groups)


@pytest.mark.parametrize(
    ("groups", "title"),
    [
        (GROUPS, f"stage 3 over node=2 x gpu=4 (cpu){GROUPED}"),
        (dict.fromkeys(GROUPS, "gpu"), "; params over gpu, grads over gpu, opt_state over gpu"),
        ({"params": (), "grads": "gpu"}, "stage 2 over node=2 x gpu=4 (cpu); grads over gpu, opt"),
        ({"params": ("node", "gpu")}, "; sharded: opt_state, grads, params"),  # as without groups
    ],
)
def test_a_title_names_the_axes_of_groups(groups, title):
    plan = grouped(**groups)
    assert title in _show.plan_title(plan)
    assert title in repr(plan) and title in plan._repr_html_()
    assert title in " ".join(str(plan).split())
    figure = plan.plot()
    assert title in " ".join(figure.get_suptitle().split())
    assert not overlapping(figure)


def test_a_long_title_stays_in_the_picture(monkeypatch):
    monkeypatch.setattr(
        _show, "plan_title", lambda plan: f"ZeRO stage 3 (NVIDIA H100 80GB HBM3){GROUPED * 2}"
    )
    assert not overlapping(grouped(**GROUPS).plot())


def test_show_names_the_axes_of_groups(capsys):
    plan = grouped(**GROUPS)
    plan.show("params/w")
    first, *parts = capsys.readouterr().out.splitlines()
    assert first.endswith("on each device, sharded over gpu x node, kept over gpu in a step")
    assert [line.split()[-2:] for line in parts[:2]] == [["device", "0"], ["device", "1"]]
    plan.show("opt_state/0/mu/w")
    first, *parts = capsys.readouterr().out.splitlines()
    assert first.endswith("on each device, sharded over gpu x node") and len(parts) == 8
    plan.show("params/b")
    assert "sharded over" not in capsys.readouterr().out


def test_groups_are_drawn_as_the_devices_have_them():
    plan = grouped(**GROUPS)
    rows = [leaf.path for leaf in sorted(plan.leaves, key=lambda leaf: -leaf.nbytes)]
    boxes = filled(plan.plot())
    for path, order in (
        ("params/w", [0, 2, 4, 6, 1, 3, 5, 7]),
        ("opt_state/0/mu/w", [0, 2, 4, 6, 1, 3, 5, 7]),
    ):
        row = rows.index(path)
        mine = [box for box in boxes if abs(box[1] - (row - 0.38)) < 1e-6]
        share = 0.92 / (max(order) + 1)
        starts = [x - device for device, (x, *_) in enumerate(mine)]
        assert starts == pytest.approx([share * part for part in order])
        assert [box[2] for box in mine] == pytest.approx([share] * 8)
