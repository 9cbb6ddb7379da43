"""A random walk over the space of `tests/space.py`, further than its rows: `make fuzz`.

Each row must give one device's numbers, or be refused by an error that zerojax raises itself. All
are drawn from their number and the seed, so that one runs again alone:

    make fuzz SEED=7 COUNT=1000
    make fuzz SEED=7 ONLY=113
"""

import pathlib

import pytest

import zerojax
from tests.compared import check
from tests.space import walk


def is_refusal(error: BaseException) -> bool:
    """Whether zerojax itself raised it: an error of JAX's own tells no user what to do."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    package = pathlib.Path(zerojax.__file__).parent
    return trace is not None and package in pathlib.Path(trace.tb_frame.f_code.co_filename).parents


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    seed, count, only = map(metafunc.config.getoption, ("--seed", "--count", "--only"))
    numbers = range(count) if only is None else [only]
    drawn = [(seed, number) for number in numbers]
    metafunc.parametrize(("seed", "number"), drawn, ids=[f"{s}-{n}" for s, n in drawn])


@pytest.mark.filterwarnings("ignore")
def test_one_devices_numbers_or_a_refusal(seed, number):
    row = walk(seed, number)
    print(f"make fuzz SEED={seed} ONLY={number}\n{row}")
    try:
        check(row)
    except (TypeError, ValueError, NotImplementedError) as error:
        if not is_refusal(error):
            raise
        pytest.skip(f"refused: {error}")
