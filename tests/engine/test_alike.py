"""Layers in a Python loop, each a `jax.checkpoint`: those that are alike are traced once."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import zerojax
from tests.conftest import make_mesh
from tests.engine.losses import each
from tests.support.reference import assert_close, train_state
from tests.support.schedules import value_and_grad

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
    grad = jax.jit(value_and_grad(loss, plan, roll=False))
    return grad.trace(plan.abstract()["params"], BATCH).lower()


def functions(text, name):
    """The functions of a lowered program whose names begin so: each is traced and derived."""
    return len(re.findall(rf"func.func private @{name}(?:_\d+)?\(", text))


def calls(text, name):
    return len(re.findall(rf"call @{name}(?:_\d+)?\(", text))


@pytest.mark.parametrize("layer", [remat, functions_of_their_own])
def test_layers_that_are_alike_are_derived_once_and_gathered_one_by_one(layer):
    """And the first: its input, the batch, has no gradient."""
    count = 6
    program = lowered(in_a_loop(layer), layers(count))
    for name in ("forward", "backward"):
        text = program.as_text()
        assert (functions(text, name), calls(text, name)) == (2, count)
    compiled = program.compile().as_text()
    assert compiled.count(" all-gather(") == 2 * 2 * count and " call(" not in compiled


def scanning(x, w, dtype="float32"):
    """Its casts and its sum need only weights, and its loop over time reads one."""
    w = {name: leaf.astype(dtype).astype("float32") for name, leaf in w.items()}
    turn = lambda state, _: (jnp.tanh(state @ w["up"]), None)
    state, _ = lax.scan(turn, x, None, length=3)
    return dense(x + state * jnp.sum(w["down"]) / DIM, w)


def narrow(x, w):
    return scanning(x, w, "bfloat16")


def scaled(layer):
    """A layer one of whose operands is computed from a weight."""
    return lambda x, w: layer(x, {**w, "down": w["down"] / 2})


def test_calls_that_repeat_are_derived_once_and_send_and_keep_what_others_do():
    """Each way there are two functions: the first layer's input has no gradient."""
    count = 6
    losses = [in_a_loop(scaled(layer)) for layer in (jax.jit(narrow), narrow)]
    programs = [lowered(loss, layers(count)) for loss in losses]
    texts = [program.as_text() for program in programs]
    assert [functions(text, "narrow") for text in texts] == [4, 0]
    assert calls(texts[0], "narrow") == 2 * count
    assert [text.count("stablehlo.while") for text in texts] == [4, 2 * count]
    compiled = [program.compile() for program in programs]
    sent = [re.findall(r"= (\S+) (all-\w+|reduce-\w+)\(", code.as_text()) for code in compiled]
    assert sum(kind == "all-gather" for _, kind in sent[0]) == 2 * 2 * count
    assert sorted(sent[0]) == sorted(sent[1])
    temporary = [code.memory_analysis().temp_size_in_bytes for code in compiled]
    assert temporary[0] == temporary[1]


@pytest.mark.parametrize("stage", range(4))
def test_gradients_of_calls_that_repeat_are_those_of_one_device(stage):
    """One closes over an array, and one gathers for itself."""
    mask = jnp.arange(DIM) % 3
    kinds = map(jax.jit, (scanning, dense, lambda x, w: dense(x * mask, w), remat))
    params, loss = layers(8), jax.jit(in_a_loop(*kinds))
    plan = planned(params, stage)
    grads = {"one": zerojax.value_and_grad(loss, plan)}
    grads["two"] = value_and_grad(loss, plan, accumulate=2)
    found = each(grads, plan.place({"params": params})["params"], BATCH)
    wanted = jax.value_and_grad(loss)(params, BATCH)
    for name, got in found.items():
        assert_close(got, wanted, 1e-6, what=name)


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
        grads[name] = value_and_grad(losses["alike"], plan, **{name: value})
    found = each(grads, plan.place({"params": params})["params"], BATCH)
    wanted = each({n: jax.value_and_grad(loss) for n, loss in losses.items()}, params, BATCH)
    for name, got in found.items():
        assert_close(got, wanted.get(name, wanted["alike"]), 1e-6, what=name)


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


def test_evaluation_traces_layers_once():
    state = train_state(layers(4), optax.sgd(0.1))
    state = zerojax.shard_train_state(state, stage=3, min_shard_size=1)
    step = zerojax.eval_step(in_a_loop(remat))
    text = step.lower(state, BATCH).as_text()
    assert (functions(text, "plain"), calls(text, "plain"), functions(text, "forward")) == (1, 4, 0)
    wanted = jax.jit(in_a_loop(dense))(jax.device_get(state.params), BATCH)
    assert float(step(state, BATCH)["loss"]) == pytest.approx(float(wanted), rel=1e-6)
