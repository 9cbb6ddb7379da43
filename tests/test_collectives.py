"""The ZeRO paper's traffic: 2 times the parameters at stages 0 to 2, 3 times at stage 3."""

import dataclasses

import jax.numpy as jnp
import optax
import pytest

import zerojax
from tests.collectives import collectives, scans_of
from tests.models import MODELS, gpt, transformer
from tests.reference import divided, make_state

STAGES = (0, 1, 2, 3)
SMALL = 256  # elements: 1 KiB of float32


def traced(made, stage, pad=True, **options):
    state = zerojax.shard_train_state(make_state(made, optax.adamw(1e-3)), stage, pad=pad)
    step = zerojax.train_step(made.loss, mutable=tuple(made.fields), **options)
    args = (state, made.batch) if made.rng is None else (state, made.batch, made.rng)
    return list(collectives(step.trace(*args).jaxpr))


def sizes(params):
    """Elements of the leaves that the devices share, and of the others."""
    return [sum(leaf.size for leaf in leaves.values()) for leaves in divided(params)]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_traffic_is_the_papers(model, remat, stage):
    made = MODELS[model](remat)
    found = traced(made, stage)
    shared, others = sizes(made.params)
    assert shared > 0.9 * (shared + others)
    moved = {k: sum(c.moved for c in found if c.kind == k) for k in {c.kind for c in found}}
    scalars = moved["all-reduce"] - 2 * (others if stage else others + shared)
    assert 0 < scalars < SMALL, "besides gradients, the loss and the like are all-reduced"
    assert moved.get("all-gather", 0) == {0: 0, 1: 1, 2: 1, 3: 2}[stage] * shared
    assert moved.get("reduce-scatter", 0) == (shared if stage else 0)


def with_an_indivisible_leaf(made):
    def loss(params, batch):
        return made.loss(params["made"], batch) + jnp.mean(params["odd"] ** 2)

    params = {"made": made.params, "odd": jnp.ones((21, 31))}
    return dataclasses.replace(made, params=params, loss=loss)


@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize("stage", [2, 3])
def test_nothing_large_is_all_reduced_but_what_may_not_be_padded(stage, pad):
    odd = with_an_indivisible_leaf(MODELS["mlp"](False))
    for made in [odd, *(model(False) for model in MODELS.values())]:
        summed = [c.elements for c in traced(made, stage, pad=pad) if c.kind == "all-reduce"]
        wanted = [21 * 31] if made is odd and not pad else []
        assert summed and [size for size in summed if size > SMALL] == wanted


@pytest.mark.parametrize("remat", [False, True])
def test_layers_are_gathered_and_reduced_inside_their_loops(remat):
    made = gpt(remat)
    found = traced(made, 3)
    layers = made.params["blocks"]["qkv"].shape[0]
    in_loop = [c for c in found if c.depth == 1]
    assert {c.times for c in in_loop} == {layers}
    kinds = [c.kind for c in in_loop]
    cut = 4  # qkv, proj, up, down; the norms, (3, 32), are too small to cut
    assert (kinds.count("all-gather"), kinds.count("reduce-scatter")) == (2 * cut, cut)
    outside = sorted((c.kind, c.elements) for c in found if c.depth == 0 and c.elements > SMALL)
    table, positions = made.params["embed"].size, made.params["pos"].size
    # The tied table is gathered once for both its uses, and again in backward.
    assert [x for x in outside if x[1] == table] == [
        ("all-gather", table), ("all-gather", table), ("reduce-scatter", table),
    ]  # fmt: skip
    assert ("reduce-scatter", positions) in outside


@pytest.mark.parametrize("stage", [1, 2])  # stage 1 keeps whole gradients to sum microbatches only
def test_gradients_are_reduced_inside_the_backward_loop(stage):
    found = traced(gpt(True), stage)
    outside = {c.elements for c in found if c.kind == "reduce-scatter" and c.depth == 0}
    inside = {c.elements for c in found if c.kind == "reduce-scatter" and c.depth == 1}
    assert outside == {64 * 32, 16 * 32}  # the table and the positions
    assert inside == {32 * 96, 32 * 32, 32 * 128}


@pytest.mark.parametrize(("stage", "times"), [(0, 1), (1, 1), (2, 4), (3, 4)])
def test_stages_0_and_1_reduce_once_a_step_and_2_and_3_each_microbatch(stage, times):
    made = transformer(False)
    found = traced(made, stage, accumulate=4)
    shared, _ = sizes(made.params)
    kind = "reduce-scatter" if stage else "all-reduce"
    reduced = [c for c in found if c.kind == kind and c.elements > SMALL]
    assert sum(c.elements * c.times for c in reduced) == pytest.approx(times * shared, rel=0.02)
    assert {c.depth for c in reduced} == {int(times > 1)}


@pytest.mark.parametrize("stage", STAGES)
def test_accumulator_is_full_up_to_stage_1_and_sharded_from_2_on(stage):
    made = gpt(False)
    state = zerojax.shard_train_state(make_state(made, optax.adamw(1e-3)), stage)
    step = zerojax.train_step(made.loss, accumulate=4)
    jaxpr = step.trace(state, made.batch).jaxpr
    # The loop over microbatches is the outermost.
    carried = [e for e in scans_of(jaxpr) if e.params["length"] == 4 and len(e.outvars) > 5]
    shapes = {v.aval.shape for eqn in carried for v in eqn.outvars}
    full, shard = (3, 32, 96), (3, 4, 96)
    assert (full in shapes, shard in shapes) == ((True, False) if stage < 2 else (False, True))


@pytest.mark.parametrize("stage", STAGES)
def test_bf16_compute_is_gathered_and_reduced_in_bf16(stage):
    found = traced(gpt(True), stage, precision=zerojax.Precision(compute="bfloat16"))
    large = [c for c in found if c.elements > SMALL]
    in_step = [c for c in large if stage == 3 or c.kind != "all-gather"]
    assert {c.dtype for c in in_step} == {"bfloat16"}


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_reduced_in_the_chosen_dtype(stage):
    precision = zerojax.Precision(compute="bfloat16", reduce="float32")
    found = traced(gpt(True), stage, precision=precision)
    large = [c for c in found if c.elements > SMALL]
    assert {c.dtype for c in large if c.kind != "all-gather"} == {"float32"}
    if stage == 3:
        assert {c.dtype for c in large if c.kind == "all-gather"} == {"bfloat16"}


@pytest.mark.parametrize("stage", STAGES)
def test_accumulated_gradients_are_reduced_in_the_compute_dtype_too(stage):
    precision = zerojax.Precision(compute="bfloat16")
    found = traced(gpt(True), stage, precision=precision, accumulate=2)
    kind = "reduce-scatter" if stage else "all-reduce"
    assert {c.dtype for c in found if c.kind == kind and c.elements > SMALL} == {"bfloat16"}


def test_master_copies_leave_bf16_to_gather_after_the_update():
    made = gpt(True)
    precision = zerojax.Precision(compute="bfloat16", param="bfloat16", master="float32")
    state = zerojax.shard_train_state(make_state(made, optax.adamw(1e-3)), 2, precision=precision)
    step = zerojax.train_step(made.loss, precision=precision)
    found = list(collectives(step.trace(state, made.batch).jaxpr))
    assert {c.dtype for c in found if c.elements > SMALL} == {"bfloat16"}
