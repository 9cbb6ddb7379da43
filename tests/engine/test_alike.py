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
from tests.engine.losses import each
from tests.reference import assert_close
from zerojax._jaxpr import structure

DIM = 16
draw = np.random.default_rng(0)
BATCH = draw.normal(size=(16, DIM)).astype("f")


def layers(count, up=DIM):
    normal = lambda *shape: draw.normal(size=shape).astype("f")
    return [{"up": normal(DIM, up) / 4, "down": normal(up, DIM) / 9} for _ in range(count)]


def dense(x, w, scale=1.0):
    return x + jnp.tanh(x @ w["up"]) @ w["down"] * scale


def in_a_loop(*kinds):
    """A loss whose layers are of these kinds, in turn."""

    def loss(params, x):
        for at, w in enumerate(params):
            x = kinds[at % len(kinds)](x, w)
        return jnp.mean(x**2)

    return loss


def functions_of_their_own(x, w):
    """Which JAX traces one by one, as it does Flax's modules."""
    return jax.checkpoint(lambda x, w: dense(x, w))(x, w)


remat = jax.checkpoint(dense)


def planned(params, stage=3, **options):
    return zerojax.plan(
        {"params": params}, stage=stage, mesh=make_mesh(), min_shard_size=1, **options
    )


def lowered(loss, params, **options):
    """The gradients of a loss, lowered for shapes."""
    plan = planned(params, **options)
    grad = jax.jit(zerojax.value_and_grad(loss, plan))
    return grad.trace(plan.abstract()["params"], BATCH).lower()


def functions(text, name):
    """The functions of a lowered program whose names begin so: each is traced and derived."""
    return len(re.findall(rf"func.func private @{name}(?:_\d+)?\(", text))


def calls(text, name):
    return len(re.findall(rf"call @{name}(?:_\d+)?\(", text))


@pytest.mark.parametrize("layer", [remat, functions_of_their_own])
@pytest.mark.parametrize("count", [2, 6])
def test_layers_that_are_alike_are_derived_once(layer, count):
    """And the first: its input, the batch, has no gradient."""
    params = layers(count)
    text = lowered(in_a_loop(layer), params).as_text()
    for name in ("forward", "backward"):
        assert (functions(text, name), calls(text, name)) == (2, count)
    plan = planned(params)
    grad = zerojax.value_and_grad(in_a_loop(layer), plan)
    found = list(collectives(jax.make_jaxpr(grad)(plan.abstract()["params"], BATCH)))
    assert [(c.kind, c.elements) for c in found if c.kind != "all-reduce"].count(
        ("all-gather", DIM**2)
    ) == 2 * 2 * count
    assert sum(c.kind == "reduce-scatter" for c in found) == 2 * count


def test_xla_merges_no_gathers_of_layers_that_are_alike():
    text = lowered(in_a_loop(remat), layers(6)).compile().as_text()
    assert text.count(" all-gather(") == 2 * 2 * 6
    assert " call(" not in text


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
def test_layers_that_differ_are_not_taken_for_one(name):
    text = lowered(in_a_loop(*PAIRS[name]), layers(4)).as_text()
    assert functions(text, "forward") == functions(text, "backward") == 3


def with_masks(params, x):
    """Closed over, they are operands of the checkpoint, or constants of its jaxpr."""
    for n, w in enumerate(params[:3]):
        mask = jnp.asarray(np.arange(DIM) % (n + 2), "float32")
        x = jax.checkpoint(lambda x, w, mask=mask: dense(x * mask, w))(x, w)
        x = jax.checkpoint(lambda x, w, mask=mask: dense(x * mask.sum(), w) / 9)(x, w)
    return jnp.mean(x**2)


def test_gradients_are_those_of_one_device():
    losses = {name: in_a_loop(*pair) for name, pair in PAIRS.items()}
    losses |= {"alike": in_a_loop(remat), "constants": with_masks}
    losses["their own"] = in_a_loop(functions_of_their_own)
    params = layers(4)
    plan = planned(params)
    grads = {name: zerojax.value_and_grad(loss, plan) for name, loss in losses.items()}
    for name, value in {"regather": False, "accumulate": 2, "prefetch": 1}.items():
        grads[name] = zerojax.value_and_grad(losses["alike"], plan, **{name: value})
    found = each(grads, plan.place({"params": params})["params"], BATCH)
    wanted = each({n: jax.value_and_grad(loss) for n, loss in losses.items()}, params, BATCH)
    for name, got in found.items():
        assert_close(got, wanted.get(name, wanted["alike"]), 1e-6, what=name)


def test_jaxprs_with_other_constants_differ():
    masks = [np.arange(4.0, dtype="f") for _ in range(2)]
    closed = [jax.make_jaxpr(lambda x, m=m: x * m)(np.ones(4, "f")) for m in (*masks, masks[0])]
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


def test_modules_keep_their_names():
    model = Blocks()
    params = jax.eval_shape(model.init, jax.random.key(0), BATCH)["params"]
    made = lowered(lambda params, x: jnp.mean(model.apply({"params": params}, x) ** 2), params)
    assert functions(made.as_text(), "forward") == 2
    names = set(re.findall(r'op_name="([^"]*)"', made.compile().as_text()))
    for layer in map(str, range(3)):
        named = [name for name in names if f"CheckpointBlock_{layer}" in name]
        for what in ("out", "tanh", "all_gather", "reduce_scatter"):
            assert any(what in name for name in named), (layer, what)


def test_what_has_side_effects_runs_for_each_layer(capfd):
    def layer(x, w):
        jax.debug.print("{}", w["up"].shape[0] + 0 * lax.axis_index("data"))
        return dense(x, w)

    loss = in_a_loop(lambda x, w: jax.checkpoint(layer)(x, w))
    params = layers(3)
    plan = planned(params)
    grad = jax.jit(zerojax.value_and_grad(loss, plan))
    jax.block_until_ready(grad(plan.place({"params": params})["params"], BATCH))
    jax.effects_barrier()
    assert capfd.readouterr().out.count(str(DIM)) >= 3 * 8


@pytest.mark.parametrize("layer", [remat, dense])
def test_programs_grow_linearly_with_layers(layer):
    lines = lambda count: lowered(in_a_loop(layer), layers(count)).as_text().count("\n")
    four, eight, twelve = map(lines, (4, 8, 12))
    assert twelve - eight == eight - four
    assert layer is dense or (eight - four) / 4 < 20  # two calls, and what is done with each leaf


def test_evaluation_traces_layers_once():
    state = TrainState.create(apply_fn=None, params=layers(4), tx=optax.sgd(0.1))
    state = zerojax.shard_train_state(state, stage=3, min_shard_size=1)
    step = zerojax.eval_step(in_a_loop(remat))
    text = step.lower(state, BATCH).as_text()
    assert (functions(text, "plain"), calls(text, "plain"), functions(text, "forward")) == (1, 4, 0)
    wanted = jax.jit(in_a_loop(dense))(jax.device_get(state.params), BATCH)
    assert float(step(state, BATCH)["loss"]) == pytest.approx(float(wanted), rel=1e-6)


SHARDED = {"params/3/up": jax.sharding.PartitionSpec(None, "data")}


@pytest.mark.parametrize(("overrides", "pairs"), [({}, 2), (SHARDED, 1)])
def test_layers_of_other_shapes_or_shardings_are_not_taken_for_one(overrides, pairs):
    """A pair that is alike shares functions; a layer that no other is alike has none."""
    params = [*layers(2), *layers(2, up=2 * DIM)]
    text = lowered(in_a_loop(remat), params, overrides=overrides).as_text()
    assert functions(text, "forward") == functions(text, "backward") == 1 + pairs
