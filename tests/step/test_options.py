"""What steps refuse, before anything compiles, and how they say it."""

import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import zerojax
from tests.conftest import make_mesh
from tests.support import linear
from tests.support.linear import BATCH
from tests.support.schedules import train_step, value_and_grad

PARAMS = {"w": np.ones((64, 16), np.float32)}
MESH = make_mesh(2)
PLAN = zerojax.plan({"params": PARAMS}, mesh=MESH)
NO_OPTIMIZER = zerojax.plan((PARAMS, ()), mesh=MESH)
LEVELS = {"mesh": zerojax.mesh(node=2, gpu=2, tensor=2), "axis": ("node", "gpu")}
ON_LEVELS = zerojax.plan({"params": PARAMS}, **LEVELS)


class Fields(TrainState):
    stats: float = 0.0


def fields():
    state = Fields.create(apply_fn=None, params=PARAMS, tx=optax.sgd(0.1))
    return zerojax.shard_train_state(state, mesh=MESH)


def step(loss=linear.loss, **options):
    return train_step(loss, **options)


def traced(plan_or_state, loss=linear.loss, **options):
    """A step's trace; of a plan, of its abstract state."""
    if isinstance(plan_or_state, zerojax.Plan):
        options["plan"], plan_or_state = plan_or_state, plan_or_state.abstract()
    return step(loss, **options).trace(plan_or_state, BATCH)


def grad(loss, *args, plan=PLAN, **options):
    return value_and_grad(loss, plan, **options)(*args)


def two(params, x, y):
    return linear.loss(params, x)


NO_PLAN = r"takes a plan, got {}\. Make one: zerojax\.plan\(state"
ONE_BATCH = r"argument 3 of the loss would be split.*as one batch.*\(PartitionSpec\(\), {}\) splits"
ROWS = [
    # options
    (lambda: step(prefetch=2), "prefetch must be 'auto', True or False, got 2: whether"),
    (lambda: step(order="rows"), "order must be 'microbatches' or 'layers', got 'rows': whether"),
    (lambda: step(keep_layers=2, prefetch=0), "prefetch=False turns that off. Leave prefetch= out"),
    (lambda: step(keep_layers=2, regather=False), "keep_layers=2 .*Leave one of them out"),
    *(
        (lambda n=n: step(accumulate=n), f"accumulate={n!r} must be a positive integer")
        for n in (0, -1, 1.5, "2", True)
    ),
    # plans
    (lambda: step(plan=3), f"plan= {NO_PLAN.format(3)}"),
    # batches
    (
        lambda: grad(two, PARAMS, BATCH, BATCH, batch_specs=P()),
        ONE_BATCH.format(r"PartitionSpec\('data'\)"),
    ),
    (
        lambda: grad(two, PARAMS, BATCH, BATCH, batch_specs=P(), plan=ON_LEVELS),
        ONE_BATCH.format(r"PartitionSpec\(\('node', 'gpu'\)\)"),
    ),
    # fields of the state, and its optimizer
    (lambda: traced(NO_OPTIMIZER), "no apply_gradients. Pass the optimizer.*tx=tx"),
    (lambda: traced(fields(), mutable=("missing",)), "no such field. Name one it has"),
    (
        lambda: traced(fields(), lambda p, b, step: (0.0, {"step": step + 1}), mutable=("step",)),
        "names 'step', which .*gradients updates. Leave it",
    ),
    (
        lambda: traced(fields(), lambda p, b, stats: linear.loss(p, b), mutable=("stats",)),
        r"did not return 'stats'. Return \(loss,",
    ),
]


@pytest.mark.parametrize(("call", "message"), ROWS)
def test_what_cannot_be_is_refused(call, message, compiled):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
    assert "jit(step)" not in compiled


def test_a_schedule_prints_as_python_and_is_a_key():
    options = {"xla_a": "it's", "xla_b": True}
    schedule = zerojax.Schedule(regather="gpu", activations=("host", "tensor"), prefetch=False)
    for each in (schedule, zerojax.Schedule(compiler_options=options, update="after")):
        again = eval(repr(each), {"zerojax": zerojax})
        assert again == each and {again: 1}[each] == 1 and hash(again) == hash(each)
    assert repr(zerojax.Schedule()) == "zerojax.Schedule()"
    assert len({zerojax.Schedule(prefetch=1), zerojax.Schedule(prefetch=True)}) == 1


@pytest.mark.parametrize(("said", "field"), [("backward", "update"), ("rows", "order")])
def test_what_is_no_schedule_is_shown_one(said, field):
    with pytest.raises(TypeError, match=rf"schedule='{said}' must be .*Schedule\({field}="):
        zerojax.train_step(linear.loss, schedule=said)
