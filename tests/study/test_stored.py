"""A study's file: what is found there again, and what is refused."""

import dataclasses
import json

import pytest

from tests.checkpoint.damage import pipe_for
from tests.study import fakes
from zerojax._study.stored import Stored


def test_what_is_put_is_found_again_by_another_run(tmp_path):
    path = tmp_path / "study.json"
    first = Stored(path)
    one, other = fakes.cell(), fakes.cell("128xH100", tflops=410.0)
    assert first.done(one) is None
    first.put(one)
    assert json.loads(path.read_text())["cells"][0]["tflops"] == 400
    first.put(other)
    asked = dataclasses.replace(one, figures=None)
    assert Stored(path).done(asked) == one
    assert Stored(path).done(dataclasses.replace(other, figures=None)) == other
    assert [entry.name for entry in tmp_path.iterdir()] == ["study.json"]


@pytest.mark.parametrize("field", ["model", "gpus", "stage", "asked", "settings", "key"])
def test_what_was_asked_otherwise_is_not_done(tmp_path, field):
    stored = Stored(tmp_path / "study.json")
    stored.put(fakes.cell())
    other = dataclasses.replace(fakes.cell(), **{field: "other"})
    assert stored.done(other) is None
    stored.put(dataclasses.replace(other, gpus="8xH100"))
    assert stored.done(fakes.cell()) == fakes.cell()


def test_a_newer_cell_takes_the_place_of_a_stale_one(tmp_path):
    path = tmp_path / "study.json"
    Stored(path).put(fakes.cell())
    stored = Stored(path)
    stored.put(fakes.cell("128xH100"))
    newer = dataclasses.replace(fakes.cell(tflops=500.0), key="newer")
    stored.put(newer)
    assert Stored(path).cells == [fakes.cell("128xH100"), newer]
    assert stored.found(dataclasses.replace(newer, figures=None)) == newer


def test_what_failed_is_kept_and_tried_again(tmp_path):
    stored = Stored(tmp_path / "study.json")
    stored.put(fakes.cell(failed="out of luck"))
    asked = dataclasses.replace(fakes.cell(), figures=None)
    assert stored.done(asked) is None and stored.found(asked).failed == "out of luck"
    assert Stored(stored.path).cells == stored.cells


def test_without_a_file_cells_are_kept_in_memory():
    stored = Stored(None)
    stored.put(fakes.cell())
    assert stored.done(fakes.cell()) == fakes.cell()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"{", "it is no JSON: Expecting property name"),
        (b"\xff\xfe", "it is no text"),
        (b"[1]", "is missing or wrong"),
        (b'{"rows": []}', "'zerojax_study' is missing or wrong"),
        (b'{"zerojax_study": 9, "cells": []}', "its format is 9, not 1"),
        (b'{"zerojax_study": 1}', "'cells' is missing or wrong"),
        (b'{"zerojax_study": 1, "cells": [{"model": "x"}]}', "'gpus' is missing or wrong"),
        (b'{"zerojax_study": 1, "cells": 3}', "is missing or wrong"),
    ],
)
def test_a_broken_or_foreign_file_stays_as_it_is(tmp_path, text, why):
    path = tmp_path / "mine.json"
    path.write_bytes(text)
    with pytest.raises(ValueError, match="remove this one") as raised:
        Stored(path)
    assert str(path) in str(raised.value) and why in str(raised.value)
    assert path.read_bytes() == text


def test_where_no_file_can_be_is_said_first(tmp_path):
    for path in (tmp_path, tmp_path / "nosuch" / "study.json"):
        with pytest.raises(ValueError, match="name a file in a folder that exists") as raised:
            Stored(path)
        assert str(path) in str(raised.value)


def test_a_pipe_is_not_waited_for(tmp_path):
    path = tmp_path / "study.json"
    with pipe_for(path), pytest.raises(ValueError, match=r"study.json' cannot be .*: name a file"):
        Stored(path)
