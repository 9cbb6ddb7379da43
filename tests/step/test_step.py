"""Steps: what goes in and comes out, donation, traces, and compositions. `tests/test_steps.py` has
what holds for every step of the table."""

import dataclasses
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh, PartitionSpec as P

import zerojax
from tests import linear, steps
from tests.conftest import make_mesh
from tests.linear import BATCH, EVAL, STEP
from tests.models import Model
from tests.placed import shardings
from tests.reference import assert_close, make_state

SGD = optax.sgd(0.1)
AFTER = jax.jit(lambda params: optax.apply_updates(
    params, jax.tree.map(lambda g: -0.1 * g, jax.grad(linear.loss)(params, BATCH))
))  # fmt: skip


@pytest.mark.parametrize("devices", [1, 8])
def test_the_original_state_survives_the_donation_of_the_placed_one(devices):
    """Placed whole, an array may have the memory of the original."""
    original = linear.made(SGD)
    state = zerojax.shard_train_state(original, stage=0, mesh=make_mesh(devices))
    STEP(state, BATCH)
    assert state.params["w"].is_deleted() and not original.params["w"].is_deleted()


def test_one_trace_and_one_compile_a_batch_shape():
    traces = []

    def loss(params, batch):
        traces.append(None)
        return linear.loss(params, batch)

    state, step = linear.placed(), zerojax.train_step(loss, accumulate=2)
    for rows, count in ((32, 1), (16, 2)):
        for _ in range(3):
            state, _ = step(state, np.ones((rows, 64), "f"))
        assert (len(traces), step._cache_size()) == (count, count)


def test_a_step_is_used_like_what_jit_returns():
    state, step, batch = linear.start(donate=False)
    compiled, _ = step.lower(state, batch).compile()(state, batch)
    called, metrics = step(state, batch)
    nested, _ = jax.jit(lambda state, batch: step(state, batch))(state, batch)
    assert isinstance(compiled, TrainState)
    for other in (compiled, nested):
        jax.tree.map(np.testing.assert_array_equal, other.params, called.params)
    shapes = step.eval_shape(state, batch)[1]
    assert jax.tree.structure(shapes) == jax.tree.structure(metrics)
    assert step._cache_size() == 1
    step.clear_cache()
    assert step._cache_size() == 0


def test_an_eval_step_is_still_what_jit_returns():
    state, _, batch = linear.start()
    compiled = EVAL.lower(state, batch).compile()
    assert compiled(state, batch)["loss"] == EVAL(state, batch)["loss"] == 4096
    assert EVAL.trace(state, batch).jaxpr.out_avals[0].shape == ()
    assert EVAL.eval_shape(state, batch)["loss"].shape == ()
    assert jax.jit(lambda s: EVAL(s, batch)["loss"])(state) == 4096


def test_keys_by_name_and_tracers_anywhere():
    """With compiler options, which JAX allows in no other jit."""
    options = {"xla_cpu_enable_fast_math": False}
    step = zerojax.train_step(linear.noisy, donate=False, compiler_options=options)
    state, key = linear.placed(SGD), jax.random.key(5)
    by_name, _ = step(state, BATCH, rng=key)
    nested, _ = jax.jit(lambda batch: step(state, batch, key))(BATCH)
    with_params = lambda params: step(state.replace(params=params), BATCH, key)
    inner, _ = jax.jit(with_params)(state.params)
    for other in (nested, inner):
        np.testing.assert_allclose(other.params["w"], by_name.params["w"], rtol=1e-6)
    assert step._cache_size() == 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    params: dict
    opt_state: tuple
    ema: float = 0.0


@pytest.mark.parametrize("kind", ["tuple", "dict", "dataclass"])
def test_states_of_other_types_take_plan_and_tx(kind):
    params, opt_state = linear.made(SGD).params, SGD.init(linear.made(SGD).params)
    state = {
        "tuple": (params, opt_state),
        "dict": {"params": params, "opt_state": opt_state, "extra": np.ones(3)},
        "dataclass": State(params, opt_state),
    }[kind]
    plan = zerojax.plan(state, stage=3, tx=SGD)
    state, _ = zerojax.train_step(linear.loss, plan=plan, tx=SGD)(plan.place(state), BATCH)
    of = {"tuple": lambda s: s[0], "dict": lambda s: s["params"]}.get(kind, lambda s: s.params)
    assert_close(of(state), AFTER(params))
    assert of(state)["w"].sharding.spec == P("data")


class Averaging(TrainState):
    ema_params: dict

    def apply_gradients(self, *, grads, **fields):
        new = super().apply_gradients(grads=grads, **fields)
        return new.replace(ema_params=optax.incremental_update(new.params, self.ema_params, 0.1))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_state_that_keeps_an_average_of_its_parameters(stage):
    params = linear.made().params
    state = Averaging.create(apply_fn=None, params=params, tx=SGD, ema_params=params)
    state, _ = STEP(zerojax.shard_train_state(state, stage), BATCH)
    wanted = {"w": 0.9 * params["w"] + 0.1 * AFTER(params)["w"]}
    assert_close(state.ema_params, wanted)
    assert state.ema_params["w"].sharding.spec == P("data")


def test_partitioned_boxes_train_with_their_own_axis_kept():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "tensor"))
    model = nn.Dense(64, kernel_init=init)
    params = jax.jit(model.init)(jax.random.key(0), BATCH)
    loss = lambda p, batch: jnp.mean(jnp.tanh(model.apply(nn.unbox(p), batch)) ** 2)
    state = TrainState.create(apply_fn=None, params=params, tx=SGD)
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    placed = zerojax.shard_train_state(state, mesh=mesh)
    before = shardings(placed)
    new, _ = zerojax.train_step(loss)(placed, BATCH)
    wanted = jax.jit(lambda s: s.apply_gradients(grads=jax.grad(loss)(s.params, BATCH)))(state)
    assert_close(new.params, wanted.params)
    assert shardings(new) == before
    kernel = new.params["params"]["kernel"]
    assert isinstance(kernel, nn.Partitioned) and kernel.names == (None, "tensor")
    assert kernel.value.sharding.spec == P("data", "tensor")


def test_one_device_is_no_stage_at_all():
    text = steps.row("one_device").text
    assert " dot(" in text
    assert not any(op in text for op in ("all-gather", "all-reduce", "reduce-scatter"))


# -- what is refused


def test_missing_optimizer_and_missing_field():
    state = linear.placed()
    plan = zerojax.plan((linear.made().params, ()))
    with pytest.raises(ValueError, match=r"no apply_gradients. Pass the optimizer.*tx=tx"):
        zerojax.train_step(linear.loss, plan=plan)(plan.abstract(), BATCH)
    with pytest.raises(ValueError, match=r"no such field. Name one it has"):
        zerojax.train_step(linear.loss, mutable=("stats",))(state, BATCH)
    with pytest.raises(ValueError, match=r"names 'step', which .*gradients updates. Leave it"):
        counted = lambda p, b, step: (linear.loss(p, b), {"step": step + 1})
        zerojax.train_step(counted, mutable=("step",))(state, BATCH)
    with pytest.raises(TypeError, match=r"did not return 'batch_stats'. Return \(loss,"):
        given = lambda p, b, batch_stats: linear.loss(p, b)
        stats = make_state(Model(linear.made().params, None, None), SGD).replace(batch_stats=0.0)
        placed = zerojax.shard_train_state(stats)
        zerojax.train_step(given, mutable=("batch_stats",))(placed, BATCH)


def test_a_failed_step_leaves_the_state_alone():
    state = linear.placed()
    with pytest.raises(ValueError, match="does not divide"):
        STEP(state, BATCH[:3])
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


def test_a_donated_state_is_refused_before_it_is_used():
    state, step, batch = linear.start()
    new, _ = step(state, batch)
    with pytest.raises(ValueError, match=r"donated to an earlier step.*state, metrics = step\("):
        step(state, batch)
    step(new, batch)
    state, step, batch = linear.start(donate=False)
    assert step(state, batch)[1]["loss"] == step(state, batch)[1]["loss"]


def test_options_are_read_when_the_step_is_made():
    with pytest.raises(ValueError, match="stage must be 0, 1, 2 or 3, got 7"):
        linear.start(stage=7)
    assert zerojax.train_step(lambda p, b: 0.0, mutable="batch_stats").recipe.mutable == (
        "batch_stats",
    )


# -- how long a call takes


def calls_in(function, *args):
    """How many functions Python calls, those in C among them."""
    seen, before = [], sys.getprofile()
    sys.setprofile(lambda _, event, __: seen.append(event) if "call" in event else None)
    try:
        function(*args)
    finally:
        sys.setprofile(before)
    return len(seen)


@pytest.mark.parametrize(
    ("options", "looks"), [(None, 3), ({"xla_cpu_enable_fast_math": False}, 5)]
)
@pytest.mark.parametrize("count", [1, 40])
def test_dispatch_is_cheap(count, options, looks):
    """JAX's own dispatch is C++. A step adds a few calls, and for each array those that look
    whether it is gone and, with compiler options, whether it is traced."""
    params = {f"w{n}": np.ones((16, 16), "f") for n in range(count)}
    state = TrainState.create(apply_fn=None, params=params, tx=SGD)
    state = zerojax.shard_train_state(state)
    batch = zerojax.shard_batch(np.ones((16, 16), np.float32))
    loss = lambda params, batch: jnp.mean((batch @ params["w0"]) ** 2)
    step = zerojax.train_step(loss, donate=False, compiler_options=options)
    for _ in range(2):  # compiles, and JAX remembers
        step(state, batch)
    calls, arrays = calls_in(step, state, batch), len(jax.tree.leaves((state, batch)))
    assert arrays < calls < 60 + looks * arrays
