"""The result of `choose`: which is best, how it prints, and that its Python runs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
import zerojax.nnx
from tests import nnx_models
from tests.forecast.test_result import case
from zerojax._choose.choice import Choice, Compiled, Tried
from zerojax._choose.ways import AMSP, HSDP, Way
from zerojax._hlo import known as _known

EXACT, CODES = Way("full"), Way("full", gather="int8", reduce="int8", regather="gpu")


def tried(way, seconds, peak=30):
    made = dataclasses.replace(
        case(3, peak), step_seconds=seconds, report=None, tokens_per_second=None
    )
    return Compiled(way, seconds, peak * 2**30, made)


def choice(*found, precision=None):
    cases = {one.way: one.case for one in found if isinstance(one, Compiled)}
    return Choice("8xH100", _known.GPUS["H100"], precision, 8, 4, found, cases)


def test_the_fastest_that_fits_is_best_and_codes_must_pay():
    slow, too_large = tried(Way("dots"), 2.0), tried(Way("none"), 1.0, peak=90)
    one = choice(slow, too_large, tried(EXACT, 1.5), tried(CODES, 1.495), Tried(Way(), 0.1, 1))
    assert one.best.way == EXACT and one.best_with_codes is None
    assert [each.way.variant for each in one.compiled] == ["full", "full", "dots", "none"]
    other = choice(slow, tried(CODES, 1.4))
    assert other.best.way == slow.way and other.best_with_codes.way == CODES
    nothing = choice(too_large, tried(CODES, 3.0))
    assert nothing.best is None and nothing.best_with_codes.way == CODES


def test_it_prints_what_was_compiled_and_the_python():
    others = [Tried(Way(accumulate=count), 0.1, 1) for count in (4, 2)]
    text = str(choice(tried(EXACT, 1.5), tried(CODES, 1.4), *others))
    assert "4 ways ranked by a formula, of 1, 2 or 4 microbatches; 2 compiled" in " ".join(
        text.split()
    )
    assert 'stage=3, regather="gpu", gather="int8", reduce="int8"; full' in text
    assert "exact numbers, 1.5 s, 0.0% MFU, 1 microbatch:\n\nstate = zerojax.shard_train" in text
    assert (
        "Faster with codes, 1.4 s, 0.0% MFU" in text and 'losses["full"], regather="gpu")' in text
    )
    assert "Nothing fits. The least is 90.0 GiB" in str(choice(tried(EXACT, 1.0, peak=90)))


def test_its_title_says_in_which_dtype_it_computes():
    one = tried(EXACT, 1.5)
    wide = dataclasses.replace(one.case, matmuls=("float32",), wide_matmuls="no bfloat16 there")
    text = " ".join(str(choice(dataclasses.replace(one, case=wide))).split())
    assert "usable of each; matmuls in float32 (no bfloat16 there); 1 ways ranked" in text


def test_it_prints_tokens_mfu_and_microbatches():
    one = tried(Way("full", accumulate=4), 1.5)
    known = dataclasses.replace(one.case, tokens_per_second=43690.7, mfu=0.512)
    text = str(choice(dataclasses.replace(one, case=known)))
    assert "1.5 s, 43,691 tokens/s, 51.2% MFU, 4 microbatches:" in text
    assert "  exposed  tokens/s    MFU " in text.splitlines()[1] and " 43,691  51.2% " in text
    assert "1.5 s, 0.0% MFU, 4 microbatches:" in str(choice(one)), "where no tokens are known"


def test_it_says_what_hosts_need(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    known = _known.GPUS["H100"]
    slow = dataclasses.replace(known, given_rates=dataclasses.replace(known.rates, network=6e9))
    across = tried(CODES, 1.5)
    across = dataclasses.replace(across, case=dataclasses.replace(across.case, network_bytes=1))
    text = str(dataclasses.replace(choice(across), gpu=slow))
    assert "Fastest with codes, 1.5 s, 0.0% MFU" in text and "before Python starts" in text
    assert "XLA_FLAGS" not in str(dataclasses.replace(choice(tried(EXACT, 1.5)), gpu=slow))
    pinned = dataclasses.replace(across.case, pinned=96 * 2**30)
    assert "XLA pins" in str(choice(dataclasses.replace(across, case=pinned)))


def loss(params, batch):
    layer = lambda x, w: (jnp.tanh(x @ w), None)
    return jnp.mean(jax.lax.scan(jax.checkpoint(layer), batch, params["w"])[0] ** 2)


def make_state():
    params = {"w": 0.1 * jnp.ones((3, 256, 256))}
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))


@pytest.mark.parametrize(
    "way",
    [
        Way(stage=1), Way("full", accumulate=2, order="layers"), Way(offload=("opt_state",)),
        Way(groups=HSDP), Way(groups=AMSP, accumulate=2), Way(regather="gpu"),
        Way(gather="int8", reduce="int4", regather="gpu"), Way(gather="int8"),
    ],
    ids=str,
)  # fmt: skip
def test_its_python_runs(way):
    precision = zerojax.Precision(compute="bfloat16")
    lines = choice(precision=precision).python(way)
    scope = {
        "zerojax": zerojax,
        "make_state": make_state,
        "loss_fn": loss,
        "losses": {"full": loss},
    }
    exec(lines, scope)
    _, metrics = scope["step"](scope["state"], np.ones((16, 256), np.float32))
    assert np.isfinite(metrics["loss"])
    options = scope["step"].recipe.options
    assert (options.accumulate, options.order) == (way.accumulate, way.order)
    assert options.regather == (True if way.regather is True else ("gpu",))
    assert ("mesh" in scope) == way.names_levels


def test_its_python_calls_the_axis_as_the_loss_does():
    named = lambda params, batch: loss(params, batch - jax.lax.pmean(batch.mean(), "batch"))
    lines = dataclasses.replace(choice(), axis="batch").python(Way(stage=2))
    scope = {"jax": jax, "zerojax": zerojax, "make_state": make_state, "loss_fn": named}
    exec(lines, scope)
    _, metrics = scope["step"](scope["state"], np.ones((16, 256), np.float32))
    assert np.isfinite(metrics["loss"]) and scope["mesh"].axis_names == ("batch",)


@pytest.mark.slow
def test_its_python_for_nnx_runs():
    made = dataclasses.replace(choice(), is_nnx=True)
    scope = {"zerojax": zerojax, "make": nnx_models.make, "loss_fn": nnx_models.loss_fn}
    exec(made.python(Way(stage=2, accumulate=2)), scope)
    metrics = scope["step"](scope["model"], scope["optimizer"], nnx_models.BATCH)
    assert np.isfinite(metrics["loss"])
    assert scope["step"].functional.recipe.options.accumulate == 2
