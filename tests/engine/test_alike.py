"""Layers in a Python loop, each a `jax.checkpoint`: those that are alike are traced once."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState
from jax import lax

import zerojax
from tests.collectives import collectives
from tests.conftest import make_mesh
from tests.reference import assert_close
from zerojax._engine import run as _run, split as _split  # noqa: F401 `run` has its own `split`
from zerojax._engine.body import Body
from zerojax._jaxpr import structure

DIM = 16
KEYS = jax.random.split(jax.random.key(0), 3)
OF_ALIKE = 2  # derivatives: the first layer's input, the batch, has no gradient
BATCH = jax.random.normal(KEYS[0], (16, DIM))


def layers(count, up=DIM):
    keys = jax.random.split(KEYS[1], count)
    return [{"up": jax.random.normal(k, (DIM, up)) / 4, "down": jnp.ones((up, DIM)) / 9}
            for k in keys]  # fmt: skip


def dense(x, w, scale=1.0):
    return x + jnp.tanh(x @ w["up"]) @ w["down"] * scale


def in_a_loop(layer):
    """A loss with such layers, one after another."""

    def loss(params, x):
        for w in params:
            x = layer(x, w)
        return jnp.mean(x**2)

    return loss


def functions_of_their_own(x, w):
    """Which JAX traces one by one, as it does Flax's modules."""
    return jax.checkpoint(lambda x, w: dense(x, w))(x, w)


remat = jax.checkpoint(dense)


@pytest.fixture
def counted(monkeypatch):
    """How many scopes were split, and derived."""
    found = {"split": 0, "derived": 0}

    def counting(name, function):
        def called(*args, **named):
            found[name] += 1
            return function(*args, **named)

        return called

    monkeypatch.setattr(_split, "split", counting("split", _split.split))
    monkeypatch.setattr(Body, "forward", counting("derived", Body.forward))
    return found


def placed_grad(loss, params, stage=3, **options):
    plan = zerojax.plan({"params": params}, stage=stage, mesh=make_mesh(), min_shard_size=1)
    grad = jax.jit(zerojax.value_and_grad(loss, plan, **options))
    return grad, plan.place({"params": params})["params"]


def check_gradients(loss, params, stage=3, **options):
    grad, placed = placed_grad(loss, params, stage, **options)
    wanted_value, wanted = jax.value_and_grad(loss)(params, BATCH)
    value, grads = grad(placed, BATCH)
    assert float(value) == pytest.approx(float(wanted_value), rel=1e-6)
    assert_close(grads, wanted, 1e-6)


@pytest.mark.parametrize("layer", [remat, functions_of_their_own])
@pytest.mark.parametrize("count", [2, 6])
def test_layers_that_are_alike_are_split_and_derived_once(counted, layer, count):
    grad, placed = placed_grad(in_a_loop(layer), layers(count))
    jaxpr = grad.trace(placed, BATCH).jaxpr
    assert counted == {"split": 1, "derived": OF_ALIKE}
    found = list(collectives(jaxpr))
    assert [(c.kind, c.elements) for c in found if c.kind != "all-reduce"].count(
        ("all-gather", DIM**2)
    ) == 2 * 2 * count
    assert sum(c.kind == "reduce-scatter" for c in found) == 2 * count
    text = grad.lower(placed, BATCH).compile().as_text()
    assert text.count(" all-gather(") == 2 * 2 * count  # XLA merges none
    assert " call(" not in text


@pytest.mark.parametrize(
    ("stage", "options"),
    [(2, {}), (3, {}), (3, {"regather": False}), (3, {"accumulate": 2}), (3, {"prefetch": 1})],
)
@pytest.mark.parametrize("layer", [remat, functions_of_their_own])
def test_gradients_are_those_of_one_device(layer, stage, options):
    check_gradients(in_a_loop(layer), layers(3), stage, **options)


def with_slope(slope):
    tripled = jax.custom_jvp(lambda x: x * 3.0)
    tripled.defjvps(lambda t, out, x: slope * t)
    return jax.checkpoint(lambda x, w: dense(tripled(x), w))


saves_dots = jax.checkpoint_policies.dots_saveable

PAIRS = {
    "policies": [jax.checkpoint(dense, policy=p) for p in (None, saves_dots)],
    "prevent_cse": [jax.checkpoint(dense, prevent_cse=p) for p in (True, False)],
    "literals": [jax.checkpoint(functools.partial(dense, scale=s)) for s in (1.0, 2.0)],
    "equations": [jax.checkpoint(f) for f in (dense, lambda x, w: dense(jnp.sin(x), w))],
    "source lines": [
        jax.checkpoint(lambda x, w: dense(x, w)),
        jax.checkpoint(lambda x, w: dense(x, w)),
    ],
    "derivatives by users": [with_slope(slope) for slope in (2.0, 3.0)],
}


@pytest.mark.parametrize("name", sorted(PAIRS))
def test_layers_that_differ_are_not_taken_for_one(counted, name):
    first, second = PAIRS[name]

    def loss(params, x):
        for layer, w in zip((first, second, first, second), params, strict=True):
            x = layer(x, w)
        return jnp.mean(x**2)

    check_gradients(loss, layers(4))
    assert counted == {"split": 2, "derived": OF_ALIKE + 1}


def test_constants_that_differ_are_kept_apart():
    """Closed over, they are operands of the checkpoint, or constants of its jaxpr."""
    masks = [jnp.asarray(np.arange(DIM) % n, "float32") for n in (2, 3, 4)]

    def loss(params, x):
        for mask, w in zip(masks, params, strict=True):
            x = jax.checkpoint(lambda x, w, mask=mask: dense(x * mask, w))(x, w)
            x = jax.checkpoint(lambda x, w: dense(x * mask.sum(), w) / 9)(x, w)
        return jnp.mean(x**2)

    check_gradients(loss, layers(3))


def test_jaxprs_with_other_constants_differ():
    masks = [jnp.arange(4.0), jnp.arange(4.0)]
    closed = [jax.make_jaxpr(lambda x, m=m: x * m)(jnp.ones(4)) for m in (*masks, masks[0])]
    keys = [structure(one.jaxpr, one.consts) for one in closed]
    assert keys[0] == keys[2] != keys[1]


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(DIM, name="out")(jnp.tanh(x))


class Blocks(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = nn.remat(Block)()(x)
        return x


def test_modules_keep_their_names(counted):
    model = Blocks()
    params = model.init(KEYS[0], BATCH)["params"]
    loss = lambda params, x: jnp.mean(model.apply({"params": params}, x) ** 2)
    check_gradients(loss, params)
    assert counted["split"] == 1
    grad, placed = placed_grad(loss, params)
    names = set(re.findall(r'op_name="([^"]*)"', grad.lower(placed, BATCH).compile().as_text()))
    for layer in map(str, range(3)):
        named = [name for name in names if f"CheckpointBlock_{layer}" in name]
        for what in ("out", "tanh", "all_gather", "reduce_scatter"):
            assert any(what in name for name in named), (layer, what)


def test_what_has_side_effects_runs_for_each_layer(capfd):
    def layer(x, w):
        jax.debug.print("{}", w["up"].shape[0] + 0 * lax.axis_index("data"))
        return dense(x, w)

    loss = in_a_loop(lambda x, w: jax.checkpoint(layer)(x, w))
    grad, placed = placed_grad(loss, layers(3))
    jax.block_until_ready(grad(placed, BATCH))
    jax.effects_barrier()
    assert capfd.readouterr().out.count(str(DIM)) >= 3 * 8


@pytest.mark.parametrize("layer", [remat, dense])
def test_programs_grow_linearly_with_layers(layer):
    def lines(count):
        grad, placed = placed_grad(in_a_loop(layer), layers(count))
        return grad.lower(placed, BATCH).as_text().count("\n")

    four, eight, twelve = map(lines, (4, 8, 12))
    assert twelve - eight == eight - four
    assert layer is dense or (eight - four) / 4 < 20  # two calls, and what is done with each leaf


def test_evaluation_traces_layers_once(counted):
    state = TrainState.create(apply_fn=None, params=layers(4), tx=optax.sgd(0.1))
    state = zerojax.shard_train_state(state, stage=3, min_shard_size=1)
    step = zerojax.eval_step(in_a_loop(remat))
    wanted = in_a_loop(dense)(layers(4), BATCH)
    assert float(step(state, BATCH)["loss"]) == pytest.approx(float(wanted), rel=1e-6)
    assert counted == {"split": 1, "derived": 0}
    assert step.lower(state, BATCH).as_text().count("call @plain") == 4


def test_layers_of_other_shapes_or_shardings_are_not_taken_for_one(counted):
    wide = layers(2, up=2 * DIM)
    overrides = {"params/3/up": jax.sharding.PartitionSpec(None, "data")}
    params = [*layers(2), *wide]
    plan = zerojax.plan(
        {"params": params}, stage=3, mesh=make_mesh(), min_shard_size=1, overrides=overrides
    )
    loss = in_a_loop(remat)
    grad = jax.jit(zerojax.value_and_grad(loss, plan))
    _, grads = grad(plan.place({"params": params})["params"], BATCH)
    assert_close(grads, jax.grad(loss)(params, BATCH), 1e-6)
    assert counted == {"split": 3, "derived": OF_ALIKE + 2}
