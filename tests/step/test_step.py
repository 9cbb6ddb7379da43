"""Steps: what goes in and comes out, donation, traces, and compositions."""

import dataclasses
import functools
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
from tests import linear
from tests.conftest import make_mesh, stages
from tests.linear import EVAL
from tests.models import ROWS, gpt, mlp, transformer
from tests.placed import place, shardings
from tests.reference import assert_close, make_state, reference_run

STAGES = (0, 1, 2, 3)


@pytest.mark.parametrize("stage", stages(1, 3))
@pytest.mark.parametrize("accumulate", [1, 2])
def test_state_goes_out_where_it_came_in_and_is_donated(stage, accumulate):
    made = gpt(False)
    state = place(made, stage)
    before, old = shardings(state), jax.tree.leaves(state)
    step = zerojax.train_step(made.loss, accumulate=accumulate)
    memory = step.lower(state, made.batch).compile().memory_analysis()
    state, _ = step(state, made.batch)
    assert shardings(state) == before
    assert all(x.is_deleted() for x in old)
    state_bytes = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    assert memory.alias_size_in_bytes == state_bytes


def test_original_state_survives_the_donation_of_the_placed_one():
    made = mlp(False)
    original = make_state(made, optax.adam(1e-3))
    for stage in STAGES:
        zerojax.train_step(made.loss)(zerojax.shard_train_state(original, stage), made.batch)
    assert not any(x.is_deleted() for x in jax.tree.leaves(original.params))


@pytest.mark.parametrize("stage", stages(3))
def test_one_trace_and_one_compile_a_batch_shape(stage):
    made, traces = gpt(True), []

    def loss(params, batch):
        traces.append(None)
        return made.loss(params, batch)

    state, step = place(made, stage), zerojax.train_step(loss, accumulate=2)
    for _ in range(3):
        state, _ = step(state, made.batch)
    assert (len(traces), step._cache_size()) == (1, 1)
    state, _ = step(state, made.batch[: ROWS // 2])
    assert (len(traces), step._cache_size()) == (2, 2)


def test_step_is_used_like_what_jit_returns():
    made = mlp(False)
    step, state = zerojax.train_step(made.loss, donate=False), place(made)
    compiled, _ = step.lower(state, made.batch).compile()(state, made.batch)
    called, metrics = step(state, made.batch)
    nested, _ = jax.jit(lambda state, batch: step(state, batch))(state, made.batch)
    assert isinstance(compiled, TrainState)
    for other in (compiled, nested):
        jax.tree.map(np.testing.assert_array_equal, other.params, called.params)
    shapes = step.eval_shape(state, made.batch)[1]
    assert jax.tree.structure(shapes) == jax.tree.structure(metrics)
    assert step._cache_size() == 1


@pytest.mark.parametrize("kind", ["tuple", "dict", "dataclass"])
def test_states_of_other_types_take_plan_and_tx(kind):
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class State:
        params: dict
        opt_state: tuple
        ema: float = 0.0

    made, tx = mlp(False), optax.adam(1e-2, eps=1e-4)
    parts = made.params, tx.init(made.params)
    state = {
        "tuple": parts,
        "dict": {"params": parts[0], "opt_state": parts[1], "extra": jnp.ones(3)},
        "dataclass": State(*parts),
    }[kind]
    plan = zerojax.plan(state, stage=3, tx=tx)
    state = plan.place(state)
    step = zerojax.train_step(made.loss, plan=plan, tx=tx)
    for _ in range(2):
        state, _ = step(state, made.batch)
    wanted, _, _ = reference_run(made, tx, 2)
    params = {"tuple": lambda s: s[0], "dict": lambda s: s["params"]}.get(kind, lambda s: s.params)
    assert_close(params(state), wanted.params)
    assert params(state)["in"]["w"].sharding.spec == P("data")


@pytest.mark.parametrize("stage", stages(3))
def test_eval_step_gives_the_loss_and_keeps_the_state(stage):
    made = transformer(False)
    state = place(made, stage)
    metrics = zerojax.eval_step(made.loss)(state, made.batch, made.rng)
    _, trained = zerojax.train_step(made.loss)(state, made.batch, made.rng)
    assert float(metrics["loss"]) == pytest.approx(float(trained["loss"]), rel=1e-6)
    assert metrics.keys() == {"loss", "aux"}


def test_one_device_is_no_stage_at_all():
    made = mlp(False)
    state = place(made, 3, mesh=make_mesh(1))
    step = zerojax.train_step(made.loss)
    text = step.lower(state, made.batch).compile().as_text()
    assert " dot(" in text
    assert not any(op in text for op in ("all-gather", "all-reduce", "reduce-scatter"))
    step(state, made.batch)


def test_missing_optimizer_and_missing_field():
    made = mlp(False)
    plan = zerojax.plan((made.params, ()))
    state = plan.place((made.params, ()))
    with pytest.raises(ValueError, match=r"no apply_gradients. Pass the optimizer.*tx=tx"):
        zerojax.train_step(made.loss, plan=plan)(state, made.batch)
    with pytest.raises(ValueError, match=r"no such field. Name one it has"):
        zerojax.train_step(made.loss, mutable=("stats",))(place(made), made.batch)
    with pytest.raises(ValueError, match=r"names 'step', which .*gradients updates. Leave it"):
        counted = lambda p, b, step: (made.loss(p, b), {"step": step + 1})
        zerojax.train_step(counted, mutable=("step",))(place(made), made.batch)
    with pytest.raises(TypeError, match=r"did not return 'batch_stats'. Return \(loss,"):
        step = zerojax.train_step(
            lambda p, b, batch_stats: made.loss(p, b), mutable=("batch_stats",)
        )
        step(place(made), made.batch)


def test_failed_step_leaves_the_state_alone():
    made = mlp(False)
    state = place(made)
    with pytest.raises(ValueError, match="does not divide"):
        zerojax.train_step(made.loss)(state, jax.tree.map(lambda x: x[:3], made.batch))
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


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
    params = {f"w{n}": jnp.ones((16, 16)) for n in range(count)}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))
    state = zerojax.shard_train_state(state)
    batch = zerojax.shard_batch(np.ones((16, 16), np.float32))
    loss = lambda params, batch: jnp.mean((batch @ params["w0"]) ** 2)
    step = zerojax.train_step(loss, donate=False, compiler_options=options)
    for _ in range(2):  # compiles, and JAX remembers
        step(state, batch)
    calls, arrays = calls_in(step, state, batch), len(jax.tree.leaves((state, batch)))
    assert arrays < calls < 60 + looks * arrays


def boxed_state(names):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_partitioning(nn.initializers.lecun_normal(), names)
            x = jnp.tanh(nn.Dense(64, kernel_init=init)(x))
            return nn.Dense(8)(x)

    model = Net()
    variables = model.init(jax.random.key(0), jnp.ones((1, 24)))
    loss = lambda p, b: jnp.mean((model.apply(nn.unbox(p), b["x"]) - b["y"]) ** 2)
    tx = optax.adam(1e-2, eps=1e-4)
    return TrainState.create(apply_fn=None, params=variables, tx=tx), loss


@pytest.mark.parametrize("stage", stages(1, 3))
def test_partitioned_boxes_train_with_their_own_axis_kept(stage):
    axes = ("data", "tensor")
    devices = np.array(jax.devices()).reshape(4, 2)
    mesh = Mesh(devices, axes, axis_types=(AxisType.Auto,) * 2)
    state, loss = boxed_state((None, "tensor"))
    batch = mlp(False).batch
    wanted = state
    for _ in range(3):
        wanted = wanted.apply_gradients(grads=jax.grad(loss)(wanted.params, batch))
    placed_state = zerojax.shard_train_state(state, stage, mesh=mesh)
    step = zerojax.train_step(loss)
    for _ in range(3):
        placed_state, _ = step(placed_state, batch)
    kernel = placed_state.params["params"]["Dense_0"]["kernel"]
    assert isinstance(kernel, nn.Partitioned) and kernel.names == (None, "tensor")
    assert kernel.value.sharding.spec == (P("data", "tensor") if stage == 3 else P(None, "tensor"))
    assert_close(placed_state.params, wanted.params)


@pytest.mark.parametrize("stage", stages(1, 3))
def test_a_state_that_keeps_an_average_of_its_parameters(stage):
    class State(TrainState):
        ema_params: dict

        def apply_gradients(self, *, grads, **fields):
            new = super().apply_gradients(grads=grads, **fields)
            ema = optax.incremental_update(new.params, self.ema_params, 0.1)
            return new.replace(ema_params=ema)

    made = mlp(False)
    tx = optax.adam(1e-2, eps=1e-4)
    state = State.create(apply_fn=None, params=made.params, tx=tx, ema_params=made.params)
    wanted = state
    for _ in range(3):
        wanted = wanted.apply_gradients(grads=jax.grad(made.loss)(wanted.params, made.batch))
    current, step = zerojax.shard_train_state(state, stage), zerojax.train_step(made.loss)
    for _ in range(3):
        current, _ = step(current, made.batch)
    assert step._cache_size() == 1
    assert_close(current.ema_params, wanted.ema_params)
    assert current.ema_params["in"]["w"].sharding.spec == (P("data") if stage else P())


@pytest.mark.parametrize("stage", stages(1, 3))
def test_two_zero_axes_train_as_one(stage):
    axes = ("host", "gpu")
    devices = np.array(jax.devices()).reshape(2, 4)
    mesh = Mesh(devices, axes, axis_types=(AxisType.Auto,) * 2)
    made, tx = gpt(True), optax.adam(1e-2, eps=1e-4)
    state = zerojax.shard_train_state(make_state(made, tx), stage, mesh=mesh, axis=axes)
    step = zerojax.train_step(made.loss, accumulate=2)
    for _ in range(2):
        state, _ = step(state, zerojax.shard_batch(made.batch, mesh, axis=axes))
    assert_close(state.params, reference_run(made, tx, 2)[0].params)


def test_keys_by_name_and_tracers_anywhere():
    made = transformer(False)
    step = zerojax.train_step(
        made.loss, donate=False, compiler_options={"xla_cpu_enable_fast_math": False}
    )
    state = place(made)
    by_name, _ = step(state, made.batch, rng=made.rng)
    nested, _ = jax.jit(lambda batch: step(state, batch, made.rng))(made.batch)
    inner, _ = jax.jit(lambda params: step(state.replace(params=params), made.batch, made.rng))(
        state.params
    )
    for other in (nested, inner):
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
        jax.tree.map(close, other.params, by_name.params)
    assert step._cache_size() == 1
    step.clear_cache()
    assert step._cache_size() == 0


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


def test_an_eval_step_is_still_what_jit_returns():
    state, _, batch = linear.start()
    compiled = EVAL.lower(state, batch).compile()
    assert compiled(state, batch)["loss"] == EVAL(state, batch)["loss"] == 4096
    assert EVAL.trace(state, batch).jaxpr.out_avals[0].shape == ()
    assert EVAL.eval_shape(state, batch)["loss"].shape == ()
    assert jax.jit(lambda s: EVAL(s, batch)["loss"])(state) == 4096
