"""A small mixture of experts, in one layer or a scan over several: one-hot dispatch into rooms for
all tokens, so that the loss is a mean over rows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TOKENS = 4


def params(
    experts: int = 8, layers: int = 0, width: int = 12, inner: int = 20, in_list: bool = False
) -> Any:
    """One layer, a stack of several, or a list of these."""
    draw, lead = np.random.default_rng(0), (layers,) * bool(layers)

    def normal(*shape: int) -> np.ndarray:
        return 0.3 * draw.normal(size=shape).astype("f")

    layer = {
        "mix": normal(*lead, width, width),
        "router": normal(*lead, width, experts),
        "experts": {
            "up": normal(*lead, experts, width, inner),
            "bias": normal(*lead, experts, inner),
            "down": normal(*lead, experts, inner, width),
        },
    }
    several = [jax.tree.map(lambda x: x[at], layer) for at in range(layers)] if in_list else layer
    return jax.tree.map(jnp.asarray, {"embed": normal(16, width), "layers": several})


def batch(rows: int = 16) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.integers(0, 16, (rows, TOKENS))
    return {"x": x, "y": random.normal(size=(rows, TOKENS)).astype(np.float32)}


def layer(p: Any, x: jax.Array) -> jax.Array:
    x = x + jnp.tanh(x @ p["mix"])
    tokens = x.reshape(-1, x.shape[-1])
    odds = jax.nn.softmax(tokens @ p["router"])
    to = jax.nn.one_hot(jnp.argmax(odds, -1), odds.shape[-1], dtype=jnp.int32)
    rooms = jax.nn.one_hot(jnp.cumsum(to, 0) * to - 1, len(tokens), dtype=x.dtype)
    inside = jnp.einsum("tec,td->ecd", rooms, tokens)
    experts = p["experts"]
    inside = jax.nn.gelu(
        jnp.einsum("ecd,edf->ecf", inside, experts["up"]) + experts["bias"][:, None]
    )
    outside = jnp.einsum("ecf,efd->ecd", inside, experts["down"])
    tokens = tokens + jnp.einsum("tec,te,ecd->td", rooms, odds, outside)
    return tokens.reshape(x.shape)


def loss(p: Any, batch: Any) -> jax.Array:
    x, layers = p["embed"][batch["x"]], p["layers"]
    if isinstance(layers, list):
        x = functools.reduce(lambda x, p: layer(p, x), layers, x)
    elif layers["router"].ndim == 3:
        x = jax.lax.scan(lambda x, p: (layer(p, x), None), x, layers)[0]
    else:
        x = layer(layers, x)
    return jnp.mean((jnp.mean(x, -1) - batch["y"]) ** 2)
