"""Every test runs on 8 emulated CPU devices, and fails rather than skips without them."""

import os

NUM_DEVICES = 8
os.environ["JAX_PLATFORMS"] = os.environ.get("ZEROJAX_TEST_PLATFORM", "cpu")
flags = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={NUM_DEVICES}"

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh


def pytest_sessionstart(session: pytest.Session) -> None:
    if os.environ["JAX_PLATFORMS"] == "cpu":
        assert jax.device_count() == NUM_DEVICES, (
            f"tests need {NUM_DEVICES} devices and got {jax.device_count()}: something imported "
            "JAX before tests/conftest.py could ask for them"
        )


def make_mesh(count: int = NUM_DEVICES) -> Mesh:
    return Mesh(np.array(jax.devices()[:count]), ("data",), axis_types=(AxisType.Auto,))


@pytest.fixture
def mesh() -> Mesh:
    return make_mesh()
