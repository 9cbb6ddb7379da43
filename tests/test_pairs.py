"""Every pair of features: rows that have them, each compared with one device."""

import dataclasses
import re

import pytest

from tests.conftest import shared_with_ci
from tests.support.compared import check, check_by_verify, untrained
from tests.support.space import (
    FACTORS,
    LEFT_OUT,
    REFUSED,
    TOGETHER,
    Row,
    groups_of,
    refusal_of,
    rows,
    verified,
    wanted,
    wanted_apart,
)

LEVELS = [dataclasses.asdict(row) for row in rows()]


def test_every_pair_is_in_a_row():
    left = (wanted() | wanted_apart()).keys() - set().union(*map(groups_of, LEVELS))
    assert not left, f"in no row: {sorted(map(str, left))}"
    refused = [number for number, levels in enumerate(LEVELS) if refusal_of(levels)]
    assert not refused, f"zerojax refuses rows {refused}"


@pytest.mark.parametrize("levels", TOGETHER, ids=str)
def test_what_has_failed_together_is_in_a_row(levels):
    assert any(levels.items() <= row.items() for row in LEVELS)


def test_defaults_are_first_levels():
    first = {name: levels[0] for name, levels in FACTORS.items()}
    # Which only rows at random have, or those of APART.
    others = {"packed": "", "replayed": 0, "explicit": False, "experts": ""}
    assert dataclasses.asdict(Row()) == first | others


@pytest.mark.parametrize("number", shared_with_ci(range(len(rows()))))
@pytest.mark.filterwarnings("ignore")
def test_row(number):
    row = rows()[number]
    print(f"python tests/support/space.py {number}\n{row}")
    check(row)


@pytest.mark.ci
@pytest.mark.parametrize("number", verified())
@pytest.mark.filterwarnings("ignore")
def test_verify_finds_a_row_right(number):
    check_by_verify(rows()[number])


def each_of(refusals):
    """Each refusal with each of its levels, beside the first ones of the others."""
    for refusal in refusals:
        first = {name: of[0] for name, of in refusal.levels.items()}
        each = ((name, level) for name, of in refusal.levels.items() for level in of)
        for levels in {tuple({**first, name: level}.items()): None for name, level in each}:
            yield Row(**dict(levels)), refusal.says


@pytest.mark.parametrize(("row", "says"), list(each_of(REFUSED)), ids=str)
@pytest.mark.filterwarnings("ignore")
def test_what_no_step_has_together_is_refused_before_it_compiles(row, says, compiled):
    with pytest.raises(ValueError, match=says):
        step, *args = untrained(row)
        step.trace(*args)
    assert "jit(step)" not in compiled


@pytest.mark.parametrize(("row", "says"), list(each_of(LEFT_OUT)), ids=str)
@pytest.mark.filterwarnings("ignore")
def test_what_a_step_leaves_out_is_said(row, says, compiled):
    with pytest.warns(UserWarning, match=says):
        step, *args = untrained(row)
        step.trace(*args)
    assert re.search(says, repr(step))
