"""The report of a verification."""

import json

import pytest

from tests.verify.steps import check_by_hand


def test_the_report_prints_worst_first_and_turns_into_json():
    report = check_by_hand("sum")
    lines = str(report).splitlines()
    assert lines[0].startswith("wrong: 3 of 6 comparisons")  # Adam hides it from params
    assert [c.path for c in report.wrong] == ["opt_state/0/nu/w", "loss", "opt_state/0/mu/w"]
    excess = [c.excess for c in report.wrong]
    assert excess == sorted(excess, reverse=True)
    with pytest.raises(AssertionError, match="wrong: 3 of 6 comparisons"):
        report.check()
    with pytest.raises(AssertionError, match="wrong: 3 of 6 comparisons"):
        report.raise_if_wrong()
    told = json.loads(json.dumps(report.to_dict()))
    assert told["ok"] is False and told["checks"][0]["path"] == report.checks[0].path
    assert told["losses"]["the step"] == pytest.approx(8 * told["losses"]["mean over the parts"])
