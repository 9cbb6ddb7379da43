"""Meshes: which are accepted, which axes ZeRO uses, and the order of devices in the default one."""

import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec as P

import zerojax
from tests.shapes import params_plan, shape, specs
from zerojax._plan.mesh import default_mesh, on_one_host

AUTO = (AxisType.Auto,) * 2


@pytest.mark.parametrize("axis", [(), ("data", "data"), 3, (3,)])
def test_axes_are_different_and_some(axis):
    with pytest.raises(ValueError, match=r"must name one mesh axis.*leave axis= out"):
        params_plan({"w": shape(16, 3)}, axis=axis)


def test_mesh_without_the_axis():
    with pytest.raises(ValueError, match=r"no axis 'model'.*Pass axis="):
        params_plan({"w": shape(16, 16)}, axis="model")
    two = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    meant = r"pass axis='x', axis='y' or both, axis=\('x', 'y'\)"
    with pytest.raises(ValueError, match=rf"the axes \('x', 'y'\) and none.*'data'.*: {meant}"):
        params_plan({"w": shape(16, 16)}, mesh=two)


def test_devices_in_place_of_a_mesh():
    some, auto = np.array(jax.devices()[:4]), r"axis_types=\(jax.sharding.AxisType.Auto,\)"
    for mesh in (some, list(some), tuple(some)):
        made = rf"Make one with jax.make_mesh\(\(4,\), \('data',\), {auto}, devices=devices\)"
        with pytest.raises(TypeError, match=made):
            params_plan({"w": shape(16, 16)}, mesh=mesh)
    for mesh, count in ((4, 4), ("data", 8)):
        made = rf"Make one with jax.make_mesh\(\({count},\), \('data',\), {auto}\)"
        with pytest.raises(TypeError, match=made):
            params_plan({"w": shape(16, 16)}, mesh=mesh)


@pytest.mark.parametrize(
    ("devices", "what"),
    [([0] * 4, r"names 3 of its 4 devices again"), ([], r"'data': 0} has no devices")],
)
def test_mesh_of_no_or_the_same_devices(devices, what):
    mesh = Mesh(np.array([jax.devices()[i] for i in devices]), ("data",))
    with pytest.raises(ValueError, match=rf"mesh.*{what}.*jax.make_mesh\(\(8,\)"):
        zerojax.shard_train_state({"params": {"w": jnp.ones((16, 16))}}, mesh=mesh)


def test_explicit_mesh_is_explained():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with pytest.raises(ValueError, match=r"Explicit.*axis_types=\(jax.sharding.AxisType.Auto,\)"):
        params_plan({"w": shape(16, 16)}, mesh=mesh)


def test_devices_of_one_host():
    """Those of a process, or of a slice where each process has a GPU of its own."""

    def of(processes, slices=None):
        devices = [types.SimpleNamespace(process_index=one) for one in processes]
        for device, one in zip(devices, slices or (), strict=False):
            device.slice_index = one
        return on_one_host(types.SimpleNamespace(devices=np.array(devices)))

    assert of([0, 0, 0, 1, 1]) == 3
    assert of(range(8), [0, 0, 0, 0, 1, 1, 1, 1]) == 4


@pytest.mark.gpu_code
def test_hosts_that_are_not_there():
    assert on_one_host(zerojax.aot.mesh("16xH100")) == 8
    assert on_one_host(zerojax.aot.mesh("16xH100", per_host=2)) == 2


def test_two_zero_axes_are_one():
    axes = ("host", "gpu")
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), axes, axis_types=AUTO)
    plan = params_plan({"w": shape(16, 30)}, mesh=mesh, axis=axes)
    assert plan.size == 8 and specs(plan)["params/w"] == P(("gpu", "host"))  # the fastest first


def test_the_mesh_says_which_axis_is_fast_and_not_the_order_of_names():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("node", "gpu"), axis_types=AUTO)
    named = [("gpu", "node"), ("node", "gpu")]
    one, other = (params_plan({"w": shape(16, 30)}, mesh=mesh, axis=axis) for axis in named)
    assert one.groups == other.groups and specs(one) == specs(other)
    assert one.batch_axes == ("node", "gpu")
    assert one.regathering(("gpu",)).kept_bytes() == 16 * 30 * 4 // 4


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What a mesh asks of a device. Where there are several hosts, JAX gives each a slice."""

    id: int
    process_index: int
    slice_index: int
    platform = "gpu"
    device_kind = "NVIDIA H100"


def test_the_mesh_goes_along_the_links_of_a_host_first(monkeypatch):
    """Devices of two hosts in turn; `jax.make_mesh` refuses more than one slice."""
    gpus = [Gpu(n, process_index=n // 2, slice_index=n // 2 % 2) for n in range(8)]
    monkeypatch.setattr(jax, "devices", lambda: gpus)
    assert [gpu.id for gpu in default_mesh().devices] == [0, 1, 4, 5, 2, 3, 6, 7]


def test_a_mesh_of_hsdp_is_told_of_groups():
    mesh = jax.make_mesh((2, 4), ("replicate", "shard"), axis_types=(AxisType.Auto,) * 2)
    state = {"params": {"w": jax.numpy.ones((64, 16))}}
    remedy = "groups=dict.fromkeys(('params', 'grads', 'opt_state'), 'shard')"
    with pytest.raises(ValueError, match=re.escape(remedy)):
        zerojax.shard_train_state(state, stage=3, mesh=mesh)
    groups = dict.fromkeys(("params", "grads", "opt_state"), "shard")
    placed = zerojax.shard_train_state(state, stage=3, mesh=mesh, groups=groups)
    assert placed["params"]["w"].sharding.spec == P("shard")
