"""Whether XLA finds slices of host memory. The step says so only by how it compiles for GPUs."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from zerojax._features import host_state as _slices


def test_the_program_that_is_looked_at_reads_each_layer_and_doubles_it():
    stack, total = jnp.arange(9.0)[:, None, None] * jnp.ones((9, 2, 2)), jnp.zeros((1, 2, 2))
    with jax.transfer_guard("allow"):
        new, total = jax.jit(_slices._walk)(jax.device_put(stack, jax.memory.Space.Host), total)
    np.testing.assert_array_equal(np.asarray(new)[:8], 2 * stack[:8])
    np.testing.assert_array_equal(total, np.full((1, 2, 2), sum(range(8))))
    assert _slices.are_found(jax.devices()[0]), "CPUs have no copy engines"


@pytest.mark.gpu_code
def test_only_an_older_xla_takes_other_layers():
    _slices.are_found.cache_clear()
    (device,) = zerojax.aot.mesh("1xH100").devices.flat
    finds = jax.__version_info__ >= (0, 11)
    warned = pytest.warns(UserWarning, match="A newer JAX needs neither")
    with contextlib.nullcontext() if finds else warned:  # other warnings are errors
        assert _slices.are_found(device) == finds
