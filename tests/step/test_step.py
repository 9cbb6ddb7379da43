"""Steps: what goes in and comes out, donation, traces, and every message."""

import copy
import dataclasses
import functools
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh, PartitionSpec as P

import zerojax
from tests.conftest import make_mesh, mostly_slow
from tests.models import ROWS, gpt, mlp, transformer
from tests.reference import assert_close, assert_equal_bits, make_state, reference_run

STAGES = (0, 1, 2, 3)


def placed(model, stage=3, tx=None, **options):
    state = make_state(model, tx or optax.adam(1e-3))
    return zerojax.shard_train_state(state, stage, **options)


def shardings(tree):
    return jax.tree.map(lambda x: x.sharding, tree)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_state_goes_out_where_it_came_in_and_is_donated(stage, accumulate):
    made = gpt(False)
    state = placed(made, stage)
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


@pytest.mark.parametrize("stage", mostly_slow(STAGES, lambda stage: stage in (0, 3)))
def test_one_trace_and_one_compile_a_batch_shape(stage):
    made, traces = gpt(True), []

    def loss(params, batch):
        traces.append(None)
        return made.loss(params, batch)

    state, step = placed(made, stage), zerojax.train_step(loss, accumulate=2)
    for _ in range(3):
        state, _ = step(state, made.batch)
    assert (len(traces), step._cache_size()) == (1, 1)
    state, _ = step(state, made.batch[: ROWS // 2])
    assert (len(traces), step._cache_size()) == (2, 2)


def test_step_is_used_like_what_jit_returns():
    made = mlp(False)
    step, state = zerojax.train_step(made.loss, donate=False), placed(made)
    compiled, _ = step.lower(state, made.batch).compile()(state, made.batch)
    called, metrics = step(state, made.batch)
    nested, _ = jax.jit(lambda state, batch: step(state, batch))(state, made.batch)
    assert isinstance(compiled, TrainState)
    for other in (compiled, nested):
        jax.tree.map(np.testing.assert_array_equal, other.params, called.params)
    shapes = step.eval_shape(state, made.batch)[1]
    assert jax.tree.structure(shapes) == jax.tree.structure(metrics)
    assert step._cache_size() == 1


def test_metrics_are_means_over_the_mesh():
    made = mlp(False)

    def loss(params, batch):
        return made.loss(params, batch), {"rows": batch["x"].shape[0], "x": batch["x"].mean()}

    _, metrics = zerojax.train_step(loss)(placed(made), made.batch)
    wanted, grads = jax.value_and_grad(made.loss)(made.params, made.batch)
    assert float(metrics["loss"]) == pytest.approx(float(wanted), rel=1e-6)
    norm = float(optax.tree.norm(grads))
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-6)
    assert float(metrics["aux"]["rows"]) == ROWS // 8
    assert float(metrics["aux"]["x"]) == pytest.approx(float(made.batch["x"].mean()), abs=1e-6)


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("stage", [0, 3])
def test_aux_with_a_row_for_each_example_comes_back_in_the_batch_order(stage, accumulate):
    made = mlp(False)

    def loss(params, batch):
        eight = jnp.arange(ROWS // 8 // accumulate) * 1.0  # as long as a part, but no row each
        return made.loss(params, batch), (batch["y"][:, 0], eight)

    step = zerojax.train_step(loss, accumulate=accumulate)
    _, metrics = step(placed(made, stage), made.batch)
    rows, eight = metrics["aux"]
    np.testing.assert_array_equal(rows, made.batch["y"][:, 0])
    np.testing.assert_allclose(eight, np.arange(ROWS // 8 // accumulate))


def test_keys_are_folded_with_the_device_index():
    params = {"w": jnp.ones((16, 16))}

    def loss(params, batch, rng):
        drawn = jax.random.uniform(rng, (batch.shape[0],))
        return jnp.mean(batch @ params["w"]), drawn

    tx = optax.sgd(0.0)
    state = zerojax.shard_train_state(TrainState.create(apply_fn=None, params=params, tx=tx))
    key = jax.random.key(9)
    for rng in (key, jax.random.key_data(key)):
        state, metrics = zerojax.train_step(loss)(state, jnp.ones((16, 16)), rng)
        wanted = [jax.random.uniform(jax.random.fold_in(key, d), (2,)) for d in range(8)]
        np.testing.assert_array_equal(metrics["aux"], np.concatenate(wanted))


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


def test_drop_in_for_a_loop_of_ones_own():
    made = mlp(False)
    state = make_state(made, optax.adam(1e-2, eps=1e-4))
    plan = zerojax.plan(state, stage=3)
    state = plan.place(state)

    @jax.jit
    def train_step(state, batch):
        loss, grads = zerojax.value_and_grad(made.loss, plan)(state.params, batch)
        return plan.constrain(state.apply_gradients(grads=grads)), loss

    before = shardings(state)
    for _ in range(3):
        state, _ = train_step(state, made.batch)
    assert shardings(state) == before and train_step._cache_size() == 1
    assert_close(state.params, reference_run(made, optax.adam(1e-2, eps=1e-4), 3)[0].params)


def test_what_the_loss_closes_over_is_passed_on_whole():
    made = mlp(False)
    scale = jax.device_put(jnp.linspace(0.5, 2, 8), jax.devices()[3])
    shift = make_mesh()
    shift = jax.device_put(jnp.arange(8.0), jax.sharding.NamedSharding(shift, P("data")))

    def loss(params, batch):
        out = jnp.tanh(batch["x"] @ params["in"]["w"]) @ params["out"]["w"]
        return jnp.mean((out * numbers + shift) ** 2)

    numbers = np.asarray(scale)
    plan = zerojax.plan({"params": made.params}, stage=3)
    params = plan.place({"params": made.params})["params"]
    _, grads = zerojax.value_and_grad(loss, plan)(params, made.batch)
    assert_close(grads, jax.grad(loss)(made.params, made.batch), 2e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_eval_step_gives_the_loss_and_keeps_the_state(stage):
    made = transformer(False)
    state = placed(made, stage)
    metrics = zerojax.eval_step(made.loss)(state, made.batch, made.rng)
    _, trained = zerojax.train_step(made.loss)(state, made.batch, made.rng)
    assert float(metrics["loss"]) == pytest.approx(float(trained["loss"]), rel=1e-6)
    assert metrics.keys() == {"loss", "aux"}


def test_born_sharded_equals_made_and_placed():
    made = gpt(False)
    make = lambda: make_state(made, optax.adamw(1e-3))
    born, moved = zerojax.shard_train_state(make), zerojax.shard_train_state(make())
    assert jax.tree.leaves(shardings(born)) == jax.tree.leaves(shardings(moved))
    assert_equal_bits(born.params, moved.params)
    step = zerojax.train_step(made.loss)
    assert_equal_bits(step(born, made.batch)[0].params, step(moved, made.batch)[0].params)


def test_one_device_is_no_stage_at_all():
    made = mlp(False)
    state = placed(made, 3, mesh=make_mesh(1))
    step = zerojax.train_step(made.loss)
    text = step.lower(state, made.batch).compile().as_text()
    assert not any(op in text for op in ("all-gather", "all-reduce", "reduce-scatter"))
    step(state, made.batch)


def test_host_batches_and_placed_ones_give_the_same():
    made = mlp(False)
    host = jax.tree.map(np.asarray, made.batch)
    step = zerojax.train_step(made.loss, donate=False)
    state = placed(made)
    a, _ = step(state, host)
    b, _ = step(state, zerojax.shard_batch(host))
    assert_equal_bits(a.params, b.params)
    assert zerojax.shard_batch(host)["x"].sharding.spec == P("data")


def test_old_and_new_keys_are_folded_and_arrays_of_keys_are_split():
    params = {"w": jnp.ones((16, 16))}
    plan = zerojax.plan({"params": params})
    params = plan.place({"params": params})["params"]
    new = jax.random.key(3)
    each = jax.random.split(new, 16)

    def loss(params, batch, rngs, scale):
        drawn = [
            jax.random.uniform(k, batch["keys"].shape) for k in (rngs["a"], rngs["b"], rngs["c"])
        ]
        rows = jax.vmap(jax.random.uniform)(batch["keys"])
        return scale * jnp.mean(batch["x"] @ params["w"]), (*drawn, rows)

    rngs = {"a": new, "b": jax.random.PRNGKey(3), "c": jax.random.key_data(new)}
    grad = zerojax.value_and_grad(loss, plan, has_aux=True)
    batch = {"x": jnp.ones((16, 16)), "keys": each}
    (_, (a, b, c, rows)), _ = grad(params, batch, rngs=rngs, scale=2.0)
    wanted = [jax.random.uniform(jax.random.fold_in(new, d), (2,)) for d in range(8)]
    for drawn in (a, b, c):
        np.testing.assert_array_equal(drawn, np.concatenate(wanted))
    np.testing.assert_array_equal(rows, jax.vmap(jax.random.uniform)(each))


def test_two_labels_are_not_taken_for_a_key():
    params = {"w": jnp.ones((16, 16))}
    plan = zerojax.plan({"params": params}, mesh=make_mesh(2))
    grad = zerojax.value_and_grad(lambda p, x, y: jnp.mean(x @ p["w"]) + jnp.mean(1.0 * y), plan)
    x, labels = np.ones((2, 16), np.float32), np.array([3, 5], np.uint32)
    message = r"argument 3 of the loss is uint32\[2\] beside no longer batch.*jax.random.key"
    with pytest.raises(ValueError, match=message):
        grad(params, x, labels)
    assert float(grad(params, x, labels.astype(np.int32))[0]) == 20
    both = zerojax.value_and_grad(lambda p, b: jnp.mean(b[0] @ p["w"]) + jnp.mean(1.0 * b[1]), plan)
    assert float(both(params, (x, labels))[0]) == 20


def test_placed_states_can_be_copied():
    made = mlp(False)
    state = placed(made)
    for copied in (copy.copy(state), copy.deepcopy(state)):
        assert_equal_bits(copied.params, state.params)
    step = zerojax.train_step(made.loss, donate=False)
    assert_equal_bits(step(copied, made.batch)[0].params, step(state, made.batch)[0].params)
    assert step._cache_size() == 1


def test_gather_params_takes_any_tree():
    made = mlp(False)
    state = placed(made)
    for tree in (state, state.params, state.opt_state[0].mu):
        gathered = zerojax.gather_params(tree)
        assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(gathered))
        assert gathered["in"]["w"].shape == made.params["in"]["w"].shape


def test_placing_again_changes_the_stage_and_keeps_the_values():
    made = mlp(False)
    state = placed(made, 3)
    step = zerojax.train_step(made.loss)
    state, _ = step(state, made.batch)
    moved = zerojax.shard_train_state(state, 1)
    assert moved.params["in"]["w"].sharding.spec == P()
    assert_equal_bits(moved.params, state.params)
    once_more, _ = step(moved, made.batch)
    assert_close(once_more.params, step(state, made.batch)[0].params, 1e-6)


# -- messages


def test_value_and_grad_without_a_plan():
    with pytest.raises(TypeError, match=r"takes a plan, got 3. Make one: zerojax.plan"):
        zerojax.value_and_grad(lambda p, b: 0.0, 3)
    with pytest.raises(TypeError, match=r"plan=.*takes a plan, got 3. Make one: zerojax.plan"):
        zerojax.train_step(lambda p, b: 0.0, plan=3)
    with pytest.raises(TypeError, match=r"plan=.*takes a plan, got 3. Make one: zerojax.plan"):
        zerojax.eval_step(lambda p, b: 0.0, plan=3)
    with pytest.raises(TypeError, match=r"takes a plan, got a State. Make one: zerojax.plan"):
        zerojax.param_specs(placed(mlp(False)))


def test_batch_that_does_not_divide():
    made = mlp(False)
    batch = jax.tree.map(lambda x: x[:60], made.batch)
    message = r"batch leaf x has a leading dimension of 60.*8 devices.*Use 56 or 64 examples"
    with pytest.raises(ValueError, match=message):
        zerojax.train_step(made.loss)(placed(made), batch)
    with pytest.raises(ValueError, match=message):
        zerojax.shard_batch(batch)
    with pytest.raises(ValueError, match=r"64.*8 devices x 3 microbatches.*Use 48 or 72"):
        zerojax.train_step(made.loss, accumulate=3)(placed(made), made.batch)
    with pytest.raises(ValueError, match=r"leading dimension of 0.*Use 8 examples"):
        zerojax.shard_batch(np.ones((0, 2)))


def test_batch_leaves_that_disagree():
    made = mlp(False)
    batch = {"x": made.batch["x"], "y": made.batch["y"][:8]}
    message = r"batch leaf x has 64 and batch leaf y has 8. Give every leaf one row"
    with pytest.raises(ValueError, match=message):
        zerojax.train_step(made.loss)(placed(made), batch)
    with pytest.raises(ValueError, match=message):
        zerojax.shard_batch(batch)


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        (lambda b: b, r"must be a scalar, got shape \(8, 24\). Reduce it"),
        (lambda b: b.sum().astype(int), r"float dtype, got int32. Convert it"),
        (lambda b: "no", r"scalar array, got str. Return a scalar"),
        (lambda b: (b.sum(), "no"), r"aux is a str, not a numeric array.*Leave it out"),
        (lambda b: (b.sum(), {"k": jax.random.key(0)}), r"aux\['k'\].*key.*Leave it out"),
        (lambda b: (b.sum(), 1.0, 2.0), r"a tuple of 3. Return a scalar, or \(loss, aux\)"),
    ],
)
def test_loss_that_returns_something_else(returns, message):
    made = mlp(False)
    with pytest.raises(TypeError, match=message):
        zerojax.train_step(lambda p, b: returns(b["x"]))(placed(made), made.batch)


def test_has_aux_without_a_pair():
    made = mlp(False)
    plan = zerojax.plan({"params": made.params})
    with pytest.raises(TypeError, match=r"must return \(loss, aux\).*leave has_aux out"):
        zerojax.value_and_grad(made.loss, plan, has_aux=True)(made.params, made.batch)


def test_state_not_placed():
    made = mlp(False)
    step = zerojax.train_step(made.loss)
    with pytest.raises(ValueError, match=r"not placed.*First: state = zerojax.shard_train"):
        step(make_state(made, optax.adam(1e-3)), made.batch)
    with pytest.raises(ValueError, match=r"not placed, or.*First: plan = zerojax.plan.*plan=plan"):
        step((made.params, ()), made.batch)


def test_state_placed_for_another_stage_or_mesh():
    made = mlp(False)
    state = placed(made, 1)
    with pytest.raises(ValueError, match=r"for stage 3.*for stage 1. Place it again.*stage=3"):
        zerojax.train_step(made.loss, stage=3)(state, made.batch)
    other = zerojax.plan(make_state(made, optax.adam(1e-3)), stage=1, mesh=make_mesh(2))
    with pytest.raises(ValueError, match=r"stage 1 on 8 devices.*stage 1 on 2.*plan.place"):
        zerojax.train_step(made.loss, plan=other)(state, made.batch)


def test_parameters_that_are_not_the_plans():
    made = mlp(False)
    plan = zerojax.plan({"params": made.params})
    with pytest.raises(ValueError, match=r"params/in/b is missing.*zerojax.plan"):
        zerojax.value_and_grad(made.loss, plan)({"in": {"w": jnp.ones(3)}}, made.batch)


def test_missing_optimizer_and_missing_field():
    made = mlp(False)
    plan = zerojax.plan((made.params, ()))
    state = plan.place((made.params, ()))
    with pytest.raises(ValueError, match=r"no apply_gradients. Pass the optimizer.*tx=tx"):
        zerojax.train_step(made.loss, plan=plan)(state, made.batch)
    with pytest.raises(ValueError, match=r"no such field. Name one it has"):
        zerojax.train_step(made.loss, mutable=("stats",))(placed(made), made.batch)
    with pytest.raises(TypeError, match=r"did not return 'batch_stats'. Return \(loss,"):
        step = zerojax.train_step(
            lambda p, b, batch_stats: made.loss(p, b), mutable=("batch_stats",)
        )
        step(placed(made), made.batch)


@pytest.mark.parametrize("accumulate", [0, -1, 1.5, "2"])
def test_accumulate_that_is_no_count(accumulate):
    with pytest.raises(ValueError, match=r"accumulate must be a positive integer"):
        zerojax.train_step(lambda p, b: 0.0, accumulate=accumulate)


def test_failed_step_leaves_the_state_alone():
    made = mlp(False)
    state = placed(made)
    with pytest.raises(ValueError, match="does not divide"):
        zerojax.train_step(made.loss)(state, jax.tree.map(lambda x: x[:3], made.batch))
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


def test_dispatch_costs_what_plain_jit_costs():
    """Against the same step written with plain JAX: annotations, and XLA's own collectives."""
    params = {"w": jnp.ones((16, 16))}
    loss = lambda p, b: jnp.mean((b @ p["w"]) ** 2)
    batch = zerojax.shard_batch(np.ones((16, 16), np.float32))
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))
    ours = zerojax.train_step(loss, donate=False)
    placed_state = zerojax.shard_train_state(state)
    plain = placed_state.replace(tx=state.tx)
    places = jax.tree.map(lambda x: x.sharding, plain)

    @jax.jit
    def users(state, batch):
        value, grads = jax.value_and_grad(loss)(state.params, batch)
        new_state = state.apply_gradients(grads=grads)
        new_state = jax.tree.map(jax.lax.with_sharding_constraint, new_state, places)
        return new_state, {"loss": value, "grad_norm": optax.tree.norm(grads)}

    states = {ours: placed_state, users: plain}

    def seconds(step):
        start = time.perf_counter()
        for _ in range(20):
            out = step(states[step], batch)
        jax.block_until_ready(out)
        return time.perf_counter() - start

    # Others share this machine: the best of several tries is what the step itself costs.
    ratios = []
    while len(ratios) < 6 and min(ratios, default=2) >= 1.10:
        pairs = np.array([(seconds(ours), seconds(users)) for _ in range(20)])
        ratios.append(np.median(pairs[:, 0]) / np.median(pairs[:, 1]))
    assert min(ratios) < 1.10, f"{ratios} times plain jit"


# -- compositions


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


@pytest.mark.parametrize("stage", STAGES)
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


@pytest.mark.parametrize("stage", STAGES)
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


@pytest.mark.parametrize("stage", STAGES)
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
    state = placed(made)
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


# -- what users try first, and what they are told


def placed_mlp(**options):
    loss = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
    params = {"w": jnp.ones((64, 16))}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))
    return zerojax.shard_train_state(state), zerojax.train_step(loss, **options), jnp.ones((8, 64))


def test_a_donated_state_is_refused_before_it_is_used():
    state, step, batch = placed_mlp()
    new, _ = step(state, batch)
    with pytest.raises(ValueError, match=r"donated to an earlier step.*state, metrics = step\("):
        step(state, batch)
    step(new, batch)
    state, step, batch = placed_mlp(donate=False)
    assert step(state, batch)[1]["loss"] == step(state, batch)[1]["loss"]


@pytest.mark.parametrize("takes_key", [True, False])
def test_a_key_too_few_or_too_many(takes_key):
    state, _, batch = placed_mlp()
    plain = lambda params, batch: jnp.mean(batch @ params["w"])
    noisy = lambda params, batch, rng: plain(params, batch)
    step = zerojax.train_step(noisy if takes_key else plain)
    key = () if takes_key else (jax.random.key(0),)
    given = "params, batch" if takes_key else "params, batch, rng"
    with pytest.raises(TypeError, match=rf"the loss with \({given}\): .*jax.random.key\(n\)"):
        step(state, batch, *key)


def test_a_loss_that_looks_like_another_is_called_all_the_same():
    state, _, batch = placed_mlp()

    def configured(config, params, batch):
        return config * jnp.mean(batch @ params["w"])

    @functools.wraps(configured)
    def loss(params, batch):
        return configured(2.0, params, batch)

    assert zerojax.train_step(jax.jit(loss))(state, batch)[1]["loss"] == 128


def test_keys_for_each_example_are_not_called_a_batch():
    state, _, batch = placed_mlp()
    step = zerojax.train_step(lambda params, batch, keys: jnp.mean(batch @ params["w"]))
    with pytest.raises(ValueError, match=r"batch has 8 and argument 3 of the loss has 4"):
        step(state, batch, jax.random.split(jax.random.key(0), 4))


def test_options_are_read_when_the_step_is_made():
    with pytest.raises(ValueError, match="stage must be 0, 1, 2 or 3, got 7"):
        placed_mlp(stage=7)
    assert zerojax.train_step(lambda p, b: 0.0, mutable="batch_stats").recipe.mutable == (
        "batch_stats",
    )
