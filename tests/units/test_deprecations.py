"""Names that go, planted: they work, and warn of what to use and until when."""

import datetime

import pytest

import zerojax
from tests.conftest import is_here
from tests.support.linear import made
from zerojax import _declared, _deprecations
from zerojax._deprecations import Old

SINCE = datetime.date(2027, 11, 30)
DATES = r"is deprecated since 2027-11-30, and goes after 2028-03-01\. "


@pytest.fixture(autouse=True)
def planted(monkeypatch):
    names = {"zerojax.shard": Old("zerojax.shard_train_state", SINCE)}
    names["zerojax.tools.cost"] = Old("zerojax._table.Table", SINCE, "Print it yourself.")
    options = {"level": Old("stage", SINCE), "pad": Old("pad", SINCE, "Leave it out.")}
    monkeypatch.setattr(_deprecations, "OLD_NAMES", names)
    monkeypatch.setattr(
        _deprecations, "OLD_ARGUMENTS", {"plan": options, "double": {"n": Old("x", SINCE)}}
    )


def test_a_name_that_goes_works_and_says_what_to_use():
    for _ in range(2):  # it warns each time, and is not kept
        with pytest.warns(FutureWarning) as warned:
            assert zerojax.shard is zerojax.shard_train_state
        (one,) = warned
        assert str(one.message).startswith("zerojax.shard is deprecated since 2027-11-30, and goes")
        assert str(one.message).endswith("after 2028-03-01. Use zerojax.shard_train_state instead.")
        assert is_here(one, __file__)
    assert "shard" not in dir(zerojax)
    message = rf"^zerojax\.tools\.cost {DATES}Print it yourself\.$"
    with pytest.warns(FutureWarning, match=message):
        assert zerojax.tools.cost is zerojax._table.Table


def test_other_names_are_unknown_as_before():
    for module in (zerojax, zerojax.tools):
        with pytest.raises(
            AttributeError, match=f"^module '{module.__name__}' has no attribute 'sh'"
        ):
            module.sh  # noqa: B018


def test_an_argument_that_goes_works_and_says_what_to_use():
    with pytest.warns(
        FutureWarning, match=rf"^level= of plan {DATES}Use stage= instead\.$"
    ) as warned:
        assert zerojax.plan(made(), level=1) == zerojax.plan(made(), stage=1)
    assert is_here(warned[0], __file__)
    with pytest.warns(FutureWarning, match=rf"^pad= of plan {DATES}Leave it out\.$"):
        assert not zerojax.plan(made(), pad=False).pads
    for both in ({"level": 1, "stage": 2}, {"stage": 2, "level": 1}):
        with (
            pytest.warns(FutureWarning),
            pytest.raises(
                TypeError, match=r"^plan got both stage= and level=, its old.* Pass stage="
            ),
        ):
            zerojax.plan(made(), **both)


def test_a_function_without_declared_options_takes_old_arguments_too():
    @_declared.checked
    def double(x, y=0):
        return 2 * x + y

    with pytest.warns(FutureWarning, match=f"^n= of double {DATES}Use x= instead"):
        assert double(n=3, y=1) == 7
    assert double(3, y=1) == 7
