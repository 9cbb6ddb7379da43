"""Small models and optimizers: the table of steps, configurations and tests of plans use them.

Each model is written for one device and knows nothing of zerojax.
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

ROWS = 64  # examples in a batch: 8 devices x 4 microbatches x 2


@dataclasses.dataclass(frozen=True)
class Model:
    params: Any
    loss: Callable[..., Any]
    batch: Any
    rng: Any = None
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)


def mlp(remat: bool) -> Model:
    k1, k2, kx, ky = jax.random.split(jax.random.key(0), 4)
    params = {
        "in": {"w": jax.random.normal(k1, (24, 64)) / 5, "b": jnp.zeros(64)},
        "out": {"w": jax.random.normal(k2, (64, 8)) / 8, "b": jnp.zeros(8)},
    }

    def loss(params, batch):
        layer = lambda p, x: jnp.tanh(x @ p["w"] + p["b"])
        layer = jax.checkpoint(layer) if remat else layer
        hidden = layer(params["in"], batch["x"])
        out = hidden @ params["out"]["w"] + params["out"]["b"]
        return jnp.mean((out - batch["y"]) ** 2)

    batch = {"x": jax.random.normal(kx, (ROWS, 24)), "y": jax.random.normal(ky, (ROWS, 8))}
    return Model(params, loss, batch)


def gpt_params(layers=3, dim=32, vocab=64, tokens=16, hidden=None):
    hidden = 4 * dim if hidden is None else hidden
    keys = iter(jax.random.split(jax.random.key(1), 8))
    normal = lambda *shape: jax.random.normal(next(keys), shape) * 0.2
    return {
        "embed": normal(vocab, dim),
        "pos": normal(tokens, dim),
        "norm": jnp.ones(dim),
        "blocks": {
            "norm1": jnp.ones((layers, dim)),
            "norm2": jnp.ones((layers, dim)),
            "qkv": normal(layers, dim, 3 * dim),
            "proj": normal(layers, dim, dim),
            "up": normal(layers, dim, hidden),
            "down": normal(layers, hidden, dim),
        },
    }


def norm(x, scale):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * scale


def gpt_block(p, x, heads=4):
    rows, tokens, dim = x.shape
    qkv = norm(x, p["norm1"]) @ p["qkv"]
    q, k, v = (a.reshape(rows, tokens, heads, dim // heads) for a in jnp.split(qkv, 3, -1))
    x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["proj"]
    return x + jax.nn.gelu(norm(x, p["norm2"]) @ p["up"]) @ p["down"]


def gpt_loss(params, tokens, wrap=lambda f: f, heads=4):
    x = params["embed"][tokens] + params["pos"]
    x, _ = jax.lax.scan(wrap(lambda x, p: (gpt_block(p, x, heads), None)), x, params["blocks"])
    logits = norm(x, params["norm"]) @ params["embed"].T  # tied
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    return losses.mean()


def gpt(remat: bool) -> Model:
    # Few distinct tokens, so that embedding rows collect gradients from many places.
    tokens = jax.random.randint(jax.random.key(2), (ROWS, 16), 0, 7)
    wrap = jax.checkpoint if remat else lambda f: f
    return Model(gpt_params(), functools.partial(gpt_loss, wrap=wrap), tokens)


def odd_gpt(rows: int, remat: bool = False) -> Model:
    """A GPT of which every dimension is odd, most of them prime."""
    wrap = jax.checkpoint if remat else lambda f: f
    tokens = jax.random.randint(jax.random.key(2), (rows, 13), 0, 7)
    params = gpt_params(dim=37, vocab=131, tokens=13, hidden=149)
    return Model(params, functools.partial(gpt_loss, wrap=wrap, heads=1), tokens)


class Block(nn.Module):
    dim: int = 32

    @nn.compact
    def __call__(self, x, train: bool):
        h = nn.MultiHeadDotProductAttention(num_heads=4, use_bias=False)(nn.LayerNorm()(x))
        x = x + nn.Dropout(0.1, deterministic=not train)(h)
        h = nn.Dense(self.dim)(nn.gelu(nn.Dense(4 * self.dim)(nn.LayerNorm()(x))))
        return x + nn.Dropout(0.1, deterministic=not train)(h)


class Transformer(nn.Module):
    remat: bool = False

    @nn.compact
    def __call__(self, tokens, train: bool = True):
        block = nn.remat(Block, static_argnums=(2,)) if self.remat else Block
        x = nn.Embed(64, 32)(tokens)
        for i in range(2):
            x = block(name=f"block{i}")(x, train)
        return nn.Dense(64)(nn.LayerNorm()(x))


def transformer(remat: bool) -> Model:
    model = Transformer(remat)
    tokens = jax.random.randint(jax.random.key(3), (ROWS, 12), 0, 64)
    params = model.init(jax.random.key(4), tokens[:1], False)["params"]

    def loss(params, tokens, rng):
        logits = model.apply({"params": params}, tokens, rngs={"dropout": rng})
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
        return losses.mean(), {"logit_scale": jnp.abs(logits).mean()}

    return Model(params, loss, tokens, rng=jax.random.key(5))


class ConvNet(nn.Module):
    axis_name: str | None = None
    remat: bool = False

    @nn.compact
    def __call__(self, x, train: bool = True):
        conv = nn.remat(nn.Conv) if self.remat else nn.Conv
        x = conv(16, (3, 3), use_bias=False)(x)  # a bias here has a mathematically zero gradient
        x = nn.BatchNorm(use_running_average=not train, axis_name=self.axis_name)(x)
        # Smooth: at a ReLU's kink the last bit of a sum decides whether a gradient is there.
        x = nn.silu(x)
        x = nn.silu(conv(32, (3, 3), strides=2)(x)).mean((1, 2))
        return nn.Dense(8)(x)


def convnet(remat: bool, axis_name: str | None = None) -> Model:
    kx, ky = jax.random.split(jax.random.key(6))
    batch = {
        "image": jax.random.normal(kx, (ROWS, 8, 8, 3)),
        "label": jax.random.randint(ky, (ROWS,), 0, 8),
    }
    model = ConvNet(axis_name, remat)
    variables = ConvNet(None, remat).init(jax.random.key(7), batch["image"][:2])

    def loss(params, batch, batch_stats):
        variables = {"params": params, "batch_stats": batch_stats}
        logits, new = model.apply(variables, batch["image"], mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        accuracy = (logits.argmax(-1) == batch["label"]).mean()
        return losses.mean(), {"batch_stats": new["batch_stats"], "accuracy": accuracy}

    return Model(variables["params"], loss, batch, fields={"batch_stats": variables["batch_stats"]})


MODELS = {"mlp": mlp, "gpt": gpt, "transformer": transformer, "convnet": convnet}


def label_params(params: Any) -> Any:
    """Matrices and the rest, for optimizers that treat them apart."""
    return jax.tree.map(lambda p: "matrix" if np.ndim(p) >= 2 else "vector", params)


EPS = 1e-4  # Adam's own 1e-8 turns rounding noise of tiny gradients into steps of full size

OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-3, eps=EPS),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "lion": lambda: optax.lion(1e-4),
    "lamb": lambda: optax.lamb(1e-3, eps=EPS),
    "muon": lambda: optax.contrib.muon(1e-3, eps=EPS),
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "clip_schedule": lambda: optax.chain(
        optax.clip_by_global_norm(0.1),
        optax.scale_by_adam(eps=EPS),
        optax.scale_by_schedule(optax.cosine_decay_schedule(-1e-3, 10)),
    ),
    "multi_steps": lambda: optax.MultiSteps(
        optax.adam(1e-3, eps=EPS), every_k_schedule=2
    ).gradient_transformation(),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-3, warmup_steps=2, eps=EPS),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(
        optax.linear_schedule(1e-3, 1e-4, 10), eps=EPS
    ),
}
