"""zerojax.pad_batch: what it fills in, and that losses, gradients and datasets stay exact."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import zerojax
from tests.conftest import make_mesh
from tests.reference import assert_close

DRAWN = np.random.default_rng(0)
# 13 x 5 weights divide over no number of devices here: they rest padded too.
PARAMS = {"w": jax.random.normal(jax.random.key(0), (13, 5)) / 4, "out": jnp.ones(5) / 3}
DATA = {
    "x": DRAWN.normal(size=(77, 13)).astype(np.float32),
    "y": DRAWN.uniform(0.5, 2.0, 77).astype(np.float32),
}


LOW = 0.5


def errors_of(params, batch):
    """A loss for each example, which is infinite for one of zeros, and its gradient NaN."""
    predicted = jnp.tanh(batch["x"] @ params["w"]) @ params["out"]
    norms = jnp.sqrt(jnp.sum((batch["x"] @ params["w"]) ** 2, axis=-1))
    return (predicted / batch["y"] - jnp.log(batch["y"])) ** 2 + jnp.log(norms)


def loss_fn(params, batch):
    errors = errors_of(params, batch)
    low = zerojax.mean(errors < LOW, where=batch["mask"])
    aux = {"low": low, "real": jnp.mean(batch["mask"]), "errors": errors}
    return zerojax.mean(errors, where=batch["mask"]), aux


def plain(params, batch):
    return jnp.mean(errors_of(params, batch))


def rows_of(batch, rows):
    return {name: values[rows] for name, values in batch.items()}


def placed(stage=3, mesh=None):
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=optax.sgd(1.0))
    return zerojax.shard_train_state(state, stage, mesh=mesh, min_shard_size=1)


def with_mask(batch, **options):
    padded, mask = zerojax.pad_batch(batch, **options)
    return {**padded, "mask": mask}


# -- what it returns


def test_what_is_filled_in_are_the_batchs_own_examples_from_the_first_one_on():
    batch = {"x": np.arange(10).reshape(5, 2), "y": jnp.arange(5.0), "scale": np.float32(3)}
    padded, mask = zerojax.pad_batch(batch, to=16)
    source = [0, 1, 2, 3, 4] * 3 + [0]
    np.testing.assert_array_equal(padded["x"], batch["x"][source])
    np.testing.assert_array_equal(padded["y"], batch["y"][np.array(source)])
    np.testing.assert_array_equal(mask, [True] * 5 + [False] * 11)
    assert mask.dtype == bool and isinstance(mask, np.ndarray)
    assert type(padded["x"]) is np.ndarray and padded["x"].dtype == batch["x"].dtype
    assert isinstance(padded["y"], jax.Array)
    assert padded["scale"] is batch["scale"]


@pytest.mark.parametrize(("rows", "devices", "accumulate", "want"), [
    (1, 8, 1, 8), (9, 8, 1, 16), (9, 6, 1, 12), (9, 8, 4, 32), (33, 8, 4, 64), (7, 1, 4, 8),
])  # fmt: skip
def test_it_fills_up_to_what_the_devices_and_microbatches_divide(rows, devices, accumulate, want):
    mesh = make_mesh(devices)
    padded, mask = zerojax.pad_batch(np.ones((rows, 3)), mesh, accumulate=accumulate)
    assert padded.shape == (want, 3) and mask.shape == (want,) and mask.sum() == rows
    state = placed(mesh=mesh)
    again, _ = zerojax.pad_batch(np.ones((rows, 3)), plan=state, accumulate=accumulate)
    assert again.shape == padded.shape
    zerojax.shard_batch(padded, mesh)


def test_a_batch_that_divides_comes_back_as_it_is():
    batch = rows_of(DATA, slice(16))
    padded, mask = zerojax.pad_batch(batch)
    assert all(padded[name] is batch[name] for name in batch)
    assert mask.shape == (16,) and mask.all()


def test_examples_may_be_along_another_dimension_and_some_leaves_have_none():
    specs = {"x": P(None, "data"), "y": P("data"), "table": P()}
    batch = {"x": DRAWN.normal(size=(6, 5, 2)), "y": np.arange(5), "table": np.ones((3, 2))}
    padded, mask = zerojax.pad_batch(batch, batch_specs=specs)
    np.testing.assert_array_equal(padded["x"], batch["x"][:, [0, 1, 2, 3, 4, 0, 1, 2]])
    assert padded["y"].shape == mask.shape == (8,) and padded["table"] is batch["table"]
    zerojax.shard_batch(padded, batch_specs=specs)


def test_keys_and_dtypes_of_ml_stay_what_they_are():
    keys = jax.random.split(jax.random.key(0), 3)
    batch = {"key": keys, "x": np.ones((3, 2), jnp.bfloat16), "one": jax.random.key(1)}
    padded, _ = zerojax.pad_batch(batch)
    assert padded["key"].dtype == keys.dtype and padded["x"].dtype == jnp.bfloat16
    assert (jax.random.key_data(padded["key"][3:6]) == jax.random.key_data(keys)).all()
    assert padded["one"] is batch["one"]


def test_it_pads_inside_of_jit_too():
    padded, mask = jax.jit(zerojax.pad_batch)(jnp.arange(3.0))
    np.testing.assert_array_equal(padded, [0, 1, 2, 0, 1, 2, 0, 1])
    assert mask.sum() == 3


def test_a_part_without_examples_is_filled_with_zeros():
    padded, mask = zerojax.pad_batch({"x": np.ones((0, 3), np.int8), "k": jnp.ones((0,))}, to=8)
    assert padded["x"].shape == (8, 3) and padded["x"].dtype == np.int8 and not padded["x"].any()
    assert isinstance(padded["k"], jax.Array) and not padded["k"].any()
    assert mask.shape == (8,) and not mask.any()


@pytest.mark.parametrize(("batch", "options", "message"), [
    (np.ones(20), {"to": 16}, r"to=16 must be.*divides over 8 devices, and at least the 20 examples"
     r" that the batch has. Use to=24 or another multiple of 8"),
    ({"x": np.ones(5)}, {"to": 12}, r"to=12.*the 5 examples that batch leaf x has. Use to=8"),
    (np.ones(5), {"to": 16, "accumulate": 4}, r"8 devices x 4 microbatches.*Use to=32 or.*of 32"),
    (np.ones(5), {"to": 8.0}, r"to=8.0 must be an integer"),
    (np.ones(5), {"accumulate": 0}, r"accumulate must be a positive integer, got 0"),
    (np.ones((0, 2)), {}, r"the batch has 0 examples in this process.*Pass to="),
    ({"x": np.ones(5), "y": np.ones(6)}, {}, r"batch leaf x has 5 and batch leaf y has 6. Give"),
    ({"n": 3}, {}, r"no leaf with examples to pad. Pass at least one array.*batch_specs="),
    ({"x": np.ones(5)}, {"batch_specs": P("model")}, r"batch leaf x.*Use P\('data'\)"),
    (["a"], {}, None),
], ids=["few", "to", "ways", "float", "0", "none", "rows", "scalar", "specs", "text"])  # fmt: skip
def test_what_cannot_be_padded_is_named(batch, options, message):
    with pytest.raises(TypeError if message is None else ValueError, match=message):
        zerojax.pad_batch(batch, **options)


# -- what it is for


PLAN = placed().tx.plan
GRADS = {
    times: jax.jit(zerojax.value_and_grad(loss_fn, PLAN, has_aux=True, accumulate=times))
    for times in (1, 2, 4)
}


@pytest.mark.parametrize("rows", [1, 3, 9, 20, 31, 32])
@pytest.mark.parametrize("times", GRADS)
def test_loss_and_gradients_are_those_of_the_real_examples(rows, times):
    """With one row of 32, seven devices and the last microbatches of the first have none."""
    batch = rows_of(DATA, slice(rows))
    (value, aux), grads = GRADS[times](PARAMS, with_mask(batch, to=32, accumulate=times))
    wanted, wanted_grads = jax.value_and_grad(plain)(PARAMS, batch)
    assert float(value) == pytest.approx(float(wanted), rel=1e-6)
    assert_close(grads, wanted_grads, 1e-6)
    assert float(aux["real"]) == rows / 32
    np.testing.assert_allclose(aux["errors"][:rows], errors_of(PARAMS, batch), rtol=2e-5)


def test_every_last_batch_runs_the_program_of_the_full_ones():
    step = zerojax.eval_step(loss_fn)
    state = placed()
    for rows in (32, 5, 31):
        step(state, with_mask(rows_of(DATA, slice(rows)), to=32))
    assert step._cache_size() == 1


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("devices", [6, 8])
def test_a_datasets_mean_is_that_of_one_device(stage, devices):
    """77 examples in batches of 24: the last has 5, fewer than there are devices."""
    state = placed(stage, make_mesh(devices))
    step = zerojax.eval_step(loss_fn)
    loss = low = real = 0.0
    for start in range(0, 77, 24):
        batch = with_mask(rows_of(DATA, slice(start, start + 24)), to=24, plan=state)
        metrics = jax.device_get(step(state, zerojax.shard_batch(batch, plan=state)))
        share = metrics["aux"]["real"]
        loss, real = loss + share * metrics["loss"], real + share
        low += share * metrics["aux"]["low"]
    errors = np.asarray(errors_of(PARAMS, DATA))
    assert real == pytest.approx(77 / 24, rel=1e-6)
    assert loss / real == pytest.approx(errors.mean(), rel=3e-7)
    assert low / real == pytest.approx((errors < LOW).mean(), rel=3e-7)
    # Batches that count alike are not exact, nor is a loss that does not know the mask.
    assert (
        abs(np.mean([errors[n : n + 24].mean() for n in range(0, 77, 24)]) - errors.mean()) > 1e-3
    )


@pytest.mark.parametrize(("devices", "rests_as"), [(6, (13, 6)), (8, (16, 5))])
def test_training_on_a_last_batch_is_that_of_one_device(devices, rests_as):
    state, batch = placed(mesh=make_mesh(devices)), rows_of(DATA, slice(72, 77))
    step = zerojax.train_step(loss_fn, accumulate=2, donate=False)
    padded = with_mask(batch, plan=state, accumulate=2)
    new, metrics = step(state, padded)
    wanted, grads = jax.value_and_grad(plain)(PARAMS, batch)
    assert float(metrics["loss"]) == pytest.approx(float(wanted), rel=1e-6)
    moved = jax.tree.map(lambda old, new: old - new, PARAMS, zerojax.gather_params(new))
    assert_close(moved, grads, 1e-6)
    assert new.params["w"].shape == rests_as


def test_a_loss_that_takes_plain_means_gets_a_last_batch_whole_on_each_device():
    """The other way to be exact: no device has a part, so that there is nothing to weigh."""
    state, batch = placed(), rows_of(DATA, slice(72, 77))
    metrics = zerojax.eval_step(plain, batch_specs=P())(state, batch)
    assert float(metrics["loss"]) == pytest.approx(float(plain(PARAMS, batch)), rel=1e-6)
