"""The order of devices in the default mesh."""

import dataclasses

import jax
import pytest

import zerojax
from tests.support.shapes import params_plan, shape


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
