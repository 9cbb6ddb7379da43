"""What a stage is: a table of groups, and the placements that follow for each leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import zerojax
from tests.conftest import make_mesh
from zerojax._plan.placement import Groups, Placement, groups_of

AXES = ("replica", "data")
# By stage, whether a parameter is sharded at rest, its gradient, and both for the update.
TABLE = {
    0: (False, False, False),
    1: (False, False, True),
    2: (False, True, True),
    3: (True, True, True),
}
PARAMS = {"w": jnp.ones((16, 64)), "b": jnp.zeros(8)}


def planned(stage, params=PARAMS, **options):
    state = {"params": params, "opt_state": optax.adam(1e-3).init(params)}
    options = {"mesh": make_mesh()} | options
    made = zerojax.plan(state, stage=stage, tx=optax.adam(1e-3), **options)
    return made, {leaf.path: leaf for leaf in made.leaves}


def test_a_stage_is_three_groups():
    assert groups_of(0, AXES) == Groups((), (), ())
    assert groups_of(1, AXES) == Groups((), (), AXES)
    assert groups_of(2, AXES) == Groups((), AXES, AXES)
    assert groups_of(3, AXES) == Groups(AXES, AXES, AXES)


@pytest.mark.parametrize("stage", TABLE)
def test_placements_of_a_parameter_follow_the_table(stage):
    plan, leaves = planned(stage)
    w, mean = leaves["params/w"], leaves["opt_state/0/mu/w"]
    sharded = Placement(P("data"), ("data",))
    wanted = [sharded if yes else Placement(P()) for yes in TABLE[stage]]
    assert [w.rest, w.grad, w.update] == wanted
    assert mean.rest == mean.update == w.update and mean.grad is None
    assert plan.batch_axes == ("data",)
    assert plan.groups == Groups(*[("data",) if yes else () for yes in TABLE[stage]])
    assert (w.spec, w.shard_spec, w.dim) == (w.rest.spec, w.update.spec, w.update.dim)
    assert plan.sharded == dict(zip(("params", "grads", "opt_state"), TABLE[stage], strict=True))


@pytest.mark.parametrize("stage", TABLE)
def test_a_replicated_leaf_spans_no_axes(stage):
    _, leaves = planned(stage)
    small = leaves["params/b"]
    assert small.reason == "smaller than min_shard_size=128"
    for place in (small.rest, small.grad, small.update, leaves["opt_state/0/mu/b"].rest):
        assert place == Placement(P()) and place.axes == () and place.dim is None
        assert place.local == P() and place.others(1) == ()


@pytest.mark.parametrize("stage", TABLE)
def test_axes_of_the_users_own_stay_at_every_stage(stage):
    devices = np.array(jax.devices()).reshape(4, 2)
    mesh = Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    kernel = jax.device_put(jnp.ones((16, 64)), NamedSharding(mesh, P(None, "tensor")))
    plan, leaves = planned(stage, {"w": kernel}, mesh=mesh, axis="data")
    leaf = leaves["params/w"]
    sharded = Placement(P("data", "tensor"), ("data",))
    wanted = [sharded if yes else Placement(P(None, "tensor")) for yes in TABLE[stage]]
    assert [leaf.rest, leaf.grad, leaf.update] == wanted
    assert sharded.dim == 0 and sharded.local == P("data", None)
    assert sharded.others(2) == (None, "tensor")
    assert leaf.rest.sharding(mesh).shard_shape((16, 64)) == (4 if TABLE[stage][0] else 16, 32)
    assert plan.batch_axes == ("data",)


def test_several_axes_shard_one_dimension_together():
    devices = np.array(jax.devices()).reshape(2, 4)
    mesh = Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 2)
    _, leaves = planned(3, mesh=mesh, axis=AXES)
    place = leaves["params/w"].rest
    fastest_first = AXES[::-1]
    assert place == Placement(P(fastest_first), fastest_first)
    assert (place.dim, place.local) == (0, P(fastest_first))
    assert place.sharding(mesh).shard_shape((16, 64)) == (2, 64)
