"""Batches: which dimension of a leaf is split, over which axes, and what all examples share."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import zerojax
from tests.conftest import make_mesh
from tests.support import draw
from tests.support.reference import assert_close, train_state

PARAMS = {"w": draw.normal(0, 12, 16) / 4, "out": jnp.ones((16, 4)) / 8}
DRAWN = np.random.default_rng(0)
# Six steps of 32 examples, one label for each, and a table for the labels that all share.
BATCH = {
    "x": DRAWN.normal(size=(6, 32, 12)).astype(np.float32),
    "y": DRAWN.integers(0, 8, 32),
    "table": DRAWN.normal(size=(8, 4)).astype(np.float32),
}
SPECS = {"x": P(None, "data"), "y": P("data"), "table": P()}
LEVELS = ("node", "gpu")


def recurrent(params, batch):
    step = lambda h, x: (jnp.tanh(x @ params["w"] + h), None)
    h, _ = jax.lax.scan(step, jnp.zeros((batch["x"].shape[1], 16)), batch["x"])
    errors = jnp.mean((h @ params["out"] - jnp.asarray(batch["table"])[batch["y"]]) ** 2, -1)
    return errors.mean(), {"errors": errors}


def placed(**options):
    state = train_state(PARAMS, optax.sgd(1.0))
    return zerojax.shard_train_state(state, **options)


def test_time_major_batches_with_a_table_give_what_one_device_gives():
    state = placed(mesh=make_mesh(4))
    step = zerojax.train_step(recurrent, accumulate=2, batch_specs=SPECS, donate=False)
    (value, aux), grads = jax.jit(jax.value_and_grad(recurrent, has_aux=True))(PARAMS, BATCH)
    sharded = zerojax.shard_batch(BATCH, like=state, batch_specs=SPECS)
    assert sharded["x"].sharding.spec == P(None, "data") and sharded["table"].sharding.spec == P()
    for batch in (BATCH, sharded):
        new, metrics = step(state, batch)
        assert float(metrics["loss"]) == pytest.approx(float(value), rel=1e-6)
        np.testing.assert_allclose(metrics["aux"]["errors"], aux["errors"], rtol=1e-5)
        assert_close(jax.tree.map(jnp.subtract, PARAMS, new.params), grads, 1e-5)
    report = zerojax.verify(step, state, BATCH)
    assert report.ok, str(report)


def test_gradients_evaluation_and_shapes_take_specs_too():
    state = placed(mesh=make_mesh(2))
    plan = state.tx.plan
    value, _ = jax.jit(recurrent)(PARAMS, BATCH)
    metrics = zerojax.eval_step(recurrent, batch_specs=SPECS)(state, BATCH)
    assert float(metrics["loss"]) == pytest.approx(float(value), rel=1e-6)
    labels = lambda x: {**BATCH, "x": x, "y": jnp.zeros(x.shape[1], int)}
    loss = lambda params, x: recurrent(params, labels(x))[0]
    specs = P(None, "data")  # one for all of the batch
    grad = jax.jit(zerojax.value_and_grad(loss, plan, batch_specs=specs))
    wanted = float(jax.jit(loss)(PARAMS, BATCH["x"]))
    assert float(grad(PARAMS, BATCH["x"])[0]) == pytest.approx(wanted, rel=1e-6)
    shapes = jax.eval_shape(lambda: BATCH)
    assert zerojax.aot.batch(shapes, plan, batch_specs=SPECS)["x"].sharding.spec[:1] == (None,)


def test_a_key_that_is_said_to_be_replicated_is_not_folded():
    batch = {"x": np.ones((8, 12), np.float32), "key": jax.random.key(1)}

    def loss(params, batch):
        drawn = jax.random.uniform(batch["key"], (batch["x"].shape[0],))
        return jnp.mean(batch["x"] @ params["w"]), drawn

    step = zerojax.train_step(loss, batch_specs={"x": None, "key": P()})
    _, metrics = step(placed(), batch)
    one = jax.random.uniform(batch["key"], (1,))
    np.testing.assert_array_equal(metrics["aux"], np.repeat(one, 8))


def time_major():
    table, x = BATCH["table"], DRAWN.normal(size=(16, 24, 12)).astype(np.float32)
    rest = lambda x: {"y": jnp.zeros(x.shape[1], int), "table": table}
    return lambda p, b: recurrent(p, {**b, **rest(b["x"])})[0], {"x": x}


def long_table():
    """A table that is as long as the batch."""
    table = DRAWN.normal(size=(16, 4)).astype(np.float32)
    batch = {"ids": DRAWN.permutation(16), "table": table}
    return lambda p, b: jnp.mean((p["out"][b["ids"]] - b["table"][b["ids"]]) ** 2), batch


@pytest.mark.parametrize(
    ("case", "cause", "specs"),
    [
        (time_major, "split along dimension 1", {"x": P(None, "data")}),
        (long_table, "needs all of the batch leaf table", {"ids": P("data"), "table": P()}),
    ],
)
def test_verify_says_which_specs_a_batch_needs(case, cause, specs):
    loss, batch = case()
    state = placed()
    report = zerojax.verify(zerojax.train_step(loss), state, batch)
    assert not report.ok
    written = str(specs).replace("',)", "')")
    assert cause in report.causes[0] and f"batch_specs={written}" in report.causes[0], str(report)
    assert zerojax.verify(zerojax.train_step(loss, batch_specs=specs), state, batch).ok


def test_a_batch_goes_where_a_plan_or_its_state_splits_it():
    state = placed(mesh=zerojax.mesh(node=2, gpu=4), axis=LEVELS)
    for plan in (state, state.tx.plan):
        batch = zerojax.shard_batch(np.arange(16.0), like=plan)
        assert batch.sharding.spec == P(LEVELS)
        assert [s.data[0] for s in batch.addressable_shards] == [2.0 * n for n in range(8)]
        assert zerojax.run.process_slice(16, like=plan) == slice(0, 16)
    tensor = jax.make_mesh((2, 2, 2), (*LEVELS, "tensor"), axis_types=(AxisType.Auto,) * 3)
    plan = zerojax.plan((PARAMS, ()), mesh=tensor, axis=LEVELS)
    assert zerojax.shard_batch(np.arange(16.0), like=plan).sharding.spec == P(LEVELS)
    assert zerojax.run.process_slice(4, like=plan) == slice(0, 4)  # 4 devices, not 8, split it


def test_the_axis_data_of_a_mesh_splits_the_rows():
    types = (AxisType.Auto,) * 2
    levels, beside = zerojax.mesh(node=2, gpu=4), jax.make_mesh((4, 2), ("data", "tp"), types)
    with pytest.raises(ValueError, match=r"none of which is called 'data'.*like=state"):
        zerojax.shard_batch(np.arange(16.0), levels)
    assert zerojax.shard_batch(np.arange(16.0), beside).sharding.spec == P(("data",))
    assert zerojax.pad_batch(np.ones(3), beside)[1].shape == (4,)
    assert zerojax.run.process_slice(4, like=beside) == slice(0, 4)
    with jax.set_mesh(beside):
        assert zerojax.shard_batch(np.arange(16.0)).sharding == NamedSharding(beside, P(("data",)))
