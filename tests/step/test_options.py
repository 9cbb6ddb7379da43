"""The options that say how a loss is evaluated."""

import jax.numpy as jnp
import pytest

import zerojax
from zerojax._step.options import Options, precision_of


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefetch": 2}, "prefetch must be 0, 1 or 'auto', got 2"),
        ({"accumulate": 0}, "accumulate"),
        ({"precision": "bfloat16"}, "[Pp]recision"),
    ],
)
def test_what_is_not_known_is_refused(options, message):
    wanted = {"has_aux": None, "accumulate": 1, "precision": None, "regather": True} | options
    with pytest.raises((TypeError, ValueError), match=message):
        Options(**wanted)


def test_the_plans_precision_is_that_of_the_step():
    params = {"w": jnp.ones((8, 8))}
    plan = zerojax.plan((params, ()), precision=zerojax.Precision(compute="bfloat16"))
    assert precision_of(plan, None) is plan.precision
    with pytest.raises(ValueError, match="was placed with"):
        precision_of(plan, zerojax.Precision(compute="float16"))
