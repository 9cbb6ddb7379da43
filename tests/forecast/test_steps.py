"""Steps of nnx that stand for their loss."""

import jax

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
