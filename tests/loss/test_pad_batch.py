"""zerojax.pad_batch: what it fills in, and that losses, gradients and datasets stay exact."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from tests.conftest import make_mesh
from tests.support import draw
from tests.support.reference import assert_close

DRAWN = np.random.default_rng(0)
PARAMS = {"w": draw.normal(0, 13, 5) / 4, "out": jnp.ones(5) / 3}
DATA = {
    "x": DRAWN.normal(size=(77, 13)).astype(np.float32),
    "y": DRAWN.uniform(0.5, 2.0, 77).astype(np.float32),
}


@jax.jit
def errors_of(params, batch):
    """A loss for each example, which is infinite for one of zeros, and its gradient NaN."""
    predicted = jnp.tanh(batch["x"] @ params["w"]) @ params["out"]
    norms = jnp.sqrt(jnp.sum((batch["x"] @ params["w"]) ** 2, axis=-1))
    return (predicted / batch["y"] - jnp.log(batch["y"])) ** 2 + jnp.log(norms)


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


@pytest.mark.parametrize(
    ("rows", "devices", "accumulate", "filled"),
    [(1, 8, 1, 8), (9, 6, 1, 12), (9, 8, 4, 32), (33, 8, 4, 64), (7, 1, 4, 8)],
)
def test_it_fills_up_to_what_the_devices_and_microbatches_divide(rows, devices, accumulate, filled):
    mesh, batch = make_mesh(devices), np.ones((rows, 3))
    padded, mask = zerojax.pad_batch(batch, mesh, accumulate=accumulate)
    assert padded.shape == (filled, 3) and mask.shape == (filled,) and mask.sum() == rows
    plan = zerojax.plan((PARAMS, ()), mesh=mesh)
    again, _ = zerojax.pad_batch(batch, like=plan, accumulate=accumulate)
    assert again.shape == padded.shape


def test_examples_may_be_along_another_dimension_and_some_leaves_have_none():
    specs = {"x": P(None, "data"), "y": P("data"), "table": P()}
    batch = {"x": DRAWN.normal(size=(6, 5, 2)), "y": np.arange(5), "table": np.ones((3, 2))}
    padded, mask = zerojax.pad_batch(batch, batch_specs=specs)
    np.testing.assert_array_equal(padded["x"], batch["x"][:, [0, 1, 2, 3, 4, 0, 1, 2]])
    assert padded["y"].shape == mask.shape == (8,) and padded["table"] is batch["table"]


def test_keys_narrow_floats_and_tracers_are_padded_as_what_they_are():
    keys = jax.random.split(jax.random.key(0), 3)
    batch = {"key": keys, "x": np.ones((3, 2), jnp.bfloat16), "one": jax.random.key(1)}
    padded, _ = zerojax.pad_batch(batch)
    assert padded["key"].dtype == keys.dtype and padded["x"].dtype == jnp.bfloat16
    assert (jax.random.key_data(padded["key"][3:6]) == jax.random.key_data(keys)).all()
    assert padded["one"] is batch["one"]
    traced, mask = jax.jit(zerojax.pad_batch)(jnp.arange(3.0))
    np.testing.assert_array_equal(traced, [0, 1, 2, 0, 1, 2, 0, 1])
    assert mask.sum() == 3


def test_a_part_without_examples_is_filled_with_zeros():
    padded, mask = zerojax.pad_batch({"x": np.ones((0, 3), np.int8), "k": jnp.ones((0,))}, to=8)
    assert padded["x"].shape == (8, 3) and padded["x"].dtype == np.int8 and not padded["x"].any()
    assert isinstance(padded["k"], jax.Array) and not padded["k"].any()
    assert mask.shape == (8,) and not mask.any()


# -- what it is for


def test_loss_and_gradients_are_those_of_the_real_examples_by_one_program(compiled):
    """With one row of 32, three devices and the last microbatches of the first have none."""

    def masked(params, batch):
        errors = errors_of(params, batch)
        aux = {"real": jnp.mean(batch["mask"]), "errors": errors}
        return zerojax.mean(errors, where=batch["mask"]), aux

    plan = zerojax.plan((PARAMS, ()), mesh=make_mesh(4), min_shard_size=1)
    grad = jax.jit(zerojax.value_and_grad(masked, plan, has_aux=True, accumulate=4))
    one_device = jax.jit(jax.value_and_grad(lambda p, batch: jnp.mean(errors_of(p, batch))))
    for rows in (1, 9, 32):
        batch = {name: values[:rows] for name, values in DATA.items()}
        padded, mask = zerojax.pad_batch(batch, to=32, like=plan, accumulate=4)
        (value, aux), grads = grad(PARAMS, padded | {"mask": mask})
        wanted, wanted_grads = one_device(PARAMS, batch)
        assert float(value) == pytest.approx(float(wanted), rel=1e-6)
        assert_close(grads, wanted_grads, 1e-6)
        assert float(aux["real"]) == rows / 32
        np.testing.assert_allclose(aux["errors"][:rows], errors_of(PARAMS, batch), rtol=2e-5)
    assert sum("value_and_grad" in name for name in compiled) <= 1, compiled
