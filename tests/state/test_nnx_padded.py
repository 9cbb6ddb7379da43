"""Variables of nnx models that rest padded, and show their logical values to everyone."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import zerojax
import zerojax.nnx
from tests.conftest import make_mesh
from tests.support.reference import assert_close, assert_equal_bits

X = np.random.default_rng(0).normal(size=(6, 31)).astype(np.float32)
SIX = make_mesh(6)


class Tied(nnx.Module):
    """A tied embedding: its transpose is asked of the variable, which must not show padding."""

    def __init__(self, rngs):
        self.embed = nnx.Param(jax.random.normal(rngs.params(), (257, 31)))

    def __call__(self, x):
        return x @ self.embed.T


class Stack(nnx.Module):
    def __init__(self, rngs):
        make = nnx.vmap(lambda rngs: nnx.Linear(31, 31, rngs=rngs))
        self.layers = nnx.split_rngs(splits=3)(make)(rngs)

    def __call__(self, x):
        run = nnx.scan(
            lambda x, layer: jnp.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
        )
        return run(x, self.layers)


def linear(rngs):
    return nnx.Linear(31, 257, rngs=rngs)


def make(of=linear, tx=None):
    model = of(nnx.Rngs(0))
    return model, nnx.Optimizer(model, tx or optax.sgd(1e-2), wrt=nnx.Param)


def placed(of=linear, devices=6, **options):
    return zerojax.nnx.shard(*make(of), mesh=make_mesh(devices), **options)


def loss(model, x):
    return jnp.mean((model(x) - 1) ** 2)


@nnx.jit
def own_step(model, optimizer, x):
    optimizer.update(model, nnx.grad(loss)(model, x))


@pytest.mark.parametrize("of", [linear, Tied, pytest.param(Stack, marks=pytest.mark.ci)])
def test_it_is_called_as_it_was_written_and_trained_in_nnx_style_and_by_steps(of):
    """Muon's update depends on the shape of a matrix: padding would show."""
    plain, model = make(of, optax.contrib.muon(1e-2)), make(of, optax.contrib.muon(1e-2))
    variables = lambda model: jax.tree.leaves(model, is_leaf=lambda x: isinstance(x, nnx.Variable))
    before = variables(model[0])
    zerojax.nnx.shard(*model, mesh=SIX)
    for call in (lambda m, x: m(x), nnx.jit(lambda m, x: m(x))):
        np.testing.assert_allclose(call(model[0], X), plain[0](X), rtol=1e-5, atol=1e-6)
    step = zerojax.nnx.train_step(loss)
    own_step(*plain, X)
    own_step(*model, X)
    own_step(*plain, X)
    step(*model, X)
    after = variables(model[0])
    assert all(a is b for a, b in zip(after, before, strict=True)), "the same variables"
    padded = [one for one in after if one.get_raw_value().shape != one.shape]
    assert padded
    for variable in padded:
        assert "data" in tuple(variable.sharding.spec), "own loops keep it sharded"
        raw = variable.get_raw_value()
        assert np.count_nonzero(raw) == np.count_nonzero(variable[...]), "padding is zero"
    assert_close(*(nnx.to_pure_dict(nnx.state(m)) for m, _ in (model, plain)), 2e-4)


def test_attributes_are_those_of_the_logical_value_and_places_those_of_the_raw_one():
    plain, (model, optimizer) = make()[0], placed()
    kernel = model.kernel
    assert isinstance(kernel, nnx.Param)
    assert kernel.shape == kernel[...].shape == (kernel * 1).shape == np.asarray(kernel).shape
    assert kernel.shape == (31, 257) and kernel.T.shape == (257, 31) and kernel.size == 31 * 257
    np.testing.assert_array_equal(kernel[:, -1], plain.kernel[:, -1])
    assert kernel.get_raw_value().shape == (31, 258)
    assert kernel.addressable_shards[0].data.shape == (31, 43)
    assert kernel.sharding.spec == P(None, "data") and kernel.dtype == jnp.float32
    assert "Rests(shape=(31, 257), padded_shape=(31, 258))" in str(model)
    state = zerojax.nnx.state(model, optimizer)
    assert state.params["kernel"].shape == (31, 258)
    assert zerojax.unpad(state).params["kernel"].shape == (31, 257)
    assert_equal_bits(zerojax.gather_params(state)["kernel"], plain.kernel[...])


def test_values_that_are_set_are_padded():
    model, optimizer = placed()
    kernel, sharding = model.kernel, model.kernel.sharding
    new = np.arange(31 * 257, dtype=np.float32).reshape(31, 257)

    def check(wanted):
        assert kernel.get_raw_value().sharding == sharding
        np.testing.assert_array_equal(kernel.get_raw_value(), np.pad(wanted, ((0, 0), (0, 1))))

    kernel[...] = jnp.asarray(new)
    check(new)
    kernel.set_value(jnp.asarray(new * 2))
    check(new * 2)
    kernel[:, -1] = 7.0
    check(np.concatenate([2 * new[:, :-1], np.full((31, 1), 7, np.float32)], 1))
    kernel[...] = 3.0
    check(np.full_like(new, 3))
    plain, plain_optimizer = make()
    nnx.update(model, nnx.state(plain))  # loaded from elsewhere, not padded
    assert_equal_bits(kernel[...], plain.kernel[...])
    zerojax.nnx.train_step(loss)(model, optimizer, X)
    assert kernel.get_raw_value().shape == (31, 258) and kernel.shape == (31, 257)
    own_step(plain, plain_optimizer, X)
    assert_close(kernel[...], plain.kernel[...], 1e-5)


def test_copies_show_the_same_and_pickles_have_what_is_shown():
    model, _ = placed()
    copies = [copy.copy(model.kernel), copy.deepcopy(model).kernel, nnx.clone(model).kernel]
    copies.append(nnx.merge(*nnx.split(model)).kernel)
    for kernel in copies:
        assert kernel.get_raw_value().shape == (31, 258) and kernel.shape == (31, 257)
        assert kernel.sharding == model.kernel.sharding and isinstance(kernel, nnx.Param)
        assert_equal_bits(kernel[...], model.kernel[...])
    read = pickle.loads(pickle.dumps(model.kernel))
    assert type(read) is nnx.Param and read.get_raw_value().shape == (31, 257)
    assert_equal_bits(read[...], model.kernel[...])


@pytest.mark.parametrize(
    ("devices", "options", "columns"),
    [(1, {}, 257), (7, {}, 259), (6, {"stage": 1}, 257), (6, {"pad": False}, 257)],
)
def test_a_model_is_placed_again(devices, options, columns):
    model, optimizer = placed()
    before = np.asarray(model.kernel[...])
    zerojax.nnx.shard(model, optimizer, mesh=make_mesh(devices), **options)
    assert model.kernel.get_raw_value().shape == (31, columns) and model.kernel.shape == (31, 257)
    assert_equal_bits(model.kernel[...], before)


def test_a_model_with_another_parameter_is_placed_again_with_a_new_optimizer():
    """As the errors say; the variables that rest padded give it their logical values."""
    model, optimizer = zerojax.nnx.shard(*make(tx=optax.adam(1e-2)), stage=3, mesh=SIX)
    step = zerojax.nnx.train_step(lambda model, x: loss(model, x) * model.scale[0])
    model.scale = nnx.Param(jnp.ones(1))
    again = (
        r"scale is not in the plan. Place both again: zerojax.nnx.shard\(model, optimizer, stage"
    )
    with pytest.raises(ValueError, match=again):
        step(model, optimizer, X)
    anew = r"nnx.Optimizer\(model, tx, wrt=nnx.Param\)"
    with pytest.raises(
        ValueError, match=rf"mu/scale is missing. Make it again: optimizer = {anew}"
    ):
        zerojax.nnx.shard(model, optimizer, stage=3, mesh=SIX)
    before = np.asarray(model.kernel[...])
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    zerojax.nnx.shard(model, optimizer, stage=3, mesh=SIX)
    assert_equal_bits(model.kernel[...], before)
    assert model.kernel.get_raw_value().shape != model.kernel.shape
    zerojax.verify(*step.pure(model, optimizer, X)).check()
