"""Models with two lengths, models that are not causal, and models of images."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import zerojax
from tests.support.sequences import table as _t
from tests.support.sequences.table import (
    ATTENTION,
    DIM,
    HEADS,
    HIDDEN,
    ROWS,
    TOKENS,
    UNEVEN,
    VOCAB,
    Case,
    case,
    heads_of,
    hidden_states,
    initialized,
    next_token_loss,
    qkv_of,
    softmax_attention,
    weights,
)

cross_entropy = optax.softmax_cross_entropy_with_integer_labels

# -- BERT


class Bert(nn.Module):
    """Embeddings of words, positions and segments; a mask of padding; a head of words that shares
    the table, and one that reads the first token."""

    @nn.compact
    def __call__(self, batch):
        ids, real = batch["ids"], batch["mask"]
        words = nn.Embed(VOCAB, DIM)
        x = words(ids) + nn.Embed(TOKENS, DIM)(jnp.arange(ids.shape[1]))
        x = nn.LayerNorm()(x + nn.Embed(2, DIM)(batch["segments"]))
        mask = nn.make_attention_mask(real, real)
        x = nn.LayerNorm()(x + nn.MultiHeadDotProductAttention(HEADS)(x, x, mask=mask))
        x = nn.LayerNorm()(x + nn.Dense(DIM)(nn.gelu(nn.Dense(HIDDEN)(x))))
        pooled = nn.tanh(nn.Dense(DIM)(x[:, 0]))
        return words.attend(nn.gelu(nn.Dense(DIM)(x))), nn.Dense(2)(pooled)


def bert_batch():
    lengths = np.array([24, 13, 5, 20])[:, None]
    at = np.arange(TOKENS)
    ids = _t.tokens()
    return {
        "ids": np.where((at % 6 == 2), VOCAB - 1, ids),
        "labels": ids,
        "mask": (at < lengths).astype(np.float32),
        "chosen": (at % 6 == 2) & (at < lengths),
        "segments": (at >= lengths // 2).astype(np.int32),
        "follows": np.array([0, 1, 1, 0], np.int32),
    }


@case("keys and values, the first token")
def bert() -> Case:
    """Words that are masked, and whether the second sentence follows the first."""
    model, batch = Bert(), bert_batch()

    def loss(params, batch):
        words, follows = model.apply({"params": params}, batch)
        words = zerojax.mean(cross_entropy(words, batch["labels"]), where=batch["chosen"])
        return words + cross_entropy(follows, batch["follows"]).mean()

    return Case(initialized(model.init, batch)["params"], loss, batch)


@case("keys and values, the first token")
def class_token() -> Case:
    """A learned token in front of each row, so that there are 25."""

    def loss(params, batch):
        first = jnp.broadcast_to(params["first"], (len(batch["x"]), 1, DIM))
        x = jnp.concatenate([first, batch["x"]], axis=1)
        x = hidden_states(params, x, bidirectional)
        return cross_entropy(x[:, 0] @ params["classes"], batch["label"]).mean()

    batch = {"x": _t.normal(ROWS, TOKENS, DIM), "label": np.array([0, 4, 2, 1], np.int32)}
    params = _t.transformer_params(**ATTENTION) | weights(first=(1, DIM), classes=(DIM, 5))
    return Case(params, loss, batch)


def bidirectional(p, x):
    return softmax_attention(*qkv_of(p, x)) @ p["out"]


# -- encoders and decoders


def buckets(ago, count=8, far=20):
    """T5's: the nearest distances have one each, those far away share."""
    side = count // 2 * (ago > 0).astype(jnp.int32)
    ago, exact = jnp.abs(ago), count // 4
    scale = jnp.log(far / exact)
    log = exact + (jnp.log(jnp.maximum(ago, 1) / exact) / scale * exact).astype(jnp.int32)
    return side + jnp.where(ago < exact, ago, jnp.minimum(log, count // 2 - 1))


def crossing(p, x, memory, mask=True):
    q = heads_of(x @ p["q"])
    k, v = (heads_of(part) for part in jnp.split(memory @ p["kv"], 2, -1))
    return softmax_attention(q, k, v, mask) @ p["cross"]


CROSS: dict[str, Any] = {"q": (DIM, DIM), "kv": (DIM, 2 * DIM), "cross": (DIM, DIM)}


@case("keys and values of both lengths")
def t5() -> Case:
    """Sources of 24 tokens, targets of 14."""

    def biased(table, is_causal):
        def mix(p, x):
            at = jnp.arange(x.shape[1])
            bias = jnp.take(table, buckets(at - at[:, None]), axis=0).transpose(2, 0, 1)[None]
            if is_causal:
                bias = bias + jnp.where(at[:, None] >= at, 0, -1e9)
            q, k, v = qkv_of(p, x)
            return jax.nn.dot_product_attention(q, k, v, bias=bias).reshape(x.shape) @ p["out"]

        return mix

    def loss(params, batch):
        source, target = batch["source"], batch["target"]
        x = params["encoder"]["embed"][source]
        memory = hidden_states(params["encoder"], x, biased(params["near"], False), jax.nn.relu)
        mask = (source != 0)[:, None, None]
        alone = biased(params["near"], True)
        mix = lambda p, x: alone(p, x) + crossing(p, x, memory, mask)
        x = params["decoder"]["embed"][target]
        x = hidden_states(params["decoder"], x, mix, jax.nn.relu)
        return next_token_loss(x @ params["decoder"]["embed"].T, target)

    params = {
        "encoder": _t.transformer_params(**ATTENTION),
        "decoder": _t.transformer_params(**ATTENTION, **CROSS),
        "near": weights(near=(8, HEADS))["near"],
    }
    source = np.where(np.arange(TOKENS) < np.array([24, 7, 15, 19])[:, None], _t.tokens(), 0)
    return Case(params, loss, {"source": source, "target": _t.tokens(14, seed=1)})


class Whisper(nn.Module):
    """Two convolutions, the second of stride 2, in front of the encoder: 24 frames become 12."""

    @nn.compact
    def __call__(self, frames, ids):
        x = nn.gelu(nn.Conv(DIM, (3,), padding=1)(frames))
        x = nn.gelu(nn.Conv(DIM, (3,), strides=2, padding=1)(x))
        x = x + self.param("positions", nn.initializers.normal(), (x.shape[1], DIM))
        memory = nn.LayerNorm()(self.layer(x, None, None))
        words = nn.Embed(VOCAB, DIM)
        y = words(ids) + nn.Embed(TOKENS, DIM)(jnp.arange(ids.shape[1]))
        y = self.layer(y, memory, nn.make_causal_mask(ids))
        return words.attend(nn.LayerNorm()(y))

    def layer(self, x, memory, mask):
        x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x), mask=mask)
        if memory is not None:
            x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x), memory)
        return x + nn.Dense(DIM)(nn.gelu(nn.Dense(HIDDEN)(nn.LayerNorm()(x))))


@case("halos of frames, keys and values of both lengths")
def whisper() -> Case:
    model = Whisper()
    batch = {"frames": _t.normal(ROWS, TOKENS, 5), "ids": _t.tokens(15)}
    params = initialized(model.init, batch["frames"], batch["ids"])["params"]

    def loss(params, batch):
        logits = model.apply({"params": params}, batch["frames"], batch["ids"])
        return next_token_loss(logits, batch["ids"])

    return Case(params, loss, batch)


@case("keys and values of 6 latents and of tokens")
def perceiver() -> Case:
    """Learned queries read all tokens, and tokens read them again."""

    def loss(params, batch):
        latents = jnp.broadcast_to(params["latents"], (len(batch), 6, DIM))
        latents = latents + crossing(params["read"], latents, batch)
        latents = latents + jax.nn.gelu(latents @ params["up"]) @ params["down"]
        x = crossing(params["write"], batch, latents)
        return jnp.mean((x - batch) ** 2)

    params = {"read": weights(**CROSS), "write": weights(**CROSS)}
    params |= weights(latents=(6, DIM), up=(DIM, HIDDEN), down=(HIDDEN, DIM))
    return Case(params, loss, _t.normal(ROWS, TOKENS, DIM))


# -- images


class ViT(nn.Module):
    @nn.compact
    def __call__(self, images):
        x = nn.Conv(DIM, (4, 4), strides=(4, 4))(images)
        x = x.reshape(len(x), -1, DIM)
        x = x + self.param("positions", nn.initializers.normal(), (1, x.shape[1], DIM))
        x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x))
        x = x + nn.Dense(DIM)(nn.gelu(nn.Dense(HIDDEN)(nn.LayerNorm()(x))))
        return nn.Dense(5)(nn.LayerNorm()(x).mean(1))


@case("keys and values, a sum over tokens", UNEVEN)
def vit() -> Case:
    """Images are split along their height: 32 lines of 8, in 8 x 2 patches."""
    model = ViT()
    labels = np.array([0, 4, 2, 1], np.int32)
    batch = {"images": _t.normal(ROWS, 32, 8, 3), "labels": labels}

    def loss(params, batch):
        logits = model.apply({"params": params}, batch["images"])
        return cross_entropy(logits, batch["labels"]).mean()

    return Case(initialized(model.init, batch["images"])["params"], loss, batch)


@case("keys and values, a sum over tokens", UNEVEN)
def vit_by_reshape() -> Case:
    """Patches by reshape and transpose, as in MAE."""

    def loss(params, batch):
        images = batch["images"]
        x = images.reshape(len(images), 8, 4, 2, 4, 3).transpose(0, 1, 3, 2, 4, 5)
        patches = x.reshape(len(images), 16, 48)
        x = hidden_states(params, patches @ params["patch"], bidirectional)
        return jnp.mean((x @ params["pixels"] - patches) ** 2)

    params = _t.transformer_params(**ATTENTION) | weights(patch=(48, DIM), pixels=(DIM, 48))
    return Case(params, loss, {"images": _t.normal(ROWS, 32, 8, 3)})


@case("keys and values")
def diffusion() -> Case:
    """DiT: noise and times are drawn by key, and scale, shift and gate each layer."""

    def loss(params, x, rng):
        noise_key, time_key = jax.random.split(rng)
        time = jax.random.uniform(time_key, (len(x), 1, 1))
        noise = jax.random.normal(noise_key, x.shape)
        noisy = (1 - time) * x + time * noise
        angles = time[:, 0] * 10.0 ** (jnp.arange(DIM // 2) / DIM * 2)
        told = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1)
        told = jax.nn.silu(told @ params["time"])

        def mix(p, h):
            scale, shift, gate = jnp.split((told @ p["modulate"])[:, None], 3, -1)
            return gate * bidirectional(p, h * (1 + scale) + shift)

        out = hidden_states(params, noisy @ params["inside"], mix, jax.nn.silu)
        return jnp.mean((out @ params["outside"] - (noise - x)) ** 2)

    layer = {**ATTENTION, "modulate": (DIM, 3 * DIM)}
    ends = weights(time=(DIM, DIM), inside=(6, DIM), outside=(DIM, 6))
    batch = _t.normal(ROWS, TOKENS, 6)
    return Case(_t.transformer_params(**layer) | ends, loss, batch, rng=jax.random.key(6))


# -- statistics of the batch


class Statistics(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(DIM, (3,), use_bias=False)(x)
        x = nn.silu(nn.BatchNorm(use_running_average=False, momentum=0.9, epsilon=0.1)(x))
        return nn.Dense(5)(nn.Conv(HIDDEN, (5,), strides=2)(x).mean(1))


@case("halos, the statistics of a layer", UNEVEN)
def batch_norm() -> Case:
    """A 1-d convolutional network; its statistics are those of all tokens of a device's rows."""
    model = Statistics()
    batch = {"x": _t.normal(ROWS, TOKENS, 6), "label": np.array([3, 4, 2, 0], np.int32)}
    variables = initialized(model.init, batch["x"])
    start = jax.tree.map(np.zeros_like, variables["batch_stats"])

    def loss(params, batch, batch_stats):
        variables = {"params": params, "batch_stats": batch_stats}
        logits, new = model.apply(variables, batch["x"], mutable=["batch_stats"])
        return cross_entropy(logits, batch["label"]).mean(), {"batch_stats": new["batch_stats"]}

    return Case(variables["params"], loss, batch, has_aux=True, fields={"batch_stats": start})
