"""Plans made from shapes: what a stage shards, what is kept, and what is warned about."""

import re
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import zerojax
from tests.conftest import make_mesh
from tests.shapes import params_plan, shape, specs
from zerojax._plan import mesh as _mesh


def test_stage_decides_only_where_specs_apply():
    tx = optax.adam(1e-3)
    params = {"w": shape(16, 16)}
    state = {"params": params, "opt_state": jax.eval_shape(tx.init, params)}
    at = {stage: specs(zerojax.plan(state, stage=stage, tx=tx)) for stage in range(4)}
    moments = "opt_state/0/mu/w"
    assert [at[s]["params/w"] for s in range(4)] == [P(), P(), P(), P("data")]
    assert [at[s][moments] for s in range(4)] == [P(), P("data"), P("data"), P("data")]


def test_existing_axes_are_kept():
    axes = ("data", "tensor")
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), axes, axis_types=(AxisType.Auto,) * 2)
    params = {
        "boxed": nn.Partitioned(shape(16, 16), names=("tensor", None)),
        "logical": nn.LogicallyPartitioned(shape(16, 16), names=("embed", "mlp")),
        "placed": jax.device_put(jnp.ones((16, 16)), NamedSharding(mesh, P(None, "tensor"))),
    }
    found = specs(params_plan(params, mesh=mesh))
    assert found["params/boxed/value"] == P("tensor", "data")
    assert found["params/logical/value"] == P("data")
    assert found["params/placed"] == P("data", "tensor")


def test_other_fields_follow_the_parameters_they_copy():
    class State(TrainState):
        ema_params: dict
        batch_stats: dict

    params = {"w": jnp.ones((16, 16))}
    stats = {"mean": jnp.zeros(512)}
    state = State.create(
        apply_fn=None, params=params, tx=optax.sgd(1.0), ema_params=params, batch_stats=stats
    )
    found = specs(zerojax.plan(state, stage=1))
    assert found["ema_params/w"] == P("data") and found["batch_stats/mean"] == P()


@pytest.mark.parametrize("stage", [-1, 4, "3", None, True, 1.5, 3.0])
def test_stage_outside_0_to_3(stage):
    with pytest.raises(ValueError, match=r"stage must be 0, 1, 2 or 3"):
        params_plan({"w": shape(16, 16)}, stage=stage)


def test_large_replicated_leaves_are_warned_about():
    said = r"params/table .*divides by 8, and pad=False.*Allow padding"
    with pytest.warns(UserWarning, match=said):
        params_plan({"table": shape(50257, 13)}, pad=False)
    params_plan({"table": shape(50257, 13)})  # padded: a warning would fail


def test_one_device_by_default_is_said_once(monkeypatch):
    state, one = {"params": {"w": jnp.ones((64, 16))}}, make_mesh(1)
    monkeypatch.setattr(jax, "devices", lambda: list(one.devices.flat))
    _mesh.say_alone.cache_clear()
    zerojax.shard_train_state(state, stage=0)  # what warns here fails
    zerojax.shard_train_state(state, stage=3, mesh=one)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for stage in (1, 3, 3):
            zerojax.shard_train_state(state, stage)
        assert "sharded: nothing" in str(zerojax.plan(state))
    (said,) = caught
    remedy = r"one cpu device, so a stage shards nothing.*'jax_num_cpu_devices', 8\).*mesh="
    assert said.category is UserWarning and re.search(remedy, str(said.message))
    assert said.filename == __file__
