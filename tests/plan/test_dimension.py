"""The rule for one leaf: its sharded dimension, the reason where there is none, and overrides."""

import jax
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from tests.shapes import params_plan, shape, specs


def test_first_divisible_dimension_is_sharded():
    found = specs(params_plan({"a": shape(16, 24), "b": shape(3, 64), "c": shape(2, 2, 64)}))
    assert found == {
        "params/a": P("data"), "params/b": P(None, "data"), "params/c": P(None, None, "data"),
    }  # fmt: skip


def test_reasons_say_what_to_do():
    plan = params_plan(
        {"odd": shape(50257, 3), "small": shape(4, 4), "scalar": shape(), "over": shape(64, 64)},
        overrides={"over": P()},
    )
    reasons = {leaf.path: leaf.reason for leaf in plan.leaves}
    assert "pad dimension 0 to 50264" in reasons["params/odd"]
    assert reasons["params/small"] == "smaller than min_shard_size=128"
    assert reasons["params/scalar"] == "scalar"
    assert reasons["params/over"] == "overrides="


def test_override_decides_the_dimension():
    plan = params_plan({"w": shape(16, 16)}, overrides={"w$": P(None, "data")})
    assert specs(plan)["params/w"] == P(None, "data")


@pytest.mark.parametrize(
    ("spec", "error", "remedy"),
    [
        (P(None, "data"), ValueError, r"8 does not divide dimension 1 \(3\). Pad it to 8"),
        (P("model"), ValueError, r"no axis 'model'.*Name one of those"),
        (P(None, None, "data"), ValueError, r"more entries.*Drop the extra ones"),
        ("data", TypeError, r"map it to a jax.sharding.PartitionSpec"),
        (P(P.UNCONSTRAINED), ValueError, r"UNCONSTRAINED says nothing about placement. Put None"),
        (P("data", "data"), ValueError, r"one dimension.*Put 'data' there"),
    ],
)
def test_bad_override_names_path_and_remedy(spec, error, remedy):
    with pytest.raises(error, match=f"(?s)w.*{remedy}"):
        params_plan({"w": shape(16, 3)}, overrides={"w": spec})


@pytest.mark.parametrize("spec", [P(("gpu", "host")), P("host", "gpu")])
def test_override_in_another_order_or_of_two_dimensions_is_refused(spec):
    mesh = jax.make_mesh((2, 4), ("host", "gpu"), axis_types=(AxisType.Auto,) * 2)
    remedy = r"puts params/w on P\(.*axes \('host', 'gpu'\).*PartitionSpec\(None\)"
    with pytest.raises(ValueError, match=remedy):
        params_plan({"w": shape(16, 8)}, mesh=mesh, axis=("host", "gpu"), overrides={"w": spec})


def test_bad_override_pattern():
    with pytest.raises(TypeError, match=r"must map path patterns to specs, got \[.*Pass a dict"):
        params_plan({"w": shape(16, 3)}, overrides=[("w", P())])
    with pytest.raises(ValueError, match=r"overrides=.*no regular expression.*Escape"):
        params_plan({"w": shape(16, 3)}, overrides={"*w": P()})


def test_patterns_that_match_nothing_are_mistakes():
    message = r"'weight', which no parameter matches. Paths are such as (params/)?w\."
    with pytest.raises(ValueError, match=message):
        params_plan({"w": shape(16, 3)}, overrides={"weight": P()})
    with pytest.raises(ValueError, match=message):
        params_plan({"w": shape(16, 3)}, stacked="weight")
    with pytest.raises(ValueError, match=r"stacked=.*no regular expression.*Escape"):
        params_plan({"w": shape(16, 3)}, stacked="*")


@pytest.mark.parametrize("typo", ["dense/kernal", "params/Dense_0/kernl", "Densee", "^kernels$"])
def test_patterns_with_a_typo_are_told_what_they_mean(typo):
    params = {"Dense_0": {"kernel": shape(16, 3)}, "Conv_0": {"bias": shape(16)}}
    with pytest.raises(ValueError, match=r"no parameter matches. Did you mean params/Dense_0/ker"):
        params_plan(params, overrides={typo: P()})


@pytest.mark.parametrize("size", [-1, "a", 1.5])
def test_min_shard_size_is_a_number_of_elements(size):
    with pytest.raises(ValueError, match=r"must be a number of elements.*Use 0"):
        params_plan({"w": shape(16, 3)}, min_shard_size=size)
