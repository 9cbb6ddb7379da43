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
from tests.nnx_models import make

X = np.ones((16, 16), np.float32)


def linear(rngs):
    return nnx.Linear(16, 16, rngs=rngs)


def noisy(model, x, rngs):
    noise = rngs.noise.uniform((len(x),))
    return jnp.mean(model(x) ** 2) + jnp.mean(noise), noise


def test_streams_that_a_step_is_given_advance_in_place(compiled):
    """As under `nnx.jit`, from keys that are folded for each device and microbatch."""
    model, optimizer = zerojax.nnx.shard(*make(linear))
    step = zerojax.nnx.train_step(noisy, accumulate=2)
    rngs = nnx.Rngs(0, noise=7)
    key, rngs.noise.count[...] = rngs.noise.key[...], jnp.uint32(2**24)
    parts = [jax.random.fold_in(jax.random.fold_in(key, d), m) for d in range(8) for m in (0, 1)]
    for n in range(2):
        noise = step(model, optimizer, X, rngs)["aux"]
        drawn = [jax.random.fold_in(part, 2**24 + n) for part in parts]
        np.testing.assert_array_equal(noise, [jax.random.uniform(k) for k in drawn])
    assert compiled.count("jit(step)") == 1
    assert (int(rngs.noise.count[...]), int(rngs.default.count[...])) == (2**24 + 2, 0)
    assert rngs.noise.count[...].dtype == jnp.uint32
    np.testing.assert_array_equal(*map(jax.random.key_data, (rngs.noise.key[...], key)))
    pure = step.pure(model, optimizer, X, rngs)
    zerojax.verify(*pure).check()
    zerojax.audit(*pure)
    assert int(rngs.noise.count[...]) == 2**24 + 2
    rngs.noise()  # goes on outside of a step, and in one on other devices
    model, optimizer = zerojax.nnx.shard(*make(linear), mesh=make_mesh(1))
    zerojax.nnx.eval_step(noisy)(model, optimizer, X, rngs)
    assert int(rngs.noise.count[...]) == 2**24 + 4


def test_forked_streams_advance_in_evaluation_too():
    """And beside keys of the user's own, which have no counts."""

    def loss(model, x, rng):
        draw = nnx.vmap(lambda stream: stream.normal((len(x),)), in_axes=0, out_axes=1)
        return jnp.mean(model(x)), (draw(rng["many"]), jax.random.uniform(rng["key"], (len(x),)))

    model, optimizer = zerojax.nnx.shard(*make(linear))
    many = nnx.Rngs(0).split(2)["default"]
    rng = {"many": many, "key": jax.random.key(1)}
    for made in (zerojax.nnx.eval_step, zerojax.nnx.train_step):
        before = np.array(many.count[...])
        noise, uniform = made(loss)(model, optimizer, X, rng)["aux"]
        assert noise.shape == (16, 2) and len(np.unique(noise)) == 32
        np.testing.assert_array_equal(many.count[...], before + 1)
    folded = [jax.random.fold_in(rng["key"], device) for device in range(8)]
    np.testing.assert_array_equal(uniform, np.ravel([jax.random.uniform(k, (2,)) for k in folded]))


def test_streams_that_are_left_split():
    def loss(model, x, rngs):
        nnx.split_rngs(rngs, splits=3)
        return jnp.mean(model(x))

    model, optimizer = zerojax.nnx.shard(*make(linear))
    with pytest.raises(ValueError, match=r"another shape. Undo.*restore_rngs\(backups\)"):
        zerojax.nnx.train_step(loss)(model, optimizer, X, nnx.Rngs(0))


class Noisy(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.rngs = linear(rngs), rngs

    def __call__(self, x):
        return self.linear(x), self.rngs.uniform((len(x),))


def test_streams_that_a_model_holds_draw_otherwise_on_each_device_and_for_each_microbatch():
    def loss(model, x):
        y, noise = model(x)
        return jnp.mean(y**2), noise

    model, optimizer = zerojax.nnx.shard(*make(Noisy))
    step = zerojax.nnx.train_step(loss, accumulate=2)
    first, second = (step(model, optimizer, X)["aux"] for _ in range(2))
    assert len(np.unique([first, second])) == 2 * len(X)


class Dropping(nnx.Module):
    """Layers that drop, each by a stream of its own."""

    def __init__(self, rngs):
        make = nnx.vmap(lambda rngs: nnx.Dropout(0.5, rngs=rngs))
        self.drops = nnx.split_rngs(splits=2)(make)(rngs)
        self.up, self.last = linear(rngs), nnx.Dropout(0.1, rngs=rngs)
        self.key = nnx.Variable(jax.random.key(3))

    def __call__(self, x):
        every = nnx.vmap(lambda drop, x: drop(x), in_axes=(0, None))(self.drops, self.up(x))
        return self.last(every.sum(0))


def test_verify_compares_models_that_drop_with_the_whole_batch():
    def loss(model, x, rngs):
        return jnp.mean((model(x + rngs.normal(x.shape)) - 1) ** 2)

    def by_a_key_of_its_own(model, x):
        keep = jax.random.bernoulli(model.key[...], 0.5, x.shape)
        return jnp.mean(model.up(x * keep) ** 2)

    x = np.random.default_rng(0).normal(size=(32, 16)).astype(np.float32)
    model, optimizer = zerojax.nnx.shard(*make(Dropping))
    step = zerojax.nnx.train_step(loss)
    found = zerojax.verify(*step.pure(model, optimizer, x, nnx.Rngs(1))).check()
    assert "the whole batch at once, all random numbers alike" in found.losses
    assert int(model.last.rngs.count[...]) == 0
    own = zerojax.nnx.train_step(by_a_key_of_its_own).pure(model, optimizer, x)
    with pytest.raises(AssertionError, match=r"does not see.*Draw from a nnx.Rngs that the model"):
        zerojax.verify(*own).check()


def test_objects_that_a_step_does_not_update():
    model, optimizer = zerojax.nnx.shard(*make(linear))
    step = zerojax.nnx.train_step(noisy)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    for args in ((metrics, X), (X, metrics)):
        with pytest.raises(TypeError, match=r"\(model, optimizer, batch\) or.*a MultiMetric is"):
            step(model, optimizer, *args)
    with pytest.raises(TypeError, match=r"values = step\(model, optimizer, batch\); metrics.upd"):
        step(model, optimizer, metrics, X)
    plain = zerojax.nnx.train_step(lambda model, x: jnp.mean(model(x)))
    with pytest.raises(TypeError, match=r"leave it out, step\(model, optimizer, batch\).*Several"):
        plain(model, optimizer, X, X)
    with pytest.raises(TypeError, match=r"a Linear is neither.*it closes over"):
        step(model, optimizer, X, linear(nnx.Rngs(0)))
    with pytest.raises(TypeError, match=r"would not advance there. Pass it after the batch"):
        step(model, optimizer, {"x": X, "rngs": nnx.Rngs(0)})
    model.rngs = nnx.Rngs(0)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    zerojax.nnx.shard(model, optimizer)
    with pytest.raises(ValueError, match=r"holds the nnx.Rngs.*Leave it out, step\(model, opt"):
        step(model, optimizer, X, model.rngs)
