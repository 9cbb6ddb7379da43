"""The state of a Flax nnx model and its optimizer: variables of every kind, streams, LoRA."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
import zerojax.nnx
from tests.nnx_models import BATCH, Adapted, loss_fn, make, params_of, plain_loop, pure
from tests.reference import assert_close, assert_equal_bits


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
    step = zerojax.nnx.train_step(loss_fn)
    for given in [(model, optimizer), (lambda: make(tensor_parallel),)]:
        model, optimizer = zerojax.nnx.shard(*given, mesh=mesh)
        for loss in losses:
            assert float(step(model, optimizer, BATCH)["loss"]) == pytest.approx(loss, rel=1e-5)
        up, down = (model.layers[i].kernel[...].sharding.spec for i in (0, 2))
        assert (up, down) == (jax.P("data", "tensor"), jax.P("tensor", "data"))


def test_a_loss_that_adds_a_variable():
    def adding(model, batch):
        model.hidden = nnx.Intermediate(batch)
        return loss_fn(model, batch)

    model, optimizer = zerojax.nnx.shard(*make())
    with pytest.raises(ValueError, match=r"added the variable hidden.*Make it with the model"):
        zerojax.nnx.train_step(adding)(model, optimizer, BATCH)
    assert not any(x.is_deleted() for x in jax.tree.leaves(params_of(model)))
