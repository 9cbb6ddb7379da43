"""Flax nnx: loops keep their style; objects, with variables of every kind, change in place."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
import zerojax.nnx
from tests.conftest import make_mesh
from tests.reference import assert_close, assert_equal_bits

ROWS, WIDTH = 64, 32
STAGES = (0, 1, 2, 3)
EPS = 1e-4
BATCH = jax.random.normal(jax.random.key(1), (ROWS, 16))


class Net(nnx.Module):
    """A dense net with everything that is no parameter: statistics, streams, a plain counter."""

    def __init__(self, rngs, axis_name=None, rate=0.0):
        # A bias before the norm would have a mathematically zero gradient.
        first = nnx.Linear(16, WIDTH, use_bias=False, rngs=rngs)
        self.layers = nnx.List([first, nnx.Linear(WIDTH, 16, rngs=rngs)])
        self.norm = nnx.BatchNorm(WIDTH, axis_name=axis_name, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        self.activation = jnp.tanh

    def __call__(self, x):
        self.calls[...] += 1
        return self.layers[1](self.drop(self.activation(self.norm(self.layers[0](x)))))


class Adapted(nnx.Module):
    def __init__(self, rngs):
        self.base = nnx.Linear(16, WIDTH, rngs=rngs)
        self.lora = nnx.LoRA(16, 8, WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, 16, rngs=rngs)

    def __call__(self, x):
        return self.out(jnp.tanh(self.base(x) + self.lora(x)))


def loss_fn(model, batch):
    return jnp.mean((model(batch) - batch) ** 2)


@pytest.fixture
def compiled():
    """The names of what XLA compiles from here on. (JAX's own cache has an entry more at times.)"""
    names = []

    def listen(event, _, fun_name="", **about):
        if event.endswith("backend_compile_duration"):
            names.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


def make(make_model=Net, wrt=nnx.Param, tx=None, **options):
    model = make_model(nnx.Rngs(0), **options)
    return model, nnx.Optimizer(model, tx or optax.adam(1e-2, eps=EPS), wrt=wrt)


def pure(model):
    return nnx.to_pure_dict(nnx.state(model))


def params_of(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def plain_loop(model, optimizer, steps, loss=loss_fn):
    @nnx.jit
    def train_step(model, optimizer, batch):
        value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, optimizer.wrt))(
            model, batch
        )
        optimizer.update(model, grads)
        return value

    return [float(train_step(model, optimizer, BATCH)) for _ in range(steps)]


@pytest.mark.parametrize("stage", STAGES)
def test_a_loop_is_what_it_is_on_one_device(stage, compiled):
    """With statistics over the mesh axis, everything that moves is the same as in nnx's loop."""
    wanted, wanted_optimizer = make()
    losses = plain_loop(wanted, wanted_optimizer, 3)
    model, optimizer = make(axis_name="data")
    returned = zerojax.nnx.shard(model, optimizer, stage)
    assert returned == (model, optimizer)
    kernel = model.layers[0].kernel
    step = zerojax.nnx.train_step(loss_fn)
    for loss in losses:
        metrics = step(model, optimizer, BATCH)
        assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-5)
    assert model.layers[0].kernel is kernel, "the model's own variables are updated"
    assert kernel[...].sharding.spec == jax.P(*["data"] * (stage == 3))
    moments = nnx.as_pure(optimizer.opt_state)[0]
    cut = moments.mu["layers"][0]["kernel"].addressable_shards[0].data.shape
    assert cut == ((2, WIDTH) if stage else (16, WIDTH))
    assert (int(model.calls[...]), int(optimizer.step[...])) == (3, 3)
    assert_close(params_of(model), params_of(wanted), 2e-5)
    assert_close(model.norm.mean[...], wanted.norm.mean[...], 1e-5)
    assert_close(model.norm.var[...], wanted.norm.var[...], 1e-5)
    assert_close(moments.mu, nnx.as_pure(wanted_optimizer.opt_state)[0].mu, 2e-5)
    assert compiled.count("jit(step)") == 1


def test_statistics_are_means_over_the_devices():
    model, optimizer = zerojax.nnx.shard(*make())
    before = np.asarray(model.layers[0](BATCH)).reshape(8, 8, WIDTH)
    zerojax.nnx.train_step(loss_fn)(model, optimizer, BATCH)
    momentum = 0.99
    np.testing.assert_allclose(
        model.norm.var[...], momentum + (1 - momentum) * before.var(1).mean(0), rtol=1e-5
    )


class Counting(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(16, 16, rngs=rngs)
        self.tokens = nnx.Variable(jnp.int32(2**24))
        self.raw = nnx.Variable(jax.random.PRNGKey(123456789))
        self.key = nnx.Variable(jax.random.key(3))

    def __call__(self, x):
        self.tokens[...] += 1
        for key in (self.raw, self.key):
            key.set_value(jax.random.split(key.get_value())[0])
        return self.layer(x)


@pytest.mark.parametrize("stage", [0, 3])
def test_integers_and_keys_of_ones_own_go_on_exactly(stage):
    model = Counting(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    zerojax.nnx.shard(model, optimizer, stage)
    step = zerojax.nnx.train_step(loss_fn, accumulate=2)
    for _ in range(3):
        step(model, optimizer, BATCH)
    one = Counting(nnx.Rngs(0))
    for _ in range(3):
        one(BATCH)
    assert int(model.tokens[...]) == 2**24 + 3
    np.testing.assert_array_equal(model.raw[...], one.raw[...])
    got, wanted = (jax.random.key_data(m.key.get_value()) for m in (model, one))
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_random_streams_differ_between_devices_and_go_on(accumulate):
    drawn = lambda model, batch: (loss_fn(model, batch), model.drop(jnp.ones(batch.shape)))
    model, optimizer = zerojax.nnx.shard(*make(rate=0.5))
    step = zerojax.nnx.train_step(drawn, accumulate=accumulate)
    masks = [np.asarray(step(model, optimizer, BATCH)["aux"]) for _ in range(2)]
    parts = [mask.reshape(8 * accumulate, -1) for mask in masks]
    everything = np.concatenate(parts)
    assert len(np.unique(everything, axis=0)) == 2 * 8 * accumulate
    assert int(model.drop.rngs.count[...]) == 4  # two calls a step
    again, same = zerojax.nnx.shard(*make(rate=0.5))
    np.testing.assert_array_equal(step(again, same, BATCH)["aux"], masks[0])


def test_stacked_streams_differ_between_layers_and_devices():
    class Stack(nnx.Module):
        def __init__(self, rngs):
            create = nnx.vmap(lambda rngs: nnx.Dropout(0.5, rngs=rngs))
            self.drops = nnx.split_rngs(splits=3)(create)(rngs)
            self.scale = nnx.Param(jnp.ones((16, 16)))

        def __call__(self, x):
            every = nnx.vmap(lambda drop, x: drop(x), in_axes=(0, None))(self.drops, x)
            return (every @ self.scale).mean(), jnp.swapaxes(every, 0, 1)

    model, optimizer = zerojax.nnx.shard(*make(Stack))
    step = zerojax.nnx.train_step(lambda model, x: model(x))
    rows = np.asarray(step(model, optimizer, jnp.ones((8, 16)))["aux"])
    assert rows.shape == (8, 3, 16)
    assert len(np.unique(rows.reshape(24, 16), axis=0)) == 24
    assert model.drops.rngs.key[...].shape == (3,)


@pytest.mark.parametrize("stage", [0, 3])
def test_lora_alone_is_trained(stage, compiled):
    wanted, wanted_optimizer = make(Adapted, nnx.LoRAParam)
    plain_loop(wanted, wanted_optimizer, 2)
    model, optimizer = make(Adapted, nnx.LoRAParam)
    before = params_of(model)
    zerojax.nnx.shard(model, optimizer, stage)
    step = zerojax.nnx.train_step(loss_fn)
    for _ in range(2):
        step(model, optimizer, BATCH)
    assert compiled.count("jit(step)") == 1
    plan = zerojax.plan(zerojax.nnx.state(model, optimizer), stage=stage)
    trained = {leaf.path for leaf in plan.params if not leaf.frozen}
    assert trained == {"params/lora/lora_a", "params/lora/lora_b"}
    assert {leaf.path.split("/")[-2] for leaf in plan.leaves if "opt_state/0/mu" in leaf.path} == {
        "lora"
    }
    assert_close(params_of(model), params_of(wanted), 2e-5)
    assert_equal_bits(model.base.kernel[...], before["base"]["kernel"])
    assert model.base.kernel[...].sharding.spec == jax.P(*["data"] * (stage == 3))
    zerojax.verify(*step.pure(model, optimizer, BATCH)).raise_if_wrong()


def test_models_are_born_sharded():
    made = zerojax.nnx.shard(make, stage=3)
    placed = zerojax.nnx.shard(*make(), stage=3)
    for model, optimizer in (made, placed):
        step = zerojax.nnx.train_step(loss_fn)
        step(model, optimizer, BATCH)
    assert_close(params_of(made[0]), params_of(placed[0]), 1e-6)
    assert made[0].layers[0].kernel[...].sharding == placed[0].layers[0].kernel[...].sharding


def test_the_original_arrays_survive():
    model, optimizer = make()
    before = params_of(model)
    zerojax.nnx.shard(model, optimizer)
    zerojax.nnx.train_step(loss_fn)(model, optimizer, BATCH)
    assert not any(x.is_deleted() for x in jax.tree.leaves(before))


def test_placing_again_changes_the_stage():
    model, optimizer = zerojax.nnx.shard(*make(), stage=3)
    zerojax.nnx.train_step(loss_fn)(model, optimizer, BATCH)
    before = params_of(model)
    zerojax.nnx.shard(model, optimizer, stage=1)
    assert model.layers[0].kernel[...].sharding.is_fully_replicated
    assert_equal_bits(params_of(model), before)
    zerojax.nnx.train_step(loss_fn, stage=1)(model, optimizer, BATCH)


def test_evaluation_in_nnx_style():
    model, optimizer = make(rate=0.5)
    zerojax.nnx.shard(model, optimizer)
    zerojax.nnx.train_step(loss_fn)(model, optimizer, BATCH)
    model.eval()
    before = jax.tree.map(np.asarray, params_of(model))
    evaluate = zerojax.nnx.eval_step(lambda m, x: (loss_fn(m, x), m(x)))
    metrics = evaluate(model, optimizer, BATCH)
    plain = nnx.jit(lambda model, x: model(x))(model, BATCH)  # inference with the shards
    np.testing.assert_allclose(metrics["aux"], plain, rtol=1e-5, atol=1e-6)
    assert float(metrics["loss"]) == pytest.approx(float(jnp.mean((plain - BATCH) ** 2)), rel=1e-5)
    assert_equal_bits(params_of(model), before)


def test_checkpoints_open_at_another_stage(tmp_path):
    model, optimizer = zerojax.nnx.shard(*make(rate=0.5), stage=3)
    step = zerojax.nnx.train_step(loss_fn)
    step(model, optimizer, BATCH)
    zerojax.save(tmp_path / "1", zerojax.nnx.state(model, optimizer))
    other, its_optimizer = zerojax.nnx.shard(*make(rate=0.5), stage=1)
    like = zerojax.nnx.state(other, its_optimizer)
    zerojax.nnx.update(other, its_optimizer, zerojax.restore(tmp_path / "1", like=like))
    keys = lambda tree: jax.tree.map(
        lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x,
        tree,
    )
    assert_equal_bits(keys(pure(other)), keys(pure(model)))
    assert other.layers[0].kernel[...].sharding.is_fully_replicated
    mine, theirs = step(model, optimizer, BATCH), step(other, its_optimizer, BATCH)
    assert float(mine["loss"]) == pytest.approx(float(theirs["loss"]), rel=1e-6)


def test_mixed_precision_keeps_masters_in_the_optimizer(compiled):
    precision = zerojax.Precision(compute="bfloat16", param="bfloat16", master="float32")
    model, optimizer = zerojax.nnx.shard(*make(), precision=precision)
    step = zerojax.nnx.train_step(loss_fn)
    losses = [float(step(model, optimizer, BATCH)["loss"]) for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    kernel = model.layers[0].kernel[...]
    master = nnx.as_pure(optimizer.opt_state).master["layers"][0]["kernel"]
    assert (kernel.dtype, master.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(kernel, master.astype(jnp.bfloat16))
    assert compiled.count("jit(step)") == 1


def test_verify_and_audit_take_the_step_without_objects():
    model, optimizer = zerojax.nnx.shard(*make(axis_name="data"))
    step = zerojax.nnx.train_step(loss_fn)
    checked = zerojax.verify(*step.pure(model, optimizer, BATCH))
    checked.raise_if_wrong()
    report = zerojax.audit(*step.pure(model, optimizer, BATCH)).check()
    assert {"all-gather", "reduce-scatter"} <= report.totals.keys()
    assert any("params/layers/0/kernel" in one.paths for one in report.traffic)


def test_the_loss_takes_a_key_and_accumulates():
    def noisy(model, batch, rng):
        return loss_fn(model, batch), jax.random.uniform(rng, (batch.shape[0],))

    model, optimizer = zerojax.nnx.shard(*make())
    step = zerojax.nnx.train_step(noisy, accumulate=2)
    key = jax.random.key(7)
    metrics = step(model, optimizer, BATCH, key)
    folded = [jax.random.fold_in(jax.random.fold_in(key, d), m) for d in range(8) for m in (0, 1)]
    wanted = np.concatenate([jax.random.uniform(k, (4,)) for k in folded])
    np.testing.assert_array_equal(metrics["aux"], wanted)
    assert int(model.calls[...]) == 1  # the mean of what the parts counted


def test_fewer_devices():
    model, optimizer = zerojax.nnx.shard(*make(), mesh=make_mesh(2))
    zerojax.nnx.train_step(loss_fn)(model, optimizer, BATCH)
    assert model.layers[0].kernel[...].addressable_shards[0].data.shape == (8, WIDTH)


def tensor_parallel(rngs):
    init = nnx.initializers.lecun_normal()
    linear = lambda n, m, *cut: nnx.Linear(
        n, m, kernel_init=nnx.with_partitioning(init, cut), rngs=rngs
    )
    return nnx.Sequential(linear(16, 64, None, "tensor"), jnp.tanh, linear(64, 16, "tensor", None))


def test_a_tensor_axis_of_the_users_own_is_kept():
    devices = np.array(jax.devices()).reshape(4, 2)
    mesh = jax.sharding.Mesh(
        devices, ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    wanted, wanted_optimizer = make(lambda rngs: nnx.Sequential(
        nnx.Linear(16, 64, rngs=rngs), jnp.tanh, nnx.Linear(64, 16, rngs=rngs)
    ))  # fmt: skip
    losses = plain_loop(wanted, wanted_optimizer, 2)
    with jax.set_mesh(mesh):
        model, optimizer = make(tensor_parallel)
        with pytest.raises(ValueError, match=r"lost where models.*Make the model first"):
            zerojax.nnx.shard(lambda: make(tensor_parallel), mesh=mesh)
    zerojax.nnx.shard(model, optimizer, mesh=mesh)
    step = zerojax.nnx.train_step(loss_fn)
    for loss in losses:
        assert float(step(model, optimizer, BATCH)["loss"]) == pytest.approx(loss, rel=1e-5)
    up, down = (model.layers[i].kernel[...].sharding.spec for i in (0, 2))
    assert (up, down) == (jax.P("data", "tensor"), jax.P("tensor", "data"))


def test_what_is_not_placed():
    with pytest.raises(ValueError, match=r"not placed. First: zerojax.nnx.shard\(model, opt"):
        zerojax.nnx.train_step(loss_fn)(*make(), BATCH)


@pytest.mark.parametrize("given", [lambda: make()[0], make()[0]])
def test_a_model_alone(given):
    with pytest.raises(TypeError, match=r"got a Net alone: zerojax.nnx.shard\(model, optimizer"):
        zerojax.nnx.shard(given)


def test_a_loss_that_adds_a_variable():
    def adding(model, batch):
        model.hidden = nnx.Intermediate(batch)
        return loss_fn(model, batch)

    model, optimizer = zerojax.nnx.shard(*make())
    with pytest.raises(ValueError, match=r"added the variable hidden.*Make it with the model"):
        zerojax.nnx.train_step(adding)(model, optimizer, BATCH)
    assert not any(x.is_deleted() for x in jax.tree.leaves(params_of(model)))


PLAIN = """
model = Net(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-2, eps=EPS), wrt=nnx.Param)

@nnx.jit
def train_step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return loss

for batch in data:
    loss = train_step(model, optimizer, batch)
"""

SHARDED = """
import zerojax.nnx
model = Net(nnx.Rngs(0), axis_name="data")
optimizer = nnx.Optimizer(model, optax.adam(1e-2, eps=EPS), wrt=nnx.Param)
zerojax.nnx.shard(model, optimizer, stage=3)
train_step = zerojax.nnx.train_step(loss_fn)

for batch in data:
    loss = train_step(model, optimizer, batch)["loss"]
"""


def test_a_loop_changes_five_lines():
    losses = []
    for program in (PLAIN, SHARDED):
        scope = {**globals(), "data": [BATCH] * 3}
        exec(program, scope)
        losses.append(float(scope["loss"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert len(set(SHARDED.splitlines()) - set(PLAIN.splitlines())) <= 5


def test_objects_where_states_belong_are_told_the_way():
    model, optimizer = make(lambda rngs: nnx.Linear(16, 16, rngs=rngs))
    zerojax.plan((model, ()))  # a Module is a tree of its parameters too
    for given in (model, (model, optimizer), lambda: make(lambda r: nnx.Linear(16, 16, rngs=r))):
        with pytest.raises(TypeError, match=r"zerojax.nnx.shard\(model, optimizer, stage=3\)"):
            zerojax.shard_train_state(given)
    with pytest.raises(TypeError, match=r"not a nnx.Optimizer. Make one: nnx.Optimizer\(model"):
        zerojax.nnx.shard(model, optax.adam(1e-3))
    with pytest.raises(TypeError, match=r"got a tuple alone: zerojax.nnx.shard\(model, opt"):
        zerojax.nnx.shard((model, optimizer, 1), stage=3)
    zerojax.nnx.shard(model, optimizer)
    step = zerojax.nnx.train_step(lambda model, batch, rng: jnp.mean(model(batch)))
    with pytest.raises(TypeError, match=r"calls the loss with \(model, batch\): .*'rng'.*key\(n\)"):
        step(model, optimizer, jnp.ones((8, 16)))
    for look in (zerojax.verify, zerojax.audit):
        with pytest.raises(TypeError, match=r"\(\*step.pure\(model, optimizer, batch\)\)"):
            look(step, model, optimizer)
