"""Batches: how they are split, rows that do not divide, and leaves that all examples share."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh, PartitionSpec as P

import zerojax
from tests import linear
from tests.conftest import make_mesh
from tests.models import mlp
from tests.placed import place
from tests.reference import assert_close, assert_equal_bits

PARAMS = {"w": jax.random.normal(jax.random.key(0), (12, 16)) / 4, "out": jnp.ones((16, 4)) / 8}
DRAWN = np.random.default_rng(0)
# Six steps of 32 examples, one label for each, and a table for the labels that all share.
BATCH = {
    "x": DRAWN.normal(size=(6, 32, 12)).astype(np.float32),
    "y": DRAWN.integers(0, 8, 32),
    "table": DRAWN.normal(size=(8, 4)).astype(np.float32),
}
SPECS = {"x": P(None, "data"), "y": P("data"), "table": P()}


def recurrent(params, batch):
    step = lambda h, x: (jnp.tanh(x @ params["w"] + h), None)
    h, _ = jax.lax.scan(step, jnp.zeros((batch["x"].shape[1], 16)), batch["x"])
    errors = jnp.mean((h @ params["out"] - jnp.asarray(batch["table"])[batch["y"]]) ** 2, -1)
    return errors.mean(), {"errors": errors}


def placed(stage=3):
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=optax.sgd(1.0))
    return zerojax.shard_train_state(state, stage)


@pytest.mark.parametrize(("stage", "accumulate"), [(0, 1), (3, 2)])
def test_time_major_batches_with_a_table_give_what_one_device_gives(stage, accumulate):
    step = zerojax.train_step(recurrent, accumulate=accumulate, batch_specs=SPECS, donate=False)
    (value, aux), grads = jax.value_and_grad(recurrent, has_aux=True)(PARAMS, BATCH)
    ends = []
    for batch in (BATCH, zerojax.shard_batch(BATCH, batch_specs=SPECS)):
        state, metrics = step(placed(stage), batch)
        assert float(metrics["loss"]) == pytest.approx(float(value), rel=1e-6)
        np.testing.assert_allclose(metrics["aux"]["errors"], aux["errors"], rtol=1e-5)
        ends.append(state.params)
    for params in ends:
        assert_close(jax.tree.map(jnp.subtract, PARAMS, params), grads, 1e-5)
    assert batch["x"].sharding.spec == P(None, "data") and batch["table"].sharding.spec == P()
    report = zerojax.verify(step, placed(stage), BATCH)
    assert report.ok, report


def test_gradients_and_evaluation_take_specs_too():
    value, _ = recurrent(PARAMS, BATCH)
    told = zerojax.eval_step(recurrent, batch_specs=SPECS)(placed(), BATCH)
    assert float(told["loss"]) == pytest.approx(float(value), rel=1e-6)
    plan = zerojax.plan({"params": PARAMS})
    none = lambda x: {**BATCH, "x": x, "y": jnp.zeros(x.shape[1], int)}
    loss = lambda params, x: recurrent(params, none(x))[0]
    specs = P(None, "data")  # one for all of the batch
    value, _ = zerojax.value_and_grad(loss, plan, batch_specs=specs)(PARAMS, BATCH["x"])
    assert float(value) == pytest.approx(float(loss(PARAMS, BATCH["x"])), rel=1e-6)
    shapes = jax.eval_shape(lambda: BATCH)
    assert zerojax.aot.batch(shapes, plan, batch_specs=SPECS)["x"].sharding.spec[:1] == (None,)


def test_a_key_that_is_said_to_be_replicated_is_not_folded():
    batch = {"x": np.ones((8, 12), np.float32), "key": jax.random.key(1)}
    loss = lambda params, batch: (
        jnp.mean(batch["x"] @ params["w"]), jax.random.uniform(batch["key"], (batch["x"].shape[0],))
    )  # fmt: skip
    _, metrics = zerojax.train_step(loss, batch_specs={"x": None, "key": P()})(placed(), batch)
    np.testing.assert_array_equal(
        metrics["aux"], np.repeat(jax.random.uniform(batch["key"], (1,)), 8)
    )


@pytest.mark.parametrize(("specs", "message"), [
    ({**SPECS, "x": P("model")}, r"P\('model',?\) for batch leaf x of shape \(6, 32, 12\).*split "
     r"over 'data'. Use P\('data'\).*P\(None, 'data'\).*P\(\) for what is replicated"),
    ({**SPECS, "y": P(None, "data")}, r"batch leaf y of shape \(32,\).*Use P\('data'\)"),
    ({**SPECS, "y": "data"}, r"'data' for batch leaf y.*Use P\('data'\)"),
    ({"x": P()}, r"batch_specs= does not fit the batch.*Give one PartitionSpec for all of it"),
    ({**SPECS, "x": None}, r"batch leaf x has 6 and batch leaf y has 32|y has 32.*x has 6"),
], ids=["axis", "dim", "string", "tree", "rows"])  # fmt: skip
def test_specs_that_do_not_fit_are_named(specs, message):
    with pytest.raises(ValueError, match=message):
        zerojax.train_step(recurrent, batch_specs=specs)(placed(), BATCH)
    with pytest.raises(ValueError, match=message):
        zerojax.shard_batch(BATCH, batch_specs=specs)


def test_verify_says_that_a_batch_is_time_major():
    x = DRAWN.normal(size=(16, 24, 12)).astype(np.float32)
    loss = lambda p, b: recurrent(p, {**b, "y": jnp.zeros(b["x"].shape[1], int), "table": table})[0]
    table = BATCH["table"]
    report = zerojax.verify(zerojax.train_step(loss), placed(), {"x": x})
    assert not report.ok
    assert "split along dimension 1" in report.causes[0], report
    assert "batch_specs={'x': P(None, 'data')}" in report.causes[0], report


def test_verify_says_that_a_table_belongs_to_the_whole_batch():
    table = DRAWN.normal(size=(16, 4)).astype(np.float32)  # as long as the batch
    batch = {"ids": DRAWN.permutation(16), "table": table}
    loss = lambda p, b: jnp.mean((p["out"][b["ids"]] - b["table"][b["ids"]]) ** 2)
    report = zerojax.verify(zerojax.train_step(loss), placed(), batch)
    assert "batch leaf table belongs to all examples" in report.causes[0], report
    assert "batch_specs={'ids': P('data'), 'table': P()}" in report.causes[0]
    specs = {"ids": P("data"), "table": P()}
    assert zerojax.verify(zerojax.train_step(loss, batch_specs=specs), placed(), batch).ok


def test_batch_that_does_not_divide():
    made = mlp(False)
    batch = jax.tree.map(lambda x: x[:60], made.batch)
    message = (
        r"batch leaf x has a leading dimension of 60.*8 devices. Use 56 or 64 examples, or pad: "
        r"batch, mask = zerojax.pad_batch\(batch\), with zerojax.mean\(values, where=mask\) in"
    )
    state = place(made)
    loss = zerojax.value_and_grad(made.loss, state.tx.plan)
    for call in (
        lambda: zerojax.train_step(made.loss)(state, batch),
        lambda: zerojax.eval_step(made.loss)(state, batch),
        lambda: loss(state.params, batch),
        lambda: zerojax.shard_batch(batch),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    message = (
        r"64.*8 devices x 3 microbatches. Use 48 or 72.*pad_batch\(batch, accumulate=3\), with"
    )
    with pytest.raises(ValueError, match=message):
        zerojax.train_step(made.loss, accumulate=3)(state, made.batch)
    with pytest.raises(ValueError, match=r"60.*7 devices.*pad_batch\(batch, plan=state\), with"):
        zerojax.train_step(made.loss)(place(made, mesh=make_mesh(7)), batch)
    with pytest.raises(ValueError, match=r"leading dimension of 0.*Use 8 examples"):
        zerojax.shard_batch(np.ones((0, 2)))


def test_batch_leaves_that_disagree():
    made = mlp(False)
    batch = {"x": made.batch["x"], "y": made.batch["y"][:8]}
    message = r"batch leaf x has 64 and batch leaf y has 8. Give every leaf one row"
    with pytest.raises(ValueError, match=message):
        zerojax.train_step(made.loss)(place(made), batch)
    with pytest.raises(ValueError, match=message):
        zerojax.shard_batch(batch)
    grad = zerojax.value_and_grad(lambda params, batch, stats: 0.0, zerojax.plan(place(made)))
    message = (
        r"and argument 3 of the loss has 7.*argument alone; .*statistics, the loss closes over"
    )
    with pytest.raises(ValueError, match=message):
        grad(made.params, made.batch, np.zeros(7))


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


def test_keys_for_each_example_are_not_called_a_batch():
    state, _, batch = linear.start()
    step = zerojax.train_step(lambda params, batch, keys: jnp.mean(batch @ params["w"]))
    with pytest.raises(ValueError, match=r"batch has 8 and argument 3 of the loss has 4"):
        step(state, batch, jax.random.split(jax.random.key(0), 4))


def test_host_batches_and_placed_ones_give_the_same():
    made = mlp(False)
    host = jax.tree.map(np.asarray, made.batch)
    step = zerojax.train_step(made.loss, donate=False)
    state = place(made)
    a, _ = step(state, host)
    b, _ = step(state, zerojax.shard_batch(host))
    assert_equal_bits(a.params, b.params)
    assert zerojax.shard_batch(host)["x"].sharding.spec == P("data")


def test_rows_that_do_not_divide_or_do_not_follow_one_another_are_refused():
    with pytest.raises(
        ValueError, match=r"30 rows.*over 8.*a multiple of 8: .*pad_batch\(batch, to="
    ):
        zerojax.process_slice(30)
    two = Mesh(
        np.array(jax.devices()).reshape(2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2
    )
    assert zerojax.process_slice(6, two) == slice(0, 6)


# -- of a plan


def grouped():
    groups = {"params": "gpu", "grads": "gpu", "opt_state": ("gpu", "node")}
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=optax.sgd(1.0))
    return zerojax.shard_train_state(state, mesh=zerojax.mesh(node=2, gpu=4), groups=groups)


def test_a_batch_goes_where_a_plan_or_its_state_splits_it():
    state = grouped()
    rows = np.arange(16.0)
    for plan in (state, state.tx.plan):
        batch = zerojax.shard_batch(rows, plan=plan)
        assert (
            batch.sharding.spec == P(("node", "gpu")) and batch.sharding.mesh == state.tx.plan.mesh
        )
        assert [s.data[0] for s in batch.addressable_shards] == [2.0 * n for n in range(8)]
        assert zerojax.process_slice(16, plan=plan) == slice(0, 16)
    tensor = jax.make_mesh((2, 2, 2), ("node", "gpu", "tensor"), axis_types=(AxisType.Auto,) * 3)
    plan = zerojax.plan((PARAMS, ()), mesh=tensor, axis=("node", "gpu"))
    assert zerojax.shard_batch(rows, plan=plan).sharding.spec == P(("node", "gpu"))
    assert zerojax.process_slice(4, plan=plan) == slice(0, 4)  # 4 devices, not 8, split it


def test_a_batch_of_a_plan_is_what_the_step_takes():
    state = grouped()
    specs = {"x": P(None, ("node", "gpu")), "y": P(("node", "gpu")), "table": P()}
    step = zerojax.train_step(recurrent, batch_specs=specs, donate=False)
    batch = zerojax.shard_batch(BATCH, plan=state, batch_specs=specs)
    assert batch["x"].sharding.spec == P(None, ("node", "gpu"))
    value, _ = recurrent(PARAMS, BATCH)
    assert float(step(state, batch)[1]["loss"]) == pytest.approx(float(value), rel=1e-6)


def test_a_plan_of_a_batch_stands_alone():
    state = grouped()
    with pytest.raises(
        ValueError, match=r"plan= brings its own mesh.*Leave the mesh and axis= out"
    ):
        zerojax.shard_batch(np.ones(16), state.tx.plan.mesh, plan=state)
    with pytest.raises(ValueError, match=r"Leave the mesh and axis= out"):
        zerojax.process_slice(16, axis="gpu", plan=state)
    for given in (state, state.tx.plan):
        with pytest.raises(TypeError, match=r"mesh= is a plan, or .*Pass it as plan=\."):
            zerojax.shard_batch(np.ones(16), given)
    with pytest.raises(ValueError, match=r"not placed.*First: .*zerojax.shard_train_state"):
        zerojax.shard_batch(np.ones(16), plan=state.replace(tx=optax.sgd(1.0)))
    with pytest.raises(ValueError, match=r"none is called 'data'.*pass axis='node'.*or both"):
        zerojax.shard_batch(np.ones(16), state.tx.plan.mesh)
