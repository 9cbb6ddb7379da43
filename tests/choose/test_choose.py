"""`choose` on GPUs that are not there."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec

import zerojax
import zerojax.nnx
from tests import nnx_models
from zerojax._choose import choose as _choose
from zerojax._choose.ways import Facts, Way
from zerojax._hlo import known as _known

LAYERS, WIDTH, ROWS = 4, 512, 256  # rows of a GPU
OLDER_JAX = "ignore:JAX 0.10.2 does not find slices of host memory"
pytestmark = [pytest.mark.gpu_code, pytest.mark.filterwarnings(OLDER_JAX)]


def make_state():
    params = {"w": jnp.zeros((LAYERS, WIDTH, WIDTH))}
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))


def loss(params, batch, remat=True):
    layer = lambda x, w: (jnp.tanh(jnp.tanh(x @ w) @ w), None)
    layer = jax.checkpoint(layer) if remat else layer
    return jnp.mean(jax.lax.scan(layer, batch, params["w"])[0] ** 2)


def chosen(gpus="16xH100", losses=loss, network=None, rows=ROWS, **options):
    count, gpu = _known.parse_count(gpus)
    rates = network and dataclasses.replace(gpu.rates, network=network)
    batch = jax.ShapeDtypeStruct((rows * count, WIDTH), jnp.float32)
    return zerojax.choose(losses, make_state, batch, gpus=gpus, rates=rates, **options)


def test_a_fast_network_needs_nothing_and_a_slow_one_sends_less():
    fast = chosen(lossy=False)
    assert fast.best.way.is_exact and fast.best_with_codes is None
    assert all(one.way.is_exact for one in fast.tried)
    slow = chosen(network=1e8)
    assert slow.best_with_codes.way.gather == "int8"
    assert slow.best.way.regather == "gpu" or slow.best.way.groups is not None
    assert not any(one.way.offload for one in (*fast.compiled, *slow.compiled)), "it all fits"
    times = [one.case.step_seconds for one in slow.compiled if one.case.fits]
    assert slow.best_with_codes.case.step_seconds == min(times) < slow.best.case.step_seconds
    assert len(slow.compiled) <= _choose.MOST_COMPILED


def test_by_the_formula_state_in_host_memory_keeps_no_gradients():
    """Else 170B on 8 H100s would not even be compiled."""
    given = {"make_state": make_state, "batch": None, "gpu": _known.GPUS["H100"]}
    search = _choose._Search("8xH100", 8, {"": loss}, None, given, {"tx": None, "mutable": ()})
    zero = {name: {"": 0.0} for name in ("compute", "kept", "workspace", "weights")}
    others = dict.fromkeys(("parameters", "gathered", "gradients"), 0.0)
    facts = Facts(_known.GPUS["H100"].rates, devices=8, local=8, **zero, **others)
    there = Way(offload=("opt_state",))
    once, twice = (
        search.estimated(dataclasses.replace(there, accumulate=n), facts) for n in (1, 2)
    )
    assert twice.peak - once.peak == LAYERS * WIDTH * WIDTH * 4 / 8


def test_a_loss_that_names_one_axis_gets_no_mesh_of_two(monkeypatch):
    monkeypatch.setattr(_choose, "EXACT", 1)  # of the ways that are compiled
    named = lambda params, batch: loss(params, batch - jax.lax.pmean(batch.mean(), "data"))
    with pytest.raises(NameError, match=r"the axis 'data', .*\('node', 'gpu'\).* axis='data'"):
        chosen(losses=named)
    found = chosen(losses=named, axis="data")
    assert not any(one.way.names_levels for one in found.tried) and found.best.way.is_exact
    assert "mesh" not in found.python(found.best.way)


def test_it_refuses_what_a_forecast_refuses():
    with pytest.raises(ValueError, match="the batch has no arrays"):
        zerojax.choose(loss, make_state, None, gpus="8xH100")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*puts nothing in host memory")
def test_a_step_of_nnx_stands_for_its_loss():
    bf16 = zerojax.Precision(compute="bfloat16")
    step = zerojax.nnx.train_step(nnx_models.loss_fn, precision=bf16)
    given = {"batch": nnx_models.BATCH, "gpus": "8xH100", "lossy": False}
    found = zerojax.choose(step, nnx_models.make, **given)
    lines = found.python(found.best.way)
    assert lines.startswith("model, optimizer = zerojax.nnx.shard(make, stage=")
    assert 'precision=zerojax.Precision(compute="bfloat16"' in lines


def test_a_step_of_nnx_has_nothing_that_is_to_be_found():
    refused = functools.partial(
        zerojax.choose, make_state=nnx_models.make, batch=nnx_models.BATCH, gpus="8xH100"
    )
    fixed = functools.partial(zerojax.nnx.train_step, nnx_models.loss_fn)
    with pytest.raises(ValueError, match=r"accumulate=..., regather=...\). Leave that out, and"):
        refused(fixed(accumulate=2, regather=False))
    said = r"prefetch=..., skip_nonfinite=..., donate=..., compiler_options=...\). Leave that out"
    others = {"prefetch": 0, "donate": False, "compiler_options": {"xla_gpu_enable_x": True}}
    with pytest.raises(ValueError, match=said):  # its Python would not have them
        refused(fixed(skip_nonfinite=True, **others))
    with pytest.raises(ValueError, match=r"batch_specs=...\). choose splits batches along their f"):
        refused(fixed(batch_specs=PartitionSpec(None, "data")))
    with pytest.raises(TypeError, match=r"'a' is a step. Give one step, not in a dict"):
        refused({"a": fixed(), "b": fixed()})


def test_what_does_not_fit_gives_way(monkeypatch):
    """The formula's memory is near the compiler's, and microbatches come in where it is short."""
    whole = chosen("8xH100", {"no": lambda p, b: loss(p, b, False), "full": loss}, rows=4096)
    for one in whole.compiled:
        assert one.peak == pytest.approx(one.case.peak, rel=0.25), one.way
    least = min(one.case.peak for one in whole.compiled)
    small = dataclasses.replace(_known.GPUS["H100"], memory=int(0.7 * least / 0.92))
    monkeypatch.setitem(_known.GPUS, "H100", small)
    monkeypatch.setattr(_choose, "gpu_of", lambda gpus, rates: small)
    fits = chosen("8xH100", rows=4096)
    assert fits.best.way.accumulate > 1 and fits.best.case.peak <= small.usable
