"""Traffic of real steps on CPU devices, to the byte, and the parameters that it serves."""

import pytest

from tests.audit.models import STAGES, N, audited, sent_for

SCALAR = 2 * 4 * (N - 1) // N  # bytes that each device sends to sum one float32


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("model", ["mlp", "gpt"])
def test_traffic_is_the_papers_to_the_byte(model, stage):
    report, plan, _ = audited(model, stage)
    psi = sum(leaf.nbytes for leaf in plan.params if leaf.dim is not None) * (N - 1) / N
    whole = sum(leaf.nbytes for leaf in plan.params if leaf.dim is None) * 2 * (N - 1) / N
    scalars = report.totals["all-reduce"] - whole
    assert scalars % SCALAR == 0 and 1 <= scalars / SCALAR < 10  # the loss, and parts of the norm
    if stage == 0:  # everything is whole: 2 psi
        assert psi == 0 and set(report.totals) == {"all-reduce"}
        return
    assert report.totals["reduce-scatter"] == psi
    if stage < 3:
        assert report.totals["all-gather"] == psi
    assert report.wire_bytes == sum(report.totals.values())
    assert report.check() is report


@pytest.mark.parametrize("model", ["mlp", "gpt"])
def test_stage_3_gathers_every_weight_at_most_twice(model):
    """Exactly twice in loops; XLA may spare itself the second gather of what is used once."""
    report, plan, _ = audited(model, 3)
    gathered = sent_for(report, "all-gather")
    cut = {leaf.path: leaf for leaf in plan.params if leaf.dim is not None}
    assert set(gathered) == set(cut)
    for path, leaf in cut.items():
        times = gathered[path] / (leaf.nbytes * (N - 1) / N)
        assert times == 2 if leaf.stacked else 1 <= times <= 2, path
    layers = [t for t in report.traffic if "blocks" in t.serves and t.kind != "all-reduce"]
    assert {(t.trips, len(t.loops)) for t in layers} <= {(3, 1)}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("model", ["mlp", "gpt"])
def test_every_collective_is_traced_to_what_it_serves(model, stage):
    report, plan, _ = audited(model, stage)
    cut = {leaf.path: leaf.nbytes for leaf in plan.params if leaf.dim is not None}
    whole = {leaf.path for leaf in plan.params if leaf.dim is None}
    assert sent_for(report, "reduce-scatter") == {p: size * 7 / 8 for p, size in cut.items()}
    assert set(sent_for(report, "all-gather")) == set(cut)
    assert set(sent_for(report, "all-reduce")) - {""} == whole
    assert {t.axes for t in report.traffic} == {("data",)}
