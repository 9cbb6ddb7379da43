"""The most rows that fit: what is found, and after how many compiles."""

import dataclasses

import pytest

from tests.study import fakes
from zerojax._study import rows as _rows


def searched(peak, least=1):
    """The rows found, and those that were tried."""
    tried = []

    def made(rows):
        tried.append(rows)
        return dataclasses.replace(fakes.figures(rows), peak=int(peak(rows) * fakes.GIB))

    found = _rows.largest(made, least)
    return found.rows, tried


def test_the_rows_to_choose_from():
    steps = _rows.ladder(1)
    assert steps[:17] == [*range(1, 17), 18] and steps[16:24] == list(range(18, 34, 2))
    assert steps == sorted(set(steps)) and steps[-1] == 15 * 2**13
    assert _rows.ladder(3)[:9] == list(range(3, 30, 3))


@pytest.mark.parametrize(
    ("state", "row", "most"),
    [(3, 1, 64), (10, 5, 12), (10, 20, 3), (60, 10, 1), (3, 0.01, 6656), (70, 0.5, 5)],
)
@pytest.mark.parametrize("least", [1, 2])
def test_the_most_that_fit_are_found_in_a_few_compiles(state, row, most, least):
    """Of 72.8 GiB that are usable: the next step of the ladder does not fit."""
    peak = lambda rows: state + row * rows / least
    found, tried = searched(peak, least)
    assert found == most * least
    steps = _rows.ladder(least)
    after = steps[steps.index(found) + 1]
    assert peak(found) <= fakes.H100.usable / fakes.GIB < peak(after)
    assert len(tried) == len(set(tried)) <= 5


def test_memory_as_xla_schedules_it_is_no_line():
    """Peaks of 7.5B at stage 3 on 64 H100s, GiB by rows."""
    peaks = {4: 6.2, 56: 54.3, 72: 61.5, 80: 70.5, 88: 81.9, 96: 83.9}
    found, tried = searched(lambda rows: peaks[rows])
    assert found == 80 and len(tried) <= 6


def test_memory_that_is_no_line_is_searched_too():
    found, tried = searched(lambda rows: 20 + rows**1.5)
    assert found == 14 and len(tried) <= 6
    found, tried = searched(lambda rows: 20 if rows < 100 else 80)
    assert found == 96


def test_where_none_fit_the_fewest_say_what_they_need():
    found, tried = searched(lambda rows: 80 + rows, least=2)
    assert found == 2 and tried[-1] == 2


def test_rows_that_need_nothing_end():
    found, tried = searched(lambda rows: 3)
    assert found == _rows.ladder(1)[-1] and len(tried) <= 3
