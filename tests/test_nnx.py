"""Flax nnx: loops keep their style; objects, with variables of every kind, change in place."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
import zerojax.nnx
from tests.conftest import make_mesh, stages
from tests.nnx_models import BATCH, EPS, WIDTH, Net, loss_fn, make, params_of, plain_loop
from tests.reference import assert_close, assert_equal_bits


@pytest.mark.parametrize("stage", stages(1, 3))
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


@pytest.mark.parametrize("born", [False, True])
def test_optimizer_state_rests_in_host_memory(born):
    ends = []
    for offload in (zerojax.Offload(min_bytes=0), None):
        given = (make,) if born else make()
        model, optimizer = zerojax.nnx.shard(*given, stage=3, offload=offload)
        step = zerojax.nnx.train_step(loss_fn)
        for _ in range(2):
            metrics = step(model, optimizer, BATCH)
        plain_loop(model, optimizer, 1)  # nnx's own call of the optimizer
        arrays = [x for x in jax.tree.leaves(nnx.as_pure(optimizer.opt_state)) if x.ndim]
        kinds = {x.sharding.memory_kind for x in arrays}
        assert kinds == {"device" if offload is None else "pinned_host"}
        ends.append((metrics["loss"], params_of(model), nnx.as_pure(optimizer.opt_state)))
    assert_close(*ends, 1e-6)


def test_a_placed_optimizer_prints_and_keeps_its_plan():
    _, optimizer = zerojax.nnx.shard(*make())
    assert f"wrt={nnx.Param.__name__}" in repr(optimizer)
    assert jax.tree.map(lambda leaf: leaf, optimizer.tx) == optimizer.tx
    assert copy.deepcopy(optimizer).tx == optimizer.tx


def test_rows_of_a_table_without_a_dtype_have_that_of_the_table():
    seen = []

    class Rows(nnx.Module):
        def __init__(self, rngs):
            self.free = nnx.Embed(16, 8, rngs=rngs)
            self.wide = nnx.Embed(16, 8, dtype=jnp.float32, rngs=rngs)

    def loss(model, tokens):
        rows = model.free(tokens), model.wide(tokens)
        seen.append([str(r.dtype) for r in rows])
        return sum(jnp.mean(r.astype(jnp.float32) ** 2) for r in rows)

    model, optimizer = zerojax.nnx.shard(*make(Rows))
    tokens = jnp.arange(16)
    step = zerojax.nnx.train_step(loss, precision=zerojax.Precision(compute="bfloat16"))
    step(model, optimizer, tokens)
    assert seen.pop() == ["bfloat16", "float32"]
    zerojax.nnx.eval_step(loss)(model, optimizer, tokens)
    assert seen.pop() == ["float32"] * 2
    assert model.free.dtype == jnp.float32


def test_statistics_are_means_over_the_devices():
    model, optimizer = zerojax.nnx.shard(*make())
    before = np.asarray(model.layers[0](BATCH)).reshape(8, 8, WIDTH)
    zerojax.nnx.train_step(loss_fn)(model, optimizer, BATCH)
    momentum = 0.99
    np.testing.assert_allclose(
        model.norm.var[...], momentum + (1 - momentum) * before.var(1).mean(0), rtol=1e-5
    )


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


def test_what_is_not_placed():
    told = r"not placed. First: zerojax.nnx.shard\(model, opt.*A new optimizer of a sharded model"
    with pytest.raises(ValueError, match=told):
        zerojax.nnx.train_step(loss_fn)(*make(), BATCH)


@pytest.mark.parametrize("given", [lambda: make()[0], make()[0]])
def test_a_model_alone(given):
    with pytest.raises(TypeError, match=r"got a Net alone: zerojax.nnx.shard\(model, optimizer"):
        zerojax.nnx.shard(given)


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
        scope = {"nnx": nnx, "optax": optax, "Net": Net, "EPS": EPS, "loss_fn": loss_fn}
        scope["data"] = [BATCH] * 3
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
