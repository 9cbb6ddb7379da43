"""`choose`: what it finds, what it refuses, and that its bounds are near the compiler.

Most compile for CPU devices that stand for GPUs; what goes between hosts is marked.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
import zerojax.nnx
from tests.forecast import fakes
from tests.support import nnx_models

LAYERS, WIDTH, ROWS = 4, 512, 256  # rows of a GPU


def make_state():
    params = {"w": jnp.zeros((LAYERS, WIDTH, WIDTH))}
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))


def loss(params, batch, remat=True):
    layer = lambda x, w: (jnp.tanh(jnp.tanh(x @ w) @ w), None)
    layer = jax.checkpoint(layer) if remat else layer
    return jnp.mean(jax.lax.scan(layer, batch, params["w"])[0] ** 2)


def chosen(gpus="8xH100", losses=loss, rows=ROWS, **options):
    batch = jax.ShapeDtypeStruct((rows * int(gpus.partition("x")[0]), WIDTH), jnp.float32)
    return zerojax.tools.choose(losses, make_state, batch, gpus=gpus, **options)


def test_what_all_fits_goes_nowhere_and_by_the_plan_its_gradients_wait(cpus):
    found = chosen()
    assert found.best.way.is_exact and found.best_quantized is None
    assert all(
        one.way.is_exact and not fakes.options_of(one.way).names_levels for one in found.tried
    )
    assert not any(one.way.offload for one in found.compiled)
    peak = {str(one.way): one.peak for one in found.tried}
    grows = lambda way: peak[f"{way}, accumulate=2"] - peak[way]
    # Else 170B on 8 H100s would not even be compiled: with its state in host memory it keeps none.
    gradients = LAYERS * WIDTH * WIDTH * 4 / 8
    there = 'stage=3, offload=("opt_state",)'
    assert grows(there) - grows("stage=3") == pytest.approx(gradients)


@pytest.mark.gpu_code
def test_a_slow_network_gets_less_to_carry():
    slow = chosen("16xH100", rates=zerojax.tools.rates_of("H100", network=1e8))
    assert slow.best_quantized.way.gather == "int8"
    assert slow.best.way.regather == "gpu" or slow.best.way.groups is not None
    assert not any(one.way.offload for one in slow.compiled), "it all fits"
    times = [one.case.step_seconds for one in slow.compiled if one.case.fits]
    assert slow.best_quantized.case.step_seconds == min(times) < slow.best.case.step_seconds
    assert len(slow.compiled) <= 9


def test_what_does_not_fit_gives_way(cpus):
    """Memory by the plan is near the compiler's, times are bounds, and microbatches come in where
    memory is short."""
    whole = chosen(losses={"no": lambda p, b: loss(p, b, False), "full": loss}, rows=4096)
    compiled = [one for one in whole.tried if one.case is not None]
    assert len(compiled) == len(whole.compiled) >= 2
    for one in compiled:
        assert one.peak == pytest.approx(one.case.peak, rel=0.25), one.way
        assert one.estimate <= 1.01 * one.case.step_seconds, one.way
    least = min(one.case.peak for one in whole.compiled)
    rows = int(4096 * 1.5 * fakes.gpu("T4").usable / least) // 16 * 16
    fits = chosen("8xT4", rows=rows)
    assert fits.best.way.accumulate > 1 and fits.best.case.peak <= fits.gpu.usable
    assert not any(one.case.fits for one in fits.compiled if one.way.accumulate == 1)


def test_a_loss_that_names_one_axis_gets_no_mesh_of_two(cpus):
    named = lambda params, batch: loss(params, batch - jax.lax.pmean(batch.mean(), "data"))
    with pytest.raises(NameError, match=r"the axis 'data', .*\('node', 'gpu'\).* axis='data'"):
        chosen(losses=named, per_host=4)
    found = chosen(losses=named, per_host=4, axis="data", lossy=False)
    assert (
        not any(fakes.options_of(one.way).names_levels for one in found.tried)
        and found.best.way.is_exact
    )
    assert "mesh" not in found.python(found.best.way)


STEPS = zerojax.train_step(loss), zerojax.nnx.train_step(nnx_models.loss_fn)
A_STEP = (
    r"passed a step, which .* options; .* Pass the loss, with prec.* a function that returns mo"
)
REFUSED = [(step, A_STEP) for step in (*STEPS, STEPS[1]._functional)]
REFUSED += [({"a": STEPS[1]}, r"'a' is a step. Pass a step by itself")]


@pytest.mark.parametrize(("loss_fn", "message"), REFUSED)
def test_a_step_that_leaves_nothing_to_choose_is_refused(loss_fn, message):
    with pytest.raises(TypeError, match=message):
        zerojax.tools.choose(loss_fn, nnx_models.make, nnx_models.BATCH, gpus="8xH100")


@pytest.mark.filterwarnings("ignore:.* puts nothing in host memory")
def test_a_loss_of_nnx_is_chosen_for_with_what_makes_its_model(cpus):
    rows = jax.ShapeDtypeStruct(nnx_models.BATCH.shape, jnp.float32)
    found = zerojax.tools.choose(nnx_models.loss_fn, nnx_models.make, rows, gpus="1xH100")
    lines = found.python(found.best.way).splitlines()
    assert lines[0].startswith("model, optimizer = zerojax.nnx.shard(make")
    assert lines[1] == "step = zerojax.nnx.train_step(loss_fn)"


def test_a_batch_without_arrays_is_refused():
    with pytest.raises(ValueError, match=r"has no arrays with rows\. Pass the global batch"):
        zerojax.tools.choose(loss, make_state, None, gpus="8xH100")
