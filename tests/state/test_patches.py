"""What zerojax changes in others' objects: what static fields close over, classes of variables."""

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
from tests.support.linear import BATCH, STEP
from tests.support.reference import assert_equal_bits


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
    def make():
        array = jnp.arange(3.0) * 2
        return Keeper({"w": array * 7}, WAYS[way](array))

    state = zerojax.plan(make).abstract()
    kept = state.keeps
    while callable(kept):
        kept = kept()
    kept = getattr(kept, "value", kept)
    assert not isinstance(kept, Tracer) and kept.tolist() == [0, 2, 4]
    assert state.params["w"].shape == (3,)


def scheduled(rates=None):
    rates = jnp.linspace(0.1, 0.5, 3) if rates is None else rates
    params = {"w": jnp.ones((64, 16))}
    return TrainState.create(apply_fn=None, params=params, tx=optax.sgd(lambda count: rates[count]))


class Trainer:
    """Caches what its schedule reads, and keeps what it has made."""

    @functools.cached_property
    def rates(self):
        return jnp.linspace(0.1, 0.5, 3)

    def rate(self, count):
        return self.rates[count]

    def make(self):
        self.params = {"w": jnp.ones((64, 16)) * jnp.sign(self.rates[0])}
        return TrainState.create(apply_fn=None, params=self.params, tx=optax.sgd(self.rate))


def test_schedules_over_an_array_of_make_state():
    outside = scheduled(jnp.linspace(0.1, 0.5, 3))
    wanted, _ = STEP(zerojax.shard_train_state(outside), BATCH)
    trainer, plan = Trainer(), zerojax.plan(scheduled)
    for state in (plan.place(scheduled), zerojax.shard_train_state(trainer.make)):
        assert_equal_bits(STEP(state, BATCH)[0].params, wanted.params)
    assert not isinstance(trainer.params["w"], Tracer)


def test_a_model_of_nnx_and_its_optimizer_that_keep_arrays():
    def make():
        rate, scale = jnp.float32(0.1), jnp.linspace(1.0, 2.0, 16)
        model = nnx.Linear(64, 16, rngs=nnx.Rngs(0))
        model.scaled = lambda x: x * scale
        return model, nnx.Optimizer(model, optax.sgd(rate), wrt=nnx.Param)

    loss = lambda model, x: jnp.mean(model.scaled(model(x)) ** 2)
    metrics = zerojax.nnx.train_step(loss)(*zerojax.nnx.shard(make), BATCH)
    assert float(metrics["loss"]) == pytest.approx(float(loss(make()[0], BATCH)), rel=1e-5)


def test_the_state_itself_is_not_made_for_what_its_optimizer_keeps():
    def make():
        rate = jnp.float32(0.1) * 2
        params = {"w": jnp.full((2**25, 2**25), rate)}  # a million times what a host has
        return TrainState.create(apply_fn=None, params=params, tx=optax.sgd(rate))

    update = zerojax.plan(make).abstract().tx.original.update
    assert float(update({"w": 1.0}, (optax.EmptyState(),) * 2)[0]["w"]) == pytest.approx(-0.2)


def test_what_is_kept_where_nobody_looks_is_refused():
    def hidden():
        rates = jnp.linspace(0.1, 0.5, 3)
        schedules = {lambda count: rates[count]}
        tx = optax.sgd(lambda count: next(iter(schedules))(count))
        return TrainState.create(apply_fn=None, params={"w": jnp.ones((64, 16))}, tx=tx)

    for state in (hidden, jax.eval_shape(scheduled)):
        with pytest.raises(ValueError, match=r"Pass that function itself.*outside of the func"):
            zerojax.plan(state)


def test_objects_that_keep_no_tracer_are_left_alone():
    class Closed:
        __slots__ = ("data",)

        def __getattr__(self, name):
            raise RuntimeError(f"{name} is asked for")

    chain = [Closed()]
    for _ in range(10_000):  # deeper than Python calls itself
        chain = [chain]
    with jax.checking_leaks():
        plan = zerojax.plan(lambda: Keeper({"w": jnp.ones(3)}, lambda: chain))
    assert plan.abstract().keeps() is chain


def test_leaves_that_are_constants_are_arrays():
    def make():
        return {"params": {"w": jnp.ones(3)}, "n": jnp.asarray(7), "x": jnp.float32(2.5)}

    state = zerojax.plan(make).place(make)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    assert (state["n"].dtype, int(state["n"]), float(state["x"])) == (jnp.int32, 7, 2.5)


def test_jax_leaves_tracers_in_functions_that_outlive_a_trace():
    """Else `patches.replaced` has nothing to do."""
    kept = jax.eval_shape(lambda: Keeper({"w": jnp.ones(3)}, in_a_cell(jnp.arange(3.0) * 2))).keeps
    assert isinstance(kept(), Tracer)


def test_hooks_of_nnx_do_not_show_another_value_everywhere():
    """Else variables that rest padded need no class of their own, nor `patches.set_class`."""
    variable = nnx.Param(jnp.ones((3, 4)))
    variable.set_metadata(on_get_value=lambda _, value: value[:, :2])
    assert (variable[...].shape, variable.T.shape) == ((3, 2), (4, 3))
