"""An option is declared once: a field that a class of options gets is everywhere else too."""

import json
import shutil

import pytest

from tests.support.processes import ROOT, python

DUMMY = """    {name}: int = option(7, "the dummy of {kind}.", flag={{"type": int}})
"""
FIELDS = {  # the class, its file, and the field above which the dummy goes
    "placed_dummy": ("PlanOptions", "_plan/plan_options.py", "    mesh: Mesh | None = option("),
    "stepped_dummy": ("StepOptions", "_step/step_options.py", "    skip_nonfinite: bool = option("),
}
PROGRAM = """
import contextlib, inspect, io, json, sys

sys.path.insert(0, sys.argv[1])  # the copy

import zerojax.nnx
from zerojax.__main__ import main

FUNCTIONS = {
    "placed_dummy": [zerojax.plan, zerojax.shard_train_state, zerojax.nnx.shard],
    "stepped_dummy": [zerojax.train_step, zerojax.nnx.train_step],
}
BOTH = [zerojax.forecast, zerojax.tools.study]
printed = io.StringIO()
with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
    main(["forecast", "--help"])
flags = {name: f"--{name.replace('_', '-')}" for name in FUNCTIONS}
found = {"flags": [name for name, flag in flags.items() if flag in printed.getvalue()]}
for name, functions in FUNCTIONS.items():
    for function in functions + BOTH:
        parameter = inspect.signature(function).parameters.get(name)
        helped = f"{name}: the dummy of" in (function.__doc__ or "")
        key = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        found[f"{key} {name}"] = [parameter is not None and parameter.default == 7, helped]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Where the dummies are, in a copy of the library that declares them."""
    root = tmp_path_factory.mktemp("library")
    shutil.copytree(ROOT / "zerojax", root / "zerojax")
    for name, (kind, file, field) in FIELDS.items():
        path = root / "zerojax" / file
        text = path.read_text()
        assert text.count(field) == 1
        path.write_text(text.replace(field, DUMMY.format(name=name, kind=kind) + field))
    code, printed, error = python(PROGRAM, root)
    assert code == 0, error
    return json.loads(printed.splitlines()[-1])


def test_signatures_have_it(found):
    assert len(found) == 10
    missing = [where for where, has in found.items() if where != "flags" and not has[0]]
    assert missing == []


def test_the_command_line_has_it(found):
    assert found["flags"] == ["placed_dummy", "stepped_dummy"]


def test_docstrings_have_it(found):
    own = {where: has for where, has in found.items() if "forecast" not in where != "flags"}
    assert [where for where, has in own.items() if "study" not in where and not has[1]] == []
