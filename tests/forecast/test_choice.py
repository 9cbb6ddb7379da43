"""The result of `choose`: which is best, how it prints, and that its Python runs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
import zerojax.nnx
from tests.forecast import fakes
from tests.support import nnx_models

LOSSY = {"gather": "int8", "reduce": "int8", "regather": "gpu"}
HSDP = (("params", "gpu"), ("grads", "gpu"), ("opt_state", "gpu"))
AMSP = (*HSDP[:2], ("opt_state", ("gpu", "node")))


def test_the_fastest_that_fits_is_best_and_quantized_must_pay():
    slow, too_large = fakes.tried(2.0, accumulate=2), fakes.tried(1.0, 90, stage=0)
    exact, quantized = fakes.tried(1.5), fakes.tried(1.495, **LOSSY)
    one = fakes.choice(slow, too_large, exact, quantized, fakes.untried())
    assert one.best.way == exact.way and one.best_quantized is None
    assert [each.case.step_seconds for each in one.compiled] == [1.495, 1.5, 2.0, 1.0]
    other = fakes.choice(slow, fakes.tried(1.4, **LOSSY))
    assert other.best.way == slow.way and other.best_quantized.way == quantized.way
    assert other.to_dict()["best"] == [other.python(slow.way), other.python(quantized.way)]
    nothing = fakes.choice(too_large, fakes.tried(3.0, **LOSSY))
    assert nothing.best is None and nothing.best_quantized.way == quantized.way


def test_it_prints_what_was_compiled_how_fast_and_the_python():
    speeds = {"tokens": 65536, "flops": 0.512 * 989e12 * 1.5, "lacks": "Ask for float16."}
    best = fakes.changed(fakes.tried(1.5), **speeds, matmuls=("float32",), wide_matmuls="all of it")
    others = [fakes.untried(accumulate=count) for count in (4, 2)]
    text = str(fakes.choice(best, fakes.tried(1.4, **LOSSY), *others))
    words = " ".join(text.split())
    assert "4 configurations, of 1, 2 or 4 microbatches; 2 compiled, which may" in words
    assert "matmuls in float32 (all of it)" in words and "\nAsk for float16.\n" in text
    assert 'stage=3, regather="gpu", gather="int8", reduce="int8"; full' in text
    assert "1.5 s, 43,691 tokens/s, 51.2% MFU, 1 microbatch:\n\nstate = zerojax.shard_tr" in text
    assert "Faster quantized, 1.4 s, 0.0% MFU" in text
    assert 'losses["full"], schedule=zerojax.Schedule(regather="gpu"))' in text
    nothing = str(fakes.choice(fakes.tried(1.0, 90)))
    assert "Nothing fits. The least is about 90.0 GiB: use more GPUs or" in nothing


def test_it_says_what_hosts_need(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    across = fakes.changed(fakes.tried(1.5, **LOSSY), network_bytes=1)
    text = str(fakes.choice(across, network=6e9))
    assert "Fastest quantized, 1.5 s, 0.0% MFU" in text and "before Python starts" in text
    assert "XLA_FLAGS" not in str(fakes.choice(fakes.tried(1.5), network=6e9))
    assert "XLA pins" in str(fakes.choice(fakes.changed(across, pinned=96 * 2**30)))


def loss(params, batch):
    layer = lambda x, w: (jnp.tanh(x @ w), None)
    return jnp.mean(jax.lax.scan(jax.checkpoint(layer), batch, params["w"])[0] ** 2)


def named(params, batch):
    return loss(params, batch - jax.lax.pmean(batch.mean(), "batch"))


@pytest.mark.parametrize(
    ("way", "made", "levels"),
    [
        ({"stage": 2}, {"axis": "batch"}, False),
        ({"variant": "full", "accumulate": 2, "order": "layers"}, {}, False),
        ({"offload": ("opt_state",)}, {}, False),
        ({"groups": AMSP, "accumulate": 2}, {}, True),
        (LOSSY | {"reduce": "int4"}, {}, True),
        ({"stage": 3}, {"sequence": (4, 0.2)}, False),
    ],
    ids=str,
)
def test_its_python_runs(way, made, levels):
    """Up to the compiler."""
    bf16 = zerojax.Precision(compute="bfloat16")
    way = fakes.untried(**way).way
    lines = fakes.choice(precision=bf16, **made).python(way)
    scope = {
        "jax": jax,
        "zerojax": zerojax,
        "make_state": lambda: fakes.make_state(width=256, optimizer=optax.adam),
        "loss_fn": named if "axis" in made else loss,
        "losses": {"full": loss},
    }
    exec(lines, scope)
    shape = (16, 8, 256) if "sequence" in made else (16, 256)
    assert scope["step"].lower(scope["state"], np.ones(shape, np.float32))
    options, plan = scope["step"].recipe.options, scope["state"].tx.plan
    wanted = fakes.options_of(way, precision=bf16)
    assert (options.accumulate, options.schedule) == (way.accumulate, wanted.schedule)
    assert plan.precision == wanted.precision and plan.stage == way.stage
    names = ("node", "gpu") if levels else (made.get("axis", "data"), *(made.keys() & {"sequence"}))
    assert plan.mesh.axis_names == names and plan.sequence in (
        None,
        zerojax.Sequences("sequence", 0.2),
    )


def test_its_python_for_nnx_runs():
    scope = {"zerojax": zerojax, "make": nnx_models.make, "loss_fn": nnx_models.loss_fn}
    way = fakes.untried(stage=2, accumulate=2).way
    exec(fakes.choice(is_nnx=True).python(way), scope)
    assert scope["step"]._functional.recipe.options.accumulate == 2
    assert zerojax.nnx.state(scope["model"], scope["optimizer"]).tx.plan.stage == 2
