"""A cell of a study: what it says of a case, and as a dict."""

import dataclasses
import json

import pytest

from tests.forecast import test_result
from tests.study import fakes
from zerojax._study.cell import Cell, Figures


def test_figures_are_those_of_a_case():
    case = dataclasses.replace(test_result.case(3, 30), mfu=0.5, link_bytes=3, network_bytes=4)
    made = Figures.of(case, 8, fakes.H100)
    assert (made.rows, made.usable, made.wire_bytes) == (8, fakes.H100.usable, 7)
    assert made.tflops == pytest.approx(0.5 * 989)
    for name in ("peak", "parameters", "step_seconds", "exposed_seconds", "mfu"):
        assert getattr(made, name) == getattr(case, name), name


def test_what_does_not_fit_has_figures_that_do_not_count():
    small, large = fakes.cell(peak=72), fakes.cell(peak=73)
    assert small.fitting is small.figures and small.figures.fits
    assert large.fitting is None and large.figures and not large.figures.fits
    assert fakes.cell(failed="no").fitting is None


@pytest.mark.parametrize("one", [fakes.cell(asked="largest"), fakes.cell(failed="out of luck")])
def test_a_dict_and_back(one):
    found = json.loads(json.dumps(one.to_dict()))
    assert Cell.of_dict(found) == one
    assert found.get("fits") == (None if one.failed else True)
    del found["key"]
    with pytest.raises(KeyError, match="key"):
        Cell.of_dict(found)


def test_a_cell_names_itself_and_its_gpus():
    one = fakes.cell("400xV100-32GB", stage=2, asked="largest")
    assert str(one) == "7.5b on 400xV100-32GB, stage 2, largest rows"
    assert (one.count, one.kind) == (400, "V100-32GB")
