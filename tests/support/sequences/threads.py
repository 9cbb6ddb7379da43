"""Models of which users have reported that a split of sequences trained them wrong elsewhere."""

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
    ROWS,
    TOKENS,
    Case,
    case,
    heads_of,
    hidden_states,
    next_token_loss,
    qkv_of,
    softmax_attention,
)

# -- accelerate#4177: the losses were right, the gradients were not


def windowed(p, x, size=6):
    at = jnp.arange(x.shape[1])
    ago = at[:, None] - at
    return softmax_attention(*qkv_of(p, x), (ago >= 0) & (ago < size)) @ p["out"]


@case("keys and values")
def accelerate_4177_windows() -> Case:
    """Layers with a sliding window and layers without, in turn."""

    def loss(params, ids):
        x = params["embed"][ids]
        for i, mix in enumerate([windowed, _t.causal]):
            p = jax.tree.map(lambda a, i=i: a[i], params["blocks"])
            x, _ = jax.checkpoint(_t.layer_of(mix, jax.nn.silu))(x, p)
        return next_token_loss(_t.norm(x, params["scale"]) @ params["embed"].T, ids)

    return Case(_t.transformer_params(**ATTENTION), loss, _t.tokens())


def unit(x):
    return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)


def gated_delta(p, x):
    """A short convolution, then a state of each head that forgets, and corrects what it reads."""
    rows, length, _ = x.shape
    padded = jnp.pad(x @ p["qkv"], ((0, 0), (2, 0), (0, 0)))
    qkv = sum(padded[:, i : i + length] * p["kernel"][i] for i in range(3))
    q, k, v = (heads_of(part) for part in jnp.split(jax.nn.silu(qkv), 3, -1))
    forget, write = jnp.split(x @ p["gates"], 2, -1)
    forget, write = jnp.exp(-jax.nn.softplus(forget)), jax.nn.sigmoid(write)

    def step(state, token):
        q, k, v, forget, write = token
        state = forget[..., None, None] * state
        error = v - jnp.einsum("bhde,bhd->bhe", state, k)
        state = state + jnp.einsum("bhd,bhe->bhde", k, write[..., None] * error)
        return state, jnp.einsum("bhde,bhd->bhe", state, q)

    by_token = [jnp.moveaxis(a, 1, 0) for a in (unit(q), unit(k), v, forget, write)]
    _, o = jax.lax.scan(step, jnp.zeros((rows, HEADS, DIM // HEADS, DIM // HEADS)), by_token)
    return jnp.moveaxis(o, 0, 1).reshape(x.shape) @ p["out"]


@case("a halo of 2 tokens; a state, from device to device; keys and values")
def accelerate_4177_linear() -> Case:
    """Gated DeltaNet's linear attention, and full attention after it: Qwen3-Next's layers."""

    def loss(params, ids):
        x = params["embed"][ids]
        for i, mix in enumerate([gated_delta, _t.causal]):
            p = jax.tree.map(lambda a, i=i: a[i], params["blocks"])
            x, _ = jax.checkpoint(_t.layer_of(mix, jax.nn.silu))(x, p)
        return next_token_loss(_t.norm(x, params["scale"]) @ params["embed"].T, ids)

    shapes = {"kernel": (3, 3 * DIM), "gates": (DIM, 2 * HEADS)}
    return Case(_t.transformer_params(**ATTENTION, **shapes), loss, _t.tokens())


# -- verl#2857: the loss of the response was another one


def response_loss(by_sequence):
    def loss(params, batch):
        x = hidden_states(params, params["embed"][batch["ids"]], _t.causal)
        logits = (x @ params["embed"].T)[:, :-1]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["ids"][:, 1:])
        mask = batch["response"][:, 1:]
        if by_sequence:
            return jnp.mean(jnp.sum(losses * mask, -1) / jnp.sum(mask, -1))
        return zerojax.mean(losses, where=mask)

    prompt = np.array([3, 20, 11, 22])[:, None]
    end = np.array([24, 23, 12, 24])[:, None]
    at = np.arange(TOKENS)
    batch = {"ids": _t.tokens(), "response": (at >= prompt) & (at < end)}
    assert batch["response"].shape == (ROWS, TOKENS)
    return Case(_t.transformer_params(**ATTENTION), loss, batch)


@case("keys and values")
def verl_2857_by_token() -> Case:
    return response_loss(False)


@case("keys and values")
def verl_2857_by_sequence() -> Case:
    return response_loss(True)
