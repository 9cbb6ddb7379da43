"""The models of a study: presets, one's own, and what tells two of them apart."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.study import fakes
from zerojax._forecast import presets as _presets
from zerojax._hlo import known as _known
from zerojax._study import models as _models

TINY = _presets.Gpt(layers=2, hidden=32, heads=2, vocab=64, tokens=8)


def made(one, name="tiny", gpu="H100", remat="full"):
    return _models.model(name, one, _known.GPUS[gpu], remat)


def test_models_are_named_or_given():
    own = fakes.MINE["mine"]
    assert _models.given("7.5b") == {"7.5b": _presets.preset("7.5b")}
    assert list(_models.given(["7.5b", "60b"])) == ["7.5b", "60b"]
    assert _models.given({"a": own, "b": "60b", "c": TINY}) == {
        "a": own, "b": _presets.preset("60b"), "c": TINY,
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"no preset '3x'. Name one of"):
        _models.given(["3x"])
    with pytest.raises(ValueError, match=r"no models. Name one or several presets"):
        _models.given([])
    loss, make_state, _ = own
    for wrong in ((loss, make_state), (loss, make_state, jnp.ones((4, 4))), loss):
        with pytest.raises(ValueError, match=r"with a function batch\(rows\) that returns"):
            _models.given({"mine": wrong})


def test_presets_compute_in_the_dtype_of_a_gpu():
    digests = {gpu: made(TINY, gpu=gpu).digest(None, ()) for gpu in ("V100-32GB", "H100")}
    assert len(set(digests.values())) == 2
    model = made(TINY, remat="dots")
    assert model.remat == "dots" and model.batch(6).shape == (6, 8)
    assert model.loss.keywords == {"remat": "dots"}
    assert made(TINY, remat="qkv+up").loss.keywords == {"remat": "qkv+up"}


def test_batches_have_the_rows_that_they_are_asked_for():
    loss, make_state, _ = fakes.MINE["mine"]
    wrong = made((loss, make_state, lambda rows: fakes.batch(2 * rows)), "mine")
    with pytest.raises(ValueError, match=r"batch\(4\) of 'mine' has no array of 4 rows"):
        wrong.batch(4)
    arrays = {"x": np.ones((4, 2)), "scale": np.ones(())}
    assert made((loss, make_state, lambda rows: arrays), "mine").batch(4) is arrays


def other(loss=fakes.loss, rate=1e-3):
    return loss, functools.partial(fakes.make_state, rate), fakes.batch


def wider(rows):
    return jax.ShapeDtypeStruct((rows, fakes.WIDTH), jnp.bfloat16)


def test_digests_tell_programs_apart_and_nothing_else():
    digest = lambda one, **options: made(one, **options).digest(None, ())
    same = [
        digest(other()),
        digest(other(), name="renamed"),
        digest(other(lambda *a: fakes.loss(*a))),
    ]
    assert len(set(same)) == 1
    different = [
        digest(other(lambda p, b: 2 * fakes.loss(p, b))),
        digest(other(rate=1e-2)),
        digest((*other()[:2], wider)),
        digest(TINY),
        digest(TINY, remat="none"),
        digest(dataclasses.replace(TINY, layers=3)),
    ]
    assert len({*same, *different}) == 7
