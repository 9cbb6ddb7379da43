"""Tables in full where they are read by programs, fitted where they are read on a terminal."""

import sys

import jax.numpy as jnp
import pytest

import zerojax
from zerojax import _text

HEAD = ("leaf", "bytes", "axes", "why")
ROWS = [
    HEAD,
    ("params/encoder/layers/attention/kernel", "81.0 MiB", "data", ""),
    ("params/bias", "12 B", "data", "fewer elements than there are devices to shard them over"),
]


@pytest.fixture
def drawn(monkeypatch):
    """The lines of a table on a terminal of some width; None: where there is no terminal."""

    def draw(columns, **options):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys.stdout, "isatty", lambda: columns is not None, raising=False)
        return _text.text_table(ROWS, (1,), **{"flexible": (0, 3), **options}).split("\n")

    return draw


def test_without_a_terminal_nothing_is_left_out(drawn):
    header, rule, *rows = drawn(None)
    assert header.split() == list(HEAD) and set(rule) == {"-", " "}
    assert [row.split("  ")[0] for row in rows] == [row[0] for row in ROWS[1:]]
    assert rows[1].endswith(ROWS[2][3]) and len(rows[1]) > 100


@pytest.mark.parametrize("columns", [60, 80, 100, 140])
def test_a_terminal_gets_no_longer_lines_than_it_has_columns(drawn, columns):
    lines = drawn(columns)
    assert max(map(len, lines)) <= columns and not any("\x1b" in line for line in lines)
    assert all(word in " ".join(lines) for word in ["fewer", "elements", "than", "there", "are"])
    assert drawn(200) == drawn(None)


def test_long_words_lose_their_middle_and_texts_wrap(drawn):
    lines = drawn(70)
    assert lines[2].startswith("para") and "…" in lines[2] and "n/kernel " in lines[2]
    assert len(lines) > 5, "the reason goes on below itself"


def test_what_does_not_fit_continues_below(drawn):
    first, second = "\n".join(drawn(42)).split("\n\n")
    assert first.split("\n")[0].split() == ["leaf", "bytes", "axes"]
    header, _, *rows = second.split("\n")
    assert header.split() == ["leaf", "why"]
    assert rows[0].startswith("params/bias"), "rows with nothing in these columns are left out"


def test_words_to_be_copied_stay_whole(drawn):
    assert "…" in drawn(70, whole=(3,))[2]
    assert ROWS[1][0] in drawn(70, whole=(0,))[2]


def test_optional_columns_go_first(drawn):
    assert drawn(54, optional=(2, 1))[0].split() == ["leaf", "bytes", "axes", "why"]
    assert drawn(53, optional=(2, 1))[0].split() == ["leaf", "bytes", "why"]
    assert drawn(42, optional=(2, 1))[0].split() == ["leaf", "why"]


def test_commands_fit_their_tables_without_a_terminal(drawn, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    with _text.fitted():
        lines = _text.text_table(ROWS, flexible=(0, 3)).split("\n")
        assert max(map(len, lines)) <= 60
    assert max(map(len, _text.text_table(ROWS).split("\n"))) > 100


def test_no_row_is_left_out_of_the_first_table(monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    with _text.fitted():
        table = _text.text_table([*ROWS, ("params/scale", "", "", "")])
    assert table.endswith("\nparams/scale")


def test_a_table_without_rows_is_its_heading(drawn, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with _text.fitted():
        assert _text.text_table([HEAD]).split("\n")[0].split() == list(HEAD)


@pytest.mark.parametrize(
    ("words", "width", "short"),
    [
        (["params/w"], 8, ["params/w"]),
        (["params/blocks/qkv", "b"], 10, ["pa…cks/qkv", "b"]),
        (["abcdef"], 4, ["…def"]),
        (["opt_state/0/mu/w", "opt_state/0/nu/w"], 12, ["op…te/0/mu/w", "op…te/0/nu/w"]),
        (["mu/encoder/kernel", "nu/encoder/kernel"], 9, ["mu…kernel", "nu…kernel"]),
        (["a/1/b", "a/2/b"], 3, ["…/b", "…/b"]),
    ],
)
def test_shortened_words_keep_their_ends_and_stay_different(words, width, short):
    assert _text.shortened(words, width) == short and max(map(len, short)) <= width


@pytest.mark.parametrize(
    ("words", "short"),
    [(["a/1/b", "a/2/b"], ["…1/b", "…2/b"]),
     (["mu/1/q/kernel", "mu/2/q/kernel", "mu/2/k/kernel"], ["mu/1/q…", "mu/2/q…", "mu/2/k…"]),
     (["mu/1/deep/q", "mu/2/deep/q", "mu/2/deep/k"], ["mu/1…q", "mu/2…q", "mu/2…k"]),
     (["abcdef"], ["…def"]),
     ([], [])],
)  # fmt: skip
def test_words_are_as_long_as_it_takes_to_tell_them_apart(words, short):
    assert _text.told_apart(words, 4) == short


def test_text_wraps_where_it_has_to_fit(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    line = "all-gather moves params/a_long_name_of_a_module/kernel, twice the bytes"
    assert _text.paragraphs([line, line]) == f"{line}\n{line}"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    lines = _text.paragraphs([line]).split("\n")
    assert len(lines) > 1 and all(one.startswith("  ") for one in lines[1:])
    assert " ".join(" ".join(lines).split()) == line, "no word is broken"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    with _text.fitted():
        assert _text.paragraphs([line]).split("\n") == lines
        labelled = _text.paragraphs([f"sent in a step  {line}", "", "short"]).split("\n")
    assert labelled[-2:] == ["", "short"]
    beside = [one for one in labelled[1:-2] if one.startswith(" " * len("sent in a step  "))]
    assert len(beside) == len(labelled) - 3 > 1, "its label"


def test_plans_and_tables_fit(monkeypatch):
    """As printed on a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    layers = {f"encoder/{n}/attention": {"kernel": jnp.ones((64, 64))} for n in range(2)}
    plan = zerojax.plan({"params": {"bias": jnp.ones(3), **layers}}, stage=3)
    with _text.fitted():
        assert max(map(len, str(plan).split("\n")[1:])) <= 80
        assert max(map(len, str(zerojax.memory_table(7.5e9, 64)).split("\n"))) <= 80


def test_the_times_of_a_column_are_in_one_unit():
    rows = [("a", "step", "exposed"), ("b", 1.2345, 0.0), ("c", 0.98, 3e-6), ("d", "-", 0.02)]
    assert _text.with_times(rows) == [
        ("a", "step", "exposed"), ("b", "1,234.5 ms", "0.0 ms"), ("c", "980.0 ms", "0.0 ms"),
        ("d", "-", "20.0 ms"),
    ]  # fmt: skip
    assert _text.with_times([("x", 2.0), ("y", 75.0)]) == [("x", "2.0 s"), ("y", "75.0 s")]
    assert _text.with_times([(2e-6,), (0.0,)]) == [("2.0 µs",), ("0 µs",)]
