"""Sequences that are split, with cuDNN's attention, which is traced without a GPU."""

import dataclasses
import re

import pytest

import zerojax
from zerojax.tools._forecast.presets import preset

MODEL = dataclasses.replace(
    preset("llama-8b", attention="cudnn"),
    layers=2,
    hidden=512,
    inner=512,
    vocab=256,
    heads=8,
    tokens=512,
)


@pytest.mark.gpu_code
@pytest.mark.parametrize(("remat", "count"), [("none", 8), ("full", 12)], ids=["no remat", "remat"])
def test_what_attention_keeps_for_backward_is_in_heads(remat, count):
    """The result goes to its tokens, and its copy for backward stays in heads."""
    mesh = zerojax.aot.mesh("8xH100", shape=(1, 8), axis_names=("data", "sequence"))
    plan = zerojax.plan(MODEL.make_state, stage=3, mesh=mesh, sequence="sequence")
    step = zerojax.train_step(MODEL.losses()[remat], plan=plan)
    text = step.lower(plan.abstract(), zerojax.aot.batch(MODEL.batch(1), plan)).as_text()
    assert (
        len(re.findall(r"stablehlo.all_to_all|call @all_to_all", text)) == 2 * count
    )  # a layer is peeled
