"""Steps of nnx that stand for their loss."""

import jax
import pytest

import zerojax
import zerojax.nnx
from tests import nnx_models
from zerojax._forecast import steps as _steps


def test_a_step_of_nnx_becomes_one_of_states():
    step = zerojax.nnx.train_step(nnx_models.loss_fn)
    made, make_state, rng = _steps.functional(step, nnx_models.make, None)
    assert made.recipe.mutable == ("variables",) and rng.keys() == {"streams"}
    assert jax.eval_shape(make_state).params["layers"][0]["kernel"].shape == (16, 32)
    assert _steps.functional(made, make_state, rng) == (made, make_state, rng)


def test_its_parts_are_its_loss_and_what_it_was_given():
    bf16 = zerojax.Precision(compute="bfloat16")
    step = zerojax.nnx.train_step(nnx_models.loss_fn, precision=bf16, accumulate=2)
    parts = _steps.parts_of_nnx(step, nnx_models.make, None)
    assert parts.options == {"precision": bf16, "accumulate": 2, "mutable": ("variables",)}
    assert parts.loss is step.functional.recipe.loss_fn and parts.rng.keys() == {"streams"}


def test_several_steps_and_those_that_train_nothing_are_refused():
    step = zerojax.nnx.train_step(nnx_models.loss_fn)
    for several in ({"a": step, "b": step}, {"a": step.functional}):
        with pytest.raises(TypeError, match=r"'a' is a step. Give one step, not in a dict, and"):
            zerojax.forecast(several, nnx_models.make, nnx_models.BATCH, gpus="8xH100")
    with pytest.raises(TypeError, match=r"a step of eval_step trains nothing, and forecasts are"):
        _steps.functional(zerojax.eval_step(lambda params, batch: 0.0), None, None)
    evaluates = zerojax.nnx.eval_step(nnx_models.loss_fn)
    with pytest.raises(TypeError, match=r"step of eval_step.*Give the loss, or a step of train_s"):
        _steps.parts_of_nnx(evaluates, nnx_models.make, None)
