"""Traffic of real steps on CPU devices, to the byte, and the parameters that it serves."""

import pytest

from tests.audit.models import STAGES, N, audited, params_of, sent_for
from tests.reference import tree_bytes

SCALAR = 2 * 4 * (N - 1) // N  # bytes that each device sends to sum one float32


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("model", ["mlp", "gpt"])
def test_traffic_is_the_papers_to_the_byte(model, stage):
    report, _, _ = audited(model, stage)
    psi, others = (tree_bytes(leaves) * (N - 1) / N for leaves in params_of(model))
    assert psi > 9 * others
    scalars = report.totals["all-reduce"] - 2 * (others if stage else others + psi)
    assert scalars % SCALAR == 0 and 1 <= scalars / SCALAR < 10  # the loss, and parts of the norm
    if stage == 0:
        assert set(report.totals) == {"all-reduce"}
        return
    assert report.totals["reduce-scatter"] == psi
    if stage < 3:
        assert report.totals["all-gather"] == psi
    assert report.wire_bytes == sum(report.totals.values())
    assert report.check() is report


@pytest.mark.parametrize("model", ["mlp", "gpt"])
def test_stage_3_gathers_every_weight_at_most_twice(model):
    """Exactly twice in loops; XLA may spare itself the second gather of what is used once."""
    report, _, _ = audited(model, 3)
    gathered = sent_for(report, "all-gather")
    shared, _ = params_of(model)
    assert set(gathered) == set(shared)
    for path, leaf in shared.items():
        times = gathered[path] / (leaf.nbytes * (N - 1) / N)
        assert times == 2 if "/blocks/" in path else 1 <= times <= 2, path
    layers = [t for t in report.traffic if "/blocks/" in t.serves and t.kind != "all-reduce"]
    trips = {(t.trips, len(t.loops)) for t in layers}
    assert trips == ({(3, 1)} if model == "gpt" else set())


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("model", ["mlp", "gpt"])
def test_every_collective_is_traced_to_what_it_serves(model, stage):
    report, _, _ = audited(model, stage)
    shared, others = params_of(model)
    assert sent_for(report, "reduce-scatter") == {p: x.nbytes * 7 / 8 for p, x in shared.items()}
    assert set(sent_for(report, "all-gather")) == set(shared)
    assert set(sent_for(report, "all-reduce")) - {""} == set(others)
    assert {t.axes for t in report.traffic} == {("data",)}
