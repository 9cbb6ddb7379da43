"""ViT-g/14 on images of 224 x 224: a scan over encoder layers, as in big_vision."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from zerojax.tools._forecast import presets as _presets


@dataclasses.dataclass(frozen=True)
class Vit(_presets.Gpt):
    """A ViT with learned positions and biases, which classifies the mean of its tokens."""

    inner: int = 0
    patch: int = 14 * 14 * 3
    classes: int = 1000

    def dims(self):
        n, d = self.layers, self.hidden
        blocks = {
            "norm1": {"scale": (n, d), "bias": (n, d)},
            "qkv": {"kernel": (n, d, 3 * d), "bias": (n, 3 * d)},
            "proj": {"kernel": (n, d, d), "bias": (n, d)},
            "norm2": {"scale": (n, d), "bias": (n, d)},
            "up": {"kernel": (n, d, self.inner), "bias": (n, self.inner)},
            "down": {"kernel": (n, self.inner, d), "bias": (n, d)},
        }
        return {
            "embed": {"kernel": (self.patch, d), "bias": (d,)}, "pos": (self.tokens, d),
            "norm": {"scale": (d,), "bias": (d,)}, "blocks": blocks,
            "head": {"kernel": (d, self.classes), "bias": (self.classes,)},
        }  # fmt: skip

    def batch(self, rows):
        return {
            "patches": jax.ShapeDtypeStruct((rows, self.tokens, self.patch), self.compute),
            "label": jax.ShapeDtypeStruct((rows,), jnp.int32),
        }

    def loss(self, params, batch, remat="full"):
        params = jax.tree.map(lambda leaf: leaf.astype(self.compute), params)
        x = dense(params["embed"], batch["patches"]) + params["pos"]
        x, _ = jax.lax.scan(self._rematted(remat), x, params["blocks"])
        pooled = norm(params["norm"], x).mean(1)
        logits = dense(params["head"], pooled).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    def layer(self, x, p):
        rows, tokens, dim = x.shape
        qkv = dense(p["qkv"], norm(p["norm1"], x)).reshape(rows, tokens, 3, self.heads, -1)
        attended = jax.nn.dot_product_attention(*(qkv[:, :, i] for i in range(3)))
        x = x + dense(p["proj"], attended.reshape(rows, tokens, dim))
        return x + dense(p["down"], jax.nn.gelu(dense(p["up"], norm(p["norm2"], x)))), None


def dense(p, x):
    return x @ p["kernel"] + p["bias"]


def norm(p, x):
    return (jax.nn.standardize(x.astype(jnp.float32)) * p["scale"] + p["bias"]).astype(x.dtype)


PRESETS = {"vit-g": Vit(40, 1408, 16, tokens=256, inner=6144)}
