"""Models whose layers are a Python loop: parameters, and a loss of them, tokens and a key."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

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


class Residual(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x):
        strides = self.features // x.shape[-1]
        y = nn.Conv(self.features, (3,), strides, use_bias=False)(x)
        y = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9)(y))
        return y + (x if strides == 1 else nn.Conv(self.features, (1,), strides)(x))


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(8, (3,))(x[..., None] / 64.0)
        for features in [8] * 3 + [16] * 4:
            x = Residual(features)(x)
        return x


def resnet(_):
    model = ResNet()
    variables = drawn(model.init, KEY, TOKENS)

    def loss(params, x, _, batch_stats):
        variables = {"params": params, "batch_stats": batch_stats}
        x, new = model.apply(variables, x, mutable="batch_stats")
        return jnp.mean((x - 1) ** 2), {"batch_stats": new["batch_stats"]}

    return variables["params"], loss, variables["batch_stats"]
