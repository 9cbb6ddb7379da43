"""Plans as values: immutable, comparable, and abstract states made of them."""

import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import zerojax
from tests.models import mlp
from tests.reference import make_state
from tests.shapes import params_plan, shape


def test_plan_is_immutable_hashable_and_equal_by_value():
    one, two = params_plan({"w": shape(16, 16)}), params_plan({"w": shape(16, 16)})
    assert one == two and hash(one) == hash(two)
    assert one != params_plan({"w": shape(16, 16)}, stage=2)
    with pytest.raises(AttributeError):
        one.stage = 2
    make = lambda: make_state(mlp(False), optax.adam(1e-3))  # static fields made anew each time
    assert zerojax.plan(make()) == zerojax.plan(make)


def test_abstract_state_carries_shardings():
    plan = zerojax.plan(make_state(mlp(False), optax.adam(1e-3)), stage=3)
    abstract = plan.abstract()
    assert isinstance(abstract, TrainState)
    assert abstract.params["in"]["w"].sharding.spec == P("data")
    step = zerojax.train_step(mlp(False).loss)
    compiled = step.lower(abstract, mlp(False).batch).compile()
    assert compiled.memory_analysis().argument_size_in_bytes > 0
