"""Slices of stacks of layers."""

import jax
import jax.numpy as jnp
import numpy as np

from zerojax._update import stacks as _stacks

STACK = jnp.arange(24.0).reshape(4, 3, 2)


def test_a_layer_is_read_and_written_as_a_stack_of_one():
    read = jax.jit(_stacks.sliced)(STACK, 2)
    np.testing.assert_array_equal(read, STACK[2:3])
    written = jax.jit(_stacks.written)(STACK, -read, 1)
    np.testing.assert_array_equal(written, STACK.at[1].set(-STACK[2]))


def test_trees_of_stacks():
    tree = {"a": STACK, "b": (STACK[..., 0], None)}
    layer = jax.jit(_stacks.layer_of)(tree, 3)
    np.testing.assert_array_equal(layer["a"], STACK[3])
    np.testing.assert_array_equal(layer["b"][0], STACK[3, :, 0])
    stacks = _stacks.empty_stacks(layer, 4)
    assert jax.tree.map(jnp.shape, stacks) == jax.tree.map(jnp.shape, tree)
    stacks = jax.jit(_stacks.with_layer)(stacks, layer, 1)
    np.testing.assert_array_equal(stacks["a"], jnp.zeros_like(STACK).at[1].set(STACK[3]))


def test_indices_do_not_wrap_around():
    """What makes them do so keeps GPUs from copying slices of host memory by themselves."""
    jaxpr = str(jax.make_jaxpr(_stacks.sliced)(STACK, 1)) + str(
        jax.make_jaxpr(_stacks.written)(STACK, STACK[:1], 1)
    )
    assert "select_n" not in jaxpr and "lt" not in jaxpr
