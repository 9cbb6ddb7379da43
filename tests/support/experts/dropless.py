"""Experts that take every row that chooses them: rows are sorted by expert, and multiplied in
groups."""

import jax
import jax.numpy as jnp

from tests.support.experts import table as _e
from tests.support.experts.table import EXPERTS, HIDDEN, Case, attended, case, swiglu
from tests.support.sequences.table import DIM


def mixed(p, x, weight, chosen):
    """Sorts rows by expert; each takes part as often as it chooses experts."""
    flat, top = x.reshape(-1, x.shape[-1]), chosen.shape[-1]
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=p["w1"].shape[0])
    rows = flat[order // top]
    hidden = jax.nn.silu(jax.lax.ragged_dot(rows, p["w1"], sizes))
    hidden = hidden * jax.lax.ragged_dot(rows, p["w3"], sizes)
    y = jax.lax.ragged_dot(hidden, p["w2"], sizes)
    y = y[jnp.argsort(order)].reshape(*weight.shape, -1)
    return jnp.sum(y * weight[..., None].astype(y.dtype), axis=-2).reshape(x.shape)


def best(logits, top):
    """The softmax over those that are chosen."""
    values, chosen = jax.lax.top_k(logits, top)
    return jax.nn.softmax(values), chosen


# -- of published models


@case(r"/w\d")
def mixtral() -> Case:
    def mixture(p, x):
        return mixed(p, x, *best(x @ p["router"], 2))

    return _e.language_model(mixture, layer=attended, **swiglu())


@case(r"/w\d", close=2e-2)
def mixtral_bf16() -> Case:
    """The router stays in 32 bits."""

    def mixture(p, x):
        low = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)
        y = mixed(low, x.astype(jnp.bfloat16), *best(x @ p["router"], 2))
        return y.astype(jnp.float32)

    return _e.language_model(mixture, **swiglu())


@case("gate_up|down")
def qwen3() -> Case:
    """Many experts, two weights of one in one array, stacked layers, and a balancing loss over the
    device's rows."""
    experts, top = 16, 4

    def mixture(p, x):
        probs = jax.nn.softmax((x @ p["router"]).reshape(-1, experts))
        weight, chosen = jax.lax.top_k(probs, top)
        weight = weight / weight.sum(-1, keepdims=True)
        flat = chosen.ravel()
        order = jnp.argsort(flat, stable=True)
        sizes = jnp.bincount(flat, length=experts)
        rows = jnp.repeat(x.reshape(-1, DIM), top, axis=0)[order]
        gate, up = jnp.split(jax.lax.ragged_dot(rows, p["gate_up"], sizes), 2, -1)
        rows = jax.lax.ragged_dot(jax.nn.silu(gate) * up, p["down"], sizes)
        y = jnp.zeros_like(rows).at[order].set(rows).reshape(-1, top, DIM)
        share = jax.nn.one_hot(chosen, experts).sum(1).mean(0)
        balance = experts * jnp.sum(jax.lax.stop_gradient(share) * probs.mean(0))
        return jnp.einsum("tkd,tk->td", y, weight).reshape(x.shape), balance

    shapes = {"gate_up": (experts, DIM, 2 * HIDDEN), "down": (experts, HIDDEN, DIM)}
    shapes |= {"router": (DIM, experts)}
    return _e.language_model(mixture, layer=attended, scanned=jax.checkpoint, **shapes)


@case(r"/w\d")
def deepseek_v3() -> Case:
    """Experts in groups, of which a token takes the two best; a bias that has no gradient takes
    part in the choice; a shared expert."""
    experts, groups, top = 16, 4, 3

    def mixture(p, x):
        scores = jax.nn.sigmoid(x.reshape(-1, DIM) @ p["router"])
        biased = jax.lax.stop_gradient(scores + p["bias"])
        grouped = biased.reshape(-1, groups, experts // groups)
        _, best_groups = jax.lax.top_k(jax.lax.top_k(grouped, 2)[0].sum(-1), 2)
        allowed = jax.nn.one_hot(best_groups, groups).sum(-2)[..., None] > 0
        _, chosen = jax.lax.top_k(jnp.where(allowed, grouped, -jnp.inf).reshape(-1, experts), top)
        weight = jnp.take_along_axis(scores, chosen, axis=-1)
        weight = 2.5 * weight / (weight.sum(-1, keepdims=True) + 1e-20)
        shared = (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]
        return mixed(p, x, weight, chosen) + shared

    shared = {"gate": (DIM, HIDDEN), "up": (DIM, HIDDEN), "down": (HIDDEN, DIM)}
    return _e.language_model(mixture, **swiglu(experts), **shared, bias=(experts,))
