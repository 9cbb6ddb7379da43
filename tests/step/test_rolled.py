"""Layers in a Python loop as one loop: what is rolled up, what stays, what a step says of it."""

import re

import flax.linen as nn
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
import zerojax.nnx
from tests.conftest import make_mesh
from tests.support import nnx_models
from tests.support.reference import assert_close, train_state
from tests.support.schedules import train_step, value_and_grad

DIM, LAYERS = 32, 4
TOKENS = np.arange(8 * 12).reshape(8, 12) % 64
KEY = jax.random.key(3)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype("f") / shape[0] ** 0.5


def layers(count=LAYERS, **shapes):
    return [{k: normal(n, *s) for k, s in shapes.items()} for n in range(count)]


def drawn(init, *inputs):
    """What an init returns, drawn here: no programs to compile."""
    leaves, tree = jax.tree.flatten(jax.eval_shape(init, *inputs))
    return tree.unflatten([normal(n, *leaf.shape) for n, leaf in enumerate(leaves)])


def two_stacks(remat):
    """T5: the first layer of the encoder, and that of the decoder, makes a bias of distances, which
    the others pass on. The decoder reads what the encoder returns."""
    params = {"embed": normal(9, 64, DIM)}
    for n, name in enumerate(("enc", "dec")):
        params[name] = layers(4, q=(DIM, DIM), out=(DIM, DIM))
        params[name][0]["bias"] = normal(n, 16)
    apart = abs(np.arange(12)[:, None] - np.arange(12))

    def layer(x, p, mask, bias, *read):
        scores = x @ p["q"] @ x.mT
        bias = p["bias"][apart] + mask if bias is None else bias
        x = x + jnp.tanh(jax.nn.softmax(scores + bias) @ x) @ p["out"]
        for other in read:
            x = x + jax.nn.softmax(x @ p["q"] @ other.mT) @ other @ p["out"]
        return x, bias

    def stack(params, embed, tokens, *read):
        x, mask, bias = embed[tokens], jnp.where(tokens == 0, -1e9, 0.0)[:, None], None
        for p in params:
            x, bias = (jax.checkpoint(layer) if remat else layer)(x, p, mask, bias, *read)
        return x

    def loss(params, tokens, _):
        x = stack(params["enc"], params["embed"], tokens)
        y = stack(params["dec"], params["embed"], tokens[:, ::-1], x)
        return jnp.mean((y @ params["embed"].T) ** 2)

    return params, loss


def rows_by_layer(remat):
    """Each layer reads a row of its own, of a mask (as in Hugging Face's BERT) and of keys."""
    params = {"embed": normal(9, 64, DIM)}
    params["layers"] = layers(LAYERS, up=(DIM, 64), down=(64, DIM))

    def layer(x, p, mask, key):
        x = x * mask * jax.random.bernoulli(key, 0.9, x.shape[1:])
        return x + jnp.tanh(x @ p["up"]) @ p["down"]

    def loss(params, tokens, key):
        x, keys = params["embed"][tokens], jax.random.split(key, LAYERS)
        mask = 1 - jnp.arange(LAYERS * DIM, dtype="f").reshape(LAYERS, DIM) / 500
        for n, p in enumerate(params["layers"]):
            x = (jax.checkpoint(layer) if remat else layer)(x, p, mask[n], keys[n])
        return jnp.mean((x @ params["embed"].T) ** 2)

    return params, loss


class UNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        skips = []
        for width in (8, 16, 32):
            skips.append(x := nn.relu(nn.Dense(width)(x)))
        for x_of_level in reversed(skips):
            x = nn.relu(nn.Dense(x_of_level.shape[-1])(jnp.concatenate([x, x_of_level], -1)))
        return x


def u_net(_):
    model = UNet()
    params = drawn(model.init, KEY, jnp.ones((1, 12)))["params"]
    apply = lambda params, x: jnp.asarray(model.apply({"params": params}, x / 64.0))
    return params, lambda params, x, _: jnp.mean(apply(params, x) ** 2)


def plain(layer, remat, count=LAYERS, order=None):
    """A model of plain arrays. `layer(x, p, number)` returns its output; `order` says whose weights
    each call reads."""
    params = {
        "embed": normal(9, 64, DIM),
        "layers": layers(count, up=(DIM, 64), down=(64, DIM)),
        "scale": np.ones(DIM, "f"),
    }

    def loss(params, tokens, key):
        x = params["embed"][tokens]
        for number, own in enumerate(order or range(count)):
            p = params["layers"][own]
            one = lambda x, p, s=params["scale"], number=number: layer(x * s, p, number, key)
            x = (jax.checkpoint(one) if remat else one)(x, p)
        return jnp.mean((x @ params["embed"].T) ** 2)

    return params, loss


def dense(x, p, *_):
    return x + jnp.tanh(x @ p["up"]) @ p["down"]


def by_depth(x, p, number, key):
    """Dropout whose rate depends on the depth, with a key of its own."""
    key = jax.random.fold_in(key, number)
    keep = jax.random.bernoulli(key, 1 - 0.1 * number, x.shape[1:])  # the same on all devices
    return dense(jnp.where(keep, x, 0.0), p)


def every_second(x, p, number, _):
    """`jax.checkpoint` is around every second layer."""
    return (jax.checkpoint(dense) if number % 2 else dense)(x, p)


def first_differs(x, p, number, _):
    """The first layer adds its own values where others add those of the one before."""
    new = dense(x, p)
    return new + (x if number else new)


def scaled_backward(x, p, number, _):
    """A rule of the user's, with constants that differ by layer."""
    same = jax.custom_vjp(lambda x: x * 1.0)

    def forward(x):
        return same(x), None

    def backward(_, grad):
        return (grad * np.full(DIM, 1.0 + number, "f"),)

    same.defvjp(forward, backward)
    return dense(same(x), p)


def no_backward(x, p, *_):
    """A rule that raises, where nothing is differentiated."""

    def raises(_, grad):
        raise NotImplementedError

    same = jax.custom_vjp(lambda x: x * 1.0)
    same.defvjp(lambda x: (same(x), None), raises)
    return dense(x, p) + same(jax.lax.stop_gradient(x))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.MultiHeadDotProductAttention(num_heads=4, use_bias=False)(nn.LayerNorm()(x))
        return x + nn.Dense(DIM)(nn.gelu(nn.Dense(64)(x + h)))


class Transformer(nn.Module):
    remat: bool
    shared: bool = False

    @nn.compact
    def __call__(self, tokens):
        block = nn.remat(Block) if self.remat else Block
        x, one = nn.Embed(64, DIM)(tokens), block() if self.shared else None
        for n in range(LAYERS):
            x = (one or block(name=f"block{n}"))(x)
        return nn.Dense(64)(x)


def linen(remat, **options):
    model = Transformer(remat, **options)
    params = drawn(model.init, KEY, TOKENS[:1])["params"]
    return params, lambda params, tokens, _: jnp.mean(model.apply({"params": params}, tokens) ** 2)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.up = nnx.LayerNorm(DIM, rngs=rngs), nnx.Linear(DIM, 64, rngs=rngs)
        self.down = nnx.Linear(64, DIM, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Model(nnx.Module):
    def __init__(self, rngs, remat):
        self.embed, self.remat = nnx.Embed(64, DIM, rngs=rngs), remat
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = nnx.remat(Layer.__call__)(layer, x) if self.remat else layer(x)
        return x


def nnx_model(remat):
    graph, params, rest = nnx.split(Model(nnx.Rngs(0), remat), nnx.Param, ...)
    merged = lambda params: nnx.merge(graph, params, rest, copy=True)
    return params, lambda params, tokens, _: jnp.mean(merged(params)(tokens) ** 2)


def auxiliary(remat):
    """Each layer adds to a sum that begins as a number."""
    params, _ = plain(dense, remat)

    def layer(x, p):
        return dense(x, p), jnp.mean(jnp.tanh(x))

    def loss(params, tokens, _):
        x, total = params["embed"][tokens], 0.0
        for p in params["layers"]:
            x, more = (jax.checkpoint(layer) if remat else layer)(x, p)
            total += more
        return jnp.mean((x @ params["embed"].T) ** 2) + total

    return params, loss


def decayed(remat):
    """Something else reads the weights of the layers, too."""
    params, plain_loss = plain(dense, remat)

    def loss(params, tokens, key):
        squares = sum(jnp.sum(p["up"] ** 2) for p in params["layers"])
        return plain_loss(params, tokens, key) + 0.01 * squares

    return params, loss


def two_before(remat):
    """Each layer also reads what the layer before the last one has returned."""
    params, _ = plain(dense, remat)

    def loss(params, tokens, _):
        layer = jax.checkpoint(dense) if remat else dense
        x = [params["embed"][tokens]] * 2
        for p in params["layers"]:
            x.append(layer(x[-1], p) + x[-2])
        return jnp.mean((x[-1] @ params["embed"].T) ** 2)

    return params, loss


def returns_numbers(remat):
    """What each layer returns beside its output is a number, of another one in each."""
    params, _ = plain(dense, remat)

    def loss(params, tokens, _):
        x, total = params["embed"][tokens], 0.0
        for n, p in enumerate(params["layers"]):
            layer = lambda x, p, n=n: (dense(x, p), 0.1 * (n + 1))
            x, weight = (jax.checkpoint(layer) if remat else layer)(x, p)
            total += weight * jnp.mean(x**2)
        return total

    return params, loss


MODELS = {
    "auxiliary": auxiliary,
    "returns numbers": returns_numbers,
    "two before": two_before,
    "decayed": decayed,
    "dropout by depth": lambda remat: plain(by_depth, remat),
    "first differs": lambda remat: plain(first_differs, remat),
    "scaled backward": lambda remat: plain(scaled_backward, remat),
    "no backward": lambda remat: plain(no_backward, remat),
    "nnx": nnx_model,
    "two stacks": two_stacks,
    "rows by layer": rows_by_layer,
}


LOOPS = {
    ("returns numbers", True): [],
    "two before": [],
    "two stacks": [3] * 4,
    "first differs": [LAYERS - 1] * 2,
    "scaled backward": [],
    "no backward": [],
}


def planned(params):
    shapes = jax.tree.map(jnp.asarray, params)
    return zerojax.plan((shapes, ()), stage=3, mesh=make_mesh(), min_shard_size=1)


def gradients(params, loss, **options):
    plan = planned(params)
    placed = plan.place((jax.tree.map(jnp.asarray, params), ()))[0]
    return jax.jit(value_and_grad(loss, plan, **options)).trace(placed, TOKENS, KEY), placed


def scans(traced):
    """The lengths of the loops in a program."""
    return sorted(int(n) for n in re.findall(r"\blength=(\d+)", str(traced.jaxpr)))


@pytest.mark.parametrize("name", MODELS)
def test_rolled_layers_have_the_gradients_of_the_python_loop(name):
    """Those of a loop without `jax.checkpoint`, which changes no number."""
    programs = []
    for remat, roll in ((False, False), (False, True), (True, True)):
        params, loss = MODELS[name](remat)
        traced, placed = gradients(params, loss, roll=roll)
        wanted = LOOPS.get((name, remat), LOOPS.get(name, [LAYERS] * 2))
        assert scans(traced) == (wanted if roll else [])
        programs.append(jax.extend.core.jaxpr_as_fun(traced.jaxpr))
    # One program, which compiles in less time than three.
    run = jax.jit(lambda at, *args: jax.lax.switch(at, programs, *args))
    leaves = jax.tree.leaves((placed, TOKENS, KEY))
    plain, *rolled = (run(at, *leaves) for at in range(3))
    for found in rolled:
        assert_close(plain, found, 2e-6)


def test_what_is_rolled_up_and_what_stays():
    """By default, layers under `jax.checkpoint`; never those that print."""
    different = lambda x, p, number, _: dense(x * x if number == 2 else x, p)
    for (params, loss), roll, wanted in (
        (plain(dense, True), "auto", [LAYERS] * 2),
        (plain(dense, False), "auto", []),
        (plain(dense, True, count=2), "auto", []),
        (plain(different, True), "auto", []),
        (plain(different, True, count=9), "auto", [6, 6]),
        (plain(prints, True), True, []),
        (plain(every_second, False, count=8), "auto", []),
        (plain(every_second, False, count=8), True, [4, 4]),
        (plain(dense, True, count=4, order=[0, 1, 2, 3] * 2), True, []),
        (plain(dense, True, count=4, order=[0, 0, 1, 1, 2, 2, 3, 3]), True, [4, 4]),
    ):
        assert scans(gradients(params, loss, roll=roll)[0]) == wanted


def masked(power):
    """The mean of what a mask leaves, beside layers in a loop."""
    params, _ = plain(dense, True)

    def loss(params, batch):
        x = params["embed"][batch["tokens"]]
        for p in params["layers"]:
            x = jax.checkpoint(dense)(x, p)
        mean = zerojax.mean(jnp.mean(x**2, (1, 2)), where=batch["mask"])
        return mean if power == 1 else mean**power

    return params, loss


def test_means_beside_rolled_layers_are_exact_over_microbatches():
    batch = {"tokens": np.tile(TOKENS, (2, 1)), "mask": np.arange(16) % 5 > 0}
    for power in (1, 2):
        params, loss = masked(power)
        step, state = trained(loss, params, accumulate=2)
        if power == 2:
            with pytest.raises(ValueError, match="not linear"):
                step(state, batch)
        else:
            _, metrics = step(state, batch)
            assert float(metrics["loss"]) == pytest.approx(float(loss(params, batch)), 1e-5)
            assert "are rolled up" in str(step)


@pytest.mark.parametrize(
    ("ways", "count"),
    [
        ({"layers": "int8"}, 4),
        ({r"layers/\d+/up": "int8"}, 2),
        ({"layers/0/": None, "layers": "int8"}, 4),
    ],
)
def test_rules_by_path_hold_in_rolled_layers(ways, count):
    """Two weights of a layer travel in forward and in backward; the first layer may differ."""
    params, loss = plain(dense, True)
    precision = zerojax.Precision(gather=ways)
    text = gradients(params, loss, precision=precision)[0].lower().as_text()
    kinds = re.findall(r'"stablehlo.all_gather".*?-> tensor<(\S+?)>', text, re.DOTALL)
    assert sum(kind.endswith("xi8") for kind in kinds) == count


def albert(remat):
    return linen(remat, shared=True)


CALLS = "not rolled up: {} calls of jax.checkpoint, "
NOTHING = "roll=True rolls up nothing: no "
OWN = "3 layers in a row are alike, each with weights of its own"


@pytest.mark.parametrize(
    ("model", "remat", "says"),
    [
        (albert, False, NOTHING + OWN),
        (albert, True, CALLS.format(LAYERS) + "alike, but not one after another with weights of "),
        (u_net, False, NOTHING + OWN),
    ],
)
def test_layers_without_weights_of_their_own_stay_and_are_told(model, remat, says):
    params, loss = model(remat)
    programs = []
    for roll in (True, False):
        step, state = trained(lambda p, tokens: loss(p, tokens, KEY), params, roll=roll)
        programs.append(str(step.trace(state, TOKENS).jaxpr))
        assert (says in str(step)) == roll
    assert programs[0] == programs[1]


def trained(loss, params, **options):
    make = lambda: train_state(jax.tree.map(jnp.asarray, params), optax.sgd(0.1))
    state = zerojax.shard_train_state(make, stage=3, mesh=make_mesh(), min_shard_size=1)
    return train_step(loss, **options), state


@pytest.mark.parametrize(
    ("remat", "says"),
    [
        (True, "params/layers/0 to 3 are rolled up, 4 iterations of a loop"),
        (False, "params/layers/0 to 3 stay a Python loop, because no jax.checkpoint (nn.remat, "),
    ],
)
def test_a_step_and_its_audit_say_what_becomes_of_layers(remat, says):
    params, loss = plain(dense, remat)
    step, state = trained(lambda params, tokens: loss(params, tokens, KEY), params)
    assert str(step) == "<zerojax training step>"
    report = zerojax.audit(step, state, TOKENS).check()
    assert says in str(step) and f"layers             {says}" in " ".join(str(report).split("\n"))
    assert [text.startswith(says) for text in report.layers] == [True]


def test_a_step_of_nnx_says_it_too():
    make = lambda: nnx_models.make(Model, tx=optax.sgd(0.1), remat=True)
    model, optimizer = zerojax.nnx.shard(make, stage=3, mesh=make_mesh(), min_shard_size=1)
    step = zerojax.nnx.train_step(lambda model, tokens: jnp.mean(model(tokens) ** 2))
    step(model, optimizer, TOKENS)
    assert "params/layers/0 to 3 are rolled up, 4 iterations of a loop" in str(step)
    assert zerojax.verify(*step.pure(model, optimizer, TOKENS))


def prints(x, p, *_):
    jax.debug.print("{}", x.sum())
    return dense(x, p)


def power(x, p, number, _):
    return dense(x ** (number + 1), p)


@pytest.mark.parametrize(
    ("layer", "count", "says"),
    [
        (power, 2, CALLS.format(2) + "too few of them alike"),
        (prints, 4, CALLS.format(4) + "which print or call the host"),
        (dense, 0, NOTHING + OWN),
    ],
)
def test_what_stays_is_told(layer, count, says):
    params, loss = plain(layer, True, count=count)
    step, state = trained(lambda params, tokens: loss(params, tokens, KEY), params, roll=True)
    step.lower(state, TOKENS)
    assert str(step) == f"<zerojax training step>\n  {says}"


def test_whole_parameters_are_told():
    step = train_step(lambda params, x: jnp.mean(x @ params["w"]), roll=True)
    state = train_state({"w": jnp.ones((32, 8))}, optax.sgd(0.1))
    step(zerojax.shard_train_state(state, stage=2, mesh=make_mesh()), np.ones((8, 32), "f"))
    assert str(step).endswith(NOTHING + "parameter is sharded (stage 3)")


def test_the_norm_and_the_state_are_those_of_the_python_loop():
    params, loss = decayed(True)
    found = []
    for roll in ("auto", False):
        step, state = trained(lambda params, tokens: loss(params, tokens, KEY), params, roll=roll)
        paths = jax.tree.structure(state)
        state, metrics = step(state, TOKENS)
        assert jax.tree.structure(state) == paths
        shards = state.params["layers"][2]["up"].addressable_shards
        assert shards[0].data.size == DIM * 64 // 8
        found.append((metrics, zerojax.gather_params(state)))
    assert_close(*found, 1e-6)


def test_scopes_name_the_layers_of_a_loop():
    params, loss = linen(True)
    text = gradients(params, loss)[0].lower().as_text(debug_info=True)
    assert "block0..block3/LayerNorm_0" in text and "block2/" not in text


def test_a_rolled_layer_without_a_checkpoint_keeps_less_than_an_unrolled_one():
    """A scan would keep the results of all operations, twice as much as XLA does between layers."""

    def smooth(x, p, *_):
        h = x @ p["up"]
        return x + jnp.tanh(jnp.sin(h) * jnp.exp(-h * h)) @ p["down"]

    params, loss = plain(smooth, False)
    plan = planned(params)
    shape = jax.ShapeDtypeStruct((8 * 32, 64), np.int32)
    peaks = []
    for roll in (True, False):
        grad = jax.jit(value_and_grad(loss, plan, roll=roll))
        args = plan.abstract()[0], zerojax.aot.batch(shape, plan), KEY
        peaks.append(grad.lower(*args).compile().memory_analysis().temp_size_in_bytes)
    assert peaks[0] < 0.8 * peaks[1]
