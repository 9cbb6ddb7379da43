"""What the command line prints: each column is explained, and nothing exceeds 80 columns."""

import dataclasses
import re
import sys

import pytest

import zerojax
from tests import stored
from tests.forecast import test_result
from tests.study import fakes
from zerojax import _text
from zerojax._forecast import doctor as _doctor
from zerojax._forecast.network import FLAG
from zerojax._forecast.result import Forecast
from zerojax._hlo import known as _known
from zerojax._study.result import Study

STEP = str(stored.HERE / "step3-8xH100-jax0.12.hlo")
OFFLOADED = dataclasses.replace(
    test_result.case(3, 30), on_host=12 * 2**30, pinned=96 * 2**30, network_bytes=2**30,
    tokens_per_second=1234567.8, link_bytes=2**41, groups="params over gpu, opt_state over node",
)  # fmt: skip
SLOW = dataclasses.replace(
    _known.GPUS["H100"],
    given_rates=dataclasses.replace(_known.GPUS["H100"].rates, network=1e9),
)
PRINTED = {
    "forecast": lambda: Forecast("64xH100", SLOW, (OFFLOADED, test_result.case(0, 100))),
    "study": lambda: Study((fakes.cell(asked="largest"), fakes.cell("9xH100", tflops=9.0))),
    "audit": lambda: stored.report("step3-8xH100-jax0.12"),
    "table": lambda: zerojax.memory_table(1e9, 8),
}


def titles(text):
    """The titles of a table's columns, each over its rule."""
    heading, rule = re.search(r"^(.+)\n([- ]+)$", text, flags=re.MULTILINE).groups()
    return [heading[under.start() : under.end()].strip() for under in re.finditer("-+", rule)]


@pytest.mark.parametrize("command", PRINTED)
def test_each_column_is_explained_in_a_sentence(command, run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    code, out, err = run(command, "--explain")
    assert (code, err) == (0, "")
    legend, said = out.split("\n\n")
    assert said == f"Nothing was run. For the table itself: zerojax {command} without --explain.\n"
    rows = [re.split("  +", line) for line in legend.splitlines()]
    assert rows.pop(0) == ["column", "what it says"]
    sentences = dict(rows)
    shown = titles(str(PRINTED[command]()))
    assert len(shown) > 5 and set(shown) <= sentences.keys()
    assert all(re.fullmatch(r"[A-Z].* .*\.", sentences[title]) for title in shown)


@pytest.mark.parametrize("command", PRINTED)
def test_only_a_terminal_is_told_how_to_have_columns_explained(command, run, monkeypatch):
    shown = {"audit": ("audit", STEP), "table": ("table",)}.get(command)
    if shown is None:
        monkeypatch.setattr(zerojax, command, lambda *_, **__: PRINTED[command]())
        shown = (command, "124m", "--gpus", "8xH100")
    hint = f"zerojax {command} --explain"
    assert hint not in run(*shown)[1]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert run(*shown)[1].endswith(f"\n\nThe columns: {hint}\n")
    assert hint not in run(*shown, "--json")[1]


def long_lines(text, columns=80):
    """Lines that are too long, but for words that cannot be split."""
    return [line for line in text.splitlines() if len(line) > columns and " " in line.strip()]


@pytest.mark.parametrize("command", PRINTED)
def test_what_commands_print_fits(command, monkeypatch):
    printed = PRINTED[command]()
    assert long_lines(str(printed)) or command == "table", "in full where nobody asks for less"
    monkeypatch.setenv("COLUMNS", "80")
    with _text.fitted():
        text = str(printed)
    assert text.count("\n") >= 2 and not long_lines(text)


def test_no_line_of_the_command_line_is_longer_than_80(run, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    limits = ("--max-peak-bytes", "1", "--min-overlap", "0.99")
    environ = {"NCCL_P2P_DISABLE": "1", "JAX_COORDINATOR_ADDRESS": "nohost"}
    found = _doctor.doctor(environ)
    monkeypatch.setattr(_doctor, "doctor", lambda: found)
    for command in (
        ("audit", STEP, "--gpu", "H100", *limits),
        ("table",),
        ("table", "--params", "1e15"),
        ("doctor",),
        *((name, "--explain") for name in PRINTED),
        ("--help",),
        *((name, "--help") for name in PRINTED),
    ):
        _, out, err = run(*command)
        assert out and not err and not long_lines(out), command
    assert FLAG in run("doctor")[1], "whole, to be copied"


@pytest.mark.gpu_code
def test_forecasts_and_audits_of_presets_fit(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for command in ("forecast", "--stages", "3"), ("audit",):
        code, out, err = run(command[0], "124m", "--gpus", "16xA100", *command[1:])
        assert (code, err) == (0, "") and out.count("\n") > 5
        assert not long_lines(out)
