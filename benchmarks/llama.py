"""Llamas: rotary positions, grouped-query attention, SwiGLU, a head of their own."""

import dataclasses

import jax
import jax.numpy as jnp

from zerojax._forecast import presets as _presets


@dataclasses.dataclass(frozen=True)
class Llama(_presets.Decoder):
    kv_heads: int = 8
    inner: int = 14336

    def dims(self):
        n, d, kv = self.layers, self.hidden, self.hidden // self.heads * self.kv_heads
        blocks = {
            "norm1": (n, d),
            "q": (n, d, d),
            "k": (n, d, kv),
            "v": (n, d, kv),
            "proj": (n, d, d),
            "norm2": (n, d),
            "gate": (n, d, self.inner),
            "up": (n, d, self.inner),
            "down": (n, self.inner, d),
        }
        head = {"embed": (self.vocab, d), "norm": (d,), "head": (d, self.vocab)}
        return {**head, "blocks": blocks}

    def embedded(self, params, tokens):
        return params["embed"][tokens]

    def logits(self, params, x):
        return _rms_norm(x, params["norm"]) @ params["head"]

    def layer(self, x, p):
        rows, tokens, dim = x.shape
        h = _rms_norm(x, p["norm1"])
        q, k, v = ((h @ p[name]).reshape(rows, tokens, -1, dim // self.heads) for name in "qkv")
        attended = jax.nn.dot_product_attention(_rotated(q), _rotated(k), v, is_causal=True)
        x = x + attended.reshape(rows, tokens, dim) @ p["proj"]
        h = _rms_norm(x, p["norm2"])
        return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"], None


def _rms_norm(x, scale):
    wide = x.astype(jnp.float32)
    mean_square = jnp.square(wide).mean(-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + 1e-5) * scale).astype(x.dtype)


def _rotated(x):
    """Rotary position embedding of (rows, tokens, heads, features)."""
    tokens, features = x.shape[1], x.shape[3]
    rates = 500000.0 ** (-jnp.arange(0, features, 2) / features)
    angles = jnp.arange(tokens)[:, None, None] * rates
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


PRESETS = {
    "llama-8b": Llama(32, 4096, 32, vocab=128256),
    "llama-13b": Llama(40, 5120, 40, vocab=32000, inner=13824),
    "llama-70b": Llama(80, 8192, 64, vocab=128256, inner=28672),
}
