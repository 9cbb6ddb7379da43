"""States that functions make: what their static fields close over is there after the trace."""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.core import Tracer

import zerojax
import zerojax.nnx
from tests.linear import BATCH, STEP
from tests.reference import assert_equal_bits
from zerojax._state import making as _making


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Frozen:
    value: object


@flax.struct.dataclass
class Keeper:
    params: dict
    keeps: object = flax.struct.field(pytree_node=False)


def in_a_cell(array):
    return lambda: array


def in_a_default(array):
    def function(array=array, *, again=array):
        return array + again - array

    return function


def beside_itself(array):
    def function():
        return table[0] if function is table[1] else None

    table = [array, function]
    return function


class Schedule:
    def __init__(self, array):
        self.rates = {"rates": (array,)}

    def rate(self):
        return self.rates["rates"][0]


WAYS = {
    "cell": in_a_cell,
    "defaults": in_a_default,
    "cycle": beside_itself,
    "partial": lambda array: functools.partial(lambda x, y: x + y - x, array, y=array),
    "method": lambda array: Schedule(array).rate,
    "jit": lambda array: jax.jit(in_a_cell(array)),
    "chain": lambda array: in_a_cell(functools.partial(in_a_default(array))),
    "frozen": Frozen,
}


@pytest.mark.parametrize("way", WAYS)
def test_what_a_static_field_keeps_is_there_after_the_trace(way):
    keep = WAYS[way]

    def make():
        array = jnp.arange(3.0) * 2
        return Keeper({"w": array * 7}, keep(array))

    traced = jax.eval_shape(functools.partial(_making.state_of, make))
    kept = traced.keeps
    while callable(kept):
        kept = kept()
    kept = getattr(kept, "value", kept)
    assert not isinstance(kept, Tracer) and kept.tolist() == [0, 2, 4]
    assert traced.params["w"].shape == (3,)


def make(rates=None):
    rates = jnp.linspace(0.1, 0.5, 3) if rates is None else rates
    tx = optax.sgd(lambda count: rates[count])
    return TrainState.create(apply_fn=None, params={"w": jnp.ones((64, 16))}, tx=tx)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_schedule_over_an_array_of_make_state(stage):
    plan = zerojax.plan(make, stage=stage)
    wanted, _ = STEP(plan.place(make(jnp.linspace(0.1, 0.5, 3))), BATCH)
    for state in (zerojax.shard_train_state(make, stage), plan.place(make)):
        assert_equal_bits(STEP(state, BATCH)[0].params, wanted.params)


def test_a_model_of_nnx_and_its_optimizer_that_keep_arrays():
    def make():
        rate, scale = jnp.float32(0.1), jnp.linspace(1.0, 2.0, 16)
        model = nnx.Linear(64, 16, rngs=nnx.Rngs(0))
        model.scaled = lambda x: x * scale
        return model, nnx.Optimizer(model, optax.sgd(rate), wrt=nnx.Param)

    loss = lambda model, x: jnp.mean(model.scaled(model(x)) ** 2)
    metrics = zerojax.nnx.train_step(loss)(*zerojax.nnx.shard(make, stage=3), BATCH)
    assert float(metrics["loss"]) == pytest.approx(float(loss(make()[0], BATCH)), rel=1e-5)


def test_the_state_itself_is_not_made_for_what_its_optimizer_keeps():
    def make():
        rate = jnp.float32(0.1) * 2
        params = {"w": jnp.full((2**25, 2**25), rate)}  # a million times what a host has
        return TrainState.create(apply_fn=None, params=params, tx=optax.sgd(rate))

    update = zerojax.plan(make).abstract().tx.original.update
    assert float(update({"w": 1.0}, (optax.EmptyState(),) * 2)[0]["w"]) == pytest.approx(-0.2)


def test_what_is_kept_where_nobody_looks_is_refused():
    def make_hidden():
        rates = jnp.linspace(0.1, 0.5, 3)
        schedules = {lambda count: rates[count]}
        tx = optax.sgd(lambda count: next(iter(schedules))(count))
        return TrainState.create(apply_fn=None, params={"w": jnp.ones((64, 16))}, tx=tx)

    for state in (make_hidden, jax.eval_shape(make)):
        with pytest.raises(ValueError, match=r"Pass .* the function itself.*outside of the func"):
            zerojax.plan(state)


def test_what_make_state_sets_on_an_object_or_caches():
    class Trainer:
        @functools.cached_property
        def rates(self):
            return jnp.linspace(0.1, 0.5, 3)

        def rate(self, count):
            return self.rates[count]

        def make(self):
            self.params = {"w": jnp.ones((64, 16)) * jnp.sign(self.rates[0])}
            return TrainState.create(apply_fn=None, params=self.params, tx=optax.sgd(self.rate))

    wanted, _ = STEP(zerojax.shard_train_state(make, 3), BATCH)
    trainer = Trainer()
    state, _ = STEP(zerojax.shard_train_state(trainer.make, 3), BATCH)
    assert_equal_bits(state.params, wanted.params)
    assert not isinstance(trainer.params["w"], Tracer)


def test_objects_that_keep_no_tracer_are_left_alone():
    class Closed:
        __slots__ = ("data",)

        def __getattr__(self, name):
            raise RuntimeError(f"{name} is asked for")

    chain = [Closed()]
    for _ in range(10_000):  # deeper than Python calls itself
        chain = [chain]
    state = _making.state_of(lambda: Keeper({"w": jnp.ones(3)}, lambda: chain))
    assert state.keeps() is chain


def test_a_state_is_made_under_jaxs_check_of_leaks():
    with jax.checking_leaks():
        state = _making.state_of(lambda: Keeper({"w": jnp.ones(3)}, jnp.tanh))
    assert state.params["w"].sum() == 3


def test_a_leaf_that_is_a_constant_is_an_array():
    leaves = [jnp.asarray(0), jnp.float32(2.5), jnp.ones(3)]
    state = _making.state_of(lambda: {**dict(enumerate(map(jnp.copy, leaves))), 9: jnp.asarray(7)})
    shapes = jax.eval_shape(lambda: _making.state_of(lambda: {9: jnp.asarray(7)}))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    assert_equal_bits(state, {**dict(enumerate(leaves)), 9: jnp.asarray(7)})
    assert (shapes[9].shape, shapes[9].dtype) == ((), jnp.int32)
