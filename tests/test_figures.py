"""Pictures ask for matplotlib by name where it is missing."""

import sys

import jax.numpy as jnp
import pytest

import zerojax


def test_without_matplotlib_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ModuleNotFoundError, match="Run: pip install matplotlib"):
        zerojax.plan({"params": {"w": jnp.ones((64, 32))}}).plot()
