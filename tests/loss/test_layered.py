"""order="layers": the numbers of microbatches in turn, each layer gathered once a step."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from tests.conftest import make_mesh
from tests.support import audits
from tests.support.collectives import collectives, scans_of
from tests.support.draw import normal
from tests.support.models import gpt, gpt_block, gpt_params, norm
from tests.support.reference import assert_close, train_state
from tests.support.schedules import scheduled, train_step, value_and_grad

LAYERS, DIM, TOKENS, ROWS = 3, 32, 8, 16
X = np.asarray(normal(1, ROWS, DIM))


def grad_of(loss, params, order, devices=4, **options):
    plan = zerojax.plan({"params": params}, mesh=make_mesh(devices))
    return value_and_grad(loss, plan, **({"order": order, "accumulate": 4} | options))


def both(loss, params, *args, **options):
    """What both orders give, in one program: it compiles in less time than two."""
    grads = [grad_of(loss, params, order, **options) for order in ("layers", "microbatches")]
    run = jax.jit(lambda at, *args: jax.lax.switch(at, grads, *args))
    return [run(at, params, *args) for at in range(2)]


def rich_loss(params, batch, rng):
    """Two loops over layers, and whatever else a loss can do: keys for each layer, exact means,
    statistics, aux that has rows, means, counts and what does not depend on the batch."""
    keys = jax.random.split(rng, LAYERS + 1)

    @jax.checkpoint
    def layer(x, scanned):
        p, key, mean = scanned
        keep = jax.random.bernoulli(key, 0.9, x.shape)
        x = jnp.where(keep, gpt_block(p, x - 0.1 * mean), 0.0)
        return x, (0.9 * mean + 0.1 * x.mean((0, 1)), jnp.abs(x).max())

    x = params["embed"][batch["tokens"]] + params["pos"]
    x = x + 0.1 * jax.random.normal(keys[-1], x.shape)
    x, (means, largest) = jax.lax.scan(
        layer, x, (params["blocks"], keys[:-1], jnp.zeros((LAYERS, DIM)))
    )
    mix = lambda carry, w: ((carry[0] + jnp.tanh(carry[0] @ w), carry[1] + 1), None)
    (x, layers), _ = jax.lax.scan(mix, (x, 0), params["mix"], reverse=True)
    logits = norm(x, params["norm"]) @ params["embed"].T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"])
    loss = zerojax.mean(losses, where=batch["mask"][:, None])
    aux = {"means": means, "largest": largest.max(), "by_row": losses.mean(1), "layers": layers}
    return loss + 1e-3 * jnp.sum(params["mix"] ** 2), aux | {"norm": jnp.sum(params["norm"] ** 2)}


def test_the_numbers_are_those_of_microbatches_in_turn():
    params = gpt_params(tokens=TOKENS) | {"mix": 0.2 * normal(0, 2, DIM, DIM)}
    random = np.random.default_rng(1)
    tokens = random.integers(0, 7, (ROWS, TOKENS), np.int32)
    batch = {"tokens": tokens, "mask": random.random(ROWS) < 0.6}
    args = batch, jax.random.key(3, impl="rbg")
    got, wanted = both(rich_loss, params, *args, has_aux=True, prefetch=1)
    assert_close(got, wanted, 2e-6)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_each_microbatch_draws_from_its_own_key(impl):
    def loss(params, batch, rng):
        x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, params["w"])[0]
        return jnp.mean(x**2), jax.random.bits(rng, (len(batch), 4))

    params, key = {"w": jnp.ones((LAYERS, 8, 8)) / 8}, jax.random.key(0, impl=impl)
    grad = jax.jit(grad_of(loss, params, "layers", devices=1, has_aux=True))
    (_, drawn), _ = grad(params, jnp.ones((8, 8)), key)
    keys = [jax.random.fold_in(jax.random.fold_in(key, 0), index) for index in range(4)]
    np.testing.assert_array_equal(drawn, np.concatenate([jax.random.bits(k, (2, 4)) for k in keys]))


def test_layers_of_layers_are_found_inside_of_one_checkpoint():
    def groups(x, ws):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x.mean()), x, ws)

    @jax.checkpoint
    def loss(params, batch):
        x, means = jax.lax.scan(groups, batch, params["w"])
        return jnp.mean(x**2), means

    params = {"w": normal(0, 2, 2, DIM, DIM) / 6}
    batch = normal(1, ROWS, DIM)
    got, wanted = both(loss, params, batch, has_aux=True, prefetch=1)
    assert_close(got, wanted, 1e-6)


def test_a_layer_may_have_several_checkpoints_and_nest_them():
    """Weights are cast in each, and the layer is gathered once for all microbatches."""

    def layer(x, w):
        half = jax.checkpoint(lambda x, w: jnp.tanh(x @ w.astype("bfloat16")))
        x = x + jax.checkpoint(lambda x: half(2 * x, w[0]))(x)
        return x + half(x, w[1]), None

    def loss(params, batch):
        x = jax.lax.scan(layer, batch.astype("bfloat16"), params["w"])[0]
        return jnp.mean(x.astype("float32") ** 2)

    params = {"w": normal(0, 2, 2, DIM, DIM) / 6}
    batch = normal(1, ROWS, DIM)
    got, wanted = both(loss, params, batch, prefetch=0)
    assert_close(got, wanted, 2e-2)
    every = collectives(jax.make_jaxpr(grad_of(loss, params, "layers"))(params, batch))
    assert sum(c.moved for c in every if c.kind == "reduce-scatter") == params["w"].size


def test_a_sum_of_many_gradients_keeps_the_small_ones():
    """512 microbatches: in bfloat16 the sum would stop at the 256th."""

    def loss(params, batch):
        layer = lambda x, w: (x * w.astype("bfloat16")[0], None)
        return jax.lax.scan(layer, batch.astype("bfloat16"), params)[0].mean().astype("float32")

    params, batch = jnp.ones((2, 1)), jnp.ones((512, 1))
    grads = jax.jit(grad_of(loss, params, "layers", devices=1, accumulate=512))(params, batch)[1]
    assert grads.tolist() == [[1], [1]]


def test_each_layer_is_gathered_twice_and_reduced_once_a_step():
    model = gpt(remat=True)

    def moved(kind, order, accumulate):
        grad = grad_of(model.loss, model.params, order, accumulate=accumulate)
        every = collectives(jax.make_jaxpr(grad)(model.params, model.batch))
        return sum(c.moved for c in every if c.kind == kind)

    for kind in ("all-gather", "reduce-scatter"):
        once = moved(kind, "microbatches", 1)
        assert moved(kind, "layers", 4) == once > 0
        assert moved(kind, "microbatches", 4) >= 3.5 * once


@pytest.mark.parametrize("wrap", [lambda head: head, jax.checkpoint])
def test_the_head_of_one_microbatch_at_a_time_is_kept(wrap):
    """No array of all microbatches' logits, in either direction."""

    def loss(params, batch):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, params["w"])
        return jnp.mean(wrap(lambda x: x @ params["head"])(x) ** 2)

    params = {"w": jnp.ones((LAYERS, DIM, DIM)), "head": jnp.ones((DIM, 64))}
    batch = jnp.ones((ROWS, DIM))
    jaxpr = jax.make_jaxpr(grad_of(loss, params, "layers", devices=1))(params, batch)
    shapes = {v.aval.shape for scan in scans_of(jaxpr, nested=True) for v in scan.outvars}
    assert (4, ROWS // 4, DIM) in shapes and (4, ROWS // 4, 64) not in shapes


@pytest.mark.gpu_code
def test_steps_for_gpus_keep_the_contract_of_one_microbatch():
    """Every layer is gathered twice and reduced once, asynchronously; a forecast says what it is
    of."""
    batch, made = jax.ShapeDtypeStruct((8 * 4 * audits.ROWS,), "int32"), {}
    for order in ("microbatches", "layers"):
        step = train_step(audits.loss, accumulate=4, order=order)
        options = {"gpus": "8xH100", "stages": 3, "precision": zerojax.Precision("bfloat16")}
        forecast = zerojax.forecast(step, audits.make_state, batch, **scheduled(options))
        (made[order],) = forecast.cases
        assert made[order].report.findings() == [] and made[order].accumulate == 4
    assert made["layers"].wire_bytes < 0.3 * made["microbatches"].wire_bytes
    assert 'schedule=zerojax.Schedule(order="layers")' in " ".join(str(forecast).split())


# -- losses whose microbatches cannot run side by side


def scanned(p, x):
    return jax.lax.scan(lambda x, w: (x @ w, None), x, p["w"])[0]


def at_times(p, x):
    return jnp.mean(jax.lax.cond(p["w"].sum() < 9, scanned, lambda p, x: x, p, x))


@jax.custom_vjp
def own(p, x):
    return scanned(p, x)


own.defvjp(lambda p, x: jax.vjp(scanned, p, x), lambda pull, g: pull(g))


def over_time(p, x):
    step = lambda x, _: (x @ p["w"][0], None)
    return jnp.mean(jax.lax.scan(step, x, None, length=2)[0])


def in_a_python_loop(p, x):
    for w in p["w"]:
        x = jnp.tanh(x @ w)
    return jnp.mean(x)


INSIDE = r"a scan over stacked parameters is inside {}, whose microbatches cannot.*out of it, or"
NO_LAYERS = r"the loss has no scan over stacked parameters. Stack the layers \(jax.lax.scan"


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (in_a_python_loop, NO_LAYERS),
        (over_time, NO_LAYERS),
        (at_times, INSIDE.format("cond")),
        (lambda p, x: jnp.mean(own(p, x)), INSIDE.format(r"custom_vjp_call\w*")),
    ],
)
def test_a_loss_without_such_layers_runs_one_microbatch_after_another(loss, why):
    params = {"w": 0.1 * normal(0, 3, DIM, DIM)}
    make = lambda: train_state(params, optax.sgd(0.1))
    step = train_step(loss, accumulate=2, order="layers")
    with pytest.warns(UserWarning, match=f"order='layers' is left out: {why}"):
        new, metrics = step(zerojax.shard_train_state(make), X)
        assert zerojax.audit(step, zerojax.shard_train_state(make), X).accumulate == 2
    assert re.search(f"order='layers' is left out: {why}", repr(step))
    wanted = make().apply_gradients(grads=jax.grad(loss)(params, X))
    assert_close(new.params, wanted.params, 1e-5)
    assert float(metrics["loss"]) == pytest.approx(float(loss(params, X)), rel=1e-5)
    backward = train_step(loss, accumulate=2, order="layers", update="backward")
    with pytest.raises(ValueError, match=rf"update='backward' of 2 microbatches .*{why}"):
        backward(zerojax.shard_train_state(make), X)
