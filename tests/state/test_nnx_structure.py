"""A step splits a nnx model and its optimizer once, and again after the user has changed them."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

import zerojax
import zerojax.nnx
from tests.conftest import make_mesh
from tests.support.nnx_models import linear, make, params_of
from tests.support.reference import assert_close, assert_equal_bits

TWO = make_mesh(2)
X = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)


class Chain(nnx.Module):
    """A model with everything that a user may change between two calls."""

    def __init__(self, rngs):
        self.layers = nnx.List([linear(rngs) for _ in range(2)])
        self.order = nnx.data([nnx.Param(jnp.full(16, scale, jnp.float32)) for scale in (0.5, 2.0)])
        self.named = nnx.data({"shift": nnx.Variable(jnp.ones(16))})
        self.scale, self.deterministic = 1.0, False

    def __call__(self, x):
        x = jnp.tanh(self.layers[0](x) * self.order[0]) + self.named["shift"]
        x = x * getattr(self.layers[1].kernel, "gain", 1.0)
        return self.layers[1](x if self.deterministic else x + 1) * self.order[1] * self.scale


class Tied(Chain):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.layers[1].kernel = self.layers[0].kernel


def loss(model, x):
    return jnp.mean((model(x) - 1) ** 2)


ADAM = optax.adam(1e-2, eps=1e-4)


def placed(of: type = Chain, **options):
    return zerojax.nnx.shard(*make(of, tx=ADAM, **options), stage=3, mesh=TWO)


@pytest.fixture
def splits(monkeypatch):
    """The classes of the objects that were split."""
    seen, split = [], nnx.split
    monkeypatch.setattr(nnx, "split", lambda m, *f: (seen.append(type(m)), split(m, *f))[1])
    return seen


def trained(step, model, optimizer, calls=2):
    for _ in range(calls):
        wanted = loss(model, X)
        assert float(step(model, optimizer, X)["loss"]) == pytest.approx(float(wanted), rel=1e-5)


@pytest.mark.parametrize(
    "options", [dict(), dict(of=Tied), dict(wrt=nnx.All(nnx.Param, nnx.PathContains("layers")))]
)
def test_an_unchanged_model_is_split_once(options, splits, compiled):
    model, optimizer = placed(**options)
    plain, plain_optimizer = make(options.pop("of", Chain), tx=ADAM, **options)
    del splits[:]
    step, evaluate = zerojax.nnx.train_step(loss), zerojax.nnx.eval_step(loss)
    for _ in range(3):
        trained(step, model, optimizer, 1)
        wanted = float(loss(model, X))
        assert float(evaluate(model, optimizer, X)["loss"]) == pytest.approx(wanted, rel=1e-5)
        grads = nnx.grad(loss, argnums=nnx.DiffState(0, plain_optimizer.wrt))(plain, X)
        plain_optimizer.update(plain, grads)
    assert splits == [type(model)] * 2  # once by each step
    assert compiled.count("jit(step)") == 2
    assert int(optimizer.step[...]) == 3
    assert_close(params_of(model), params_of(plain), 2e-5)


def swap_two_variables(model):
    first, second = model.layers
    first.kernel, second.kernel = second.kernel, first.kernel


CHANGES = {
    "a static attribute": lambda model: setattr(model, "scale", 2.0),
    "evaluation": lambda model: model.eval(),
    "another variable": lambda m: setattr(m.layers[0], "kernel", nnx.Param(jnp.eye(16) * 2)),
    "another layer": lambda model: model.layers.__setitem__(1, linear(nnx.Rngs(7))),
    "two variables swapped": swap_two_variables,
    "a list turned around": lambda model: model.order.reverse(),
    "an item": lambda model: model.named.update(shift=nnx.Variable(jnp.full(16, 3.0))),
    "metadata": lambda model: model.layers[1].kernel.set_metadata(gain=3.0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_model_is_trained_as_it_is_now(change, splits):
    model, optimizer = placed()
    step = zerojax.nnx.train_step(loss)
    trained(step, model, optimizer)
    before, old = jax.tree.map(np.asarray, params_of(model)), float(loss(model, X))
    change(model)
    assert abs(float(loss(model, X)) - old) > 1e-3, "the change changes the loss"
    del splits[:]
    changed = jax.tree.map(np.asarray, params_of(model))
    trained(step, model, optimizer, 3)
    assert splits == [Chain]
    for was, now in zip(jax.tree.leaves(changed), jax.tree.leaves(params_of(model)), strict=True):
        assert (was != now).any(), "all of the model's present parameters learn"
    assert jax.tree.structure(before) == jax.tree.structure(changed)


def test_a_model_that_goes_back_and_forth_compiles_twice(compiled):
    model, optimizer = placed()
    step = zerojax.nnx.train_step(loss)
    for deterministic in (True, False, True, False):
        model.set_attributes(deterministic=deterministic)
        trained(step, model, optimizer)
    assert compiled.count("jit(step)") == 2


ones = lambda: nnx.Param(jnp.ones(16))
MISMATCHES = {
    "params/layers/1/kernel is missing": lambda m: setattr(
        m.layers[1], "kernel", m.layers[0].kernel
    ),
    "params/head is not in the plan": lambda m: setattr(m, "head", ones()),
    "params/order/2 is not in the plan": lambda m: m.order.append(ones()),
    "variables/values/named/shift is missing": lambda m: m.named.update(moved=m.named.pop("shift")),
}


@pytest.mark.parametrize(("message", "change"), MISMATCHES.items())
def test_a_model_that_does_not_match_its_plan_any_more_is_refused(message, change):
    model, optimizer = placed()
    step = zerojax.nnx.train_step(lambda model, x: jnp.mean(model.layers[0](x) ** 2))
    for _ in range(2):
        step(model, optimizer, X)
    change(model)
    with pytest.raises(ValueError, match=message):
        step(model, optimizer, X)


def test_new_values_and_new_moments_are_taken():
    model, optimizer = placed()
    step = zerojax.nnx.train_step(loss)
    trained(step, model, optimizer)
    model.layers[0].kernel[...] = jnp.eye(16)  # another array in the same variable
    trained(step, model, optimizer, 1)
    kernel = np.asarray(model.layers[0].kernel[...])
    fresh = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    optimizer.opt_state = fresh.opt_state
    trained(step, model, optimizer, 1)
    assert int(fresh.opt_state[0].count[...]) == 1, "the optimizer's present variables are updated"
    # After one update of Adam, the steps are as long as the learning rate.
    moved = np.abs(np.asarray(model.layers[0].kernel[...]) - kernel)
    np.testing.assert_allclose(np.median(moved), 1e-2, rtol=0.02)


def test_one_step_trains_several_models(compiled):
    step, pairs = zerojax.nnx.train_step(loss), [placed(), placed()]
    for _ in range(2):
        for pair in pairs:
            trained(step, *pair, 1)
    assert_equal_bits(*(params_of(model) for model, _ in pairs))
    assert [int(optimizer.step[...]) for _, optimizer in pairs] == [2, 2]
    assert compiled.count("jit(step)") == 1


def test_a_step_keeps_no_model_alive():
    model, optimizer = placed()
    model.itself = nnx.data([model])
    step = zerojax.nnx.train_step(loss)
    trained(step, model, optimizer)
    left = weakref.ref(model), weakref.ref(model.layers[0])
    del model, optimizer
    gc.collect()
    assert [ref() for ref in left] == [None, None]
    assert step._functional is not None


def test_objects_that_only_their_class_can_open_are_split_each_time(splits):
    """A step cannot see a change in them otherwise."""

    @jax.tree_util.register_pytree_node_class
    class Box:
        def __init__(self, inside):
            self.inside = inside

        def tree_flatten(self):
            return (self.inside,), None

        @classmethod
        def tree_unflatten(cls, _, inside):
            return cls(*inside)

    class Boxed(Chain):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.box = nnx.data(Box(nnx.Param(jnp.full(16, 2.0))))

        def __call__(self, x):
            return super().__call__(x * self.box.inside)

    model, optimizer = placed(Boxed)
    step = zerojax.nnx.train_step(loss)
    trained(step, model, optimizer)
    model.box.inside = nnx.Param(jnp.full(16, 0.3))
    del splits[:]
    trained(step, model, optimizer)
    assert splits == [Boxed] * 2
    assert not np.allclose(model.box.inside[...], 0.3)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_arrays_that_a_user_puts_into_variables_go_where_the_plan_has_them(kind):
    """Elsewhere, they would make another program. The user's own arrays stay valid."""
    mesh = Mesh(TWO.devices, TWO.axis_names, axis_types=(kind,))
    of = lambda rngs: nnx.Linear(16, 5, rngs=rngs)  # padded
    model, optimizer = make(of, tx=ADAM)
    zerojax.nnx.shard(model, optimizer, stage=3, mesh=mesh, min_shard_size=1)
    train, evaluate = zerojax.nnx.train_step(loss), zerojax.nnx.eval_step(loss)
    other = nnx.state(of(nnx.Rngs(1)))
    on_host = jax.tree.map(np.asarray, other)
    places = [leaf.sharding for leaf in jax.tree.leaves(nnx.state(model))]
    for change in (
        lambda: nnx.update(model, other),
        lambda: nnx.update(model, on_host),
        lambda: setattr(model, "kernel", nnx.Param(other["kernel"][...])),
        lambda: optimizer.opt_state[0].count.set_value(jnp.zeros((), jnp.int32)),
    ):
        evaluate(model, optimizer, X), train(model, optimizer, X)
        change()
        wanted = loss(nnx.clone(model), X)
        assert float(evaluate(model, optimizer, X)["loss"]) == pytest.approx(
            float(wanted), rel=1e-5
        )
        assert [leaf.sharding for leaf in jax.tree.leaves(nnx.state(model))] == places
        train(model, optimizer, X)
    assert train._functional._cache_size() == evaluate._functional._cache_size() == 1
    assert_equal_bits(other, on_host)
