"""Rows at random, from the space whose pairs tests/test_pairs.py has: `make fuzz`.

Each gives one device's numbers, or is refused by an error that zerojax raises itself:

    make fuzz SEED=7 COUNT=1000
    make fuzz SEED=7 FIRST=113 COUNT=1    # one of them, as its output says
    make fuzz X64=1                       # with jax_enable_x64
"""

import pathlib
import traceback

import jax
import pytest

import zerojax
from tests.support.compared import check, check_by_verify
from tests.support.space import walk


def is_refusal(error: BaseException) -> bool:
    """Whether a line of zerojax raises it: an error of JAX or Python tells no user what to do."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    package = pathlib.Path(zerojax.__file__).parent
    return (last.line or "").startswith("raise ") and package in pathlib.Path(last.filename).parents


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    seed, first, count = map(metafunc.config.getoption, ("seed", "first", "count"))
    pairs = [(seed, number) for number in range(first, first + count)]
    metafunc.parametrize(("seed", "number"), pairs, ids=[f"{s}-{n}" for s, n in pairs])


@pytest.mark.filterwarnings("ignore")
def test_one_devices_numbers_or_a_refusal(seed, number):
    row = walk(seed, number)
    wide = " X64=1" * jax.config.jax_enable_x64
    print(f"make fuzz SEED={seed} FIRST={number} COUNT=1{wide}\n{row}")
    try:
        check(row)
        if number % 10 == 0:
            check_by_verify(row)
    except (TypeError, ValueError, NotImplementedError) as error:
        if not is_refusal(error):
            raise
        pytest.skip(f"refused: {error}")
