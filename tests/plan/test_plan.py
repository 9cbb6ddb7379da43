"""Plans: what each stage shards, what a user has sharded already, and plans as values."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec as P

import zerojax
from tests.support.linear import made
from tests.support.shapes import params_plan, shape, specs

ADAM = optax.adam(1e-3)
PARAMS = {"w": shape(16, 64), "b": shape(8)}
TENSOR = zerojax.mesh(data=4, tensor=2)
KINDS = ("params", "grads", "opt_state")


def planned(stage, params=PARAMS, **options):
    state = {"params": params, "opt_state": jax.eval_shape(ADAM.init, params)}
    plan = zerojax.plan(state, stage=stage, tx=ADAM, **options)
    return plan, {leaf.path: leaf for leaf in plan.leaves}


@pytest.mark.parametrize("stage", range(4))
def test_a_stage_says_what_is_sharded(stage):
    """Optimizer state and updates from stage 1 on, gradients from stage 2, parameters at 3."""
    sharded = dict(zip(KINDS, (stage >= 3, stage >= 2, stage >= 1), strict=True))
    plan, leaves = planned(stage)
    assert plan.batch_axes == ("data",)
    assert {kind: bool(getattr(plan.groups, kind)) for kind in KINDS} == sharded
    spec = {kind: P("data") if sharded[kind] else P() for kind in KINDS}
    weight, mean = leaves["params/w"], leaves["opt_state/0/mu/w"]
    assert weight.rest.spec == weight.spec == spec["params"]
    assert weight.grad.spec == spec["grads"]
    assert weight.update.spec == mean.rest.spec == mean.update.spec == spec["opt_state"]
    for path in ("params/b", "opt_state/0/mu/b"):
        assert leaves[path].rest.spec == leaves[path].update.spec == P()


@pytest.mark.parametrize("stage", range(4))
def test_axes_of_the_users_own_stay_at_every_stage(stage):
    kernel = jax.device_put(np.ones((16, 64), "f"), NamedSharding(TENSOR, P(None, "tensor")))
    plan, leaves = planned(stage, {"w": kernel}, mesh=TENSOR, axis="data")
    leaf, own = leaves["params/w"], P(None, "tensor")
    specs = [place.spec for place in (leaf.rest, leaf.grad, leaf.update)]
    assert specs == [P("data", "tensor") if stage >= n else own for n in (3, 2, 1)]
    assert leaf.bytes_per_device(TENSOR) == 16 * 64 * 4 // (8 if stage == 3 else 2)
    assert plan.batch_axes == ("data",)


def test_the_mesh_says_which_axis_is_fast_and_not_the_order_of_names():
    mesh, wide = zerojax.mesh(node=2, gpu=4), {"w": shape(16, 30)}
    named = [("gpu", "node"), ("node", "gpu")]
    one, other = (params_plan(wide, mesh=mesh, axis=axis) for axis in named)
    assert one.groups == other.groups and one.batch_axes == ("node", "gpu") and one.size == 8
    assert specs(one) == specs(other) == {"params/w": P(("gpu", "node"))}
    assert one.params[0].rest.sharding(mesh).shard_shape((16, 30)) == (2, 30)
    assert one._regathering(("gpu",))._kept_bytes() == 16 * 30 * 4 // 4


def test_other_fields_follow_the_parameters_they_copy():
    class State(TrainState):
        ema_params: dict
        batch_stats: dict

    params, stats = {"w": shape(16, 16)}, {"mean": shape(512)}
    state = State(0, None, params, optax.sgd(1.0), (), ema_params=params, batch_stats=stats)
    plan = zerojax.plan(state, stage=1)
    assert specs(plan)["ema_params/w"] == P("data") and specs(plan)["batch_stats/mean"] == P()


def test_large_replicated_leaves_are_warned_about():
    table = {"table": shape(50257, 13)}
    with pytest.warns(UserWarning, match=r"params/table .*by 8, and pad=False.*Allow padding"):
        params_plan(table, pad=False)
    params_plan(table)  # padded: a warning would fail


def test_a_plan_is_a_value():
    one, two = params_plan({"w": shape(16, 16)}), params_plan({"w": shape(16, 16)})
    assert one == two and hash(one) == hash(two)
    assert one != params_plan({"w": shape(16, 16)}, stage=2)
    with pytest.raises(AttributeError):
        one.stage = 2
    plan = zerojax.plan(made)  # whose static fields are made anew each time
    assert zerojax.plan(made()) == plan
    abstract = plan.abstract()
    assert isinstance(abstract, TrainState)
    assert abstract.params["w"].sharding == NamedSharding(plan.mesh, P("data"))


# -- the order of devices in the default mesh


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What a mesh asks of a device."""

    id: int
    process_index: int
    platform = "gpu"
    device_kind = "NVIDIA H100"


@dataclasses.dataclass(frozen=True)
class SlicedGpu(Gpu):
    """Where there are several hosts, JAX gives each a slice."""

    slice_index: int


PROGRAM = """HloModule m, num_partitions=8
ENTRY %main (x: f32[]) -> f32[] {
  ROOT %x = f32[] parameter(0)
}"""
SLICED = [SlicedGpu(n, process_index=n // 2, slice_index=n // 2 % 2) for n in range(8)]


def test_the_mesh_goes_along_the_links_of_a_host_first(monkeypatch):
    """Devices of two hosts in turn; `jax.make_mesh` refuses more than one slice."""
    monkeypatch.setattr(jax, "devices", lambda: SLICED)
    mesh = params_plan({"w": shape(64, 16)}).mesh
    assert [gpu.id for gpu in mesh.devices] == [0, 1, 4, 5, 2, 3, 6, 7]


@pytest.mark.parametrize(
    ("gpus", "per_host"), [([Gpu(n, n // 5) for n in range(8)], 5), (SLICED, 4)]
)
def test_an_audit_counts_the_devices_of_a_host(gpus, per_host):
    """Those of a process, or of a slice where each process has some GPUs of several."""
    mesh = jax.sharding.Mesh(gpus, ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    plan = params_plan({"w": shape(64, 16)}, mesh=mesh)
    assert zerojax.audit(PROGRAM, plan=plan).per_host == per_host
