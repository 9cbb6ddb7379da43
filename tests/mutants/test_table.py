"""The mutants can be put into the package, and what becomes of one is told right."""

import ast
import json

import pytest

from tests.mutants import runs, table
from tests.mutants.__main__ import KEPT

MUTANT = """\
# off-by-one: the last layer is left out
@ zerojax/_kernel/loops.py
     for layer in layers:
-        run(layer)
+        run(layer - 1)
"""
KILLED = json.loads(KEPT.read_text())
CASE = '<testcase file="tests/a.py" name="test_b[1]"><failure message="{}"/></testcase>'
REPORT = f"<testsuite>{CASE}</testsuite>"


def test_each_mutant_finds_its_lines():
    assert [name for name in table.read() if name in KILLED] == list(KILLED)
    for mutant in table.read().values():
        text = (table.ROOT / mutant.file).read_text()
        changed = mutant.applied(text)
        assert ast.parse(changed) and changed != text and mutant.breaks, mutant.name


def test_lines_are_changed_where_they_are_once():
    mutant, lines = table.parsed(MUTANT), "    for layer in layers:\n        run(layer)\n"
    changed = mutant.applied(f"def f():\n    run(layer)\n{lines}")
    assert changed == "def f():\n    run(layer)\n    for layer in layers:\n        run(layer - 1)\n"
    for text in ("def f():\n    run(layer)\n", f"def f():\n{lines}{lines}"):
        with pytest.raises(table.NotThereError, match=r"off-by-one.*loops\.py.*change the mutant"):
            mutant.applied(text)


@pytest.mark.parametrize(
    "code, message, log, fate",
    [
        (0, "", "", ""),
        (5, "", "", ""),
        (4, "", "ERROR: not found: tests/a.py::test_b", ""),
        (4, "", "ImportError while loading conftest", "broken"),
        (1, "AssertionError: assert 1 == 2", "", "assertion"),
        (1, "Failed: DID NOT RAISE ValueError", "", "assertion"),
        (1, "TypeError: not an array", "", "error"),
        (1, "NameError: name 'x' is not defined", "", "broken"),
        (2, "collection failure", "", "broken"),
        (-6, "", "tests/a.py::test_a PASSED [ 1%]\ntests/a.py::test_b[1] \nAborted", "crash"),
        (None, "", "tests/a.py::test_b[1] ", "timeout"),
        (-11, "", "Segmentation fault", "broken"),
    ],
)
def test_what_becomes_of_a_mutant(tmp_path, code, message, log, fate):
    report = tmp_path / "report.xml"
    if message:
        report.write_text(REPORT.format(message))
    outcome = runs.outcome(code, report, log)
    assert outcome.fate == fate
    assert outcome.test == "tests/a.py::test_b[1]" or fate not in runs.KILLED
