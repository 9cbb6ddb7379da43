"""Keys from which every draw is the same, and the losses that cannot take them."""

import jax
import numpy as np
import pytest

from zerojax._verify import draws

KEYS = {"typed": jax.random.key(7), "raw": jax.random.PRNGKey(7)}


@pytest.mark.parametrize("kind", KEYS)
def test_all_draws_are_alike(kind):
    """From keys that are split, folded, or in an array, too."""
    key = draws.alike(KEYS[kind])
    many = jax.vmap(lambda k: jax.random.uniform(k, (3,)))(jax.random.split(key, 2))
    assert np.all(many == 0.25)
    assert np.all(jax.random.uniform(jax.random.fold_in(key, 5), (4,)) == 0.25)
    assert np.all(jax.random.bernoulli(key, 0.5, (4,)))
    assert draws.alike(jax.random.split(KEYS[kind], 3)).shape == (3,)


def test_losses_that_draw_until_something_holds_are_found():
    def looped(key):
        draw = lambda carry: (jax.random.split(carry[0])[0], jax.random.uniform(carry[0]))
        return jax.lax.while_loop(lambda carry: carry[1] < 0.5, draw, (key, 0.0))[1]

    def counted(key):
        first = jax.random.randint(key, (), 0, 3)
        return jax.lax.while_loop(lambda n: n < 3, lambda n: n + 1, first)

    rejects = lambda f: draws.rejects(jax.make_jaxpr(f)(KEYS["typed"]).jaxpr)
    assert rejects(looped)
    assert rejects(jax.jit(looped))
    assert rejects(lambda key: jax.random.gamma(key, 2.0))
    assert not rejects(counted)
    assert not rejects(jax.random.normal)


def test_keys_other_than_the_given_ones_are_found():
    others = lambda f: draws.has_keys_of_its_own(jax.make_jaxpr(f)(draws.alike(KEYS["raw"])).jaxpr)
    assert not others(jax.random.normal)
    assert not others(lambda key: jax.random.key(3))
    assert others(lambda key: jax.random.normal(jax.random.key(3)))
