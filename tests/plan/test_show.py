"""A plan as text, as a table in notebooks, and as a picture."""

import re

import jax
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from tests.support.pictures import filled, overlapping
from tests.support.shapes import shape

LEVELS = zerojax.mesh(node=2, gpu=4)
GROUPS = {"params": "gpu", "grads": "gpu", "opt_state": ("gpu", "node")}


def planned(stage=3, params=None, **options):
    """Over eight devices, `odd` rests as [16, 17], `w` as it is, and `b` whole."""
    params = params or {"w": shape(64, 32), "odd": shape(9, 17), "b": shape(3)}
    if "mesh" not in options:
        options |= {"overrides": {"odd": P("data")}} if "odd" in params else {}
    tx = optax.trace(0.9)
    state = {"params": params, "opt_state": jax.eval_shape(tx.init, params)}
    return zerojax.plan(state, stage=stage, **options)


def rows_of(plan):
    """The cells of the table of a plan, by the first in a row."""
    return {line.split()[0]: re.split("  +", line)[1:] for line in str(plan).splitlines()[3:]}


# -- text


def test_a_plan_prints_leaves_bytes_and_totals():
    plan = planned()
    title = "ZeRO stage 3 over data=8 (cpu); sharded: opt_state, grads, params"
    assert str(plan).startswith(title) and repr(plan) == f"<Plan of 6 leaves: {title}>"
    assert re.split("  +", str(plan).splitlines()[1])[:4] == ["leaf", "shape", "padded to", "spec"]
    rows = rows_of(plan)
    assert rows["params/w"] == ["float32[64, 32]", "(data)", "8.0 KiB", "1.0 KiB"]
    # Logical in all, padded on each device.
    assert rows["params/odd"] == ["float32[9, 17]", "[16, 17]", "(data)", "612 B", "136 B"]
    small = ["float32[3]", "()", "12 B", "12 B", "smaller than min_shard_size=128"]
    assert rows["params/b"] == small
    assert rows["opt_state/trace/b"][-1] == "follows params/b, which is replicated"
    assert rows["parameters"] == ["8.6 KiB", "1.1 KiB"]
    html = plan._repr_html_()
    assert html.count("<tr>") == 1 + 6 + 3 and "<th>padded to</th>" in html
    assert "<td>params/odd</td>" in html and "<td>[16, 17]</td>" in html


def test_a_table_has_no_column_for_padding_without_any():
    """At stage 1 parameters rest as they are; only the momentum is padded."""
    (line,) = (line for line in str(planned(stage=1)).splitlines() if "[16, 17]" in line)
    assert line.startswith("opt_state/trace/odd ")
    plan = zerojax.plan(({"w": shape(257, 21)}, ()), stage=1)
    assert plan._pads and "padded to" not in str(plan)


def test_layers_that_are_planned_alike_share_a_row():
    """Layers of a Python loop, in loops within loops too; one that differs has its own row."""
    layer = {"norm": shape(64), "up": shape(64, 32)}
    params = {f"layers_{n}": layer for n in range(12)} | {"head_0": shape(64, 9)}
    params |= {"stage": [[shape(64, 8)] * 3 for _ in range(4)], "head_1": shape(64, 9)}
    plan = planned(params=params, overrides={"layers_7/up": P()})
    rows = rows_of(plan)
    norms = ["12 x float32[64]", "()", "3.0 KiB", "3.0 KiB"]
    assert rows["params/layers_{0..11}/norm"][:4] == norms
    moments = rows["opt_state/trace/layers_{0..11}/norm"]
    assert moments[-1] == "follows params/layers_{0..11}/norm, which is replicated"
    ups = {name: row[:3] for name, row in rows.items() if "params" in name and "up" in name}
    assert ups == {
        "params/layers_{0..6}/up": ["7 x float32[64, 32]", "(data)", "56.0 KiB"],
        "params/layers_7/up": ["float32[64, 32]", "()", "8.0 KiB"],
        "params/layers_{8..11}/up": ["4 x float32[64, 32]", "(data)", "32.0 KiB"],
    }
    assert rows["params/stage/{0..3}/{0..2}"][0] == "12 x float32[64, 8]"
    assert rows["params/head_{0..1}"][0] == "2 x float32[64, 9]"
    assert list(rows).index("params/layers_{0..11}/norm") < list(rows).index("params/layers_7/up")
    assert "<td>params/layers_{0..6}/up</td>" in plan._repr_html_()


def test_what_is_sent_otherwise_has_its_own_row():
    params = {f"w{n}": shape(64, 1024) for n in range(6)}
    rows = rows_of(zerojax.plan((params, ()), precision=zerojax.Precision(gather={"w3": "int8"})))
    assert [name for name in rows if name.startswith("0/")] == ["0/w{0..2}", "0/w3", "0/w{4..5}"]


@pytest.mark.parametrize(
    ("groups", "title"),
    [
        (
            GROUPS,
            "stage 3 over node=2 x gpu=4 (cpu); params over gpu, grads over gpu, opt_state over "
            "gpu x node",
        ),
        ({"params": (), "grads": "gpu"}, "stage 2 over node=2 x gpu=4 (cpu); grads over gpu, opt"),
        ({"params": ("node", "gpu")}, "; sharded: opt_state, grads, params"),  # as without groups
    ],
)
def test_a_title_names_the_axes_of_groups(groups, title):
    plan = planned(mesh=LEVELS, groups=groups)
    assert title in repr(plan) and title in plan._repr_html_()
    assert title in " ".join(str(plan).split())


@pytest.mark.parametrize(
    ("options", "path", "first", "parts"),
    [
        (
            {},
            "params/w",
            "float32[64, 32], 1.0 KiB of 8.0 KiB on each device",
            [f"[{8 * n}:{8 * n + 8}, :] device {n}" for n in range(8)],
        ),
        (
            {},
            "params/odd",
            "float32[9, 17] padded to [16, 17], 136 B of 612 B on each device",
            [f"[{2 * n}:{min(2 * n + 2, 9)}, :] device {n}" for n in range(5)]
            + ["only padding devices 5, 6, 7"],
        ),
        (
            {"stage": 1},
            "params/odd",
            "float32[9, 17], 612 B of 612 B on each device",
            ["[:, :] devices 0, 1, 2, 3, 4, 5, 6, 7"],
        ),
        (
            {},
            "params/b",
            "float32[3], 12 B of 12 B on each device, replicated: smaller than min_shard_size=128",
            ["[:] devices 0, 1, 2, 3, 4, 5, 6, 7"],
        ),
        (
            {"mesh": LEVELS, "groups": GROUPS},
            "params/w",
            "float32[64, 32], 1.0 KiB of 8.0 KiB on each device, sharded over gpu x node, kept "
            "over gpu in a step",
            [f"[{8 * n}:{8 * n + 8}, :] device {n // 2 + n % 2 * 4}" for n in range(8)],
        ),
    ],
)
def test_show_tells_which_device_holds_what(options, path, first, parts, capsys):
    planned(**options).show(path)
    said, *lines = capsys.readouterr().out.splitlines()
    assert said == f"{path}: {first}"
    assert sorted(" ".join(line.split()) for line in lines) == sorted(parts)


# -- pictures


def test_a_plan_draws_what_each_device_holds(tmp_path):
    """A box is a leaf, of which each of eight devices has a part."""
    plan = planned()
    figure = plan.plot(str(tmp_path / "plan.png"))
    assert (tmp_path / "plan.png").stat().st_size > 5000 and not overlapping(figure)
    assert parts_in(figure, plan, "params/w") == [(n / 8, 1 / 8) for n in range(8)]
    assert parts_in(figure, plan, "params/b") == [(0, 1)] * 8
    odd = [(min(2 * n, 9) / 9, (min(2 * n + 2, 9) - min(2 * n, 9)) / 9) for n in range(8)]
    assert parts_in(figure, plan, "params/odd") == [pytest.approx(part) for part in odd]
    colours = {box[4] for box in filled(figure)}
    assert len(colours) == 2, "parameters and the optimizer's state"


def parts_in(figure, plan, path):
    """Of each device, where its part of a leaf starts in the leaf's box, and how long it is."""
    row = [leaf.path for leaf in sorted(plan.leaves, key=lambda leaf: -leaf.nbytes)].index(path)
    boxes = [box for box in filled(figure) if abs(box[1] - (row - 0.38)) < 0.5]
    starts = [(x - device) / 0.92 for device, (x, *_) in enumerate(boxes)]
    return [
        (round(start, 6), round(box[2] / 0.92, 6)) for start, box in zip(starts, boxes, strict=True)
    ]
