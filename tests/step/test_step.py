"""Steps: what goes in and comes out, traces, and compositions. `tests/test_steps.py` has what holds
for every step of the table."""

import dataclasses
import sys
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import zerojax
from tests.conftest import make_mesh
from tests.support import linear, steps
from tests.support.linear import BATCH, EVAL, STEP
from tests.support.reference import assert_close, assert_equal_bits, train_state
from tests.support.schedules import train_step

SGD = optax.sgd(0.1)


@jax.jit
def after(params):
    grads = jax.grad(linear.loss)(params, BATCH)
    return optax.apply_updates(params, jax.tree.map(lambda g: -0.1 * g, grads))


def start(**options):
    """A state on two devices, and a step."""
    state = zerojax.shard_train_state(linear.made(SGD), mesh=make_mesh(2))
    return state, train_step(linear.loss, **options)


@pytest.mark.parametrize("devices", [1, 2])
def test_the_original_state_survives_the_donation_of_the_placed_one(devices):
    """Placed whole, an array may have the memory of the original."""
    original = linear.made(SGD)
    state = zerojax.shard_train_state(original, stage=0, mesh=make_mesh(devices))
    STEP(state, BATCH)
    assert state.params["w"].is_deleted() and not original.params["w"].is_deleted()


def test_a_donated_state_is_refused_before_it_is_used():
    state, step = start()
    new, _ = step(state, BATCH)
    with pytest.raises(ValueError, match=r"donated to an earlier step.*state, metrics = step\("):
        step(state, BATCH)
    step(new, BATCH)


class Targeted(TrainState):
    target: Any = None


def test_an_array_that_a_state_has_twice():
    """Placing copies it. Put in later, a step would donate it twice."""
    made = linear.made(SGD)
    made = Targeted.create(apply_fn=None, params=made.params, tx=SGD, target=made.params)
    state = zerojax.shard_train_state(made, stage=1, mesh=make_mesh(2))
    compiled = STEP.compile(state, BATCH)
    state, _ = STEP(state, BATCH)
    twice = state.replace(target=state.params)
    for step in (STEP, compiled):
        with pytest.raises(ValueError, match=r"params/\S+ and target/\S+ are one array.*jnp.copy"):
            step(twice, BATCH)
    zerojax.train_step(linear.loss, donate=False)(twice, BATCH)
    placed, _ = STEP(zerojax.shard_train_state(twice, stage=1, mesh=make_mesh(2)), BATCH)
    new, _ = STEP(twice.replace(target=jax.tree.map(jnp.copy, twice.params)), BATCH)
    assert_equal_bits((placed.params, placed.target), (new.params, new.target))


def test_a_failed_step_leaves_the_state_alone():
    state, step = start()
    with pytest.raises(ValueError, match=r"divide over 2 devices. Use 2 or 4 examples"):
        step(state, BATCH[:3])
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


def test_repeated_steps_are_equal_to_the_bit():
    row = steps.row("stage3")
    assert_equal_bits(row.step(row.fresh(), *row.args), row.result[1:])


def test_one_device_is_no_stage_at_all():
    text = steps.row("one_device").text
    assert " dot(" in text
    assert not any(op in text for op in ("all-gather", "all-reduce", "reduce-scatter"))


# -- used like what `jax.jit` returns


@pytest.mark.parametrize("stage", [0, 3])
def test_one_trace_and_one_compile_a_batch_shape(stage):
    """A trace of what a user wrote may take seconds; an audit has none of its own."""
    calls = Counter()

    def loss(params, batch):
        calls["loss"] += 1
        return linear.loss(params, batch)

    def update(*args):
        calls["update"] += 1
        return SGD.update(*args)

    tx = optax.GradientTransformation(SGD.init, update)
    state = zerojax.shard_train_state(linear.made(tx), stage=stage, mesh=make_mesh(2))
    assert calls.pop("update") == 1, "which parameters are frozen"
    step = zerojax.train_step(loss, accumulate=2)
    for rows, count in ((8, 1), (4, 2)):
        batch = np.ones((rows, 64), "f")
        for _ in range(3):
            state, _ = step(state, batch)
        zerojax.audit(step, state, batch)
        assert calls == {"loss": count, "update": count}
        assert step._cache_size() == count


def test_a_step_is_used_like_what_jit_returns():
    state, step = start(donate=False)
    compiled, _ = step.lower(state, BATCH).compile()(state, BATCH)
    called, metrics = step(state, BATCH)
    nested, _ = jax.jit(lambda state, batch: step(state, batch))(state, BATCH)
    assert isinstance(compiled, TrainState)
    for other in (compiled, nested):
        jax.tree.map(np.testing.assert_array_equal, other.params, called.params)
    assert EVAL.lower(state, BATCH).compile()(state, BATCH)["loss"] == metrics["loss"]
    shapes = step.eval_shape(state, BATCH)[1]
    assert jax.tree.structure(shapes) == jax.tree.structure(metrics)
    step.clear_cache()
    assert step._cache_size() == 0


def test_keys_by_name_and_tracers_anywhere():
    """With compiler options, which JAX allows in no other jit."""
    options = {"xla_cpu_enable_fast_math": False}
    step = train_step(linear.noisy, donate=False, compiler_options=options)
    (state, _), key = start(), jax.random.key(5)
    by_name, _ = step(state, BATCH, rng=key)
    nested, _ = jax.jit(lambda batch: step(state, batch, key))(BATCH)
    with_params = lambda params: step(state.replace(params=params), BATCH, key)
    inner, _ = jax.jit(with_params)(state.params)
    for other in (nested, inner):
        np.testing.assert_allclose(other.params["w"], by_name.params["w"], rtol=1e-6)
    assert step._cache_size() == 1


# -- states


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    params: dict
    opt_state: tuple
    ema: float = 0.0


PARAMS = linear.made(SGD).params
OPT_STATE = SGD.init(PARAMS)


@pytest.mark.parametrize(
    ("state", "params_of"),
    [
        ((PARAMS, OPT_STATE), lambda state: state[0]),
        ({"params": PARAMS, "opt_state": OPT_STATE, "extra": np.ones(3)}, lambda s: s["params"]),
        (State(PARAMS, OPT_STATE), lambda state: state.params),
    ],
)
def test_states_of_other_types_take_plan_and_tx(state, params_of):
    plan = zerojax.plan(state, tx=SGD, mesh=make_mesh(2))
    state, _ = zerojax.train_step(linear.loss, plan=plan, tx=SGD)(plan.place(state), BATCH)
    assert_close(params_of(state), after(PARAMS))
    assert params_of(state)["w"].sharding.spec == P("data")


# -- how long a call takes


def calls_in(function, *args):
    """How many functions Python calls, those in C among them."""
    calls, before = [], sys.getprofile()
    sys.setprofile(lambda _, event, __: calls.append(event) if "call" in event else None)
    try:
        function(*args)
    finally:
        sys.setprofile(before)
    return len(calls)


@pytest.mark.parametrize(
    ("count", "options", "looks"), [(1, None, 3), (40, {"xla_cpu_enable_fast_math": False}, 5)]
)
def test_dispatch_is_cheap(count, options, looks):
    """JAX's own dispatch is C++. A step adds a few calls, and for each array those that look
    whether it is gone and, with compiler options, whether it is traced."""
    params = {f"w{n}": np.ones((16, 16), "f") for n in range(count)}
    state = train_state(params, SGD)
    state = zerojax.shard_train_state(state, mesh=make_mesh(2))
    batch = zerojax.shard_batch(np.ones((16, 16), np.float32), like=make_mesh(2))
    loss = lambda params, batch: jnp.mean((batch @ params["w0"]) ** 2)
    step = train_step(loss, donate=False, compiler_options=options)
    for _ in range(2):  # compiles, and JAX remembers
        step(state, batch)
    calls, arrays = calls_in(step, state, batch), len(jax.tree.leaves((state, batch)))
    assert arrays < calls < 60 + looks * arrays


# -- the program of one device


def test_keys_are_folded_by_device_and_arrays_of_keys_are_split():
    key, x = jax.random.key(3), np.random.default_rng(0).normal(size=(16, 16)).astype("f")
    batch = {"x": x, "keys": jax.random.split(key, len(x))}
    state = {"params": {"w": np.ones((16, 16), "f")}}
    plan = zerojax.plan(state, mesh=make_mesh(4))

    def loss(params, batch, rngs, scale):
        drawn = {name: jax.random.uniform(rng, (len(batch["x"]),)) for name, rng in rngs.items()}
        rows = jax.vmap(jax.random.uniform)(batch["keys"])
        return scale * jnp.mean(batch["x"] @ params["w"]), (drawn, rows)

    rngs = {"new": key, "old": jax.random.PRNGKey(3), "data": jax.random.key_data(key)}
    grad = jax.jit(zerojax.value_and_grad(loss, plan, has_aux=True))
    (_, (drawn, rows)), _ = grad(plan.place(state)["params"], batch, rngs=rngs, scale=2.0)
    folded = [jax.random.fold_in(key, device) for device in range(4)]
    wanted = np.concatenate([jax.random.uniform(k, (len(x) // 4,)) for k in folded])
    for values in drawn.values():
        np.testing.assert_array_equal(values, wanted)
    np.testing.assert_array_equal(rows, jax.vmap(jax.random.uniform)(batch["keys"]))
