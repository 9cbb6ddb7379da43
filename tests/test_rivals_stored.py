"""Rivals with environments of their own are stored as the programs beside them are."""

import json
import pathlib

import pytest

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"


def stored(path):
    return json.loads(path.read_text())


def keys_of_ours():
    newest = sorted(BENCHMARKS.glob("compiled_jax*.json"))[-1]
    return list(stored(newest)["rows"][0])


@pytest.mark.parametrize("rival", ("maxtext", "levanter"))
def test_rows_have_the_same_keys_and_name_what_was_measured(rival):
    result = stored(BENCHMARKS / f"rivals_{rival}.json")
    assert result["packages"] and result["jax"]
    assert result["rows"]
    for row in result["rows"]:
        assert list(row) == keys_of_ours() and row["date"]
