"""The models of `space.py`: small ones of each kind, all with the same features in the loss.

Each computes the losses of some rows, from statistics that it updates and with dropout. It knows
nothing of meshes: `trajectory.py` runs it on one device, `compared.py` in a step.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

LAYERS, TOKENS, SIDE, CLASSES = 2, 5, 5, 8
# In layers and in stacks of layers, 48 is divided by 2, 3, 4, 6 and 8 devices, and none of the
# others is. Blocks of codes have 32 elements or more, along the last dimension.
SIZES = {"even": (48, 96, 48), "odd": (37, 61, 53)}  # of a layer: outside, inside; the vocabulary

# (model, stats, inputs, key, rate, wrap of a layer) -> (losses of rows, new stats, scale)
Apply = Callable[..., Any]
Sizes = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model: `params` are trained, `stats` are updated by the loss, which says how."""

    params: Any
    stats: Any
    apply: Apply
    inputs: Callable[[np.random.Generator, int], Any]  # of so many rows
    model_of: Callable[[Any], Any] = lambda params: params  # what the loss takes


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32) / np.float32(shape[-2] ** 0.5)


def zeros(*shape: int) -> dict[str, np.ndarray]:
    return {"mean": np.zeros(shape, np.float32), "seen": np.zeros((), np.int32)}


def filled(shapes: Any) -> Any:
    """Parameters of these shapes: initializers would take longer than the model's steps."""
    rng = np.random.default_rng(2)

    def fill(path, leaf):
        if leaf.ndim > 1:
            return normal(rng, *leaf.shape)
        is_scale = "scale" in jax.tree_util.keystr(path)
        return np.float32(is_scale) + normal(rng, 25, leaf.size)[0]

    return jax.tree_util.tree_map_with_path(fill, shapes)


def dropout(x: jax.Array, key: jax.Array | None, rate: Any) -> jax.Array:
    if key is None:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0).astype(
        x.dtype
    )


def averaged(mean: jax.Array, x: jax.Array) -> jax.Array:
    """A running mean of what a layer reads."""
    return 0.9 * mean + 0.1 * x.mean(tuple(range(x.ndim - 1))).astype(mean.dtype)


def centred(x: jax.Array, mean: jax.Array) -> jax.Array:
    return x - 0.3 * mean.astype(x.dtype)


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-3) * scale


def attended(queries: jax.Array, x: jax.Array) -> jax.Array:
    """Causal attention to states that are their own keys."""
    seen = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
    scores = jnp.where(seen, queries @ x.mT / x.shape[-1] ** 0.5, -1e9)
    return jax.nn.softmax(scores, -1) @ x


def next_token(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    logits = logits[:, :-1].astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean(-1)


def scale_of(x: jax.Array) -> jax.Array:
    return jnp.abs(x).mean(dtype=jnp.float32)


def some_tokens(rng: np.random.Generator, rows: int) -> np.ndarray:
    return rng.integers(0, 17, (rows, TOKENS), np.int32)  # few, so that they meet in the table


# -- plain pytrees


def mlp(sizes: Sizes) -> Subject:
    dim, hidden, _ = sizes
    rng, shapes = np.random.default_rng(0), ((dim, hidden), (hidden, hidden), (hidden, dim))
    bias = lambda size: np.full(size, 0.1, np.float32)
    params = [{"w": normal(rng, *shape), "b": bias(shape[1])} for shape in shapes]
    stats = zeros(hidden)

    def layer(p, x, key, rate):
        return dropout(jnp.tanh(x @ p["w"] + p["b"]), key, rate)

    def apply(params, stats, x, key, rate, wrap):
        keys = [None, None] if key is None else jax.random.split(key)
        h = wrap(layer)(params[0], x, keys[0], rate)
        new = {"mean": averaged(stats["mean"], h), "seen": stats["seen"] + 1}
        h = wrap(layer)(params[1], centred(h, stats["mean"]), keys[1], rate)
        out = h @ params[2]["w"] + params[2]["b"]
        return ((out - x) ** 2).mean(-1), new, scale_of(out)

    return Subject(params, stats, apply, lambda rng, rows: normal(rng, rows, 1, dim)[:, 0])


def in_chunks(x: jax.Array, table: jax.Array, tokens: jax.Array) -> jax.Array:
    """The losses of rows, a few logits at a time."""

    def loss_of(token):
        logits = (table @ token[0]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, token[1])

    each = x[:, :-1].reshape(-1, x.shape[-1]), tokens[:, 1:].reshape(-1)
    losses = jax.lax.map(jax.checkpoint(loss_of), each, batch_size=3)
    return losses.reshape(len(x), -1).mean(-1)


def gpt(sizes: Sizes, chunked: bool = False) -> Subject:
    """A loop over stacked layers, with keys and statistics for each, and a tied embedding."""
    dim, hidden, vocab = sizes
    rng = np.random.default_rng(1)
    stacked = functools.partial(normal, rng, LAYERS)
    ones = lambda *shape: np.ones(shape, np.float32)
    blocks = {
        "norm": ones(LAYERS, dim),
        "look": stacked(dim, dim),
        "up": stacked(dim, hidden),
        "down": stacked(hidden, dim),
    }
    params = {"embed": normal(rng, vocab, dim), "norm": ones(dim), "blocks": blocks}
    stats = zeros(LAYERS, dim)

    def layer(rate, x, scanned):
        p, mean, key = scanned
        h = norm(centred(x, mean), p["norm"])
        h = x + attended(h @ p["look"], h)
        h = h + dropout(jnp.tanh(h @ p["up"]), key, rate) @ p["down"]
        return h, averaged(mean, x)

    def apply(params, stats, tokens, key, rate, wrap):
        x = params["embed"][tokens] * dim**0.5
        keys = None if key is None else jax.random.split(key, LAYERS)
        scanned = (params["blocks"], stats["mean"], keys)
        x, means = jax.lax.scan(wrap(functools.partial(layer, rate)), x, scanned)
        x, new = norm(x, params["norm"]), {"mean": means, "seen": stats["seen"] + 1}
        if chunked:
            return in_chunks(x, params["embed"], tokens), new, scale_of(x)
        logits = x @ params["embed"].T
        return next_token(logits, tokens), new, scale_of(logits)

    return Subject(params, stats, apply, some_tokens)


EXPERTS = {48: 12, 37: 11}  # by the size of a layer: over 8 devices, some have fewer, or none


def mixture(sizes: Sizes) -> Subject:
    """A loop over stacked layers with experts. Tokens choose them by their numbers: rounding turns
    no choice. None is dropped, so that all tokens of a batch are as those of one device."""
    dim, hidden, vocab = sizes
    experts, rng = EXPERTS[dim], np.random.default_rng(3)
    blocks = {
        "norm": np.ones((LAYERS, dim), np.float32),
        "router": normal(rng, LAYERS, dim, experts),
        "experts": {
            "up": normal(rng, LAYERS, experts, dim, hidden),
            "down": normal(rng, LAYERS, experts, hidden, dim),
        },
    }
    params = {"embed": normal(rng, vocab, dim), "blocks": blocks}

    def layer(rate, tokens, x, scanned):
        p, mean, key, turn = scanned
        h = norm(centred(x, mean), p["norm"])
        h = h + attended(h, h)
        rows, number = h.reshape(-1, dim), ((3 * tokens + turn) % experts).reshape(-1)
        share = jax.nn.sigmoid(jnp.take_along_axis(rows @ p["router"], number[:, None], 1))
        order, counts = number.argsort(), jnp.bincount(number, length=experts)
        up = jnp.tanh(jax.lax.ragged_dot(rows[order], p["experts"]["up"], counts))
        down = jax.lax.ragged_dot(dropout(up, key, rate), p["experts"]["down"], counts)
        return x + (share * down[order.argsort()]).reshape(x.shape), averaged(mean, x)

    def apply(params, stats, tokens, key, rate, wrap):
        x = params["embed"][tokens] * dim**0.5
        keys = None if key is None else jax.random.split(key, LAYERS)
        scanned = (params["blocks"], stats["mean"], keys, jnp.arange(LAYERS))
        x, means = jax.lax.scan(wrap(functools.partial(layer, rate, tokens)), x, scanned)
        logits = x @ params["embed"].T
        new = {"mean": means, "seen": stats["seen"] + 1}
        return next_token(logits, tokens), new, scale_of(logits)

    return Subject(params, zeros(LAYERS, dim), apply, some_tokens)


# -- Flax linen


class LinenBlock(nn.Module):
    hidden: int
    rate: Any

    @nn.compact
    def __call__(self, x):
        mean = self.variable("stats", "mean", jnp.zeros, x.shape[-1:])
        h = nn.LayerNorm(use_bias=False)(centred(x, mean.value))
        h = nn.Dense(self.hidden)(attended(h, h))
        mean.value = averaged(mean.value, x)
        key = self.make_rng("dropout") if self.has_rng("dropout") else None
        return x + nn.Dense(x.shape[-1])(dropout(nn.tanh(h), key, self.rate))


class Linen(nn.Module):
    """Layers in a Python loop, with dropout by depth, between an embedding and a head that also
    reads what the second layer returns."""

    sizes: Sizes
    wrap: Callable
    rate: Any = 0.0

    @nn.compact
    def __call__(self, tokens):
        dim, hidden, vocab = self.sizes
        hidden_states, block = [nn.Embed(vocab, dim)(tokens)], self.wrap(LinenBlock)
        for i in range(3):  # the fewest that are rolled up
            rate = self.rate * (i + 1) / 3
            hidden_states.append(block(hidden, rate, name=f"block{i}")(hidden_states[-1]))
        seen = self.variable("stats", "seen", jnp.int32, 0)
        seen.value += 1
        return nn.Dense(vocab)(hidden_states[-1] + hidden_states[2])


class ConvNet(nn.Module):
    """Batch statistics of the part of the batch that is there, as Flax's own layer has them."""

    sizes: Sizes
    wrap: Callable
    rate: Any = 0.0

    @nn.compact
    def __call__(self, x):
        dim, hidden, _ = self.sizes
        conv = self.wrap(nn.Conv)
        x = conv(dim, (3, 3), use_bias=False, name="first")(x)  # BatchNorm would undo a bias
        x = nn.silu(nn.BatchNorm(use_running_average=False, momentum=0.9, epsilon=0.1)(x))
        key = self.make_rng("dropout") if self.has_rng("dropout") else None
        x = nn.silu(conv(hidden, (3, 3), strides=2, name="second")(dropout(x, key, self.rate)))
        return nn.Dense(CLASSES)(x.mean((1, 2)))


def linen(kind: type[nn.Module], sizes: Sizes) -> tuple[Any, Any, Callable]:
    """Parameters, statistics, and a function from these and inputs to logits and statistics."""
    of_images = kind is ConvNet
    inputs = jnp.zeros((1, SIDE, SIDE, 3)) if of_images else jnp.zeros((1, TOKENS), int)
    shapes = jax.eval_shape(kind(sizes, lambda f: f).init, jax.random.key(0), inputs)
    stats = "batch_stats" if of_images else "stats"
    start = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes[stats])

    def logits(params, given, x, key, rate, wrap):
        rngs = {} if key is None else {"dropout": key}
        model = kind(sizes, nn.remat if wrap is jax.checkpoint else wrap, rate)
        variables = {"params": params, stats: given}
        out, new = model.apply(variables, x, rngs=rngs, mutable=[stats])
        return out, new[stats]

    return filled(shapes["params"]), start, logits


def transformer(sizes: Sizes) -> Subject:
    params, stats, logits_of = linen(Linen, sizes)

    def apply(params, stats, tokens, key, rate, wrap):
        logits, new = logits_of(params, stats, tokens, key, rate, wrap)
        return next_token(logits, tokens), new, scale_of(logits)

    return Subject(params, stats, apply, some_tokens)


def convnet(sizes: Sizes) -> Subject:
    params, stats, logits_of = linen(ConvNet, sizes)

    def inputs(rng, rows):
        images = normal(rng, rows, SIDE, 1, SIDE, 3).reshape(rows, SIDE, SIDE, 3)
        return {"image": images, "label": rng.integers(0, CLASSES, rows, np.int32)}

    def apply(params, stats, x, key, rate, wrap):
        logits, new = logits_of(params, stats, x["image"], key, rate, wrap)
        wide = logits.astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(wide, x["label"])
        return losses, new, scale_of(logits)

    return Subject(params, stats, apply, inputs)


# -- models that are objects, and models that are pytrees


class NnxBlock(nnx.Module):
    def __init__(self, dim, hidden, rngs):
        self.norm = nnx.RMSNorm(dim, rngs=rngs)
        self.up = nnx.Linear(dim, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, dim, rngs=rngs)

    def __call__(self, x):
        h = self.norm(x)
        return x + self.down(nnx.tanh(self.up(attended(h, h))))


class Nnx(nnx.Module):
    def __init__(self, sizes, rngs):
        dim, hidden, vocab = sizes
        self.embed = nnx.Embed(vocab, dim, rngs=rngs)
        block = lambda rngs: NnxBlock(dim, hidden, rngs)
        self.blocks = nnx.split_rngs(splits=LAYERS)(nnx.vmap(block))(rngs)
        self.head = nnx.Linear(dim, vocab, rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros(dim))
        self.seen = nnx.Variable(jnp.int32(0))


def nnx_model(sizes: Sizes) -> Subject:
    graphdef, params, _ = nnx.split(nnx.eval_shape(lambda: Nnx(sizes, nnx.Rngs(0))), nnx.Param, ...)

    def apply(model, stats, tokens, key, rate, wrap):
        x = model.embed(tokens)
        new = {"mean": averaged(stats["mean"], x), "seen": stats["seen"] + 1}
        x = dropout(centred(x, stats["mean"]), key, rate)
        call = (nnx.remat if wrap is jax.checkpoint else wrap)(NnxBlock.__call__)
        x = nnx.scan(call, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(model.blocks, x)
        logits = model.head(x)
        return next_token(logits, tokens), new, scale_of(logits)

    stats = zeros(sizes[0])
    model_of = lambda params: nnx.merge(graphdef, params, stats)
    return Subject(filled(nnx.to_pure_dict(params)), stats, apply, some_tokens, model_of)


def equinox_model(sizes: Sizes) -> Subject:
    import equinox as eqx

    dim, hidden, vocab = sizes

    class Block(eqx.Module):
        up: eqx.nn.Linear
        down: eqx.nn.Linear

        def __init__(self, key):
            up, down = jax.random.split(key)
            self.up = eqx.nn.Linear(dim, hidden, key=up)
            self.down = eqx.nn.Linear(hidden, dim, key=down)

        def __call__(self, x):
            return x + self.down(jnp.tanh(self.up(x)))

    class Model(eqx.Module):
        embed: eqx.nn.Embedding
        blocks: Block
        head: eqx.nn.Linear

        def __init__(self, key):
            embed, blocks, head = jax.random.split(key, 3)
            self.embed = eqx.nn.Embedding(vocab, dim, key=embed)
            self.blocks = eqx.filter_vmap(Block)(jax.random.split(blocks, LAYERS))
            self.head = eqx.nn.Linear(dim, vocab, key=head)

    shapes = eqx.filter_eval_shape(Model, jax.random.key(0))
    params, static = eqx.partition(shapes, lambda leaf: hasattr(leaf, "shape"))

    def apply(model, stats, tokens, key, rate, wrap):
        each = lambda layer: jax.vmap(jax.vmap(layer))
        x = each(model.embed)(tokens)
        new = {"mean": averaged(stats["mean"], x), "seen": stats["seen"] + 1}
        layers, rest = eqx.partition(model.blocks, eqx.is_array)
        layer = wrap(lambda x, one: (each(eqx.combine(one, rest))(attended(x, x)), None))
        x, _ = jax.lax.scan(layer, dropout(centred(x, stats["mean"]), key, rate), layers)
        logits = each(model.head)(x)
        return next_token(logits, tokens), new, scale_of(logits)

    stats = zeros(dim)
    model_of = lambda params: eqx.combine(params, static)
    return Subject(filled(params), stats, apply, some_tokens, model_of)


MODELS = {
    "gpt": gpt,
    "chunks": functools.partial(gpt, chunked=True),
    "mixture": mixture,
    "mlp": mlp,
    "linen": transformer,
    "convnet": convnet,
    "nnx": nnx_model,
    "equinox": equinox_model,
}


@functools.cache
def subject(model: str, is_odd: bool) -> Subject:
    return MODELS[model](SIZES["odd" if is_odd else "even"])
