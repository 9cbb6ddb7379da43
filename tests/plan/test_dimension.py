"""The rule for one leaf: its sharded dimension, the reason where there is none, and overrides."""

import jax
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from tests.conftest import make_mesh
from tests.shapes import params_plan, shape, specs
from zerojax._plan import dimension as _dimension


def test_first_divisible_dimension_is_sharded():
    found = specs(params_plan({"a": shape(16, 24), "b": shape(3, 64), "c": shape(2, 2, 64)}))
    assert found == {
        "params/a": P("data"), "params/b": P(None, "data"), "params/c": P(None, None, "data"),
    }  # fmt: skip


def test_reasons_say_what_to_do():
    plan = params_plan(
        {"odd": shape(3, 3, 100), "small": shape(4, 4), "scalar": shape(), "over": shape(64, 64)},
        overrides={"over": P()},
        pad=False,
    )
    reasons = {leaf.path: leaf.reason for leaf in plan.leaves}
    assert reasons["params/odd"] == "no dimension of (3, 3, 100) divides by 8, and pad=False"
    assert reasons["params/small"] == "smaller than min_shard_size=128"
    assert reasons["params/scalar"] == "scalar"
    assert reasons["params/over"] == "overrides="


def test_the_dimension_of_least_padding_is_padded_where_none_divides():
    shapes = {
        "long": shape(50257, 3),
        "minor": shape(3, 9, 1001),
        "alike": shape(13, 13),
        "divides": shape(1001, 16),
        "narrow": shape(3, 3, 3, 3, 3),
        "layers": shape(3, 9, 1001),
    }
    plan = params_plan(shapes, stacked="layers")
    padded = {leaf.path[7:]: (leaf.padded_shape, leaf.spec) for leaf in plan.leaves}
    assert padded == {
        "long": ((50264, 3), P("data")),
        "minor": ((3, 9, 1008), P(None, None, "data")),
        "alike": ((16, 13), P("data")),
        "divides": ((1001, 16), P(None, "data")),
        "narrow": ((3, 3, 3, 3, 3), P()),
        "layers": ((3, 9, 1008), P(None, None, "data")),
    }
    reasons = {leaf.path: leaf.reason for leaf in plan.leaves if leaf.reason}
    near = "padding any dimension of (3, 3, 3, 3, 3) to a multiple of 8 would make it more than 2"
    assert list(reasons) == ["params/narrow"] and reasons["params/narrow"].startswith(near)


def test_the_first_dimension_of_a_stack_is_never_padded_and_pad_is_a_switch():
    plan = params_plan({"blocks": {"a": shape(5, 30, 3), "b": shape(5, 7, 3)}}, stacked="blocks")
    assert specs(plan) == {"params/blocks/a": P(None, "data"), "params/blocks/b": P()}
    with pytest.raises(TypeError, match=r"pad='no' must be True or False"):
        params_plan({"w": shape(16, 3)}, pad="no")


def test_of_two_dimensions_that_count_layers_the_second_is_sharded_last():
    rule = _dimension.Rule(make_mesh(), ("data",), {}, 128, True)
    found = [rule("w", shape, P(), 2)[0] for shape in ((3, 8, 37, 37), (3, 8, 3, 3))]
    assert [_dimension.shard_dim(spec, ("data",)) for spec in found] == [2, 1]


def test_an_override_names_the_dimension_to_pad():
    plan = params_plan({"w": shape(16, 30)}, overrides={"w": P(None, "data")})
    (leaf,) = plan.leaves
    assert (leaf.spec, leaf.padded_shape) == (P(None, "data"), (16, 32))
    assert leaf.bytes_per_device(plan.mesh) == 16 * 4 * 4


def test_override_decides_the_dimension():
    plan = params_plan({"w": shape(16, 16)}, overrides={"w$": P(None, "data")})
    assert specs(plan)["params/w"] == P(None, "data")


@pytest.mark.parametrize(
    ("spec", "error", "remedy"),
    [
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


def test_an_override_may_not_name_a_dimension_that_does_not_divide_without_padding():
    remedy = r"w .*8 does not divide dimension 1 \(3\). Resize it to 8 or override another"
    with pytest.raises(ValueError, match=remedy):
        params_plan({"w": shape(16, 3)}, overrides={"w": P(None, "data")}, pad=False)
    # JAX shards over the user's own axes, and does not pad.
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    with pytest.raises(ValueError, match=r"2 does not divide dimension 1 \(3\)"):
        params_plan({"w": shape(16, 3)}, mesh=mesh, overrides={"w": P("data", "tensor")})


def over_hosts(spec):
    mesh = jax.make_mesh((2, 2, 2), ("host", "gpu", "tensor"), axis_types=(AxisType.Auto,) * 3)
    overrides = {"w": spec}
    return params_plan({"w": shape(16, 8)}, mesh=mesh, axis=("host", "gpu"), overrides=overrides)


@pytest.mark.parametrize("spec", [P("host", "gpu"), P(("gpu", "tensor"))])
def test_override_of_two_dimensions_or_with_other_axes_is_refused(spec):
    remedy = r"puts params/w on P\(.*axes \('gpu', 'host'\).*PartitionSpec\(None\)"
    with pytest.raises(ValueError, match=remedy):
        over_hosts(spec)


@pytest.mark.parametrize("names", [("host", "gpu"), ("gpu", "host")])
def test_override_over_several_axes_gets_them_in_the_order_of_all_leaves(names):
    assert specs(over_hosts(P(names)))["params/w"] == P(("gpu", "host"))


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
    with pytest.raises(TypeError, match=r"stacked=\('w',\) is no path pattern. Pass one regular"):
        params_plan({"w": shape(16, 3)}, stacked=("w",))


@pytest.mark.parametrize("typo", ["dense/kernal", "params/Dense_0/kernl", "Densee", "^kernels$"])
def test_patterns_with_a_typo_are_told_what_they_mean(typo):
    params = {"Dense_0": {"kernel": shape(16, 3)}, "Conv_0": {"bias": shape(16)}}
    with pytest.raises(ValueError, match=r"no parameter matches. Did you mean params/Dense_0/ker"):
        params_plan(params, overrides={typo: P()})


@pytest.mark.parametrize("size", [-1, "a", 1.5])
def test_min_shard_size_is_a_number_of_elements(size):
    with pytest.raises(ValueError, match=r"must be a number of elements.*Use 0"):
        params_plan({"w": shape(16, 3)}, min_shard_size=size)
