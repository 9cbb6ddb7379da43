"""What several files of forecasts use."""

import pytest

from tests.forecast import fakes


@pytest.fixture
def cpus():
    with fakes.cpus_for_gpus():
        yield
