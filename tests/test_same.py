"""What the comparison of two revisions tells, what it passes over, and that it has all options."""

import dataclasses
import inspect
import shutil
import sys

import jax
import jax.numpy as jnp
import pytest

import zerojax
from tests import same
from tests.support import lowering
from tests.support.configurations import ROWS, Row


def set_in(rows, part):
    """The options that rows set, with their values."""
    return [item for row in rows for item in getattr(row, part).items()]


@pytest.mark.parametrize(
    ("function", "part", "ways"),
    [
        (zerojax.plan, "plan", None),
        (zerojax.shard_train_state, "plan", None),
        (zerojax.train_step, "step", (lowering.train, lowering.compiled)),
        (zerojax.eval_step, "step", (lowering.evaluate,)),
        (zerojax.value_and_grad, "step", (lowering.grads,)),
    ],
)
def test_each_option_is_in_a_row_and_not_at_its_default(function, part, ways):
    options = {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    if options.pop("schedule", None):
        options |= vars(zerojax.Schedule())
    if function is zerojax.value_and_grad:  # which updates nothing, and is compiled by the user
        del options["update"], options["compiler_options"]
    rows = [row for row in ROWS.values() if ways is None or row.lower in ways]
    found = {name for name, value in set_in(rows, part) if value != options.get(name)}
    assert options and options.keys() - found == set(), "add a row"


def values_in(value):
    """All values in an option, which may be a function that makes it."""
    yield value
    inner = [value()] if inspect.isfunction(value) else ()
    inner = vars(value).values() if dataclasses.is_dataclass(value) else inner
    inner = value.values() if isinstance(value, dict) else inner
    inner = value if isinstance(value, tuple) else inner
    for each in inner:
        yield from values_in(each)


@pytest.mark.parametrize(
    "kind", [zerojax.Precision, zerojax.Offload, zerojax.QuantizedWire, zerojax.Experts]
)
def test_each_field_is_in_a_row_and_not_at_its_default(kind):
    options = [row.plan | row.step for row in ROWS.values()]
    made = [value for given in options for value in values_in(given) if isinstance(value, kind)]
    fields = {field.name: field.default for field in dataclasses.fields(kind)}
    found = {name for one in made for name in fields if getattr(one, name) != fields[name]}
    assert fields.keys() - found == set(), "add a row"


# -- programs


def program_with(name, scope="sums", operation=jnp.tanh):
    def inner(x):
        with jax.named_scope(scope):
            return operation(x) + 1

    def outer(x):
        return jax.jit(inner)(x).sum()

    inner.__name__ = outer.__name__ = name
    return lowering.program(jax.jit(outer).trace(jnp.ones(4)))


def test_operations_and_their_scopes_count_and_names_of_functions_do_not():
    assert program_with("one") == program_with("_another_one")
    text = program_with("one")
    assert "stablehlo.tanh" in text and "one" not in text
    assert text.endswith("\nscopes:\njit()\nsums")
    assert text != program_with("one", scope="means")
    assert text != program_with("one", operation=jnp.sin)


def test_a_row_lowers_to_the_same_program_again_with_what_is_warned_of():
    text = ROWS["mlp, stage 1"].text()
    assert text.startswith("module attributes") and ROWS["mlp, stage 1"].text() == text
    assert text.count("stablehlo.all_gather") == 2  # of both matrices
    assert "\nUserWarning: Offload(" in ROWS["plan, with a warning"].text()


def test_an_error_is_one_of_its_row_without_paths_and_addresses():
    def fail(row):
        raise ValueError("at /home/me/a.py:12 of <object at 0x7f31>")

    assert Row("mlp", {}, lower=fail).text() == "refused, ValueError: at … of <object at …>"
    plain, refused = Row("mlp", {}), Row("mlp", {}, refused="over the axes")
    assert plain.wrong("module") == refused.wrong("refused, ValueError: over the axes x") == ""
    assert plain.wrong("refused, A: b") == "should have no error, and is refused, A: b"
    assert refused.wrong("module") == "should have an error of 'over the axes', and is lowered"


# -- what differs

SOURCE = '''"""The docstring of a module."""
def check(a):
    """The docstring of a function, which nobody sees."""
    raise ValueError(f"{a.name} is none of {' or '.join(a.names)} here. Pass one of them.")
KEY = "too few words"
'''


def test_messages_that_are_lost_changed_and_added_are_listed():
    assert same.messages({"a": SOURCE}) == {"‹› is none of ‹› here. Pass one of them."}
    moved = SOURCE.replace("a.name", "leaf.path").replace("check", "_check")
    assert list(same.changed(same.messages({"a": SOURCE}), same.messages({"b": moved}))) == []
    old = {"this one is lost", "pass one of these names instead of it"}
    new = {"pass one of those names instead of it", "a new one, 12345"}
    assert list(same.changed(old, new)) == [
        "message changed: pass one of these names instead of it\n"
        "  now: pass one of those names instead of it",
        "message lost: this one is lost",
        "message added: a new one, 12345",
    ]


@pytest.mark.ci
def test_two_libraries_are_lowered_side_by_side(tmp_path, monkeypatch, capsys):
    """The other one computes sines in place of hyperbolic tangents."""

    def check_out(revision, folder):
        shutil.copytree(same.ROOT / "zerojax", folder / "zerojax")
        with (folder / "zerojax" / "__init__.py").open("a") as file:
            file.write("import jax.numpy\njax.numpy.tanh = jax.numpy.sin\n")

    monkeypatch.setattr(same, "check_out", check_out)
    monkeypatch.setattr(sys, "argv", ["same.py", "HEAD", "--only", "^(mlp, stage 0|plan)$"])
    with pytest.raises(SystemExit) as stop:
        same.main()
    told = capsys.readouterr().out
    assert told.startswith("mlp, stage 0 differs:\n") and "    stablehlo.sine: 1 -> 0\n" in told
    assert "1 difference from HEAD: 2 configurations" in told and stop.value.code == 1
