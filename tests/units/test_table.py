"""Tables in full where they are read by programs, fitted where they are read on a terminal."""

import json
import re
import sys

import jax.numpy as jnp
import pytest

import zerojax
from zerojax import _table

HEAD = ("leaf", "bytes", "axes", "why")
LEAF = "params/encoder/layers/attention/kernel"
WHY = "fewer elements than there are devices to shard them over"
ROWS = [HEAD, (LEAF, "81.0 MiB", "data", ""), ("params/bias", "12 B", "data", WHY)]


@pytest.fixture
def drawn(monkeypatch):
    """The lines of a table on a terminal of some width; None: where there is no terminal."""

    def draw(columns, rows=ROWS, **options):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys.stdout, "isatty", lambda: columns is not None, raising=False)
        options = {"right": ("bytes",), "flexible": ("leaf", "why"), **options}
        return str(_table.Table(rows[0], rows[1:], **options)).split("\n")

    return draw


@pytest.mark.parametrize("columns", [42, 60, 80, 140])
def test_a_terminal_gets_no_longer_lines_than_it_has_columns(drawn, columns):
    lines = drawn(columns)
    assert max(map(len, lines)) <= columns and not any("\x1b" in line for line in lines)
    assert all(word in " ".join(lines) for word in WHY.split()), "texts wrap"


def test_what_does_not_fit_is_shortened_left_out_or_continued_below(drawn):
    assert "…" in drawn(70)[2] and "n/kernel " in drawn(70)[2]
    for columns, left in ((54, [*HEAD]), (53, ["leaf", "bytes", "why"]), (42, ["leaf", "why"])):
        assert drawn(columns, optional=("axes", "bytes"))[0].split() == left
    first, second = "\n".join(drawn(42)).split("\n\n")
    assert first.split("\n")[0].split() == ["leaf", "bytes", "axes"]
    header, _, *rows = second.split("\n")
    assert header.split() == ["leaf", "why"]
    assert rows[0].startswith("params/bias"), "rows with nothing in these columns are left out"
    assert drawn(140, [*ROWS, ("params/scale", "", "", "")])[-1] == "params/scale", "of the first"
    assert drawn(80, [HEAD])[0].split() == list(HEAD)


def test_commands_fit_what_they_print_without_a_terminal(drawn, monkeypatch):
    drawn(None)
    monkeypatch.setenv("COLUMNS", "80")
    layers = {f"encoder/{n}/attention": {"kernel": jnp.ones((64, 64))} for n in range(2)}
    plan = zerojax.plan({"params": {"bias": jnp.ones(3), **layers}}, stage=3)
    longest = lambda printed: max(map(len, str(printed).split("\n")[1:]))
    assert longest(plan) > 80
    with _table.fitted():
        assert longest(plan) <= 80
    assert longest(plan) > 80


@pytest.mark.parametrize(
    ("paths", "written"),
    [
        (["h/1/up", "h/0/up", "head", "h/2/up", "h/0/up"], ["h/{0..2}/up", "head"]),
        (["block_9/w", "block_10/w", "block_9/b"], ["block_{9..10}/w", "block_9/b"]),
        (["h/0/up", "h/2/up"], ["h/0/up", "h/2/up"]),
        (["h/0/norms/0", "h/0/norms/1", "h/1/norms/1"], ["h/0/norms/0", "h/{0..1}/norms/1"]),
        (["p/w", "p/w1", "p/w2"], ["p/w", "p/w{1..2}"]),
        (["h/01/up"], ["h/01/up"]),
    ],
)
def test_layers_are_written_as_one_path(paths, written):
    assert _table.in_runs(paths) == written


def test_the_times_of_a_column_are_in_one_unit():
    formats = dict.fromkeys(("step", "exposed"), _table.human_time)

    def columns(*rows):
        lines = str(_table.Table(("", "step", "exposed"), rows, formats=formats)).split("\n")[2:]
        return list(zip(*(re.sub("   +", "  ", x).split("  ") for x in lines), strict=True))

    assert columns(("b", 1.2345, 0.0), ("c", 0.98, 3e-6), ("d", None, 0.02))[1:] == [
        ("1,234.5 ms", "980.0 ms", "-"),
        ("0.0 ms", "0.0 ms", "20.0 ms"),
    ]
    assert columns(("x", 2.0, 2e-6), ("y", 75.0, 0.0))[1:] == [
        ("2.0 s", "75.0 s"),
        ("2.0 µs", "0 µs"),
    ]


CODE = "\nstate = shard(make_state)\nstep = train_step(loss)"
MIXED = _table.Table(
    ("leaf", "size", "fits", "rows"),
    [("w<1>", 2048, True, "max 4"), ("b", None, False, "2")],
    ["two leaves"],
    ["Use more.", CODE],
    totals=[("in all", 2048, "", "")],
    formats={"size": _table.human_bytes},
    right=("rows",),
)


def test_a_table_prints_its_title_numbers_totals_and_notes():
    assert (
        f"{MIXED}"
        == repr(MIXED)
        == (
            "two leaves\n"
            "leaf       size  fits   rows\n"
            "------  -------  ----  -----\n"
            "w<1>    2.0 KiB  yes   max 4\n"
            "b             -  no        2\n"
            "in all  2.0 KiB\n"
            f"Use more.\n{CODE}"
        )
    )


def test_code_below_a_table_does_not_wrap(monkeypatch):
    monkeypatch.setenv("COLUMNS", "12")
    with _table.fitted():
        text = str(MIXED)
    assert text.endswith(CODE) and "two leaves\n" in text


def test_a_table_is_html_with_its_totals_at_the_foot():
    html = MIXED._repr_html_()
    assert html.startswith("<p>two leaves</p><table><thead><tr><th>leaf</th>")
    assert "<td>w&lt;1&gt;</td><td>2.0 KiB</td><td>yes</td>" in html
    assert "<tfoot><tr><th>in all</th><th>2.0 KiB</th>" in html
    assert html.endswith(f"<p>Use more.<br><pre>{CODE.strip()}</pre></p>")
    assert "<p>" not in _table.Table(("a",), [("b",)])._repr_html_()


def test_a_table_is_json_with_numbers_as_they_are():
    told = json.loads(json.dumps(MIXED.to_dict()))
    assert told == {
        "title": ["two leaves"],
        "rows": [
            {"leaf": "w<1>", "size": 2048, "fits": True, "rows": "max 4"},
            {"leaf": "b", "size": None, "fits": False, "rows": "2"},
        ],
        "totals": [{"leaf": "in all", "size": 2048, "fits": "", "rows": ""}],
        "notes": ["Use more.", CODE],
    }
