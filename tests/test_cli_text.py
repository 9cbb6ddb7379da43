"""What the command line prints: each column is explained, and nothing exceeds 80 columns."""

import re
import sys

import pytest

from tests.forecast import fakes
from tests.support import stored
from tests.support.printed import fitted, long_lines, titles

STEP = str(stored.HERE / "step3-8xH100-jax0.12.hlo")
SENT = {"network_bytes": 2**30, "link_bytes": 2**41, "tokens": 740740}
OFFLOADED = fakes.case(3, 30, on_host=12 * 2**30, pinned=96 * 2**30, **SENT)
PRINTED = {
    "forecast": fakes.forecast(OFFLOADED, fakes.case(0, 100), network=1e9),
    "study": fakes.study(
        fakes.cell(asked="largest", rows=4), fakes.cell("9xH100", tflops=9.0, size=3)
    ),
    "audit": stored.report("step3-8xH100-jax0.12"),
}


def printed(command, run):
    return run("table")[1] if command == "table" else str(PRINTED[command])


COMMANDS = (*PRINTED, "table")


@pytest.mark.parametrize("command", COMMANDS)
def test_each_column_is_explained_in_a_sentence(command, run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    code, out, err = run(command, "--explain")
    assert (code, err) == (0, "")
    legend, said = out.split("\n\n")
    assert said == f"Nothing was run. For the table itself: zerojax {command} without --explain.\n"
    rows = [re.split("  +", line) for line in legend.splitlines()]
    assert rows.pop(0) == ["column", "what it says"]
    sentences = dict(rows)
    shown = titles(printed(command, run))
    assert len(shown) > 5 and set(shown) <= sentences.keys()
    assert all(re.fullmatch(r"[A-Z].* .*\.", sentences[title]) for title in shown)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_terminal_is_told_how_to_have_columns_explained(command, run, monkeypatch):
    shown = {"audit": ("audit", STEP, "--max-peak-bytes", "1"), "table": ("table",)}.get(command)
    if shown is None:
        fakes.recorded(monkeypatch, command, PRINTED[command])
        shown = (command, "124m", "--gpus", "8xH100")
    hint = f"zerojax {command} --explain"
    plain = run(*shown)[1]
    assert hint not in plain
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert run(*shown)[1] == f"{plain}\nThe columns: {hint}\n"
    assert hint not in run(*shown, "--json")[1]


@pytest.mark.parametrize("command", PRINTED)
def test_what_commands_print_fits(command):
    assert long_lines(str(PRINTED[command])), "in full where nobody asks"
    assert fitted(PRINTED[command]).count("\n") >= 2


def test_no_line_of_the_command_line_is_longer_than_80(run, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    for command in (
        ("audit", STEP, "--gpu", "H100", "--max-peak-bytes", "1", "--min-overlap", "0.99"),
        ("table", "--params", "7.5e9", "1e15"),
        ("--help",),
        *((name, flag) for name in COMMANDS for flag in ("--help", "--explain")),
        ("launch", "--help"),
    ):
        _, out, err = run(*command)
        assert out and not err and not long_lines(out), command
