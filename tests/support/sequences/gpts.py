"""Language models in the libraries that people write them in."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from tests.support.sequences import table as _t
from tests.support.sequences.table import (
    DIM,
    HEADS,
    HIDDEN,
    LAYERS,
    TOKENS,
    VOCAB,
    Case,
    case,
    initialized,
    next_token_loss,
)

# -- Flax linen


def rope(x):
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 100 ** (jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def grouped(q, k, v):
    """Queries in groups, each of which has a head of keys and values."""
    rows, length, heads, dim = q.shape
    q = q.reshape(rows, length, k.shape[2], -1, dim)
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k) / dim**0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    o = jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(scores, -1), v)
    return o.reshape(rows, length, heads, dim)


def repeated(q, k, v):
    """Heads of keys and values, once for each query of their group."""
    k, v = (jnp.repeat(a, q.shape[2] // k.shape[2], axis=2) for a in (k, v))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    attention: Callable[..., Any]
    flat: bool = False

    @nn.compact
    def __call__(self, x, _=None):
        h = nn.RMSNorm()(x)
        dense = lambda heads: nn.DenseGeneral((heads, 4), use_bias=False)
        q, k, v = dense(6)(h), dense(2)(h), dense(2)(h)
        o = self.attention(rope(q), rope(k), v)
        x = x + nn.DenseGeneral(DIM, axis=(-2, -1), use_bias=False)(o)
        h = nn.RMSNorm()(x)
        h = h.reshape(-1, DIM) if self.flat else h
        h = nn.silu(nn.Dense(HIDDEN)(h)) * nn.Dense(HIDDEN)(h)
        return x + nn.Dense(DIM)(h).reshape(x.shape), None


class GPT(nn.Module):
    attention: Callable[..., Any]
    scanned: bool = False

    @nn.compact
    def __call__(self, ids):
        embed = nn.Embed(VOCAB, DIM)
        x = embed(ids)
        block = nn.remat(Block, prevent_cse=not self.scanned)
        if self.scanned:
            layers = nn.scan(
                block, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS
            )
            x, _ = layers(self.attention)(x, None)
        else:
            for _ in range(LAYERS):
                x, _ = block(self.attention, flat=True)(x)
        return embed.attend(nn.RMSNorm()(x))


def linen(model: nn.Module) -> Case:
    params = initialized(model.init, _t.tokens())["params"]
    loss = lambda params, ids: next_token_loss(model.apply({"params": params}, ids), ids)
    return Case(params, loss, _t.tokens())


@case("keys and values")
def linen_scan_grouped() -> Case:
    return linen(GPT(grouped, scanned=True))


@case("keys and values")
def linen_loop_repeated() -> Case:
    """Also reshapes to (rows * tokens, dim)."""
    return linen(GPT(repeated))


class FlaxAttention(nn.Module):
    """Of the library's layers: a mask that it makes, learned positions, dropout."""

    rate: float = 0.0

    @nn.compact
    def __call__(self, ids):
        position = nn.Embed(TOKENS, DIM)(jnp.arange(ids.shape[1]))
        x = nn.Embed(VOCAB, DIM)(ids) + position
        mask = nn.make_causal_mask(ids)
        drop = lambda x: nn.Dropout(self.rate, deterministic=not self.rate)(x)
        for _ in range(LAYERS):
            attention = nn.MultiHeadDotProductAttention(
                HEADS, dropout_rate=self.rate, deterministic=not self.rate
            )
            x = x + drop(attention(nn.LayerNorm()(x), mask=mask))
            h = nn.Dense(DIM)(nn.gelu(nn.Dense(HIDDEN)(nn.LayerNorm()(x))))
            x = x + drop(h)
        return nn.Dense(VOCAB)(nn.LayerNorm()(x))


@case("keys and values")
def linen_attention() -> Case:
    return linen(FlaxAttention())


@case("keys and values")
def linen_dropout() -> Case:
    """Of attention, too: drawn for whole rows, so that devices draw the same."""
    model = FlaxAttention(0.2)
    params = initialized(lambda key, ids: FlaxAttention().init(key, ids), _t.tokens())["params"]

    def loss(params, ids, rng):
        return next_token_loss(model.apply({"params": params}, ids, rngs={"dropout": rng}), ids)

    return Case(params, loss, _t.tokens(), rng=jax.random.key(5))


# -- Flax nnx


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm1 = nnx.LayerNorm(DIM, rngs=rngs)
        self.norm2 = nnx.LayerNorm(DIM, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, DIM, decode=False, rngs=rngs)
        self.up = nnx.Linear(DIM, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, DIM, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class NnxGPT(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.positions = nnx.Param(jnp.zeros((TOKENS, DIM)))
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(DIM, rngs=rngs)

    def __call__(self, ids):
        x = self.embed(ids) + self.positions[: ids.shape[1]]
        mask = nnx.make_causal_mask(ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.embed.attend(self.norm(x))


@case("keys and values")
def nnx_loop() -> Case:
    shapes = nnx.eval_shape(lambda: NnxGPT(nnx.Rngs(0)))
    graphdef, params, _ = nnx.split(shapes, nnx.Param, ...)
    loss = lambda params, ids: next_token_loss(nnx.merge(graphdef, params)(ids), ids)
    return Case(_t.filled(params), loss, _t.tokens())


# -- Equinox


@case("keys and values")
def equinox() -> Case:
    """Written for one row, and for one token where that is enough."""
    eqx = pytest.importorskip("equinox", reason="the Equinox tests need equinox")

    class Block(eqx.Module):
        norms: list
        attention: Any
        mlp: Any

        def __init__(self, key):
            a, b = jax.random.split(key)
            self.norms = [eqx.nn.LayerNorm(DIM), eqx.nn.LayerNorm(DIM)]
            self.attention = eqx.nn.MultiheadAttention(HEADS, DIM, key=a)
            self.mlp = eqx.nn.MLP(DIM, DIM, HIDDEN, 1, jax.nn.gelu, key=b)

        def __call__(self, x):
            h = jax.vmap(self.norms[0])(x)
            mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
            x = x + self.attention(h, h, h, mask=mask)
            return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))

    class Model(eqx.Module):
        embed: Any
        blocks: list
        head: Any

        def __init__(self, key):
            embed, head, *layers = jax.random.split(key, LAYERS + 2)
            self.embed = eqx.nn.Embedding(VOCAB, DIM, key=embed)
            self.blocks = [Block(layer) for layer in layers]
            self.head = eqx.nn.Linear(DIM, VOCAB, key=head)

        def __call__(self, ids):
            x = jax.vmap(self.embed)(ids)
            for block in self.blocks:
                x = block(x)
            return jax.vmap(self.head)(x)

    params, static = eqx.partition(eqx.filter_eval_shape(Model, jax.random.key(0)), is_array)

    def loss(params, ids):
        return next_token_loss(jax.vmap(eqx.combine(params, static))(ids), ids)

    return Case(_t.filled(params), loss, _t.tokens())


def is_array(leaf):
    return isinstance(leaf, jax.ShapeDtypeStruct)


# -- Haiku


@case("keys and values")
def haiku() -> Case:
    hk = pytest.importorskip("haiku", reason="the Haiku tests need dm-haiku")
    layer_norm = lambda x: hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)

    def block(x):
        mask = jnp.tril(jnp.ones((1, 1, x.shape[1], x.shape[1])))
        init = hk.initializers.VarianceScaling()
        h = layer_norm(x)
        x = x + hk.MultiHeadAttention(HEADS, DIM // HEADS, w_init=init, model_size=DIM)(
            h, h, h, mask=mask
        )
        return x + hk.Linear(DIM)(jax.nn.gelu(hk.Linear(HIDDEN)(layer_norm(x))))

    def model(ids):
        x = hk.Embed(VOCAB, DIM)(ids)
        for _ in range(LAYERS):
            x = hk.remat(block)(x)
        return hk.Linear(VOCAB)(layer_norm(x))

    net = hk.without_apply_rng(hk.transform(model))
    params = initialized(net.init, _t.tokens())
    return Case(params, lambda p, ids: next_token_loss(net.apply(p, ids), ids), _t.tokens())


# -- plain JAX


@case("keys and values")
def plain_loop() -> Case:
    """Layers in a list; one more token than the model reads, and swiglu."""

    def loss(params, ids):
        x, labels = params["embed"][ids[:, :-1]], ids[:, 1:]
        for p in params["layers"]:
            x = x + jax.checkpoint(_t.causal)(p, _t.norm(x, p["scale1"]))
            h = _t.norm(x, p["scale2"])
            x = x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
        logits = _t.norm(x, params["scale"]) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    params = _t.transformer_params(**_t.ATTENTION, gate=(DIM, HIDDEN))
    blocks = params.pop("blocks")
    params["layers"] = [{name: x[i] for name, x in blocks.items()} for i in range(LAYERS)]
    return Case(params | _t.weights(head=(DIM, VOCAB)), loss, _t.tokens(TOKENS + 1))


@case("keys and values")
def plain_relu() -> Case:
    """As many tokens as dimensions, and a dimension of rows that a vmap takes."""

    def loss(params, ids):
        def of_row(ids):
            x = params["embed"][ids][None]
            x = _t.hidden_states(params, x, _t.causal, jax.nn.relu)
            return next_token_loss(x @ params["embed"].T, ids[None])

        return jax.vmap(of_row)(ids).mean()

    return Case(_t.transformer_params(**_t.ATTENTION), loss, _t.tokens(DIM))
