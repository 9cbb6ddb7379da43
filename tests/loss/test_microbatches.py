"""The arguments of each microbatch, and those of all of them, stacked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax._loss.batch import BATCH, KEY, REPLICATED, Role
from zerojax._loss.microbatches import Microbatches

ROLES = [Role(BATCH), Role(BATCH, 1), Role(KEY), Role(KEY), Role(REPLICATED)]


@pytest.mark.parametrize("impl", ("threefry2x32", "rbg"))
def test_all_at_once_are_those_of_each(impl):
    key = jax.random.key(0, impl=impl)
    args = [jnp.arange(12.0), jnp.arange(24).reshape(2, 12), key, jax.random.PRNGKey(1), 7.0]
    three = Microbatches(ROLES, 3)
    every, parts = three.args_of_all(args), three.parts(args)
    for index in range(3):
        each = three.args_of(args, [part[index] for part in parts], jnp.asarray(index))
        of_all = [x[index] if role.kind != REPLICATED else x
                  for x, role in zip(every, ROLES, strict=True)]  # fmt: skip
        jax.tree.map(np.testing.assert_array_equal, *map(numbers, (each, of_all)))
        assert each[1].shape == (2, 4)
    assert three.differ == [True, True, True, True, False]


def test_one_microbatch_gets_what_there_is():
    args = [jnp.arange(12.0), jnp.arange(24).reshape(2, 12), jax.random.key(0), 1.0, 7.0]
    found = Microbatches(ROLES, 1).args_of_all(args)
    assert all(a is b for a, b in zip(args, found, strict=True))


def numbers(values):
    is_key = lambda x: jnp.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key)
    return [jax.random.key_data(x) if is_key(x) else x for x in values]
