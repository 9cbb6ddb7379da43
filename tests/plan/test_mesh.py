"""The order of devices in the default mesh."""

import dataclasses

import jax

from tests.shapes import params_plan, shape


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
    mesh = params_plan({"w": shape(64, 16)}).mesh
    assert [gpu.id for gpu in mesh.devices] == [0, 1, 4, 5, 2, 3, 6, 7]
