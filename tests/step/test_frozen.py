"""Parameters that the optimizer does not update: no gradient, nothing reduced, nothing kept."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
from tests.collectives import collectives
from tests.conftest import make_mesh, stages
from tests.reference import assert_close, assert_equal_bits

LAYERS, DIM, RANK, ROWS = 4, 32, 8, 64


def lora_params():
    keys = jax.random.split(jax.random.key(0), 5)
    normal = lambda key, *shape: jax.random.normal(key, shape) / 8
    return {
        "embed": normal(keys[0], 64, DIM),
        "layers": {
            "w": normal(keys[1], LAYERS, DIM, 2 * DIM),
            "out": normal(keys[2], LAYERS, 2 * DIM, DIM),
            "lora_a": normal(keys[3], LAYERS, DIM, RANK),
            "lora_b": normal(keys[4], LAYERS, RANK, 2 * DIM),
        },
    }


def lora_loss(params, tokens, wrap=lambda f: f):
    def layer(x, p):
        return x + jnp.tanh(x @ p["w"] + x @ p["lora_a"] @ p["lora_b"]) @ p["out"], None

    x, _ = jax.lax.scan(wrap(layer), params["embed"][tokens], params["layers"])
    return jnp.mean((x @ params["embed"].T) ** 2)


def unrolled_loss(params, tokens):
    x = params["embed"][tokens]
    for i in range(LAYERS):
        p = jax.tree.map(lambda stack: stack[i], params["layers"])
        x = x + jnp.tanh(x @ p["w"] + x @ p["lora_a"] @ p["lora_b"]) @ p["out"]
    return jnp.mean((x @ params["embed"].T) ** 2)


def is_frozen(params):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "lora" not in jax.tree_util.keystr(path), params
    )


def selective(tx, params):
    return optax.selective_transform(tx, freeze_mask=is_frozen(params))


def multi(tx, params):
    label = lambda p: jax.tree.map(lambda f: "frozen" if f else "trained", is_frozen(p))
    return optax.multi_transform({"trained": tx, "frozen": optax.set_to_zero()}, label)


TOKENS = jax.random.randint(jax.random.key(5), (ROWS,), 0, 64)
LOSSES = {
    "scan": lora_loss,
    "remat": functools.partial(lora_loss, wrap=jax.checkpoint),
    "unrolled": unrolled_loss,
}


def make_state(freeze=selective, tx=None):
    params = lora_params()
    tx = freeze(tx or optax.adam(1e-2, eps=1e-4), params)
    return TrainState.create(apply_fn=None, params=params, tx=tx)


def one_device(loss, state, steps):
    """The state, and the norm of the last gradients of what is trained."""
    for _ in range(steps):
        grads = jax.grad(loss)(state.params, TOKENS)
        state = state.apply_gradients(grads=grads)
    trained = [
        g for g, f in zip(*map(jax.tree.leaves, (grads, is_frozen(grads))), strict=True) if not f
    ]
    return state, optax.tree.norm(trained)


@pytest.mark.parametrize("stage", stages(1, 3))
@pytest.mark.parametrize("loss, accumulate", [("scan", 2), ("remat", 1), ("unrolled", 1)])
def test_frozen_training_matches_one_device(loss, stage, accumulate):
    original = make_state()
    wanted, norm = one_device(LOSSES[loss], original, 2)
    state = zerojax.shard_train_state(original, stage)
    step = zerojax.train_step(LOSSES[loss], accumulate=accumulate, donate=False)
    for _ in range(2):
        state, metrics = step(state, TOKENS)
    assert_close(state.params, wanted.params, 2e-5)
    assert float(metrics["grad_norm"]) == pytest.approx(float(norm), rel=1e-5)
    assert_equal_bits(
        [state.params["embed"], state.params["layers"]["w"]],
        [original.params["embed"], original.params["layers"]["w"]],
    )
    assert step._cache_size() == 1


@pytest.mark.parametrize("freeze", [selective, multi])
@pytest.mark.parametrize("stage", stages(1, 3))
def test_what_is_frozen_is_read_off_the_optimizer(freeze, stage):
    plan = zerojax.plan(functools.partial(make_state, freeze), stage=stage)
    frozen = {leaf.path for leaf in plan.params if leaf.frozen}
    assert frozen == {"params/embed", "params/layers/w", "params/layers/out"}
    lora = 2 * 4 * sum(p.size for k, p in lora_params()["layers"].items() if "lora" in k)
    held = plan.bytes_per_device()
    assert held["opt_state"] == (lora if stage == 0 else lora // 8) + 4  # and Adam's counter
    assert ("frozen: nothing updates it" in str(plan)) == (stage < 3)


def traced(loss, stage, **options):
    state = zerojax.shard_train_state(make_state(), stage)
    return list(collectives(zerojax.train_step(loss, **options).trace(state, TOKENS).jaxpr))


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("stage", stages(1, 3))
@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_of_frozen_parameters_are_not_reduced(loss, stage, prefetch):
    found = traced(LOSSES[loss], stage, prefetch=prefetch)
    layers = lora_params()["layers"]
    lora = sum(p.size for k, p in layers.items() if "lora" in k)
    whole = sum(p.size for p in jax.tree.leaves(lora_params()))
    moved = lambda kind: sum(c.moved for c in found if c.kind == kind)
    assert moved("reduce-scatter") == (lora if stage else 0)
    assert 0 < moved("all-reduce") - (0 if stage else 2 * lora) < 256
    # Prefetching backward starts with the layer that forward ended with, and with the head.
    once = sum(p.size for p in jax.tree.leaves(layers)) // LAYERS if loss != "unrolled" else 0
    once += lora_params()["embed"].size
    gathers = {0: 0, 1: lora, 2: lora}.get(stage, 2 * whole - prefetch * once)
    assert moved("all-gather") == gathers


@pytest.mark.parametrize("stage", [0, 3])
def test_compiled_step_has_no_room_for_gradients_of_what_is_frozen(stage):
    """The base is 2 MiB a layer, the adapters next to nothing."""
    dim = 512

    def make(freeze):
        base = jnp.zeros((4, dim, dim))
        params = {"w": base, "lora_a": jnp.zeros((4, dim, 8)), "lora_b": jnp.zeros((4, 8, dim))}
        tx = freeze(optax.sgd(1e-2), params)
        return TrainState.create(apply_fn=None, params=params, tx=tx)

    def loss(params, x):
        layer = lambda x, p: (jnp.tanh(x @ p["w"] + x @ p["lora_a"] @ p["lora_b"]), None)
        return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2)

    def temp(freeze):
        plan = zerojax.plan(functools.partial(make, freeze), stage=stage)
        x = jax.ShapeDtypeStruct((16, dim), jnp.float32)
        compiled = zerojax.train_step(loss).lower(plan.abstract(), x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    base = 4 * dim * dim * 4
    saved = temp(lambda tx, _: tx) - temp(selective)
    assert saved > 0.9 * (base if stage == 0 else base / 8)


@pytest.mark.parametrize("stage", stages(1, 3))
def test_verify_and_audit_know_of_frozen_parameters(stage):
    state = zerojax.shard_train_state(make_state(), stage)
    step = zerojax.train_step(lora_loss)
    zerojax.verify(step, state, TOKENS).raise_if_wrong()
    zerojax.audit(step, state, TOKENS).check()


@pytest.mark.parametrize("stage", [1, 3])
def test_master_copies_are_made_of_what_is_trained(stage):
    precision = zerojax.Precision(param="bfloat16", master="float32", compute="bfloat16")
    state = zerojax.shard_train_state(make_state, stage, precision=precision)
    lora = [p for k, p in lora_params()["layers"].items() if "lora" in k]
    masters = jax.tree.leaves(state.opt_state.master)
    assert sorted(m.shape for m in masters) == sorted(p.shape for p in lora)
    assert all(m.dtype == jnp.float32 for m in masters)
    before = zerojax.gather_params(state)
    state, _ = zerojax.train_step(lora_loss)(state, TOKENS)
    assert_equal_bits(state.params["layers"]["w"], before["layers"]["w"])
    rounded = state.opt_state.master["layers"]["lora_a"].astype(jnp.bfloat16)
    np.testing.assert_array_equal(state.params["layers"]["lora_a"], rounded)
    assert not np.array_equal(rounded, before["layers"]["lora_a"])


def test_value_and_grad_has_zeros_for_what_is_frozen():
    plan = zerojax.plan(make_state(), stage=3)
    state = plan.place(make_state())
    _, grads = zerojax.value_and_grad(lora_loss, plan)(state.params, TOKENS)
    wanted = jax.grad(lora_loss)(lora_params(), TOKENS)
    assert not np.any(grads["layers"]["w"])
    assert grads["layers"]["w"].sharding == state.params["layers"]["w"].sharding
    assert_close(grads["layers"]["lora_a"], wanted["layers"]["lora_a"], 2e-5)


def test_an_optimizer_that_reads_all_gradients_freezes_nothing():
    """Clipping by the norm of everything, outside of the mask, needs every gradient."""
    clipped = lambda tx, params: optax.chain(optax.clip_by_global_norm(0.1), selective(tx, params))
    original = make_state(clipped)
    plan = zerojax.plan(original, stage=3)
    assert not any(leaf.frozen for leaf in plan.leaves)
    state, _ = zerojax.train_step(lora_loss)(plan.place(original), TOKENS)
    assert_close(state.params, one_device(lora_loss, original, 1)[0].params, 2e-5)


def test_optimizers_that_cannot_be_traced_freeze_nothing():
    def update(grads, state, params=None):
        float(jax.tree.leaves(params)[0].sum())
        return grads, state

    params = {"w": jnp.ones((64, 16))}
    tx = optax.GradientTransformation(lambda params: (), update)
    plan = zerojax.plan(TrainState.create(apply_fn=None, params=params, tx=tx), mesh=make_mesh())
    assert not plan.leaves[1].frozen
