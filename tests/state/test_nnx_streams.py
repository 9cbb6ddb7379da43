"""Random streams of Flax nnx: a step advances those it is given, and `verify` knows all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
import zerojax.nnx
from tests.conftest import make_mesh
from tests.support.nnx_models import linear, make

X, TWO = np.ones((16, 16), np.float32), make_mesh(2)


def placed(model=linear, mesh=TWO):
    return zerojax.nnx.shard(*make(model, tx=optax.sgd(0.1)), mesh=mesh)


def noisy(model, x, rngs):
    noise = rngs.noise.uniform((len(x),))
    return jnp.mean(model(x) ** 2) + jnp.mean(noise), noise


def test_streams_that_a_step_is_given_advance_in_place(compiled):
    """As under `nnx.jit`, from keys that are folded for each device and microbatch."""
    model, optimizer = placed()
    step = zerojax.nnx.train_step(noisy, accumulate=2)
    rngs = nnx.Rngs(0, noise=7)
    key, rngs.noise.count[...] = rngs.noise.key[...], jnp.uint32(2**24)
    parts = [jax.random.fold_in(jax.random.fold_in(key, d), m) for d in range(2) for m in (0, 1)]
    for n in range(2):
        noise = step(model, optimizer, X, rngs)["aux"]
        drawn = [jax.random.fold_in(part, 2**24 + n) for part in parts]
        np.testing.assert_array_equal(noise, np.ravel([jax.random.uniform(k, (4,)) for k in drawn]))
    assert compiled.count("jit(step)") == 1
    assert (int(rngs.noise.count[...]), int(rngs.default.count[...])) == (2**24 + 2, 0)
    assert rngs.noise.count[...].dtype == jnp.uint32
    np.testing.assert_array_equal(*map(jax.random.key_data, (rngs.noise.key[...], key)))
    step.pure(model, optimizer, X, rngs)
    assert int(rngs.noise.count[...]) == 2**24 + 2
    rngs.noise()  # goes on outside of a step, and in one on other devices
    zerojax.nnx.eval_step(noisy)(*placed(mesh=make_mesh(1)), X, rngs)
    assert int(rngs.noise.count[...]) == 2**24 + 4


def test_forked_streams_advance_in_evaluation_too():
    """And beside keys of the user's own, which have no counts."""

    def loss(model, x, rng):
        draw = nnx.vmap(lambda stream: stream.normal((len(x),)), in_axes=0, out_axes=1)
        return jnp.mean(model(x)), (draw(rng["many"]), jax.random.uniform(rng["key"], (len(x),)))

    many = nnx.Rngs(0).split(2)["default"]
    rng = {"many": many, "key": jax.random.key(1)}
    before = np.array(many.count[...])
    noise, uniform = zerojax.nnx.eval_step(loss)(*placed(), X, rng)["aux"]
    assert noise.shape == (16, 2) and len(np.unique(noise)) == 32
    np.testing.assert_array_equal(many.count[...], before + 1)
    folded = [jax.random.fold_in(rng["key"], device) for device in range(2)]
    np.testing.assert_array_equal(uniform, np.ravel([jax.random.uniform(k, (8,)) for k in folded]))


class Noisy(nnx.Module):
    """Draws from a stream, and drops by a stream for each of its layers."""

    def __init__(self, rngs):
        drops = nnx.vmap(lambda rngs: nnx.Dropout(0.5, rngs=rngs))
        self.linear, self.rngs = linear(rngs), rngs
        self.drops = nnx.split_rngs(splits=3)(drops)(rngs)

    def __call__(self, x):
        every = nnx.vmap(lambda drop, x: drop(x), in_axes=(0, None))(self.drops, x)
        return self.linear(x), (self.rngs.uniform((len(x),)), jnp.swapaxes(every, 0, 1))


def test_streams_of_a_model_differ_by_device_microbatch_layer_and_step():
    def loss(model, x):
        y, drawn = model(x)
        return jnp.mean(y**2), drawn

    model, optimizer = placed(Noisy)
    step = zerojax.nnx.train_step(loss, accumulate=2)
    first, second = (step(model, optimizer, X)["aux"] for _ in range(2))
    assert len(np.unique([first[0], second[0]])) == 2 * len(X)
    masks = np.concatenate([first[1], second[1]])
    assert masks.shape == (32, 3, 16) and len(np.unique(masks.reshape(96, 16), axis=0)) > 90
    assert model.drops.rngs.key[...].shape == (3,)
    assert int(model.rngs.default.count[...]) == int(make(Noisy)[0].rngs.default.count[...]) + 2


class Dropping(nnx.Module):
    def __init__(self, rngs):
        self.up, self.drop = linear(rngs), nnx.Dropout(0.1, rngs=rngs)
        self.key = nnx.Variable(jax.random.key(3))

    def __call__(self, x):
        return self.drop(self.up(x))


def test_verify_compares_models_that_drop_with_the_whole_batch():
    def loss(model, x, rngs):
        return jnp.mean((model(x + rngs.normal(x.shape)) - 1) ** 2)

    def by_a_key_of_its_own(model, x):
        keep = jax.random.bernoulli(model.key[...], 0.5, x.shape)
        return jnp.mean(model.up(x * keep) ** 2)

    x = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    model, optimizer = placed(Dropping)
    step = zerojax.nnx.train_step(loss)
    result = zerojax.verify(*step.pure(model, optimizer, x, nnx.Rngs(1))).check()
    assert "the whole batch at once, all random numbers alike" in result.losses
    assert int(model.drop.rngs.count[...]) == 0
    own = zerojax.nnx.train_step(by_a_key_of_its_own).pure(model, optimizer, x)
    with pytest.raises(AssertionError, match=r"does not see.*Draw from a nnx.Rngs that the model"):
        zerojax.verify(*own).check()
