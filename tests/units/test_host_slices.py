"""Whether XLA finds slices of host memory. The step says so only by how it compiles for GPUs."""

import contextlib
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

import zerojax
from zerojax import _compat
from zerojax._features import host_state as _host_state, xla_options as _xla_options
from zerojax._kernel.arrays import sliced, written
from zerojax._kernel.places import Placement

LAYERS, WIDTH = 9, 1024
ADDRESS = re.compile(r'byte_offset":"\d+","byte_stride":"([1-9]\d*)"')


def walk(stack, total):
    """Reads each layer a turn early, and writes it back."""

    def turn(i, carry):
        stack, total, layer = carry
        stack = written(stack, _compat.stored(layer * 2), i)
        return stack, total + layer, _compat.fetched(sliced(stack, i + 1))

    first = _compat.fetched(sliced(stack, 0))
    return lax.fori_loop(0, LAYERS - 1, turn, (stack, total, first))[:2]


def test_cpus_have_no_copy_engines():
    assert _host_state.are_found(jax.devices()[0])


@pytest.mark.gpu_code
def test_only_an_older_xla_takes_other_layers():
    """Of a loop that XLA doubles, the engines copy two layers a turn."""
    devices = zerojax.aot.mesh("1xH100").devices.reshape(-1)
    mesh = Mesh(devices, ("device",), axis_types=(AxisType.Auto,))
    there = Placement(PartitionSpec(), memory="pinned_host").sharding(mesh)
    shape = LAYERS, WIDTH, WIDTH
    stack = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=there)
    here = Placement(PartitionSpec()).sharding(mesh)
    total = jax.ShapeDtypeStruct((1, *shape[1:]), jnp.float32, sharding=here)
    options = {_xla_options.DOUBLE_BUFFER: True}
    lowered = jax.jit(walk, donate_argnums=0, compiler_options=options).lower(stack, total)
    strides = {int(stride) for stride in ADDRESS.findall(lowered.compile().as_text())}
    finds = strides == {2 * 4 * WIDTH**2}
    _host_state.are_found.cache_clear()
    warned = pytest.warns(UserWarning, match="Upgrade JAX to avoid both costs")
    with contextlib.nullcontext() if finds else warned:  # other warnings are errors
        assert strides and _host_state.are_found(devices[0]) == finds
