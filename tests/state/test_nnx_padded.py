"""Variables of nnx models that rest padded, and show their logical values to everyone."""

import copy
import pickle
import re
import warnings

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
from tests.reference import assert_close, assert_equal_bits
from zerojax._plan import padding as _padding

X = np.random.default_rng(0).normal(size=(6, 31)).astype(np.float32)


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


MODELS = {
    "linear": lambda rngs: nnx.Linear(31, 257, rngs=rngs),
    "tied": Tied,
    "stack": Stack,
    "lora": lambda rngs: nnx.LoRALinear(31, 257, lora_rank=4, rngs=rngs),
}


def make(name="linear", tx=None, wrt=nnx.Param):
    model = MODELS[name](nnx.Rngs(0))
    return model, nnx.Optimizer(model, tx or optax.adam(1e-2, eps=1e-4), wrt=wrt)


def placed(name="linear", devices=6, **options):
    return zerojax.nnx.shard(*make(name), mesh=make_mesh(devices), **options)


def loss(model, x):
    return jnp.mean((model(x) - 1) ** 2)


def padded_in(model):
    pairs = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {p[-1] for p, v in pairs if v.get_raw_value().shape != v.shape}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_called_as_it_was_written(name, monkeypatch):
    monkeypatch.setattr(_padding, "_WARNED", [])
    plain, _ = make(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing that the user must know
        model, _ = placed(name)
    assert padded_in(model) >= {{"tied": "embed", "lora": "kernel"}.get(name, "kernel")}
    for call in (lambda m, x: m(x), nnx.jit(lambda m, x: m(x))):
        np.testing.assert_allclose(call(model, X), plain(X), rtol=1e-5, atol=1e-6)
    for one, other in zip(
        jax.tree.leaves(nnx.to_pure_dict(nnx.state(model))),
        jax.tree.leaves(nnx.to_pure_dict(nnx.state(plain))),
        strict=True,
    ):
        assert one.shape == other.shape


@pytest.mark.parametrize("name", MODELS)
def test_loops_in_nnx_style_and_steps_train_it_exactly(name):
    @nnx.jit
    def own(model, optimizer, x):
        grads = nnx.grad(loss)(model, x)
        optimizer.update(model, grads)

    plain, model = make(name, optax.contrib.muon(1e-2)), make(name, optax.contrib.muon(1e-2))
    kernel = jax.tree.leaves(model[0], is_leaf=lambda x: isinstance(x, nnx.Variable))
    zerojax.nnx.shard(*model, mesh=make_mesh(6))
    step = zerojax.nnx.train_step(loss)
    for _ in range(2):
        own(*plain, X)
        own(*model, X)
        own(*plain, X)
        step(*model, X)
    assert step.functional._cache_size() == 1
    after = jax.tree.leaves(model[0], is_leaf=lambda x: isinstance(x, nnx.Variable))
    assert all(a is b for a, b in zip(after, kernel, strict=True)), "the same variables"
    for variable in after:
        if variable.get_raw_value().shape != variable.shape:
            assert "data" in tuple(variable.sharding.spec), "own loops keep it sharded"
            raw = variable.get_raw_value()
            assert np.count_nonzero(raw) == np.count_nonzero(variable[...]), "padding is zero"
    assert_close(*(nnx.to_pure_dict(nnx.state(m)) for m, _ in (model, plain)), 2e-4)


def test_what_shows_which_shape():
    plain, _ = make()
    model, optimizer = placed()
    kernel = model.kernel
    assert isinstance(kernel, nnx.Param)
    assert kernel.shape == kernel[...].shape == (kernel * 1).shape == np.asarray(kernel).shape
    assert kernel.shape == (31, 257) and kernel.T.shape == (257, 31) and kernel.size == 31 * 257
    np.testing.assert_array_equal(kernel[3], plain.kernel[3])
    np.testing.assert_array_equal(kernel[:, -1], plain.kernel[:, -1])
    assert kernel.get_raw_value().shape == (31, 258)
    assert kernel.addressable_shards[0].data.shape == (31, 43)
    assert kernel.sharding.spec == P(None, "data") and kernel.dtype == jnp.float32
    assert "Rests(shape=(31, 257), padded_shape=(31, 258))" in str(model)
    state = zerojax.nnx.state(model, optimizer)
    assert state.params["kernel"].shape == (31, 258)
    assert zerojax.logical(state).params["kernel"].shape == (31, 257)
    assert_equal_bits(zerojax.gather_params(state)["kernel"], plain.kernel[...])


def test_inside_jit_showing_moves_nothing():
    model, _ = placed()

    @nnx.jit
    def double(model):
        model.kernel[...] = model.kernel[...] * 2

    double(model)
    graphdef, state = nnx.split(model)

    @jax.jit
    def pure(state):
        model = nnx.merge(graphdef, state)
        model.kernel[...] = model.kernel[...] * 2
        return nnx.state(model)

    text = pure.lower(state).compile().as_text()
    assert not re.search("all-gather|all-reduce|all-to-all|collective-permute", text)
    assert pure(state)["kernel"].get_raw_value().sharding == model.kernel.sharding


def test_setting_values_pads_them():
    model, _ = placed()
    kernel, sharding = model.kernel, model.kernel.sharding
    new = np.arange(31 * 257, dtype=np.float32).reshape(31, 257)

    def check(wanted):
        raw = kernel.get_raw_value()
        assert raw.sharding == sharding
        np.testing.assert_array_equal(raw, np.pad(wanted, ((0, 0), (0, 1))))

    kernel[...] = jnp.asarray(new)
    check(new)
    kernel.set_value(jnp.asarray(new * 2))
    check(new * 2)
    kernel[:, -1] = 7.0
    check(np.concatenate([2 * new[:, :-1], np.full((31, 1), 7, np.float32)], 1))
    kernel[...] = 3.0
    check(np.full_like(new, 3))


def test_values_loaded_from_elsewhere():
    model, optimizer = placed()
    plain, plain_optimizer = make()
    nnx.update(model, jax.tree.map(lambda x: x * 2, nnx.state(plain)))
    assert model.kernel.shape == (31, 257)
    np.testing.assert_array_equal(model.kernel[...], 2 * plain.kernel[...])
    zerojax.nnx.train_step(loss)(model, optimizer, X)
    assert model.kernel.get_raw_value().shape == (31, 258) and model.kernel.shape == (31, 257)
    nnx.update(plain, jax.tree.map(lambda x: x * 2, nnx.state(plain)))
    plain_optimizer.update(plain, nnx.grad(loss)(plain, X))
    assert_close(model.kernel[...], plain.kernel[...], 1e-5)


def test_copies_show_the_same():
    model, _ = placed()
    graphdef, state = nnx.split(model)
    copies = [copy.copy(model.kernel), copy.deepcopy(model).kernel, nnx.clone(model).kernel]
    copies.append(nnx.merge(graphdef, state).kernel)
    for kernel in copies:
        assert kernel.get_raw_value().shape == (31, 258) and kernel.shape == (31, 257)
        assert kernel.sharding == model.kernel.sharding and isinstance(kernel, nnx.Param)
        assert_equal_bits(kernel[...], model.kernel[...])


def test_pickles_have_what_is_shown():
    model, _ = placed()
    read = pickle.loads(pickle.dumps(model.kernel))
    assert type(read) is nnx.Param and read.get_raw_value().shape == (31, 257)
    assert_equal_bits(read[...], model.kernel[...])


@pytest.mark.parametrize("options", [{"devices": 1}, {"devices": 7}, {"stage": 1}, {"pad": False}])
def test_placing_again(options):
    model, optimizer = placed()
    before = np.asarray(model.kernel[...])
    devices = options.pop("devices", 6)
    zerojax.nnx.shard(model, optimizer, mesh=make_mesh(devices), **options)
    raw = {1: (31, 257), 7: (31, 259)}.get(devices, (31, 257))
    assert model.kernel.get_raw_value().shape == raw and model.kernel.shape == (31, 257)
    assert_equal_bits(model.kernel[...], before)
    zerojax.nnx.train_step(loss)(model, optimizer, np.concatenate([X] * 7))
    assert model.kernel.shape == (31, 257)


def test_models_are_born_padded():
    born, _ = zerojax.nnx.shard(make, mesh=make_mesh(6))
    model, _ = placed()
    assert born.kernel.get_raw_value().shape == (31, 258) and born.kernel.shape == (31, 257)
    assert_equal_bits(born.kernel[...], model.kernel[...])


def test_verification_of_a_padded_model():
    model, optimizer = placed()
    step = zerojax.nnx.train_step(loss)
    assert float(zerojax.nnx.eval_step(loss)(model, optimizer, X)["loss"]) == pytest.approx(
        float(loss(make()[0], X)), rel=1e-5
    )
    metrics = step(model, optimizer, X)
    assert float(metrics["loss"]) == pytest.approx(float(loss(make()[0], X)), rel=1e-5)
