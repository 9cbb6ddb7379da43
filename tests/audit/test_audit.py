"""What can be audited, and what an audit passes on from the compiler."""

import pytest

import zerojax
from tests.support import linear, steps


def test_arrays_shapes_programs_and_text_are_audited_alike():
    row = steps.row("in_line")
    plan = row.plan
    reports = [
        row.report,
        zerojax.audit(row.step, plan.abstract(), *zerojax.aot.batch(row.args, plan)),
        zerojax.audit(row.compiled, plan=plan),
        zerojax.audit(row.text, plan=plan),
        zerojax.audit(row.text),
    ]
    assert len({tuple(sorted(r.totals.items())) for r in reports}) == 1
    assert len({(r.memory.parameters, r.memory.optimizer) for r in reports}) == 1
    assert reports[-1].plan is None and reports[-1].devices == 4
    assert not row.state.params["in"]["w"].is_deleted()


def test_a_modelled_gpu_adds_times():
    compiled = steps.row("stage3").compiled
    report = zerojax.audit(compiled, gpu="H100")
    assert report.step_seconds > report.exposed_seconds > 0
    assert report.step_seconds == pytest.approx(report.replay.compute + report.exposed_seconds)
    assert report.overlap == pytest.approx(report.replay.compute / report.step_seconds)
    assert "modelled step" in str(report) and "between" in str(report)
    assert zerojax.audit(compiled, gpu="T4").step_seconds > report.step_seconds
    with pytest.raises(ValueError, match=r"no facts about a GPU 'X1'. Name one of T4, L4"):
        zerojax.audit(compiled, gpu="X1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((linear.STEP,), r"compiles the step for a state and a batch: audit\(step, state, batch\)"),
        ((linear.STEP, {"params": {}}), r"audit\(step, state, batch\)"),
        ((3,), "needs something compiled or to compile, got a int"),
        ((len,), "got a builtin_function_or_method"),
    ],
)
def test_what_cannot_be_audited(arguments, message):
    with pytest.raises(TypeError, match=message):
        zerojax.audit(*arguments)
