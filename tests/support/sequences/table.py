"""The table of losses of sequences, and what most of them stand on.

A case is a loss for one device: it knows of no mesh. Sizes differ, so that a dimension that is
taken for another shows.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

# 24 tokens are whole blocks on 4 and 8 devices. The last of 7 has none that counts.
ROWS, TOKENS, DIM, HEADS, HIDDEN, VOCAB, LAYERS = 4, 24, 16, 2, 32, 37, 2
# What a case expects: that devices exchange what mixes tokens and no more; that an operand is made
# whole, for which there is no rule; or that, where chunks of tokens end between devices.
SPLIT, GATHERS, UNEVEN = "split", "gathers", "gathers where uneven"


@dataclasses.dataclass(frozen=True)
class Case:
    params: Any
    loss: Callable[..., Any]  # of parameters, a batch, and a key where there is one
    batch: Any
    rng: jax.Array | None = None
    has_aux: bool = False
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)  # the loss updates them
    specs: Any = None  # batch_specs


class Row(NamedTuple):
    mixes: str  # what mixes tokens
    expects: str
    make: Callable[[], Case]


CASES: dict[str, Row] = {}


def case(mixes: str, expects: str = SPLIT) -> Callable[..., Any]:
    """Adds a function that makes a case to the table."""

    def add(make: Callable[[], Case]) -> Callable[[], Case]:
        CASES[make.__name__] = Row(mixes, expects, functools.cache(make))
        return make

    return add


def draw(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return draw(seed).normal(size=shape).astype(np.float32)


def tokens(length: int = TOKENS, rows: int = ROWS, seed: int = 0) -> np.ndarray:
    return draw(seed).integers(0, VOCAB, (rows, length), np.int32)


def filled(shapes: Any, seed: int = 2) -> Any:
    """Parameters of these shapes: initializers would take longer than the losses."""
    rng = draw(seed)

    def fill(path, leaf):
        x = rng.normal(size=leaf.shape).astype(np.float32)
        if leaf.ndim > 1:
            return x / np.float32(leaf.shape[-2] ** 0.5)
        return 0.2 * x + np.float32("scale" in jax.tree_util.keystr(path))

    return jax.tree_util.tree_map_with_path(fill, shapes)


def weights(**shapes: tuple[int, ...]) -> dict[str, Any]:
    return filled({name: jax.ShapeDtypeStruct(of, np.float32) for name, of in shapes.items()})


def initialized(init: Callable[..., Any], *args: Any) -> Any:
    return filled(jax.eval_shape(init, jax.random.key(0), *args))


# -- a transformer in plain JAX


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale


def heads_of(x: jax.Array, heads: int = HEADS) -> jax.Array:
    return x.reshape(*x.shape[:-1], heads, -1)


def transformer_params(**mixer: tuple[int, ...]) -> dict[str, Any]:
    """Of an embedding and stacked layers; `mixer` has the shapes of what mixes tokens in one."""
    layer = {
        "scale1": (DIM,), "scale2": (DIM,), "up": (DIM, HIDDEN), "down": (HIDDEN, DIM), **mixer,
    }  # fmt: skip
    blocks = weights(**{name: (LAYERS, *shape) for name, shape in layer.items()})
    blocks |= {name: 1 + blocks[name] / 4 for name in ("scale1", "scale2")}
    return weights(embed=(VOCAB, DIM), scale=(DIM,)) | {"blocks": blocks}


def layer_of(mix: Callable[..., Any], act: Callable[..., Any]) -> Callable[..., Any]:
    def layer(x, p):
        x = x + mix(p, norm(x, p["scale1"]))
        return x + act(norm(x, p["scale2"]) @ p["up"]) @ p["down"], None

    return layer


def hidden_states(
    params: Any,
    x: jax.Array,
    mix: Callable[..., Any],
    act: Callable[..., Any] = jax.nn.gelu,
) -> jax.Array:
    x, _ = jax.lax.scan(jax.checkpoint(layer_of(mix, act)), x, params["blocks"])
    return norm(x, params["scale"])


def next_token_loss(logits: jax.Array, ids: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:])
    return losses.mean()


def language_model(
    mix: Callable[..., Any], act: Callable[..., Any] = jax.nn.gelu, **mixer: tuple[int, ...]
) -> Case:
    """A tied language model, with labels that are shifted in its loss."""

    def loss(params, ids):
        x = hidden_states(params, params["embed"][ids], mix, act)
        return next_token_loss(x @ params["embed"].T, ids)

    return Case(transformer_params(**mixer), loss, tokens())


ATTENTION: dict[str, tuple[int, ...]] = {"qkv": (DIM, 3 * DIM), "out": (DIM, DIM)}


def qkv_of(p: Any, x: jax.Array) -> list[jax.Array]:
    return [heads_of(part) for part in jnp.split(x @ p["qkv"], 3, -1)]


def causal(p: Any, x: jax.Array) -> jax.Array:
    q, k, v = qkv_of(p, x)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["out"]


def softmax_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: Any = True) -> jax.Array:
    """As written by hand."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    probs = jax.nn.softmax(jnp.where(mask, scores, -1e9), -1)
    return jnp.einsum("bhqk,bkhd->bqhd", probs, v).reshape(*q.shape[:2], -1)
