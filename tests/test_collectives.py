"""The ZeRO paper's traffic: 2 times the parameters at stages 0 to 2, 3 times at stage 3. What a
step says before XLA; `tests/audit/test_traffic.py` has what XLA made of it."""

import functools

import pytest

import zerojax
from tests.support import steps
from tests.support.collectives import collectives, scans_of
from tests.support.reference import divided

STAGES = (0, 1, 2, 3)
SMALL = 256  # elements: 1 KiB of float32
MESH = {"data": 8}


@functools.cache
def traced(model, stage, precision=None, **options):
    """The jaxpr of a step of one of the models of the table of steps."""
    return steps.Row(model, MESH, {"stage": stage, "precision": precision}, options).jaxpr


def large(*args, **options):
    """Its collectives of more than the loss and the like."""
    return [c for c in collectives(traced(*args, **options)) if c.elements > SMALL]


def sizes(model):
    """Elements of the leaves that the devices share, and of the others."""
    params = steps.model_and_state(model)[0].params
    return [sum(leaf.size for leaf in leaves.values()) for leaves in divided(params)]


@pytest.mark.parametrize(
    ("model", "stage"),
    [
        *(("gpt", stage) for stage in STAGES),
        *(("transformer", stage) for stage in (0, 1, 3)),
        ("gpt without remat", 3), ("mlp", 3), ("mlp without remat", 3), ("convnet", 3),
    ],
)  # fmt: skip
def test_traffic_is_the_papers(model, stage):
    found = list(collectives(traced(model, stage)))
    shared, others = sizes(model)
    assert shared > 0.9 * (shared + others)
    moved = {k: sum(c.moved for c in found if c.kind == k) for k in {c.kind for c in found}}
    scalars = moved["all-reduce"] - 2 * (others if stage else others + shared)
    assert 0 < scalars < SMALL, "besides gradients, the loss and the like are all-reduced"
    assert moved.get("all-gather", 0) == {0: 0, 1: 1, 2: 1, 3: 2}[stage] * shared
    assert moved.get("reduce-scatter", 0) == (shared if stage else 0)


# -- microbatches


@pytest.mark.parametrize(("stage", "times"), [(0, 1), (1, 1), (2, 4), (3, 4)])
def test_stages_0_and_1_reduce_once_a_step_and_2_and_3_each_microbatch(stage, times):
    kind = "reduce-scatter" if stage else "all-reduce"
    reduced = [c for c in large("transformer", stage, accumulate=4) if c.kind == kind]
    total = sum(c.elements * c.times for c in reduced)
    assert total == pytest.approx(times * sizes("transformer")[0], rel=0.02)
    assert {c.depth for c in reduced} == {int(times > 1)}


@pytest.mark.parametrize("stage", STAGES)
def test_accumulator_is_full_up_to_stage_1_and_sharded_from_2_on(stage):
    # The loop over microbatches is the outermost.
    loops = scans_of(traced("transformer", stage, accumulate=4))
    carried = [e for e in loops if e.params["length"] == 4 and len(e.outvars) > 5]
    shapes = {v.aval.shape for eqn in carried for v in eqn.outvars}
    full, shard = (32, 128), (4, 128)
    assert (full in shapes, shard in shapes) == ((True, False) if stage < 2 else (False, True))


# -- dtypes


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_bf16_compute_is_gathered_and_reduced_in_bf16(stage, accumulate):
    precision = zerojax.Precision(compute="bfloat16")
    found = large("gpt", stage, precision, accumulate=accumulate)
    in_step = [c for c in found if stage == 3 or c.kind != "all-gather"]
    assert in_step and {c.dtype for c in in_step} == {"bfloat16"}


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_reduced_in_the_chosen_dtype(stage):
    found = large("gpt", stage, zerojax.Precision(compute="bfloat16", reduce="float32"))
    assert {c.dtype for c in found if c.kind != "all-gather"} == {"float32"}
    if stage == 3:
        assert {c.dtype for c in found if c.kind == "all-gather"} == {"bfloat16"}
