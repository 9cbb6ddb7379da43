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
from tests.conftest import make_mesh
from tests.reference import assert_close

LAYERS, DIM, RANK, ROWS = 4, 32, 8, 64
BASE = {"params/embed", "params/layers/w", "params/layers/out"}


def lora_params(dim=DIM):
    draw = np.random.default_rng(0)
    normal = lambda *shape: draw.normal(size=shape).astype("f") / 8
    return {
        "embed": normal(64, dim),
        "layers": {
            "w": normal(LAYERS, dim, 2 * dim),
            "out": normal(LAYERS, 2 * dim, dim),
            "lora_a": normal(LAYERS, dim, RANK),
            "lora_b": normal(LAYERS, RANK, 2 * dim),
        },
    }


def layer(x, p):
    return x + jnp.tanh(x @ p["w"] + x @ p["lora_a"] @ p["lora_b"]) @ p["out"], None


def lora_loss(params, tokens, wrap=lambda f: f):
    x, _ = jax.lax.scan(wrap(layer), params["embed"][tokens], params["layers"])
    return jnp.mean((x @ params["embed"].T) ** 2)


def unrolled(params, tokens):
    x = params["embed"][tokens]
    for i in range(LAYERS):
        x, _ = layer(x, jax.tree.map(lambda stack: stack[i], params["layers"]))
    return jnp.mean((x @ params["embed"].T) ** 2)


remat = functools.partial(lora_loss, wrap=jax.checkpoint)
PARAMS, TOKENS = lora_params(), np.arange(ROWS) * 7 % 64
LORA = sum(p.size for name, p in PARAMS["layers"].items() if "lora" in name)


def is_frozen(params):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "lora" not in jax.tree_util.keystr(path), params
    )


def selective(tx, params=PARAMS):
    return optax.selective_transform(tx, freeze_mask=is_frozen(params))


def multi(tx):
    label = lambda p: jax.tree.map(lambda f: "frozen" if f else "trained", is_frozen(p))
    return optax.multi_transform({"trained": tx, "frozen": optax.set_to_zero()}, label)


def clipped(tx):
    """Clips by the norm of everything, which reads every gradient."""
    return optax.chain(optax.clip_by_global_norm(0.1), selective(tx))


def untraceable(tx):
    def update(grads, state, params=None):
        float(jax.tree.leaves(params)[0].sum())
        return tx.update(grads, state, params)

    return optax.GradientTransformation(tx.init, update)


def planned(freeze=selective, stage=3, params=PARAMS, **options):
    tx = freeze(optax.adam(1e-2, eps=1e-4))
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    return zerojax.plan(state, stage=stage, mesh=make_mesh(2), **options)


@pytest.mark.parametrize(
    ("freeze", "paths"),
    [(selective, BASE), (multi, BASE), (clipped, set()), (untraceable, set())],
)
def test_what_is_frozen_is_read_off_the_optimizer(freeze, paths):
    plan = planned(freeze)
    assert {leaf.path for leaf in plan.params if leaf.frozen} == paths


@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_frozen_has_no_moments_and_no_masters(stage):
    precision = zerojax.Precision(param="bfloat16", master="float32")
    plan, narrow = planned(stage=stage), planned(stage=stage, precision=precision)
    assert ("frozen: nothing updates it" in str(plan)) == (stage < 3)
    part = 4 * LORA // (2 if stage else 1)
    counter = 4  # Adam's
    assert plan.bytes_per_device()["opt_state"] == 2 * part + counter
    assert narrow.bytes_per_device()["opt_state"] == 3 * part + counter


@pytest.mark.parametrize(
    ("loss", "stage", "prefetch"),
    [(lora_loss, 3, 0), (remat, 3, 1), (unrolled, 3, 0), (lora_loss, 1, 0), (remat, 0, 1)],
)
def test_gradients_of_frozen_parameters_are_not_reduced(loss, stage, prefetch):
    plan = planned(stage=stage)
    step = zerojax.train_step(loss, prefetch=prefetch)
    found = list(collectives(step.trace(plan.abstract(), TOKENS).jaxpr))
    moved = lambda kind: sum(c.moved for c in found if c.kind == kind)
    assert moved("reduce-scatter") == (LORA if stage else 0)
    assert 0 < moved("all-reduce") - (0 if stage else 2 * LORA) < 256
    whole = sum(p.size for p in jax.tree.leaves(PARAMS))
    # Prefetching, backward has the last layer and the head from forward.
    kept = sum(p.size for p in PARAMS["layers"].values()) // LAYERS + PARAMS["embed"].size
    assert moved("all-gather") == {0: 0, 1: LORA, 3: 2 * whole - prefetch * kept}[stage]


def test_a_compiled_step_has_no_room_for_gradients_of_what_is_frozen():
    """The base is 2 MiB, the adapters next to nothing."""
    params = lora_params(128)

    def temporary(freeze):
        plan = planned(freeze, 0, params)
        compiled = zerojax.train_step(remat).lower(plan.abstract(), TOKENS).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    base = 4 * sum(params["layers"][name].size for name in ("w", "out"))
    saved = temporary(lambda tx: optax.sgd(1e-2)) - temporary(lambda tx: selective(tx, params))
    assert saved > 0.9 * base


def test_value_and_grad_has_zeros_for_what_is_frozen():
    plan = planned()
    params = plan.place(
        TrainState.create(apply_fn=None, params=PARAMS, tx=selective(optax.adam(1e-2)))
    ).params
    _, grads = zerojax.value_and_grad(lora_loss, plan)(params, TOKENS)
    wanted = jax.jit(jax.grad(lora_loss))(PARAMS, TOKENS)
    assert not np.any(grads["layers"]["w"])
    assert grads["layers"]["w"].sharding == params["layers"]["w"].sharding
    assert_close(grads["layers"]["lora_a"], wanted["layers"]["lora_a"], 2e-5)
