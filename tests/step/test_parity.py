"""Every stage gives one device's numbers: loss, gradients, parameters, optimizer state."""

import functools
import itertools

import jax
import pytest

import zerojax
from tests.conftest import make_mesh, mostly_slow, stages
from tests.models import MODELS, OPTIMIZERS, convnet
from tests.reference import assert_close, assert_equal_bits, make_state, reference_run

STEPS = 5
STAGES = (0, 1, 2, 3)


@functools.cache
def reference(model: str, remat: bool, optimizer: str, devices: int, accumulate: int):
    made = MODELS[model](remat)
    # Dropout keys and batch statistics are the shard's own: the truth averages over shards.
    by_shard = model in ("transformer", "convnet")
    shards, parts = (devices, accumulate) if by_shard else (1, 1)
    return reference_run(made, OPTIMIZERS[optimizer](), STEPS, shards, parts)


def run(model, remat, optimizer, stage, accumulate, devices):
    made = MODELS[model](remat)
    mesh = make_mesh(devices)
    state = zerojax.shard_train_state(make_state(made, OPTIMIZERS[optimizer]()), stage, mesh=mesh)
    step = zerojax.train_step(made.loss, accumulate=accumulate, mutable=tuple(made.fields))
    batch = zerojax.shard_batch(made.batch, mesh)
    losses = []
    for _ in range(STEPS):
        state, metrics = step(state, batch, *([] if made.rng is None else [made.rng]))
        losses.append(float(metrics["loss"]))
    assert step._cache_size() == 1, "compiled more than once"
    return state, losses


def check(model, remat, optimizer, stage, accumulate, devices):
    wanted, wanted_losses, _ = reference(model, remat, optimizer, devices, accumulate)
    state, losses = run(model, remat, optimizer, stage, accumulate, devices)
    assert losses == pytest.approx(wanted_losses, rel=1e-5)
    assert_close(state.params, wanted.params, what="params")
    assert_close(state.opt_state, wanted.opt_state, 2e-5, what="opt_state")
    assert_close(state.batch_stats, wanted.batch_stats, what="batch_stats")
    assert int(state.step) == STEPS


# The update is the same program's from stage 1 on: on shards.
@pytest.mark.parametrize(
    ("optimizer", "stage"),
    mostly_slow(
        itertools.product(OPTIMIZERS, STAGES),
        lambda optimizer, stage: stage == 3 or (stage == 1 and optimizer in ("adamw", "muon")),
    ),
)
def test_optimizer_on_shards_matches_one_device(optimizer, stage):
    check("mlp", False, optimizer, stage, 1, 8)


QUICK = {
    ("mlp", True, 4, 3), ("gpt", True, 4, 0), ("gpt", True, 4, 3), ("convnet", True, 4, 2),
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "remat", "accumulate", "stage"),
    mostly_slow(
        itertools.product(MODELS, (False, True), (1, 4), STAGES), lambda *case: case in QUICK
    ),
)
def test_model_matches_one_device(model, remat, accumulate, stage):
    check(model, remat, "adamw", stage, accumulate, 8)


@pytest.mark.parametrize("stage", stages(3))
@pytest.mark.parametrize(
    ("model", "devices"),
    mostly_slow(
        itertools.product(("gpt", "convnet"), (1, 2)),
        lambda *case: case in (("gpt", 2), ("convnet", 1)),
    ),
)
def test_fewer_devices_match_one_device(model, devices, stage):
    check(model, True, "clip_schedule", stage, 4, devices)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "remat", "optimizer", "stage", "accumulate", "devices"),
    list(itertools.product(MODELS, (False, True), OPTIMIZERS, STAGES, (1, 4), (8, 2, 1))),
)
def test_full_product_matches_one_device(model, remat, optimizer, stage, accumulate, devices):
    check(model, remat, optimizer, stage, accumulate, devices)


@pytest.mark.parametrize("stage", stages(3))
def test_repeated_runs_are_equal_to_the_bit(stage):
    first = run("gpt", True, "adamw", stage, 1, 8)
    second = run("gpt", True, "adamw", stage, 1, 8)
    assert first[1] == second[1]
    assert_equal_bits(first[0], second[0])


@pytest.mark.parametrize("stage", stages(3))
@pytest.mark.parametrize("regather", [True, False])
@pytest.mark.parametrize("model", ["mlp", "gpt"])
def test_gradients_match_jax_grad(model, regather, stage):
    made = MODELS[model](False)
    _, _, wanted = reference(model, False, "momentum", 1, 1)
    plan = zerojax.plan({"params": made.params}, stage=stage, mesh=make_mesh())
    params = plan.place({"params": made.params})["params"]
    grad = jax.jit(zerojax.value_and_grad(made.loss, plan, regather=regather))
    loss, grads = grad(params, made.batch)
    assert float(loss) == pytest.approx(float(made.loss(made.params, made.batch)), rel=1e-6)
    assert_close(grads, wanted, 2e-6)


@pytest.mark.parametrize("stage", stages(3))
def test_batchnorm_over_the_mesh_axis_matches_the_whole_batch(stage):
    made = convnet(False, axis_name="data")
    whole = convnet(False)
    wanted, wanted_losses, _ = reference_run(whole, OPTIMIZERS["momentum"](), STEPS)
    state = zerojax.shard_train_state(make_state(made, OPTIMIZERS["momentum"]()), stage)
    step = zerojax.train_step(made.loss, mutable=("batch_stats",))
    losses = []
    for _ in range(STEPS):
        state, metrics = step(state, made.batch)
        losses.append(float(metrics["loss"]))
    assert losses == pytest.approx(wanted_losses, rel=1e-5)
    assert_close(state.params, wanted.params)
    assert_close(state.batch_stats, wanted.batch_stats)
